# SPDX-License-Identifier: Apache-2.0
"""Forms the tables of docs/memory_budget.md from what is really allocated.

Shapes are those of `kv_cache.empty` and of the model, sizes of the prefill side
those of `handshake.sender_bytes`, which the handshake enforces. Nothing is
allocated.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax

from lynx_jax import handshake, kv_cache
from lynx_jax.codec import PackedTensor
from lynx_jax.config import CodecConfig, EngineConfig, ModelConfig
from lynx_jax.models import cached, presets, transformer
from lynx_jax.transport.streams import DENSE_BYTES, WireFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A model with the longest prompt of its one slot."""

  model: ModelConfig
  prompt_tokens: int

  @property
  def engine(self) -> EngineConfig:
    """Returns the engine's config: one slot, defaults else."""
    return EngineConfig(prompt_tokens=self.prompt_tokens)

  @property
  def title(self) -> str:
    """Returns the heading of its column."""
    return f'{self.model.name}, {self.prompt_tokens:,} tokens'


CASES = (
  Case(
    model=dataclasses.replace(presets.SMOLLM2_135M, dtype='bfloat16'),
    prompt_tokens=1984,
  ),
  Case(model=presets.LLAMA_31_8B, prompt_tokens=32_768),
  Case(model=presets.LLAMA_31_70B, prompt_tokens=131_008),
)
_CODEC = CodecConfig()
_WINDOW_BYTES = 4 << 20


def tables() -> str:
  """Returns the tables of both sides, in Markdown."""
  return '\n\n'.join(
    (
      'Decode, one slot; planes (4,4) and the default tail:',
      _table(decode_bytes),
      'Prefill, one prompt at a time for one peer of one slot, and a window of '
      '4 MiB:',
      _table(prefill_bytes),
    )
  )


def decode_bytes(case: Case) -> dict[str, int]:
  """Returns what a decode side holds, by purpose."""
  cache = jax.eval_shape(
    functools.partial(kv_cache.empty, case.model, _CODEC, case.engine)
  )
  found = {'weights': weight_bytes(case.model)}
  for name, size in _parts(cache):
    found[name] = found.get(name, 0) + size
  return found


def prefill_bytes(case: Case) -> dict[str, int]:
  """Returns what a prefill side holds for one peer, and its weights."""
  wire = WireFormat(case.model, _CODEC, case.engine)
  size, model = case.engine.token_chunk, case.model
  tokens = math.ceil(case.prompt_tokens / size) * size
  computed = tokens * 2 * model.layers * model.kv_heads * model.head_dim
  computed *= DENSE_BYTES
  everything = handshake.sender_bytes(wire, _WINDOW_BYTES)
  return {
    'weights': weight_bytes(case.model),
    'keys and values as computed, bfloat16': computed,
    'keys and values as split': everything - computed - _WINDOW_BYTES,
    'published and not landed, at most': _WINDOW_BYTES,
  }


def weight_bytes(model: ModelConfig) -> int:
  """Returns the bytes of a model's parameters."""
  _, params = cached.split(transformer.abstract_model(model))
  return _bytes(params)


def _parts(cache: kv_cache.Cache) -> Iterator[tuple[str, int]]:
  for prefix in cache.prefix:
    for packed in (prefix.k, prefix.v):
      assert isinstance(packed, PackedTensor)
      for i, plane in enumerate(packed.planes):
        yield 'Residual planes' if i else 'Anchor planes', _bytes(plane)
      yield 'scales and offsets', _bytes((packed.scale, packed.offset))
    yield 'sinks', _bytes((prefix.sinks_k, prefix.sinks_v))
  for tail in cache.tail:
    yield 'tail: recent, ragged and generated tokens, scratch', _bytes(tail)


def _bytes(tree: Any) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _table(sizes) -> str:
  columns = [sizes(case) for case in CASES]
  rows = [
    ('', *(case.title for case in CASES)),
    ('---', *('---:' for _ in CASES)),
    *((name, *(_shown(c[name]) for c in columns)) for name in columns[0]),
    ('**together**', *(_shown(sum(c.values())) for c in columns)),
  ]
  return '\n'.join(f'| {" | ".join(row)} |' for row in rows)


def _shown(size: int) -> str:
  for unit, factor in (('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
    if size >= factor:
      return f'{size / factor:.3g} {unit}'
  return f'{size} B'
