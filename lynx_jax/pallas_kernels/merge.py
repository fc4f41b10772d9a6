# SPDX-License-Identifier: Apache-2.0
"""Makes packed planes dense again: `codec.dequantise` behind the dispatch.

It knows no cache; `codec` says what the bits mean.
"""

import jax.numpy as jnp

from lynx_jax import codec as codec_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.pallas_kernels import dispatch
from lynx_jax.shapes import Array, BFloat16


def merge(
  packed: PackedTensor, *, implementation: str | None = None
) -> BFloat16[Array, 'B S K H']:
  """Returns the values of `packed` as read with the planes it holds.

  The bits are the same in every implementation.

  Args:
    packed: planes `u8[B, K, S/Q * R, Q]`; `keep(1)` gives the Anchor alone.
    implementation: see `dispatch.run`.

  Raises:
    Unsupported: `implementation` was named and cannot serve the case.
  """

  def tpu(interpret):
    from lynx_jax.pallas_kernels import merge_tpu

    return merge_tpu.merge_tpu(packed, interpret=interpret)

  return dispatch.run(
    'merge',
    implementation,
    xla=lambda: codec_lib.dequantise(packed).astype(jnp.bfloat16),
    pallas_tpu=tpu,
  )
