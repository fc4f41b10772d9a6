# SPDX-License-Identifier: Apache-2.0
"""The codec against an oracle in NumPy's float64 that shares no code with it.

Values are any finite bfloat16, drawn as bit patterns: subnormals, both zeros
and ranges beyond float32 are among them.
"""

import functools
import itertools

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from lynx_jax import codec as codec_lib
from lynx_jax import config as config_lib
from lynx_jax.config import GROUPS, WIDTHS, Axis, Rotation, TensorCodec

TINY = float(np.finfo(np.float32).tiny)
HEADS, HEAD_DIM = 2, 8
property_test = hypothesis.settings(deadline=None, max_examples=15)

CODECS = [
  TensorCodec(planes=planes, axis=axis, rotation=rotation)
  for planes, axis, rotation in itertools.product(
    [(4, 4), (8,), (4,), (2, 2, 4), (2, 1), (1,)], Axis, Rotation
  )
  # Axis and rotation do not know of planes: three lists meet all of both.
  if planes in [(4, 4), (8,), (2, 1)]
  or (axis, rotation) == (Axis.CHANNEL, Rotation.NONE)
]
ALL_PLANES = [
  planes
  for count in range(1, 9)
  for planes in itertools.product(WIDTHS, repeat=count)
  if sum(planes) <= config_lib.MAX_BITS
]


def _name(codec: TensorCodec) -> str:
  planes = '+'.join(map(str, codec.planes))
  return f'{planes}-{codec.axis.value}-{codec.rotation.value}'


@st.composite
def values(draw, groups: int = 2, group: int = 32, most: float = np.inf):
  """Draws `[S, K, H]` finite bfloat16 of one of several characters."""
  shape = (groups * group, HEADS, HEAD_DIM)
  kind = draw(st.sampled_from(['bits', 'normal', 'constant', 'exponent']))
  if kind == 'bits':
    finite = st.integers(0, 0xFFFF).filter(lambda b: b & 0x7F80 != 0x7F80)
    x = draw(hnp.arrays(np.uint16, shape, elements=finite, fill=finite))
    x = x.view(ml_dtypes.bfloat16)
  else:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([1e-38, 1e-30, 1e-3, 1.0, 100.0, 3.3e38]))
    x = rng.uniform(-1, 1, shape)
    if kind == 'constant':
      x[:] = x[0]
    if kind == 'exponent':
      x *= 2.0 ** rng.integers(-20, 1, shape)
    x = (x * size).astype(ml_dtypes.bfloat16)
  return np.clip(x.astype(np.float32), -most, most).astype(ml_dtypes.bfloat16)


@functools.cache
def _split(codec: TensorCodec, group: int = 32):
  """Returns the jitted split, with traced sinks: one program a codec."""

  def run(x, sinks):
    packed = codec_lib.split(x, codec, group=group, sinks=sinks)
    depths = range(1, packed.depth + 1)
    return packed, [codec_lib.dequantise(packed, d) for d in depths]

  return jax.jit(run)


def _grouped(x, group):
  """Returns float64 `[K, n, H, Q]` of `[S, K, H]`."""
  x = np.asarray(x).astype(np.float64)
  return x.reshape(-1, group, *x.shape[1:]).transpose(2, 0, 3, 1)


def _metadata(packed):
  """Returns float64 scale and offset, broadcastable against `[K, n, H, Q]`."""
  over = -1 if packed.codec.axis is Axis.CHANNEL else -2
  return (
    np.expand_dims(np.asarray(x).astype(np.float64), over)
    for x in (packed.scale, packed.offset)
  )


def _hadamard(x):
  """Rotates the last axis in float64, by the definition over bit counts."""
  index = np.arange(x.shape[-1])
  parity = np.array([[bin(i & j).count('1') for j in index] for i in index])
  return x @ ((-1.0) ** parity / np.sqrt(len(index)))


