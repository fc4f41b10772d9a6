# SPDX-License-Identifier: Apache-2.0
"""Generated tokens move into the prefix, and what they read depends on nothing.

That is: on their own position alone, however many tokens share their pass.
"""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import schemes
from lynx_jax import attention, kv_cache
from lynx_jax import codec as codec_lib
from lynx_jax.config import CodecConfig, ConfigError, Order, TensorCodec
from lynx_jax.engine import Costs, Request
from lynx_jax.kv_cache import Rows, Tail
from lynx_jax.speculative.slots import Growth
from lynx_jax.transport import courier
from tests import engines

OUTPUT_TOKENS = 80
SETUP = engines.setup(
  (2, 2, 4),
  prompt_tokens=100,
  output_tokens=OUTPUT_TOKENS,
  layer_groups=1,
  generated=True,
)
CODEC, CONFIG = SETUP.codec, SETUP.config
GROUP, ROWS = CODEC.group, CONFIG.verify_rows

pytestmark = pytest.mark.xdist_group('generated')


@functools.cache
def _bench() -> engines.Bench:
  return engines.Bench(SETUP, engines.model(layers=1))


def test_the_tail_is_shorter_than_what_is_generated():
  """So that tokens really leave it: its rows are written more than once."""
  tail = _bench().engine._cache.tail[0]
  assert tail.k.shape[2] == 64 < OUTPUT_TOKENS


@pytest.mark.parametrize('part', range(4))
def test_committed_tokens_are_those_of_the_reference(part):
  """Prompts that end at every offset in a group, and ones without a prefix."""
  rng, bench = random.Random(part), _bench()
  lengths = [*range(50 + 8 * part, 58 + 8 * part), 1 + 5 * part]
  asked = [rng.randint(40, OUTPUT_TOKENS) for _ in lengths]
  prompts = [engines.prompt(n).tolist() for n in lengths]
  bench.configure()
  full = [
    bench.engine.reference(prompt, tokens, sampling=how)
    for prompt, tokens, how in zip(prompts, asked, _samplings(), strict=False)
  ]
  drafted = accepted = 0
  for first in range(0, len(prompts), 3):
    bench.configure(
      draft_tokens=rng.randrange(ROWS),
      backlog_tokens=rng.randint(1, 12),
      sharpen=False,  # it would compile another program
    )
    bench.script = courier.shuffle(rng.randrange(1 << 16))
    chosen = range(first, first + 3)
    requests = [
      Request(
        prompt=prompts[i],
        output_tokens=asked[i],
        sampling=[*_samplings()][i],
        streamed=rng.random() < 0.5,
      )
      for i in chosen
    ]
    found = engines.run(
      bench,
      [(rng.randrange(6), request) for request in requests],
      [full[i] for i in chosen],
    )
    drafted += sum(result.drafted for result in found)
    accepted += sum(result.accepted for result in found)
  assert 0 < accepted < drafted


def test_a_group_is_packed_from_layers_that_have_all_landed():
  """Baselines that begin with their first layers read what a start packs."""
  setup = engines.setup(
    (8,),
    order=Order.LAYERS,
    prompt_tokens=100,
    generated=True,
  )
  bench = engines.Bench(setup, engines.model())
  bench.configure(draft_tokens=0, costs=Costs(1.0, 1e9, 1.0))
  codec, ahead = setup.codec, setup.config.verify_rows - 1
  packs = [
    n
    for n in range(1, 101)
    if codec.prefix_end(n + ahead) > codec.prefix_end(n)
  ]
  for seed, tokens in enumerate((packs[0], packs[-1], packs[0] - 1)):
    bench.script = engines.trickle(seed)
    request = Request(
      prompt=engines.prompt(tokens).tolist(),
      output_tokens=engines.OUTPUT_TOKENS,
    )
    expected = bench.reference(engines.prompt(tokens))
    engines.run(bench, [(0, request)] * 2, [expected] * 2)


def _samplings():
  return [*engines.SAMPLINGS] * 3


@functools.cache
def _filled():
  cache = engines.filled(kv_cache.empty(engines.MODEL, CODEC, CONFIG))
  return cache.prefix[0], cache.tail[0]


_dequantise = jax.jit(codec_lib.dequantise)
_pack = jax.jit(functools.partial(kv_cache.pack_group, group=GROUP))
_attend = jax.jit(
  functools.partial(
    attention.attend, layer=0, residual_tokens=None, implementation=None
  )
)


