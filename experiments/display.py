# SPDX-License-Identifier: Apache-2.0
"""Shows a run: progress, the text as it comes, and the table at the end.

It measures nothing. On a terminal provisional text is dim and underlined until
it is committed; where output goes into a file or a pipe, only what is final is
printed, and what was taken back is told in brackets.
"""

import contextlib
import dataclasses
import io
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich import box, console, live, table, text

from experiments import summaries
from experiments.schemes import SCHEMES

PROVISIONAL_STYLE = 'dim underline'
_LEAST_COLUMNS = 40

# Decodes token ids to text; a text that ends inside a character may hold
# U+FFFD there, which is not shown.
Decode = Callable[[Sequence[int]], str]


@contextlib.contextmanager
def screen(
  stream: TextIO | None = None, *, quiet: bool = False
) -> Iterator['Screen']:
  """Yields a screen on `stream`, standard output by default, or on nothing."""
  stream = sys.stdout if stream is None else stream
  if isinstance(stream, io.TextIOWrapper):  # a mark may be lost, no run is
    stream.reconfigure(errors='replace')
  shown = console.Console(
    file=stream,
    highlight=False,
    soft_wrap=not stream.isatty(),
    quiet=quiet,
    force_terminal=False if quiet else None,  # no line that moves, either
  )
  # A narrower terminal breaks the lines: no table could be read in it.
  if shown.width < _LEAST_COLUMNS:
    shown.width = _LEAST_COLUMNS
  yield Screen(shown)


