# SPDX-License-Identifier: Apache-2.0
"""The fidelity study on a random model: what must hold on any model."""

import dataclasses
import functools
import io
import json
import pathlib
import string
import types

import numpy as np
import pytest

from configs import fidelity as configured
from experiments import (
  cli,
  config,
  display,
  fidelity_study,
  forcing,
  main,
  peer_formulas,
  questions,
  readings,
  report,
  results,
  serving,
  synthetic,
  text_metrics,
)
from lynx_jax import wire as wire_lib
from lynx_jax.config import CodecConfig, ConfigError
from lynx_jax.models import presets
from lynx_jax.prefill import Prefill
from lynx_jax.programs import fetch
from lynx_jax.transport.streams import PAGE_BYTES, WireFormat
from tests import engines

pytestmark = pytest.mark.usefixtures('unoptimised')
LENGTHS = (450, 397)
MODEL = presets.tiny(layers=2, head_dim=16)
model = functools.cache(lambda: engines.draw_model(MODEL))


def _values(**fields):
  values = configured.get_config('book')
  values.model.path = 'tiny'
  values.engine.layer_groups = 2
  values.engine.token_chunk = 128
  values.codec.group = 32
  values.codec.recent_tokens = 16
  values.prompt_tokens = 440  # all prompts share their programs
  values.acceptance.output_tokens = 12
  values.fidelity.update(
    {
      'slots': 2,
      'forced_tokens': 70,
      'free_tokens': 12,
      'tasks': 'passkey,needle',
      'lengths': '500',
      'depths': '0.5',
    }
    | fields
  )
  return values


def _settings(**fields) -> config.Settings:
  return config.settings(_values(**fields))


@pytest.fixture(scope='module', autouse=True)
def small_model():
  """Puts a model of two layers in the place of the one that is named."""
  loaded = serving.Model(MODEL, model(), model(), serving.Bytes())
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(serving, 'load', lambda *_, **__: loaded)
    yield


# --- Readings -----------------------------------------------------------------


@functools.cache
def _texts() -> tuple[forcing.Texts, list]:
  engine = dataclasses.replace(_settings().engine, prompt_tokens=512)
  prefill = Prefill(model(), CodecConfig(), engine)
  states = [[*prefill.chunks(engines.prompt(n))][-1] for n in LENGTHS]
  return forcing.Texts.gather(MODEL, ('a', 'b'), states), states


def test_readings_nest_and_the_exact_one_is_bf16():
  texts, _ = _texts()
  settings = _settings()
  found = {
    r.name: r
    for r in readings.readings(texts, settings.schemes, settings.engine)
  }
  assert [*found] == readings.names(settings.schemes)
  assert [*found] == [
    'bf16',
    'int8',
    'int4',
    'lynx_anchor',
    'lynx',
    'lynx_exact',
  ]
  same = {name: r.same_as for name, r in found.items() if r.same_as}
  assert same == {'lynx': 'int8', 'lynx_exact': 'bf16'}
  assert found['lynx_anchor'].target == 'planes:1'
  assert found['lynx_exact'].target == 'exact'
  # As many bits as the wire counts, and fewer for a coarser reading.
  for slot, tokens in enumerate(LENGTHS):
    bits = [found[n].bits[slot] for n in ('lynx_anchor', 'int8', 'bf16')]
    assert bits == sorted(bits)
    wire = WireFormat(texts.model, settings.schemes[1].codec, settings.engine)
    assert found['lynx'].bits[slot] == wire.bits_a_value(tokens).total


def test_a_reading_that_is_not_exact_is_seen():
  """A digest must tell caches apart that differ in one bit."""
  texts, _ = _texts()
  x = np.asarray(texts.k[1].astype(np.float32))
  one, other = ((x,),), ((x.copy(),),)
  assert readings._digest(one) == readings._digest(other)
  other[0][0][1, 3, 0, 5] = np.nextafter(x[1, 3, 0, 5], np.inf)
  assert readings._digest(one) != readings._digest(other)


