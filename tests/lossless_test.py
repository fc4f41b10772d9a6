# SPDX-License-Identifier: Apache-2.0
"""The exponent codebook loses nothing, and its size is what decoding needs."""

import hypothesis
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from experiments import lossless


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.integers(0, 2**16 - 1), max_size=300))
def test_any_bits_come_back(bits):
  values = np.asarray(bits, np.uint16).view(jnp.bfloat16.dtype)
  coded = lossless.encode(values)
  np.testing.assert_array_equal(lossless.decode(coded), bits)
  assert coded.codebook.size <= 15
  assert coded.codes.max(initial=0) < 16


def test_normal_values_take_twelve_bits_and_a_few_escapes():
  values = np.random.default_rng(0).normal(size=20_000)
  values = values.astype(jnp.bfloat16.dtype)
  coded = lossless.encode(values)
  bits = lossless.bits_a_value([values, values])
  assert bits == coded.bits / values.size
  assert 12 < bits < 12.01
  # Escapes are what pushes it over twelve.
  assert coded.bits == 12 * values.size + 8 * (15 + coded.escaped.size)
