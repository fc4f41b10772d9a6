# SPDX-License-Identifier: Apache-2.0
"""Costs of the kernels by the TPU compiler's own counts; no TPU is needed.

  python -m experiments.kernel_costs            # about 15 minutes on 2 cores
  python -m experiments.kernel_costs --resume   # goes on where one was stopped
  python -m experiments.kernel_costs --cells attention_anchor,v5e,128

updates `experiments/kernel_costs.json` and fails if a figure there got worse by
more than 3 %. Bundles, spills and VMEM are *compiled*. Cycles, costs and
speed-ups are *projected*: max(issue cycles, bytes of the format / HBM rate) at
an assumed clock. It knows no codec and no kernel's inside.
"""

import argparse
import collections.abc
import dataclasses
import functools
import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp

from experiments import (
  bf16_attention_tpu,
  tpu_compiler,  # before anything initialises libtpu
)
from lynx_jax import codec as codec_lib
from lynx_jax.config import TensorCodec
from lynx_jax.pallas_kernels import merge_tpu, split_attention_tpu, split_kv_tpu

FILE = pathlib.Path(__file__).with_name('kernel_costs.json')
FINISHED = pathlib.Path('runs/kernel-costs.jsonl')  # cells of an unended run
GROUP = 128
TOLERANCE = 0.03
COMPARED = ('bundles', 'spills', 'dma_bytes', 'vmem_bytes', 'cache_copies')
PLANES = TensorCodec(planes=(4, 4))

