# SPDX-License-Identifier: Apache-2.0
"""The exact plane: what turns a complete integer code into bit-exact bfloat16.

It knows no cache and no wire. It needs an elementwise codec (no rotation).

The planes place a value in a bin around offset + scale * u. Both sides compute
which bfloat16 numbers lie in the bin, in integer arithmetic on the bits, so
that no rounding of a machine enters; only the index of the true one among them
is sent. A *key* counts bfloat16 numbers in ascending order:

| value | bits | key |
|---|---|---|
| -1.0 | 0xBF80 | -16257 |
| -0.0 | 0x8000 | -1 |
| 0.0 | 0x0000 | 0 |
| 1.0 | 0x3F80 | 16256 |

so a bin is an interval of keys, and an index has as many bits as the interval
needs: none in a bin with one number, about 3 on average, up to 16 in a bin that
holds zero, around which bfloat16 numbers are dense.

A block is the Q tokens of one group in one head: a string of bits, in which the
indices follow one another by token, then by channel, from the low bit of the
first 16-bit unit up. With widths 5, 0, 14 at the first token:

| unit | bits 0-4 | bits 5-15 |
|---|---|---|
| 0 | index of channel 0 | low 11 bits of channel 2 |
| 1 | 3 more bits of channel 2, then token 1 | … |

A block's size is rounded up to a class, 1/16 bit a value apart. A block over
`MOST_BITS` a value, or with a value outside its bin (infinite or NaN, or spread
too little for a scale), is sent as it is: its class is that of 16 bits a value.

What travels together is a *string*: the classes of all its blocks, a unit each,
then the blocks one after the other. It is sent in pages of equal size; how many
there are depends on the data.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from lynx_jax import codec as codec_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.config import Axis, check_exact
from lynx_jax.programs import program
from lynx_jax.shapes import Array, BFloat16, Int32, UInt16

CLASSES_A_BIT = 16
MOST_BITS = 6
_RAW_CLASS = 16 * CLASSES_A_BIT

# Edges of bins are integers in units of 2^-6 of the scale's last bit: with one
# more bit they would not fit into int32 (see `bins`).
_FRACTION = 6
# The code was rounded in float32, from three operations: 255 * 3 * 2^-24 of a
# bin at most. Two units are 2^-13 of a bin or more, and one is lost where the
# offset is finer than a unit.
_MARGIN = 2
_LARGEST = 0x7F7F  # bits of the largest finite bfloat16

_INDEX_BITS, _WIDTH_BITS = 16, 5  # of an index, and of its width
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_WIDTH_MASK = (1 << _WIDTH_BITS) - 1
_OUTSIDE = 1 << (_INDEX_BITS + _WIDTH_BITS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExactPlane:
  """Indices of all blocks; what travels of a block is its first units.

  Attributes:
    units: a block each; zeros from its size on.
    classes: sizes, in 1/16 bit a value; see `units_of`.
  """

  units: UInt16[Array, '... K n U']
  classes: Int32[Array, '... K n']


def units_of(size_class: int, values: int) -> int:
  """Returns the 16-bit units that a block of `values` takes in its class."""
  return -(-size_class * values // (16 * CLASSES_A_BIT))


def encode(
  x: BFloat16[Array, '... S K H'],
  packed: PackedTensor,
  *,
  sinks: int | Int32[Array, ''] = 0,
) -> ExactPlane:
  """Returns the exact plane of `x`.

  Args:
    x: what `packed` was split from; any bits.
    packed: all planes.
    sinks: as in `codec.split`: these tokens are dense elsewhere.

  Raises:
    ConfigError: the codec is not of single values.
  """
  check_exact('k/v', packed.codec)
  found = _find(x, *_bins(packed), sinks)
  bit, total = _running(found)
  return _assemble(x, found, bit, total, _last_in_word(bit), sinks)


def decode(
  packed: PackedTensor,
  plane: ExactPlane,
  *,
  sinks: int | Int32[Array, ''] = 0,
) -> BFloat16[Array, '... S K H']:
  """Returns the values that `encode` was given; zeros for the sinks.

  Args:
    packed: all planes.
    plane: units from a block's size on may hold anything.
    sinks: as for `encode`.
  """
  found = _intervals(*_bins(packed), sinks)
  bit = _positions(found)
  return _resolve(found, plane, _window(plane.units, bit), sinks)


def bins(
  packed: PackedTensor,
) -> tuple[Int32[Array, '... K n H Q'], Int32[Array, '... K n H Q']]:
  """Returns the bin of every value, as an interval of keys.

  With s = m * 2^e and an offset of t * 2^f (m and t are of 8 bits), a bin is
  (t * 2^(f-e) + m * (u ± 1/2)) * 2^e. The two summands have comparable
  exponents: s is at least 2^-9 of the offset's last bit, since a group that is
  not constant spans at least one step of bfloat16 at its minimum.

  Returns:
    The key of the bin's first number, and the count of numbers in it.
  """
  code = codec_lib.centred(packed, packed.depth).astype(jnp.int32)
  u = code + (1 << (packed.codec.bits - 1))
  over = -1 if packed.codec.axis is Axis.CHANNEL else -2
  scale = jnp.expand_dims(_bits(packed.scale), over)
  offset = jnp.expand_dims(_bits(packed.offset), over)

  e, f = _exponent(scale), _exponent(offset)
  m, t = _significand(scale, e), _significand(offset, f)
  shift = f - e + _FRACTION
  t = jnp.where(offset < 0x8000, t, -t)
  t = (t << jnp.clip(shift, 0, 22)) >> jnp.clip(-shift, 0, 31)
  m = m << (_FRACTION - 1)
  below = t + (2 * u - 1) * m - _MARGIN
  above = t + (2 * u + 1) * m + _MARGIN
  low, high = _ceiling(below, e), _floor(above, e)

  # Without a scale all values are the offset's; zero has two forms.
  only = _key(offset)
  zero = (only == 0) | (only == -1)
  constant = (scale == 0) | (scale >= 0x7F80) | (offset & 0x7FFF >= 0x7F80)
  low = jnp.where(constant, jnp.where(zero, -1, only), low)
  high = jnp.where(constant, jnp.where(zero, 0, only), high)

  return low, jnp.maximum(high - low + 1, 1)


def _exponent(bits):
  """Returns the biased exponent; subnormal numbers have that of the least."""
  return jnp.maximum((bits >> 7) & 0xFF, 1)


def _significand(bits, exponent):
  """Returns the 8-bit integer significand."""
  return (bits & 0x7F) | jnp.where(((bits >> 7) & 0xFF) == exponent, 0x80, 0)


def _magnitude(edge, e):
  """Returns bits of |edge| · 2^(e - 134 - 6) cut to bfloat16; is it exact?"""
  m = jnp.abs(edge)
  top = 31 - jax.lax.clz(m)
  exponent = top + e - 7 - _FRACTION
  normal = jnp.where(m > 0, jnp.maximum(exponent, 1), 1)
  down = top - 7 + normal - exponent
  left, right = jnp.clip(-down, 0, 31), jnp.clip(down, 0, 31)
  cut = (m << left) >> right
  bits = ((normal - 1) << 7) + cut
  exact = (cut << right) == (m << left)
  return jnp.minimum(bits, _LARGEST), exact


def _ceiling(edge, e):
  """Returns the key of the least number not below an edge."""
  bits, exact = _magnitude(edge, e)
  up = jnp.minimum(bits + jnp.where(exact, 0, 1), _LARGEST)
  return jnp.where(edge > 0, up, -1 - bits)


def _floor(edge, e):
  """Returns the key of the largest number not above an edge."""
  bits, exact = _magnitude(edge, e)
  up = jnp.minimum(bits + jnp.where(exact, 0, 1), _LARGEST)
  return jnp.where(edge >= 0, bits, -1 - up)


def _bits(x):
  return jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.int32)


def _key(bits):
  return jnp.where(bits < 0x8000, bits, 0x7FFF - bits)


def _unkey(key):
  return jnp.where(key >= 0, key, 0x7FFF - key)


def _kept(shape, sinks):
  """Returns which values of [… K n H Q] are not sinks."""
  groups, _, group = shape[-3:]
  token = jnp.arange(groups * group, dtype=jnp.int32).reshape(groups, 1, group)
  kept = jax.lax.expand_dims(token >= sinks, range(len(shape) - 3))
  return jnp.broadcast_to(kept, shape)


def join(
  k: ExactPlane,
  v: ExactPlane,
  groups: Int32[Array, ''],
  *,
  pages: int,
  page: int,
) -> tuple[UInt16[Array, 'pages page'], Int32[Array, '']]:
  """Returns the string of both planes, K's blocks first, and its length.

  Args:
    k, v: planes of the same shape.
    groups: the first so many groups are sent; the others' blocks take no units.
    pages: static; room for all blocks as they are.
    page: static, units a page.

  Returns:
    The pages, and how many of them are sent.
  """
  count = k.classes.shape[-1]
  sent = jnp.arange(count, dtype=jnp.int32) < groups
  classes = jnp.stack([jnp.where(sent, x.classes, 0) for x in (k, v)])
  units = jnp.stack([jnp.where(sent[:, None], x.units, 0) for x in (k, v)])
  classes, units = classes.reshape(-1), units.reshape(-1, units.shape[-1])
  start = _starts(classes, units.shape[-1])

  # Each block overwrites the zeros behind the one before.
  def put(block, string):
    return jax.lax.dynamic_update_slice(string, units[block], (start[block],))

  string = jnp.zeros((pages * page,), jnp.uint16)
  string = jax.lax.dynamic_update_slice(
    string, classes.astype(jnp.uint16), (0,)
  )
  string = jax.lax.fori_loop(0, len(classes), put, string)
  return string.reshape(pages, page), -(-start[-1] // page)


def part(
  string: UInt16[Array, 'pages page'], shape: tuple[int, ...]
) -> tuple[ExactPlane, ExactPlane]:
  """Returns the planes of K and V that `join` made into a string.

  Args:
    string: what was not sent may hold anything.
    shape: of the units of a plane.
  """
  *blocks, size = shape
  units = string.reshape(-1)
  classes = units[: 2 * math.prod(blocks)].astype(jnp.int32)
  start = _starts(classes, size)[:-1]
  found = jax.lax.map(
    lambda at: jax.lax.dynamic_slice(units, (at,), (size,)), start
  )
  found = found.reshape(2, *shape)
  classes = classes.reshape(2, *blocks)
  return ExactPlane(found[0], classes[0]), ExactPlane(found[1], classes[1])


def _starts(classes: Int32[Array, 'n'], values: int) -> Int32[Array, 'm']:
  """Returns where each block of a string begins, and where it ends."""
  sizes = -(-classes * values // (16 * CLASSES_A_BIT))
  first = jnp.zeros((1,), jnp.int32)
  return len(classes) + jnp.concatenate([first, jnp.cumsum(sizes)])


# Programs of their own: in one, XLA's CPU backend computes the bins again in
# every fusion that reads them, and removes an optimization_barrier too early.
# Fused with what reads them once they still take longer (jax 0.10.2: 17 instead
# of 5 ns a value).
_stage = functools.partial(program, name='exact')


_bins = _stage(bins)


@_stage
def _find(x, low, count, sinks):
  """Returns index | width << 16 | (value is outside its bin) << 21."""
  kept = _kept(low.shape, sinks)
  index = _key(_by_block(_bits(x), low.shape[-1])) - low
  outside = kept & ((index < 0) | (index >= count))
  index = jnp.where(kept & ~outside, index, 0)
  width = jnp.where(kept, 32 - jax.lax.clz(count - 1), 0)
  return index | (width << _INDEX_BITS) | jnp.where(outside, _OUTSIDE, 0)


@_stage
def _intervals(low, count, sinks):
  """Returns the key of the bin's first number << 5 | width."""
  width = jnp.where(_kept(low.shape, sinks), 32 - jax.lax.clz(count - 1), 0)
  return (low << _WIDTH_BITS) | width


