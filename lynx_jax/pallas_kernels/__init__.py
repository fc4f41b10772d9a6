# SPDX-License-Identifier: Apache-2.0
"""Ops over the progressive KV cache: a reference in XLA, a kernel beside it.

It knows no model and no cache: ops take plain arrays and `PackedTensor`s.
"""

from lynx_jax.pallas_kernels.dispatch import Unsupported

__all__ = ['Unsupported']
