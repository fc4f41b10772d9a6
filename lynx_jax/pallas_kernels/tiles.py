# SPDX-License-Identifier: Apache-2.0
"""How attention fills vector registers and the MXU, on values alone.

It knows no grid and no copies. A `Tile` puts query rows and groups of tokens
into registers; `digits` and `join` carry 16-bit operands through int8 products.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
GROUP = 128
# Largest magnitude `digits` can hold: the high digit stays within int8.
LIMIT = 32512.0
# Adding 1.5 * 2^23 leaves a float32's integer part in its low bits.
_MAGIC = 1.5 * 2**23 + 128


@dataclasses.dataclass(frozen=True)
class Tile:
  """How query rows and groups of tokens share a vector register.

  `rows` (the query rows of a KV head, padded) times `pack` groups are the
  sublanes of a tile. Groups meet in two ways, here for 4 rows:

  | head dim | row 1 (group g) | row 5 (group g + 1) |
  |---|---|---|
  | 128, 256: side by side | lanes 0..127 of the scores | lanes 128..255 |
  | 64: stacked | q in lanes 0..63, rest 0 | q in lanes 64..127, rest 0 |

  Side by side, a product over two groups is computed for all rows and
  `select` keeps each row's own group. Stacked, the zeros do that.
  """

  head_dim: int
  rows: int
  pack: int

  @classmethod
  def of(cls, query_rows: int, head_dim: int) -> 'Tile':
    pack = 2 if head_dim < LANES or query_rows <= 4 else 1
    # Digits of many rows are made 16 rows to a register.
    unit = (8 if query_rows <= 8 else 16) // pack
    return cls(head_dim, -(-query_rows // unit) * unit, pack)

  @property
  def many(self) -> bool:
    """Whether registers of scores outweigh those of codes."""
    return self.rows > 8

  @property
  def stacked(self) -> bool:
    return self.head_dim < LANES

  @property
  def sublanes(self) -> int:
    return self.rows * self.pack

  @property
  def width(self) -> int:
    """Lanes of the query and of the output."""
    return max(self.head_dim, LANES)

  def arrange(self, q):
    """Lays out [..., rows, H] as [..., sublanes, width]."""
    if not self.stacked:
      return jnp.concatenate([q] * self.pack, -2)
    zero = jnp.zeros_like(q)
    first = jnp.concatenate([q, zero], -1)
    return jnp.concatenate([first, jnp.concatenate([zero, q], -1)], -2)

  def _first(self, width):
    row = lax.broadcasted_iota(jnp.int32, (self.sublanes, width), 0)
    return row < self.rows

  def select(self, x, width):
    """Keeps each row's own group of [sublanes, pack * width]."""
    if self.stacked or self.pack == 1:
      return x
    return jnp.where(self._first(width), x[:, :width], x[:, width:])

  def channel_rows(self, table, staging):
    """Lays out a [groups, H] table so that a row fills `width`."""
    if not self.stacked:
      return table
    staging[...] = table
    half = table.shape[0] // 2
    even, odd = (staging[pl.ds(i, half, stride=2), :] for i in range(2))
    return jnp.concatenate([even, odd], -1)

  def channels(self, ref, head, g):
    """Reads tile g's scales of channels from a table of `channel_rows`."""
    if self.stacked:
      row = ref[head, pl.ds(g >> 1, 1), :]
      return jnp.broadcast_to(row, (self.sublanes, self.width))
    return self._rows(ref, head, g)

  def tokens(self, ref, head, g):
    """Reads tile g's scales of tokens from a [heads, groups, Q] table."""
    return self._rows(ref, head, g)

  def _rows(self, ref, head, g):
    size = (self.sublanes, ref.shape[-1])
    rows = [
      jnp.broadcast_to(ref[head, pl.ds(g + i, 1), :], size)
      for i in range(self.pack)
    ]
    return functools.reduce(
      lambda a, b: jnp.where(self._first(size[1]), a, b), rows
    )

  def per_group(self, values):
    """Returns a column that holds `values[i]` in the rows of group i."""
    return functools.reduce(
      lambda a, b: jnp.where(self._first(1), a, b), values
    )

  def spread(self, x):
    """Widens a lane-replicated [sublanes, 128] to `width`."""
    return jnp.concatenate([x] * (self.width // LANES), 1)

  def merge(self, top, mass, out):
    """Merges the groups' partial softmax: three [rows, ...] arrays."""
    if self.pack == 1:
      return top, mass, out
    n, h = self.rows, self.head_dim
    first, second = out[:n, :h], out[n:, -h:]
    peak = jnp.maximum(top[:n], top[n:])
    a, b = jnp.exp2(top[:n] - peak), jnp.exp2(top[n:] - peak)
    wide = max(h // LANES, 1)
    a_out, b_out = (jnp.concatenate([x] * wide, 1)[:, :h] for x in (a, b))
    out = first * a_out + second * b_out
    return peak, mass[:n] * a + mass[n:] * b, out


def digits(x):
  """Splits round(x) = 256 * high + low into int8 rows [high; low].

  |x| <= 32512. The integer's bits are read off the mantissa, 128 too large, so
  that the low digit is unsigned there and centred by flipping its top bit:

  | x | bits & 0xFFFF | high | low |
  |---|---|---|---|
  | 200.0 | 0x0148 | 1 | -56 |
  | -3.0 | 0x007D | 0 | -3 |
  | -32512.0 | 0x8180 - 0x100 = 0x8080 | -127 | 0 |
  """
  bits = lax.bitcast_convert_type(x + np.float32(_MAGIC), jnp.int32)
  if x.shape[0] % 16 == 0:  # two rows to a word cost half as much
    word = pltpu.bitcast(bits.astype(jnp.int16), jnp.int32)
    parts = lax.shift_right_logical(word, np.int32(8)), word ^ 0x00800080
    return jnp.concatenate(
      [pltpu.bitcast(x, jnp.int16).astype(jnp.int8) for x in parts], 0
    )
  return jnp.concatenate([bits >> 8, bits ^ 128], 0).astype(jnp.int8)


def halves(x):
  """Splits float32 rows into bfloat16 [high | low], 16 bits in all."""
  return jnp.concatenate(_halves(x), 1)


def product(left, right, side):
  """Returns left @ right of float32, less what the low halves give (2^-14).

  Side `side` of right is the output's.
  """
  rows, columns = left.shape[0], right.shape[side]
  dot = lax.dot_general(
    jnp.concatenate(_halves(left), 0),
    jnp.concatenate(_halves(right), side),
    (((1,), (1 - side,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  low = dot[:rows, columns:] + dot[rows:, :columns]
  return dot[:rows, :columns] + low


def _halves(x):
  # A cast there and back might be left out, so bits are cut.
  bits = lax.bitcast_convert_type(x, jnp.int32) & np.int32(-(1 << 16))
  high = lax.bitcast_convert_type(bits, jnp.float32)
  return [part.astype(jnp.bfloat16) for part in (high, x - high)]


def join(dot, tile, width):
  """Returns 256 * high + low of a product with `digits`, as float32."""
  high, low = dot[: tile.sublanes], dot[tile.sublanes :]
  high, low = tile.select(high, width), tile.select(low, width)
  return ((high << 8) + low).astype(jnp.float32)


def products(left, right, side):
  """Returns left[i] @ right[i], where side `side` of right[i] is the output's.

  They go to the MXU as one product, which fills a wide MXU: each result is the
  block on the diagonal.
  """
  rows, columns = left[0].shape[0], right[0].shape[side]
  exact = jnp.int32 if left[0].dtype == jnp.int8 else jnp.float32
  dot = lax.dot_general(
    jnp.concatenate(left, 0),
    jnp.concatenate(right, side),
    (((1,), (1 - side,)), ((), ())),
    preferred_element_type=exact,
  )
  return [
    dot[i * rows : (i + 1) * rows, i * columns : (i + 1) * columns]
    for i in range(len(left))
  ]