ATTENTION = {'attention_anchor': 1, 'attention_anchor_residual': 2}
RAGGED = (1024, 3072, 9216, 32768)  # tokens of a batch's slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """One kernel at one shape, compiled for one generation.

  Attributes:
    kernel: `split`, `attention_anchor`, `attention_anchor_residual`,
      `attention_bf16` or `merge`.
    generation: a key of `tpu_compiler.CHIPS`.
    head_dim, query_rows, kv_heads, tokens: shape; one slot.
    block, block_heads: tokens and KV heads of a grid step.
  """

  kernel: str
  generation: str
  head_dim: int = 128
  query_rows: int = 4
  kv_heads: int = 8
  tokens: int = 32768
  block: int = 4096
  block_heads: int = 8

  @property
  def key(self) -> tuple:
    return dataclasses.astuple(self)


def cells() -> list[Cell]:
  """Returns the full matrix."""
  result = []
  for generation in tpu_compiler.CHIPS:
    for head_dim in (64, 128, 256):
      heads = 1 if head_dim == 256 else 8
      cell = functools.partial(
        Cell, generation=generation, head_dim=head_dim, kv_heads=heads
      )
      result += [
        cell(kernel='attention_bf16', block=b, block_heads=min(h, heads))
        for b, h in ((2048, 4), (4096, 2))
      ]
      if generation == 'v4':
        continue
      blocks = {64: (2048, 4096, 8192), 128: (2048, 4096), 256: (2048, 8192)}
      result += [
        cell(kernel=kernel, block=block, block_heads=heads)
        for kernel in ATTENTION
        for block in blocks[head_dim]
      ]
      many = split_attention_tpu.BlockSizes.default(
        generation, head_dim=head_dim, query_rows=64
      )
      result += [
        cell(
          kernel=kernel,
          query_rows=64,
          block=many.tokens,
          block_heads=min(many.heads, heads),
        )
        for kernel in ATTENTION
      ]
      result += [
        cell(kernel=kernel, block=2048, block_heads=min(4, heads))
        for kernel in ('split', 'merge')
      ]
  return result


def measure(cell: Cell) -> dict:
  """Compiles one cell and returns its record."""
  chip = tpu_compiler.CHIPS[cell.generation]
  fn, arguments, name = _build(cell)
  report = tpu_compiler.compile_for(cell.generation, fn, *arguments)
  (kernel,) = (k for k in report.kernels if k.name.startswith(name))
  steps = _steps(dataclasses.asdict(cell), cell.tokens)
  per_step = sum(kernel.bundles[1:])
  for bundles, trips in zip(kernel.loops, _trips(cell, kernel), strict=True):
    per_step += bundles * (trips - 1)
  issue_cycles = kernel.bundles[0] + steps * per_step
  dma_bytes = _format_bytes(cell)
  floor_cycles = dma_bytes / chip.bytes_per_cycle
  return dataclasses.asdict(cell) | {
    'bundles': per_step,
    'issue_cycles': issue_cycles,
    'clock_ghz': chip.clock_ghz,
    'hbm_gbyte_s': chip.hbm_gbyte_s,
    'spills': kernel.spills,
    'dma_bytes': dma_bytes,
    'vmem_bytes': kernel.vmem_bytes,
    'cost_cycles': round(max(issue_cycles, floor_cycles)),
    'floor_cycles': round(floor_cycles),
    'speedup_over_bf16_pallas': None,
    'speedup_over_xla': None,
    'cache_copies': len(report.copies),
  }


def _steps(cell, tokens):
  """Returns the grid steps for a slot of so many tokens."""
  heads = cell['kv_heads'] // cell['block_heads']
  return math.ceil(tokens / cell['block']) * heads


def _trips(cell, kernel):
  """Returns how often every loop inside a grid step runs in a usual step."""
  # The first starts copies. Where query rows are many there is another, of
  # some heads a turn, of which the first are scored before it
  # (`many_rows_tpu`). A loop of one turn is none.
  turns = cell.block_heads // _block_sizes(cell).ahead(cell.block_heads)
  return [1, turns - 1][: len(kernel.loops)]


def _block_sizes(cell):
  sizes = split_attention_tpu.BlockSizes.default(
    cell.generation, head_dim=cell.head_dim, query_rows=cell.query_rows
  )
  return dataclasses.replace(sizes, tokens=cell.block, heads=cell.block_heads)


def _format_bytes(cell):
  """Returns what has to cross HBM, by the data format alone."""
  values = 2 * cell.tokens * cell.kv_heads * cell.head_dim  # K and V
  groups = cell.tokens // GROUP
  scales = 2 * 4 * groups * cell.kv_heads * cell.head_dim
  dense, packed = 2 * values, values
  rows = cell.query_rows * cell.kv_heads * cell.head_dim * 4 * 2
  if cell.kernel == 'attention_bf16':
    return dense + rows
  if cell.kernel in ATTENTION:
    return packed * ATTENTION[cell.kernel] // 2 + scales + rows
  return (dense + packed + scales) // 2  # one tensor a call


def _build(cell):
  shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
  heads = cell.kv_heads * min(cell.query_rows, 4)
  q_rows = cell.query_rows // min(cell.query_rows, 4)
  q = shape((1, q_rows, heads, cell.head_dim))
  scalar = jax.ShapeDtypeStruct((), jnp.int32)
  lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
  dense = (1, cell.tokens, cell.kv_heads, cell.head_dim)
  flat = (1, cell.tokens, cell.kv_heads * cell.head_dim)
  if cell.kernel == 'split':
    blocks = split_kv_tpu.BlockSizes(tokens=cell.block, heads=cell.block_heads)

    def split(x, sinks):
      # A projection leaves [B, S, K * H]; as an argument [B, S, K, H] would
      # be in another layout.
      return split_kv_tpu.split_tpu(
        x.reshape(dense), PLANES, group=GROUP, sinks=sinks, block_sizes=blocks
      )

    return split, (shape(flat), scalar), 'split_kv'
  if cell.kernel == 'merge':
    blocks = split_kv_tpu.BlockSizes(tokens=cell.block, heads=cell.block_heads)

    def merge(packed):
      return merge_tpu.merge_tpu(packed, block_sizes=blocks).reshape(flat)

    return merge, (_packed(cell, (1,)),), 'merge'
  if cell.kernel == 'attention_bf16':

    def bf16(q, k, v, layer, prefix_tokens):
      return bf16_attention_tpu.bf16_attention_tpu(
        q,
        k,
        v,
        layer=layer,
        prefix_tokens=prefix_tokens,
        logits_scale=1.0,
        block_tokens=cell.block,
        block_heads=cell.block_heads,
      )

    kv = shape((2, 1, cell.kv_heads, cell.tokens, cell.head_dim))
    return bf16, (q, kv, kv, scalar, lengths), 'attention_bf16'

  sizes = _block_sizes(cell)

  def attention(q, k, v, layer, prefix_tokens):
    return split_attention_tpu.split_attention_tpu(
      q,
      k,
      v,
      layer=layer,
      prefix_tokens=prefix_tokens,
      sinks=4,
      logits_scale=1.0,
      block_sizes=sizes,
    )

  packed = _packed(cell, (2, 1)).keep(ATTENTION[cell.kernel])
  return attention, (q, packed, packed, scalar, lengths), 'split_attention'


def _packed(cell, leading):
  return jax.eval_shape(
    lambda: codec_lib.empty(
      leading,
      kv_heads=cell.kv_heads,
      groups=cell.tokens // GROUP,
      group=GROUP,
      head_dim=cell.head_dim,
      codec=PLANES,
    )
  )


@functools.cache
def xla_seconds(generation, head_dim, query_rows, kv_heads, tokens) -> float:
  """Returns the compiler's estimate for bf16 attention in plain XLA.

  It comes from another model than bundle counts; it is here for scale only.
  """
  heads = min(query_rows, 4)
  q = (1, query_rows // heads, kv_heads, heads, head_dim)
  kv = (1, kv_heads, tokens, head_dim)

  def attention(q, k, v):
    logits = jnp.einsum(
      'btkgh,bksh->bkgts', q, k, preferred_element_type=jnp.float32
    )
    weights = jax.nn.softmax(logits, axis=-1).astype(jnp.bfloat16)
    return jnp.einsum(
      'bkgts,bksh->btkgh', weights, v, preferred_element_type=jnp.float32
    )

  arguments = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (q, kv, kv)]
  return tpu_compiler.compile_for(generation, attention, *arguments).optimal_s


def add_speedups(records: list[dict]) -> None:
  """Fills in the speed-ups: against bf16 at its own best block, and XLA."""

  def shape(record):
    return tuple(
      record[n]
      for n in ('generation', 'head_dim', 'query_rows', 'kv_heads', 'tokens')
    )

  best: dict[tuple, int] = {}
  for record in records:
    if record['kernel'] == 'attention_bf16':
      cost = record['cost_cycles']
      best[shape(record)] = min(cost, best.get(shape(record), cost))
  for record in records:
    if record['kernel'] not in ATTENTION:
      continue
    if shape(record | {'query_rows': 4}) not in best:
      continue
    cost = record['cost_cycles']
    # One pass over bf16 for 64 rows costs at least what it costs for 4.
    bf16 = best.get(shape(record)) or best[shape(record | {'query_rows': 4})]
    record['speedup_over_bf16_pallas'] = round(bf16 / cost, 3)
    xla_s = xla_seconds(*shape(record))
    if xla_s > 0:  # the estimate overflows for some shapes
      xla = xla_s * record['clock_ghz'] * 1e9
      record['speedup_over_xla'] = round(xla / cost, 3)


def ragged_speedup(records: list[dict], generation: str) -> float:
  """Returns the speed-up over bf16 for a batch of ragged slots, projected.

  Of the Anchor at head dim 128, 4 rows and blocks of 2048, for slots of
  `RAGGED` tokens. A step costs the larger of its bundles and its bytes; a
  slot's last block is read whole.
  """

  def cycles(record):
    steps = functools.partial(_steps, record)
    floor_cycles = record['floor_cycles'] / steps(record['tokens'])
    return sum(map(steps, RAGGED)) * max(record['bundles'], floor_cycles)

  def least(kernel, blocks):
    return min(
      cycles(r)
      for r in records
      if r['kernel'] == kernel
      and (r['generation'], r['head_dim'], r['query_rows'])
      == (generation, 128, 4)
      and r['block'] <= blocks
    )

  anchor = least('attention_anchor', 2048)
  return least('attention_bf16', RAGGED[-1]) / anchor


def regressions(new: dict, old: dict) -> collections.abc.Iterator[str]:
  """Yields what of `new` is worse than `old` by more than the tolerance."""
  for name in COMPARED:
    if new[name] > old[name] * (1 + TOLERANCE):
      yield f'{name} {old[name]} -> {new[name]}'


def key(record: dict) -> tuple:
  """Returns the identity of a record's cell."""
  return tuple(record[f.name] for f in dataclasses.fields(Cell))


