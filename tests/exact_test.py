# SPDX-License-Identifier: Apache-2.0
"""The exact plane gives every bfloat16 value back, bit by bit."""

import re
from fractions import Fraction

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from lynx_jax import codec as codec_lib
from lynx_jax import exact
from lynx_jax.config import (
  Axis,
  ConfigError,
  Rotation,
  TensorCodec,
  check_exact,
)

GROUP, HEADS, DIM = 32, 2, 16
SHAPE = (3 * GROUP, HEADS, DIM)
AXES = {axis.value: axis for axis in Axis}


_split = jax.jit(codec_lib.split, static_argnames=('codec', 'group'))


def _check_round_trip(bits, codec, sinks=0, group=GROUP):
  """Sends only what a block's class says; the rest arrives as garbage."""
  x = jnp.asarray(np.asarray(bits, np.uint16).view(jnp.bfloat16))
  packed = _split(x, codec=codec, group=group, sinks=sinks)
  plane = exact.encode(x, packed, sinks=sinks)
  units, classes = np.asarray(plane.units), np.asarray(plane.classes)
  sizes = {
    c: exact.units_of(c, units.shape[-1]) for c in classes.ravel().tolist()
  }
  size = np.vectorize(sizes.get)(classes)
  sent = np.arange(units.shape[-1]) < size[..., None]
  assert (units[~sent] == 0).all()
  poisoned = exact.ExactPlane(
    jnp.asarray(np.where(sent, units, np.uint16(0xFFFF))), plane.classes
  )
  back = np.asarray(exact.decode(packed, poisoned, sinks=sinks))
  back = back.view(np.uint16)
  np.testing.assert_array_equal(back[sinks:], np.asarray(bits)[sinks:])
  assert (back[:sinks] == 0).all()
  return classes


def _values(seed: int, spread: int, centre: float) -> np.ndarray:
  """Draws channels whose scales differ by up to 2^`spread`."""
  draws = np.random.default_rng(seed)
  scale = np.exp2(draws.uniform(-spread, spread, SHAPE[1:]))
  values = (draws.normal(size=SHAPE) + centre) * scale
  return np.asarray(values, jnp.bfloat16).view(np.uint16)


@pytest.mark.parametrize('axis', AXES)
@hypothesis.given(
  seed=st.integers(0, 2**32 - 1),
  spread=st.sampled_from([0, 4, 30, 100]),
  centre=st.sampled_from([0.0, 1.0, -40.0, 3e4]),
  patches=st.lists(
    st.tuples(st.integers(0, int(np.prod(SHAPE)) - 1), st.integers(0, 0xFFFF)),
    max_size=6,
  ),
  sinks=st.sampled_from([0, 1, 4]),
)
@hypothesis.settings(max_examples=30, deadline=None)
def test_any_values_come_back(axis, seed, spread, centre, patches, sinks):
  bits = _values(seed, spread, centre)
  for place, pattern in patches:
    bits.reshape(-1)[place] = pattern
  _check_round_trip(bits, TensorCodec(axis=AXES[axis]), sinks)


@hypothesis.given(
  patterns=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=8),
  seed=st.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=30, deadline=None)
def test_groups_of_a_few_patterns_come_back(patterns, seed):
  """Constant groups, groups of two values, of both zeros, of NaN alone, …."""
  draws = np.random.default_rng(seed)
  bits = draws.choice(np.array(patterns, np.uint16), SHAPE)
  _check_round_trip(bits, TensorCodec())


def test_every_pattern_comes_back_from_among_its_neighbours():
  """In ascending order, so that most groups are finite and use their bins."""
  key = np.arange(-(2**15), 2**15)
  bits = np.where(key >= 0, key, 0x7FFF - key).astype(np.uint16)
  bits = bits.reshape(-1, 2 * 128).T.reshape(2 * 128, 16, 16)
  classes = _check_round_trip(bits, TensorCodec(), group=128)
  assert (classes < 16 * exact.CLASSES_A_BIT).any()


@pytest.mark.parametrize('planes', [(2, 2, 4), (1,)])
def test_other_planes_come_back(planes):
  _check_round_trip(_values(3, 2, 0.5), TensorCodec(planes=planes))


def test_what_is_in_no_bin_is_sent_as_it_is():
  bits = _values(0, 2, 0.0)
  bits[GROUP + 1, 1, 3] = 0x7F80  # infinity, in group 1 of head 1
  classes = _check_round_trip(bits, TensorCodec())
  raw = 16 * exact.CLASSES_A_BIT
  assert classes[1, 1] == raw
  assert (np.delete(classes.reshape(-1), 4) < raw).all()


def test_both_zeros_of_a_constant_group_need_one_bit():
  bits = np.zeros(SHAPE, np.uint16)
  bits[::3] = 0x8000
  assert (_check_round_trip(bits, TensorCodec()) == exact.CLASSES_A_BIT).all()


