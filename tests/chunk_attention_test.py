# SPDX-License-Identifier: Apache-2.0
"""The wrapped prefill kernel agrees with the plain one at any offset."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lynx_jax.pallas_kernels import Unsupported
from lynx_jax.pallas_kernels.chunk_attention_tpu import chunk_attention_tpu
from lynx_jax.prefill import chunk_attention


def random(shape, seed):
  noise = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(noise, jnp.bfloat16)


@pytest.mark.parametrize('head_dim', [64, 128])
def test_agrees_with_xla_at_a_traced_offset(head_dim):
  q = random((1, 128, 4, head_dim), 0)
  k, v = (random((2, 384, 2, head_dim), n) for n in (1, 2))
  tpu = jax.jit(
    lambda offset: chunk_attention_tpu(
      q, k, v, layer=1, offset=offset, interpret=True
    )
  )
  for offset in (0, 256):
    at = jnp.int32(offset)
    expected = chunk_attention(q, k, v, layer=1, offset=at)
    # bfloat16 queries and weights: 2^-9 relative each.
    np.testing.assert_allclose(tpu(at), expected, atol=0.02)


def test_a_chunk_that_is_no_multiple_of_128_is_refused():
  x = random((1, 100, 1, 64), 0)
  with pytest.raises(Unsupported, match='100 tokens: must be a multiple'):
    chunk_attention_tpu(x, x, x, layer=0, offset=jnp.int32(0))
