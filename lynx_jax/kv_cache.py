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

Where generated tokens are packed, E grows with the position of the token that
reads: the one at p has its prefix in [0, prefix_end(p)), however many tokens
share its pass. `pack_group` copies a group into the prefix before any token
needs it there, and after all of it is committed. The tail is a ring then: row
j holds positions E + j modulo its size, with the prompt's E. Tokens keep their
rows, so that sums over the tail are formed in the same order in every pass.
With groups of 32, 16 recent tokens and a prompt of 90:

| token at | reads from the prefix | group [64, 96) is packed when |
|---|---|---|
| 90 .. 111 | [0, 64) | |
| 112 .. 143 | [0, 96) | 96 tokens are committed, before a pass reaches 112 |

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
from jax.sharding import PartitionSpec

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
from lynx_jax.pallas_kernels.split_kv import split_kv
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
    prefix_ends: what each row reads from the prefix; None is E, and the tail
      is no ring.
  """

  first: Int32[Array, 'B']
  prefix_tokens: Int32[Array, 'B']
  active: Bool[Array, 'B']
  prefix_ends: Int32[Array, 'B T'] | None = None

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
  its tail may be receiving. Rows of a ring are written where they are active.
  """
  capacity, count = tail.k.shape[2], k.shape[1]
  if rows.prefix_ends is not None:
    place = (rows.first - rows.prefix_tokens)[:, None]
    place = (place + jnp.arange(count, dtype=jnp.int32)[None]) % capacity
    place = jnp.where(rows.active[:, None], place, capacity)  # is dropped
    slot = jnp.arange(len(place), dtype=jnp.int32)[:, None]
    return Tail(
      tail.k.at[layer, slot, place].set(k, mode='drop'),
      tail.v.at[layer, slot, place].set(v, mode='drop'),
    )
  start = jnp.where(
    rows.active, rows.first - rows.prefix_tokens, capacity - count
  )

  def write(buffer, values):
    for slot in range(buffer.shape[1]):
      buffer = jax.lax.dynamic_update_slice(
        buffer, values[None, slot : slot + 1], (layer, slot, start[slot], 0, 0)
      )
    return buffer

  return Tail(write(tail.k, k), write(tail.v, v))


def as_stored(tails: _Tree) -> _Tree:
  """Fixes the layout of what a loop carries.

  Otherwise XLA has a loop carry tails with heads outside of tokens, and copies
  them before the loop and behind it. It is fixed on each device alone: the
  partitioner would gather what is fixed as a whole. What a program returns must
  not be fixed itself: it could then not be donated (all jax 0.10.2).
  """

  def fix(x):
    # With one head a device XLA stores [L B S 1 H] as [L B 1 S H]: the same
    # order of values, but tiles span tokens and not the head.
    order = (0, 1, 2, 3, 4) if x.shape[3] > 1 else (0, 1, 3, 2, 4)
    return with_layout_constraint(x, Layout(order))

  split = specs(tails)
  return mesh_lib.on_each_shard(
    functools.partial(jax.tree.map, fix), (split,), split, tails
  )


def tail_positions(
  positions: Int32[Array, 'B T'], rows: Rows, capacity: int
) -> Int32[Array, 'B 1 S'] | Int32[Array, 'B T S']:
  """Returns which position a row of the tail holds, as each token sees it.

  In a ring of 8 rows with E = 64, the token at 74 sees

  | row | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
  |---|---|---|---|---|---|---|---|---|
  | position | 72 | 73 | 74 | 67 | 68 | 69 | 70 | 71 |

  Args:
    positions: of the pass.
    rows: where the tokens stand.
    capacity: S, rows of the tail.
  """
  row = jnp.arange(capacity, dtype=jnp.int32)[None, None]
  start = rows.prefix_tokens[:, None, None]
  if rows.prefix_ends is None:
    return start + row
  own = positions[:, :, None]
  return own - (own - start - row) % capacity


def pack_group(
  prefix: Prefix,
  tail: Tail,
  slot: Int32[Array, ''],
  prefix_tokens: Int32[Array, ''],
  end: Int32[Array, ''],
  *,
  group: int,
  implementation: str | None = None,
) -> Prefix:
  """Copies a group of a slot from the tail into the planes of its prefix.

  Args:
    prefix, tail: of a layer group; all tokens of the group are committed.
    slot: whose.
    prefix_tokens: E, which the ring's first row holds.
    end: tokens that are in the prefix; the group begins there.
    group: Q.
    implementation: of `split_kv`.
  """
  pack = functools.partial(
    _pack_group, group=group, implementation=implementation
  )
  held, everywhere = specs((prefix, tail)), PartitionSpec()
  return mesh_lib.on_each_shard(
    pack,
    (*held, everywhere, everywhere, everywhere),
    held[0],
    prefix,
    tail,
    slot,
    prefix_tokens,
    end,
  )


def _pack_group(
  prefix, tail, slot, prefix_tokens, end, *, group, implementation
):
  sinks, capacity = prefix.sinks_k.shape[2], tail.k.shape[2]
  row = end - prefix_tokens + jnp.arange(group, dtype=jnp.int32)
  dense = [x[:, slot, row % capacity] for x in (tail.k, tail.v)]  # L Q K H
  is_first = end == 0
  packed = split_kv(
    *dense,
    k_codec=prefix.k.codec,
    v_codec=prefix.v.codec,
    group=group,
    sinks=jnp.where(is_first, sinks, 0).astype(jnp.int32),
    implementation=implementation,
  )

  def put(buffer, values):  # [L, K, rows, …] of one group
    start = jnp.zeros((buffer.ndim,), jnp.int32)
    start = start.at[1].set(slot).at[3].set(end // group * values.shape[2])
    return jax.lax.dynamic_update_slice(buffer, values[:, None], start)

  def first(held, values):
    kept = jnp.where(is_first, values[:, :sinks], held[:, slot])
    return held.at[:, slot].set(kept)

  k, v = (
    jax.tree.map(put, held, fresh)
    for held, fresh in zip((prefix.k, prefix.v), packed, strict=True)
  )
  sinks_k, sinks_v = map(first, (prefix.sinks_k, prefix.sinks_v), dense)
  return Prefix(k, v, sinks_k, sinks_v)
