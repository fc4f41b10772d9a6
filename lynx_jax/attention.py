# SPDX-License-Identifier: Apache-2.0
"""Attention of new tokens over a cache: sinks ⊕ prefix ⊕ tail.

It knows no model and no speculation. Segments are attended to one by one and
merged by the log of their exponentiated sums, as in flash-decoding
(arXiv:2205.14135 §3.1 has the recursion). On several devices each attends with
its own heads and slots: kernels never see the others.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from lynx_jax import kv_cache, mesh
from lynx_jax.codec import PackedTensor
from lynx_jax.kv_cache import Prefix, Rows, Tail
from lynx_jax.pallas_kernels import split_attention
from lynx_jax.shapes import Array, Bool, Float, Float32, Int32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
  """What becomes of q · k in a layer, and which tokens its rows see.

  Attributes:
    logits_scale: multiplies q · k.
    soft_cap: bounds logits to cap · tanh(logit / cap); None does not.
    window: a row sees so many tokens, its own included; None is all of them.
  """

  logits_scale: float
  soft_cap: float | None = None
  window: int | Int32[Array, ''] | None = None

  def first_tokens(
    self, positions: Int32[Array, 'B T']
  ) -> Int32[Array, 'B T'] | None:
    """Returns the first position that each row sees; None where it is 0.

    With a window of 3: positions 0 1 2 3 4 see from 0 0 0 1 2 on.
    """
    if self.window is None:
      return None
    return jnp.maximum(positions - self.window + 1, 0)


def attend(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B T K H'],
  v: Float[Array, 'B T K H'],
  *,
  prefix: Prefix,
  tail: Tail,
  layer: int,
  rows: Rows,
  residual_tokens: Int32[Array, 'B'] | None,
  implementation: str | None,
  rule: Rule | None = None,
) -> tuple[Float[Array, 'B T N H'], Tail]:
  """Writes the pass's KV into the tail, then attends over all segments.

  Every row sees its own KV and that of the rows before it *through the tail*:
  the sum it takes part in does not depend on how many rows share the pass.

  Args:
    q, k, v: of the pass, RoPE applied.
    prefix, tail: of the layer group.
    layer: which layer of the group.
    rows: where the tokens stand.
    residual_tokens: see `split_attention`.
    implementation: of `split_attention`.
    rule: of the layer; None scales by 1 / sqrt(H), and all tokens are seen.

  Returns:
    The attention output in q's dtype, and the tail with the new rows.
  """
  if rule is None:
    rule = Rule(logits_scale=q.shape[-1] ** -0.5)
  # A window that differs from layer to layer is an array.
  window = rule.window if isinstance(rule.window, jax.Array) else None
  queries, dense = mesh.spec('B T N H'), mesh.spec('B T K H')
  tails, slots = kv_cache.specs(tail), mesh.spec('B')
  return mesh.on_each_shard(
    functools.partial(
      _attend, layer=layer, rule=rule, implementation=implementation
    ),
    (
      queries,
      dense,
      dense,
      kv_cache.specs(prefix),
      tails,
      slots,
      slots,
      PartitionSpec(),
    ),
    (queries, tails),
    q,
    k,
    v,
    prefix,
    tail,
    rows,
    residual_tokens,
    window,
  )


def _attend(
  q,
  k,
  v,
  prefix,
  tail,
  rows,
  residual_tokens,
  window,
  *,
  layer,
  rule,
  implementation,
):
  """Does what `attend` says with the heads of one device."""
  if window is not None:
    rule = dataclasses.replace(rule, window=window)
  tail = kv_cache.write_rows(
    tail, layer, k.astype(tail.k.dtype), v.astype(tail.v.dtype), rows
  )
  position = rows.positions(q.shape[1])  # B T
  logits: dict[str, Any] = {
    'logits_scale': rule.logits_scale,
    'soft_cap': rule.soft_cap,
  }
  first = rule.first_tokens(position)
  query = q.astype(jnp.float32)
  sinks = prefix.sinks_k.shape[2]
  end = rows.prefix_ends  # B T, or B 1 where all rows read the same
  end = rows.prefix_tokens[:, None] if end is None else end

  def visible(held, token):  # B T S, where `held` is less than that
    held = jnp.broadcast_to(held, (*position.shape, held.shape[-1]))
    if first is None:
      return held
    return held & (token >= first[:, :, None])

  parts = []
  if sinks:
    token = jnp.arange(sinks, dtype=jnp.int32)[None, None]
    parts.append(
      dense_attention(
        query,
        prefix.sinks_k[layer],
        prefix.sinks_v[layer],
        mask=visible(token < end[:, :, None], token),
        **logits,
      )
    )
  if isinstance(prefix.k, PackedTensor):
    assert isinstance(prefix.v, PackedTensor)
    packed = functools.partial(
      split_attention,
      query,
      prefix.k,
      prefix.v,
      layer=layer,
      residual_tokens=residual_tokens,
      sinks=sinks,
      first_tokens=first,
      **logits,
      implementation=implementation,
    )
    parts.append(_up_to(packed, end))
  else:
    assert not isinstance(prefix.v, PackedTensor)
    token = jnp.arange(prefix.k.shape[2], dtype=jnp.int32)[None, None]
    parts.append(
      dense_attention(
        query,
        prefix.k[layer],
        prefix.v[layer],
        mask=visible((token >= sinks) & (token < end[:, :, None]), token),
        **logits,
      )
    )
  token = kv_cache.tail_positions(position, rows, tail.k.shape[2])
  held = token <= position[:, :, None]
  if rows.prefix_ends is not None:
    held = held & (token >= end[:, :, None])
  parts.append(
    dense_attention(
      query,
      tail.k[layer],
      tail.v[layer],
      mask=visible(held, token),
      **logits,
    )
  )
  return merge(parts).astype(q.dtype), tail


def _up_to(packed, end):
  """Attends with every row to the prefix below its `end`.

  Rows of a pass have at most two ends: it has fewer tokens than a group. Both
  are served by the same code, so that a row gets the same bits whatever the
  ends of others.
  """
  if end.shape[1] == 1:
    return packed(prefix_tokens=end[:, 0])

  def one(index, found):
    own = jnp.where(index == 0, end[:, 0], end[:, -1])
    fresh = packed(prefix_tokens=own)
    mine = (end == own[:, None])[:, :, None]
    out, lse = (
      jnp.where(m, new, old)
      for m, new, old in zip((mine[..., None], mine), fresh, found, strict=True)
    )
    return out, lse

  shapes = jax.eval_shape(lambda: packed(prefix_tokens=end[:, 0]))
  empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  count = 1 + jnp.any(end[:, 0] != end[:, -1]).astype(jnp.int32)
  return jax.lax.fori_loop(0, count, one, empty)


def dense_attention(
  q: Float32[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  *,
  mask: Bool[Array, 'B T S'],
  logits_scale: float,
  soft_cap: float | None = None,
) -> tuple[Float32[Array, 'B T N H'], Float32[Array, 'B T N']]:
  """Attends to the masked-in tokens; returns (output, lse).

  Scale and cap are those of a `Rule`.
  What is masked out may hold anything, NaN included. A row with nothing to
  attend to gives 0 and -inf.
  """
  batch, rows, heads, head_dim = q.shape
  kv_heads = k.shape[2]
  seen = jnp.any(mask, axis=1)[:, :, None, None]
  k = jnp.where(seen, k.astype(jnp.float32), 0.0)
  v = jnp.where(seen, v.astype(jnp.float32), 0.0)
  q = q.reshape(batch, rows, kv_heads, -1, head_dim) * np.float32(logits_scale)
  scores = jnp.einsum('btkgh,bskh->bkgts', q, k)
  if soft_cap is not None:
    scores = np.float32(soft_cap) * jnp.tanh(scores / np.float32(soft_cap))
  scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
  top = jnp.max(scores, axis=-1, keepdims=True)
  top = jnp.where(top == -jnp.inf, 0.0, top)
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=-1)  # B K G T
  out = jnp.einsum('bkgts,bskh->bkgth', weights, v)
  out = out / jnp.where(total > 0, total, 1.0)[..., None]
  lse = jnp.log(total) + top[..., 0]

  def rows_first(x):  # B K G T … -> B T N …
    return jnp.moveaxis(x, 3, 1).reshape(batch, rows, heads, *x.shape[4:])

  return rows_first(out), rows_first(lse)


def merge(
  parts: list[tuple[Float32[Array, 'B T N H'], Float32[Array, 'B T N']]],
) -> Float32[Array, 'B T N H']:
  """Merges segment outputs weighted by exp(lse); one must not be empty."""
  lse = jnp.stack([part[1] for part in parts])
  weights = jnp.exp(lse - jnp.max(lse, axis=0, keepdims=True))
  weights = weights / jnp.sum(weights, axis=0, keepdims=True)
  out = jnp.stack([part[0] for part in parts])
  return jnp.sum(out * weights[..., None], axis=0)
