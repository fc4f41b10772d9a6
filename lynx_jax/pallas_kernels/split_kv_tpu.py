# SPDX-License-Identifier: Apache-2.0
"""TPU kernel of `split_kv`: statistics, codes and planes in one pass.

It knows no cache; `codec.split` is its meaning, bit for bit.

Statistics go over the rows of a matrix whose lanes share them: [token, channel]
for Axis.CHANNEL, [channel, token] for Axis.TOKEN. Planes are [channel, token].
The MXU, idle otherwise, transposes by a product with the identity, which is
exact: the int8 codes of Axis.CHANNEL, the values of Axis.TOKEN.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lynx_jax import codec as codec_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.config import Axis, Rotation, TensorCodec
from lynx_jax.pallas_kernels import words

_LANES = 128
_GROUP = 128
# Adding it to 0 <= x < 2^22 rounds x to even and leaves the integer in the low
# bits of the sum.
_MAGIC = 1.5 * 2**23


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
  """What one grid step takes.

  Attributes:
    tokens: of a slot; a multiple of 1024.
    heads: KV heads; fewer where K is smaller.
  """

  tokens: int = 2048
  heads: int = 4

  def __post_init__(self):
    if self.tokens <= 0 or self.tokens % 1024:
      raise ValueError(f'tokens={self.tokens} must be a multiple of 1024')
    if self.heads <= 0:
      raise ValueError(f'heads={self.heads} must be positive')


def split_tpu(
  x,
  codec: TensorCodec,
  *,
  group: int,
  sinks=0,
  block_sizes: BlockSizes | None = None,
  interpret: bool = False,
) -> PackedTensor:
  """Splits one tensor [B, S, K, H]; see `codec.split`.

  Raises:
    Unsupported: the nearest shape that works is in the message.
  """
  batch, tokens, kv_heads, head_dim = x.shape
  words.check_planes('the tensor', codec.planes, head_dim, group)
  if tokens % group:
    raise ValueError(f'{tokens} tokens must be a multiple of group={group}')
  if not interpret:
    words.check_device()
  blocks = block_sizes or BlockSizes()
  groups = words.groups_per_step(tokens // group, blocks.tokens // group)
  heads = words.heads_per_step(kv_heads, head_dim, blocks.heads)
  if codec.rotation is Rotation.HADAMARD:
    x = codec_lib.rotate_values(x)
  columns = _columns(codec, head_dim, heads)
  stats = head_dim if codec.axis is Axis.CHANNEL else group
  n_groups = tokens // group
  plane_rows = [codec_lib.rows_per_group(w, head_dim) for w in codec.planes]

  def per_head(rows, width):
    return pl.BlockSpec(
      (None, heads, groups * rows, width), lambda b, h, s, _: (b, h, s, 0)
    )

  *planes, scale, offset = pl.pallas_call(
    functools.partial(
      _kernel, codec=codec, head_dim=head_dim, heads=heads, groups=groups
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(batch, kv_heads // heads, n_groups // groups),
      in_specs=[
        pl.BlockSpec(
          (None, groups * group, heads * head_dim),
          lambda b, h, s, _: (b, s, h),
        )
      ],
      out_specs=[per_head(r, group) for r in plane_rows]
      + [per_head(1, stats)] * 2,
      scratch_shapes=[
        pltpu.VMEM((len(columns), groups, columns[0].stats), jnp.float32)
      ]
      * 4,
    ),
    out_shape=[
      jax.ShapeDtypeStruct((batch, kv_heads, n_groups * r, group), jnp.uint8)
      for r in plane_rows
    ]
    + [jax.ShapeDtypeStruct((batch, kv_heads, n_groups, stats), jnp.bfloat16)]
    * 2,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'parallel'),
      vmem_limit_bytes=64 << 20,
    ),
    interpret=interpret,
    name='split_kv',
  )(
    jnp.asarray(sinks, jnp.int32).reshape(1),
    x.reshape(batch, tokens, kv_heads * head_dim),
  )
  return PackedTensor(tuple(planes), scale, offset, codec)


@dataclasses.dataclass(frozen=True)
class _Column:
  """Lanes of the input that are worked on together: some heads, or part of one.

  `stats` statistics come of it: one a lane, or one a token.
  """

  start: int
  width: int
  stats: int


def _columns(codec, head_dim, heads):
  by_channel = codec.axis is Axis.CHANNEL
  lanes = head_dim * heads
  width = min(_LANES, lanes) if by_channel else head_dim
  return [
    _Column(n, min(width, lanes - n), width if by_channel else _GROUP)
    for n in range(0, lanes, width)
  ]


def _kernel(sinks_ref, x_ref, *refs, codec, head_dim, heads, groups):
  *planes, scale_ref, offset_ref, low, high, half, inverse = refs
  sinks = jnp.where(pl.program_id(2) == 0, sinks_ref[0], 0)
  columns = _columns(codec, head_dim, heads)
  by_channel = codec.axis is Axis.CHANNEL

  def values(g, column):
    rows = pl.ds(g * _GROUP, _GROUP)
    x = x_ref[rows, pl.ds(column.start, column.width)]
    return x.astype(jnp.float32) if by_channel else words.transpose(x)

  def is_sink(shape):
    return (
      lax.broadcasted_iota(jnp.int32, shape, 0 if by_channel else 1) < sinks
    )

  for c, column in enumerate(columns):
    for g in range(groups):
      x = values(g, column)
      least = most = x
      if g == 0:
        out = is_sink(x.shape)
        least, most = jnp.where(out, jnp.inf, x), jnp.where(out, -jnp.inf, x)
      at = c, pl.ds(g, 1), pl.ds(0, x.shape[1])
      low[at] = jnp.min(least, 0, keepdims=True)
      high[at] = jnp.max(most, 0, keepdims=True)

  for c, _ in enumerate(columns):
    least, most = low[c], high[c]
    least = jnp.where(jnp.isinf(least), 0.0, least)
    most = jnp.where(jnp.isinf(most), 0.0, most)
    offset = codec_lib.round_bfloat16(least, up=False)
    scale = codec_lib.scale_of(offset, most, codec.bits)
    some = scale > 0
    inverse[c] = jnp.where(some, 2.0 / jnp.where(some, scale, 1.0), 0.0)
    half[c] = 0.5 * offset
    low[c], high[c] = scale, offset
  for source, target in ((low, scale_ref), (high, offset_ref)):
    for h in range(heads):
      target[h] = _of_head(source, h, head_dim, columns).astype(jnp.bfloat16)

  for g in range(groups):
    codes = []
    for c, column in enumerate(columns):
      x = values(g, column)
      at = c, pl.ds(g, 1), pl.ds(0, x.shape[1])
      # The clip also keeps compilers from fusing product and sum, which would
      # round once instead of twice.
      u = (0.5 * x - half[at]) * inverse[at]
      u = jnp.minimum(u, np.float32(2**codec.bits - 1)) + np.float32(_MAGIC)
      u = lax.bitcast_convert_type(u, jnp.int32)
      if g == 0:
        u = jnp.where(is_sink(u.shape), 1 << (codec.bits - 1), u)
      code = u.astype(jnp.int8)  # the low byte
      if by_channel:
        code = words.transpose(code).astype(jnp.int8)
      codes.append(pltpu.bitcast(code, jnp.int32))
    code = jnp.concatenate(codes, 0)
    for h in range(heads):
      rows = head_dim // 4
      of_head = code[h * rows : (h + 1) * rows]
      cut = words.planes_of(of_head, codec.planes)
      for ref, plane in zip(planes, cut, strict=True):
        size = plane.shape[0] * 4
        ref[h, pl.ds(g * size, size), :] = pltpu.bitcast(plane, jnp.uint8)


def _of_head(table, head, head_dim, columns):
  """Returns the statistics [groups, E] of one head from those of columns."""
  if columns[0].stats != columns[0].width or head_dim == columns[0].width:
    return table[head]
  if head_dim < columns[0].width:
    first = head * head_dim
    c, start = divmod(first, columns[0].width)
    return table[c][:, start : start + head_dim]
  parts = head_dim // columns[0].width
  return jnp.concatenate([table[head * parts + i] for i in range(parts)], -1)