def test_bytes_of_the_exact_plane_are_those_that_travel():
  texts, states = _texts()
  settings = _settings()
  codec = settings.schemes[-1].codec
  engine = dataclasses.replace(settings.engine, prompt_tokens=512)
  wire = WireFormat(texts.model, codec, engine)
  _, sizes = readings._read_exact(texts, wire)
  prefill = Prefill(model(), codec, engine)
  for state, size in zip(states, sizes, strict=True):
    state.prefix_tokens = codec.prefix_end(state.tokens)
    travelled = 0
    for group, chunk in wire.strings(state.tokens):
      if chunk not in state.split:
        prefill.split(state, chunk)
      travelled += fetch(wire_lib.encode(wire, state, group, chunk)).item()
    assert size == travelled * PAGE_BYTES > 0


def test_bf16_must_be_among_the_schemes():
  values = _values()
  values.scheme = 'lynx,int8'
  with pytest.raises(ConfigError, match='must have bf16'):
    readings.names(config.settings(values).schemes)


def test_a_peer_reads_what_its_formula_gives():
  texts, _ = _texts()
  settings = _settings(peers='kivi4_oracle,cachegen')
  *_, found, _ = readings.readings(
    texts, settings.schemes, settings.engine, settings.fidelity.peers
  )
  assert (found.name, found.target, found.same_as) == (
    'kivi4_oracle',
    'peer',
    None,
  )
  bits = np.zeros(2)
  for layer in range(MODEL.layers):
    for x, read, is_k in zip(
      (texts.k[layer], texts.v[layer]),
      found.kv[layer],
      (True, False),
      strict=True,
    ):
      for slot, tokens in enumerate(LENGTHS):
        own = np.asarray(x[slot, :tokens].astype(np.float32))
        coded = peer_formulas.kivi(own, is_k, 4)
        bits[slot] += coded.bits
        np.testing.assert_array_equal(
          np.swapaxes(read[slot], 0, 1)[:tokens], coded.values
        )
  values = 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_dim
  np.testing.assert_allclose(found.bits, bits / np.array(LENGTHS) / values)


# --- The study ----------------------------------------------------------------


def _run(folder, **fields):
  settings = _settings(**fields)
  shown = io.StringIO()
  with results.Writer(folder) as writer, display.screen(shown) as screen:
    writer.write(results.run_record(['a'], {'study': 'fidelity'}))
    fidelity_study.run(settings, writer, screen)
  records = [*results.read(folder / results.FILE)]
  last = {r['name']: r for r in records if r['kind'] == 'summary'}
  return records, last, shown.getvalue()


@pytest.fixture(scope='module')
def ran(tmp_path_factory):
  folder = tmp_path_factory.mktemp('fidelity')
  return folder, *_run(folder)


def test_what_must_hold_of_every_model(ran):
  _, records, last, said = ran
  requests = [r for r in records if r['kind'] == 'request']
  assert {r['fidelity']['part'] for r in requests} == {
    'forced',
    'free',
    'acceptance',
    'tasks',
  }
  # A synthetic prompt is never cut, however long the others may be.
  asked = [r for r in requests if r['fidelity']['part'] == 'tasks']
  assert {r['prompt_tokens'] for r in asked} == {
    len(question.prompt)
    for question in synthetic.grid(
      ('passkey', 'needle'), (500,), (0.5,), 1, encode=str.encode, seed=0
    )
  }
  assert max(r['prompt_tokens'] for r in asked) > 440
  for name in ('bf16', 'lynx_exact'):
    assert last[f'kl_{name}']['value'] == 0.0
    assert last[f'agreement_{name}']['value'] == 1.0
    assert last[f'nll_over_bf16_{name}']['value'] == 0.0
    assert last[f'exact_match_tokens_{name}']['value'] == 11
    assert last[f'same_answer_tasks_{name}']['value'] == 1.0
  assert last['kl_int8'] | {'name': ''} == last['kl_lynx'] | {'name': ''}
  assert 0 < last['kl_lynx']['value'] < last['kl_lynx_anchor']['value']
  assert last['bits_lynx_anchor']['value'] < last['bits_lynx']['value']
  assert last['bits_lynx']['value'] < last['bits_lynx_exact']['value'] < 16
  # A random model knows nothing: about log(256) a token.
  assert last['nll_bf16']['value'] > 4
  assert {'acceptance_gamma8_lynx', 'acceptance_gamma8_position1_lynx'} <= {
    *last
  }
  assert 'million parameters' in said
  assert 'answers few of the tasks' in said


