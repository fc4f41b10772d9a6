# SPDX-License-Identifier: Apache-2.0
"""Measures the exact plane on a real prompt: bits a value, and time.

  python -m experiments.bench_exact            # book, about 2 minutes
  python -m experiments.bench_exact code 1856

Every pair prefills the prompt, then encodes all strings as a sender does, and
merges them into a cache as an engine does; times are ratios to the prefill of
the same pair, as medians with the range over pairs. Bits count everything on
the wire: sinks, recent tokens, metadata, all planes, pages to their ends.
"""

import argparse
import statistics
import time

import jax
import numpy as np

from experiments import prompts, serving
from lynx_jax import kv_cache
from lynx_jax import wire as wire_lib
from lynx_jax.config import CodecConfig, EngineConfig
from lynx_jax.kv_cache import Cache
from lynx_jax.prefill import Prefill, Prompt
from lynx_jax.programs import fetch
from lynx_jax.transport.streams import PAGE_BYTES, Chunk, WireFormat


def main(arguments: list[str] | None = None) -> None:
  """Prints bits, equality, and the two ratios."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('prompt', nargs='?', default='book')
  parser.add_argument('tokens', nargs='?', type=int, default=1984)
  parser.add_argument('--model', default='smollm2')
  parser.add_argument('--pairs', type=int, default=5)
  chosen = parser.parse_args(arguments)

  model = serving.load(chosen.model, 'float32')
  ids = prompts.cut(
    model.tokenizer.encode(prompts.read(chosen.prompt)),
    chosen.tokens,
    keeps_end=prompts.KEEPS_END.get(chosen.prompt, False),
  )
  codec = CodecConfig(exact=True)
  engine = EngineConfig(prompt_tokens=len(ids), layer_groups=10)
  wire = WireFormat(model.config, codec, engine)
  prefill = Prefill(model.prefill, codec, engine)
  times: dict[str, list[float]] = {'encode': [], 'merge': []}
  for pair in range(chosen.pairs + 1):  # the first one compiles
    prefill_s, prompt = _timed(
      lambda: list(prefill.chunks(np.asarray(ids, np.int32)))[-1]
    )
    for token_chunk in range(wire.token_chunks(len(ids)) - 1):
      prefill.split(prompt, token_chunk)
    encode_s, pages = _timed(lambda prompt=prompt: _encode(wire, prompt))
    cache, strings = _carry(wire, prompt, pages)
    merge_s, cache = _timed(
      lambda cache=cache, strings=strings: _merge(
        wire, cache, strings, len(ids)
      )
    )
    if pair:
      times['encode'].append(encode_s / prefill_s)
      times['merge'].append(merge_s / prefill_s)
  bits = wire.bits_a_value(len(ids)).total
  exact = sum(pages.values()) * PAGE_BYTES
  exact *= bits / wire.stream_bytes(len(ids)).total
  print(f'{chosen.prompt}, {len(ids)} tokens, {jax.devices()[0].device_kind}')
  print(f'bit-equal: {_equal(wire, prompt, cache)}')
  print(
    f'bits a value: {bits:.2f} without, {bits + exact:.2f} with the exact plane'
  )
  for name, ratios in times.items():
    print(
      f'{name} over prefill: {statistics.median(ratios):.3f} '
      f'({min(ratios):.3f}-{max(ratios):.3f}, {len(ratios)} pairs)'
    )


def _timed(work):
  start_s = time.monotonic()
  result = jax.block_until_ready(work())
  return time.monotonic() - start_s, result


def _encode(wire: WireFormat, prompt: Prompt) -> dict[tuple[int, int], int]:
  return {
    string: fetch(wire_lib.encode(wire, prompt, *string)).item()
    for string in wire.strings(prompt.tokens)
  }


def _carry(
  wire: WireFormat, prompt: Prompt, pages: dict[tuple[int, int], int]
) -> tuple[Cache, dict[tuple[int, int], wire_lib.String]]:
  """Returns a cache with all planes in it, and the strings beside it."""
  cache = kv_cache.empty(wire.model, wire.codec, wire.engine)
  strings: dict[tuple[int, int], wire_lib.String] = {}
  for token_chunk in range(wire.token_chunks(prompt.tokens)):
    for chunk in wire.manifest(0, prompt.tokens, token_chunk):
      for part, arrays in _cut(wire, prompt, chunk):
        cache = wire_lib.insert(wire, cache, 0, part, arrays)
  for string, count in pages.items():
    for chunk in wire.exact_manifest(0, *string, count):
      for part, arrays in _cut(wire, prompt, chunk):
        found = strings.get(string)
        strings[string] = wire_lib.gather(wire, found, part, arrays)
  return jax.block_until_ready((cache, strings))


def _cut(wire: WireFormat, prompt: Prompt, chunk: Chunk):
  payload = wire_lib.cut(wire, prompt, chunk.token_chunk, chunk.slices)
  return zip(chunk.slices, payload, strict=True)


def _merge(
  wire: WireFormat,
  cache: Cache,
  strings: dict[tuple[int, int], wire_lib.String],
  tokens: int,
) -> Cache:
  for place, string in strings.items():
    cache = wire_lib.merge(wire, cache, 0, *place, string, tokens)
  return cache


def _equal(wire: WireFormat, prompt: Prompt, cache: Cache) -> bool:
  kept = slice(wire.codec.sinks, prompt.prefix_tokens)
  return all(
    np.array_equal(x[:, kept].view(np.uint16), y[:, 0, kept].view(np.uint16))
    for kv, held in zip(fetch(prompt.kv), fetch(cache.exact), strict=True)
    for x, y in ((kv.k, held.k), (kv.v, held.v))
  )


if __name__ == '__main__':
  main()
