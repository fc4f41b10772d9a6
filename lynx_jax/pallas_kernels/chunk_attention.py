# SPDX-License-Identifier: Apache-2.0
"""Causal attention of one token chunk of prefill, at a traced offset.

It knows no model and no codec: dense keys and values of a layer group.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lynx_jax.pallas_kernels import dispatch
from lynx_jax.shapes import Array, BFloat16, Float, Float32, Int32


def chunk_attention(
  q: Float[Array, '1 C N H'],
  k: BFloat16[Array, 'L S K H'],
  v: BFloat16[Array, 'L S K H'],
  *,
  layer: int | Int32[Array, ''],
  offset: Int32[Array, ''],
  implementation: str | None = None,
) -> Float32[Array, '1 C N H']:
  """Attends causally to all tokens up to each row's own position.

  One program serves every chunk: blocks of C earlier tokens are read, as many
  as there are, and nothing beyond the chunk.

  Args:
    q: queries of the chunk, RoPE applied.
    k, v: of the layer group, the chunk's own tokens included.
    layer: which layer of the group.
    offset: position of the chunk's first token, a multiple of C.
    implementation: see `dispatch.run`.

  Raises:
    Unsupported: `implementation` was named and cannot serve the case.
  """

  def tpu(interpret):
    from lynx_jax.pallas_kernels import chunk_attention_tpu

    return chunk_attention_tpu.chunk_attention_tpu(
      q, k, v, layer=layer, offset=offset, interpret=interpret
    )

  return dispatch.run(
    'chunk_attention',
    implementation,
    xla=lambda: chunk_attention_xla(q, k, v, layer=layer, offset=offset),
    pallas_tpu=tpu,
  )


def chunk_attention_xla(
  q: Float[Array, '1 C N H'],
  k: BFloat16[Array, 'L S K H'],
  v: BFloat16[Array, 'L S K H'],
  *,
  layer: int | Int32[Array, ''],
  offset: Int32[Array, ''],
) -> Float32[Array, '1 C N H']:
  """The meaning of `chunk_attention`, in plain XLA.

  Keys are taken in blocks of C, with a running maximum and sum
  (arXiv:2112.05682, algorithm in §2).
  """
  _, size, heads, head_dim = q.shape
  kv_heads = k.shape[2]
  dtype, scale = q.dtype, np.float32(head_dim**-0.5)
  # One product a KV head: its G · C query rows against a block of keys.
  q = jnp.moveaxis(q[0].reshape(size, kv_heads, -1, head_dim), 0, 2)
  q = q.reshape(kv_heads, -1, head_dim)  # K GC H

  def head_major(x):
    # XLA's CPU backend multiplies bfloat16 fast only where heads lie apart, and
    # moves it as float32 unless it looks like integers.
    x = jax.lax.bitcast_convert_type(x, jnp.uint16)
    x = jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
    return jax.lax.optimization_barrier(jnp.swapaxes(x, 0, 1))  # K S H

  def load(x, j):
    block = jax.lax.dynamic_slice_in_dim(x, j * size, size, axis=1)
    return jax.lax.bitcast_convert_type(block, jnp.bfloat16).astype(dtype)

  def product(spec, x, y):
    # TPUs and GPUs otherwise multiply float32 operands in fewer bits.
    exact = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.einsum(
      spec, x, y, precision=exact, preferred_element_type=jnp.float32
    )

  k, v = head_major(k), head_major(v)

  def step(j, carry, mask=None):
    top, total, out = carry
    scores = product('krh,ksh->krs', q, load(k, j))
    if mask is not None:
      scores = jnp.where(mask, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.exp((scores - new_top[..., None]) * scale)
    shrink = jnp.exp((top - new_top) * scale)
    total = total * shrink + jnp.sum(weights, axis=-1)
    fresh = product('krs,ksh->krh', weights.astype(dtype), load(v, j))
    return new_top, total, out * shrink[..., None] + fresh

  # The chunk's own block comes first: it alone is masked, and it leaves a
  # finite maximum in every row. All earlier blocks are seen whole.
  own = offset // size
  causal = jnp.tril(jnp.ones((size, size), bool))
  causal = jnp.tile(causal, (heads // kv_heads, 1))[None]
  nothing = (
    jnp.full(q.shape[:2], -jnp.inf, jnp.float32),
    jnp.zeros(q.shape[:2], jnp.float32),
    jnp.zeros(q.shape, jnp.float32),
  )
  carry = step(own, nothing, causal)
  _, total, out = jax.lax.fori_loop(0, own, step, carry)
  out = (out / total[..., None]).reshape(kv_heads, -1, size, head_dim)
  return jnp.moveaxis(out, 2, 0).reshape(1, size, heads, head_dim)
