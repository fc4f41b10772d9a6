# SPDX-License-Identifier: Apache-2.0
"""Lossless bfloat16 by a codebook of exponents: a size to hold others against.

It sends nothing: what it counts is what such a code would send, and what is
formed of it is the bound of a transfer whose coding takes no time. Sign and
significand, 8 bits of noise, go as they are. The 15 most frequent exponents of
a tensor have codes of 4 bits; the 16th code says that the exponent itself
follows. Exponents of keys and values take few values, as those of weights do
(arXiv:2504.11651).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from lynx_jax.prefill import Prompt
from lynx_jax.programs import fetch
from lynx_jax.requests import Result

_BFLOAT16_BITS, _CODE_BITS = 16, 4
_ESCAPE = (1 << _CODE_BITS) - 1


@dataclasses.dataclass(frozen=True)
class Coded:
  """A coded tensor; `bits` counts everything that `decode` needs but shapes.

  Attributes:
    rest: u8, sign and significand of every value.
    codes: u8 below 16, one a value.
    codebook: u8, the exponents that have a code of their own.
    escaped: u8, the exponents of values with the last code, in their order.
  """

  rest: np.ndarray
  codes: np.ndarray
  codebook: np.ndarray
  escaped: np.ndarray

  @property
  def bits(self) -> int:
    """The size of the code."""
    return (
      (8 + _CODE_BITS) * self.codes.size
      + 8 * self.codebook.size
      + 8 * self.escaped.size
    )


def encode(values: np.ndarray) -> Coded:
  """Codes bfloat16 values.

  Args:
    values: of two bytes each, any shape.
  """
  bits = np.ascontiguousarray(values).reshape(-1).view(np.uint16)
  exponents = ((bits >> 7) & 0xFF).astype(np.uint8)
  rest = ((bits >> 8) & 0x80 | bits & 0x7F).astype(np.uint8)
  counts = np.bincount(exponents, minlength=256)
  frequent = np.argsort(-counts, kind='stable')[:_ESCAPE]
  codebook = frequent[counts[frequent] > 0].astype(np.uint8)
  table = np.full(256, _ESCAPE, np.uint8)
  table[codebook] = np.arange(codebook.size, dtype=np.uint8)
  codes = table[exponents]
  return Coded(rest, codes, codebook, exponents[codes == _ESCAPE])


def decode(coded: Coded) -> np.ndarray:
  """Returns the bits of the values, u16, without their shape."""
  exponents = np.empty(coded.codes.size, np.uint16)
  escaped = coded.codes == _ESCAPE
  exponents[escaped] = coded.escaped
  exponents[~escaped] = coded.codebook[coded.codes[~escaped]]
  rest = coded.rest.astype(np.uint16)
  return (rest & 0x80) << 8 | exponents << 7 | rest & 0x7F


def bits_of(prompt: Prompt) -> float:
  """Returns the bits a value of a prompt's keys and values."""
  return bits_a_value(
    [
      layer[: prompt.tokens]
      for group in fetch(prompt.kv)
      for tensor in (group.k, group.v)
      for layer in tensor
    ]
  )


def coded(result: Result, bits: float) -> Result:
  """Returns the result of a bf16 request with the bytes of a code.

  Args:
    result: of the request; all that it waits for are bfloat16 values.
    bits: a value, as the code has them.
  """
  part = bits / _BFLOAT16_BITS
  return dataclasses.replace(
    result,
    critical=[
      (ready_s, round(part * size)) for ready_s, size in result.critical
    ],
  )


def bits_a_value(tensors: Sequence[np.ndarray]) -> float:
  """Returns the mean over tensors, each with a codebook of its own.

  Args:
    tensors: bfloat16, for example the K and V of every layer.
  """
  size = sum(x.size for x in tensors)
  return sum(encode(x).bits for x in tensors) / size