def load() -> dict[tuple, dict]:
  """Returns the checked-in records by cell."""
  if not FILE.exists():
    return {}
  return {key(r): r for r in json.loads(FILE.read_text(encoding='utf-8'))}


def table(records: list[dict]) -> str:
  """Returns the records as aligned text."""
  head = (
    'kernel generation dim rows block  bundles spills  VMEM KiB  '
    'cost/floor  over bf16  over XLA  copies'
  )
  lines = [head]
  for r in records:
    ratio = r['cost_cycles'] / r['floor_cycles']
    over = [
      '-' if r[n] is None else f'{r[n]:.2f}'
      for n in ('speedup_over_bf16_pallas', 'speedup_over_xla')
    ]
    lines.append(
      f'{r["kernel"]} {r["generation"]} {r["head_dim"]} {r["query_rows"]} '
      f'{r["block"]}x{r["block_heads"]}  {r["bundles"]} {r["spills"]}  '
      f'{r["vmem_bytes"] >> 10}  {ratio:.2f}  {over[0]}  {over[1]}  '
      f'{r["cache_copies"]}'
    )
  return '\n'.join(lines)


def _measure_each(chosen):
  """Yields the record of every cell, and writes down at once what is new."""
  finished = {}
  if FINISHED.exists():
    lines = FINISHED.read_text(encoding='utf-8').splitlines()
    finished = {key(r): r for r in map(json.loads, lines)}
  FINISHED.parent.mkdir(exist_ok=True, parents=True)
  for cell in chosen:
    record = finished.get(cell.key)
    if record is None:
      record = measure(cell)
      with FINISHED.open('a', encoding='utf-8') as file:
        file.write(json.dumps(record) + '\n')
    yield record


