# SPDX-License-Identifier: Apache-2.0
"""Splits K and V into packed planes: `codec.split` behind the dispatch.

It knows no cache; `codec` says what the bits mean.
"""

from lynx_jax import codec as codec_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.config import TensorCodec
from lynx_jax.pallas_kernels import dispatch
from lynx_jax.shapes import Array, BFloat16, Int32


def split_kv(
  k: BFloat16[Array, 'B S K H'],
  v: BFloat16[Array, 'B S K H'],
  *,
  k_codec: TensorCodec,
  v_codec: TensorCodec,
  group: int,
  sinks: int | Int32[Array, ''] = 0,
  implementation: str | None = None,
) -> tuple[PackedTensor, PackedTensor]:
  """Splits K (after RoPE) and V into planes, scales and offsets.

  Planes, scales and offsets have the same bits in every implementation.

  Args:
    k, v: finite values; S must be a multiple of `group`.
    k_codec, v_codec: planes, axis and rotation of each.
    group: Q, tokens that share statistics.
    sinks: tokens at the start of `k` and `v` that live in a dense segment:
      they stay out of all statistics and hold the centre code.
    implementation: see `dispatch.run`.

  Raises:
    Unsupported: `implementation` was named and cannot serve the case.
    ValueError: S is not a multiple of `group`.
  """

  def xla():
    return (
      codec_lib.split(k, k_codec, group=group, sinks=sinks),
      codec_lib.split(v, v_codec, group=group, sinks=sinks),
    )

  def tpu(interpret):
    from lynx_jax.pallas_kernels import split_kv_tpu

    return tuple(
      split_kv_tpu.split_tpu(
        x, codec, group=group, sinks=sinks, interpret=interpret
      )
      for x, codec in ((k, k_codec), (v, v_codec))
    )

  return dispatch.run('split_kv', implementation, xla=xla, pallas_tpu=tpu)
