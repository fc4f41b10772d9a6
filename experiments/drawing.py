# SPDX-License-Identifier: Apache-2.0
"""What all figures share: their words, styles, numbers, and how they are saved.

Figures read without colour, by position, marker or line style. The
global state of matplotlib is left alone.
"""

import contextlib
import dataclasses
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import selection

WIDTH_IN = 7.2  # two columns of a paper
INTERVAL_FROM = 3  # fewer measurements are shown as points alone
# Of captions, where it is shown.
CODEBOOK = (
  ' The codebook is a bound alone: what requests of bf16 would have if their '
  'exponents were coded, in no time.'
)
INK, QUIET, FAINT = '#1a1a1a', '#5a5a5a', '#c8c8c8'
_RC: dict[Any, Any] = {
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
  'legend.fontsize': 6.5,
  'lines.solid_capstyle': 'butt',
  'svg.hashsalt': 'lynx',  # the same records give the same bytes
}


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
  width: float = 1.2


# Colours of Okabe and Ito (https://jfly.uni-koeln.de/color/), which people
# with the common colour deficiencies tell apart.
_STYLES = {
  'bf16': Style('#4d4d4d', (0, (1, 1)), 's'),
  'int8': Style('#0072b2', (0, (5, 1.5)), '^'),
  'int4': Style('#009e73', (0, (4, 1, 1, 1)), 'v'),
  'interleaved': Style('#cc79a7', (0, (4, 1, 1, 1, 1, 1)), 'D'),
  'lynx': Style('#d55e00', '-', 'o', 1.8),
}
_MORE_STYLES = (
  Style('#56b4e9', (0, (8, 1.5)), 'P'),
  Style('#b58900', (0, (2, 1)), 'X'),
  Style('#8c510a', (0, (8, 1, 2, 1)), '<'),
  Style('#762a83', (0, (3, 2, 1, 2)), '>'),
  Style('#1b7837', (0, (1, 2)), 'p'),
  Style('#e69f00', (0, (3, 1)), '*'),
  Style('#666666', (0, (6, 2, 1, 2)), 'd'),
  Style('#7570b3', (0, (10, 2)), 'H'),
  Style('#000000', (0, (1, 3)), '8'),
)


def style_of(scheme: str) -> Style:
  """Returns the style of one scheme alone."""
  return _STYLES.get(scheme, _MORE_STYLES[0])


def styles_of(requests: Iterable[selection.Trace]) -> dict[str, Style]:
  """Returns a style for every scheme, the same whoever else is there."""
  more = itertools.cycle(_MORE_STYLES)
  return {
    name: _STYLES.get(name) or next(more)
    for name in selection.ordered(
      {t['scheme'] for t in requests}, selection.SCHEMES
    )
  }


def styles_for(names: Sequence[str]) -> dict[str, Style]:
  """Returns a style for every name; schemes have their own.

  As many as there are styles are told apart by line and marker as well as by
  colour.
  """
  free = [style for name, style in _STYLES.items() if name not in names]
  more = itertools.cycle([*_MORE_STYLES, *free])
  return {name: _STYLES.get(name) or next(more) for name in names}


def save(drawing: Drawing, path: Any, kind: str) -> None:
  """Saves a figure as `png` or `svg`; the same figure gives the same bytes."""
  metadata = {'Software': None} if kind == 'png' else {'Date': None}
  with look():
    drawing.figure.savefig(
      path,
      format=kind,
      dpi=200,
      bbox_inches='tight',
      pad_inches=0.05,
      facecolor='white',
      metadata=metadata,
    )


def png(drawing: Drawing) -> bytes:
  """Returns a figure as a PNG, for a notebook or a file."""
  data = io.BytesIO()
  save(drawing, data, 'png')
  return data.getvalue()


@contextlib.contextmanager
def look() -> Iterator[None]:
  """Gives what is drawn inside the look of a paper."""
  with mpl.rc_context():
    mpl.rcdefaults()
    mpl.rcParams.update(_RC)
    yield


def foot(
  figure: Figure,
  traces: Sequence[selection.Trace],
  n: str,
  *,
  rates: bool = True,
) -> None:
  """Writes under a figure how its numbers came to be."""
  labels = dict.fromkeys(t['label'] or 'measured' for t in traces)
  devices = dict.fromkeys(t['device'] for t in traces if t['device'])
  models = dict.fromkeys(t['model'] for t in traces if t['model'])
  lengths = sorted({t['prompt_tokens'] for t in traces if t['prompt_tokens']})
  words = [' and '.join(labels) or 'measured', *devices, *models]
  if lengths:
    words.append(f'{span(lengths, "{:,}".format)} prompt tokens')
  speeds = sorted({t['link_gbps'] for t in traces if t['link_gbps']})
  if speeds and rates:
    words.append(span(speeds, rate))
  trips = sorted({t['rtt_ms'] for t in traces if t['rtt_ms'] is not None})
  if trips:
    words.append(f'RTT {span(trips, "{:g}".format)} ms')
  figure.text(
    0.0,
    -0.02,
    '\n'.join([' · '.join(words), n]),
    fontsize=5.6,
    color=QUIET,
    va='top',
    linespacing=1.4,
  )


def prefill_line(axes: Axes, prefill_s: float) -> None:
  """Draws where prefill and split end, on an axis of seconds."""
  axes.axhline(prefill_s, color=QUIET, lw=0.6, ls=(0, (2, 2)), zorder=0)
  axes.annotate(
    'prefill and split',
    (0.0, prefill_s),
    (2, -2),
    xycoords=('axes fraction', 'data'),
    textcoords='offset points',
    va='top',
    fontsize=6,
    color=QUIET,
  )


def number(value: float | None, digits: int = 3) -> str:
  """Returns a number as tables have it; what is not known is a dash."""
  return '–' if value is None else f'{value:,.{digits}f}'


def between(low: float | None, high: float | None) -> str:
  """Returns an interval as tables have it."""
  if low is None or high is None:
    return '–'
  return f'{number(low)} – {number(high)}'


def short(value: float) -> str:
  """Returns three digits, for labels in figures."""
  return f'{value:#.3g}' if 1e-4 <= value < 100 else f'{value:,.3g}'


def rate(gbps: float) -> str:
  """Returns a rate in the unit that suits it."""
  unit, factor = unit_of(gbps)
  return f'{gbps * factor:.3g} {unit}'


def unit_of(gbps: float) -> tuple[str, float]:
  """Returns the unit that suits a rate, and how many are 1 Gbit/s."""
  return next(
    (unit, factor)
    for unit, factor in (('Gbit/s', 1.0), ('Mbit/s', 1e3), ('kbit/s', 1e6))
    if gbps * factor >= 1 or unit == 'kbit/s'
  )


def span(values: Sequence[float], form: Callable[[float], str] = str) -> str:
  """Returns the first and last of ascending values, or the only one."""
  if not values:
    return '0'
  low, high = form(values[0]), form(values[-1])
  return low if low == high else f'{low}–{high}'


def tint(color: str, white: float) -> tuple[float, ...]:
  """Returns a lighter colour; `white` is its part of white."""
  rgb = colors.to_rgb(color)
  return tuple(c + (1 - c) * white for c in rgb)


def shade(color: str) -> tuple[float, ...]:
  """Returns a darker colour, for text."""
  return tuple(0.7 * c for c in colors.to_rgb(color))
