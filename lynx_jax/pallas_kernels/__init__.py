# SPDX-License-Identifier: Apache-2.0
"""Ops over the progressive KV cache: a reference in XLA, a kernel beside it.

It knows no model and no cache: ops take plain arrays and `PackedTensor`s.
"""

from lynx_jax.pallas_kernels.dispatch import Unsupported
from lynx_jax.pallas_kernels.merge import merge
from lynx_jax.pallas_kernels.split_attention import split_attention
from lynx_jax.pallas_kernels.split_kv import split_kv

__all__ = ['Unsupported', 'merge', 'split_attention', 'split_kv']
