# SPDX-License-Identifier: Apache-2.0
"""TPU kernel of `merge`: planes to dense values in one pass.

It knows no cache; `codec.dequantise` is its meaning, bit for bit. As in
`split_kv_tpu` the MXU transposes: the int8 codes of Axis.CHANNEL, the values of
Axis.TOKEN, so that a scale always belongs to a lane.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lynx_jax import codec as codec_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.config import Axis, Rotation
from lynx_jax.pallas_kernels import words
from lynx_jax.pallas_kernels.split_kv_tpu import BlockSizes

_BFLOAT16_MAX = float(jnp.finfo(jnp.bfloat16).max)


def merge_tpu(
  packed: PackedTensor,
  *,
  block_sizes: BlockSizes | None = None,
  interpret: bool = False,
):
  """Returns bfloat16 [B, S, K, H]; see `merge`.

  Raises:
    Unsupported: the nearest shape that works is in the message.
  """
  codec, head_dim, group = packed.codec, packed.head_dim, packed.group
  planes = packed.planes[: packed.depth]
  batch, kv_heads = packed.scale.shape[:2]
  words.check_planes(
    'the tensor', codec.planes[: packed.depth], head_dim, group
  )
  if not interpret:
    words.check_device()
  blocks = block_sizes or BlockSizes()
  groups = words.groups_per_step(packed.groups, blocks.tokens // group)
  heads = words.heads_per_step(kv_heads, head_dim, blocks.heads)
  rotated = codec.rotation is Rotation.HADAMARD

  def per_head(x):
    rows = groups * x.shape[2] // packed.groups
    return pl.BlockSpec(
      (None, heads, rows, x.shape[3]), lambda b, h, s: (b, h, s, 0)
    )

  operands = (*planes, packed.scale, packed.offset)
  dense = pl.pallas_call(
    functools.partial(
      _kernel, codec=codec, head_dim=head_dim, heads=heads, groups=groups
    ),
    grid=(batch, kv_heads // heads, packed.groups // groups),
    in_specs=[per_head(x) for x in operands],
    out_specs=pl.BlockSpec(
      (None, groups * group, heads * head_dim), lambda b, h, s: (b, s, h)
    ),
    out_shape=jax.ShapeDtypeStruct(
      (batch, packed.groups * group, kv_heads * head_dim),
      jnp.float32 if rotated else jnp.bfloat16,
    ),
    scratch_shapes=[
      pltpu.VMEM((heads, groups, packed.scale.shape[3]), jnp.float32)
    ]
    * 2,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'parallel'),
      vmem_limit_bytes=64 << 20,
    ),
    interpret=interpret,
    name='merge',
  )(*operands)
  dense = dense.reshape(batch, packed.groups * group, kv_heads, head_dim)
  if rotated:
    dense = codec_lib.rotate(dense).astype(jnp.bfloat16)
  return dense


def _kernel(*refs, codec, head_dim, heads, groups):
  *planes, scale_ref, offset_ref, out_ref, scale, offset = refs
  widths = codec.planes[: len(planes)]
  unread = codec.bits - sum(widths)
  unit = 2.0 ** (codec.bits - 8)
  middle = 2.0 ** (codec.bits - 1) + (2.0**unread - 1) / 2
  scale[...] = scale_ref[...].astype(jnp.float32)
  offset[...] = offset_ref[...].astype(jnp.float32)

  def head(g, h):
    plane_words = []
    for ref, width in zip(planes, widths, strict=True):
      rows = codec_lib.rows_per_group(width, head_dim)
      bytes_ = ref[h, pl.ds(g * rows, rows), :]
      plane_words.append(pltpu.bitcast(bytes_, jnp.int32))
    code = pltpu.bitcast(words.code_bytes(plane_words, widths), jnp.int8)
    if codec.axis is Axis.CHANNEL:
      code = words.transpose(code)
    u = code.astype(jnp.float32) * np.float32(unit) + np.float32(middle)
    row = h, pl.ds(g, 1), slice(None)
    value = offset[row] + scale[row] * u
    value = jnp.clip(value, -_BFLOAT16_MAX, _BFLOAT16_MAX)
    value = value.astype(out_ref.dtype)
    if codec.axis is Axis.TOKEN:
      value = words.transpose(value).astype(out_ref.dtype)
    return value

  for g in range(groups):
    value = jnp.concatenate([head(g, h) for h in range(heads)], 1)
    out_ref[pl.ds(g * words.GROUP, words.GROUP), :] = value
