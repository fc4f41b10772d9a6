# SPDX-License-Identifier: Apache-2.0
"""Codes that others have published, as NumPy oracles of their formulas.

It knows no model and no wire: keys and values of one prompt in one layer give
what they read back as, and the bits that they take, all metadata included. None
has a packed layout or a kernel here: these are references for sizes and errors.
Where a formula divides by the range of a constant group, which gives NaN, the
scale counts as 1. Scales and offsets are float16, as published.

- KIVI (arXiv:2402.02750 §3, https://github.com/jy-yuan/KIVI): K by channel
  over 32 tokens, V by token over 32 channels, asymmetric. Dense are of K what
  is left over by blocks of 128 tokens, of V the last 128 tokens.
- QuantSpec (arXiv:2502.10424 §4): K by channel over 128 tokens, V by token,
  asymmetric 4 bits as drafts read them; the rounding error in 4 more, signed,
  with 1/16 of the scale. Dense are the last 128 tokens or more, up to a block.
- CacheGen (arXiv:2310.07240 §5) as LMCache has it
  (`cachegen_encoder.py` of https://github.com/LMCache/LMCache): a token's
  values of all heads share a symmetric scale; 32 bins in the first third of the
  layers of K and in 2 of 32 of V, else 16. Its arithmetic coder is replaced by
  the bound it cannot beat: the entropy of each channel over 256 tokens, without
  its tables, of the codes or, if that is less, of their differences from the
  first token of every ten (the paper's delta).
"""

import dataclasses
from collections.abc import Callable

import numpy as np

_KIVI_GROUP, _KIVI_DENSE = 32, 128
_GROUP = 128  # of QuantSpec
_TOKENS, _DELTA = 256, 10  # of CacheGen: of a distribution, of an anchor
_DENSE_BITS = 16


@dataclasses.dataclass(frozen=True)
class Coded:
  """What a tensor reads back as, float32[S, K, H], and its size in bits."""

  values: np.ndarray
  bits: float


# Codes one tensor of a layer: x[S, K, H], is it K, layer, layers.
Formula = Callable[[np.ndarray, bool, int, int], Coded]


def kivi(x: np.ndarray, is_k: bool, width: int) -> Coded:
  """Codes a tensor as KIVI does, with `width` bits."""
  tokens, dense = len(x), _KIVI_DENSE
  end = tokens - tokens % dense if is_k else max(0, tokens - dense)
  groups = _grouped(x[:end], is_k, _KIVI_GROUP)
  codes, scale, low = _rounded(groups, width)
  return _joined(x, end, codes * scale + low, is_k, width, groups)


def quantspec(x: np.ndarray, is_k: bool, planes: int) -> Coded:
  """Codes a tensor as QuantSpec does; `planes` = 1 is what drafts read."""
  end = max(0, len(x) // _GROUP - 1) * _GROUP
  groups = _grouped(x[:end], is_k, _GROUP)
  codes, scale, low = _rounded(groups, 4)
  values = codes * scale + low
  if planes > 1:
    error = np.round((groups - values) / (scale / 16))
    values = values + np.clip(error, -8, 7) * (scale / 16)
  return _joined(x, end, values, is_k, 4 * planes, groups)


def cachegen(x: np.ndarray, is_k: bool, layer: int, layers: int) -> Coded:
  """Codes a tensor as CacheGen does in LMCache; see the module docstring."""
  fine = layers / 3 if is_k else layers / 16
  most = (32 if layer < fine else 16) // 2 - 1
  flat = x.reshape(len(x), -1)
  scale = np.abs(flat).max(axis=1, keepdims=True).astype(np.float16)
  scale = np.where(scale > 0, scale, 1).astype(np.float32)
  codes = np.clip(np.round(flat * (most / scale)), -most, most)
  first = np.arange(len(x)) // _DELTA * _DELTA
  delta = codes - codes[first]
  delta[first] = codes[first]
  size = min(_entropy_bits(codes), _entropy_bits(delta))
  values = (codes * (scale / most)).reshape(x.shape)
  return Coded(values, size + 16 * len(x))


def _grouped(x: np.ndarray, is_k: bool, group: int) -> np.ndarray:
  """Returns x with what shares a scale on the last axis."""
  if is_k:
    return np.moveaxis(x.reshape(-1, group, *x.shape[1:]), 1, -1)
  tokens, heads, head_dim = x.shape
  size = min(group, head_dim)
  return x.reshape(tokens, heads, head_dim // size, size)


def _rounded(
  groups: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns codes 0 to 2^width - 1, scale and minimum of every group."""
  low = groups.min(axis=-1, keepdims=True)
  high = groups.max(axis=-1, keepdims=True)
  low = low.astype(np.float16).astype(np.float32)
  scale = ((high - low) / (2**width - 1)).astype(np.float16)
  scale = np.where(scale > 0, scale, 1).astype(np.float32)
  codes = np.clip(np.round((groups - low) / scale), 0, 2**width - 1)
  return codes, scale, low


def _joined(x, end, values, is_k, width, groups) -> Coded:
  """Puts the coded tokens before the dense ones; counts bits."""
  back = np.moveaxis(values, -1, 1) if is_k else values
  found = np.concatenate([back.reshape(x[:end].shape), x[end:]])
  metadata = 32 * groups.size / groups.shape[-1]
  return Coded(
    found, width * groups.size + metadata + _DENSE_BITS * x[end:].size
  )


def _entropy_bits(codes: np.ndarray) -> float:
  """Returns the bits of [S, channels], each channel coded over 256 tokens."""
  total = 0.0
  for start in range(0, len(codes), _TOKENS):
    block = codes[start : start + _TOKENS]
    for code in np.unique(block):
      counts = (block == code).sum(axis=0)
      counts = counts[counts > 0]
      total -= float((counts * np.log2(counts / len(block))).sum())
  return total


# By the names of readings; an Anchor's reading comes before its target's.
FORMULAS: dict[str, Formula] = {
  'kivi4_oracle': lambda x, is_k, *_: kivi(x, is_k, 4),
  'kivi2_oracle': lambda x, is_k, *_: kivi(x, is_k, 2),
  'quantspec_anchor': lambda x, is_k, *_: quantspec(x, is_k, 1),
  'quantspec': lambda x, is_k, *_: quantspec(x, is_k, 2),
  'cachegen': cachegen,
}
