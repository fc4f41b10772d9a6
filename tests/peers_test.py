# SPDX-License-Identifier: Apache-2.0
"""Peers by their own code: scores, bits, processes, and the comparison."""

import dataclasses
import sys

import gguf
import numpy as np
import pytest

from experiments import (
  config,
  fidelity_study,
  latency,
  prompts,
  readings,
  results,
)
from experiments.peers import (
  caches,
  comparison,
  exchange,
  over_link,
  processes,
)
from lynx_jax.config import ConfigError
from tests import fidelity_study_test

PROMPTS = (
  exchange.Prompt(ids=[7, 8], following=[1, 2, 3]),
  exchange.Prompt(ids=[9], following=[3, 2, 1]),
)
FAKES = ('peer_coded', 'peer_plain', 'peer_refused')


@pytest.fixture(scope='module')
def logprobs() -> tuple[np.ndarray, np.ndarray]:
  """Of two distributions over 50 tokens that are near to each other."""
  rng = np.random.default_rng(0)
  x = 3 * rng.normal(size=(40, 50))
  return tuple(
    (y - np.log(np.exp(y).sum(axis=1, keepdims=True))).astype(np.float32)
    for y in (x, x + 0.3 * rng.normal(size=x.shape))
  )


def _kl(p, q):
  return float(np.mean(np.sum(np.exp(p) * (p - q), axis=1)))


def test_a_score_is_that_of_the_definitions(logprobs):
  p, q = logprobs
  following = np.arange(40)
  found = exchange.score(p, q, following)
  assert found['kl'] == pytest.approx(_kl(p, q), rel=1e-4)
  assert found['agreement'] == np.mean(p.argmax(1) == q.argmax(1)) < 1
  nll = [-x[np.arange(40), following].mean() for x in (p, q)]
  assert found['nll'] == pytest.approx(nll[1], rel=1e-5)
  assert found['nll_over_bf16'] == pytest.approx(nll[1] - nll[0], rel=1e-3)
  assert exchange.score(p, p, following)['kl'] == 0.0
  assert exchange.score(p, p, following)['agreement'] == 1.0


def test_unknown_tokens_make_kl_a_lower_bound(logprobs):
  """Of 20 likely ones known either way, it is still most of it."""
  p, q = logprobs
  likely = [
    np.where(x >= np.sort(x, axis=1)[:, -20:-19], x, -np.inf) for x in (p, q)
  ]
  following = p.argmax(axis=1)
  found, whole = (exchange.score(*both, following) for both in (likely, (p, q)))
  assert 0.8 * whole['kl'] < found['kl'] <= whole['kl']
  assert found['agreement'] == whole['agreement']
  assert found['nll'] == whole['nll']
  # A token that is not known is left out of NLL, not taken for impossible.
  following[3] = p[3].argmin()
  assert np.isfinite(exchange.score(*likely, following)['nll'])


def test_bits_of_ggml_are_those_of_gguf():
  found = {name: caches.ggml_bits(name) for name in caches.GGML}
  assert found == {'llama_f16': 16, 'llama_q8_0': 8.5, 'llama_q4_0': 4.5}
  for name, (kind, *block) in caches.GGML.items():
    own = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    assert tuple(block) == own, name


class _Tensor:
  """What is asked of a torch tensor."""

  def __init__(self, count: int, size_bytes: int, floating: bool):
    self._count, self._bytes, self._floating = count, size_bytes, floating

  def numel(self) -> int:
    return self._count

  def element_size(self) -> int:
    return self._bytes

  def is_floating_point(self) -> bool:
    return self._floating


class _Made(_Tensor):
  """A tensor made of others, which says of itself what it stands for."""

  def __init__(self, **parts):
    super().__init__(10**6, 4, True)
    self.parts = parts

  def __getattr__(self, name):
    return self.parts[name]

  def __tensor_flatten__(self):
    return [*self.parts], None


def test_stored_bits_count_codes_and_metadata_once():
  codes, scale = _Tensor(50, 1, False), _Tensor(10, 4, True)
  fp8 = _Tensor(100, 1, True)
  # hqq: codes, and a dict of scale, zero and sizes.
  hqq = (codes, {'scale': scale, 'zero': scale, 'shape': (1, 100), 'axis': 1})
  assert caches.stored_bits(hqq) == 50 * 8 + 2 * 10 * 16
  # quanto: tensors in tensors.
  quanto = _Made(_data=_Made(_data=codes), _scale=scale, _shift=scale)
  assert caches.stored_bits((quanto, quanto)) == 2 * caches.stored_bits(hqq)
  assert caches.stored_bits((fp8, _Tensor(1, 4, True))) == 816


