# SPDX-License-Identifier: Apache-2.0
"""The equivalence study cuts varied prompts and goes on where it stopped."""

import contextlib
import dataclasses
import io
import types

import pytest

from configs import equivalence as configured
from experiments import cli, config, display, equivalence, results, serving
from lynx_jax.config import ConfigError
from lynx_jax.transport import courier
from tests import engines

FIGURE = 'equal_to_bf16_exact'
ROUNDS = [
  {'prompt': 'a', 'label': label, 'draft_tokens': 4, 'rounds': [(4, 3), (4, 4)]}
  for label in ('γ = 4', '2 bits, Anchor alone')
]


def _settings(**fields) -> config.Settings:
  values = configured.get_config()
  values.model.path = 'tiny'
  values.engine.layer_groups = 2
  for name, value in fields.items():
    values.equivalence[name] = value
  return config.settings(values)


def _pieces(settings):
  return [*equivalence._pieces(settings, serving.Bytes())]


def test_prompts_are_varied_and_always_the_same():
  settings = _settings()
  pieces = _pieces(settings)
  assert len(pieces) == 24
  assert len({piece.name for piece in pieces}) == 24
  assert len({piece.tokens for piece in pieces}) == 24
  lengths = [len(piece.tokens) for piece in pieces]
  assert min(lengths) >= 192
  assert max(lengths) <= 1088
  assert len(set(lengths)) > 20
  assert {piece.name.split(':')[0] for piece in pieces} == {
    file for file, _ in settings.prompts
  }
  assert _pieces(settings) == pieces
  assert _pieces(dataclasses.replace(settings, seed=1)) != pieces


@pytest.fixture
def measured(monkeypatch) -> list[str]:
  """Replaces what takes minutes; returns the prompts that were measured."""
  names: list[str] = []

  def measure(bench, piece):
    del bench
    if len(names) == 5:
      raise KeyboardInterrupt
    names.append(piece.name)
    return {FIGURE: len(names) != 2, 'bits_total_exact': len(piece.tokens)}

  model = types.SimpleNamespace(tokenizer=serving.Bytes())
  monkeypatch.setattr(serving, 'load', lambda *_, **__: model)
  monkeypatch.setattr(equivalence, 'measure', measure)
  bench = types.SimpleNamespace(rounds=ROUNDS)
  monkeypatch.setattr(equivalence, 'Bench', lambda *_: bench)
  return names


def _run(tmp_path, **fields):
  with results.Writer(tmp_path) as writer:
    screen = io.StringIO()
    with display.screen(screen) as shown:
      equivalence.run(_settings(**fields), writer, shown)
  records = [*results.read(tmp_path / results.FILE)]
  last = {r['name']: r for r in records if r['kind'] == 'summary'}
  return last, screen.getvalue()


def test_a_run_goes_on_where_it_stopped(tmp_path, measured):
  names = [piece.name for piece in _pieces(_settings(prompts=8))]
  summaries, said = _run(tmp_path, prompts=8, at_once=3)
  assert measured == names[:3]
  assert summaries[FIGURE]['n'] == 3
  assert summaries[FIGURE]['value'] == pytest.approx(2 / 3)
  assert summaries['bits_total_exact']['unit'] == 'bits'
  assert '5 prompts are left' in said
  with pytest.raises(KeyboardInterrupt):
    _run(tmp_path, prompts=8)
  assert measured == names[:5]
  measured[:] = ['others']
  summaries, said = _run(tmp_path, prompts=8)
  assert measured[1:] == names[5:]
  assert summaries[FIGURE]['n'] == 8
  assert 'left' not in said
  titles = [
    drawn.title
    for drawn in equivalence.draw([*results.read(tmp_path / results.FILE)])
  ]
  assert titles == [
    'Acceptance by position in the round',
    'Drafts that sharpen: acceptance by position in the round',
  ]


@pytest.mark.xdist_group('exact')
@pytest.mark.parametrize('lost', [False, True])
def test_outputs_are_equal_only_if_everything_arrives(lost, monkeypatch):
  """Also behind a reference of the same prompt, which leaves all there."""
  whole = engines.bench('exact')
  whole.configure()
  whole.script = courier.shuffle(0)
  line = serving.Line(whole.engine, None)
  # One engine is all three: its target is the exact one.
  monkeypatch.setattr(
    serving, 'connect', lambda *_, **__: contextlib.nullcontext(line)
  )
  monkeypatch.setattr(whole.engine, 'warm_up', lambda: None)
  settings = dataclasses.replace(
    _settings(), output_tokens=engines.OUTPUT_TOKENS
  )
  piece = equivalence.Piece(0, 'piece', tuple(engines.prompt(200).tolist()))
  if lost:
    engines.lose_arrivals(monkeypatch)
  with contextlib.ExitStack() as stack:
    bench = equivalence.Bench(settings, None, stack)
    for _ in range(whole.engine.config.slots):  # each slot in turn
      bench.take(piece)
      found = equivalence.outputs(bench, piece)
      found |= equivalence.sampled(bench, piece)
      equal = {n: value for n, value in found.items() if n.startswith('equal')}
      assert len(equal) == 3
      assert {*equal.values()} == {not lost}


def test_figures_of_other_settings_do_not_count(tmp_path, measured):
  _run(tmp_path, prompts=3)
  summaries, _ = _run(tmp_path, prompts=3, shortest=200, at_once=1)
  assert len(measured) == 4
  assert summaries[FIGURE]['n'] == 1


def test_an_interval_is_that_of_the_mean():
  (record,) = equivalence.figures_of([{'x': v} for v in (0, 0, 0, 1, None)])
  assert (record['value'], record['n']) == (0.25, 4)
  assert record['low'] < 0.25 < record['high']


@pytest.mark.parametrize(
  'name, value', [('prompts', 0), ('shortest', 0), ('at_once', -1)]
)
def test_a_wrong_value_is_named(name, value):
  with pytest.raises(ConfigError, match=f'equivalence.{name}={value}'):
    _settings(**{name: value})


def test_it_has_no_second_process(tmp_path, capsys):
  code = cli.run(
    [
      'main',
      '--config=configs/equivalence.py',
      f'--workdir={tmp_path}',
      '--role=local',
    ]
  )
  assert code == cli.USER_MISTAKE
  assert "study 'equivalence' runs in one process" in capsys.readouterr().err
