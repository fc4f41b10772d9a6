# SPDX-License-Identifier: Apache-2.0
"""Draws what happened to requests: pure functions from traces to figures.

It reads and writes no file, and keeps no state: matplotlib's global one is
left alone. Every figure reads without colour, by position, marker, hatch or
line style, and names the device and how its numbers came to be.
"""

import contextlib
import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import patheffects, ticker
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments import latency

Record = Mapping[str, Any]

MODES = ('serial', 'overlapped')
# From the slowest baseline to what is to be shown; others follow.
SCHEMES = ('bf16', 'int8', 'int4', 'interleaved', 'lynx')

_WIDTH_IN = 7.2  # two columns of a paper
_LANE_IN = 0.135
_MIDDLE_IN = 5.9  # of the width, what the time axis takes
_CONFIDENCE = 0.9
_RESAMPLES = 2000
_INTERVAL_FROM = 3  # fewer measurements are shown as points alone
_POINTS_UP_TO = 12
# Rates of one prompt farther apart than this are a sweep, not calibration.
_SWEEP = 1.5

_RC = {
  'font.family': 'DejaVu Sans',  # comes with matplotlib: the same everywhere
  'font.size': 7.0,
  'axes.titlesize': 7.5,
  'axes.labelsize': 7.0,
  'axes.linewidth': 0.6,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'xtick.labelsize': 6.5,
  'ytick.labelsize': 6.5,
  'xtick.major.width': 0.6,
  'ytick.major.width': 0.6,
  'hatch.linewidth': 0.5,
  'legend.fontsize': 6.5,
  'lines.solid_capstyle': 'butt',
  'svg.hashsalt': 'lynx',  # the same records give the same bytes
}
_INK, _QUIET, _FAINT = '#1a1a1a', '#5a5a5a', '#c8c8c8'
# Two shades a phase, for neighbouring chunks. Lanes are told apart by their
# place; colour only repeats it.
_SHADES = {
  'prefill': ('#8f8f8f', '#b9b9b9'),
  'split': ('#4d4d4d', '#4d4d4d'),
  'anchor': ('#0b5c94', '#4b9cd3'),
  'residual': ('#86bfe6', '#c3e0f4'),
  'draft': ('#e69f00', '#f4c65c'),
  'verify': ('#a63c06', '#d8753f'),
}


@dataclasses.dataclass(frozen=True)
class Trace:
  """A request: its record, and the events of its timeline."""

  record: Record
  events: Sequence[Record] = ()

  def __getitem__(self, field: str) -> Any:
    return self.record.get(field)

  def spans(self, phase: str) -> list[Record]:
    """Returns the events of one name, by start."""
    found = [e for e in self.events if e['name'] == phase]
    return sorted(found, key=lambda e: (e['start_s'], e['end_s']))

  @property
  def is_speculative(self) -> bool:
    """Whether it drafts on a part of the cache."""
    return bool(
      self['bytes_residual'] or self['drafted'] or self.spans('residual')
    )

  @property
  def prefill_end_s(self) -> float | None:
    """T_p; None if prefill did not end."""
    if self['prefill_s'] is not None:
      return self['prefill_s'] + (self['split_s'] or 0.0)
    ends = [e['end_s'] for e in self.events if e['name'] in ('prefill', 'split')]
    return max(ends, default=None)

  @property
  def is_done(self) -> bool:
    """Whether it came to a good end."""
    return self['done_s'] is not None and not self['error']


@dataclasses.dataclass(frozen=True)
class Table:
  """The numbers of a figure, for those who cannot see it."""

  header: tuple[str, ...]
  rows: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Drawing:
  """A figure with its words.

  Attributes:
    name: of its file, without an ending.
    title: a heading.
    figure: drawn and ready to be saved.
    caption: how to read it.
    alt: what it shows, in words and numbers.
    table: its numbers.
  """

  name: str
  title: str
  figure: Figure
  caption: str
  alt: str
  table: Table | None = None


@dataclasses.dataclass(frozen=True)
class Style:
  """How a scheme looks in every figure."""

  color: str
  line: Any
  marker: str
  hatch: str
  width: float = 1.2


# Colours of Okabe and Ito (https://jfly.uni-koeln.de/color/), which people
# with the common colour deficiencies tell apart.
_STYLES = {
  'bf16': Style('#4d4d4d', (0, (1, 1)), 's', '....'),
  'int8': Style('#0072b2', (0, (5, 1.5)), '^', '////'),
  'int4': Style('#009e73', (0, (4, 1, 1, 1)), 'v', '\\\\\\\\'),
  'interleaved': Style('#cc79a7', (0, (4, 1, 1, 1, 1, 1)), 'D', 'xxxx'),
  'lynx': Style('#d55e00', '-', 'o', '', 1.8),
}
_MORE_STYLES = (
  Style('#56b4e9', (0, (8, 1.5)), 'P', '----'),
  Style('#b58900', (0, (2, 1)), 'X', '++++'),
  Style('#8c510a', (0, (8, 1, 2, 1)), '<', '||||'),
  Style('#762a83', (0, (3, 2, 1, 2)), '>', 'oo'),
  Style('#1b7837', (0, (1, 2)), 'p', '**'),
)


def draw(traces: Sequence[Trace]) -> list[Drawing]:
  """Draws every figure for which there are data.

  Args:
    traces: of one study on one model. In a sweep over rates or round trips,
      all figures but the one over the rate take one setting; see `setting`.
  """
  styles = styles_of(traces)
  alike = setting(traces)
  found: list[Drawing | None] = []
  with _look():
    found += timelines(alike)
    found.append(ttft(alike, styles))
    found.append(tokens_over_time(alike, styles))
    found.append(acceptance(traces, styles))
    found.append(ttft_over_rate(traces, styles))
  return [drawing for drawing in found if drawing is not None]


def save(drawing: Drawing, path: Any, kind: str) -> None:
  """Saves a figure as `png` or `svg`; the same figure gives the same bytes."""
  metadata = {'Software': None} if kind == 'png' else {'Date': None}
  with _look():
    drawing.figure.savefig(
      path,
      format=kind,
      dpi=200,
      bbox_inches='tight',
      pad_inches=0.05,
      facecolor='white',
      metadata=metadata,
    )