@_stage
def _positions(found):
  """Returns the bit at which each index begins, and after all where it ends.

  Widths are the low bits of `found`; the result has H + 1 channels.
  """
  columns = jnp.moveaxis(found & _WIDTH_MASK, -2, 0)

  def step(bit, width):
    return bit + width, bit

  end, bit = jax.lax.scan(step, _first_bits(columns), columns)
  return jnp.moveaxis(jnp.concatenate([bit, end[None]]), 0, -2)


@_stage
def _running(found):
  """Returns `_positions` of what `_find` found, and running sums of indices.

  The sums are of index · 2^(bit mod 32), over a token's channels so far, modulo
  2^32. One pass has both results: a loop keeps what it carries.
  """
  columns = jnp.moveaxis(found, -2, 0)

  def step(state, x):
    bit, total = state
    index = (x & _INDEX_MASK).astype(jnp.uint32)
    total = total + (index << (bit & 31).astype(jnp.uint32))
    return (bit + _width(x), total), (bit, total)

  start = _first_bits(_width(columns))
  nothing = jnp.zeros(start.shape, jnp.uint32)
  (end, _), (bit, total) = jax.lax.scan(step, (start, nothing), columns)
  bit = jnp.concatenate([bit, end[None]])
  return jnp.moveaxis(bit, 0, -2), jnp.moveaxis(total, 0, -2)


