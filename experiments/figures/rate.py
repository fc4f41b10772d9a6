# SPDX-License-Identifier: Apache-2.0
"""Draws the time to the first token over the rate of the link."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import lines, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import drawing, selection, summaries
from experiments.drawing import Drawing, Style, Table
from experiments.selection import Trace

Record = Mapping[str, Any]

_CODEBOOK = 'bf16, codebook'  # a bound alone: no request runs with it
_CODEBOOK_STYLE = Style(drawing.INK, (0, (1, 2.5)), '')
# More schemes than this have a legend, and marks side by side in the order of
# it; fewer are named where their lines begin.
_NAMED = 6
_APART = 0.011  # of the axis


def draw(
  traces: Sequence[Trace], styles: Mapping[str, Style]
) -> Drawing | None:
  """Draws TTFT over the link's rate, bounds as lines; None without a sweep."""
  trips = [t['rtt_ms'] for t in traces]
  trip = max(dict.fromkeys(trips), key=trips.count) if trips else None
  traces = [t for t in traces if t['rtt_ms'] == trip and t['link_gbps']]
  if not selection.is_sweep(traces):
    return None
  styles = {**styles, _CODEBOOK: _CODEBOOK_STYLE}
  panels = {}
  for mode in selection.modes(traces):
    chosen = [t for t in traces if t['mode'] == mode]
    prefill_s = selection.median_prefill_s(chosen)
    points = _rate_points(chosen)
    if points and prefill_s is not None:
      panels[mode] = prefill_s, points
  if not panels:
    return None
  everything = [point for _, points in panels.values() for point in points]
  names = list(dict.fromkeys(point.scheme for point in everything))
  height = 2.9 if len(names) <= _NAMED else 3.7
  figure = Figure((drawing.WIDTH_IN, height), layout='constrained')
  grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
  for axes, (mode, (prefill_s, points)) in zip(
    grid, panels.items(), strict=True
  ):
    _draw_points(axes, points, prefill_s, styles)
    axes.set_title(mode, loc='left', weight='bold')
  if len(names) > _NAMED:
    figure.legend(
      handles=[
        lines.Line2D(
          [],
          [],
          color=styles[name].color,
          ls=styles[name].line,
          lw=styles[name].width * 0.8,
          marker=styles[name].marker,
          ms=4.2,
          mfc=_face(name, names, styles),
          mec=drawing.shade(styles[name].color),
          mew=0.9,
          label=name,
        )
        for name in names
      ],
      loc='outside upper center',
      ncols=5,
      frameon=False,
      handlelength=3.2,
    )
  values = [point.shown for point in everything]
  grid[0].set_ylabel('time to first token, s')
  if max(values) > 3 * min(values):
    grid[0].set_yscale('log')
    grid[0].set_ylim(0.85 * min(prefill_s for prefill_s, _ in panels.values()))
    _plain_ticks(grid[0].yaxis)
  else:
    grid[0].set_ylim(0, None)
  counts = sorted({len(p.values) for p in everything if p.values})
  drawing.foot(
    figure,
    traces,
    f'n = {drawing.span(counts)} requests a mark, their median; lines are '
    'bounds'
    + (
      ', whiskers 90 % intervals'
      if max(counts, default=0) >= drawing.INTERVAL_FROM
      else ''
    ),
    rates=False,
  )
  rates = [*map(drawing.rate, sorted({point.gbps for point in everything}))]
  cells: dict[tuple[str, str], dict[str, str]] = {}
  for mode, (_, points) in panels.items():
    for point in points:
      at = cells.setdefault((mode, point.scheme), dict.fromkeys(rates, '–'))
      at[drawing.rate(point.gbps)] = _words(point)
  return Drawing(
    'ttft_over_rate',
    'Time to first token over the rate of the link',
    figure,
    'Marks are medians of the first provisional token, lines are bounds; '
    + (
      'marks of one rate stand side by side in the order of the legend'
      if len(names) > _NAMED
      else 'marks of schemes that are alike lie in each other'
    )
    + '. Prefill is levelled as in '
    'the bars. Whiskers are 90 % bootstrap intervals from n = '
    f'{drawing.INTERVAL_FROM} on.'
    + (
      drawing.CODEBOOK
      if any(point.scheme == _CODEBOOK for point in everything)
      else ''
    ),
    'Time to first token over rate, s. '
    + '; '.join(
      f'{" ".join(of)} at {rate}: {words}'
      for of, by_rate in cells.items()
      for rate, words in by_rate.items()
    )
    + '.',
    Table(
      ('mode', 'scheme', *(f'median at {rate}, s' for rate in rates)),
      tuple((*of, *by_rate.values()) for of, by_rate in cells.items()),
    ),
  )


@dataclasses.dataclass(frozen=True)
class _Point:
  """TTFT of a scheme at a rate, T_p levelled, with the median bound."""

  scheme: str
  gbps: float
  values: list[float]  # none where there is a bound alone
  bound: float | None

  @property
  def median(self) -> float | None:
    return statistics.median(self.values) if self.values else None

  @property
  def shown(self) -> float:
    """What stands for it where one number must."""
    return next(x for x in (self.median, self.bound) if x is not None)


