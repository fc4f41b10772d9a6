# SPDX-License-Identifier: Apache-2.0
"""Times attention over the progressive cache against bf16 and the byte floor.

  python -m experiments.bench_kernels                     # this device
  python -m experiments.bench_kernels --generations v5e   # compiler, no device
  python -m experiments.bench_kernels --measure --tokens 2048   # even a CPU

On an accelerator all figures are *measured* (median and p90 of 20). Without
one, the same table comes from the TPU compiler (all of it takes about 10
minutes): bundles are *compiled*, times and ratios *projected* at the clock and
rate that `calibrate.chip` gives. "floor" is the time to read the format's bytes
at the memory's rate, "over bf16" the ratio of the times to that of bfloat16.
"""

import argparse
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from experiments import calibrate


@dataclasses.dataclass(frozen=True)
class Shape:
  """Heads of one layer."""

  heads: int
  kv_heads: int
  head_dim: int


SHAPES = {
  'SmolLM2-135M': Shape(9, 3, 64),
  'Llama-3.1-8B': Shape(32, 8, 128),
  'Qwen3-8B': Shape(32, 8, 128),
  'Gemma-3-4B': Shape(8, 4, 256),
}
TOKENS = (2048, 8192, 32768, 131072)
BLOCK = 4096
HEAD = (
  f'{"model":13} {"tokens":>7} {"planes":>8} {"us":>9} {"p90":>9} '
  f'{"floor":>8} {"over bf16":>9}'
)


def floor_bytes(shape: Shape, tokens: int, bits: int) -> float:
  """Returns the bytes a decode step has to read, scales included."""
  values = 2 * tokens * shape.kv_heads * shape.head_dim
  scales = 0 if bits == 16 else 2 * 2 * values // 128
  return values * bits / 8 + scales


def line(name, tokens, planes, us, p90, floor_us, ratio) -> str:
  """Formats one row of the table."""
  return (
    f'{name:13} {tokens:7} {planes:>8} {us:9.1f} {p90:>9} {floor_us:8.1f} '
    f'{ratio:9.2f}'
  )


def measure(models: list[str], lengths: list[int]) -> None:
  """Prints the table of this device."""
  device = jax.devices()[0]
  known = calibrate.load(device.device_kind)
  rate = known['hbm_gbyte_s'] if known else calibrate.hbm_gbyte_s()
  print(f'{device.device_kind}: measured; floor at {rate:.0f} GB/s, measured')
  print(HEAD)
  for name in models:
    shape = SHAPES[name]
    for tokens in lengths:
      q, k, v = calibrate.operands(
        tokens=tokens,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        heads=shape.heads,
      )
      dense = jax.random.normal(
        jax.random.key(0),
        (2, 1, shape.kv_heads, tokens, shape.head_dim),
        jnp.bfloat16,
      )
      bf16 = calibrate.timed(functools.partial(_bf16_attention, q, *dense))
      rows = [('bf16', 16, bf16)] + [
        (
          label,
          4 * depth,
          calibrate.timed(
            functools.partial(calibrate.attention(depth), q, k, v)
          ),
        )
        for label, depth in (('anchor', 1), ('both', 2))
      ]
      for label, bits, timing in rows:
        floor_s = floor_bytes(shape, tokens, bits) / rate / 1e9
        print(
          line(
            name,
            tokens,
            label,
            timing.median_s * 1e6,
            f'{timing.p90_s * 1e6:.1f}',
            floor_s * 1e6,
            bf16.median_s / timing.median_s,
          ),
          flush=True,
        )


@jax.jit
def _bf16_attention(q, k, v):
  """Decode attention in plain XLA; k and v are [1, K, S, H]."""
  q = q.reshape(1, k.shape[1], -1, q.shape[-1]).astype(jnp.bfloat16)
  logits = jnp.einsum(
    'bkgh,bksh->bkgs', q, k, preferred_element_type=jnp.float32
  )
  weights = jax.nn.softmax(logits, axis=-1).astype(jnp.bfloat16)
  return jnp.einsum(
    'bkgs,bksh->bkgh', weights, v, preferred_element_type=jnp.float32
  )


def project(
  generations: list[str], models: list[str], lengths: list[int]
) -> None:
  """Prints the table of TPU generations from the compiler."""
  for generation in generations:
    chip, basis = calibrate.chip(generation)
    print(
      f'\n{generation}: bundles compiled, times projected at {chip.clock_ghz} '
      f'GHz and {chip.hbm_gbyte_s} GB/s ({basis})'
    )
    print(HEAD)
    for name in models:
      for tokens in lengths:
        bf16_s = None
        for label, kernel, bits in (
          ('bf16', 'attention_bf16', 16),
          ('anchor', 'attention_anchor', 4),
          ('both', 'attention_anchor_residual', 8),
        ):
          if generation == 'v4' and bits < 16:  # it multiplies no int8
            continue
          shape = SHAPES[name]
          floor_s = floor_bytes(shape, tokens, bits) / chip.hbm_gbyte_s / 1e9
          cycles = _issue_cycles(generation, shape, kernel, tokens)
          time_s = max(cycles / chip.clock_ghz / 1e9, floor_s)
          bf16_s = bf16_s or time_s
          ratio = bf16_s / time_s
          print(
            line(name, tokens, label, time_s * 1e6, '-', floor_s * 1e6, ratio),
            flush=True,
          )


def _issue_cycles(generation, shape, kernel, tokens):
  block = min(BLOCK, tokens)
  heads = shape.kv_heads
  if kernel == 'attention_bf16':
    heads = math.gcd(heads, 2)
  steps = math.ceil(tokens / block) * shape.kv_heads // heads
  return steps * _bundles_per_step(generation, shape, kernel, block, heads)


@functools.cache
def _bundles_per_step(generation, shape, kernel, block, heads):
  """Compiles a kernel; how many steps there are does not change a step."""
  from experiments import kernel_costs

  cell = kernel_costs.Cell(
    kernel=kernel,
    generation=generation,
    head_dim=shape.head_dim,
    query_rows=shape.heads // shape.kv_heads,
    kv_heads=shape.kv_heads,
    block=block,
    block_heads=heads,
  )
  return kernel_costs.measure(cell)['bundles']


def _list_of(kind, allowed):
  def parse(text):
    words = text.split(',')
    for word in words:
      if word not in map(str, allowed):
        raise argparse.ArgumentTypeError(
          f'{word!r} must be one of {", ".join(map(str, allowed))}'
        )
    return [kind(word) for word in words]

  return parse


def main(arguments=None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  generations = list(dict.fromkeys(calibrate.GENERATIONS.values()))
  parser.add_argument(
    '--models',
    type=_list_of(str, SHAPES),
    default=list(SHAPES),
    help=f'some of {",".join(SHAPES)}',
  )
  parser.add_argument(
    '--tokens',
    type=_list_of(int, TOKENS),
    default=list(TOKENS),
    help=f'some of {",".join(map(str, TOKENS))}',
  )
  which = parser.add_mutually_exclusive_group()
  which.add_argument(
    '--generations',
    type=_list_of(str, generations),
    help=f'compile for some of {",".join(generations)}; measure nothing',
  )
  which.add_argument(
    '--measure',
    action='store_true',
    help='measure this device, though it is a CPU',
  )
  chosen = parser.parse_args(arguments)
  compile_all = not chosen.measure and jax.default_backend() == 'cpu'
  if chosen.generations or compile_all:
    project(chosen.generations or generations, chosen.models, chosen.tokens)
  else:
    measure(chosen.models, chosen.tokens)


if __name__ == '__main__':
  main()