def main(arguments=None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
    '--cells', default='', help='only cells with these words: kernel,v5e,128'
  )
  parser.add_argument(
    '--resume',
    action='store_true',
    help='keep the cells that an interrupted run of the same code finished',
  )
  options = parser.parse_args(arguments)
  words = [w for w in options.cells.split(',') if w]
  chosen = [c for c in cells() if set(words) <= set(map(str, c.key))]
  if not options.resume:
    FINISHED.unlink(missing_ok=True)
  old, measured, worse = load(), {}, []
  for cell, record in zip(chosen, _measure_each(chosen), strict=True):
    measured[cell.key] = record
    found = old.get(cell.key)
    for line in regressions(record, found) if found else ():
      worse.append(f'{cell}: {line}')
    print(table([record]).split('\n')[1], flush=True)
  merged = (old if words else {}) | measured
  records = [merged[c.key] for c in cells() if c.key in merged]
  add_speedups(records)
  FILE.write_text(json.dumps(records, indent=1) + '\n', encoding='utf-8')
  FINISHED.unlink(missing_ok=True)
  print(table([r for r in records if key(r) in measured]))
  if not words:
    print(f'Anchor, head dim 128, slots of {RAGGED} tokens, over bf16:')
    for name in tpu_compiler.CHIPS:
      if name != 'v4':  # it multiplies no int8
        print(f'  {name}: {ragged_speedup(records, name):.2f}')
  print('Bundles, spills, VMEM: compiled. Costs, speed-ups: projected, at')
  for name, chip in tpu_compiler.CHIPS.items():
    print(f'  {name}: {chip.clock_ghz} GHz, {chip.hbm_gbyte_s} GB/s')
  print('A clock 20 % higher or lower moves issue-bound costs by as much and')
  print('leaves those at their byte floor where they are.')
  print('\n'.join(worse))
  return bool(worse)


if __name__ == '__main__':
  sys.exit(main())