def test_acceptance_follows_the_target(ran):
  """Rounds commit what the target decodes alone."""
  _, records, _, _ = ran
  by = {r['request']: r for r in records if r['kind'] == 'request'}
  accepted, free = by['acceptance/book/lynx'], by['free/book/lynx']
  count = min(len(accepted['token_ids']), len(free['token_ids']))
  assert count > 1
  assert accepted['token_ids'][:count] == free['token_ids'][:count]
  assert accepted['drafted'] == 8 * len(accepted['rounds'])


def test_a_run_goes_on_where_it_stopped(ran, monkeypatch):
  folder, records, last, _ = ran
  monkeypatch.setattr(fidelity_study, '_Batch', None)  # must not be needed
  with monkeypatch.context() as patch:
    patch.setattr(fidelity_study, '_answer', None)
    again, summaries, _ = _run(folder)
  requests = sum(r['kind'] == 'request' for r in records)
  assert sum(r['kind'] == 'request' for r in again) == requests
  assert summaries == last
  # Another length is another prompt; the other parts keep their figures.
  again, summaries, _ = _run(
    folder, parts='tasks', lengths='500,510', tasks='needle'
  )
  assert sum(r['kind'] == 'request' for r in again) == requests + 6
  assert summaries['match_needle_bf16']['n'] == 2
  assert summaries['kl_int4'] == last['kl_int4']


def test_a_reading_that_is_missing_is_measured_alone(ran, tmp_path):
  """Beside bf16, with which it is compared."""
  _, records, last, _ = ran
  with results.Writer(tmp_path) as writer:
    for record in records:
      if record.get('request') != 'forced/book/int4':
        writer.write(record)
  again, summaries, _ = _run(tmp_path, parts='forced')
  fresh = [r for r in again[len(records) - 1 :] if r['kind'] == 'request']
  assert [r['scheme'] for r in fresh] == ['bf16', 'int4']
  assert summaries == last


def test_the_report_shows_every_figure(ran):
  folder, *_ = ran
  page = report.write(folder).read_text('utf-8')
  for name in ('forced', 'free', 'tasks', 'grid'):
    assert (folder / f'fidelity_{name}.png').stat().st_size > 5000
  assert (folder / 'acceptance.png').exists()
  assert 'million parameters' in page
  assert 'A reading is what' in page
  assert 'earlier run(s)' not in page


_ANY = [*string.printable[:94], '\ufffd']


