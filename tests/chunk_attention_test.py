# SPDX-License-Identifier: Apache-2.0
"""The wrapped prefill kernel agrees with the plain one, and prefill runs it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lynx_jax import attention
from lynx_jax.config import CodecConfig, EngineConfig
from lynx_jax.models import presets, transformer
from lynx_jax.models.transformer import Transformer
from lynx_jax.pallas_kernels import Unsupported, chunk_attention, dispatch
from lynx_jax.pallas_kernels.chunk_attention_tpu import chunk_attention_tpu
from lynx_jax.prefill import Prefill

pytestmark = pytest.mark.usefixtures('unoptimised')


def random(shape, seed):
  noise = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(noise.astype(jnp.bfloat16))


@pytest.mark.parametrize('head_dim', [64, 128])
def test_agrees_with_xla_at_a_traced_offset(head_dim):
  q = random((1, 128, 4, head_dim), 0)
  k, v = (random((2, 384, 2, head_dim), n) for n in (1, 2))
  interpreted = functools.partial(chunk_attention_tpu, interpret=True)
  tpu, xla = (
    jax.jit(lambda offset, run=run: run(q, k, v, layer=1, offset=offset))
    for run in (interpreted, chunk_attention)
  )
  for offset in (0, 256):
    at = jnp.int32(offset)
    # bfloat16 queries and weights: 2^-9 relative each.
    np.testing.assert_allclose(tpu(at), xla(at), atol=0.02)


@pytest.mark.parametrize('window', [None, 1, 6, 100])
def test_rules_of_a_layer_are_those_of_one_pass(window):
  """Scale, cap and a traced window, which ends inside of earlier chunks."""
  q = random((1, 12, 4, 8), 0).astype(jnp.float32)
  k, v = (random((1, 12, 2, 8), n) for n in (1, 2))

  @jax.jit
  def run(q, offset, window):
    return chunk_attention(
      q,
      k,
      v,
      layer=0,
      offset=offset,
      logits_scale=0.5,
      soft_cap=2.0,
      window=window,
    )

  reach = None if window is None else jnp.int32(window)
  found = [
    run(q[:, at : at + 4], jnp.int32(at), reach) for at in range(0, 12, 4)
  ]
  rule = attention.Rule(logits_scale=0.5, soft_cap=2.0, window=window)
  expected = transformer.causal_attention(
    q, *(x.astype(jnp.float32) for x in (k, v)), rule
  )
  np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=1e-5)


def test_windows_are_left_to_xla():
  x = random((1, 128, 1, 64), 0)
  with pytest.raises(Unsupported, match='a sliding window'):
    chunk_attention_tpu(x, x, x, layer=0, offset=jnp.int32(0), window=8)


def test_a_chunk_that_is_no_multiple_of_128_is_refused():
  x = random((1, 100, 1, 64), 0)
  with pytest.raises(Unsupported, match='100 tokens: must be a multiple'):
    chunk_attention_tpu(x, x, x, layer=0, offset=jnp.int32(0))


def test_prefill_and_split_run_as_the_config_says():
  config = presets.tiny(layers=2, heads=2, kv_heads=1, dtype='bfloat16')
  model = Transformer(config, rngs=nnx.Rngs(0))
  prompt = np.random.default_rng(0).integers(256, size=200)
  implementations = (dispatch.XLA, dispatch.PALLAS_TPU_INTERPRET)
  states = []
  with dispatch.record() as choices:
    for implementation in implementations:
      engine = EngineConfig(
        prompt_tokens=256,
        token_chunk=128,
        layer_groups=1,
        implementation=implementation,
      )
      prefill = Prefill(model, CodecConfig(), engine)
      *_, state = prefill.chunks(prompt)
      kv = np.asarray(state.kv[0].v[1, :200], np.float32)
      if states:
        # One layer's error: bfloat16 queries, weights and activations.
        np.testing.assert_allclose(kv, states[0][0], atol=0.05)
        state.kv = states[0][1].kv
      prefill.split(state, 0)
      states.append((kv, state))
  splits = [state.split for _, state in states]
  jax.tree.map(np.testing.assert_array_equal, *splits)
  assert {(c.op, c.implementation) for c in choices} == {
    (op, i) for op in ('chunk_attention', 'split_kv') for i in implementations
  }