def test_a_process_answers_and_what_it_refuses_is_told(monkeypatch):
  monkeypatch.setattr(
    caches,
    'MODULES',
    {'tests.peer_process': FAKES, 'tests.peer_process ': ('not_asked',)},
  )
  found = processes.run(sys.executable, 'a.gguf', FAKES, PROMPTS)
  assert found.not_run == {'peer_refused': 'no such width'}
  assert found.versions == {'peer': 'a.gguf'}
  assert {*found.found} == {'peer_coded', 'peer_plain'}
  coded, plain = (found.found[name] for name in FAKES[:2])
  assert [f.figures['kl'] for f in coded] == [7e-3, 9e-3]
  assert (coded[0].coding_s, plain[0].coding_s) == (1.0, None)


def test_a_process_that_fails_does_not_end_the_run(monkeypatch):
  monkeypatch.setattr(
    caches, 'MODULES', {'tests.peer_process': ('peer_fails', 'peer_plain')}
  )
  peers = ['peer_fails', 'peer_plain']
  found = processes.run(sys.executable, 'a.gguf', peers, PROMPTS)
  why = "exit code 1: ModuleNotFoundError: No module named 'torch'"
  assert found.not_run == dict.fromkeys(peers, why)
  assert not found.found
  found = processes.run('no/python', 'a.gguf', peers, PROMPTS)
  assert set(found.not_run.values()) == {
    'there is no no/python; `make peers` makes it'
  }


@pytest.mark.parametrize(
  'script, why',
  [
    ('exit 0', 'no answer that can be read (FileNotFoundError'),
    ('echo "{" >"$4"', 'no answer that can be read (JSONDecodeError'),
    ('echo "{}" >"$4"', 'no answer that can be read (KeyError'),
    (
      """echo '{"found": {}}' > "$4" """,
      'no answer that can be read (TypeError',
    ),
    (
      """echo '{"found": {"a": []}, "not_run": {}, "versions": {}}' > "$4" """,
      'a answered on 0 of 2 prompts',
    ),
    ("printf '\\377 broken' >&2; exit 1", 'exit code 1: \ufffd broken'),
    ('kill -9 $$', 'exit code -9: it said nothing'),
  ],
)
def test_a_broken_environment_is_told(script, why, tmp_path, monkeypatch):
  monkeypatch.setattr(caches, 'MODULES', {'tests.peer_process': ('a',)})
  python = tmp_path / 'python'
  python.write_text(f'#!/bin/sh\n{script}\n')
  python.chmod(0o755)
  found = processes.run(str(python), 'a.gguf', ['a'], PROMPTS)
  assert not found.found
  assert why in found.not_run['a']


# --- The comparison -----------------------------------------------------------


def _forced(scheme, bits, kl, prompt='book', coding=None):
  figures = {'kl': kl, 'agreement': 0.9}
  if coding is not None:
    figures[comparison.CODING] = coding
  ours = scheme.startswith(('int', 'lynx', 'bf16'))
  return {
    'kind': 'request',
    'scheme': scheme,
    'prompt': prompt,
    'target': 'planes:1' if ours else 'peer',
    'fidelity': {
      'part': 'forced',
      'bits': bits,
      'wire_bytes': bits * 1e6,
      'figures': figures,
    },
  }


RECORDS = [
  _forced('int8', 8.5, 1e-4),
  _forced('lynx_anchor', 4.6, 2e-3),
  _forced('kivi4_oracle', 5.4, 3e-3),
  _forced('hf_hqq8', 8.4, 1e-4, coding=0.5),
]


def test_a_peer_wins_where_nothing_of_ours_beats_it():
  lost, won = comparison.verdicts(RECORDS)
  assert lost.startswith('kivi4_oracle (5.40 bits, KL 0.003) is beaten by')
  assert won.startswith('hf_hqq8 (8.40 bits, KL 0.0001) WINS')