@contextlib.contextmanager
def _look() -> Iterator[None]:
  with mpl.rc_context():
    mpl.rcdefaults()
    mpl.rcParams.update(_RC)
    yield


def styles_of(traces: Iterable[Trace]) -> dict[str, Style]:
  """Returns a style for every scheme, the same whoever else is there."""
  more = itertools.cycle(_MORE_STYLES)
  return {
    name: _STYLES.get(name) or next(more)
    for name in _ordered({t['scheme'] for t in traces}, SCHEMES)
  }


def setting(traces: Sequence[Trace]) -> list[Trace]:
  """Returns the traces of one rate and round trip.

  Where prompts have rates of their own, set for the share, they stay together.
  In a sweep it is the rate whose share is nearest 60 %, the one that the
  latency study sets, or the middle one; the round trip is the most frequent.
  """
  trips = [t['rtt_ms'] for t in traces]
  if not trips:
    return []
  trip = max(dict.fromkeys(trips), key=trips.count)
  traces = [t for t in traces if t['rtt_ms'] == trip]
  if not is_sweep(traces):
    return traces
  rates = sorted({t['link_gbps'] for t in traces if t['link_gbps']})

  def distance(rate: float) -> tuple[float, float]:
    shares = [t['share'] for t in traces if t['link_gbps'] == rate]
    known = [s for s in shares if s is not None]
    middle = abs(math.log(rate / rates[len(rates) // 2]))
    return (abs(statistics.median(known) - 0.6) if known else 1.0), middle

  best = min(rates, key=distance)
  return [
    t
    for t in traces
    if t['link_gbps'] and abs(math.log(t['link_gbps'] / best)) < math.log(1.1)
  ]


def is_sweep(traces: Iterable[Trace]) -> bool:
  """Whether some prompt ran at rates that differ for other than noise."""
  rates: dict[Any, list[float]] = {}
  for trace in traces:
    if trace['link_gbps']:
      rates.setdefault(trace['prompt'], []).append(trace['link_gbps'])
  return any(max(r) > _SWEEP * min(r) for r in rates.values())


# --- Timeline -----------------------------------------------------------------


def timelines(traces: Sequence[Trace]) -> list[Drawing]:
  """Draws one request of every scheme, a figure a mode, on one time axis.

  The axis starts at T_p, where prefill ends: how long prefill took varies from
  run to run and is the same work for all, so what differs stands out.
  """
  chosen = {
    mode: picked
    for mode in _modes(traces)
    if (picked := _one_request_each([t for t in traces if t['mode'] == mode]))
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


def _one_request_each(traces: Sequence[Trace]) -> list[Trace]:
  """Returns a request a scheme, all of one prompt and repeat.

  It is the pair with the most schemes and, of those, the median exposed time.
  """
  traces = [t for t in traces if t.prefill_end_s is not None and t.events]
  pairs: dict[Any, dict[str, Trace]] = {}
  for name in _ordered({t['scheme'] for t in traces}, SCHEMES):
    for trace in _fastest(traces, name):
      pair = trace['prompt'], trace['repeat']
      pairs.setdefault(pair, {})[name] = trace
  if not pairs:
    return []
  most = max(len(pair) for pair in pairs.values())
  full = [list(pair.values()) for pair in pairs.values() if len(pair) == most]
  full.sort(key=lambda pair: sum(t['exposed_s'] or 0.0 for t in pair))
  return full[(len(full) - 1) // 2]


@dataclasses.dataclass(frozen=True)
class _Lane:
  """A row of the timeline: a label, the phase, and where it is."""

  label: str
  phase: str
  y: float


def _lanes(trace: Trace, top: float) -> list[_Lane]:
  names = [('prefill', 'prefill'), ('split', 'split')]
  if trace.is_speculative:
    names += [('Anchor', 'anchor'), ('Residual', 'residual')]
    names += [('draft', 'draft'), ('verify', 'verify')]
  else:
    names += [('KV cache', 'anchor'), ('decode', 'verify')]
  names.append(('commit', 'commit'))
  return [_Lane(label, phase, top - i) for i, (label, phase) in enumerate(names)]


def _timeline(
  mode: str, traces: Sequence[Trace], limits: tuple[float, float]
) -> Drawing:
  tops, rows = [], 0.0
  for trace in traces:
    tops.append(-rows - 1.35)
    rows += len(_lanes(trace, 0.0)) + 1.75
  zoomed = next((t for t in reversed(traces) if _can_zoom(t)), None)
  upper_in, zoom_in = rows * _LANE_IN, 1.5
  height_in = upper_in + 0.75 + (zoom_in + 0.75 if zoomed else 0.1)
  figure = Figure((_WIDTH_IN, height_in))

  def axes_at(bottom_in: float, tall_in: float) -> Axes:
    return figure.add_axes(
      (0.75 / _WIDTH_IN, bottom_in / height_in,
       (_WIDTH_IN - 0.8) / _WIDTH_IN, tall_in / height_in)
    )  # fmt: skip

  axes = axes_at(height_in - upper_in - 0.25, upper_in)
  axes.set(xlim=limits, ylim=(-rows, 0.0))
  axes.spines['left'].set_visible(False)
  axes.tick_params(axis='y', length=0, pad=2)
  axes.axvline(0.0, color=_INK, lw=0.8, zorder=3)
  axes.annotate(
    'prefill ends, $T_p$', (0.0, 1.0), (0, 2), textcoords='offset points',
    xycoords=('data', 'axes fraction'), ha='center', va='bottom', fontsize=6.5,
  )  # fmt: skip
  ticks: list[tuple[float, str]] = []
  for trace, top in zip(traces, tops, strict=True):
    lanes = _lanes(trace, top)
    ticks += [(lane.y, lane.label) for lane in lanes]
    _draw_request(axes, trace, lanes)
    axes.axhline(top + 1.3, color=_FAINT, lw=0.5, zorder=0)
    name = axes.annotate(
      trace['scheme'], (limits[0], top + 0.85), (2, 0),
      textcoords='offset points', fontsize=7.5, weight='bold', va='center',
    )  # fmt: skip
    axes.annotate(
      _sizes(trace), (1, 0.5), (6, 0), xycoords=name, va='center',
      textcoords='offset points', fontsize=5.8, color=_QUIET,
    )  # fmt: skip
  axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
  axes.set_xlabel('time since the end of prefill, s', labelpad=2)
  _mark_lead(axes, traces, tops)
  _mark_key(figure, height_in)
  if zoomed:
    lower = axes_at(0.5, zoom_in)
    _draw_zoom(lower, zoomed)
  words = [_first_token_words(t) for t in traces]
  pair = traces[0]
  _foot(figure, traces, f'n = 1 request a scheme ({_pair_words(pair)})')
  zoom_words = (
    f' Below: {zoomed["scheme"]} from its first draft on; over a verification, '
    'accepted / drafted tokens where they are recorded, else the tokens it '
    'committed; "unverified" counts the backlog of drafts.'
    if zoomed
    else ''
  )
  return Drawing(
    f'timeline_{mode}',
    f'One request of every scheme, {mode}',
    figure,
    'Rows are phases; shades alternate between token chunks (between layer '
    'groups for the Residual), and prefill and transfer carry the number of '
    'the token chunk. Time starts where prefill ends, since prefill is the '
    'same work for all and varies from run to run.' + zoom_words,
    f'Timeline of one request a scheme in {mode} mode. After the end of '
    f'prefill: {"; ".join(words)}.',
    Table(
      ('scheme', 'T_p, s', 'token 1, s', 'first provisional, s',
       'first committed, s', 'done, s', 'drafted', 'accepted', 'retracted'),
      tuple(
        (t['scheme'], number(t.prefill_end_s), *(number(t[f]) for f in (
          'ttft_prefill_token_s', 'ttft_provisional_s', 'ttft_committed_s',
          'done_s')), *(number(t[f], 0) for f in (
          'drafted', 'accepted', 'retracted')))
        for t in traces
      ),
    ),
  )  # fmt: skip


def _draw_request(
  axes: Axes, trace: Trace, lanes: Sequence[_Lane], label_rounds: bool = False
) -> None:
  start = trace.prefill_end_s or 0.0
  rows = {lane.phase: lane.y for lane in lanes}
  for lane in lanes:
    if lane.phase not in ('commit', 'backlog'):
      _draw_spans(axes, trace, lane, start, label_rounds)
  if 'commit' not in rows:
    return
  y = rows['commit']
  commits = [e['end_s'] - start for e in trace.spans('commit')]
  axes.vlines(commits, y - 0.3, y + 0.3, color=_INK, lw=0.5, zorder=3)
  first_row = rows.get('draft', y)
  for field, row, mark in (
    ('ttft_prefill_token_s', y, 'token 1'),
    ('ttft_provisional_s', first_row, 'provisional'),
    ('ttft_committed_s', y, 'committed'),
    ('done_s', y, 'done'),
  ):
    if trace[field] is not None:
      axes.plot(trace[field] - start, row, zorder=5, **_MARKS[mark])


_MARKS: dict[str, dict[str, Any]] = {
  name: {
    'marker': marker,
    'ms': size,
    'mfc': face,
    'mec': _INK,
    'mew': 0.8,
    'ls': 'none',
    'clip_on': False,
  }
  for name, marker, size, face in (
    ('token 1', '^', 4.6, 'white'),
    ('provisional', 'D', 5.4, 'white'),
    ('committed', 'o', 3.2, _INK),
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
    Line2D([], [], color=_INK, marker='|', ms=6, mew=0.6, ls='none',
           label='commit')
  )  # fmt: skip
  figure.legend(
    handles=handles, loc='upper left', ncols=5, frameon=False,
    bbox_to_anchor=(0.72 / _WIDTH_IN, 1.0 + 0.12 / height_in),
    borderaxespad=0, handletextpad=0.1, columnspacing=1.4,
  )  # fmt: skip


def _draw_spans(
  axes: Axes, trace: Trace, lane: _Lane, start: float, label_rounds: bool
) -> None:
  spans = trace.spans(lane.phase)
  if not spans:
    return
  key = {'residual': 'layer_group'}.get(lane.phase, 'token_chunk')
  keys = [(e.get('detail') or {}).get(key) for e in spans]
  parity = [
    (i if k is None else int(k)) % 2 for i, k in enumerate(keys)
  ]  # fmt: skip
  low, high = axes.get_xlim()
  points_a_second = _MIDDLE_IN * 72 / (high - low)
  # What is thinner than half a point would vanish in print.
  least = 0.5 / points_a_second
  boxes = []
  for e in spans:
    a, b = e['start_s'] - start, e['end_s'] - start
    b = max(b, a + least)
    boxes.append([(a, lane.y - 0.38), (a, lane.y + 0.38),
                  (b, lane.y + 0.38), (b, lane.y - 0.38)])  # fmt: skip
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
  elif lane.phase in ('prefill', 'anchor', 'residual'):
    runs = _runs(trace, spans, keys, lane.phase)
  else:
    return
  for a, b, text, p in runs:
    if (b - a) * points_a_second < 3.4 * len(text) + 1.5:
      continue
    dark = lane.phase == 'verify' or (lane.phase == 'anchor' and p == 0)
    axes.text(
      (a + b) / 2 - start, lane.y - 0.04, text, ha='center',
      va='center_baseline', fontsize=5.2, zorder=4, clip_on=True,
      color='white' if dark else 'black',
    )  # fmt: skip


def _runs(
  trace: Trace, spans: Sequence[Record], keys: Sequence[Any], phase: str
) -> list[tuple[float, float, str, int]]:
  """Returns (start, end, label, parity) of neighbours with the same key."""
  prefilled = {
    (e.get('detail') or {}).get('token_chunk') for e in trace.spans('prefill')
  }
  found = []
  for key, group in itertools.groupby(
    zip(keys, spans, strict=True), key=lambda pair: pair[0]
  ):
    if key is None:
      continue
    events = [e for _, e in group]
    text = str(int(key) + 1)
    if phase == 'residual':
      text = f'layer group {text}'
    elif phase == 'anchor' and key not in prefilled:
      text = 'tail'
    found.append((
      events[0]['start_s'], events[-1]['end_s'], text, int(key) % 2
    ))  # fmt: skip
  return found


def _round_labels(trace: Trace, spans: Sequence[Record]) -> list[str]:
  rounds = trace['rounds'] or []
  if len(rounds) == len(spans):
    return [f'{accepted}/{drafted}' for drafted, accepted in rounds]
  committed = [(e.get('detail') or {}).get('committed') for e in spans]
  return ['' if n is None else f'+{n}' for n in committed]


def _sizes(trace: Trace) -> str:
  words = []
  if trace['bits_anchor'] is not None:
    words.append(f'{trace["bits_anchor"]:.2f} bits a value')
  if trace['bytes_anchor']:
    words.append(f'{trace["bytes_anchor"] / 1e6:.1f} MB')
  text = ', '.join(words)
  if trace.is_speculative and trace['bytes_residual']:
    text = f'Anchor {text}; Residual {trace["bytes_residual"] / 1e6:.1f} MB'
  return text


def _exposed(trace: Trace) -> float | None:
  """Returns prefill end → first provisional token."""
  first, end = trace['ttft_provisional_s'], trace.prefill_end_s
  return None if first is None or end is None else first - end


def _first_token_words(trace: Trace) -> str:
  exposed = _exposed(trace)
  if exposed is None:
    return f'{trace["scheme"]} has no token of decode'
  words = f'{trace["scheme"]} shows its first token after {exposed:.3f} s'
  if trace.is_speculative and trace['ttft_committed_s'] is not None:
    committed = trace['ttft_committed_s'] - (trace.prefill_end_s or 0.0)
    words += f' and commits it after {committed:.3f} s'
  return words


def _mark_lead(
  axes: Axes, traces: Sequence[Trace], tops: Sequence[float]
) -> None:
  """Marks how much earlier lynx shows a token than int8."""
  where = {t['scheme']: (t, top) for t, top in zip(traces, tops, strict=True)}
  if 'lynx' not in where or 'int8' not in where:
    return
  (lynx, y), (int8, y8) = where['lynx'], where['int8']
  a, b = _exposed(lynx), _exposed(int8)
  if a is None or b is None or a == b:
    return
  low, high = axes.get_xlim()
  row = y + 0.85
  axes.vlines(b, row - 0.3, y8 - 4, color=_INK, lw=0.6, ls=(0, (2, 2)), zorder=1)
  axes.vlines(a, y - 4, row + 0.3, color=_INK, lw=0.6, ls=(0, (2, 2)), zorder=1)
  axes.annotate(
    '', (a, row), (b, row),
    arrowprops={'arrowstyle': '->', 'lw': 0.8, 'color': _INK,
                'shrinkA': 0, 'shrinkB': 0},
  )  # fmt: skip
  words = 'earlier' if a < b else 'later'
  right = max(a, b) < low + 0.75 * (high - low)
  axes.annotate(
    f'{abs(b - a):.2g} s {words} than int8', (max(a, b) if right else min(a, b), row),
    (4 if right else -4, 0), textcoords='offset points', va='center',
    ha='left' if right else 'right', fontsize=6.5, weight='bold',
  )  # fmt: skip


def _can_zoom(trace: Trace) -> bool:
  return bool(trace.spans('draft')) and bool(trace.spans('verify'))


def _draw_zoom(axes: Axes, trace: Trace) -> None:
  start = trace.prefill_end_s or 0.0
  left = trace.spans('draft')[0]['start_s'] - start
  ends = [e['end_s'] for e in trace.events if e['name'] != 'arrival']
  right = max(ends) - start
  margin = 0.015 * (right - left)
  axes.set(xlim=(left - margin, right + margin), ylim=(-6.6, 0.6))
  lanes = [
    _Lane('Residual', 'residual', 0.0),
    _Lane('draft', 'draft', -1.0),
    _Lane('verify', 'verify', -2.0),
    _Lane('commit', 'commit', -3.0),
  ]
  _draw_request(axes, trace, lanes, label_rounds=True)
  axes.spines['left'].set_visible(False)
  axes.tick_params(axis='y', length=0, pad=2)
  times, committed, shown = _counts(trace)
  pending = [s - c for s, c in zip(shown, committed, strict=True)]
  most = max(pending, default=0)
  base, tall = -6.3, 2.4
  heights = [base + tall * p / max(most, 1) for p in pending]
  x = [t - start for t in times]
  axes.fill_between(
    [*x, right], [*heights, heights[-1]] if heights else [base], base,
    step='post', facecolor='#fbe3b3', edgecolor='none', zorder=1,
  )  # fmt: skip
  axes.step([*x, right], [*heights, heights[-1]], where='post', color=_INK,
            lw=0.8, zorder=3)  # fmt: skip
  peak = pending.index(most)
  if most:
    axes.annotate(
      f'{most} unverified tokens', (x[peak], heights[peak]), (3, 3),
      textcoords='offset points', fontsize=5.8, va='bottom',
    )  # fmt: skip
  early = len(trace.spans('draft'))
  axes.set_yticks(
    [*(lane.y for lane in lanes), base + tall / 2],
    [*(lane.label for lane in lanes), 'unverified'],
  )
  residual = trace.spans('residual')
  title = f'{trace["scheme"]}, enlarged: {early} drafts on the Anchor alone'
  if residual:
    title += ', then rounds of draft and verify (accepted / drafted)'
  axes.set_title(title, loc='left', fontsize=7, pad=3)
  axes.set_xlabel('time since the end of prefill, s', labelpad=2)


def _counts(trace: Trace) -> tuple[list[float], list[int], list[int]]:
  """Returns times, and the tokens committed and shown from each on.

  Commits are those of `commit_times_s`; shown ones come from the events of
  drafting and verifying, which count what was left after them.
  """
  moments: list[tuple[float, int, int]] = []
  for count, at_s in enumerate(trace['commit_times_s'] or (), 1):
    moments.append((at_s, 0, count))
  for e in trace.events:
    tokens = (e.get('detail') or {}).get('tokens')
    if e['name'] in ('draft', 'verify') and tokens is not None:
      moments.append((e['end_s'], 1, tokens))
  times, committed, shown = [0.0], [0], [0]
  for at_s, is_shown, count in sorted(moments):
    times.append(at_s)
    if is_shown:
      committed.append(committed[-1])
      shown.append(max(count, committed[-1]))
    else:
      committed.append(count)
      shown.append(max(shown[-1], count))
  return times, committed, shown


# --- TTFT ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Bar:
  """One bar: values with T_p levelled, and the median bound."""

  scheme: str
  what: str  # '' where provisional and committed are the same
  values: list[float]
  bound: float | None


def ttft(
  traces: Sequence[Trace], styles: Mapping[str, Style]
) -> Drawing | None:
  """Draws TTFT per scheme, grouped by mode, with bounds and intervals."""
  panels = {}
  for mode in _modes(traces):
    chosen = [t for t in traces if t['mode'] == mode]
    prefill_s = _median_prefill_s(chosen)
    bars = _bars(chosen, prefill_s)
    if bars and prefill_s is not None:
      panels[mode] = prefill_s, bars
  if not panels:
    return None
  rows = [len(bars) for _, bars in panels.values()]
  height = sum(rows) * 0.24 + 0.5 * len(rows) + 0.35
  figure = Figure((_WIDTH_IN, height), layout='constrained')
  grid = figure.subplots(
    len(panels), 1, sharex=True, squeeze=False,
    gridspec_kw={'height_ratios': [n + 0.8 for n in rows]},
  )  # fmt: skip
  right = max(
    max(*bar.values, bar.bound or 0.0)
    for _, bars in panels.values()
    for bar in bars
  )
  table: list[tuple[str, ...]] = []
  for axes, (mode, (prefill_s, bars)) in zip(
    grid[:, 0], panels.items(), strict=True
  ):
    axes.set_xlim(0, right * 1.22)
    _draw_bars(axes, bars, prefill_s, styles)
    axes.set_title(mode, loc='left', weight='bold', pad=9)
    for bar in bars:
      low, high = interval(bar.values)
      table.append((
        mode, bar.scheme, bar.what or 'provisional = committed',
        number(statistics.median(bar.values)),
        f'{number(low)} – {number(high)}', number(bar.bound),
        str(len(bar.values)),
      ))  # fmt: skip
  grid[-1, 0].set_xlabel('time to first token (TTFT), s')
  counts = sorted({len(b.values) for _, bars in panels.values() for b in bars})
  _foot(figure, traces, f'n = {_span(counts)} requests a bar')
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
      ('mode', 'scheme', 'which', 'median TTFT, s', '90 % interval, s',
       'median bound, s', 'n'),
      tuple(table),
    ),
  )  # fmt: skip


def _bars(traces: Sequence[Trace], prefill_s: float | None) -> list[_Bar]:
  bars = []
  for name in _ordered({t['scheme'] for t in traces}, SCHEMES):
    chosen = _fastest(traces, name)
    bounds = _levelled(chosen, 'bound_ttft_s', prefill_s)
    bound = statistics.median(bounds) if bounds else None
    shown = _levelled(chosen, 'ttft_provisional_s', prefill_s)
    if not any(t.is_speculative for t in chosen):
      if shown:
        bars.append(_Bar(name, '', shown, bound))
      continue
    committed = _levelled(chosen, 'ttft_committed_s', prefill_s)
    if shown:
      bars.append(_Bar(name, 'provisional', shown, bound))
    if committed:
      bars.append(_Bar(name, 'committed', committed, None))
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
      i, median - start, left=start, height=0.66, zorder=1, lw=0.7,
      facecolor=_tint(style.color, 0.75 if light else 0.15),
      edgecolor=style.color if light else _INK,
      ls=(0, (3, 1.5)) if light else '-',
    )  # fmt: skip
    if bar.bound is not None:
      axes.plot(
        [bar.bound] * 2, [i - 0.43, i + 0.43], color='black', lw=1.8,
        path_effects=[
          patheffects.withStroke(linewidth=3.4, foreground='white')
        ],
        zorder=4,
      )  # fmt: skip
    low, high = interval(bar.values)
    end = max(median, bar.bound or 0.0)
    if len(bar.values) >= _INTERVAL_FROM:
      axes.errorbar(
        median, i, xerr=[[median - low], [high - median]], color='black',
        lw=0.8, capsize=2.5, capthick=0.8, zorder=5,
      )  # fmt: skip
      end = max(end, high)
    if 1 < len(bar.values) <= _POINTS_UP_TO:
      ys = i + np.linspace(-0.18, 0.18, len(bar.values))
      axes.plot(
        bar.values, ys, 'o', ms=2.6, mfc='white', mec='black', mew=0.5,
        zorder=6,
      )  # fmt: skip
      end = max(end, *bar.values)
    text = f'{_short(median)} s'
    if bar.bound:
      text += f'   {median / bar.bound:.3f} × bound'
    axes.annotate(
      text, (end, i), (5, 0), textcoords='offset points', va='center',
      fontsize=6.5, path_effects=halo, zorder=7,
    )  # fmt: skip
  names = [f'{b.scheme}, {b.what}' if b.what else b.scheme for b in bars]
  axes.set_yticks(range(len(bars)), names)
  axes.set_ylim(len(bars) - 0.4, -0.6)
  axes.tick_params(axis='y', length=0)
  axes.axvline(prefill_s, color=_INK, lw=0.6, ls=(0, (2, 2)), zorder=3)
  axes.annotate(
    f'prefill and split, {_short(prefill_s)} s', (prefill_s, 1.0), (0, 1.5),
    xycoords=('data', 'axes fraction'), textcoords='offset points',
    ha='right', va='bottom', fontsize=6, color=_QUIET,
  )  # fmt: skip
  marked = next((i for i, bar in enumerate(bars) if bar.bound is not None), None)
  if marked == 0:
    axes.annotate(
      'bound', (bars[0].bound, 0), (0, 8.5), textcoords='offset points',
      ha='center', va='bottom', fontsize=6, color=_INK,
    )  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float]:
  """Returns the 90 % bootstrap interval of the median, always the same."""
  if len(values) < 2:
    return values[0], values[0]
  generator = np.random.default_rng(0)
  picks = generator.integers(len(values), size=(_RESAMPLES, len(values)))
  medians = np.median(np.asarray(values)[picks], axis=1)
  tail = (1 - _CONFIDENCE) / 2
  low, high = np.quantile(medians, [tail, 1 - tail])
  return float(low), float(high)


# --- Tokens over time ---------------------------------------------------------


def tokens_over_time(
  traces: Sequence[Trace], styles: Mapping[str, Style]
) -> Drawing | None:
  """Draws committed tokens over time, and provisional ones lighter."""
  panels = {}
  for mode in _modes(traces):
    curves = []
    for name in _ordered({t['scheme'] for t in traces}, SCHEMES):
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
  figure = Figure((_WIDTH_IN, 2.75 * len(panels) + 0.2), layout='constrained')
  grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
  table = []
  for axes, (mode, curves) in zip(grid[:, 0], panels.items(), strict=True):
    axes.set_title(mode, loc='left', weight='bold', pad=26)
    ends = []
    for name, form, (x, committed, shown), n in curves:
      style = styles[name]
      plain = form == 'plain'
      if np.any(shown > committed):
        axes.fill_between(
          x, committed, shown, step='post', zorder=1, lw=0,
          facecolor=_tint(style.color, 0.82),
        )  # fmt: skip
        axes.step(
          x, shown, where='post', color=_tint(style.color, 0.35), lw=0.9,
          zorder=2,
        )  # fmt: skip
      axes.step(
        x, committed, where='post', color=style.color, ls=style.line,
        lw=0.7 if plain else style.width, zorder=3,
      )  # fmt: skip
      done = int(np.argmax(committed == committed[-1]))
      axes.plot(
        x[done], committed[done], style.marker, color=style.color, ms=3.2,
        mfc='white' if plain else style.color, mew=0.7, zorder=4,
        clip_on=False,
      )  # fmt: skip
      label = f'{name}, one-row' if plain else name
      ends.append((float(x[done]), float(committed[-1]), label, style))
      table.append((
        mode, name, 'one-row decode' if plain else 'verify program',
        str(int(committed[-1])), number(float(x[done])), str(n),
      ))  # fmt: skip
    top = max(y for _, y, _, _ in ends)
    left = min(0.0, *(float(c[2][0][0]) for c in curves))
    right = max(x for x, _, _, _ in ends)
    axes.set(xlim=(left - 0.02 * right, right * 1.04), ylim=(0, top * 1.03))
    axes.yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.set_ylabel('tokens')
    _label_ends(axes, ends, top)
    _label_provisional(axes, curves, styles)
  grid[-1, 0].set_xlabel('time since the end of prefill, s')
  counts = sorted({c[3] for curves in panels.values() for c in curves})
  _foot(figure, traces, f'n = {_span(counts)} requests a line')
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
      ('mode', 'scheme', 'decoding', 'committed tokens',
       'last one since prefill end, s', 'n'),
      tuple(table),
    ),
  )  # fmt: skip


