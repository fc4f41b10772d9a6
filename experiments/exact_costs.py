# SPDX-License-Identifier: Apache-2.0
"""Compiles the exact plane's programs for a TPU and prints what they cost.

  python -m experiments.exact_costs            # v5e, about 2 minutes

A row is a program over one string, that of a layer group's token chunk. Seconds
are the TPU compiler's own estimate (compiled); no TPU is needed, and none runs.
"""

import argparse

import jax
import jax.numpy as jnp

from experiments import tpu_compiler
from lynx_jax import codec as codec_lib
from lynx_jax import exact
from lynx_jax import wire as wire_lib
from lynx_jax.config import CodecConfig, EngineConfig, TensorCodec
from lynx_jax.models import presets
from lynx_jax.transport.streams import WireFormat


def main(arguments: list[str] | None = None) -> None:
  """Prints seconds and temporary bytes of every program."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('generation', nargs='?', default='v5e')
  parser.add_argument('--layers', type=int, default=3)
  parser.add_argument('--kv-heads', type=int, default=3)
  parser.add_argument('--head-dim', type=int, default=64)
  chosen = parser.parse_args(arguments)
  model = presets.tiny(
    layers=chosen.layers,
    heads=chosen.kv_heads,
    kv_heads=chosen.kv_heads,
    head_dim=chosen.head_dim,
  )
  wire = WireFormat(
    model, CodecConfig(exact=True), EngineConfig(layer_groups=1)
  )
  values = chosen.layers * chosen.kv_heads * chosen.head_dim
  values *= 2 * wire.engine.token_chunk
  print(f'{chosen.generation}, {values} values: K and V of one string')
  total = {'encode': 0.0, 'merge': 0.0}
  for side, name, calls, program, args in programs(wire):
    report = tpu_compiler.compile_for(chosen.generation, program, *args)
    total[side] += calls * report.optimal_s
    print(
      f'{side} {name}: {calls} x {report.optimal_s * 1e6:.1f} µs, '
      f'{report.temp_bytes / 2**20:.1f} MiB of temporaries'
    )
  for side, seconds in total.items():
    print(
      f'{side}: {seconds * 1e6:.0f} µs a string, {seconds / values * 1e12:.0f} '
      'ps a value (compiled)'
    )


def programs(wire: WireFormat):
  """Yields (side, name, calls a string, program, shapes) in their order."""
  layers, heads, groups = wire.string_blocks(0)
  codec, head_dim = wire.codec, wire.model.head_dim
  tokens = wire.engine.token_chunk
  scalar = jax.ShapeDtypeStruct((), jnp.int32)
  x = jax.ShapeDtypeStruct((layers, tokens, heads, head_dim), jnp.bfloat16)
  packed = jax.eval_shape(
    lambda: codec_lib.empty(
      (layers,),
      kv_heads=heads,
      groups=groups,
      group=codec.group,
      head_dim=head_dim,
      codec=TensorCodec(),
    )
  )

  low, count = jax.eval_shape(exact._bins, packed)
  yield 'encode', 'bins', 2, exact._bins, (packed,)
  found = jax.eval_shape(exact._find, x, low, count, scalar)
  yield 'encode', 'find', 2, exact._find, (x, low, count, scalar)
  bit, total = jax.eval_shape(exact._running, found)
  yield 'encode', 'running sums', 2, exact._running, (found,)
  last = jax.eval_shape(exact._last_in_word, bit)
  yield 'encode', 'last in word', 2, exact._last_in_word, (bit,)
  args = x, found, bit, total, last, scalar
  plane = jax.eval_shape(exact._assemble, *args)
  yield 'encode', 'assemble', 2, exact._assemble, args
  join = wire_lib._join_program(wire.most_pages(0))
  string, _ = jax.eval_shape(join, plane, plane, scalar)
  yield 'encode', 'join', 1, join, (plane, plane, scalar)

  shape = (layers, heads, groups, codec.group * head_dim)
  string = jax.ShapeDtypeStruct((1, *string.shape), string.dtype)
  yield 'merge', 'part', 1, wire_lib._part_program(shape), (string,)
  yield 'merge', 'bins', 2, exact._bins, (packed,)
  yield 'merge', 'intervals', 2, exact._intervals, (low, count, scalar)
  yield 'merge', 'positions', 2, exact._positions, (found,)
  window = jax.eval_shape(exact._window, plane.units, bit)
  yield 'merge', 'window', 2, exact._window, (plane.units, bit)
  yield (
    'merge',
    'resolve',
    2,
    exact._resolve,
    (found, plane, window, scalar),
  )


if __name__ == '__main__':
  main()
