# SPDX-License-Identifier: Apache-2.0
"""One grid step of `split_attention_tpu`: what it has read, and what it means.

It knows no copies and no softmax; few and many query rows share it.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lynx_jax import codec as codec_lib
from lynx_jax.config import Axis, TensorCodec
from lynx_jax.pallas_kernels import words
from lynx_jax.pallas_kernels.tiles import GROUP, Tile

# Stands for -inf: exp2 of a difference of two of them is 1, not NaN.
MASKED = -1e30


class Packed(NamedTuple):
  """Planes, scale and offset: HBM refs, or VMEM buffers."""

  planes: tuple[Any, ...]
  scale: Any
  offset: Any


class Softmax(NamedTuple):
  """VMEM of the softmax so far; `top` is in units of log 2.

  Attributes:
    top, mass: f32[heads, sublanes, 128], every lane the same.
    out: f32[heads, sublanes, width].
  """

  top: Any
  mass: Any
  out: Any


class Tables(NamedTuple):
  """VMEM of f32[heads, …]: value = bias + scale * code byte."""

  scale: Any
  bias: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
  """Keys or values of a block.

  Attributes:
    packed: buffers of the block.
    codec: of the values.
    tables: to be filled by `Block.fill`.
    staging: VMEM f32[heads, 2, groups, H] where tiles are stacked.
  """

  packed: Packed
  codec: TensorCodec
  tables: Tables
  staging: Any

  @property
  def of_channels(self) -> bool:
    """Whether scales belong to channels; otherwise they belong to tokens."""
    return self.codec.axis is Axis.CHANNEL


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
  """A block of all groups and heads of a grid step.

  Attributes:
    tile: how rows and groups share registers.
    groups: that buffers hold; those from `held` on hold no tokens.
    held: groups that hold tokens.
    full: groups that are read with all planes; None is all.
    sinks: tokens at the block's start that are masked; None is 0.
    first: i32[sublanes, 128], tokens that each row does not see, or None.
    soft_cap: of scores in units of log 2, or None.
    k, v: the two sides.
  """

  tile: Tile
  groups: int
  held: Any
  full: Any
  sinks: Any
  first: Any
  soft_cap: float | None
  k: Side
  v: Side

  def codes(self, side: Side, h, g) -> list[jax.Array]:
    """Returns the int8 code bytes [H, Q] of every group of the tile at g."""
    return [self._code(side, h, g + i) for i in range(self.tile.pack)]

  def _code(self, side, h, g):
    plane_words = []
    for ref, width in zip(side.packed.planes, side.codec.planes, strict=False):
      rows = codec_lib.rows_per_group(width, self.tile.head_dim)
      row = g * rows if isinstance(g, int) else pl.multiple_of(g * rows, rows)
      bytes_ = ref[h, pl.ds(row, rows), :]
      plane_words.append(pltpu.bitcast(bytes_, jnp.int32))
    only_first = None if self.full is None else g >= self.full
    code = words.code_bytes(plane_words, side.codec.planes, only_first)
    return pltpu.bitcast(code, jnp.int8)

  def fill(self, side: Side, h) -> tuple[jax.Array, jax.Array]:
    """Fills the tables of one head and returns them."""
    packed, codec = side.packed, side.codec
    size = packed.scale.shape[1:]
    group = lax.broadcasted_iota(jnp.int32, size, 0)
    held = group < self.held
    scale = jnp.where(held, packed.scale[h].astype(jnp.float32), 0.0)
    offset = jnp.where(held, packed.offset[h].astype(jnp.float32), 0.0)
    middle = _middle(codec, len(packed.planes))
    if self.full is not None:
      middle = jnp.where(group < self.full, middle, _middle(codec, 1))
    # The code byte is the code moved to the top of 8 bits.
    tables = [scale * 2.0 ** (codec.bits - 8), offset + scale * middle]
    if spare := self.groups - size[0]:
      rest = jnp.zeros((spare, size[1]), jnp.float32)
      tables = [jnp.concatenate([x, rest], 0) for x in tables]
    if side.of_channels:
      tables = [
        self.tile.channel_rows(
          x, None if side.staging is None else side.staging.at[h, n]
        )
        for n, x in enumerate(tables)
      ]
    side.tables.scale[h], side.tables.bias[h] = tables
    return tables[0], tables[1]

  def mask(self, score, g, *, all_held: bool = False):
    """Masks in the scores of the tile at g what a row does not see.

    Args:
      score: f32[sublanes, 128].
      g: the tile's first group; sinks are looked for where it can be 0.
      all_held: leave out the mask of groups that hold no tokens.
    """
    tile = self.tile
    group = tile.per_group([g + i for i in range(tile.pack)])
    if not all_held:
      score = jnp.where(group < self.held, score, MASKED)
    lane = lax.broadcasted_iota(jnp.int32, (tile.sublanes, GROUP), 1)
    token = group * GROUP + lane
    if self.first is not None:
      score = jnp.where(token < self.first, MASKED, score)
    if self.sinks is not None and not (isinstance(g, int) and g > 0):
      score = jnp.where(token < self.sinks, MASKED, score)
    return score

  def cap(self, score):
    """Bounds scores softly, if they are to be."""
    if self.soft_cap is None:
      return score
    return self.soft_cap * jnp.tanh(score * (1 / np.float32(self.soft_cap)))


def _middle(codec, depth):
  """Returns u where the code byte is 0: the midpoint of what is unread."""
  below = codec.bits - sum(codec.planes[:depth])
  return 2.0 ** (codec.bits - 1) + (2.0**below - 1) / 2