def _width(found):
  return (found >> _INDEX_BITS) & _WIDTH_MASK


def _first_bits(widths):
  """Returns where each token begins; channels are the first axis."""
  total = jnp.sum(widths, axis=0)
  return jnp.cumsum(total, axis=-1) - total


@_stage
def _last_in_word(bit):
  """Returns the last index that begins before each word's end.

  By token first (the last that begins before it), then by bisection of its
  channels. The result is channel · Q + token.
  """
  *leading, ends, group = bit.shape
  head_dim = ends - 1
  words = head_dim * group * MOST_BITS // 32
  first = bit[..., 0, :].reshape(-1, group) >> 5
  number = jnp.arange(group, dtype=jnp.int32)[None]
  block = jnp.arange(len(first), dtype=jnp.int32)[:, None]
  token = jnp.zeros((len(first), words), jnp.int32)
  token = token.at[block, first].max(
    jnp.broadcast_to(number, first.shape), mode='drop'
  )
  token = jax.lax.cummax(token, axis=1).reshape(*leading, words)
  end = 32 * jnp.arange(1, words + 1, dtype=jnp.int32)
  end = jnp.broadcast_to(end, token.shape)
  bit = bit.reshape(*leading, ends * group)
  channel = _last_below(lambda c: _take(bit, c * group + token), end, head_dim)
  return channel * group + token