@pytest.mark.parametrize('codec', CODECS, ids=_name)
@property_test
@hypothesis.given(data=st.data())
def test_every_depth_is_within_half_a_step(codec, data):
  rotated = codec.rotation is Rotation.HADAMARD
  # Beyond these the rotated value, or a step of 2 bits, can be no bfloat16.
  most = 1.6e38 / np.sqrt(HEAD_DIM) if rotated else np.inf
  most = 8e37 if codec.bits < 3 else most
  x = data.draw(values(most=most))
  sinks = data.draw(st.sampled_from([0, 1, 4, 31]))
  packed, read = _split(codec)(x, np.int32(sinks))
  scale, offset = _metadata(packed)
  assert np.isfinite(scale).all()
  assert np.isfinite(offset).all()

  exact = x.astype(np.float64)
  inside = _grouped(_hadamard(exact) if rotated else exact, 32)
  held = np.arange(64).reshape(2, 1, 32) >= sinks
  below = codec.bits
  for width, values_read in zip(codec.planes, read, strict=True):
    below -= width
    got = np.asarray(values_read).astype(np.float64)
    assert np.isfinite(got).all()
    got = _grouped(_hadamard(got) if rotated else got, 32)
    # u is rounded in float32, the sum once more; a scale under the smallest
    # normal number counts as 0. A rotation rounds every sum of H products.
    budget = scale * (2.0**below / 2 + 1e-4) + np.abs(inside) * 2.0**-22
    budget += 2.0**codec.bits * 4 * TINY
    if rotated:
      size = np.abs(inside).max(axis=2, keepdims=True)
      budget += HEAD_DIM * size * 2.0**-22
      # What is rotated back and forth spreads over the channels.
      budget = np.linalg.norm(
        np.broadcast_to(budget, inside.shape), axis=2, keepdims=True
      )
    assert np.all((np.abs(got - inside) <= budget) | ~held)


@pytest.mark.parametrize('axis', Axis)
@pytest.mark.parametrize('planes', [(4, 4), (4,), (1,)])
@property_test
@hypothesis.given(data=st.data())
def test_metadata_is_as_narrow_as_bfloat16_allows(planes, axis, data):
  codec = TensorCodec(planes=planes, axis=axis)
  x = data.draw(values(most=np.inf if codec.bits > 2 else 8e37))
  packed, _ = _split(codec)(x, np.int32(0))
  scale, offset = _metadata(packed)
  inside = _grouped(x, 32)
  over = -1 if axis is Axis.CHANNEL else -2
  low, high = inside.min(over, keepdims=True), inside.max(over, keepdims=True)
  normal = np.abs(low) >= TINY  # the backend may flush the others to zero
  np.testing.assert_array_equal(offset[normal], low[normal])
  step = (high - low) / (2**codec.bits - 1)
  flushed = 4 * TINY  # half of a value below twice the smallest normal number
  assert np.all(scale <= step * (1 + 2.0**-7) + flushed)
  assert np.all((scale >= step * (1 - 2.0**-22) - flushed) | (scale == 0))
  assert np.all((scale > 0) | (step <= 4 * TINY + flushed))


@pytest.mark.parametrize('rotation', Rotation)
@pytest.mark.parametrize('group', GROUPS)
def test_groups_do_not_know_each_other(group, rotation):
  codec = TensorCodec(rotation=rotation)
  rng = np.random.default_rng(0)
  x = rng.normal(size=(3 * group, HEADS, HEAD_DIM)).astype(ml_dtypes.bfloat16)
  whole, _ = _split(codec, group)(x, np.int32(4))
  rows = codec_lib.rows_per_group(4, HEAD_DIM)
  for i in range(3):
    sinks = np.int32(4 if i == 0 else 0)
    part, _ = _split(codec, group)(x[i * group : (i + 1) * group], sinks)
    for a, b in zip(whole.planes, part.planes, strict=True):
      np.testing.assert_array_equal(a[:, i * rows : (i + 1) * rows], b)
    np.testing.assert_array_equal(whole.scale[:, i : i + 1], part.scale)
    np.testing.assert_array_equal(whole.offset[:, i : i + 1], part.offset)


def test_all_plane_lists_are_tested():
  assert len(ALL_PLANES) == 127
  assert (2, 1) in ALL_PLANES


@pytest.mark.parametrize('bits', range(1, 9))
def test_planes_are_cuts_of_one_code(bits):
  """Any plane list of n bits holds the same n-bit code, in its layout."""
  head_dim, group = 8, 32
  rng = np.random.default_rng(bits)
  half = 2 ** (bits - 1)
  codes = rng.integers(-half, half, (HEADS, 2, head_dim, group), np.int8)
  codes[0, 0, :2, :] = [[-half], [half - 1]]
  unsigned = codes.astype(np.int32) + half
  for planes in [p for p in ALL_PLANES if sum(p) == bits]:
    packed = codec_lib.pack(jnp.asarray(codes), TensorCodec(planes=planes))
    below = bits
    for i, (width, plane) in enumerate(zip(planes, packed, strict=True)):
      below -= width
      digit = (unsigned >> below) & (2**width - 1)
      field = digit - 2 ** (width - 1)  # every digit is stored centred
      got = codec_lib.unpack(plane, width=width, groups=2)
      np.testing.assert_array_equal(got, field, err_msg=f'{planes} plane {i}')
      byte = _bytes(field & (2**width - 1), width)
      np.testing.assert_array_equal(plane, byte, err_msg=f'{planes} plane {i}')


