# SPDX-License-Identifier: Apache-2.0
"""Ops over the progressive KV cache: a reference in XLA, a kernel beside it.

It knows no model and no cache: ops take plain arrays and `PackedTensor`s.

On a TPU from v5e on the kernels run; on a GPU and on a CPU the XLA
implementations do, which lower for CUDA as they are (tests/gpu_lowering_test).
There is no GPU kernel: none was measured to win.
"""

from lynx_jax.pallas_kernels.chunk_attention import chunk_attention
from lynx_jax.pallas_kernels.dispatch import Unsupported
from lynx_jax.pallas_kernels.merge import merge
from lynx_jax.pallas_kernels.split_attention import split_attention
from lynx_jax.pallas_kernels.split_kv import split_kv

__all__ = [
  'Unsupported',
  'chunk_attention',
  'merge',
  'split_attention',
  'split_kv',
]
