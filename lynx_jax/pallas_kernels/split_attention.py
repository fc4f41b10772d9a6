# SPDX-License-Identifier: Apache-2.0
"""Attention over the packed prefix of a cache, which is never written dense.

It knows no model and no cache: two `PackedTensor`s, lengths, and a query.

With x = centre + scale * c, where c is the centred code and
centre = offset + scale * 2^(n-1), the scales leave the inner products:

  q · k   = (q ∘ scale) · c + q · centre
  Σ p v   = scale ∘ (Σ p c) + centre * (Σ p)

so the kernels' matrix products run on small integers. For Axis.TOKEN the scale
belongs to the token and multiplies the score (K) or the weight (V) instead. A
rotation is undone by rotating q before and the output after (`codec.rotate`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lynx_jax import codec as codec_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.config import Axis, Rotation
from lynx_jax.pallas_kernels import dispatch
from lynx_jax.shapes import Array, Float32, Int32


def split_attention(
  q: Float32[Array, 'B T N H'],
  k: PackedTensor,
  v: PackedTensor,
  *,
  layer: int | Int32[Array, ''],
  prefix_tokens: Int32[Array, 'B'],
  residual_tokens: Int32[Array, 'B'] | None = None,
  sinks: int = 0,
  logits_scale: float,
  implementation: str | None = None,
) -> tuple[Float32[Array, 'B T N H'], Float32[Array, 'B T N']]:
  """Attends every query row to the whole valid prefix of its slot.

  Args:
    q: queries, RoPE applied; all of them come later than the prefix.
    k, v: planes `u8[L, B, K, S/Q * R, Q]`. Planes that are `None` are not
      read: with the Anchor alone, values stand at their bins' midpoints.
    layer: which of the L layers.
    prefix_tokens: valid tokens a slot, a multiple of Q; nothing at or above
      it influences the result.
    residual_tokens: groups that end at or below it are read with all planes,
      the others with the Anchor only; `None` reads all planes everywhere.
    sinks: tokens at the start that live in another segment and are masked.
    logits_scale: multiplies q · k.
    implementation: see `dispatch.run`.

  Returns:
    The normalised output, and the log of the sum of exponentiated logits
    (natural logarithm), by which segments are merged. An empty prefix gives
    0 and -inf.

  Raises:
    Unsupported: `implementation` was named and cannot serve the case.
  """
  arguments: dict[str, Any] = {
    'layer': layer,
    'prefix_tokens': prefix_tokens,
    'residual_tokens': residual_tokens,
    'sinks': sinks,
    'logits_scale': logits_scale,
  }

  def tpu(interpret):
    from lynx_jax.pallas_kernels import split_attention_tpu

    return split_attention_tpu.split_attention_tpu(
      q, k, v, **arguments, interpret=interpret
    )

  return dispatch.run(
    'split_attention',
    implementation,
    xla=lambda: split_attention_xla(q, k, v, **arguments),
    pallas_tpu=tpu,
  )


def split_attention_xla(
  q: Float32[Array, 'B T N H'],
  k: PackedTensor,
  v: PackedTensor,
  *,
  layer: int | Int32[Array, ''],
  prefix_tokens: Int32[Array, 'B'],
  residual_tokens: Int32[Array, 'B'] | None,
  sinks: int,
  logits_scale: float,
) -> tuple[Float32[Array, 'B T N H'], Float32[Array, 'B T N']]:
  """The meaning of `split_attention`, in plain XLA."""
  batch, rows, heads, head_dim = q.shape
  kv_heads, groups, group = k.scale.shape[2], k.groups, k.group
  k, v = (jax.tree.map(lambda x: x[layer], packed) for packed in (k, v))

  start = jnp.arange(groups, dtype=jnp.int32) * group
  held = start[None] < prefix_tokens[:, None]  # B n
  full = None
  if residual_tokens is not None:
    full = start[None] + group <= residual_tokens[:, None]
  token = start[:, None] + jnp.arange(group, dtype=jnp.int32)[None]
  valid = held[:, :, None] & (token >= sinks)[None]  # B n Q

  q = q.reshape(batch, rows, kv_heads, -1, head_dim) * np.float32(logits_scale)
  q = jnp.moveaxis(q, 1, 2).reshape(batch, kv_heads, -1, head_dim)  # B K TG H
  if k.codec.rotation is Rotation.HADAMARD:
    q = codec_lib.rotate(q)
  # Values are dequantised group by group before the products: XLA on CPU fuses
  # that into the unpacking, and a step costs less than with the scales moved
  # out of the products, as the kernels have them. The broadcast makes each
  # group a product of its own; without it all of K would be transposed.
  keys, values = _values(k, held, full), _values(v, held, full)  # B K n H Q
  q = jnp.broadcast_to(
    q[:, :, None], (batch, kv_heads, groups, q.shape[2], head_dim)
  )
  scores = jnp.einsum('bknrh,bknht->bknrt', q, keys)
  scores = jnp.where(valid[:, None, :, None], scores, -jnp.inf)

  top = jnp.max(scores, axis=(2, 4), keepdims=True)
  top = jnp.where(top == -jnp.inf, 0.0, top)  # an empty prefix
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=(2, 4))  # B K TG
  out = jnp.einsum('bknht,bknrt->bknhr', values, weights)
  out = jnp.swapaxes(jnp.sum(out, axis=2), 2, 3)
  out = out / jnp.where(total > 0, total, 1.0)[..., None]
  if v.codec.rotation is Rotation.HADAMARD:
    out = codec_lib.rotate(out)
  lse = jnp.log(total) + top[:, :, 0, :, 0]

  def rows_first(x):  # B K TG … -> B T N …
    x = x.reshape(batch, kv_heads, rows, -1, *x.shape[3:])
    return jnp.moveaxis(x, 2, 1).reshape(batch, rows, heads, *x.shape[4:])

  return rows_first(out), rows_first(lse)


def _values(packed, held, full):
  """Returns values [B K n H Q]; scale and offset of groups not held are 0."""
  code = codec_lib.centred(packed, packed.depth)
  if full is not None and packed.depth > 1:
    anchor = codec_lib.centred(packed, 1)
    code = jnp.where(full[:, None, :, None, None], code, anchor)
  held = held[:, None, :, None]
  scale = jnp.where(held, packed.scale.astype(jnp.float32), 0.0)
  offset = jnp.where(held, packed.offset.astype(jnp.float32), 0.0)
  centre = offset + scale * np.float32(1 << (packed.codec.bits - 1))
  along = -1 if packed.codec.axis is Axis.CHANNEL else -2
  return code * jnp.expand_dims(scale, along) + jnp.expand_dims(centre, along)
