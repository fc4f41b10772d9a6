# SPDX-License-Identifier: Apache-2.0
"""What a person sees: provisional text is told apart until it is committed."""

import dataclasses
import io

import pytest
from rich import console

from experiments import display, results
from experiments.schemes import SCHEMES


@dataclasses.dataclass(frozen=True)
class Provisional:
  position: int
  token: int


@dataclasses.dataclass(frozen=True)
class Committed:
  upto: int


@dataclasses.dataclass(frozen=True)
class Retracted:
  start: int


@dataclasses.dataclass(frozen=True)
class Finished:
  state: str = 'done'


def _decode(tokens) -> str:
  return bytes(tokens).decode('utf-8', errors='replace')


def _stream(*events) -> display.TokenStream:
  stream = display.TokenStream(_decode)
  for event in events:
    stream.show(event)
  return stream


def _drafted(text: str, start: int = 0):
  return [
    Provisional(position, byte)
    for position, byte in enumerate(text.encode(), start)
  ]


def test_tokens_are_provisional_until_committed():
  stream = _stream(*_drafted('abcd'), Committed(2))
  assert stream.parts() == ('ab', 'cd')
  stream.show(Committed(4))
  assert stream.parts() == ('abcd', '')


def test_retracted_tokens_go():
  stream = _stream(*_drafted('abXY'), Retracted(2), *_drafted('cd', 2))
  assert stream.parts() == ('', 'abcd')
  assert stream.retracted == 2


def test_half_a_character_is_never_shown():
  """The umlaut is two bytes: one committed, one provisional."""
  stream = _stream(*_drafted('aü')[:2])
  assert stream.parts() == ('', 'a')
  stream.show(Committed(2))
  assert stream.parts() == ('a', '')
  stream.show(Provisional(2, 'ü'.encode()[1]))
  assert stream.parts() == ('a', 'ü')
  stream.show(Committed(3))
  assert stream.parts() == ('aü', '')


def test_other_events_change_nothing():
  assert _stream(*_drafted('a'), Finished()).parts() == ('', 'a')


@pytest.mark.parametrize(
  'events',
  [
    [Provisional(1, 97)],
    [*_drafted('ab'), Provisional(1, 97)],
    [*_drafted('ab'), Committed(3)],
    [*_drafted('ab'), Committed(2), Committed(1)],
    [*_drafted('ab'), Committed(2), Retracted(1)],
    [*_drafted('ab'), Retracted(3)],
  ],
)
def test_contradicting_events_are_refused(events):
  with pytest.raises(ValueError, match=r'provisional|committed|retracted'):
    _stream(*events)


def _terminal(file: io.StringIO) -> display.Screen:
  return display.Screen(
    console.Console(
      file=file,
      force_terminal=True,
      color_system='standard',
      width=80,
      _environ={'TERM': 'xterm'},
    )
  )


def test_a_terminal_underlines_provisional_text():
  file = io.StringIO()
  with _terminal(file).stream('lynx', _decode) as stream:
    for event in (*_drafted('abcd'), Committed(2)):
      stream.show(event)
  assert 'ab\x1b[2;4mcd\x1b[0m' in file.getvalue()


def test_a_pipe_gets_plain_final_text():
  file = io.StringIO()
  with display.screen(file) as screen, screen.stream('lynx', _decode) as tokens:
    for event in (
      *_drafted('abX'),
      Retracted(2),
      *_drafted('[c]', 2),
      Committed(5),
    ):
      tokens.show(event)
  assert file.getvalue() == (
    'lynx:\nab[c] [1 provisional tokens were taken back]\n'
  )


def test_steps_and_notes_in_a_pipe_are_whole_lines():
  file = io.StringIO()
  with display.screen(file) as screen:
    with screen.step('measuring prefill'):
      screen.note(f'[3/5] {"x" * 300}')
  assert file.getvalue() == f'measuring prefill …\n[3/5] {"x" * 300}\n'


def _record(scheme, ttft_s, **more):
  return results.request_record(
    scheme=scheme,
    mode='serial',
    prefill_s=3.0,
    split_s=0.0,
    ttft_provisional_s=ttft_s,
    bound_ttft_s=ttft_s / 1.02,
    **more,
  )


