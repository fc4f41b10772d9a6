# SPDX-License-Identifier: Apache-2.0
"""Prefill that goes on decoding; `equivalence_test` has all arrival orders."""

import itertools

import jax
import pytest
from flax import nnx

from lynx_jax import continuation, mesh
from lynx_jax.config import ConfigError
from lynx_jax.engine import Engine, Form, Request, State
from lynx_jax.transport import courier
from tests import engines

pytestmark = pytest.mark.xdist_group('exact')
LENGTH = 100


@pytest.fixture
def bench():
  bench = engines.bench('continues')
  bench.configure()
  bench.script = courier.shuffle(0)
  return bench


def _request(**change):
  fields = {
    'prompt': engines.prompt(LENGTH).tolist(),
    'output_tokens': engines.OUTPUT_TOKENS,
  }
  return Request(**(fields | change))


def test_tokens_come_before_the_cache_and_decode_takes_over(bench, monkeypatch):
  tokens = continuation.Continuation.tokens
  monkeypatch.setattr(
    continuation.Continuation,
    'tokens',
    lambda *args: itertools.islice(tokens(*args), 9),
  )
  expected = bench.reference(engines.prompt(LENGTH))
  bench.script = lambda chunks: []  # nothing arrives
  key = bench.engine.submit(_request())
  result = bench.engine.result(key)
  while len(result.tokens) < 10:
    bench.engine.step()
  assert result.state is State.RECEIVING
  assert result.anchor_bytes == 0
  assert result.tokens == expected[: len(result.tokens)]
  # Token 2 waits for prefill and one step, for no byte of the cache.
  assert [size for _, size in result.critical] == [0]
  bench.script = courier.shuffle(0)
  while bench.engine.busy:
    bench.engine.step()
  assert result.tokens == expected
  # 5 of 9, a token that none of them need be, and the 3 that are left.
  assert result.rounds[:2] == [(5, 5), (3, 3)]
  assert result.drafted == 8
  bench.engine.forget(key)


def test_an_output_can_end_before_anything_has_arrived(bench):
  bench.script = lambda chunks: []
  result = bench.engine.generate(_request())
  assert result.tokens == bench.reference(engines.prompt(LENGTH))
  assert result.anchor_bytes == result.drafted == 0


def test_plain_decoding_is_left_to_decode(bench):
  result = bench.engine.generate(_request(form=Form.PLAIN))
  assert sum(size for _, size in result.critical) == result.anchor_bytes > 0
  assert result.commit_times_s[1] >= result.anchor_s


def test_requests_are_continued_one_after_the_other(bench):
  """The prefill side has one slot for all of them."""
  expected = [bench.reference(engines.prompt(n)) for n in (LENGTH, 64, 7)]
  bench.script = lambda chunks: []
  keys = [
    bench.engine.submit(_request(prompt=engines.prompt(n).tolist()))
    for n in (LENGTH, 64, 7)
  ]
  while bench.engine.busy:
    bench.engine.step()
  results = [bench.engine.forget(key) for key in keys]
  assert [result.tokens for result in results] == expected


def test_sides_that_disagree_are_an_error(bench, monkeypatch):
  known = bench.reference(engines.prompt(LENGTH))
  wrong = (known[1] + 1) % engines.MODEL.vocab
  monkeypatch.setattr(
    continuation.Continuation, 'tokens', lambda *_: iter([[wrong]])
  )
  key = bench.engine.submit(_request())
  while bench.engine.busy:
    bench.engine.step()
  result = bench.engine.forget(key)
  assert result.state is State.FAILED
  assert f'token 2 is {wrong} for prefill' in str(result.error)
  assert f'{known[1]} for decode' in str(result.error)


def test_a_failure_of_the_continuation_reaches_the_caller(bench, monkeypatch):
  def fail(*_):
    raise ValueError('no more')

  monkeypatch.setattr(continuation.Continuation, 'tokens', fail)
  bench.script = lambda chunks: []
  with pytest.raises(ValueError, match='no more'):
    bench.engine.generate(_request())


@pytest.mark.parametrize('name', ['lynx', 'exact', 'mixed'])
def test_a_code_of_several_planes_is_refused(name):
  codec = engines.SETUPS[name].codec
  setup = engines.Setup(codec=codec, config=engines.SETUPS['continues'].config)
  with pytest.raises(ConfigError, match='one plane or none'):
    engines.Bench(setup, engines.model())


def test_sides_of_unlike_meshes_and_processes_are_refused():
  setup, model = engines.SETUPS['continues'], engines.model()
  graph, params = nnx.split(model)
  two = mesh.make(jax.devices()[2:4], model.config)
  wide = nnx.merge(graph, jax.device_put(params, mesh.places(two, params)))
  with pytest.raises(ConfigError, match='equal meshes'):
    engines.Bench(setup, model, decode_model=wide)
  with pytest.raises(ConfigError, match='both sides in one process'):
    Engine(object(), model, setup.codec, setup.config)
