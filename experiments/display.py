# SPDX-License-Identifier: Apache-2.0
"""Shows a run: progress, the text as it comes, and the table at the end.

It measures nothing. On a terminal provisional text is dim and underlined until
it is committed; where output goes into a file or a pipe, only what is final is
printed, and what was taken back is told in brackets.
"""

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich import box, console, live, table, text

PROVISIONAL_STYLE = 'dim underline'

# Decodes token ids to text; a text that ends inside a character may hold
# U+FFFD there, which is not shown.
Decode = Callable[[Sequence[int]], str]


@contextlib.contextmanager
def screen(stream: TextIO | None = None) -> Iterator['Screen']:
  """Yields a screen on `stream`, standard output by default."""
  stream = sys.stdout if stream is None else stream
  shown = console.Console(
    file=stream, highlight=False, soft_wrap=not stream.isatty()
  )
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
    """Prints the comparison of schemes; see `table_rows`."""
    grid = table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
      grid.add_column(column.title, justify=column.justify, no_wrap=True)
    for row in table_rows(records):
      grid.add_row(*row)
    width = None if self.is_live else TABLE_WIDTH
    self._console.print(grid, width=width)


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
class Column:
  """One column: a title and how to form a cell from a scheme's records."""

  title: str
  cell: Callable[[list[Mapping[str, Any]], dict[str, list]], str]
  justify: Any = 'right'


def table_rows(records: Iterable[Mapping[str, Any]]) -> list[list[str]]:
  """Forms the cells of the table: a row per scheme and mode, medians inside.

  Args:
    records: `request` records of one study; others are passed over. Those in
      plain form (`form='plain'`) are left to the study's summaries.
  """
  groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
  for record in records:
    if record.get('kind') == 'request' and record.get('form') != 'plain':
      key = (record['mode'] or '', record['scheme'])
      groups.setdefault(key, []).append(record)
  rows = []
  for (mode, _), group in groups.items():
    peers = {scheme: g for (m, scheme), g in groups.items() if m == mode}
    rows.append([column.cell(group, peers) for column in COLUMNS])
  return rows


UNKNOWN = '–'
TABLE_WIDTH = 160


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
  name = 'ttft_provisional_s'
  return _over(_median(group, name), _median(peers.get('int8', []), name))


def _over_bound(group, _) -> str:
  from experiments import latency

  return _over(latency.ttft_over_bound(group), 1.0)


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


COLUMNS = (
  Column('scheme', lambda g, _: g[0]['scheme'], 'left'),
  Column('mode', lambda g, _: g[0]['mode'] or UNKNOWN, 'left'),
  Column('TTFT prov. s', _number('ttft_provisional_s', '.3f')),
  Column('TTFT comm. s', _number('ttft_committed_s', '.3f')),
  Column('1→2 gap s', _number('tbt_first_s', '.3f')),
  Column('exposed s', _number('exposed_s', '.3f')),
  Column('/ INT8', _over_int8),
  Column('/ bound', _over_bound),
  Column('accept', _acceptance),
  Column('retract', _number('retracted', '.0f')),
  Column('bits A', _number('bits_anchor', '.2f')),
  Column('bits A+R', _number('bits_total', '.2f')),
  Column('MB A', _number('bytes_anchor', '.2f', 1e-6)),
  Column('MB R', _number('bytes_residual', '.2f', 1e-6)),
  Column('= ref.', _equal, 'left'),
)
