# SPDX-License-Identifier: Apache-2.0
"""Prefill attention on TPU: JAX's splash attention, block by block.

It knows no cache. Splash attention's masks are static, but a chunk's offset is
traced, so that one program serves every chunk of 128k tokens: the chunk's own
block goes in under a causal mask, each earlier block under none, and results
are merged by their log-sum-exp.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu import splash_attention

from lynx_jax.pallas_kernels.dispatch import Unsupported
from lynx_jax.shapes import Array, BFloat16, Float, Float32, Int32


def chunk_attention_tpu(
  q: Float[Array, '1 C N H'],
  k: BFloat16[Array, 'L S K H'],
  v: BFloat16[Array, 'L S K H'],
  *,
  layer: int | Int32[Array, ''],
  offset: Int32[Array, ''],
  logits_scale: float | None = None,
  soft_cap: float | None = None,
  window: int | Int32[Array, ''] | None = None,
  interpret: bool = False,
) -> Float32[Array, '1 C N H']:
  """Attends causally to all tokens up to each row's own position.

  Args:
    q: queries of the chunk, RoPE applied.
    k, v: the chunk's own tokens included.
    layer: which of the L layers.
    offset: position of the chunk's first token, a multiple of C.
    logits_scale: multiplies q · k; None is 1 / sqrt(H).
    soft_cap: bounds logits to soft_cap * tanh(logit / soft_cap).
    window: must be None.
    interpret: runs in Pallas's interpreter.

  Raises:
    Unsupported: C is not a multiple of 128, or there is a sliding window.
  """
  _, size, heads, head_dim = q.shape
  kv_heads = k.shape[2]
  if size % 128:
    raise Unsupported(f'a chunk of {size} tokens: must be a multiple of 128')
  if window is not None:
    raise Unsupported(
      'a sliding window: masks of splash attention are static, this one moves '
      'with the offset; use xla'
    )
  if logits_scale is None:
    logits_scale = head_dim**-0.5
  per_head = heads // kv_heads
  q = q[0].astype(jnp.float32) * np.float32(logits_scale)
  q = jnp.moveaxis(q.reshape(size, kv_heads, per_head, head_dim), 0, 2)
  q = q.astype(jnp.bfloat16)  # K G C H

  def load(x, block):
    at = (layer, block * size, 0, 0)
    part = lax.dynamic_slice(x, at, (1, size, kv_heads, head_dim))[0]
    return jnp.swapaxes(part, 0, 1)

  def attend(mask, block):
    kernel = _kernel(mask, size, per_head, soft_cap, interpret)
    out, (lse,) = jax.vmap(kernel)(q, load(k, block), load(v, block))
    return out.astype(jnp.float32), lse

  def step(block, carry):
    out, lse = carry
    fresh, fresh_lse = attend(splash_attention.FullMask, block)
    total = jnp.logaddexp(lse, fresh_lse)
    kept, added = (jnp.exp(x - total)[..., None] for x in (lse, fresh_lse))
    return out * kept + fresh * added, total

  own = offset // size
  carry = attend(splash_attention.CausalMask, own)
  out, _ = lax.fori_loop(0, own, step, carry)
  return jnp.moveaxis(out, 2, 0).reshape(1, size, heads, head_dim)


def _kernel(mask, size, per_head, soft_cap, interpret):
  masks = splash_attention.MultiHeadMask([mask((size, size))] * per_head)
  return splash_attention.make_splash_mqa_single_device(
    masks,
    save_residuals=True,
    attn_logits_soft_cap=soft_cap,
    interpret=interpret,
  )