def test_a_difference_that_three_prompts_do_not_show_is_none():
  """Bits decide then, and the table says that KL does not."""
  records = [
    _forced(scheme, bits, kl, prompt)
    for prompt, ours, peer, worse in (
      ('a', 2e-3, 1e-3, 9e-3),
      ('b', 2e-3, 4e-3, 9e-3),
      ('c', 3e-3, 1e-3, 8e-3),
    )
    for scheme, bits, kl in (
      ('lynx_anchor', 4.6, ours),
      ('kivi4_oracle', 5.4, peer),
      ('quantspec', 5.4, worse),
      ('cachegen', 4.0, worse),
    )
  ]
  ((_, header, rows),) = comparison.tables(records)
  beaten = {row[0]: row[header.index('beaten by')] for row in rows}
  assert beaten == {
    'lynx_anchor': '',
    'kivi4_oracle': 'lynx_anchor (alike in KL)',
    'quantspec': 'lynx_anchor',
    'cachegen': 'none: it wins',
  }
  kivi, *_ = comparison.verdicts(records)
  assert kivi.endswith('lynx_anchor (4.60 bits, KL 0.0023, alike in KL)')


def test_ttft_is_the_sum_of_what_was_measured():
  schemes = {'int8': None, 'kivi4_oracle': None, 'hf_hqq4': 0.5}
  records = [
    _forced(scheme, 8.0, 0.0, prompt, coding)
    for prompt in 'abc'
    for scheme, coding in schemes.items()
  ]
  measured = {
    prompt: comparison.Transfers(
      prefill_s=3.0,
      step_s=1.0,
      seconds={'int8': 6.0, 'kivi4_oracle': 3.0, 'hf_hqq4': 3.0},
    )
    for prompt in 'abc'
  }
  found = {r['name']: r for r in comparison.ttft(records, measured)}
  assert {
    name.removeprefix('ttft_over_int8_'): pytest.approx(r['value'])
    for name, r in found.items()
  } == {'int8': 1.0, 'kivi4_oracle': 0.7, 'hf_hqq4': 0.85}
  assert {(r['label'], r['n']) for r in found.values()} == {('measured', 3)}


def test_bytes_take_their_time_on_the_link():
  """Side by side, each on a link of its own."""
  sizes = {'whole': 100_000, 'ragged': 50_001, 'one': 1}
  found = over_link.seconds(
    sizes, rate_gbps=4e-3, rtt_ms=20.0, chunk_bytes=10_000
  )
  for name, size in sizes.items():
    least_s = size * 8 / 4e6 + 10e-3
    assert least_s <= found[name] + 1e-9 <= least_s + 0.1, name
  with pytest.raises(ConfigError, match='nothing: 0 bytes'):
    over_link.seconds({'nothing': 0}, rate_gbps=1.0, rtt_ms=0.0, chunk_bytes=1)


def test_the_table_names_what_did_not_run():
  said = [
    results.summary_record('ttft_over_int8_hf_hqq8', 1.25, '', 1),
    results.peers_record({'llama_q4_0': 'no wheel'}, {}),
  ]
  ((_, header, rows),) = comparison.tables([*RECORDS, *said])
  assert {len(row) for row in rows} == {len(header)}
  by = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
  assert [*by][:4] == [r['scheme'] for r in RECORDS]
  assert by['llama_q4_0']['run by'] == 'not run'
  assert [*comparison.notes(said)] == ['llama_q4_0 did not run: no wheel']
  assert by['hf_hqq8']['run by'] == 'own code'
  assert by['hf_hqq8']['TTFT'] == '1.250'
  assert by['hf_hqq8']['beaten by'] == 'none: it wins'
  assert by['hf_hqq8']['coding'] == '0.500'
  assert by['kivi4_oracle']['beaten by'] == 'lynx_anchor'
  assert by['kivi4_oracle']['run by'] == 'formula'
  assert by['kivi4_oracle']['coding'] == '–'
  assert by['int8']['MB'] == '8.50'
  assert comparison.tables(RECORDS[:2]) == []


def _settings(path='smollm2', **fields) -> config.Settings:
  values = fidelity_study_test._values(**fields)
  values.model.path = path
  return config.settings(values)


