# SPDX-License-Identifier: Apache-2.0
"""Draws the acceptance of the equivalence study, by position in a round."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments import drawing, results
from experiments.drawing import Drawing
from experiments.figures import acceptance

Record = Mapping[str, Any]


def draw(records: Sequence[Record]) -> Iterator[Drawing]:
  """Draws rounds of fixed lengths, and those in which the Residual lands.

  Args:
    records: of any study; those of the last settings are taken.
  """
  details = [
    record['detail']
    for record in records
    if record.get('name') == results.EQUIVALENCE
  ]
  runs = [
    run
    for detail in details
    if detail['version'] == details[-1]['version']
    for run in detail.get('rounds') or ()
  ]
  fixed = [run for run in runs if run['label'].startswith('γ')]
  landing = [run for run in runs if not run['label'].startswith('γ')]
  if drawn := _draw(fixed):
    yield drawn
  if drawn := _draw(landing):
    yield dataclasses.replace(
      drawn,
      name='upgrade',
      title='Drafts that sharpen: acceptance by position in the round',
      caption='Rounds of 15 drafts on the Anchor alone, and such in which '
      'draft i reads i of 15 parts of the layers with the Residual. '
      + drawn.caption,
    )


def _draw(runs: Sequence[Record]) -> Drawing | None:
  labels = [*dict.fromkeys(run['label'] for run in runs)]
  return acceptance.draw((), runs, drawing.styles_for(labels))
