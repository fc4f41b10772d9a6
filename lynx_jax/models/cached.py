# SPDX-License-Identifier: Apache-2.0
"""Runs a transformer over a progressive cache, layer group by layer group.

It knows no drafts and no commits; it never advances a length.
"""

import jax
import jax.numpy as jnp

from lynx_jax.attention import attend
from lynx_jax.kv_cache import Prefix, Rows, Tail
from lynx_jax.models.transformer import Transformer
from lynx_jax.shapes import Array, Float, Float32, Int32


def run_layers(
  model: Transformer,
  h: Float[Array, 'B T D'],
  prefix: Prefix,
  tail: Tail,
  *,
  first_layer: int,
  rows: Rows,
  residual_tokens: Int32[Array, 'B'] | None = None,
  implementation: str | None = None,
) -> tuple[Float[Array, 'B T D'], Tail]:
  """Runs one layer group.

  Args:
    model: all layers.
    h: residual stream.
    prefix, tail: of this group.
    first_layer: of the group, in the model.
    rows: where the T tokens stand.
    residual_tokens: see `split_attention`.
    implementation: of `split_attention`.

  Returns:
    The residual stream, and the tail with the pass's KV in it.
  """
  positions = rows.positions(h.shape[1])
  for layer in range(tail.k.shape[0]):

    def cached(q, k, v, layer=layer, tail=tail):
      return attend(
        q,
        k,
        v,
        prefix=prefix,
        tail=tail,
        layer=layer,
        rows=rows,
        residual_tokens=residual_tokens,
        implementation=implementation,
      )

    h, tail = model.layers[first_layer + layer](h, positions, cached)
  return h, tail


def forward(
  model: Transformer,
  tokens: Int32[Array, 'B T'],
  prefix: tuple[Prefix, ...],
  tail: tuple[Tail, ...],
  *,
  rows: Rows,
  residual_tokens: Int32[Array, 'g B'] | None = None,
  implementation: str | None = None,
) -> tuple[Float32[Array, 'B T V'], tuple[Tail, ...]]:
  """Returns the logits of every row, and the tail with the rows' KV in it.

  `residual_tokens` holds one row per layer group; see `run_layers`.
  """
  h = model.embed(tokens)
  written, layer = [], 0
  for group, (part, rest) in enumerate(zip(prefix, tail, strict=True)):
    h, rest = run_layers(
      model,
      h,
      part,
      rest,
      first_layer=layer,
      rows=rows,
      residual_tokens=(
        None if residual_tokens is None else residual_tokens[group]
      ),
      implementation=implementation,
    )
    layer += rest.k.shape[0]
    written.append(rest)
  return model.head(h), tuple(written)


def greedy(logits: Float32[Array, 'B T V']) -> Int32[Array, 'B T']:
  """Returns the most likely token of every row, the lowest id among equals."""
  return jax.lax.argmax(logits, 2, jnp.int32)