def _median_counts(
  traces: Sequence[Trace],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns times since T_p and median counts, committed and shown."""
  parts = []
  for trace in traces:
    times, committed, shown = _counts(trace)
    # Before token 1 there is nothing to be seen.
    parts.append((
      np.asarray(times[1:]) - (trace.prefill_end_s or 0.0),
      np.asarray(committed), np.asarray(shown),
    ))  # fmt: skip
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
  gap = 9.5 / (6.4 * 72) * (high - low)
  at = -math.inf
  for x, y, label, style in sorted(ends, key=lambda end: end[0]):
    at = max(at + gap, x)
    axes.annotate(
      label, (x, y), (at, top * 1.07), textcoords='data', rotation=35,
      ha='left', va='bottom', fontsize=6.3, color=_shade(style.color),
      rotation_mode='anchor', annotation_clip=False,
      arrowprops={'arrowstyle': '-', 'lw': 0.4, 'color': _QUIET,
                  'shrinkA': 0, 'shrinkB': 2},
    )  # fmt: skip


def _label_provisional(
  axes: Axes, curves: Sequence[Any], styles: Mapping[str, Style]
) -> None:
  """Names the widest provisional area."""
  widest = None
  for name, _, (x, committed, shown), _ in curves:
    areas = np.diff(x) * (shown - committed)[:-1]
    if areas.size and (widest is None or areas.sum() > widest[0]):
      at = int(np.argmax(shown - committed))
      widest = areas.sum(), name, x[at], shown[at], committed[at], x
  if widest is None or widest[0] <= 0:
    return
  _, name, x, shown, committed, xs = widest
  later = xs[xs > x]
  middle = (x + later[0]) / 2 if later.size else x
  axes.annotate(
    f'{name}, provisional', (middle, (shown + committed) / 2),
    ha='center', va='center', rotation=90, fontsize=6.3,
    color=_shade(styles[name].color),
  )  # fmt: skip


# --- Acceptance ---------------------------------------------------------------


def acceptance(
  traces: Sequence[Trace], styles: Mapping[str, Style]
) -> Drawing | None:
  """Draws accepted over drafted by the position in the round."""
  groups: dict[str, dict[Any, Trace]] = {}
  for trace in traces:
    rounds = [tuple(r) for r in trace['rounds'] or () if r[0]]
    if rounds:
      # A greedy request repeated is the same experiment, not a second one.
      key = trace['prompt'], trace['seed'], tuple(rounds)
      groups.setdefault(trace['scheme'], {}).setdefault(key, trace)
  if not groups:
    return None
  names = _ordered(groups, SCHEMES)
  figure = Figure((_WIDTH_IN, 2.5), layout='constrained')
  axes = figure.subplots()
  longest = max(r[0] for g in groups.values() for key in g for r in key[2])
  table, lowest, total = [], 1.0, 0
  for i, name in enumerate(names):
    style = styles[name]
    rounds = [r for key in groups[name] for r in key[2]]
    total += len(groups[name])
    shift = (i - (len(names) - 1) / 2) * min(0.22, 0.8 / len(names))
    for position in range(1, longest + 1):
      n = sum(drafted >= position for drafted, _ in rounds)
      if not n:
        continue
      hits = sum(accepted >= position for _, accepted in rounds)
      low, high = wilson(hits, n)
      lowest = min(lowest, low)
      x = position + shift
      axes.plot([x, x], [low, high], color=style.color, lw=1.0, zorder=2)
      axes.plot(
        x, hits / n, style.marker, color=style.color, mec=_INK, mew=0.5,
        ms=4.2, zorder=3,
      )  # fmt: skip
      axes.annotate(
        str(n), (x, 0), (0, 2.5 + 7 * (len(names) - 1 - i)), fontsize=5.2,
        xycoords=('data', 'axes fraction'), textcoords='offset points',
        ha='center', color=_shade(style.color),
      )  # fmt: skip
      table.append((
        name, str(position), number(hits / n), f'{low:.3f} – {high:.3f}',
        str(n),
      ))  # fmt: skip
    axes.annotate(
      f'n, {name}', (1.0, 0), (3, 2.5 + 7 * (len(names) - 1 - i)),
      xycoords='axes fraction', textcoords='offset points', fontsize=5.8,
      color=_shade(style.color),
    )  # fmt: skip
    axes.plot(
      [], [], style.marker, color=style.color, mec=_INK, mew=0.5, ms=4.2,
      label=name,
    )  # fmt: skip
  floor = max(-0.05, math.floor(lowest * 5) / 5 - 0.1 * len(names))
  axes.set(ylim=(floor, 1.02), xlim=(0.4, longest + 0.6))
  axes.set_yticks([t for t in np.arange(0, 1.01, 0.2) if t >= lowest - 0.15])
  axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  axes.set_xlabel('position of the draft in its round')
  axes.set_ylabel('accepted / drafted')
  axes.legend(
    loc='upper left', bbox_to_anchor=(1.0, 1.0), frameon=False,
    handletextpad=0.2, borderaxespad=0.2,
  )  # fmt: skip
  _foot(figure, traces, f'n = {total} distinct requests, of both modes')
  return Drawing(
    'acceptance',
    'Acceptance by position in the round',
    figure,
    'How many of the drafts at a position were accepted, all before it '
    'included; bonus tokens are not counted. n below is the number of rounds '
    'that drafted so far. Bars are 90 % Wilson intervals with rounds taken as '
    'independent. Requests that repeat the same rounds on the same prompt '
    'count once.',
    'Acceptance by position. '
    + '; '.join(f'{row[0]} at {row[1]}: {row[2]}, n = {row[4]}' for row in table)
    + '.',
    Table(
      ('scheme', 'position', 'accepted / drafted', '90 % interval', 'rounds, n'),
      tuple(table),
    ),
  )  # fmt: skip


def wilson(hits: int, n: int) -> tuple[float, float]:
  """Returns Wilson's 90 % interval of a proportion (JASA 22, 1927, 209)."""
  z = statistics.NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
  rate, grown = hits / n, 1 + z * z / n
  middle = (rate + z * z / (2 * n)) / grown
  half = z / grown * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
  return max(0.0, middle - half), min(1.0, middle + half)


# --- TTFT over rate -----------------------------------------------------------


def ttft_over_rate(
  traces: Sequence[Trace], styles: Mapping[str, Style]
) -> Drawing | None:
  """Draws TTFT over the link's rate, bounds as lines; None without a sweep."""
  trips = [t['rtt_ms'] for t in traces]
  trip = max(dict.fromkeys(trips), key=trips.count) if trips else None
  traces = [t for t in traces if t['rtt_ms'] == trip and t['link_gbps']]
  if not is_sweep(traces):
    return None
  modes = _modes(traces)
  figure = Figure((_WIDTH_IN, 2.9), layout='constrained')
  grid = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
  table, counts = [], set()
  heights = []
  for axes, mode in zip(grid, modes, strict=True):
    chosen = [t for t in traces if t['mode'] == mode]
    prefill_s = _median_prefill_s(chosen)
    ends = []
    for name in _ordered({t['scheme'] for t in chosen}, SCHEMES):
      style, line = styles[name], []
      mine = [t for t in chosen if t['scheme'] == name]
      for rate in sorted({t['link_gbps'] for t in mine}):
        at = _fastest([t for t in mine if t['link_gbps'] == rate], name)
        values = _levelled(at, 'ttft_provisional_s', prefill_s)
        bounds = _levelled(at, 'bound_ttft_s', prefill_s)
        bound = statistics.median(bounds) if bounds else None
        if bound is not None:
          line.append((rate, bound))
        if not values:
          continue
        median = statistics.median(values)
        counts.add(len(values))
        heights.append(median)
        low, high = interval(values)
        if len(values) >= _INTERVAL_FROM:
          axes.plot([rate] * 2, [low, high], color=style.color, lw=0.9)
        axes.plot(
          rate, median, style.marker, color=style.color, ms=4.4, mec=_INK,
          mew=0.5, zorder=4,
        )  # fmt: skip
        table.append((
          mode, name, _rate(rate), number(median),
          f'{number(low)} – {number(high)}', number(bound), str(len(values)),
        ))  # fmt: skip
        ends.append((rate, median, name))
      if line:
        x, y = zip(*line, strict=True)
        axes.plot(x, y, color=style.color, ls=style.line, lw=style.width * 0.8)
    axes.set_xscale('log')
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda r, _: _rate(r)))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("rate of the link")
    axes.set_title(mode, loc='left', weight='bold')
    if prefill_s is not None:
      axes.axhline(prefill_s, color=_QUIET, lw=0.6, ls=(0, (2, 2)), zorder=0)
      axes.annotate(
        'prefill and split', (1.0, prefill_s), (0, -2), ha='right', va='top',
        xycoords=('axes fraction', 'data'), textcoords='offset points',
        fontsize=6, color=_QUIET,
      )  # fmt: skip
    _label_starts(axes, ends, styles)
  if not heights:
    return None
  grid[0].set_ylabel('time to first token, s')
  if max(heights) > 8 * min(heights):
    grid[0].set_yscale('log')
    grid[0].yaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f'{v:g}'))
  else:
    grid[0].set_ylim(0, None)
  _foot(
    figure, traces, f'n = {_span(sorted(counts))} requests a point', rates=False
  )
  return Drawing(
    'ttft_over_rate',
    'Time to first token over the rate of the link',
    figure,
    'Markers are measured medians of the first provisional token, lines are '
    'bounds. Prefill is levelled as in the bars. Whiskers are 90 % bootstrap '
    f'intervals from n = {_INTERVAL_FROM} on.',
    'Time to first token over rate. '
    + '; '.join(
      f'{row[0]} {row[1]} at {row[2]}: {row[3]} s' for row in table
    )
    + '.',
    Table(
      ('mode', 'scheme', 'rate', 'median TTFT, s', '90 % interval, s',
       'median bound, s', 'n'),
      tuple(table),
    ),
  )  # fmt: skip


