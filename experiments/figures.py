# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of a study: pure functions from requests to drawings.

It reads and writes no file. A figure names the device and how its numbers came
to be; its table and its words hold the same numbers.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import patheffects, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import drawing, selection, summaries, timeline_figure
from experiments.drawing import Drawing, Style, Table
from experiments.selection import Trace

Record = Mapping[str, Any]

_CONFIDENCE = 0.9
_INTERVAL_FROM = 3  # fewer measurements are shown as points alone
_POINTS_UP_TO = 12


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
    found += timeline_figure.timelines(alike)
    found.append(ttft(alike, styles))
    found.append(tokens_over_time(alike, styles))
    found.append(acceptance(traces, runs, styles))
    found.append(ttft_over_rate(traces, styles))
  return [one for one in found if one is not None]


@dataclasses.dataclass(frozen=True)
class _Bar:
  """One bar: values with T_p levelled, and the median bound."""

  scheme: str
  what: str  # '' where provisional and committed are the same
  values: list[float]
  bound: float | None = None
  ratio: float | None = None  # the median of TTFT over bound, pair by pair


def ttft(
  traces: Sequence[Trace], styles: Mapping[str, Style]
) -> Drawing | None:
  """Draws TTFT per scheme, grouped by mode, with bounds and intervals."""
  panels = {}
  for mode in selection.modes(traces):
    chosen = [t for t in traces if t['mode'] == mode]
    prefill_s = selection.median_prefill_s(chosen)
    bars = _bars(chosen, prefill_s)
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
          drawing.number(statistics.median(bar.values)),
          drawing.between(low, high),
          drawing.number(bar.bound),
          drawing.number(bar.ratio),
          str(len(bar.values)),
        )
      )
  grid[-1, 0].set_xlabel('time to first token (TTFT), s')
  counts = sorted({len(b.values) for _, bars in panels.values() for b in bars})
  drawing.foot(figure, traces, f'n = {drawing.span(counts)} requests a bar')
  return Drawing(
    'ttft',
    'Time to first token',
    figure,
    'Bars are medians. Grey is prefill and split, the median of all requests '
    'of the mode (each request keeps its own exposed time: the noise of '
    'prefill, which is the same work for all, is taken out). Black ticks are '
    f'bounds, circles single requests, and from n = {_INTERVAL_FROM} on '
    'whiskers are 90 % bootstrap intervals of the median. Baselines are in '
    'their faster form of decoding.',
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
      ),
      tuple(table),
    ),
  )


def _bars(traces: Sequence[Trace], prefill_s: float | None) -> list[_Bar]:
  bars = []
  for name in selection.ordered(
    {t['scheme'] for t in traces}, selection.SCHEMES
  ):
    chosen = selection.fastest(traces, name)
    bounds = selection.levelled(chosen, 'bound_ttft_s', prefill_s)
    bound = statistics.median(bounds) if bounds else None
    ratio = summaries.ttft_over_bound([t.record for t in chosen], prefill_s)
    shown = selection.levelled(chosen, 'ttft_provisional_s', prefill_s)
    speculative = any(t.is_speculative for t in chosen)
    what = 'provisional' if speculative else ''
    if shown:
      bars.append(_Bar(name, what, shown, bound, ratio))
    committed = selection.levelled(chosen, 'ttft_committed_s', prefill_s)
    if speculative and committed:
      bars.append(_Bar(name, 'committed', committed))
  return bars


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
    light = bar.what == 'committed'
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