@pytest.mark.parametrize('first', [107, 109, 112, 120])
def test_a_token_reads_planes_below_its_own_end(first):
  """Against plain attention over what either form reads back as."""
  start, written = 64, first + ROWS
  prefix, tail = _filled()
  rng = np.random.default_rng(first)
  heads = engines.MODEL.kv_heads, engines.MODEL.head_dim

  k, v = (
    rng.normal(size=(written - start, *heads)).astype(jnp.bfloat16)
    for _ in 'kv'
  )
  at = np.arange(written - start - ROWS) % tail.k.shape[2]

  def put(buffer, values):
    buffer = np.array(buffer)
    buffer[0, 1, at] = values[:-ROWS]
    return jnp.asarray(buffer)

  tail = Tail(put(tail.k, k), put(tail.v, v))
  packed = _pack(prefix, tail, *np.int32([1, start, start]))
  position = first + np.arange(ROWS)
  growth = Growth(GROUP, CODEC.recent_tokens)
  ends = np.asarray(growth.prefix_end(jnp.asarray(position, jnp.int32)))
  assert {*ends.tolist()} <= {64, 96}
  rows = Rows(
    jnp.asarray(np.full(3, first, np.int32)),
    jnp.asarray(np.full(3, start, np.int32)),
    jnp.asarray([False, True, False]),
    jnp.asarray(np.tile(ends, (3, 1))),
  )
  shape = (3, ROWS, engines.MODEL.heads, heads[1])
  q = jnp.asarray(rng.normal(size=shape).astype(np.float32))
  fresh = [jnp.asarray(np.stack([x[-ROWS:]] * 3)) for x in (k, v)]
  out, after = _attend(q, *fresh, prefix=packed, tail=tail, rows=rows)
  # Others keep their tails, bit by bit.
  for slot in (0, 2):
    np.testing.assert_array_equal(after.k[:, slot], tail.k[:, slot])
  read = [_dequantise(x)[0, 1] for x in (packed.k, packed.v)]
  sinks = [x[0, 1] for x in (packed.sinks_k, packed.sinks_v)]
  count = CODEC.sinks
  for row, p in enumerate(position):
    end = 96 if p >= 112 else 64
    keys, values = (
      np.concatenate([s, x[count:end], dense[end - start : p + 1 - start]])
      for s, x, dense in zip(sinks, read, (k, v), strict=True)
    )
    wanted = _plain(np.asarray(q[1, row]), keys, values)
    np.testing.assert_allclose(out[1, row], wanted, atol=2e-5)


def _plain(q, k, v):
  k, v = (np.asarray(x, np.float64) for x in (k, v))
  repeat = len(q) // k.shape[1]
  scores = np.einsum('nh,snh->ns', q, np.repeat(k, repeat, 1)) * q.shape[1] ** (
    -0.5
  )
  weights = np.exp(scores - scores.max(axis=1, keepdims=True))
  weights /= weights.sum(axis=1, keepdims=True)
  return np.einsum('ns,snh->nh', weights, np.repeat(v, repeat, 1))


def test_the_first_group_leaves_its_sinks_dense():
  prefix, tail = _filled()
  packed = _pack(prefix, tail, *np.int32([2, 0, 0]))
  count = CODEC.sinks
  np.testing.assert_array_equal(packed.sinks_k[:, 2], tail.k[:, 2, :count])
  np.testing.assert_array_equal(packed.sinks_k[:, :2], prefix.sinks_k[:, :2])
  split = functools.partial(
    codec_lib.split, codec=prefix.v.codec, group=GROUP, sinks=count
  )
  wanted = jax.jit(split)(tail.v[:, 2, :GROUP])
  for held, before, fresh in zip(
    jax.tree.leaves(packed.v),
    jax.tree.leaves(prefix.v),
    jax.tree.leaves(wanted),
    strict=True,
  ):
    size = fresh.shape[2]
    np.testing.assert_array_equal(held[:, 2, :, :size], fresh)
    np.testing.assert_array_equal(held[:, 2, :, size:], before[:, 2, :, size:])
    np.testing.assert_array_equal(held[:, :2], before[:, :2])


@pytest.mark.parametrize(
  'fields, named',
  [
    ({'exact': True}, 'codec.exact=True'),
    ({'k': TensorCodec(planes=()), 'v': TensorCodec(planes=())}, 'k=()'),
  ],
)
def test_what_cannot_be_packed_is_named(fields, named):
  with pytest.raises(ConfigError, match='generated=True') as error:
    CodecConfig(generated=True, **fields)
  assert named in str(error.value)


def test_a_group_must_be_committed_before_it_is_read():
  few = dataclasses.replace(CODEC, recent_tokens=ROWS - 2)
  with pytest.raises(ConfigError, match=f'recent_tokens={ROWS - 2} must be'):
    engines.Bench(dataclasses.replace(SETUP, codec=few), engines.model())


def test_baselines_without_planes_keep_generated_tokens_dense():
  names = {'bf16': False, 'int8': True, 'lynx': True, 'lynx_exact': False}
  for name, packs in names.items():
    scheme = schemes.scheme(name, CodecConfig(generated=True))
    assert scheme.codec.generated is packs