def _bytes(fields, width):
  """Packs unsigned fields `[K, n, H, Q]` one by one, as the table says."""
  heads, groups, head_dim, group = fields.shape
  rows = head_dim * width // 8
  out = np.zeros((heads, groups * rows, group), np.uint8)
  for g, channel in np.ndindex(groups, head_dim):
    row, shift = channel % rows, channel // rows * width
    out[:, g * rows + row] |= (fields[:, g, channel] << shift).astype(np.uint8)
  return out


@pytest.mark.parametrize('axis', Axis)
@pytest.mark.parametrize('rotation', Rotation)
@property_test
@hypothesis.given(data=st.data())
def test_both_planes_are_int8(axis, rotation, data):
  x = data.draw(values(most=1e37))
  lynx = TensorCodec(planes=(4, 4), axis=axis, rotation=rotation)
  int8 = TensorCodec(planes=(8,), axis=axis, rotation=rotation)
  nested, (anchor, both) = _split(lynx)(x, np.int32(4))
  whole, (eight,) = _split(int8)(x, np.int32(4))
  np.testing.assert_array_equal(nested.scale, whole.scale)
  np.testing.assert_array_equal(nested.offset, whole.offset)
  np.testing.assert_array_equal(both, eight)
  code = codec_lib.unpack(whole.planes[0], width=8, groups=2)
  top = codec_lib.unpack(nested.planes[0], width=4, groups=2)
  np.testing.assert_array_equal(top, np.asarray(code) >> 4)
  del anchor


def test_the_anchor_is_read_at_its_bins_midpoint():
  x = jnp.arange(256, dtype=jnp.bfloat16).reshape(256, 1, 1)
  x = jnp.broadcast_to(x[:, :, :, None], (256, 1, 1, 2)).reshape(256, 1, 2)
  _, (anchor, both) = _split(TensorCodec(), 256)(x, np.int32(0))
  got = np.asarray(anchor)[[0, 131, 255], 0, 0]
  np.testing.assert_array_equal(got, [7.5, 135.5, 247.5])
  np.testing.assert_array_equal(both, x)


def test_ties_round_to_even():
  # Steps of 1 from 0 to 255 in group 0, of 1/4 in group 1; halves between.
  x = np.zeros((2, 128, 1, 2))
  x[0, :, 0, 0] = np.arange(128) + 0.5
  x[0, -1, 0, 0], x[0, 0, 0, 0] = 255, 0
  x[1] = x[0] / 4
  x = x.reshape(256, 1, 2).astype(ml_dtypes.bfloat16)
  packed, _ = _split(TensorCodec(planes=(8,)), 128)(x, np.int32(0))
  code = codec_lib.unpack(packed.planes[0], width=8, groups=2)
  expected = np.round(np.arange(128) + 0.5) - 128  # NumPy rounds ties to even
  expected[[0, -1]] = -128, 127
  for group in range(2):
    np.testing.assert_array_equal(code[0, group, 0], expected)


@pytest.mark.parametrize('planes', [(4, 4), (4,)])
def test_outlier_channels_leave_the_others_alone(planes):
  rng = np.random.default_rng(1)
  shape = (64, HEADS, HEAD_DIM)
  plain = rng.normal(size=shape).astype(ml_dtypes.bfloat16)
  spoilt = plain.copy()
  spoilt[:, :, 2] += ml_dtypes.bfloat16(60)
  spoilt[:, :, 5] -= ml_dtypes.bfloat16(40)
  others = [0, 1, 3, 4, 6, 7]
  codec = TensorCodec(planes=planes)
  for a, b in zip(
    _split(codec)(plain, np.int32(0))[1],
    _split(codec)(spoilt, np.int32(0))[1],
    strict=True,
  ):
    np.testing.assert_array_equal(a[:, :, others], b[:, :, others])


@pytest.mark.parametrize('axis', Axis)
@pytest.mark.parametrize('value', [0.0, -0.0, 1.0, -3.0, 1e-40, 3.38e38])
def test_constant_groups_are_exact(value, axis):
  x = np.full((64, HEADS, HEAD_DIM), value, ml_dtypes.bfloat16)
  packed, read = _split(TensorCodec(axis=axis))(x, np.int32(0))
  assert not np.asarray(packed.scale).any()
  for got in read:
    np.testing.assert_allclose(got, x.astype(np.float32), rtol=0, atol=TINY)


