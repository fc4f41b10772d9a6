# SPDX-License-Identifier: Apache-2.0
"""The progressive KV cache of a batch of slots: segments by layer group.

It knows no model, no transfer and no acceptance rule.

A slot's tokens [0, length) lie in three segments:

| segment | positions | form |
|---|---|---|
| sinks | [0, s), if the prefix is not empty | dense bfloat16 |
| prefix | [0, E), whole groups; sink positions masked | planes, or dense |
| tail | [E, …) | dense bfloat16 |

E is `CodecConfig.prefix_end(prompt)`, and row j of the tail holds position
E + j. `length` counts tokens whose KV is committed and is the only commit mark:
drafts write scratch rows above it, verification overwrites them, a commit
raises it. Nothing is ever rolled back.

Where the codec has an exact plane, the prefix has a second form: bit-exact
bfloat16, merged group by group. A pass over it is the very program of a cache
without planes; drafts go on reading the planes.

The prefix is read-only for every program that runs the model; the tail is
donated to it and returned. Nothing in a row that a slot's length does not
cover influences the slot, whatever it holds.
"""

import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from lynx_jax import codec as codec_lib
from lynx_jax import mesh as mesh_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.config import (
  CodecConfig,
  EngineConfig,
  ModelConfig,
  Target,
  layer_ranges,
)
from lynx_jax.shapes import Array, BFloat16, Bool, Int32

_Tree = TypeVar('_Tree')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
  """Quantised or dense prompt of one layer group, and its sinks.

  `k` and `v` are `PackedTensor`s, or dense `bfloat16[L, B, S, K, H]` where the
  codec has no planes.
  """

  k: PackedTensor | BFloat16[Array, 'L B S K H']
  v: PackedTensor | BFloat16[Array, 'L B S K H']
  sinks_k: BFloat16[Array, 'L B s K H']
  sinks_v: BFloat16[Array, 'L B s K H']


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tail:
  """Dense rows of one layer group: recent prompt, generated tokens, scratch."""

  k: BFloat16[Array, 'L B W K H']
  v: BFloat16[Array, 'L B W K H']


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Exact:
  """The prefix of one layer group in bfloat16; zeros for the sinks."""

  k: BFloat16[Array, 'L B S K H']
  v: BFloat16[Array, 'L B S K H']


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
  """All layer groups of a cache; see the module docstring.

  `exact` is empty where the codec has no exact plane.
  """

  prefix: tuple[Prefix, ...]
  tail: tuple[Tail, ...]
  exact: tuple[Exact, ...] = ()

  def target(self, target: Target) -> tuple[Prefix, ...]:
    """Returns the prefix that a verification reads."""
    if target is Target.PLANES:
      return self.prefix
    return tuple(
      Prefix(exact.k, exact.v, prefix.sinks_k, prefix.sinks_v)
      for exact, prefix in zip(self.exact, self.prefix, strict=True)
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
  """Where the T tokens of a pass stand, a slot.

  Attributes:
    first: position of row 0; row r stands at `first + r`.
    prefix_tokens: E, where the tail starts.
    active: other slots compute on scratch and change nothing that counts.
  """

  first: Int32[Array, 'B']
  prefix_tokens: Int32[Array, 'B']
  active: Bool[Array, 'B']

  def positions(self, rows: int) -> Int32[Array, 'B T']:
    """Returns the position of every row; 0.. for slots that are not active."""
    first = jnp.where(self.active, self.first, 0)
    return first[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]


def empty(
  model: ModelConfig, codec: CodecConfig, engine: EngineConfig
) -> Cache:
  """Returns a zeroed cache for `engine.slots` slots."""
  prefix, tail, exact = [], [], []
  groups = engine.prefix_capacity(codec) // codec.group
  heads = (model.kv_heads, model.head_dim)
  for start, stop in layer_ranges(model, engine):
    leading = (stop - start, engine.slots)

    def segment(tensor, leading=leading):
      if not tensor.planes:
        tokens = groups * codec.group
        return jnp.zeros((*leading, tokens, *heads), jnp.bfloat16)
      return codec_lib.empty(
        leading,
        kv_heads=model.kv_heads,
        groups=groups,
        group=codec.group,
        head_dim=model.head_dim,
        codec=tensor,
      )

    def dense(tokens, leading=leading):
      return jnp.zeros((*leading, tokens, *heads), jnp.bfloat16)

    k, v = codec.of_layer(start)
    sinks = codec.sinks
    prefix.append(Prefix(segment(k), segment(v), dense(sinks), dense(sinks)))
    rows = engine.tail_capacity(codec)
    tail.append(Tail(dense(rows), dense(rows)))
    if codec.exact:
      tokens = groups * codec.group
      exact.append(Exact(dense(tokens), dense(tokens)))
  return Cache(tuple(prefix), tuple(tail), tuple(exact))


def allocate(
  model: ModelConfig,
  codec: CodecConfig,
  engine: EngineConfig,
  mesh: jax.sharding.Mesh,
) -> Cache:
  """Returns an `empty` cache that was made where it lies, on a mesh."""
  make = functools.partial(empty, model, codec, engine)
  where = jax.tree.map(
    functools.partial(mesh_lib.place, mesh), specs(jax.eval_shape(make))
  )
  return jax.jit(make, out_shardings=where)()


def specs(tree: _Tree, leading: str = 'L B') -> _Tree:
  """Returns how a tree of keys and values is split over a mesh.

  Args:
    tree: of `PackedTensor`s and dense arrays; each becomes one
      `PartitionSpec`, also where it has several arrays.
    leading: axes before those of one slot's tokens.
  """

  def one(x):
    if isinstance(x, PackedTensor):
      return mesh_lib.spec(f'{leading} K R Q')
    return mesh_lib.spec(f'{leading} S K H')

  return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, PackedTensor))


def anchor_only(prefix: tuple[Prefix, ...]) -> tuple[Prefix, ...]:
  """Returns the prefix without its Residual planes."""

  def keep(x):
    return x.keep(1) if isinstance(x, PackedTensor) else x

  return tuple(dataclasses.replace(p, k=keep(p.k), v=keep(p.v)) for p in prefix)


def write_rows(
  tail: Tail,
  layer: int,
  k: BFloat16[Array, 'B T K H'],
  v: BFloat16[Array, 'B T K H'],
  rows: Rows,
) -> Tail:
  """Writes the KV of a pass at the rows' positions.

  A slot that is not active gets them in its last T rows, which hold nothing:
  its tail may be receiving.
  """
  capacity, count = tail.k.shape[2], k.shape[1]
  start = jnp.where(
    rows.active, rows.first - rows.prefix_tokens, capacity - count
  )

  def write(buffer, values):
    for slot in range(buffer.shape[1]):
      buffer = jax.lax.dynamic_update_slice(
        buffer, values[None, slot : slot + 1], (layer, slot, start[slot], 0, 0)
      )
    return _as_stored(buffer)

  return Tail(write(tail.k, k), write(tail.v, v))


def _as_stored(buffer):
  """Fixes the layout of a tail, on one device.

  Otherwise XLA has a loop carry the tail with heads outside of tokens, and
  copies it before the loop and behind it. On several devices the partitioner
  would gather what is fixed (jax 0.10.2).
  """
  if not jax.sharding.get_abstract_mesh().empty:
    return buffer
  return with_layout_constraint(buffer, Layout(tuple(range(buffer.ndim))))