@pytest.mark.parametrize(
  'path, fields, message',
  [
    ('tiny', {}, "model.path='tiny' must be a GGUF"),
    ('no/such.gguf', {}, 'must be a GGUF on this machine for llama_q8_0'),
    ('tiny', {'parts': 'free'}, "fidelity.parts must have 'forced'"),
  ],
)
def test_what_peers_cannot_read_is_named(path, fields, message, tmp_path):
  settings = _settings(path, peers='llama_q8_0', **fields)
  with pytest.raises(ConfigError, match=message):
    fidelity_study.run(settings, None, None)


def test_a_peer_that_does_not_exist_is_named():
  with pytest.raises(ConfigError, match="did you mean 'llama_q8_0'"):
    _settings(peers='llama_q8')


small_model = fidelity_study_test.small_model  # of the study below


def test_the_study_puts_peers_beside_ours(tmp_path, monkeypatch):
  """And does not run them again, but for one that did not run."""

  def measure_int8(bench, _):
    found = fidelity_study._texts(bench.settings, bench.model.tokenizer)
    reading = readings.Reading('int8', 'planes:1', (), (8.5,), None)
    for prompt in found:
      bench.write('forced', prompt, reading, 0, {'kl': 0.0, 'agreement': 1.0})

  monkeypatch.setattr(caches, 'MODULES', {'tests.peer_process': FAKES})
  monkeypatch.setattr(caches, 'NAMES', FAKES)
  monkeypatch.setattr(fidelity_study, '_gguf', lambda _: 'a.gguf')
  monkeypatch.setattr(fidelity_study, '_measure_texts', measure_int8)
  monkeypatch.setattr(latency, 'make_plan', _fast_plan)
  fields = {
    'peers': ','.join(FAKES),
    'peers_python': sys.executable,
    'parts': 'forced',
  }
  records, last, said = fidelity_study_test._run(tmp_path, **fields)
  found = {r['scheme']: r for r in records if r['kind'] == 'request'}
  coded = found['peer_coded']
  first = prompts.read('book').encode()[0]
  assert coded['fidelity']['figures'] == {
    'kl': first / 1e3,
    'agreement': 0.5,
    'nll': 2.0,
    'nll_over_bf16': 0.25,
    'coding_over_prefill': 0.5,
  }
  assert coded['target'] == 'peer'
  assert (coded['prefill_s'], coded['split_s']) == (2.0, 1.0)
  assert found['peer_plain']['split_s'] is None
  model = fidelity_study_test.MODEL
  values = 2 * model.layers * model.kv_heads * model.head_dim * 440
  assert coded['fidelity']['wire_bytes'] == 4.5 / 8 * values
  # Prefill takes 0.2 s of 0.5, the bytes of INT8 all but a step of the rest.
  plain = (0.2 + 0.3 * 4.5 / 8.5) / 0.5
  for name, ttft in (('plain', plain), ('coded', plain + 0.5 * 0.4)):
    measured = last[f'ttft_over_int8_peer_{name}']
    assert measured['value'] == pytest.approx(ttft, rel=0.1)
    assert measured['label'] == 'measured'
  assert 'peer_refused did not run: no such width' in said
  assert 'peer_plain (4.50 bits' in said
  (_, header, means), (caption, *_) = fidelity_study.tables(records)
  by = {name: dict(zip(header[1:], row, strict=True)) for name, *row in means}
  assert by['peer_plain']['bits'] == '4.50'
  assert caption.startswith('Peers')
  again, summaries, said = fidelity_study_test._run(tmp_path, **fields)
  assert 'running peer_refused …' in said
  assert _unmeasured(summaries) == _unmeasured(last)
  # Beside those of int8, which is measured here whatever there is.
  assert sum(r['kind'] == 'request' for r in again) == len(found) + 1


def _fast_plan(settings, model, texts, screen):
  """Stands in for what a latency study measures first."""
  (name,) = texts
  values = 2 * model.config.layers * model.config.kv_heads
  size = 8.5 / 8 * values * model.config.head_dim * len(texts[name])
  case = latency.Case(
    prompt=name,
    rate_gbps=size * 8e-9 / 0.299,
    rtt_ms=0.0,
    int8_bytes=round(size),
    prefill_s=0.2,
    seen_gbps=1.0,
  )
  engine = dataclasses.replace(settings.engine, chunk_bytes=4096)
  return latency.Plan(cases=(case,), engine=engine, int8_step_s=1e-3, of=())


def _unmeasured(summaries):
  """Returns those that need no clock."""
  return {k: v for k, v in summaries.items() if 'ttft' not in k}
