# SPDX-License-Identifier: Apache-2.0
"""Causal attention of one token chunk of prefill, at a traced offset.

It knows no model and no codec: dense keys and values of a layer group.
"""

from typing import Any

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
  logits_scale: float | None = None,
  soft_cap: float | None = None,
  window: int | Int32[Array, ''] | None = None,
  implementation: str | None = None,
) -> Float32[Array, '1 C N H']:
  """Attends causally to all tokens up to each row's own position.

  One program serves every chunk: blocks of C earlier tokens are read, as many
  as there are or as the window reaches, and nothing beyond the chunk.

  Args:
    q: queries of the chunk, RoPE applied.
    k, v: of the layer group, the chunk's own tokens included.
    layer: which layer of the group.
    offset: position of the chunk's first token, a multiple of C.
    logits_scale: multiplies q · k; `None` is 1 / sqrt(H).
    soft_cap: bounds logits to soft_cap * tanh(logit / soft_cap).
    window: a row sees so many tokens, its own included; `None` is all.
    implementation: see `dispatch.run`.

  Raises:
    Unsupported: `implementation` was named and cannot serve the case.
  """
  if logits_scale is None:
    logits_scale = q.shape[-1] ** -0.5
  arguments: dict[str, Any] = {
    'layer': layer,
    'offset': offset,
    'logits_scale': logits_scale,
    'soft_cap': soft_cap,
    'window': window,
  }

  def tpu(interpret):
    from lynx_jax.pallas_kernels import chunk_attention_tpu

    return chunk_attention_tpu.chunk_attention_tpu(
      q, k, v, **arguments, interpret=interpret
    )

  return dispatch.run(
    'chunk_attention',
    implementation,
    xla=lambda: chunk_attention_xla(q, k, v, **arguments),
    pallas_tpu=tpu,
  )


def chunk_attention_xla(
  q: Float[Array, '1 C N H'],
  k: BFloat16[Array, 'L S K H'],
  v: BFloat16[Array, 'L S K H'],
  *,
  layer: int | Int32[Array, ''],
  offset: Int32[Array, ''],
  logits_scale: float,
  soft_cap: float | None = None,
  window: int | Int32[Array, ''] | None = None,
) -> Float32[Array, '1 C N H']:
  """The meaning of `chunk_attention`, in plain XLA.

  Keys are taken in blocks of C, with a running maximum and sum
  (arXiv:2112.05682, algorithm in §2).
  """
  _, size, heads, head_dim = q.shape
  kv_heads = k.shape[2]
  dtype = q.dtype
  scale = np.float32(logits_scale if soft_cap is None else soft_cap)
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
    if soft_cap is not None:  # `scale` is for the logits that this gives
      scores = jnp.tanh(scores * np.float32(logits_scale / soft_cap))
    if mask is not None:
      scores = jnp.where(mask, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.exp((scores - new_top[..., None]) * scale)
    shrink = jnp.exp((top - new_top) * scale)
    total = total * shrink + jnp.sum(weights, axis=-1)
    fresh = product('krs,ksh->krh', weights.astype(dtype), load(v, j))
    return new_top, total, out * shrink[..., None] + fresh

  # The chunk's own block comes first: every row sees itself, which leaves a
  # finite maximum. Without a window all earlier blocks are seen whole.
  own, first = offset // size, jnp.zeros((), jnp.int32)
  row = jnp.tile(jnp.arange(size, dtype=jnp.int32), heads // kv_heads)[:, None]
  column = jnp.arange(size, dtype=jnp.int32)[None]

  def reach(j):  # of the rows' windows, in block j
    return (own - j) * size + row - column < window

  causal = column <= row
  if window is not None:
    causal = causal & reach(own)
    first = jnp.maximum(offset - window + 1, 0) // size
  nothing = (
    jnp.full(q.shape[:2], -jnp.inf, jnp.float32),
    jnp.zeros(q.shape[:2], jnp.float32),
    jnp.zeros(q.shape, jnp.float32),
  )
  carry = step(own, nothing, causal[None])
  _, total, out = jax.lax.fori_loop(
    first,
    own,
    lambda j, carry: step(j, carry, None if window is None else reach(j)[None]),
    carry,
  )
  out = (out / total[..., None]).reshape(kv_heads, -1, size, head_dim)
  return jnp.moveaxis(out, 2, 0).reshape(1, size, heads, head_dim)