def _label_starts(
  axes: Axes,
  points: Sequence[tuple[float, float, str]],
  styles: Mapping[str, Style],
) -> None:
  """Names schemes at their lowest rate, where they lie farthest apart."""
  firsts: dict[str, tuple[float, float]] = {}
  for rate, value, name in points:
    if name not in firsts or rate < firsts[name][0]:
      firsts[name] = rate, value
  for name, (rate, value) in firsts.items():
    axes.annotate(
      name, (rate, value), (6, 3), textcoords='offset points', fontsize=6.5,
      color=_shade(styles[name].color), va='bottom',
      path_effects=[patheffects.withStroke(linewidth=2, foreground='white')],
      zorder=6,
    )  # fmt: skip


# --- Words and numbers --------------------------------------------------------


def number(value: float | None, digits: int = 3) -> str:
  """Returns a number as tables have it; what is not known is a dash."""
  return '–' if value is None else f'{value:,.{digits}f}'


def _short(value: float) -> str:
  return f'{value:.3g}' if value < 100 else f'{value:,.0f}'


def _rate(gbps: float) -> str:
  for unit, factor in (('Gbit/s', 1.0), ('Mbit/s', 1e3), ('kbit/s', 1e6)):
    if gbps * factor >= 1 or unit == 'kbit/s':
      return f'{gbps * factor:.3g} {unit}'
  raise AssertionError