def _words(point: _Point) -> str:
  """Returns a point as the table has it: median, interval, and bound."""
  bound = f'bound {drawing.number(point.bound)}'
  if point.median is None:
    return bound
  words = drawing.number(point.median)
  if len(point.values) >= drawing.INTERVAL_FROM:
    words += f' ({drawing.between(*summaries.interval(point.values))})'
  return f'{words}, {bound}'


def _rate_points(traces: Sequence[Trace]) -> list[_Point]:
  points, prefill_s = [], selection.prefill_medians(traces)
  for name in selection.ordered(
    {t['scheme'] for t in traces}, selection.SCHEMES
  ):
    mine = [t for t in traces if t['scheme'] == name]
    for gbps in sorted({t['link_gbps'] for t in mine}):
      at = selection.fastest([t for t in mine if t['link_gbps'] == gbps], name)
      values = selection.levelled(at, 'ttft_provisional_s', prefill_s)
      bounds = selection.levelled(at, 'bound_ttft_s', prefill_s)
      bound = statistics.median(bounds) if bounds else None
      if values:
        points.append(_Point(name, gbps, values, bound))
      codebook = selection.levelled(at, 'bound_codebook_s', prefill_s)
      if codebook:
        bound = statistics.median(codebook)
        points.append(_Point(_CODEBOOK, gbps, [], bound))
  return points


def _draw_points(
  axes: Axes,
  points: Sequence[_Point],
  prefill_s: float,
  styles: Mapping[str, Style],
) -> None:
  fastest = max(point.gbps for point in points)
  unit, factor = drawing.unit_of(fastest)
  rates = sorted({point.gbps * factor for point in points})
  spread = rates[-1] / rates[0]
  names = list(dict.fromkeys(point.scheme for point in points))
  starts: list[tuple[float, float, str]] = []
  for i, name in enumerate(names):
    style = styles[name]
    mine = [point for point in points if point.scheme == name]
    line = [(p.gbps * factor, p.bound) for p in mine if p.bound is not None]
    if line:
      axes.plot(
        *zip(*line, strict=True),
        color=style.color,
        ls=style.line,
        lw=style.width * 0.8,
      )
    if len(names) > _NAMED:
      size, aside = 4.2, spread ** (_APART * (i - len(names) / 2))
    else:  # marks at one place lie in each other
      size, aside = max(3.2, 7.4 - 0.9 * i), 1.0
    for point in mine:
      if point.median is None:
        continue
      low, high = summaries.interval(point.values)
      x = point.gbps * factor * aside
      if low is not None and high is not None:
        axes.plot([x, x], [low, high], color=style.color, lw=0.9)
      axes.plot(
        x,
        point.median,
        style.marker,
        ms=size,
        mfc=_face(name, names, styles),
        mec=drawing.shade(style.color),
        mew=0.9,
        zorder=4 + i,
        clip_on=False,
      )
    starts.append((mine[0].gbps * factor, mine[0].shown, name))
  axes.set_xscale('log')
  if len(rates) <= 6:
    axes.set_xticks(rates, [f'{rate:.3g}' for rate in rates])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
  else:
    _plain_ticks(axes.xaxis)
  left, right = (0.48, 0.05) if len(names) <= _NAMED else (0.12, 0.12)
  axes.set_xlim(rates[0] / spread**left, rates[-1] * spread**right)
  axes.set_xlabel(f'rate of the link, {unit}')
  drawing.prefill_line(axes, prefill_s)
  if len(names) <= _NAMED:
    _label_starts(axes, starts, styles)


def _face(name: str, names: Sequence[str], styles: Mapping[str, Style]) -> str:
  """Returns what fills a mark: the last scheme's own colour, else white."""
  return styles[name].color if name == names[-1] else 'white'


def _plain_ticks(axis: Any) -> None:
  """Labels a log axis at 1, 2, 3 and 5, without powers."""
  axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
  axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f'{value:g}'))
  axis.set_minor_locator(ticker.NullLocator())


def _label_starts(
  axes: Axes,
  starts: Sequence[tuple[float, float, str]],
  styles: Mapping[str, Style],
) -> None:
  """Names schemes at their lowest rate, those that are alike together."""
  groups: list[list[tuple[float, float, str]]] = []
  for start in sorted(starts, key=lambda s: s[1]):
    if groups and start[1] < 1.06 * groups[-1][0][1]:
      groups[-1].append(start)
    else:
      groups.append([start])
  for group in groups:
    x, value, name = group[-1]
    only = len(group) == 1
    axes.annotate(
      ', '.join(name for _, _, name in group),
      (x, value),
      (-7, 0),
      textcoords='offset points',
      ha='right',
      va='center',
      fontsize=6.5,
      color=drawing.shade(styles[name].color) if only else drawing.INK,
    )
