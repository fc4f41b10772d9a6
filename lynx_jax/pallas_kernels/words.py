# SPDX-License-Identifier: Apache-2.0
"""What the TPU kernels share: bit planes as 32-bit words, and step sizes.

Vector registers have no shifts of bytes, so fields move inside the words of
four byte rows; masks keep them inside their byte. It knows no refs and no grid.

A *code byte* is a centred code moved to the top of 8 bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lynx_jax import codec as codec_lib
from lynx_jax.pallas_kernels.dispatch import Unsupported

GROUP = 128
LANES = 128


def check_device() -> None:
  """Raises `Unsupported` on a TPU whose MXU has no int8 products."""
  device = jax.devices()[0]
  if device.platform == 'tpu' and any(
    name in device.device_kind for name in ('v2', 'v3', 'v4')
  ):
    raise Unsupported(f'{device.device_kind} multiplies no int8; v5e and later')


def check_planes(
  name: str, planes: tuple[int, ...], head_dim: int, group: int
) -> None:
  """Raises `Unsupported` unless kernels can hold these planes."""
  if head_dim not in (64, 128, 256):
    raise Unsupported(f'head_dim={head_dim}: must be 64, 128 or 256')
  if group != GROUP:
    raise Unsupported(f'group={group}: must be {GROUP}')
  for width in planes:
    rows = codec_lib.rows_per_group(width, head_dim)
    if rows % 32:
      raise Unsupported(
        f'{name} has a plane of {width} bits at head_dim={head_dim}: its '
        f'{rows} byte rows a group must be a multiple of 32; use planes of '
        f'{32 * 8 // head_dim} bits or more'
      )


def groups_per_step(groups: int, limit: int) -> int:
  """Returns how many groups a grid step takes: as many as divide them all.

  Scales of several groups share a register, so a step takes 8 n groups, or all.
  """
  fits = [
    n
    for n in range(1, min(limit, groups) + 1)
    if groups % n == 0 and (n % 8 == 0 or n == groups)
  ]
  if not fits:
    raise Unsupported(
      f'a capacity of {groups * GROUP} tokens: must be a multiple of '
      f'{8 * GROUP}, or at most {limit * GROUP}; the next is '
      f'{-(-groups // 8) * 8 * GROUP}'
    )
  return fits[-1]


def heads_per_step(kv_heads: int, head_dim: int, limit: int) -> int:
  """Returns how many KV heads a step takes where heads share the lanes.

  Their channels fill whole registers, or are all there are.
  """
  fits = [
    n
    for n in range(1, kv_heads + 1)
    if kv_heads % n == 0
    and (head_dim * n % LANES == 0 or n == kv_heads)
    and n <= max(limit, LANES // head_dim)
  ]
  return fits[-1] if fits else kv_heads


def transpose(x):
  """Returns x^T, exact and by way of the MXU, as int32 or float32."""
  size = (x.shape[1], x.shape[1])
  diagonal = lax.broadcasted_iota(jnp.int32, size, 0) == (
    lax.broadcasted_iota(jnp.int32, size, 1)
  )
  exact = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
  return lax.dot_general(
    diagonal.astype(exact).astype(x.dtype),
    x,
    (((1,), (1,)), ((), ())),
    precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    preferred_element_type=exact,
  )


def code_bytes(planes, widths, only_first=None):
  """Assembles code bytes from words of packed planes.

  For planes (4, 4), A and R being words of the two planes (R's top bits flipped
  back), the words of channels 0..H/2-1 and H/2..H-1 are

  | channels | from plane 0 | from plane 1 |
  |---|---|---|
  | low nibbles | (A << 4) & 0xF0F0F0F0 | R & 0x0F0F0F0F |
  | high nibbles | A & 0xF0F0F0F0 | (R >> 4) & 0x0F0F0F0F |

  Args:
    planes: int32 [R / 4, Q] of each plane there is.
    widths: of the planes.
    only_first: scalar; if true, planes after the first count as 0.
  """
  code, below = None, 8
  for n, (word, width) in enumerate(zip(planes, widths, strict=False)):
    below -= width
    if n > 0:
      word = word ^ _in_all_bytes(_top_bits(width))
      if only_first is not None:
        word = word & jnp.where(only_first, np.int32(0), np.int32(-1))
    fields = [
      _moved(word, below - low, _field(below, width))
      for low in range(0, 8, width)
    ]
    field = jnp.concatenate(fields, 0)
    code = field if code is None else code | field
  return code


def planes_of(word, widths):
  """Cuts unsigned codes into packed planes; the inverse of `code_bytes`.

  Args:
    word: int32 [H / 4, Q], an n-bit code u in every byte.
    widths: of the planes; n is their sum.
  """
  bits = sum(widths)
  below, flips = 8, 0
  for width in widths:
    below -= width
    flips |= 1 << (below + width - 1)
  word = (word << (8 - bits)) ^ _in_all_bytes(flips)
  below, planes = 8, []
  for width in widths:
    below -= width
    rows = word.shape[0] * width // 8
    fields = [
      _moved(word[i * rows : (i + 1) * rows], low - below, _field(low, width))
      for i, low in enumerate(range(0, 8, width))
    ]
    planes.append(functools.reduce(lambda a, b: a | b, fields))
  return planes


def _moved(word, up, mask):
  """Shifts `word` up (or down) and keeps the bits of `mask` in every byte."""
  if up > 0:
    word = word << up
  elif up < 0:
    word = lax.shift_right_logical(word, np.int32(-up))
  return word if mask == 0xFF else word & _in_all_bytes(mask)


def _field(low, width):
  return ((1 << width) - 1) << low


def _top_bits(width):
  return sum(1 << i for i in range(width - 1, 8, width))


def _in_all_bytes(byte):
  return np.uint32(byte * 0x01010101).astype(np.int32)