class Screen:
  """Where a study says what it does."""

  def __init__(self, shown: console.Console):
    self._console = shown

  @property
  def is_live(self) -> bool:
    """Whether somebody watches a terminal that can redraw."""
    return self._console.is_terminal and not self._console.is_dumb_terminal

  def note(self, message: str) -> None:
    """Prints one line of progress."""
    self._console.print(message, markup=False)

  @contextlib.contextmanager
  def step(self, message: str) -> Iterator[None]:
    """Shows that something is under way; on a terminal it moves."""
    if self.is_live:
      with self._console.status(text.Text(message)):
        yield
    else:
      self.note(f'{message} …')
      yield

  @contextlib.contextmanager
  def stream(self, title: str, decode: Decode) -> Iterator['TokenStream']:
    """Shows the text of one request while its events come.

    Args:
      title: printed before it, for example the scheme.
      decode: turns generated token ids into text.
    """
    tokens = TokenStream(decode)
    self.note(f'{title}:')
    if self.is_live:
      with live.Live(
        console=self._console, auto_refresh=False, transient=True
      ) as shown:
        tokens.on_change = lambda: shown.update(tokens.render(), refresh=True)
        yield tokens
      self._console.print(tokens.render())
    else:
      yield tokens
      self.note(tokens.plain())

  def table(self, records: Iterable[Mapping[str, Any]]) -> None:
    """Prints the comparison: a table a mode, a column a scheme.

    Schemes that a line has no room for have a table of their own below.

    Args:
      records: of one study; see `columns_of`.
    """
    records = list(records)
    modes = sorted({r['mode'] for r in records if _is_shown(r)}, reverse=True)
    for mode in modes:
      columns = columns_of([r for r in records if r.get('mode') == mode])
      shown: dict[str, list[str]] = {}
      for scheme, cells in columns.items():
        more = shown | {scheme: cells}
        if shown and not _fits(_medians(mode, more), self._console):
          self._console.print(_medians(mode, shown))
          more = {scheme: cells}
        shown = more
      self._console.print(_medians(mode, shown))

  def grid(
    self, title: str, header: Sequence[str], rows: Iterable[Sequence[str]]
  ) -> None:
    """Prints any table; names of rows are broken where it is too wide.

    Where there is room they are broken at blanks alone, and if that is not
    enough, so are the other cells. No number is broken.
    """
    grid = table.Table(
      title=title,
      title_justify='left',
      box=box.SIMPLE_HEAD,
      show_edge=False,
      pad_edge=False,
      padding=(0, 1, 0, 0),
    )
    rows = [*rows]
    for i, name in enumerate(header):
      grid.add_column(
        text.Text(name), justify='right' if i else 'left', overflow='fold'
      )
    for row in rows:
      grid.add_row(*map(text.Text, row))
    if not _fits(grid, self._console):
      columns = [*zip(header, *rows, strict=True)]
      widths = [
        max(map(len, [*h.split(), *cells]), default=0) for h, *cells in columns
      ]
      words = [max(map(len, ' '.join(c).split()), default=0) for c in columns]
      if words[0] + sum(widths[1:]) + len(widths) > self._console.width:
        spare = self._console.width - widths[0] - sum(words[1:]) - len(widths)
        more = max(0, spare // max(1, len(widths) - 1))
        widths = [
          min(w + more, most) for w, most in zip(words, widths, strict=True)
        ]
      for column, width in zip(grid.columns[1:], widths[1:], strict=True):
        column.width = width
    self._console.print(grid)


def _fits(grid: table.Table, terminal: console.Console) -> bool:
  room = terminal.options.update(max_width=sys.maxsize)
  return terminal.measure(grid, options=room).maximum <= terminal.width


def _medians(mode: str, columns: Mapping[str, Sequence[str]]) -> table.Table:
  """Returns the table of the schemes whose cells are given."""
  grid = table.Table(
    title=f'{mode}, medians', title_justify='left', box=box.SIMPLE_HEAD
  )
  grid.add_column('')
  for scheme in columns:
    grid.add_column(scheme, justify='right', no_wrap=True)
  for i, row in enumerate(ROWS):
    grid.add_row(row.title, *(cells[i] for cells in columns.values()))
  return grid


class TokenStream:
  """The generated tokens of one request: final ones, then provisional ones.

  It takes the engine's events: `Provisional(position, token)`,
  `Committed(upto)` and `Retracted(start)`. Positions count generated tokens
  from 0. It holds that commits only grow and that nothing committed is taken
  back.
  """

  def __init__(self, decode: Decode):
    self._decode = decode
    self.tokens: list[int] = []
    self.committed = 0
    self.retracted = 0
    self.on_change: Callable[[], None] = lambda: None

  def show(self, event: Any) -> None:
    """Takes one event; events of other kinds change nothing.

    Raises:
      ValueError: the event contradicts the ones before.
    """
    match type(event).__name__:
      case 'Provisional':
        if event.position != len(self.tokens):
          raise ValueError(
            f'provisional token at {event.position}, after '
            f'{len(self.tokens)} tokens'
          )
        self.tokens.append(int(event.token))
      case 'Committed':
        if not self.committed <= event.upto <= len(self.tokens):
          raise ValueError(
            f'committed up to {event.upto}, with {self.committed} committed '
            f'and {len(self.tokens)} shown'
          )
        self.committed = event.upto
      case 'Retracted':
        if not self.committed <= event.start <= len(self.tokens):
          raise ValueError(
            f'retracted from {event.start}, with {self.committed} committed '
            f'and {len(self.tokens)} shown'
          )
        self.retracted += len(self.tokens) - event.start
        del self.tokens[event.start :]
      case _:
        return
    self.on_change()

  def parts(self) -> tuple[str, str]:
    """Returns the final and the provisional text.

    A character whose bytes are not all there yet is in neither. One that
    begins with final bytes and ends with provisional ones is provisional.
    """
    final = _whole(self._decode(self.tokens[: self.committed]))
    everything = _whole(self._decode(self.tokens))
    return final, everything[len(final) :]

  def render(self) -> text.Text:
    """Returns the styled text."""
    final, provisional = self.parts()
    return text.Text(final) + text.Text(provisional, PROVISIONAL_STYLE)

  def plain(self) -> str:
    """Returns the text without styles, provisional text in brackets."""
    final, provisional = self.parts()
    note = f' [provisional: {provisional}]' if provisional else ''
    if self.retracted:
      note += f' [{self.retracted} provisional tokens were taken back]'
    return final + note


def _whole(decoded: str) -> str:
  return decoded.rstrip('\N{REPLACEMENT CHARACTER}')


@dataclasses.dataclass(frozen=True)
class Row:
  """One row: a title and how to form a cell from a scheme's records.

  `cell` takes the records of the scheme, and those of all schemes by name: in
  the form of decoding with the least TTFT where `fastest`, else those of the
  verify program, whose output and commits count.
  """

  title: str
  cell: Callable[[list[Mapping[str, Any]], dict[str, list]], str]
  fastest: bool = False


def columns_of(
  records: Iterable[Mapping[str, Any]],
) -> dict[str, list[str]]:
  """Forms the cells of every scheme, in the order of ROWS.

  Args:
    records: of one mode; only `request` records are taken.
  """
  records = [r for r in records if _is_shown(r)]
  order = list(SCHEMES)
  schemes = sorted({r['scheme'] for r in records}, key=order.index)
  fastest = {name: summaries.fastest_form(records, name) for name in schemes}
  verified: dict[str, list] = {name: [] for name in schemes}
  for record in records:
    if record.get('form') != 'plain':
      verified[record['scheme']].append(record)
  return {
    name: [
      row.cell(groups[name], groups)
      for row in ROWS
      for groups in (fastest if row.fastest else verified,)
    ]
    for name in schemes
  }


def _is_shown(record: Mapping[str, Any]) -> bool:
  return record.get('kind') == 'request'


UNKNOWN = '–'


def _median(group: Sequence[Mapping[str, Any]], name: str) -> float | None:
  known = [r[name] for r in group if r.get(name) is not None]
  return statistics.median(known) if known else None


def _number(name: str, form: str, unit: float = 1.0):
  def cell(group, _):
    value = _median(group, name)
    return UNKNOWN if value is None else format(value * unit, form)

  return cell


def _over(value: float | None, other: float | None) -> str:
  if value is None or not other:
    return UNKNOWN
  return f'{value / other:.3f}'


def _over_int8(group, peers) -> str:
  ratio = summaries.ttft_over(group, peers.get('int8', []))
  return _over(ratio, 1.0)


def _over_bound(group, _) -> str:
  return _over(summaries.ttft_over_bound(group), 1.0)


def _acceptance(group, _) -> str:
  drafted = sum(r['drafted'] or 0 for r in group)
  accepted = sum(r['accepted'] or 0 for r in group)
  return f'{accepted / drafted:.2f}' if drafted else UNKNOWN


def _equal(group, _) -> str:
  values = [r['equal_to_reference'] for r in group]
  known = [value for value in values if value is not None]
  if not known:
    return UNKNOWN
  return 'yes' if all(known) else f'NO ({known.count(False)}/{len(known)})'


ROWS = (
  Row('TTFT provisional, s', _number('ttft_provisional_s', '.3f'), True),
  Row('TTFT committed, s', _number('ttft_committed_s', '.3f'), True),
  Row('token 1 to 2, s', _number('tbt_first_s', '.3f'), True),
  Row('exposed, s', _number('exposed_s', '.3f'), True),
  Row('TTFT over INT8', _over_int8, True),
  Row('TTFT over bound', _over_bound, True),
  Row('last token, s', _number('done_s', '.3f'), True),
  Row('last verified, s', _number('done_s', '.3f')),
  Row('acceptance', _acceptance),
  Row('retracted tokens', _number('retracted', '.0f')),
  Row('Anchor, bits a value', _number('bits_anchor', '.2f')),
  Row('all, bits a value', _number('bits_total', '.2f')),
  Row('Anchor, MB', _number('bytes_anchor', '.2f', 1e-6)),
  Row('Residual, MB', _number('bytes_residual', '.2f', 1e-6)),
  Row('equals reference', _equal),
)
