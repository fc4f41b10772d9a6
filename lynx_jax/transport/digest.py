# SPDX-License-Identifier: Apache-2.0
"""A digest of payloads, computed where the bytes lie.

It knows no chunk and no link. It guards against corruption and against bytes
in the wrong place, not against an adversary.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lynx_jax.programs import fetch, program
from lynx_jax.shapes import Array

_GOLDEN = 0x9E3779B1  # 2^32 / golden ratio: spreads consecutive positions


def digest(arrays: tuple[Array | None, ...]) -> Array:
  """Returns u32[2] over the bytes of all arrays, in their order.

  A word w_i is 4 bytes of an array, the last one filled up with zeros, and i
  counts over all arrays. With all arithmetic modulo 2^32, and f a bijective
  mix of bits (the finaliser of MurmurHash3):

      d_0 = Σ (2 i + 1) · w_i
      d_1 = Σ f(w_i + _GOLDEN · i)

  Addition commutes exactly, so every device and tiling gives the same bits.
  Any change of one word changes d_0, since 2 i + 1 is odd; what leaves d_0 as
  it was, like a top bit that moves to another word, meets d_1.
  """
  return _DIGEST(arrays)


def texts(payloads: Sequence[Sequence[Array]]) -> list[bytes]:
  """Returns the digests of every payload as bytes for the wire; one fetch."""
  if not payloads:
    return []
  return [
    b''.join(one.astype('<u4').tobytes() for one in digests)
    for digests in fetch(payloads)
  ]


def _digest(arrays):
  total = (jnp.zeros((), jnp.uint32),) * 2
  start = 0
  for x in arrays:
    if x is None:
      continue
    word = _words(x)
    place = jnp.arange(word.size, dtype=jnp.uint32) + np.uint32(start)
    # One reduction of a pair: two would read the bytes twice.
    pair = (place * 2 + 1) * word, _mix(word + place * np.uint32(_GOLDEN))
    total = _add(total, jax.lax.reduce(pair, (np.uint32(0),) * 2, _add, (0,)))
    start += word.size
  return jnp.stack(total)


def _add(one, other):
  return one[0] + other[0], one[1] + other[1]


def _words(x):
  count = 4 // x.dtype.itemsize
  flat = jnp.pad(x.reshape(-1), (0, -x.size % count))
  if count > 1:
    flat = flat.reshape(-1, count)
  return jax.lax.bitcast_convert_type(flat, jnp.uint32)


def _mix(x):
  x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


_DIGEST = program(_digest, name='digest')