def _span(values: Sequence[float], form: Callable[[float], str] = str) -> str:
  if not values:
    return '0'
  low, high = form(values[0]), form(values[-1])
  return low if low == high else f'{low}–{high}'


def _pair_words(trace: Trace) -> str:
  words = []
  if trace['prompt'] is not None:
    words.append(f'prompt {trace["prompt"]}')
  if trace['repeat'] is not None:
    words.append(f'repeat {trace["repeat"]}')
  return ', '.join(words) or 'of one pair'


def _foot(
  figure: Figure, traces: Sequence[Trace], n: str, *, rates: bool = True
) -> None:
  """Writes under a figure how its numbers came to be."""
  labels = dict.fromkeys(t['label'] or 'measured' for t in traces)
  devices = dict.fromkeys(t['device'] for t in traces if t['device'])
  models = dict.fromkeys(t['model'] for t in traces if t['model'])
  lengths = sorted({t['prompt_tokens'] for t in traces if t['prompt_tokens']})
  words = [' and '.join(labels), *devices, *models]
  if lengths:
    words.append(f'{_span(lengths, "{:,}".format)} prompt tokens')
  speeds = sorted({t['link_gbps'] for t in traces if t['link_gbps']})
  if speeds and rates:
    words.append(_span(speeds, _rate))
  trips = sorted({t['rtt_ms'] for t in traces if t['rtt_ms'] is not None})
  if trips:
    words.append(f'RTT {_span(trips, "{:g}".format)} ms')
  figure.text(
    0.0, -0.02, '\n'.join([' · '.join(words), n]), fontsize=5.6, color=_QUIET,
    va='top', linespacing=1.4,
  )  # fmt: skip


