# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of a study: pure functions from requests to drawings.

They read and write no file. A figure names the device and how its numbers came
to be; its table and its words hold the same numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import drawing, selection
from experiments.drawing import Drawing
from experiments.figures import (
  acceptance,
  cells,
  rate,
  split,
  steps,
  timeline,
  tokens,
  ttft,
)
from experiments.selection import Trace

Record = Mapping[str, Any]


def draw(traces: Sequence[Trace], runs: Sequence[Record] = ()) -> list[Drawing]:
  """Draws every figure for which there are data.

  Args:
    traces: of one study on one model. In a sweep over rates or round trips,
      all figures but the one over the rate take one setting;
      see `selection.setting`.
    runs: details of `acceptance` events.
  """
  styles = drawing.styles_of(traces)
  alike = selection.setting(traces)
  found: list[Drawing | None] = []
  with drawing.look():
    found.append(split.draw(alike))
    found += timeline.draw(alike)
    found.append(steps.draw(alike))
    found.append(ttft.draw(alike, styles))
    found.append(tokens.draw(alike, styles))
    found.append(acceptance.draw(traces, runs, styles))
    found.append(rate.draw(traces, styles))
  return [one for one in found if one is not None]


def draw_rows(
  rows: Sequence[cells.Row], heatmaps: Sequence[str]
) -> list[Drawing]:
  """Draws every figure of an ablation for which there are data.

  Args:
    rows: of `cell_rows.form`.
    heatmaps: figures of rows that are drawn over every two fields.
  """
  traces = [*map(Trace, rows)]
  with drawing.look():
    return [
      *cells.draw_rows(rows, traces),
      *cells.draw_rates(rows, traces),
      *cells.draw_pareto(rows, traces),
      *cells.draw_heatmaps(rows, traces, heatmaps),
    ]