@_stage
def _assemble(x, found, bit, total, last, sinks):
  """Puts every block's string together, in words of 32 bits.

  The indices that begin in a word do not overlap, so what they put into it is
  their sum modulo 2^32, the difference of two running sums, whatever the
  running sums overflow. Only the last of them can reach into the next word.
  """
  *leading, head_dim, group = found.shape
  size = head_dim * group
  of_token = total[..., -1, :]
  before = jnp.cumsum(of_token, axis=-1, dtype=jnp.uint32) - of_token
  running = _take(total.reshape(*leading, size), last)
  running = running + _take(before, last % group)
  own = running - _shifted(running)

  begins = _take(bit[..., :-1, :].reshape(*leading, size), last)
  index = _take(found.reshape(*leading, size), last) & _INDEX_MASK
  shift = (begins & 31).astype(jnp.uint32)
  over = (index.astype(jnp.uint32) >> 1) >> (31 - shift)
  word = jnp.broadcast_to(
    jnp.arange(last.shape[-1], dtype=jnp.int32), last.shape
  )
  over = jnp.where(begins >> 5 == word, over, 0)
  halves = jax.lax.bitcast_convert_type(own + _shifted(over), jnp.uint16)
  strings = halves.reshape(*leading, -1)

  needed = -(-bit[..., -1, -1] * CLASSES_A_BIT // size)
  good = jnp.all(found < _OUTSIDE, axis=(-2, -1))
  good = good & (needed <= MOST_BITS * CLASSES_A_BIT)
  padding = [(0, 0)] * len(leading) + [(0, size - strings.shape[-1])]
  whole = jnp.where(
    _kept(found.shape, sinks), _by_block(_bits(x), group), 0
  ).reshape(*leading, size)
  units = jnp.where(
    good[..., None], jnp.pad(strings, padding), whole.astype(jnp.uint16)
  )
  return ExactPlane(units, jnp.where(good, needed, _RAW_CLASS))


@_stage
def _window(units, bit):
  """Returns the bits from each index's first one on, 17 of them or more."""
  *leading, ends, group = bit.shape
  units = units.astype(jnp.uint32)
  words = units | (_shifted(units[..., ::-1])[..., ::-1] << 16)
  bit = bit[..., :-1, :]
  at = (bit >> 4).reshape(*leading, (ends - 1) * group)
  found = jnp.take_along_axis(words, at, axis=-1, mode='clip')
  return found.reshape(bit.shape) >> (bit & 15).astype(jnp.uint32)


@_stage
def _resolve(found, plane, window, sinks):
  """Returns the values, by block where they were sent as they are."""
  mask = (1 << (found & _WIDTH_MASK)) - 1
  bits = _unkey((found >> _WIDTH_BITS) + (window.astype(jnp.int32) & mask))
  is_raw = (plane.classes == _RAW_CLASS)[..., None, None]
  raw = plane.units.reshape(bits.shape).astype(jnp.int32)
  bits = jnp.where(is_raw, raw, bits)
  return _by_token(jnp.where(_kept(bits.shape, sinks), bits, 0))


def _last_below(values, end, count):
  """Returns the last i of 0..count-1 with values(i) < end; they ascend."""
  found = jnp.zeros_like(end)
  step = 1 << (count - 1).bit_length()
  while step := step // 2:
    probe = jnp.minimum(found + step, count - 1)
    found = jnp.where(values(probe) < end, probe, found)
  return found


def _take(x, at):
  return jnp.take_along_axis(x, at, axis=-1, mode='promise_in_bounds')


def _shifted(x):
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)])[..., :-1]


def _by_block(x, group):
  """Returns [… S K H] as [… K n H Q]."""
  *leading, tokens, heads, head_dim = x.shape
  x = x.reshape(*leading, tokens // group, group, heads, head_dim)
  return jnp.moveaxis(x, (-4, -3, -2, -1), (-3, -1, -4, -2))


def _by_token(bits):
  """Returns integer bits [… K n H Q] as bfloat16 [… S K H]."""
  *leading, heads, groups, head_dim, group = bits.shape
  x = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
  x = jnp.moveaxis(x, (-4, -3, -2, -1), (-2, -4, -1, -3))
  return x.reshape(*leading, groups * group, heads, head_dim)