def _ordered(names: Iterable[Any], first: Sequence[str]) -> list[str]:
  """Returns names: those of `first` in its order, then the others by name."""
  names = set(names) - {None}
  return [n for n in first if n in names] + sorted(names - set(first))


def _modes(traces: Iterable[Trace]) -> list[str]:
  return _ordered({t['mode'] for t in traces}, MODES)


def _fastest(traces: Sequence[Trace], scheme: str) -> list[Trace]:
  """Returns a scheme's requests in its faster form; see `latency`."""
  traces = [t for t in traces if t['scheme'] == scheme]
  by_id = {id(t.record): t for t in traces}
  records = [t.record for t in traces]
  return [by_id[id(r)] for r in latency.fastest_form(records, scheme)]


def _median_prefill_s(traces: Iterable[Trace]) -> float | None:
  known = [t.prefill_end_s for t in traces if t.prefill_end_s is not None]
  return statistics.median(known) if known else None


def _levelled(
  traces: Iterable[Trace], field: str, prefill_s: float | None
) -> list[float]:
  """Returns times with each T_p replaced by the median; see `latency`."""
  if prefill_s is None:
    return []
  return [
    t[field] - t.prefill_end_s + prefill_s
    for t in traces
    if t[field] is not None and t.prefill_end_s is not None
  ]


def _tint(color: str, white: float) -> tuple[float, ...]:
  rgb = mpl.colors.to_rgb(color)
  return tuple(c + (1 - c) * white for c in rgb)


def _shade(color: str) -> tuple[float, ...]:
  """Returns a darker one, for text."""
  return tuple(0.7 * c for c in mpl.colors.to_rgb(color))
