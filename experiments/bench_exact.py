# SPDX-License-Identifier: Apache-2.0
"""Measures the exact plane on a real prompt: bits a value, and time.

  python -m experiments.bench_exact            # book, about 2 minutes
  python -m experiments.bench_exact code 1856

Every pair prefills the prompt, then encodes and decodes all layers; times are
ratios to the prefill of the same pair, as medians with the range over pairs.
Bits count everything on the wire: sinks, recent tokens, metadata, all planes.
"""

import argparse
import functools
import statistics
import time

import jax
import numpy as np

from experiments import prompts, serving
from lynx_jax import codec as codec_lib
from lynx_jax import exact
from lynx_jax.config import CodecConfig, EngineConfig
from lynx_jax.prefill import DenseKV, Prefill
from lynx_jax.programs import fetch, program
from lynx_jax.transport.streams import WireFormat


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
  tokens = np.asarray(ids, np.int32)
  codec = CodecConfig()
  engine = EngineConfig(
    prompt_tokens=len(ids), layer_groups=min(10, model.config.layers)
  )
  prefill = Prefill(model.prefill, codec, engine)
  wire = WireFormat(model.config, codec, engine)
  end = codec.prefix_end(len(ids))
  programs = _programs(codec, end)

  times: dict[str, list[float]] = {'encode': [], 'decode': []}
  for pair in range(chosen.pairs + 1):  # the first one compiles
    prefill_s, kv = _timed(lambda: list(prefill.chunks(tokens))[-1].kv)
    packed = [programs['split'](part) for part in kv]
    encode_s, planes = _timed(
      lambda kv=kv, packed=packed: [
        programs['encode'](*both) for both in zip(kv, packed, strict=True)
      ]
    )
    decode_s, back = _timed(
      lambda packed=packed, planes=planes: [
        programs['decode'](*both) for both in zip(packed, planes, strict=True)
      ]
    )
    if pair:
      times['encode'].append(encode_s / prefill_s)
      times['decode'].append(decode_s / prefill_s)
  equal = all(
    np.array_equal(x[:, codec.sinks : end].view(np.uint16), y.view(np.uint16))
    for part, both in zip(fetch(kv), fetch(back), strict=True)
    for x, y in zip(
      (part.k, part.v), (z[:, codec.sinks :] for z in both), strict=True
    )
  )
  values = (
    2
    * len(ids)
    * np.prod(
      (model.config.layers, model.config.kv_heads, model.config.head_dim)
    )
  )
  block = codec.group * model.config.head_dim
  units = sum(
    exact.units_of(size_class, block)
    for both in fetch(planes)
    for plane in both
    for size_class in plane.classes.ravel().tolist()
  )
  total = wire.bits_a_value(len(ids)).total
  print(f'{chosen.prompt}, {len(ids)} tokens, {jax.devices()[0].device_kind}')
  print(f'bit-equal: {equal}')
  print(
    f'bits a value: {total:.2f} without, {total + units * 16 / values:.2f} '
    'with the exact plane'
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


def _programs(codec: CodecConfig, end: int):
  """Compiles split, encode and decode of one layer group's K and V."""
  tensors = codec.k, codec.v

  def split(kv: DenseKV):
    return tuple(
      codec_lib.split(x[:, :end], tensor, group=codec.group, sinks=codec.sinks)
      for x, tensor in zip((kv.k, kv.v), tensors, strict=True)
    )

  # Encoding and decoding are programs already.
  def encode(kv: DenseKV, packed):
    return tuple(
      exact.encode(x[:, :end], p, sinks=codec.sinks)
      for x, p in zip((kv.k, kv.v), packed, strict=True)
    )

  def decode(packed, planes):
    step = functools.partial(exact.decode, sinks=codec.sinks)
    return tuple(map(step, packed, planes))

  return {
    'split': program(split, name='split'),
    'encode': encode,
    'decode': decode,
  }


if __name__ == '__main__':
  main()
