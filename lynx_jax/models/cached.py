# SPDX-License-Identifier: Apache-2.0
"""Runs a transformer over a progressive cache, layer group by layer group.

It knows no drafts and no commits; it never advances a length.
"""

import dataclasses
from collections.abc import Sequence

from flax import nnx

from lynx_jax.attention import attend
from lynx_jax.kv_cache import Prefix, Rows, Tail
from lynx_jax.models.transformer import Layer, Transformer
from lynx_jax.shapes import Array, Float, Float32, Int32


@dataclasses.dataclass(frozen=True)
class Graphs:
  """Static halves of a model split by nnx: the whole, and any one layer.

  All layers have the same graph, so a program made for one layer group serves
  every group of as many layers.
  """

  model: nnx.GraphDef
  layer: nnx.GraphDef

  def layers(self, params: Sequence[nnx.State]) -> list[Layer]:
    """Returns layers with the given parameters."""
    return [nnx.merge(self.layer, state) for state in params]


def split(model: Transformer) -> tuple[Graphs, nnx.State]:
  """Splits a model into what is static and its parameters."""
  graph, params = nnx.split(model)
  return Graphs(graph, nnx.split(model.layers[0])[0]), params


def layer_params(
  params: nnx.State, start: int, stop: int
) -> tuple[nnx.State, ...]:
  """Returns the parameters of layers `start..stop-1`."""
  return tuple(params['layers'][layer] for layer in range(start, stop))


def run_layers(
  layers: Sequence[Layer],
  h: Float[Array, 'B T D'],
  prefix: Prefix,
  tail: Tail,
  rows: Rows,
  *,
  residual_tokens: Int32[Array, 'B'] | None = None,
  implementation: str | None = None,
) -> tuple[Float[Array, 'B T D'], Tail]:
  """Runs one layer group.

  Args:
    layers: of the group.
    h: residual stream.
    prefix, tail: of the group.
    rows: where the T tokens stand.
    residual_tokens: see `split_attention`.
    implementation: of `split_attention`.

  Returns:
    The residual stream, and the tail with the pass's KV in it.
  """
  positions = rows.positions(h.shape[1])
  for index, layer in enumerate(layers):

    def cached(q, k, v, index=index, layer=layer, tail=tail):
      return attend(
        q,
        k,
        v,
        prefix=prefix,
        tail=tail,
        layer=index,
        rows=rows,
        residual_tokens=residual_tokens,
        implementation=implementation,
        rule=layer.rule,
      )

    h, tail = layer(h, positions, cached)
  return h, tail


def forward(
  model: Transformer,
  tokens: Int32[Array, 'B T'],
  prefix: tuple[Prefix, ...],
  tail: tuple[Tail, ...],
  rows: Rows,
  *,
  residual_tokens: Int32[Array, 'g B'] | None = None,
  implementation: str | None = None,
) -> tuple[Float32[Array, 'B T V'], tuple[Tail, ...]]:
  """Returns the logits of every row, and the tail with the rows' KV in it.

  `residual_tokens` holds one row per layer group; see `run_layers`.
  """
  h = model.embed(tokens)
  written, first = [], 0
  for group, (part, rest) in enumerate(zip(prefix, tail, strict=True)):
    count = rest.k.shape[0]
    h, rest = run_layers(
      list(model.layers)[first : first + count],
      h,
      part,
      rest,
      rows,
      residual_tokens=(
        None if residual_tokens is None else residual_tokens[group]
      ),
      implementation=implementation,
    )
    first += count
    written.append(rest)
  return model.head(h), tuple(written)