def tokens_over_time(
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


@dataclasses.dataclass(frozen=True)
class _Rounds:
  """(drafted, accepted) of the rounds of one line, by prompt."""

  scheme: str
  label: str
  by_prompt: dict[str, list[tuple[int, int]]]

  def at(self, position: int, prompt: str | None = None) -> tuple[int, int]:
    """Returns how many drafts at a position were accepted, and were made."""
    rounds = [
      r
      for name, mine in self.by_prompt.items()
      if prompt in (None, name)
      for r in mine
    ]
    made = sum(drafted >= position for drafted, _ in rounds)
    return sum(accepted >= position for _, accepted in rounds), made


def _rounds(traces: Sequence[Trace], runs: Sequence[Record]) -> list[_Rounds]:
  """Returns what to draw: runs of a fixed draft length, else all requests."""
  lines: dict[Any, _Rounds] = {}
  for run in runs:
    drafts = run.get('draft_tokens')
    full = [(d, a) for d, a in run.get('rounds') or () if d == drafts]
    if full:
      label = f'lynx, γ = {drafts}'
      line = lines.setdefault(drafts, _Rounds('lynx', label, {}))
      line.by_prompt.setdefault(str(run.get('prompt')), []).extend(full)
  if lines:
    return list(lines.values())
  seen = set()
  for trace in traces:
    name, prompt = trace['scheme'], trace['prompt']
    rounds = [(d, a) for d, a in trace['rounds'] or () if d]
    # A greedy request that is repeated is no second experiment.
    key = name, prompt, tuple(rounds)
    if rounds and key not in seen:
      seen.add(key)
      line = lines.setdefault(name, _Rounds(name, name, {}))
      line.by_prompt.setdefault(str(prompt), []).extend(rounds)
  return [lines[name] for name in selection.ordered(lines, selection.SCHEMES)]


def acceptance(
  traces: Sequence[Trace],
  runs: Sequence[Record],
  styles: Mapping[str, Style],
) -> Drawing | None:
  """Draws accepted over drafted by the position in the round.

  Args:
    traces: requests, for devices and, without runs, for rounds.
    runs: details of `acceptance` events.
    styles: by scheme.
  """
  lines = _rounds(traces, runs)
  if not lines:
    return None
  longest = max(d for li in lines for r in li.by_prompt.values() for d, _ in r)
  figure = Figure((drawing.WIDTH_IN, 2.6), layout='constrained')
  axes = figure.subplots()
  table: list[tuple[str, ...]] = []
  lowest = 1.0
  for i, line in enumerate(lines):
    style = styles.get(line.scheme) or drawing.style_of(line.scheme)
    if len(line.by_prompt) > 1:
      lowest = min(lowest, _draw_prompts(axes, line, longest))
    shift = (i - (len(lines) - 1) / 2) * min(0.22, 0.8 / len(lines))
    row = 3 + 7 * (len(lines) - 1 - i)
    for position in range(1, longest + 1):
      hits, n = line.at(position)
      if not n:
        continue
      low, high = wilson(hits, n)
      lowest = min(lowest, low)
      x = position + shift
      axes.plot([x, x], [low, high], color=style.color, lw=1.4, zorder=3)
      axes.plot(
        x,
        hits / n,
        style.marker,
        color=style.color,
        mec=drawing.INK,
        mew=0.5,
        ms=4.8,
        zorder=4,
        label=line.label if position == 1 else None,
      )
      axes.annotate(
        str(n),
        (x, 0),
        (0, row),
        xycoords=('data', 'axes fraction'),
        textcoords='offset points',
        ha='center',
        fontsize=5.6,
        color=drawing.shade(style.color),
      )
      table.append(
        (
          line.label,
          str(position),
          drawing.number(hits / n),
          drawing.between(low, high),
          str(n),
        )
      )
    axes.annotate(
      f'n, {line.label}',
      (1.0, 0),
      (3, row),
      xycoords='axes fraction',
      textcoords='offset points',
      fontsize=5.8,
      color=drawing.shade(style.color),
    )
  step = 0.1 if lowest > 0.45 else 0.2
  bottom = max(0.0, math.floor(lowest / step) * step)
  # Room below for the counts.
  room = (1.0 - bottom) * (0.05 + 0.06 * len(lines))
  axes.set(ylim=(bottom - room, 1.02), xlim=(0.4, longest + 0.6))
  axes.set_yticks(np.arange(round((1.0 - bottom) / step) + 1) * step + bottom)
  axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
  axes.xaxis.set_major_locator(ticker.MaxNLocator(16, integer=True))
  axes.set_xlabel('position of the draft in its round')
  axes.set_ylabel('accepted / drafted')
  axes.legend(
    loc='lower left',
    bbox_to_anchor=(0.0, 1.0),
    ncols=4,
    frameon=False,
    handletextpad=0.2,
    borderaxespad=0.2,
  )
  prompts = {prompt for line in lines for prompt in line.by_prompt}
  drawing.foot(
    figure,
    traces,
    f'n = rounds, under every mark; prompts: {", ".join(sorted(prompts))}',
    rates=False,
  )
  fixed = ' Only full rounds of γ drafts.' if runs else ''
  return Drawing(
    'acceptance',
    'Acceptance by position in the round',
    figure,
    'How many of the drafts at a position were accepted, which needs all '
    f'before it to be accepted; bonus tokens are not counted.{fixed} n is the '
    'number of rounds that drafted so far. Whiskers are 90 % Wilson intervals '
    'with rounds taken as independent; thin lines are single prompts. '
    'Requests with the same rounds on the same prompt count once.',
    'Acceptance by position. '
    + '; '.join(
      f'{row[0]} at {row[1]}: {row[2]}, n = {row[4]}' for row in table
    )
    + '.',
    Table(
      (
        'scheme',
        'position',
        'accepted / drafted',
        '90 % interval',
        'rounds, n',
      ),
      tuple(table),
    ),
  )


def _draw_prompts(axes: Axes, line: _Rounds, longest: int) -> float:
  """Draws a thin line a prompt, names the worst; returns the lowest value."""
  ends = []
  for prompt in line.by_prompt:
    values = [
      (position, hits / n)
      for position in range(1, longest + 1)
      for hits, n in [line.at(position, prompt)]
      if n
    ]
    axes.plot(*zip(*values, strict=True), color='#9a9a9a', lw=0.6, zorder=1)
    ends.append((min(value for _, value in values), prompt, values[-1]))
  lowest, prompt, (x, y) = min(ends)
  axes.annotate(
    f'worst: {prompt}',
    (x, y),
    (6, 0),
    textcoords='offset points',
    va='center',
    fontsize=5.8,
    color=drawing.QUIET,
    annotation_clip=False,
  )
  return lowest


def wilson(hits: int, n: int) -> tuple[float, float]:
  """Returns Wilson's 90 % interval of a proportion (JASA 22, 1927, 209)."""
  z = statistics.NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
  rate, grown = hits / n, 1 + z * z / n
  middle = (rate + z * z / (2 * n)) / grown
  half = z / grown * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
  return max(0.0, middle - half), min(1.0, middle + half)


def ttft_over_rate(
  traces: Sequence[Trace], styles: Mapping[str, Style]
) -> Drawing | None:
  """Draws TTFT over the link's rate, bounds as lines; None without a sweep."""
  trips = [t['rtt_ms'] for t in traces]
  trip = max(dict.fromkeys(trips), key=trips.count) if trips else None
  traces = [t for t in traces if t['rtt_ms'] == trip and t['link_gbps']]
  if not selection.is_sweep(traces):
    return None
  panels = {}
  for mode in selection.modes(traces):
    chosen = [t for t in traces if t['mode'] == mode]
    prefill_s = selection.median_prefill_s(chosen)
    points = _rate_points(chosen, prefill_s)
    if points and prefill_s is not None:
      panels[mode] = prefill_s, points
  if not panels:
    return None
  everything = [point for _, points in panels.values() for point in points]
  figure = Figure((drawing.WIDTH_IN, 2.9), layout='constrained')
  grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
  for axes, (mode, (prefill_s, points)) in zip(
    grid, panels.items(), strict=True
  ):
    _draw_points(axes, points, prefill_s, styles)
    axes.set_title(mode, loc='left', weight='bold')
  values = [point.median for point in everything]
  grid[0].set_ylabel('time to first token, s')
  if max(values) > 5 * min(values):
    grid[0].set_yscale('log')
    _plain_ticks(grid[0].yaxis)
  else:
    grid[0].set_ylim(0, None)
  counts = sorted({len(point.values) for point in everything})
  drawing.foot(
    figure, traces, f'n = {drawing.span(counts)} requests a mark', rates=False
  )
  table = tuple(
    (
      mode,
      point.scheme,
      drawing.rate(point.gbps),
      drawing.number(point.median),
      drawing.between(*summaries.interval(point.values)),
      drawing.number(point.bound),
      str(len(point.values)),
    )
    for mode, (_, points) in panels.items()
    for point in points
  )
  return Drawing(
    'ttft_over_rate',
    'Time to first token over the rate of the link',
    figure,
    'Marks are medians of the first provisional token, lines are bounds; marks '
    'of schemes that are alike lie in each other. Prefill is levelled as in '
    'the bars. Whiskers are 90 % bootstrap intervals from n = '
    f'{_INTERVAL_FROM} on.',
    'Time to first token over rate. '
    + '; '.join(f'{row[0]} {row[1]} at {row[2]}: {row[3]} s' for row in table)
    + '.',
    Table(
      (
        'mode',
        'scheme',
        'rate',
        'median TTFT, s',
        '90 % interval, s',
        'median bound, s',
        'n',
      ),
      table,
    ),
  )


@dataclasses.dataclass(frozen=True)
class _Point:
  """TTFT of a scheme at a rate, T_p levelled, with the median bound."""

  scheme: str
  gbps: float
  values: list[float]
  bound: float | None

  @property
  def median(self) -> float:
    return statistics.median(self.values)


def _rate_points(
  traces: Sequence[Trace], prefill_s: float | None
) -> list[_Point]:
  points = []
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
  return points


def _draw_points(
  axes: Axes,
  points: Sequence[_Point],
  prefill_s: float,
  styles: Mapping[str, Style],
) -> None:
  fastest = max(point.gbps for point in points)
  unit, factor = next(
    (unit, factor)
    for unit, factor in (('Gbit/s', 1), ('Mbit/s', 1e3), ('kbit/s', 1e6))
    if fastest * factor >= 1 or unit == 'kbit/s'
  )
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
    size = max(3.2, 7.4 - 0.9 * i)  # marks at one place lie in each other
    for point in mine:
      low, high = summaries.interval(point.values)
      x = point.gbps * factor
      if low is not None and high is not None:
        axes.plot([x, x], [low, high], color=style.color, lw=0.9)
      axes.plot(
        x,
        point.median,
        style.marker,
        ms=size,
        mfc=style.color if i == len(names) - 1 else 'white',
        mec=drawing.shade(style.color),
        mew=0.9,
        zorder=4 + i,
        clip_on=False,
      )
    starts.append((mine[0].gbps * factor, mine[0].median, name))
  axes.set_xscale('log')
  rates = sorted({point.gbps * factor for point in points})
  if len(rates) <= 6:
    axes.set_xticks(rates, [f'{rate:.3g}' for rate in rates])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
  else:
    _plain_ticks(axes.xaxis)
  spread = rates[-1] / rates[0]
  axes.set_xlim(rates[0] / spread**0.48, rates[-1] * spread**0.05)
  axes.set_xlabel(f'rate of the link, {unit}')
  axes.axhline(prefill_s, color=drawing.QUIET, lw=0.6, ls=(0, (2, 2)), zorder=0)
  axes.annotate(
    'prefill and split',
    (0.0, prefill_s),
    (2, 2),
    xycoords=('axes fraction', 'data'),
    textcoords='offset points',
    va='bottom',
    fontsize=6,
    color=drawing.QUIET,
  )
  _label_starts(axes, starts, styles)


def _plain_ticks(axis: Any) -> None:
  """Labels a log axis at 1, 2 and 5, without powers."""
  axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
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