def test_published_files(tmp_path, monkeypatch):
  """Their scores are in percent; a long prompt loses its middle."""
  monkeypatch.setattr(
    fidelity_study._Bench, 'readings', _one_reading, raising=True
  )
  data = tmp_path / 'data'
  data.mkdir()
  line = {'context': 'x' * 600, 'input': '?', 'answers': ['no', 'never']}
  (data / 'qasper.jsonl').write_text(json.dumps(line) + '\n')
  for name, value in (('prompt', '{context}{input}'), ('maxlen', 30)):
    file = tmp_path / f'dataset2{name}.json'
    file.write_text(json.dumps({'qasper': value}))
  ruler = tmp_path / 'ruler' / 'vt'
  ruler.mkdir(parents=True)
  (ruler / 'validation.jsonl').write_text(
    json.dumps({'input': 'VAR' * 140, 'outputs': _ANY}) + '\n'
  )
  records, last, _ = _run(
    tmp_path / 'run',
    parts='longbench,ruler',
    longbench=str(data),
    longbench_config=str(tmp_path),
    ruler=str(tmp_path / 'ruler'),
  )
  lengths = [r['prompt_tokens'] for r in records if r['kind'] == 'request']
  assert lengths == [440, 420]
  found = last['match_ruler_vt_bf16']['value']
  assert found * len(_ANY) / 100 == pytest.approx(
    round(found * len(_ANY) / 100)
  )
  assert found > 100 / len(_ANY) - 0.01  # some of them are in any text
  assert last['match_ruler_vt_bf16']['unit'] == '%'
  assert last['match_longbench_bf16']['value'] == 0.0


def _one_reading(bench, texts):
  yield next(
    readings.readings(texts, bench.settings.schemes, bench.settings.engine)
  )


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'parts': 'forcd'}, "did you mean 'forced'"),
    ({'parts': 'longbench'}, 'fidelity.longbench must name a folder'),
    ({'parts': 'ruler'}, 'fidelity.ruler must name a folder'),
    ({'peers': 'kivi3_oracle'}, "did you mean 'kivi"),
    ({'tasks': 'nedle'}, "did you mean 'needle'"),
    ({'slots': 0}, 'fidelity.slots=0'),
    ({'forced_tokens': 0}, 'fidelity.forced_tokens=0'),
    ({'free_tokens': 1}, 'fidelity.free_tokens=1'),
    ({'samples': 0}, 'fidelity.samples=0'),
    ({'most_lines': -1}, 'fidelity.most_lines=-1'),
    ({'depths': '0.5,2'}, 'must be in 0..1'),
    ({'depths': ''}, "fidelity.depths='' must have"),
    ({'lengths': 'many'}, 'must be numbers'),
  ],
)
def test_a_wrong_value_is_named(fields, message):
  with pytest.raises(ConfigError, match=message):
    _settings(**fields)


def test_a_long_message_loses_its_middle_and_keeps_its_template():
  tokenizer = types.SimpleNamespace(
    encode=lambda text: [*text.encode()],
    decode=lambda ids: bytes(ids).decode(),
    encode_chat=lambda said: [1, *said[0]['content'].encode(), 2],
    chat_template='any',
  )
  bench = types.SimpleNamespace(
    model=types.SimpleNamespace(tokenizer=tokenizer)
  )
  question = questions.Question(
    name='q',
    task='q',
    prompt='abcdefgh',
    answers=('a',),
    metric=text_metrics.all_found,
    most_tokens=1,
    chat=True,
  )
  assert fidelity_study._encoded(bench, question, 6).ids == (1, *b'abgh', 2)
  with pytest.raises(ConfigError, match='prompt_tokens=3 must be at least 4'):
    fidelity_study._encoded(bench, question, 3)


def test_a_text_that_is_too_short_is_named():
  settings = _settings(forced_tokens=100_000)
  with pytest.raises(ConfigError, match="'book' has 11962 tokens"):
    [*fidelity_study._texts(settings, serving.Bytes())]


def test_a_broken_file_ends_with_one_line(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(pathlib.Path(__file__).parents[1])
  file = tmp_path / 'vt.jsonl'
  file.write_text('{"input": "q"}\n')
  code = main.main(
    [
      'main',
      '--config=configs/fidelity.py',
      f'--workdir={tmp_path / "w"}',
      '--config.fidelity.parts=ruler',
      f'--config.fidelity.ruler={tmp_path}',
    ]
  )
  assert code == cli.USER_MISTAKE
  error = capsys.readouterr().err
  assert error == f"error: {file}:1: 'outputs' is missing\n"