@pytest.mark.parametrize('codec', CODECS[:4], ids=_name)
def test_sinks_are_not_in_the_statistics(codec):
  rng = np.random.default_rng(2)
  x = rng.normal(size=(64, HEADS, HEAD_DIM)).astype(ml_dtypes.bfloat16)
  loud = x.copy()
  loud[:4] = np.float32(1e4)
  quiet, _ = _split(codec)(x, np.int32(4))
  packed, _ = _split(codec)(loud, np.int32(4))
  jax.tree.map(np.testing.assert_array_equal, packed, quiet)
  codes = codec_lib.unpack(packed.planes[0], width=4, groups=2)
  assert not np.asarray(codes[:, 0, :, :4]).any()  # 0 is the centre code
  counted, _ = _split(codec)(loud, np.int32(0))
  assert (np.asarray(counted.scale) != np.asarray(packed.scale)).any() or (
    np.asarray(counted.offset) != np.asarray(packed.offset)
  ).any()


@pytest.mark.parametrize('axis', Axis)
def test_a_group_of_sinks_alone_has_plain_metadata(axis):
  x = np.full((64, HEADS, HEAD_DIM), 7, ml_dtypes.bfloat16)
  packed, read = _split(TensorCodec(axis=axis))(x, np.int32(40))
  for got in (packed.scale, packed.offset, *read):
    assert np.isfinite(np.asarray(got).astype(np.float32)).all()


@pytest.mark.parametrize('axis', Axis)
@property_test
@hypothesis.given(x=values())
def test_dequantised_bits_do_not_depend_on_the_program(axis, x):
  codec = TensorCodec(axis=axis)
  packed, (anchor, both) = _split(codec)(x, np.int32(0))
  got = [anchor, both]
  for depth, inside_split in enumerate(got, 1):
    eager = codec_lib.dequantise(packed, depth)
    alone = _alone(packed, depth)
    fused, _ = _fused(packed, depth)
    for other in (alone, fused, inside_split):
      np.testing.assert_array_equal(eager, other)
    # NumPy does not flush what is under the smallest normal number.
    np.testing.assert_allclose(
      eager, _in_numpy(packed, depth), rtol=0, atol=4 * TINY
    )


@functools.partial(jax.jit, static_argnums=1)
def _alone(packed, depth):
  return codec_lib.dequantise(packed, depth)


@functools.partial(jax.jit, static_argnums=1)
def _fused(packed, depth):
  """Between other work that XLA may contract with it."""
  read = codec_lib.dequantise(packed, depth)
  return read, jnp.sum(read * 3.0 + 1.0, axis=0) * read[0]


def _in_numpy(packed, depth):
  """Sums in float32, without fused multiply-add."""
  assert packed.codec.planes == (4, 4)
  digits = [
    np.asarray(codec_lib.unpack(plane, width=4, groups=2)).astype(np.int64) + 8
    for plane in packed.planes
  ]
  u = digits[0] * 16 + (digits[1] if depth == 2 else 7.5)
  scale, offset = (x.astype(np.float32) for x in _metadata(packed))
  most = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
  half = scale * (u / 2).astype(np.float32)
  value = np.clip(offset + half + half, -most, most)
  return value.transpose(1, 3, 0, 2).reshape(-1, HEADS, HEAD_DIM)


@pytest.mark.parametrize('rotate', [codec_lib.rotate, codec_lib.rotate_rows])
def test_a_hadamard_rotation_is_its_own_inverse(rotate):
  x = jnp.asarray(np.random.default_rng(3).normal(size=(5, 64)), jnp.float32)
  np.testing.assert_allclose(
    rotate(x), _hadamard(np.asarray(x, np.float64)), atol=1e-5
  )
  np.testing.assert_allclose(rotate(rotate(x)), x, atol=1e-6)


@property_test
@hypothesis.given(x=values())
def test_a_rotation_survives_the_largest_values(x):
  codec = TensorCodec(rotation=Rotation.HADAMARD)
  packed, read = _split(codec)(x, np.int32(0))
  for got in (packed.scale, packed.offset, *read):
    assert np.isfinite(np.asarray(got).astype(np.float32)).all()


def test_a_ragged_group_is_refused():
  x = jnp.zeros((33, 1, 8), jnp.bfloat16)
  with pytest.raises(ValueError, match='33 tokens must be a multiple of'):
    codec_lib.split(x, TensorCodec(), group=32)


@pytest.mark.parametrize('width', WIDTHS)
def test_an_empty_tensor_has_the_shape_of_a_split_one(width):
  codec = TensorCodec(planes=(width,))
  x = jnp.zeros((3, 64, HEADS, HEAD_DIM), jnp.bfloat16)
  full = jax.eval_shape(lambda x: codec_lib.split(x, codec, group=32), x)
  empty = codec_lib.empty(
    (3,), kv_heads=HEADS, groups=2, group=32, head_dim=HEAD_DIM, codec=codec
  )
  assert jax.tree.map(lambda a: (a.shape, a.dtype), empty) == jax.tree.map(
    lambda a: (a.shape, a.dtype), full
  )
  assert full.head_dim == HEAD_DIM
  assert (full.group, full.groups) == (32, 2)