def test_the_table_has_medians_and_ratios():
  records = [
    _record('int8', 10.0, equal_to_reference=True),
    _record(
      'lynx',
      8.0,
      drafted=10,
      accepted=9,
      equal_to_reference=True,
      bytes_anchor=12_345_678,
    ),
    _record('lynx', 8.2, drafted=30, accepted=21, equal_to_reference=False),
  ]
  titles = [row.title for row in display.ROWS]
  columns = {
    scheme: dict(zip(titles, cells, strict=True))
    for scheme, cells in display.columns_of(records).items()
  }
  assert list(columns) == ['int8', 'lynx']
  int8, lynx = columns.values()
  assert int8['TTFT over INT8'] == '1.000'
  assert int8['acceptance'] == display.UNKNOWN
  assert lynx['TTFT provisional, s'] == '8.100'
  assert lynx['TTFT over INT8'] == '0.810'
  assert lynx['TTFT over bound'] == '1.020'
  assert lynx['acceptance'] == '0.75'
  assert lynx['Anchor, MB'] == '12.35'
  assert lynx['equals reference'] == 'NO (1/2)'
  assert lynx['TTFT committed, s'] == display.UNKNOWN


def test_a_grid_breaks_long_cells_before_it_loses_names():
  file = io.StringIO()
  screen = display.Screen(console.Console(file=file, width=60))
  cells = ('bf16 2, int8 6, lynx 6, lynx_2bit 1', 'int8 1, lynx 12') * 2
  screen.grid('Advice', ('load', *'abcd'), [('1,000 at once', *cells)])
  shown = file.getvalue()
  assert max(map(len, shown.splitlines())) <= 60
  for word in ('1,000', 'at', 'once', 'lynx_2bit', '12'):
    assert word in shown


def test_a_terminal_of_a_few_columns_breaks_no_number(monkeypatch):
  monkeypatch.setenv('COLUMNS', '5')
  file = io.StringIO()
  with display.screen(file) as screen:
    screen.grid('medians', ('cell', 'bits'), [('a name of 14', '1234567890')])
  assert '1234567890' in file.getvalue()


def test_a_terminal_without_a_character_shows_another():
  written = io.BytesIO()
  file = io.TextIOWrapper(written, encoding='ascii')
  with display.screen(file) as screen:
    screen.note('KL(bf16 ‖ Anchor)')
  file.flush()
  assert written.getvalue() == b'KL(bf16 ? Anchor)\n'


@pytest.mark.parametrize('width', [80, 200])
def test_a_grid_cuts_no_name(width):
  file = io.StringIO()
  screen = display.Screen(console.Console(file=file, width=width))
  names = [f'lynx, rate_gbps=0.00{i}, k=v=2,2,4, overlapped' for i in (4, 8)]
  header = ('cell', 'TTFT, s', 'acceptance', 'KL(bf16 ‖ Anchor), nats', 'n')
  screen.grid(
    'medians',
    (*header, 'bits of all', 'equals reference'),
    [(name, '1.520', '0.875', '0.12500', '1', '16.5', 'yes') for name in names],
  )
  shown = file.getvalue()
  for word in ' '.join(names).split():
    assert word in shown
  assert shown.count('yes') == shown.count('0.12500') == 2
  assert (names[0] in shown) == (width == 200)
  assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize(
  'names, tables',
  [(('bf16', 'int8', 'int4', 'lynx', 'interleaved'), 1), (SCHEMES, 3)],
)
def test_the_table_is_whole_in_80_columns(names, tables):
  file, schemes = io.StringIO(), [*names]
  with display.screen(file) as screen:
    screen.table([_record(scheme, 123.456) for scheme in schemes])
  shown = file.getvalue()
  assert all(scheme in shown for scheme in schemes)
  for row in display.ROWS:
    assert shown.count(f' {row.title} ') == tables
  assert shown.count('123.456') == len(schemes)
  assert max(map(len, shown.splitlines())) <= 80
