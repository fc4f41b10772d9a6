# SPDX-License-Identifier: Apache-2.0
"""Draws shown and committed tokens over time."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import patheffects, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import drawing, selection
from experiments.drawing import Drawing, Style, Table
from experiments.selection import Trace

Record = Mapping[str, Any]


def draw(
  traces: Sequence[Trace], styles: Mapping[str, Style]
) -> Drawing | None:
  """Draws committed tokens over time, and provisional ones lighter."""
  panels = {}
  for mode in selection.modes(traces):
    curves = []
    for name in selection.ordered(
      {t['scheme'] for t in traces}, selection.SCHEMES
    ):
      for form in ('verify', 'plain'):
        chosen = [
          t
          for t in traces
          if t['mode'] == mode
          and t['scheme'] == name
          and (t['form'] or 'verify') == form
          and t['commit_times_s']
          and t.prefill_end_s is not None
        ]
        if chosen:
          curves.append((name, form, _median_counts(chosen), len(chosen)))
    if curves:
      panels[mode] = curves
  if not panels:
    return None
  figure = Figure(
    (drawing.WIDTH_IN, 2.75 * len(panels) + 0.2), layout='constrained'
  )
  grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
  lines = [line for curves in panels.values() for _, _, line, _ in curves]
  left = min(0.0, *(float(x[0]) for x, _, _ in lines))
  right = max(1e-3, *(float(x[-1]) for x, _, _ in lines))
  table = []
  for axes, (mode, curves) in zip(grid[:, 0], panels.items(), strict=True):
    axes.set_title(mode, loc='left', weight='bold', pad=26)
    ends = []
    for name, form, (x, committed, shown), n in curves:
      style = styles[name]
      plain = form == 'plain'
      done = int(np.argmax(committed == committed[-1]))
      x, committed, shown = (a[: done + 1] for a in (x, committed, shown))
      if np.any(shown > committed):
        axes.fill_between(
          x,
          committed,
          shown,
          step='post',
          zorder=1,
          lw=0,
          facecolor=drawing.tint(style.color, 0.82),
        )
        axes.step(
          x,
          shown,
          where='post',
          color=drawing.tint(style.color, 0.35),
          lw=0.9,
          zorder=2,
        )
      axes.step(
        x,
        committed,
        where='post',
        color=style.color,
        ls=style.line,
        lw=0.7 if plain else style.width,
        zorder=3,
      )
      axes.plot(
        x[done],
        committed[done],
        style.marker,
        color=style.color,
        ms=3.2,
        mfc='white' if plain else style.color,
        mew=0.7,
        zorder=4,
        clip_on=False,
      )
      label = f'{name}, one-row' if plain else name
      ends.append((float(x[done]), float(committed[-1]), label, style))
      table.append(
        (
          mode,
          name,
          'one-row decode' if plain else 'verify program',
          str(int(committed[-1])),
          drawing.number(float(x[done])),
          str(n),
        )
      )
    top = max(y for _, y, _, _ in ends)
    axes.set(xlim=(left - 0.02 * right, right * 1.04), ylim=(0, top * 1.03))
    axes.yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.set_ylabel('tokens')
    _label_ends(axes, ends, top)
    _label_provisional(axes, curves, styles)
  grid[-1, 0].set_xlabel('time since the end of prefill, s')
  counts = sorted({c[3] for curves in panels.values() for c in curves})
  drawing.foot(figure, traces, f'n = {drawing.span(counts)} requests a line')
  return Drawing(
    'tokens',
    'Committed tokens over time',
    figure,
    'Lines count committed tokens, medians over requests at every moment; '
    'the lighter line and the area under it add provisional ones, and fall '
    'where tokens are taken back. Markers show the last token. Thin lines '
    'are baselines in plain one-row decode; all others run in the verify '
    'program.',
    'Steps of committed tokens over time. '
    + '; '.join(
      f'{row[0]} {row[1]} ({row[2]}) has {row[3]} tokens after {row[4]} s'
      for row in table
    )
    + '.',
    Table(
      (
        'mode',
        'scheme',
        'decoding',
        'committed tokens',
        'last one since prefill end, s',
        'n',
      ),
      tuple(table),
    ),
  )


def _median_counts(
  traces: Sequence[Trace],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns times since T_p and median counts, committed and shown."""
  parts = []
  for trace in traces:
    times, committed, shown = selection.counts(trace)
    # Before token 1 there is nothing to be seen.
    parts.append(
      (
        np.asarray(times[1:]) - (trace.prefill_end_s or 0.0),
        np.asarray(committed),
        np.asarray(shown),
      )
    )
  x = np.unique(np.concatenate([times for times, _, _ in parts]))

  def median(which: int) -> np.ndarray:
    rows = [
      part[which][np.searchsorted(part[0], x, side='right')] for part in parts
    ]
    ordered = np.sort(np.stack(rows), axis=0)
    return ordered[(len(rows) - 1) // 2]

  return x, median(1), median(2)


def _label_ends(
  axes: Axes, ends: Sequence[tuple[float, float, str, Style]], top: float
) -> None:
  """Writes names over the ends of lines, aslant and not over each other."""
  low, high = axes.get_xlim()
  gap = 12.0 / (6.4 * 72) * (high - low)
  at = -math.inf
  for x, y, label, style in sorted(ends, key=lambda end: end[0]):
    at = max(at + gap, x)
    axes.annotate(
      label,
      (x, y),
      (at, top * 1.07),
      textcoords='data',
      rotation=35,
      ha='left',
      va='bottom',
      fontsize=6.3,
      color=drawing.shade(style.color),
      rotation_mode='anchor',
      annotation_clip=False,
      arrowprops={
        'arrowstyle': '-',
        'lw': 0.4,
        'color': drawing.QUIET,
        'shrinkA': 0,
        'shrinkB': 2,
      },
    )


def _label_provisional(
  axes: Axes, curves: Sequence[Any], styles: Mapping[str, Style]
) -> None:
  """Names the largest provisional area, in its lower part."""
  largest, found = 0.0, None
  for name, _, (x, committed, shown), _ in curves:
    area = float((np.diff(x) * (shown - committed)[:-1]).sum())
    if area > largest:
      largest, found = area, (name, x, committed, shown)
  if found is None:
    return
  name, x, committed, shown = found
  pending = shown - committed
  first = int(np.argmax(pending > 0))
  peak = int(np.argmax(pending))
  low, (left, right) = committed[first], axes.get_xlim()
  if x[peak] - x[first] < 0.1 * (right - left):
    return  # it has no room; the caption tells
  axes.annotate(
    f'{name}, provisional',
    (x[peak], low + 0.09 * (shown[peak] - low)),
    (-4, 0),
    textcoords='offset points',
    ha='right',
    va='center',
    fontsize=6.3,
    color=drawing.shade(styles[name].color),
    path_effects=[
      patheffects.withStroke(
        linewidth=2.5, foreground=drawing.tint(styles[name].color, 0.82)
      )
    ],
    zorder=5,
  )
