# SPDX-License-Identifier: Apache-2.0
"""The one table of dimension letters, and array annotations that use it.

It knows no model and no algorithm.

| letter | meaning | letter | meaning |
|---|---|---|---|
| B | batch slots | H | head dim |
| T | query tokens of one pass | D | model dim |
| S | key/value tokens | F | feed-forward dim |
| L | layers (of a layer group) | V | vocabulary |
| N | query heads | Q | quantisation group, tokens |
| K | key/value heads | W | recent dense prompt tokens |
| G | query heads a KV head, N / K | C | token chunk of prefill |

`R` is the number of byte rows a group takes in a packed plane:
`H * width / 8` (see `codec`).

`Float[Array, 'B T D']` is a jaxtyping annotation where jaxtyping is installed
(the `test` extra, which checks it at trace time) and plain `jax.Array`
elsewhere, so that the core needs no extra package.
"""

from typing import TYPE_CHECKING

import jax

Array = jax.Array

if TYPE_CHECKING:
  from jaxtyping import (
    BFloat16,
    Bool,
    Float,
    Float32,
    Int8,
    Int32,
    UInt8,
    UInt16,
    UInt32,
  )
else:
  try:
    from jaxtyping import (
      BFloat16,
      Bool,
      Float,
      Float32,
      Int8,
      Int32,
      UInt8,
      UInt16,
      UInt32,
    )
  except ImportError:

    class _Plain:
      """Stands in for a jaxtyping dtype: every annotation is `jax.Array`."""

      def __class_getitem__(cls, _):
        return jax.Array

    BFloat16 = Bool = Float = Float32 = Int8 = Int32 = _Plain
    UInt8 = UInt16 = UInt32 = _Plain

__all__ = [
  'Array',
  'BFloat16',
  'Bool',
  'Float',
  'Float32',
  'Int8',
  'Int32',
  'UInt8',
  'UInt16',
  'UInt32',
]
