# SPDX-License-Identifier: Apache-2.0
"""The meaning of the bits: split a tensor into nested planes, and read it back.

It knows no cache, no kernel and no model; everything here is plain `jnp` and
is the reference that kernels are bit-equal to.

One tensor (K after RoPE, or V) becomes, for every KV head and group of Q
tokens, an n-bit code with a scale and an offset per channel (or per token):

  u = clip(round((x - offset) / scale), 0, 2^n - 1)      x ~ offset + scale * u

`offset` is the minimum of the group and `scale` its range / (2^n - 1), both
bfloat16: the minimum of bfloat16 values is exact in it, and the scale is
rounded *up*, so that the code covers the range. No finite bfloat16 range
overflows (with 1 or 2 bits: none up to 2^127), and one under 2^n · 2^-124
counts as constant. Ties round to even. `scale * u` has at most 17 significant
bits, so it is exact in float32 and `dequantise` gives the same bits with or
without fused multiply-add.

The code is stored *centred*, c = u - 2^(n-1), and cut into planes of w0, w1, …
bits, most significant first. Plane 0 (the Anchor) holds the signed top bits.
A later plane holds the next w bits less 2^(w-1), so that it is signed too.
With the first m bits alone a value is read at its bin's midpoint; with all n
it *is* the n-bit code. For n = 8, planes (4, 4):

| u | c | plane 0 | plane 1 | read with plane 0 | read with both |
|---|---|---|---|---|---|
| 0 | -128 | -8 | -8 | 7.5 | 0 |
| 131 | 3 | 0 | -5 | 135.5 | 131 |
| 255 | 127 | 7 | 7 | 247.5 | 255 |

A packed plane is head-major and channel-major inside a group (lanes are
tokens): `u8[K, S/Q * R, Q]` with R = H * w / 8 byte rows a group. Byte row i
holds channels i, i + R, i + 2R, … from the low bits up, each as a w-bit
two's-complement field. For H = 64, w = 4, Q = 128:

| byte row | lane | token | low nibble | high nibble |
|---|---|---|---|---|
| 0 | 5 | 5 | channel 0 | channel 32 |
| 31 | 5 | 5 | channel 31 | channel 63 |
| 33 | 5 | 133 | channel 1 | channel 33 |
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lynx_jax.config import Axis, Rotation, TensorCodec
from lynx_jax.shapes import Array, BFloat16, Float, Float32, Int8, Int32, UInt8

_BFLOAT16_MAX = float(jnp.finfo(jnp.bfloat16).max)
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedTensor:
  """A quantised K or V: bit planes with their scales and offsets.

  Leading dimensions (layers, slots) are free and the same in every array. A
  plane that is not there, or that a phase never reads, is `None`, and so are
  all planes after it.

  Attributes:
    planes: one per width of `codec.planes`; see the module docstring.
    scale: bfloat16, one a channel (Axis.CHANNEL) or token (Axis.TOKEN).
    offset: like `scale`; the value of u = 0.
    codec: what the planes mean.
  """

  planes: tuple[UInt8[Array, '... K _ Q'] | None, ...]
  scale: BFloat16[Array, '... K n E']
  offset: BFloat16[Array, '... K n E']
  codec: TensorCodec = dataclasses.field(metadata={'static': True})

  @property
  def group(self) -> int:
    """Q, tokens a group."""
    assert self.planes[0] is not None
    return self.planes[0].shape[-1]

  @property
  def groups(self) -> int:
    """Groups held, S / Q."""
    return self.scale.shape[-2]

  @property
  def head_dim(self) -> int:
    """H."""
    assert self.planes[0] is not None
    rows = self.planes[0].shape[-2] // self.groups
    return rows * 8 // self.codec.planes[0]

  @property
  def depth(self) -> int:
    """How many leading planes are there."""
    return sum(plane is not None for plane in self.planes)

  def keep(self, depth: int) -> 'PackedTensor':
    """Returns the tensor with its first `depth` planes only."""
    planes = tuple(p if i < depth else None for i, p in enumerate(self.planes))
    return dataclasses.replace(self, planes=planes)


def rows_per_group(width: int, head_dim: int) -> int:
  """Returns R, the byte rows that a plane of `width` bits takes a group."""
  return head_dim * width // 8


def empty(
  leading: tuple[int, ...],
  *,
  kv_heads: int,
  groups: int,
  group: int,
  head_dim: int,
  codec: TensorCodec,
) -> PackedTensor:
  """Returns a zeroed `PackedTensor` that holds `groups` groups of tokens."""
  stats = head_dim if codec.axis is Axis.CHANNEL else group
  return PackedTensor(
    planes=tuple(
      jnp.zeros(
        (*leading, kv_heads, groups * rows_per_group(w, head_dim), group),
        jnp.uint8,
      )
      for w in codec.planes
    ),
    scale=jnp.zeros((*leading, kv_heads, groups, stats), jnp.bfloat16),
    offset=jnp.zeros((*leading, kv_heads, groups, stats), jnp.bfloat16),
    codec=codec,
  )


def split(
  x: BFloat16[Array, '... S K H'],
  codec: TensorCodec,
  *,
  group: int,
  sinks: int | Int32[Array, ''] = 0,
) -> PackedTensor:
  """Splits `x` into packed planes.

  Args:
    x: finite values; S must be a multiple of `group`.
    codec: planes, axis and rotation.
    group: Q, tokens that share statistics.
    sinks: tokens at the start of `x` that live in a dense segment: they stay
      out of all statistics and hold the centre code.

  Raises:
    ValueError: S is not a multiple of `group`.
  """
  tokens = x.shape[-3]
  if tokens % group:
    raise ValueError(f'{tokens} tokens must be a multiple of group={group}')
  codes, scale, offset = encode(x, codec, group=group, sinks=sinks)
  return PackedTensor(pack(codes, codec), scale, offset, codec)


def encode(
  x: BFloat16[Array, '... S K H'],
  codec: TensorCodec,
  *,
  group: int,
  sinks: int | Int32[Array, ''] = 0,
) -> tuple[
  Int8[Array, '... K n H Q'],
  BFloat16[Array, '... K n E'],
  BFloat16[Array, '... K n E'],
]:
  """Returns centred codes c, scales and offsets; see `split`."""
  *leading, tokens, heads, head_dim = x.shape
  values = x.astype(jnp.float32)
  if codec.rotation is Rotation.HADAMARD:
    values = rotate_values(values)
  values = values.reshape(*leading, tokens // group, group, heads, head_dim)
  values = jnp.moveaxis(values, -2, -4)  # … K n Q H
  values = jnp.swapaxes(values, -1, -2)  # … K n H Q

  token = jnp.arange(tokens, dtype=jnp.int32).reshape(-1, 1, group)
  kept = jnp.broadcast_to(
    jax.lax.expand_dims(token >= sinks, range(values.ndim - 3)), values.shape
  )
  over = -1 if codec.axis is Axis.CHANNEL else -2
  low = jnp.min(jnp.where(kept, values, jnp.inf), axis=over, keepdims=True)
  high = jnp.max(jnp.where(kept, values, -jnp.inf), axis=over, keepdims=True)
  # A token that is all sink has no statistics of its own.
  low = jnp.where(jnp.isinf(low), 0.0, low)
  high = jnp.where(jnp.isinf(high), 0.0, high)
  offset = round_bfloat16(low, up=False)
  scale = scale_of(offset, high, codec.bits)

  # Halves, because the range of two finite bfloat16 can exceed float32.
  inverse = jnp.where(scale > 0, 2.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
  u = jnp.round((0.5 * values - 0.5 * offset) * inverse)
  c = jnp.clip(u, 0.0, 2.0**codec.bits - 1) - 2.0 ** (codec.bits - 1)
  c = jnp.where(kept, c, 0.0)
  return (
    c.astype(jnp.int8),
    jnp.squeeze(scale, over).astype(jnp.bfloat16),
    jnp.squeeze(offset, over).astype(jnp.bfloat16),
  )


def scale_of(
  low: Float32[Array, '*s'], high: Float32[Array, '*s'], bits: int
) -> Float32[Array, '*s']:
  """Returns (high - low) / (2^bits - 1), rounded up to bfloat16, in float32.

  A scale of which a quarter is no normal number, below 2^-124, becomes 0: the
  products in `dequantise` would be flushed to zero, or not, as fused.
  """
  steps = (0.5 * high - 0.5 * low) * (2.0 / (2**bits - 1))
  scale = round_bfloat16(jnp.minimum(steps, _BFLOAT16_MAX), up=True)
  return jnp.where(scale < 4 * _FLOAT32_TINY, 0.0, scale)


def pack(
  codes: Int8[Array, '... K n H Q'], codec: TensorCodec
) -> tuple[UInt8[Array, '... K _ Q'], ...]:
  """Returns the packed planes of centred codes."""
  *leading, groups, head_dim, group = codes.shape
  code = codes.astype(jnp.int32)
  planes = []
  below = codec.bits  # bits not yet cut off
  for i, width in enumerate(codec.planes):
    below -= width
    field = code >> below
    if i > 0:
      field = field ^ (1 << (width - 1))  # subtracts 2^(w-1) modulo 2^w
    field = (field & ((1 << width) - 1)).reshape(
      *leading, groups, 8 // width, rows_per_group(width, head_dim), group
    )
    shift = jnp.arange(0, 8, width, dtype=jnp.int32).reshape(-1, 1, 1)
    shift = jax.lax.expand_dims(shift, range(field.ndim - 3))
    byte = jnp.sum(field << shift, axis=-3)
    planes.append(byte.astype(jnp.uint8).reshape(*leading, -1, group))
  return tuple(planes)


def unpack(
  plane: UInt8[Array, '... K SR Q'], *, width: int, groups: int
) -> Int8[Array, '... K n H Q']:
  """Returns the signed `width`-bit fields of a packed plane."""
  *leading, byte_rows, group = plane.shape
  rows = byte_rows // groups
  byte = jax.lax.bitcast_convert_type(
    plane.reshape(*leading, groups, rows, group), jnp.int8
  )
  # Up and down again: the arithmetic shift brings the field's sign along.
  fields = [
    (byte << np.int8(8 - low - width)) >> np.int8(8 - width)
    for low in range(0, 8, width)
  ]
  return jnp.concatenate(fields, axis=-2)


def centred(packed: PackedTensor, depth: int) -> Float32[Array, '... K n H Q']:
  """Returns u - 2^(n-1) as read with the first `depth` planes, in float32.

  It is an integer when all planes are read, else the midpoint of the bin.
  """
  below = packed.codec.bits
  total = jnp.zeros((), jnp.float32)
  for i, width in enumerate(packed.codec.planes[:depth]):
    below -= width
    plane = packed.planes[i]
    assert plane is not None, f'plane {i} is not there'
    field = unpack(plane, width=width, groups=packed.groups)
    # A later plane is stored less 2^(w-1): the constant below adds it back.
    total = total + field.astype(jnp.float32) * np.float32(1 << below)
  return total + np.float32(_constant(packed.codec, depth))


def _constant(codec: TensorCodec, depth: int) -> float:
  below = codec.bits
  constant = 0.0
  for i, width in enumerate(codec.planes[:depth]):
    below -= width
    if i > 0:
      constant += (1 << (width - 1)) * (1 << below)
  return constant + ((1 << below) - 1) / 2


def dequantise(
  packed: PackedTensor, depth: int | None = None
) -> Float32[Array, '... S K H']:
  """Returns offset + scale * u as read with the first `depth` planes."""
  depth = packed.depth if depth is None else depth
  u = centred(packed, depth) + np.float32(1 << (packed.codec.bits - 1))
  over = -1 if packed.codec.axis is Axis.CHANNEL else -2
  scale = jnp.expand_dims(packed.scale.astype(jnp.float32), over)
  offset = jnp.expand_dims(packed.offset.astype(jnp.float32), over)
  # In two halves, because scale * u can exceed float32 where the sum does not.
  half = scale * (0.5 * u)
  values = (offset + half) + half
  values = jnp.clip(values, -_BFLOAT16_MAX, _BFLOAT16_MAX)
  values = jnp.swapaxes(values, -1, -2)  # … K n Q H
  values = jnp.moveaxis(values, -4, -2)  # … n Q K H
  *leading, _, _, heads, head_dim = values.shape
  values = values.reshape(*leading, -1, heads, head_dim)
  if packed.codec.rotation is Rotation.HADAMARD:
    values = rotate(values)
  return values


def rotate(x: Float[Array, '... H']) -> Float32[Array, '... H']:
  """Applies the orthonormal Hadamard matrix to the head dim.

  It is symmetric and its own inverse (Sylvester's construction), so the same
  call rotates back.
  """
  matrix = jnp.asarray(_hadamard(x.shape[-1]))
  return jnp.matmul(
    x.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST
  )


def rotate_values(x: Float[Array, '... H']) -> Float32[Array, '... H']:
  """Rotates what is to be split, and keeps it within bfloat16's range.

  A rotated value is at most sqrt(H) times the largest one. Half of what
  bfloat16 can hold leaves room for the error when it is rotated back.
  """
  most = np.float32(0.5 * _BFLOAT16_MAX / np.sqrt(x.shape[-1]))
  return rotate(jnp.clip(x.astype(jnp.float32), -most, most))


def rotate_rows(x: Float32[Array, '... H']) -> Float32[Array, '... H']:
  """Does the same for few rows: log2(H) rounds of sums and differences.

  XLA's CPU backend fuses them with their surroundings, where it hands a product
  to its threads: a decode step with rotated K and V took 4 of
  63 ms longer (measured: 2 CPU cores, SmolLM2).
  """
  size, y = x.shape[-1], x
  for half in (1 << i for i in range(size.bit_length() - 1)):
    pairs = y.reshape(*x.shape[:-1], size // (2 * half), 2, half)
    one, other = pairs[..., 0, :], pairs[..., 1, :]
    y = jnp.stack([one + other, one - other], axis=-2)
  return y.reshape(x.shape) * np.float32(size**-0.5)


def _hadamard(size: int) -> np.ndarray:
  matrix = np.ones((1, 1), np.float32)
  while len(matrix) < size:
    matrix = np.block([[matrix, matrix], [matrix, -matrix]])
  return matrix / np.float32(np.sqrt(size))


def round_bfloat16(
  x: Float32[Array, '*s'], *, up: bool
) -> Float32[Array, '*s']:
  """Rounds float32 to a bfloat16 value not below (`up`) or above `x`.

  Cutting the low 16 bits rounds towards zero; adding 0xFFFF first rounds away
  from it. Which of the two is wanted depends on the sign.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  away = (x > 0) == up
  bits = jnp.where(away, bits + 0xFFFF, bits) & ~0xFFFF
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
