# SPDX-License-Identifier: Apache-2.0
"""Lynx in JAX: progressive speculative quantisation for KV transfer.

Start reading at `engine`; `config` has every setting.
"""

__version__ = '0.1.0'
