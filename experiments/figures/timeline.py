# SPDX-License-Identifier: Apache-2.0
"""Draws what happened to one request of every scheme, phase by phase.

It chooses no colour of a scheme and reads no file.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments import drawing, selection

Record = Mapping[str, Any]

_LANE_IN = 0.135
_MIDDLE_IN = 5.9  # of the width, what the time axis takes
# Two shades a phase, for neighbouring chunks. Lanes are told apart by their
# place; colour only repeats it.
_SHADES = {
  'prefill': ('#8f8f8f', '#b9b9b9'),
  'split': ('#4d4d4d', '#4d4d4d'),
  'anchor': ('#0b5c94', '#4b9cd3'),
  'residual': ('#86bfe6', '#c3e0f4'),
  'exact': ('#1b9e77', '#7fcdb2'),
  'draft': ('#e69f00', '#f4c65c'),
  'verify': ('#a63c06', '#d8753f'),
  'continue': ('#a63c06', '#d8753f'),  # the same work, at the other side
}


def draw(traces: Sequence[selection.Trace]) -> list[drawing.Drawing]:
  """Draws one request of every scheme, a figure a mode, on one time axis.

  The axis starts at T_p, where prefill ends: how long prefill took varies from
  run to run and is the same work for all, so what differs stands out.
  """
  chosen = {
    mode: picked
    for mode in selection.modes(traces)
    if (
      picked := selection.one_request_each(
        [t for t in traces if t['mode'] == mode]
      )
    )
  }
  ends = [
    (e['start_s'] - t.prefill_end_s, e['end_s'] - t.prefill_end_s)
    for picked in chosen.values()
    for t in picked
    if t.prefill_end_s is not None
    for e in t.events
  ]
  if not ends:
    return []
  left, right = min(a for a, _ in ends), max(b for _, b in ends)
  margin = max(0.02 * (right - left), 1e-9)
  limits = left - margin, right + margin
  return [_timeline(mode, picked, limits) for mode, picked in chosen.items()]


@dataclasses.dataclass(frozen=True)
class _Lane:
  """A row of the timeline: a label, the phase, and where it is."""

  label: str
  phase: str
  y: float


def _lanes(trace: selection.Trace, top: float) -> list[_Lane]:
  names = [('prefill', 'prefill'), ('split', 'split')]
  if trace.spans('continue'):
    names += [('decode there', 'continue')]
  if trace.spans('residual'):
    names += [('Anchor', 'anchor'), ('Residual', 'residual')]
  else:  # one stream carries all
    names += [('KV cache', 'anchor')]
  if trace.spans('exact'):
    names += [('exact', 'exact')]
  if trace.is_speculative:
    names += [('draft', 'draft'), ('verify', 'verify')]
  else:
    names += [('decode', 'verify')]
  names.append(('commit', 'commit'))
  return [
    _Lane(label, phase, top - i) for i, (label, phase) in enumerate(names)
  ]


def _timeline(
  mode: str, traces: Sequence[selection.Trace], limits: tuple[float, float]
) -> drawing.Drawing:
  placed, rows = [], 0.0
  for trace in traces:
    placed.append((trace, _lanes(trace, -rows - 1.35)))
    rows += len(placed[-1][1]) + 1.5
  zoomed = next((t for t in reversed(traces) if _can_zoom(t)), None)
  upper_in, zoom_in = rows * _LANE_IN, 1.5
  height_in = upper_in + 0.7 + (zoom_in + 0.6 if zoomed else 0.0)
  figure = Figure((drawing.WIDTH_IN, height_in))

  def axes_at(bottom_in: float, tall_in: float) -> Axes:
    return figure.add_axes(
      (
        0.75 / drawing.WIDTH_IN,
        bottom_in / height_in,
        (drawing.WIDTH_IN - 0.8) / drawing.WIDTH_IN,
        tall_in / height_in,
      )
    )

  axes = axes_at(height_in - upper_in - 0.25, upper_in)
  axes.set(xlim=limits, ylim=(-rows, 0.0))
  axes.spines['left'].set_visible(False)
  axes.tick_params(axis='y', length=0, pad=2)
  axes.axvline(0.0, color=drawing.INK, lw=0.8, zorder=3)
  axes.annotate(
    'prefill ends, $T_p$',
    (0.0, 1.0),
    (0, 2),
    textcoords='offset points',
    xycoords=('data', 'axes fraction'),
    ha='center',
    va='bottom',
    fontsize=6.5,
  )
  ticks: list[tuple[float, str]] = []
  halo = [patheffects.withStroke(linewidth=2.5, foreground='white')]
  for trace, lanes in placed:
    top = lanes[0].y
    ticks += [(lane.y, lane.label) for lane in lanes]
    _draw_request(axes, trace, lanes)
    axes.axhline(top + 1.3, color=drawing.FAINT, lw=0.5, zorder=0)
    name = axes.annotate(
      trace['scheme'],
      (limits[0], top + 0.85),
      (2, 0),
      textcoords='offset points',
      fontsize=7.5,
      weight='bold',
      va='center',
    )
    axes.annotate(
      _sizes(trace),
      (1, 0.5),
      (6, 0),
      xycoords=name,
      va='center',
      textcoords='offset points',
      fontsize=5.8,
      color=drawing.QUIET,
      path_effects=halo,
      zorder=4,
    )
  axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
  axes.set_xlabel('time since the end of prefill, s', labelpad=2)
  _mark_lead(axes, placed)
  _mark_key(figure, height_in)
  if zoomed:
    lower = axes_at(0.35, zoom_in)
    _draw_zoom(lower, zoomed)
  words = [_first_token_words(t) for t in traces]
  pair = traces[0]
  drawing.foot(figure, traces, f'n = 1 request a scheme ({_pair_words(pair)})')
  zoom_words = (
    f' Below: {zoomed["scheme"]} from its first draft on. "unverified" is the '
    'backlog of drafts. Once the Residual is there and the backlog is gone, a '
    'span is a round: its drafts and their verification.'
    if zoomed
    else ''
  )
  return drawing.Drawing(
    f'timeline_{mode}',
    f'One request of every scheme, {mode}',
    figure,
    'Rows are phases. Numbers are those of token chunks, from 1 on, and '
    '"tail" is what stays dense; shades alternate between chunks, between '
    'layer groups for the Residual and between steps for decode. Time starts '
    'where prefill ends, since prefill is the same work for all and varies '
    'from run to run; shown is the pair whose prefills took least.'
    + zoom_words,
    f'Timeline of one request a scheme in {mode} mode. After the end of '
    f'prefill: {"; ".join(words)}.',
    drawing.Table(
      (
        'scheme',
        'T_p, s',
        'token 1, s',
        'first provisional, s',
        'first committed, s',
        'done, s',
        'drafted',
        'accepted',
        'retracted',
      ),
      tuple(
        (
          t['scheme'],
          drawing.number(t.prefill_end_s),
          *(
            drawing.number(t[f])
            for f in (
              'ttft_prefill_token_s',
              'ttft_provisional_s',
              'ttft_committed_s',
              'done_s',
            )
          ),
          *(
            drawing.number(t[f], 0)
            for f in ('drafted', 'accepted', 'retracted')
          ),
        )
        for t in traces
      ),
    ),
  )


def _draw_request(
  axes: Axes,
  trace: selection.Trace,
  lanes: Sequence[_Lane],
  label_rounds: bool = False,
) -> None:
  start = trace.prefill_end_s or 0.0
  rows = {lane.phase: lane.y for lane in lanes}
  for lane in lanes:
    if lane.phase != 'commit':
      _draw_spans(axes, trace, lane, start, label_rounds)
  y = rows['commit']
  commits = [e['end_s'] - start for e in trace.spans('commit')]
  axes.vlines(commits, y - 0.3, y + 0.3, color=drawing.INK, lw=0.5, zorder=3)
  first_row = rows.get('draft', y)
  for field, row, mark in (
    ('ttft_prefill_token_s', y, 'token 1'),
    ('ttft_provisional_s', first_row, 'provisional'),
    ('ttft_committed_s', y, 'committed'),
    ('done_s', y, 'done'),
  ):
    if trace[field] is None:
      continue
    low, high = axes.get_xlim()
    if low <= trace[field] - start <= high:
      axes.plot(trace[field] - start, row, zorder=5, **_MARKS[mark])


_MARKS: dict[str, dict[str, Any]] = {
  name: {
    'marker': marker,
    'ms': size,
    'mfc': face,
    'mec': drawing.INK,
    'mew': 0.8,
    'ls': 'none',
    'clip_on': False,
  }
  for name, marker, size, face in (
    ('token 1', '^', 4.6, 'white'),
    ('provisional', 'D', 5.4, 'white'),
    ('committed', 'o', 3.2, drawing.INK),
    ('done', 's', 4.2, '#8f8f8f'),
  )
}


def _mark_key(figure: Figure, height_in: float) -> None:
  words = {
    'token 1': 'token 1 (of prefill)',
    'provisional': 'first provisional token of decode',
    'committed': 'first committed token of decode',
    'done': 'done',
  }
  handles: list[Any] = [
    Line2D([], [], label=words[name], **mark) for name, mark in _MARKS.items()
  ]
  handles.append(
    Line2D(
      [],
      [],
      color=drawing.INK,
      marker='|',
      ms=6,
      mew=0.6,
      ls='none',
      label='commit',
    )
  )
  figure.legend(
    handles=handles,
    loc='upper left',
    ncols=5,
    frameon=False,
    bbox_to_anchor=(0.72 / drawing.WIDTH_IN, 1.0 + 0.12 / height_in),
    borderaxespad=0,
    handletextpad=0.1,
    columnspacing=1.4,
  )


def _draw_spans(
  axes: Axes,
  trace: selection.Trace,
  lane: _Lane,
  start: float,
  label_rounds: bool,
) -> None:
  spans = trace.spans(lane.phase)
  if not spans:
    return
  by_layers = lane.phase in ('residual', 'exact')
  key = 'layer_group' if by_layers else 'token_chunk'
  keys = [(e.get('detail') or {}).get(key) for e in spans]
  parity = [(i if k is None else int(k)) % 2 for i, k in enumerate(keys)]
  low, high = axes.get_xlim()
  points_a_second = _MIDDLE_IN * 72 / (high - low)
  # What is thinner than half a point would vanish in print.
  least = 0.5 / points_a_second
  boxes = []
  for e in spans:
    a, b = e['start_s'] - start, e['end_s'] - start
    b = max(b, a + least)
    boxes.append(
      [
        (a, lane.y - 0.38),
        (a, lane.y + 0.38),
        (b, lane.y + 0.38),
        (b, lane.y - 0.38),
      ]
    )
  width = statistics.median(b[2][0] - b[0][0] for b in boxes) * points_a_second
  shades = _SHADES[lane.phase]
  axes.add_collection(
    PolyCollection(
      boxes,
      facecolors=[shades[p] for p in parity],
      edgecolors='white' if width > 1.5 else 'none',
      linewidths=0.25,
      zorder=2,
    ),
    autolim=False,
  )
  if lane.phase == 'verify' and label_rounds:
    labels = _round_labels(trace, spans)
    runs = [
      (e['start_s'], e['end_s'], text, p)
      for e, text, p in zip(spans, labels, parity, strict=True)
    ]
  elif lane.phase in ('prefill', 'anchor', 'residual', 'exact'):
    runs = _runs(trace, spans, keys, lane.phase)
  else:
    return
  for a, b, text, p in runs:
    if (b - a) * points_a_second < _text_points(text) + 1:
      continue
    dark = lane.phase == 'verify' or (lane.phase == 'anchor' and p == 0)
    axes.text(
      (a + b) / 2 - start,
      lane.y - 0.04,
      text,
      ha='center',
      va='center_baseline',
      fontsize=5.2,
      zorder=4,
      clip_on=True,
      color='white' if dark else 'black',
      path_effects=[
        patheffects.withStroke(linewidth=1.6, foreground=shades[p])
      ],
    )


def _text_points(text: str) -> float:
  """Returns about how wide a label of 5.2 points is."""
  return sum(3.3 if letter.isalnum() else 1.9 for letter in text)


def _runs(
  trace: selection.Trace,
  spans: Sequence[Record],
  keys: Sequence[Any],
  phase: str,
) -> list[tuple[float, float, str, int]]:
  """Returns (start, end, label, parity) of neighbours with the same key.

  A run ends where the next one begins, which is drawn over it.
  """
  prefilled = {
    (e.get('detail') or {}).get('token_chunk') for e in trace.spans('prefill')
  }
  groups = [
    (key, [e for _, e in group])
    for key, group in itertools.groupby(
      zip(keys, spans, strict=True), key=lambda pair: pair[0]
    )
  ]
  starts = [events[0]['start_s'] for _, events in groups[1:]]
  found = []
  for (key, events), next_s in zip(groups, [*starts, math.inf], strict=True):
    if key is None:
      continue
    text = str(int(key) + 1)
    if phase in ('residual', 'exact'):
      text = f'layer group {text}'
    elif phase == 'anchor' and key not in prefilled:
      text = 'tail'
    end_s = min(events[-1]['end_s'], next_s)
    found.append((events[0]['start_s'], end_s, text, int(key) % 2))
  return found


def _round_labels(trace: selection.Trace, spans: Sequence[Record]) -> list[str]:
  rounds = trace['rounds'] or []
  if len(rounds) == len(spans):
    return [f'{accepted}/{drafted}' for drafted, accepted in rounds]
  committed = [(e.get('detail') or {}).get('committed') for e in spans]
  return ['' if n is None else f'+{n}' for n in committed]


def _sizes(trace: selection.Trace) -> str:
  words = []
  if trace['bits_anchor'] is not None:
    words.append(f'{trace["bits_anchor"]:.2f} bits a value')
  if trace['bytes_anchor']:
    words.append(f'{trace["bytes_anchor"] / 1e6:.1f} MB')
  text = ', '.join(words)
  if trace.is_speculative and trace['bytes_residual']:
    text = f'Anchor {text}; Residual {trace["bytes_residual"] / 1e6:.1f} MB'
  if trace['bytes_exact']:
    text += f'; exact {trace["bytes_exact"] / 1e6:.1f} MB'
  return text


def _exposed(trace: selection.Trace) -> float | None:
  """Returns prefill end → first provisional token."""
  first, end = trace['ttft_provisional_s'], trace.prefill_end_s
  return None if first is None or end is None else first - end


def _first_token_words(trace: selection.Trace) -> str:
  exposed = _exposed(trace)
  if exposed is None:
    return f'{trace["scheme"]} has no token of decode'
  words = f'{trace["scheme"]} shows its first token after {exposed:.3f} s'
  if trace.is_speculative and trace['ttft_committed_s'] is not None:
    committed = trace['ttft_committed_s'] - (trace.prefill_end_s or 0.0)
    words += f' and commits it after {committed:.3f} s'
  return words


def _mark_lead(
  axes: Axes, placed: Sequence[tuple[selection.Trace, list[_Lane]]]
) -> None:
  """Marks how much earlier lynx shows a token than int8."""
  where = {trace['scheme']: (trace, lanes) for trace, lanes in placed}
  if 'lynx' not in where or 'int8' not in where:
    return
  (lynx, lanes), (int8, lanes8) = where['lynx'], where['int8']
  a, b = _exposed(lynx), _exposed(int8)
  if a is None or b is None or a == b:
    return
  low, high = axes.get_xlim()
  row = lanes[0].y  # empty there, since prefill has ended
  for x, mine in ((a, lanes), (b, lanes8)):
    shown_on = next((lane for lane in mine if lane.phase == 'draft'), mine[-1])
    axes.vlines(
      x, shown_on.y, row, color=drawing.INK, lw=0.6, ls=(0, (2, 2)), zorder=1
    )
  axes.annotate(
    '',
    (a, row),
    (b, row),
    arrowprops={
      'arrowstyle': '->',
      'lw': 0.8,
      'color': drawing.INK,
      'shrinkA': 0,
      'shrinkB': 0,
    },
  )
  words = 'earlier' if a < b else 'later'
  right = max(a, b) < low + 0.75 * (high - low)
  axes.annotate(
    f'{abs(b - a):.2g} s {words} than int8',
    (max(a, b) if right else min(a, b), row),
    (4 if right else -4, 0),
    textcoords='offset points',
    va='center',
    ha='left' if right else 'right',
    fontsize=6.5,
    weight='bold',
  )


def _can_zoom(trace: selection.Trace) -> bool:
  return trace.is_speculative and bool(trace.spans('verify'))


def _draw_zoom(axes: Axes, trace: selection.Trace) -> None:
  start = trace.prefill_end_s or 0.0
  steps = trace.spans('draft') + trace.spans('verify')
  left = min(e['start_s'] for e in steps) - start
  ends = [e['end_s'] for e in trace.events if e['name'] != 'arrival']
  right = max(ends) - start
  margin = 0.015 * (right - left)
  names = {'residual': 'Residual', 'exact': 'exact'}
  names |= {'draft': 'draft', 'verify': 'verify'}
  seen = [
    phase
    for phase in names
    if any(e['end_s'] - start > left for e in trace.spans(phase))
  ]
  names['commit'] = 'commit'
  lanes = [
    _Lane(names[phase], phase, float(-i))
    for i, phase in enumerate([*seen, 'commit'])
  ]
  axes.set(xlim=(left - margin, right + margin), ylim=(-6.6, 0.6))
  _draw_request(axes, trace, lanes, label_rounds=True)
  axes.spines['left'].set_visible(False)
  axes.tick_params(axis='y', length=0, pad=2)
  times, committed, shown = selection.counts(trace)
  pending = [s - c for s, c in zip(shown, committed, strict=True)]
  most = max(pending, default=0)
  base, tall = -6.3, 5.6 + lanes[-1].y - 0.3
  heights = [base + tall * p / max(most, 1) for p in pending]
  x = [t - start for t in times]
  axes.fill_between(
    [*x, right],
    [*heights, heights[-1]] if heights else [base],
    base,
    step='post',
    facecolor='#fbe3b3',
    edgecolor='none',
    zorder=1,
  )
  axes.step(
    [*x, right],
    [*heights, heights[-1]],
    where='post',
    color=drawing.INK,
    lw=0.8,
    zorder=3,
  )
  peak = pending.index(most)
  if most:
    early = x[peak] < left + 0.25 * (right - left)
    axes.annotate(
      _count(most, 'unverified token'),
      (x[peak], heights[peak]),
      (0 if early else -4, 1),
      textcoords='offset points',
      fontsize=6.2,
      ha='left' if early else 'right',
      va='bottom',
    )
  axes.set_yticks(
    [*(lane.y for lane in lanes), base + tall / 2],
    [*(lane.label for lane in lanes), 'unverified'],
  )
  drafts, rounds = len(trace.spans('draft')), len(trace.spans('verify'))
  known = len(trace['rounds'] or ()) == rounds
  title = (
    f'{trace["scheme"]}, enlarged: {_count(drafts, "draft")} while the '
    f'Residual came, then {_count(rounds, "verification")} ('
    + ('accepted / drafted)' if known else '+ tokens committed)')
  )
  axes.set_title(title, loc='left', fontsize=7, pad=3)
  axes.set_xlabel('time since the end of prefill, s', labelpad=2)


def _count(n: int, noun: str) -> str:
  return f'{n} {noun}' if n == 1 else f'{n} {noun}s'


def _pair_words(trace: selection.Trace) -> str:
  words = []
  if trace['prompt'] is not None:
    words.append(f'prompt {trace["prompt"]}')
  if trace['repeat'] is not None:
    words.append(f'repeat {trace["repeat"]}')
  return ', '.join(words) or 'of one pair'
