# SPDX-License-Identifier: Apache-2.0
"""The digest of payloads: what it must see, and where it must be the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lynx_jax.transport import digest

WORDS = 1 << 18


def _sums(*arrays) -> bytes:
  (found,) = digest.texts([[digest.digest(arrays)]])
  return found


def _bfloat16(words: np.ndarray) -> jax.Array:
  return jax.lax.bitcast_convert_type(jnp.asarray(words), jnp.bfloat16)


BASE = np.random.default_rng(0).integers(0, 1 << 16, WORDS).astype(np.uint16)
PLACES = st.integers(0, WORDS - 1)


@given(place=PLACES, bit=st.integers(0, 15))
@settings(max_examples=30, deadline=None)
def test_a_flipped_bit_is_seen(place, bit):
  words = BASE.copy()
  words[place] ^= 1 << bit
  assert _sums(_bfloat16(words)) != _sums(_bfloat16(BASE))


@given(one=PLACES, other=PLACES)
@settings(max_examples=30, deadline=None)
def test_a_swap_of_two_words_is_seen(one, other):
  words = BASE.copy()
  words[[one, other]] = words[[other, one]]
  same = _sums(_bfloat16(words)) == _sums(_bfloat16(BASE))
  assert same == (BASE[one] == BASE[other])


def test_a_swap_that_the_linear_sum_misses_is_seen():
  words = np.zeros(WORDS, np.uint16)
  words[1] = 1 << 15  # the top bit of 4 bytes
  swapped = np.roll(words, 2)
  one, other = (
    np.frombuffer(_sums(_bfloat16(w)), '<u4') for w in (words, swapped)
  )
  assert one[0] == other[0]  # 2 · 1 · 2^31 = 2^32
  assert one[1] != other[1]


def test_arrays_that_change_places_are_seen():
  one, other = jnp.arange(8, dtype=jnp.uint8), jnp.ones(8, jnp.uint8)
  assert _sums(one, None, other) != _sums(other, None, one)


def test_it_is_the_same_on_every_device_and_for_every_shape():
  words = BASE[:4096]
  found = {
    _sums(jax.device_put(_bfloat16(words.reshape(shape)), device))
    for shape in ((4096,), (4, 1024), (16, 16, 16))
    for device in jax.devices()[:2]
  }
  assert len(found) == 1


@pytest.mark.parametrize('size', [1, 2, 3, 5])
def test_a_ragged_end_counts(size):
  whole = np.arange(1, size + 1, dtype=np.uint8)
  changed = whole.copy()
  changed[-1] ^= 1
  assert _sums(jnp.asarray(whole)) != _sums(jnp.asarray(changed))


def test_it_is_what_the_docstring_says():
  words = BASE[:100].view('<u4').astype(np.uint64)
  place = np.arange(50, dtype=np.uint64)
  linear = int(((2 * place + 1) * words).sum()) % 2**32
  assert np.frombuffer(_sums(_bfloat16(BASE[:100])), '<u4')[0] == linear


def test_packed_arrays_come_out_again():
  arrays = (
    jnp.arange(7, dtype=jnp.uint8).reshape(7, 1),
    None,
    jnp.ones((2, digest._LARGE_BYTES // 4), jnp.bfloat16),  # travels alone
    _bfloat16(BASE[:15].reshape(3, 5)),
    jnp.arange(4, dtype=jnp.float32),
  )
  specs = [
    x
    if x is None
    else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    for x in arrays
  ]
  layout = digest.Layout(specs)
  # Two slices of the same bytes, as in a chunk.
  packed, sums = digest.pack(((arrays,), (arrays,)))
  for ((large, small),) in packed:
    assert large is arrays[2]
    for x, looks in zip((large, small), layout.packed, strict=True):
      assert (x.shape, x.dtype) == (looks.shape, looks.dtype)
  ((unpacked,), (same,)), again = digest.unpack(packed, ((layout,),) * 2)
  found, found_again = digest.texts([sums, again])
  assert found == found_again
  words = int(np.frombuffer(found, '<u4')[2])
  assert 4 * words == sum(x.nbytes for (one,) in packed for x in one)
  # In the order in which they travel.
  order = [arrays[2], *arrays[:2], *arrays[3:]]
  assert found[:8] == _sums(*order, *order)
  # Slices that change places are seen.
  other = (jnp.zeros(40, jnp.uint8),)
  swapped = digest.texts(
    [
      digest.pack(((arrays,), (other,)))[1],
      digest.pack(((other,), (arrays,)))[1],
    ]
  )
  assert swapped[0] != swapped[1]
  np.testing.assert_array_equal(unpacked[0], same[0])
  for one, other in zip(arrays, unpacked, strict=True):
    if one is None:
      assert other is None
    else:
      assert one.dtype == other.dtype
      np.testing.assert_array_equal(one, other)
