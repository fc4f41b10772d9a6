# SPDX-License-Identifier: Apache-2.0
"""Draws the time to the first token of every scheme, beside its bound."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import drawing, selection, summaries
from experiments.drawing import Drawing, Style, Table
from experiments.selection import Trace

Record = Mapping[str, Any]

_POINTS_UP_TO = 12
_CODEBOOK = 'codebook, bound alone'  # no request: what it could not be under


@dataclasses.dataclass(frozen=True)
class _Bar:
  """One bar: values with T_p levelled, and the median bound."""

  scheme: str
  what: str  # '' where provisional and committed are the same; or _CODEBOOK
  values: list[float]
  bound: float | None = None
  ratio: float | None = None  # the median of TTFT over bound, pair by pair
  measured: float | None = None  # the median of values as they were measured


def draw(
  traces: Sequence[Trace], styles: Mapping[str, Style]
) -> Drawing | None:
  """Draws TTFT per scheme, grouped by mode, with bounds and intervals."""
  panels = {}
  for mode in selection.modes(traces):
    chosen = [t for t in traces if t['mode'] == mode]
    prefill_s = selection.median_prefill_s(chosen)
    bars = _bars(chosen)
    if bars and prefill_s is not None:
      panels[mode] = prefill_s, bars
  if not panels:
    return None
  rows = [len(bars) for _, bars in panels.values()]
  height = sum(rows) * 0.24 + 0.5 * len(rows) + 0.35
  figure = Figure((drawing.WIDTH_IN, height), layout='constrained')
  grid = figure.subplots(
    len(panels),
    1,
    sharex=True,
    squeeze=False,
    gridspec_kw={'height_ratios': [n + 0.8 for n in rows]},
  )
  right = max(
    max(*bar.values, bar.bound or 0.0)
    for _, bars in panels.values()
    for bar in bars
  )
  table: list[tuple[str, ...]] = []
  for axes, (mode, (prefill_s, bars)) in zip(
    grid[:, 0], panels.items(), strict=True
  ):
    axes.set_xlim(0, right * 1.26)
    _draw_bars(axes, bars, prefill_s, styles)
    axes.set_title(mode, loc='left', weight='bold', pad=13)
    for bar in bars:
      low, high = summaries.interval(bar.values)
      table.append(
        (
          mode,
          bar.scheme,
          bar.what or 'provisional = committed',
          drawing.number(
            None if bar.what == _CODEBOOK else statistics.median(bar.values)
          ),
          drawing.between(low, high),
          drawing.number(bar.bound),
          drawing.number(bar.ratio),
          str(len(bar.values)),
          drawing.number(bar.measured),
        )
      )
  grid[-1, 0].set_xlabel('time to first token (TTFT), s')
  counts = sorted({len(b.values) for _, bars in panels.values() for b in bars})
  drawing.foot(
    figure,
    traces,
    f'n = {drawing.span(counts)} requests a bar, circles, each with the median '
    'prefill of its prompt; a bar is their median'
    + (
      ', whiskers its 90 % interval'
      if max(counts, default=0) >= drawing.INTERVAL_FROM
      else ''
    ),
  )
  return Drawing(
    'ttft',
    'Time to first token',
    figure,
    'Bars are medians. Grey is prefill and split, a median over prompts. Each '
    'request has the prefill that is the median of its prompt, and its own '
    'exposed time: the noise of prefill, which is the same work for every '
    'scheme, is taken out. Black ticks are '
    f'bounds, circles single requests, and from n = {drawing.INTERVAL_FROM} on '
    'whiskers are 90 % bootstrap intervals of the median. Baselines are in '
    'their faster form of decoding.'
    + (
      drawing.CODEBOOK
      if any(
        bar.what == _CODEBOOK for _, bars in panels.values() for bar in bars
      )
      else ''
    ),
    'Bars of the time to first token. '
    + '; '.join(
      f'{row[0]} {row[1]} {row[2]}: {row[3]} s, bound {row[5]} s'
      for row in table
    )
    + '.',
    Table(
      (
        'mode',
        'scheme',
        'which',
        'median TTFT, s',
        '90 % interval, s',
        'median bound, s',
        'median TTFT / bound',
        'n',
        'median as measured, s',
      ),
      tuple(table),
    ),
  )


def _bars(traces: Sequence[Trace]) -> list[_Bar]:
  bars, prefill_s = [], selection.prefill_medians(traces)
  of_records = summaries.prefill_medians(t.record for t in traces)
  for name in selection.ordered(
    {t['scheme'] for t in traces}, selection.SCHEMES
  ):
    chosen = selection.fastest(traces, name)
    bounds = selection.levelled(chosen, 'bound_ttft_s', prefill_s)
    bound = statistics.median(bounds) if bounds else None
    ratio = summaries.ttft_over_bound([t.record for t in chosen], of_records)
    shown = selection.levelled(chosen, 'ttft_provisional_s', prefill_s)
    speculative = any(t.is_speculative for t in chosen)
    what = 'provisional' if speculative else ''
    if shown:
      measured = _median(chosen, 'ttft_provisional_s')
      bars.append(_Bar(name, what, shown, bound, ratio, measured))
    codebook = selection.levelled(chosen, 'bound_codebook_s', prefill_s)
    if codebook:
      bound = statistics.median(codebook)
      bars.append(_Bar(name, _CODEBOOK, codebook, bound))
    committed = selection.levelled(chosen, 'ttft_committed_s', prefill_s)
    if speculative and committed:
      measured = _median(chosen, 'ttft_committed_s')
      bars.append(_Bar(name, 'committed', committed, measured=measured))
  return bars


def _median(traces: Sequence[Trace], field: str) -> float:
  return statistics.median(t[field] for t in traces if t[field] is not None)


def _draw_bars(
  axes: Axes,
  bars: Sequence[_Bar],
  prefill_s: float,
  styles: Mapping[str, Style],
) -> None:
  halo = [patheffects.withStroke(linewidth=2.2, foreground='white')]
  for i, bar in enumerate(bars):
    style = styles[bar.scheme]
    median = statistics.median(bar.values)
    start = min(prefill_s, median)
    axes.barh(i, start, height=0.66, color='#d9d9d9', zorder=1)
    light = bar.what in ('committed', _CODEBOOK)
    axes.barh(
      i,
      median - start,
      left=start,
      height=0.66,
      zorder=1,
      lw=0.7,
      facecolor=drawing.tint(style.color, 0.75 if light else 0.15),
      edgecolor=style.color if light else drawing.INK,
      ls=(0, (3, 1.5)) if light else '-',
    )
    if bar.bound is not None:
      axes.plot(
        [bar.bound] * 2,
        [i - 0.43, i + 0.43],
        color='black',
        lw=1.8,
        path_effects=[
          patheffects.withStroke(linewidth=3.4, foreground='white')
        ],
        zorder=4,
      )
    low, high = summaries.interval(bar.values)
    end = max(median, bar.bound or 0.0)
    if low is not None and high is not None:
      axes.errorbar(
        median,
        i,
        xerr=[[median - low], [high - median]],
        color='black',
        lw=0.8,
        capsize=2.5,
        capthick=0.8,
        zorder=5,
      )
      end = max(end, high)
    if 1 < len(bar.values) <= _POINTS_UP_TO:
      ys = i + np.linspace(-0.18, 0.18, len(bar.values))
      axes.plot(
        bar.values,
        ys,
        'o',
        ms=2.6,
        mfc='white',
        mec='black',
        mew=0.5,
        zorder=6,
      )
      end = max(end, *bar.values)
    text = f'{drawing.short(median)} s'
    if bar.ratio is not None:
      text += f'   {bar.ratio:.3f} × bound'
    axes.annotate(
      text,
      (end, i),
      (5, 0),
      textcoords='offset points',
      va='center',
      fontsize=6.5,
      path_effects=halo,
      zorder=7,
    )
  names = [f'{b.scheme}, {b.what}' if b.what else b.scheme for b in bars]
  axes.set_yticks(range(len(bars)), names)
  axes.set_ylim(len(bars) - 0.4, -0.6)
  axes.tick_params(axis='y', length=0)
  axes.axvline(prefill_s, color=drawing.INK, lw=0.6, ls=(0, (2, 2)), zorder=3)
  axes.annotate(
    f'prefill and split, {drawing.short(prefill_s)} s',
    (prefill_s, 1.0),
    (-3, 1.5),
    xycoords=('data', 'axes fraction'),
    textcoords='offset points',
    ha='left',
    va='bottom',
    fontsize=6,
    color=drawing.QUIET,
  )
  marked = next(
    (i for i, bar in enumerate(bars) if bar.bound is not None), None
  )
  if marked == 0:
    axes.annotate(
      'bound',
      (bars[0].bound, 0),
      (0, 8.5),
      textcoords='offset points',
      ha='center',
      va='bottom',
      fontsize=6,
      color=drawing.INK,
    )
