# SPDX-License-Identifier: Apache-2.0
"""Which caches of others there are, and how many bits they take.

It knows no package of theirs: names and arguments, and what a tensor tells of
itself.
"""

from typing import Any

# Arguments of `transformers.QuantizedCache`. Groups are 64 channels of a token,
# as its documentation recommends: axis 0 for quanto, 1 for hqq. Its quanto has
# 2 and 4 bits: `hf_cache` puts quanto's own 8 in, by channel.
TRANSFORMERS: dict[str, dict[str, Any]] = {
  'hf_quanto4': {'backend': 'quanto', 'nbits': 4},
  'hf_quanto8': {'backend': 'quanto', 'nbits': 8},
  'hf_hqq4': {'backend': 'hqq', 'nbits': 4, 'axis_key': 1, 'axis_value': 1},
  'hf_hqq8': {'backend': 'hqq', 'nbits': 8, 'axis_key': 1, 'axis_value': 1},
  'hf_fp8': {'backend': 'fp8'},
}
# Types of ggml: values and bytes of a block.
GGML: dict[str, tuple[str, int, int]] = {
  'llama_f16': ('F16', 1, 2),
  'llama_q8_0': ('Q8_0', 32, 34),
  'llama_q4_0': ('Q4_0', 32, 18),
}
# By the module of the process that runs them.
MODULES: dict[str, tuple[str, ...]] = {
  'experiments.peers.hf_cache': tuple(TRANSFORMERS),
  'experiments.peers.llama_cpp': tuple(GGML),
}
NAMES = tuple(name for names in MODULES.values() for name in names)
_METADATA_BITS = 16


def ggml_bits(name: str) -> float:
  """Returns bits a value of llama.cpp's cache, which holds every token."""
  _, values, size_bytes = GGML[name]
  return 8 * size_bytes / values


def stored_bits(stored: Any) -> int:
  """Returns the bits of what transformers keeps of a tensor.

  Floating-point metadata counts 16 bits, as in a bfloat16 model, even where
  float32 is kept.

  Args:
    stored: torch tensors, among them those made of others (quanto), in tuples
      and dicts (hqq keeps sizes beside them, which do not count).
  """
  if isinstance(stored, dict):
    return sum(map(stored_bits, stored.values()))
  if isinstance(stored, tuple | list):
    return sum(map(stored_bits, stored))
  if hasattr(stored, '__tensor_flatten__'):
    names, _ = stored.__tensor_flatten__()
    return sum(stored_bits(getattr(stored, name)) for name in names)
  if not hasattr(stored, 'element_size'):
    return 0
  width = 8 * stored.element_size()
  if stored.is_floating_point():
    width = min(width, _METADATA_BITS)
  return width * stored.numel()