def test_ordinary_values_need_about_three_bits():
  classes = _check_round_trip(_values(1, 3, 0.0), TensorCodec())
  assert 2.5 < classes.mean() / exact.CLASSES_A_BIT < 4.5


def test_an_outlier_costs_its_own_channel_only():
  bits = _values(2, 0, 0.0)
  before = _check_round_trip(bits, TensorCodec())
  bits[5, 0, 7] = np.asarray(1e30, jnp.bfloat16).view(np.uint16)
  after = _check_round_trip(bits, TensorCodec())
  assert (after[1] == before[1]).all()
  # The others of its channel share a bin with zero: up to 16 bits each.
  most = (GROUP * 16 / (GROUP * DIM)) * exact.CLASSES_A_BIT
  assert before[0, 0] < after[0, 0] <= before[0, 0] + most


@pytest.mark.parametrize('sent', range(4))
def test_strings_hold_the_blocks_of_the_groups_that_are_sent(sent):
  """Some blocks are sent as they are; what is not sent arrives as garbage."""
  dense, planes, packed = [], [], []
  for seed in range(2):
    bits = _values(seed, 2, 0.0)
    bits[GROUP * seed + 3, seed, 5] = 0x7F80
    x = jnp.asarray(bits.view(jnp.bfloat16))
    dense.append(bits)
    packed.append(_split(x, codec=TensorCodec(), group=GROUP, sinks=0))
    planes.append(exact.encode(x, packed[-1]))
  values = GROUP * DIM
  page, room = 256, -(-(4 * 3 * (1 + values)) // 256)
  string, pages = jax.jit(exact.join, static_argnames=('pages', 'page'))(
    *planes, np.int32(sent), pages=room, page=page
  )
  sizes = [
    exact.units_of(c, values)
    for plane in planes
    for c in np.asarray(plane.classes)[:, :sent].ravel().tolist()
  ]
  assert int(pages) == -(-(4 * 3 + sum(sizes)) // page)
  string = string.at[int(pages) :].set(0xFFFF)
  found = jax.jit(exact.part, static_argnums=1)(string, (HEADS, 3, values))
  for bits, plane, values in zip(dense, found, packed, strict=True):
    back = np.asarray(exact.decode(values, plane)).view(np.uint16)
    tokens = sent * GROUP
    np.testing.assert_array_equal(back[:tokens], bits[:tokens])


def _number(key: int) -> Fraction:
  bits = np.uint16(key if key >= 0 else 0x7FFF - key)
  return Fraction(float(bits.view(jnp.bfloat16)))


@hypothesis.given(
  scale=st.integers(3 << 7, 254 << 7),
  offset=st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7FFF < 0x7F80),
  code=st.integers(0, 255),
)
@hypothesis.settings(max_examples=300, deadline=None)
def test_a_bin_holds_just_the_numbers_near_its_centre(scale, offset, code):
  """Against rational numbers."""
  f, e = max(offset >> 7 & 0xFF, 1), scale >> 7
  hypothesis.assume(f - e <= 16)  # what `split` can make
  low, count = _bin(np.uint16(scale), np.uint16(offset), np.int32(code))
  half = Fraction(float(np.uint16(scale).view(jnp.bfloat16))) / 2
  centre = _number(offset if offset < 0x8000 else 0x7FFF - offset)
  centre += 2 * half * code
  inside = half * (1 + Fraction(1, 2**13)), half * (1 + Fraction(1, 2**10))
  largest = 0x7F7F
  high = low + count - 1
  for key in (low, high):
    if count > 1 and -1 - largest < key < largest:
      assert abs(_number(key) - centre) <= inside[1]
  for key in (low - 1, high + 1):
    if -1 - largest <= key <= largest:
      assert abs(_number(key) - centre) > inside[0] or count == 1


@jax.jit
def _bin(scale, offset, code):
  codec = TensorCodec(planes=(8,))
  codes = jnp.full((1, 1, 8, 32), code - 128, jnp.int8)
  stats = [
    jnp.full((1, 1, 8), jax.lax.bitcast_convert_type(x, jnp.bfloat16))
    for x in (scale, offset)
  ]
  packed = codec_lib.PackedTensor(codec_lib.pack(codes, codec), *stats, codec)
  low, count = exact.bins(packed)
  return low[0, 0, 0, 0], count[0, 0, 0, 0]


@pytest.mark.parametrize(
  'codec, message',
  [
    (TensorCodec(rotation=Rotation.HADAMARD), 'codec.v_rotation=hadamard'),
    (TensorCodec(planes=()), 'codec.v=()'),
  ],
)
def test_a_codec_without_bins_is_refused(codec, message):
  with pytest.raises(ConfigError, match=re.escape(message)):
    check_exact('v', codec)
