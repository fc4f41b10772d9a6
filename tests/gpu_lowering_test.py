# SPDX-License-Identifier: Apache-2.0
"""What runs on a GPU lowers for CUDA: the ops and a layer group, in XLA alone.

Lowering needs no GPU and no CUDA; compiling the result does.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lynx_jax import kv_cache, pallas_kernels
from lynx_jax.config import CodecConfig, EngineConfig, TensorCodec
from lynx_jax.models import cached, presets
from lynx_jax.models.transformer import Transformer
from lynx_jax.pallas_kernels import dispatch
from lynx_jax.speculative import decode

MODEL = presets.tiny(heads=8, dtype='bfloat16')
ENGINE = EngineConfig(slots=2, prompt_tokens=448, layer_groups=2)
SLOTS = jax.ShapeDtypeStruct((ENGINE.slots,), jnp.int32)
DENSE = jax.ShapeDtypeStruct((2, 512, MODEL.kv_heads, 64), jnp.bfloat16)


def cache():
  return jax.eval_shape(lambda: kv_cache.empty(MODEL, CodecConfig(), ENGINE))


def split():
  codec = TensorCodec()
  op = functools.partial(
    pallas_kernels.split_kv, k_codec=codec, v_codec=codec, group=128
  )
  return op, (DENSE, DENSE)


def attention():
  def op(q, k, v, tokens, first, table):
    return pallas_kernels.split_attention(
      q,
      k,
      v,
      layer=0,
      prefix_tokens=tokens,
      residual_tokens=tokens,
      sinks=4,
      logits_scale=1.0,
      soft_cap=30.0,
      first_tokens=first,
      block_table=table,
      implementation=dispatch.XLA,
    )

  prefix = cache().prefix[0]
  q = jax.ShapeDtypeStruct((2, 1, MODEL.heads, 64), jnp.float32)
  first, table = (
    jax.ShapeDtypeStruct((2, n), jnp.int32) for n in (1, prefix.k.groups)
  )
  return op, (q, prefix.k, prefix.v, SLOTS, first, table)


def merge():
  one = jax.eval_shape(lambda k: jax.tree.map(lambda x: x[0], k), packed())
  return pallas_kernels.merge, (one,)


def packed():
  return cache().prefix[0].k


def prefill():
  q = jax.ShapeDtypeStruct((1, 128, MODEL.heads, 64), jnp.bfloat16)
  scalar = jax.ShapeDtypeStruct((), jnp.int32)

  def op(q, k, v, offset):
    return pallas_kernels.chunk_attention(q, k, v, layer=0, offset=offset)

  return op, (q, DENSE, DENSE, scalar)


def layer_group():
  graphs, params = cached.split(
    nnx.eval_shape(lambda: Transformer(MODEL, rngs=nnx.Rngs(0)))
  )
  programs = decode._programs(graphs, ENGINE.verify_rows, dispatch.XLA)
  h = jax.ShapeDtypeStruct((2, 16, MODEL.model_dim), jnp.bfloat16)
  where = kv_cache.Rows(SLOTS, SLOTS, SLOTS.update(dtype=jnp.bool_))
  state = cache()
  params = cached.layer_params(params, 0, 2)
  prefix, tail = state.prefix[0], state.tail[0]
  return programs.verify_layers, (params, h, prefix, tail, where, SLOTS)


@pytest.mark.parametrize(
  'case', [split, attention, merge, prefill, layer_group]
)
def test_lowers_for_cuda(case):
  fn, arguments = case()
  jitted = fn if hasattr(fn, 'trace') else jax.jit(fn)
  lowered = jitted.trace(*arguments).lower(lowering_platforms=('cuda',))
  text = lowered.as_text()
  assert 'stablehlo' in text
  # A custom call would be a kernel, of a TPU or of a library.
  assert 'custom_call' not in text
