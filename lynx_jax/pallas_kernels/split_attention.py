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
  soft_cap: float | None = None,
  first_tokens: Int32[Array, 'B T'] | None = None,
  block_table: Int32[Array, 'B n'] | None = None,
  implementation: str | None = None,
) -> tuple[Float32[Array, 'B T N H'], Float32[Array, 'B T N']]:
  """Attends every query row to the valid prefix of its slot.

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
    soft_cap: bounds logits to soft_cap * tanh(logit / soft_cap), as in
      Gemma 2; must be positive.
    first_tokens: the first position that a query row sees; `None` is 0. A
      sliding window of w tokens is max(0, position - w + 1). The TPU kernel
      reads no block below the least of a slot.
    block_table: n = S/Q entries a slot: group g of slot b lies where group
      e % n of slot e // n is stored, e = block_table[b, g]. Slots can share
      groups so. `None` is the identity, e = b * n + g; entries of groups at or
      above `prefix_tokens` may hold anything.
    implementation: see `dispatch.run`.

  Returns:
    The normalised output, and the log of the sum of exponentiated logits
    (natural logarithm), by which segments are merged. A row that sees nothing
    gives 0 and -inf.

  Raises:
    Unsupported: `implementation` was named and cannot serve the case.
    ValueError: an argument that no implementation could serve.
  """
  if soft_cap is not None and soft_cap <= 0:
    raise ValueError(f'soft_cap={soft_cap} must be positive, or None')
  if block_table is not None and block_table.shape[1] != k.groups:
    raise ValueError(
      f'block_table holds {block_table.shape[1]} groups a slot; must be the '
      f'{k.groups} of k'
    )
  arguments: dict[str, Any] = {
    'layer': layer,
    'prefix_tokens': prefix_tokens,
    'residual_tokens': residual_tokens,
    'sinks': sinks,
    'logits_scale': logits_scale,
    'soft_cap': soft_cap,
    'first_tokens': first_tokens,
    'block_table': block_table,
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
  residual_tokens: Int32[Array, 'B'] | None = None,
  sinks: int = 0,
  logits_scale: float,
  soft_cap: float | None = None,
  first_tokens: Int32[Array, 'B T'] | None = None,
  block_table: Int32[Array, 'B n'] | None = None,
) -> tuple[Float32[Array, 'B T N H'], Float32[Array, 'B T N']]:
  """The meaning of `split_attention`, in plain XLA."""
  batch, rows, heads, head_dim = q.shape
  kv_heads, groups, group = k.scale.shape[2], k.groups, k.group
  k, v = (jax.tree.map(lambda x: x[layer], packed) for packed in (k, v))
  if block_table is not None:
    page = page_numbers(block_table)
    k, v = (
      jax.tree.map(lambda x: gather_groups(x, page), packed)
      for packed in (k, v)
    )

  start = jnp.arange(groups, dtype=jnp.int32) * group
  held = start[None] < prefix_tokens[:, None]  # B n
  full = None
  if residual_tokens is not None:
    full = start[None] + group <= residual_tokens[:, None]
  token = start[:, None] + jnp.arange(group, dtype=jnp.int32)[None]
  valid = (held[:, :, None] & (token >= sinks)[None])[:, :, None]  # B n 1 Q
  if first_tokens is not None:
    seen = token[None, :, None] >= first_tokens[:, None, :, None]  # B n T Q
    # Groups that no row sees may hold anything.
    least = jnp.min(first_tokens, axis=1)[:, None]
    held = held & (start[None] + group > least)
    valid = valid & jnp.repeat(seen, heads // kv_heads, axis=2)

  q = q.reshape(batch, rows, kv_heads, -1, head_dim) * np.float32(logits_scale)
  q = jnp.moveaxis(q, 1, 2).reshape(batch, kv_heads, -1, head_dim)  # B K TG H
  if k.codec.rotation is Rotation.HADAMARD:
    q = codec_lib.rotate_rows(q)
  # Values are dequantised group by group before the products: XLA on CPU fuses
  # that into the unpacking, and a step costs less than with the scales moved
  # out of the products, as the kernels have them. The broadcast makes each
  # group a product of its own; without it all of K would be transposed.
  keys, values = _values(k, held, full), _values(v, held, full)  # B K n H Q
  q = jnp.broadcast_to(
    q[:, :, None], (batch, kv_heads, groups, q.shape[2], head_dim)
  )
  scores = jnp.einsum('bknrh,bknht->bknrt', q, keys)
  if soft_cap is not None:
    scores = np.float32(soft_cap) * jnp.tanh(scores / np.float32(soft_cap))
  scores = jnp.where(valid[:, None], scores, -jnp.inf)

  top = jnp.max(scores, axis=(2, 4), keepdims=True)
  top = jnp.where(top == -jnp.inf, 0.0, top)  # it sees nothing
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=(2, 4))  # B K TG
  out = jnp.einsum('bknht,bknrt->bknhr', values, weights)
  out = jnp.swapaxes(jnp.sum(out, axis=2), 2, 3)
  out = out / jnp.where(total > 0, total, 1.0)[..., None]
  if v.codec.rotation is Rotation.HADAMARD:
    out = codec_lib.rotate_rows(out)
  lse = jnp.log(total) + top[:, :, 0, :, 0]

  def rows_first(x):  # B K TG … -> B T N …
    x = x.reshape(batch, kv_heads, rows, -1, *x.shape[3:])
    return jnp.moveaxis(x, 2, 1).reshape(batch, rows, heads, *x.shape[4:])

  return rows_first(out), rows_first(lse)


def page_numbers(block_table: Int32[Array, 'B n']) -> Int32[Array, 'B n']:
  """Returns the table with entries that name no group (unread) clipped."""
  return jnp.clip(block_table, 0, block_table.size - 1).astype(jnp.int32)


def gather_groups(x: Array, page: Int32[Array, 'B n']) -> Array:
  """Puts the groups of a plane or scale [B, K, n * R, E] in a slot's order."""
  batch, kv_heads, rows, width = x.shape
  groups = page.shape[1]
  x = x.reshape(batch, kv_heads, groups, rows // groups, width)
  x = jnp.moveaxis(x, 2, 1).reshape(-1, kv_heads, rows // groups, width)
  return jnp.moveaxis(x[page], 2, 1).reshape(batch, kv_heads, rows, width)


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
