# SPDX-License-Identifier: Apache-2.0
"""The yardstick: decode attention over bfloat16 K and V, as a TPU kernel.

It has the structure of `split_attention_tpu` (the same list of steps, blocks of
all KV heads, one accumulator a head) and knows no codec.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lynx_jax.pallas_kernels.split_attention_tpu import schedule

_MASKED = -1e30
_LANES = 128


def bf16_attention_tpu(
  q,
  k,
  v,
  *,
  layer,
  prefix_tokens,
  logits_scale: float,
  block_tokens: int,
  block_heads: int,
  interpret: bool = False,
):
  """Attends `q` [B, T, N, H] to `k`, `v` [L, B, K, S, H]; returns out, lse."""
  batch, rows, heads, head_dim = q.shape
  kv_heads, capacity = k.shape[2:4]
  per_head = heads // kv_heads
  block_heads = math.gcd(block_heads, kv_heads)
  padded = -(-rows * per_head // 16) * 16  # a bfloat16 register has 16 rows
  q = q.astype(jnp.float32) * np.float32(logits_scale * math.log2(math.e))
  q = q.reshape(batch, rows, kv_heads, per_head, head_dim)
  q = jnp.moveaxis(q, 1, 2).reshape(batch, kv_heads, -1, head_dim)
  q = jnp.pad(q, ((0, 0), (0, 0), (0, padded - rows * per_head), (0, 0)))
  steps, slot, block = schedule(
    prefix_tokens, block_tokens, capacity // block_tokens
  )

  def per_slot(width):
    return pl.BlockSpec(
      (None, block_heads, padded, width),
      lambda h, i, layer, slot, *_: (slot[i], h, 0, 0),
    )

  dense = pl.BlockSpec(
    (None, None, block_heads, block_tokens, head_dim),
    lambda h, i, layer, slot, block, _: (layer[0], slot[i], h, block[i], 0),
  )
  state = pltpu.VMEM((block_heads, padded, _LANES), jnp.float32)
  out, lse = pl.pallas_call(
    functools.partial(_kernel, block_tokens=block_tokens),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(kv_heads // block_heads, steps),
      in_specs=[per_slot(head_dim), dense, dense],
      out_specs=[per_slot(head_dim), per_slot(_LANES)],
      scratch_shapes=[
        state,
        state,
        pltpu.VMEM((block_heads, padded, head_dim), jnp.float32),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((batch, kv_heads, padded, n), jnp.float32)
      for n in (head_dim, _LANES)
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      vmem_limit_bytes=64 << 20,
    ),
    interpret=interpret,
    name='attention_bf16',
  )(
    jnp.asarray(layer, jnp.int32).reshape(1),
    slot,
    block,
    prefix_tokens.astype(jnp.int32),
    q.astype(jnp.bfloat16),
    k,
    v,
  )

  def rows_first(x):
    x = x[:, :, : rows * per_head]
    x = x.reshape(batch, kv_heads, rows, per_head, -1)
    return jnp.moveaxis(x, 2, 1).reshape(batch, rows, heads, -1)

  return rows_first(out), rows_first(lse)[..., 0]


def _kernel(
  layer,
  slots,
  blocks,
  prefix_tokens,
  q_ref,
  k_ref,
  v_ref,
  out_ref,
  lse_ref,
  top_ref,
  mass_ref,
  sum_ref,
  *,
  block_tokens,
):
  del layer
  step = pl.program_id(1)
  slot, block = slots[step], blocks[step]
  tokens = prefix_tokens[slot] - block * block_tokens

  @pl.when(block == 0)
  def _():
    top_ref[...] = jnp.full_like(top_ref, _MASKED)
    mass_ref[...] = jnp.zeros_like(mass_ref)
    sum_ref[...] = jnp.zeros_like(sum_ref)

  def scores(h):
    score = lax.dot_general(
      q_ref[h],
      k_ref[h],
      (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32,
    )
    token = lax.broadcasted_iota(jnp.int32, score.shape, 1)
    return jnp.where(token < tokens, score, _MASKED)

  def gather(h, score):
    before = top_ref[h][:, :1]
    top = jnp.maximum(before, jnp.max(score, 1, keepdims=True))
    weight = jnp.exp2(score - top)
    rest = jnp.exp2(before - top)
    mass = mass_ref[h][:, :1] * rest + jnp.sum(weight, 1, keepdims=True)
    value = jnp.dot(
      weight.astype(jnp.bfloat16),
      v_ref[h],
      preferred_element_type=jnp.float32,
    )
    sum_ref[h] = sum_ref[h] * rest + value
    top_ref[h] = jnp.broadcast_to(top, top_ref.shape[1:])
    mass_ref[h] = jnp.broadcast_to(mass, mass_ref.shape[1:])

  heads = q_ref.shape[0]
  pending = scores(0)
  for h in range(heads):
    current = pending
    if h + 1 < heads:
      pending = scores(h + 1)
    gather(h, current)

  @pl.when(tokens <= block_tokens)
  def _():
    mass, top = mass_ref[...], top_ref[...]
    out_ref[...] = sum_ref[...] / mass[..., :1]
    lse_ref[...] = (top + jnp.log2(mass)) * math.log(2)
