# SPDX-License-Identifier: Apache-2.0
"""Compiles the engine's programs for slices of TPU chips, without a TPU.

  make pod-compile                            # all of them
  python -m experiments.pod_compile --missing # those without a record
  python -m experiments.pod_compile --cells Qwen3-8B,v6e-8,32k,verify

updates `experiments/pod_costs.json`, cell by cell, and fails where a program
copies a cache, communicates other than it must, does not fit, or costs 3 %
more than the file says. Weights and caches are shapes only. At Ctrl-C what is
done is kept, and the exit code is 130.

All figures are *compiled*: of one chip, by the compiler's own count, which does
not look into kernels. `hbm_bytes` is the memory budget of the side that runs
the program (`lynx_jax.memory`) and what the program takes beside its arguments;
a chip's limit is that of https://cloud.google.com/tpu/docs/system-architecture.
It knows no kernel and no clock.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp

from experiments import tpu_compiler  # before anything initialises libtpu
from lynx_jax import kv_cache, memory, prefill
from lynx_jax import mesh as mesh_lib
from lynx_jax.config import CodecConfig, EngineConfig
from lynx_jax.models import presets
from lynx_jax.models.cached import layer_params
from lynx_jax.pallas_kernels import dispatch
from lynx_jax.speculative import decode
from lynx_jax.speculative import slots as slots_lib
from lynx_jax.transport.streams import WireFormat

FILE = pathlib.Path(__file__).with_name('pod_costs.json')
HEADROOM = 0.1  # of a chip's memory stays free
TOLERANCE = 0.03
INTERRUPTED = 130
USER_MISTAKE = 2
COMPARED = ('flops', 'bytes', 'hbm_bytes')
LAYERS_A_GROUP = 1
# `rounds` is unrolled over the layers, each as the one before: with two groups
# it shows all that it is made of, and compiles in half a minute.
ROUND_LAYERS = 2 * LAYERS_A_GROUP
_LONG = 128 * 1024
SLOTS = 4
# Where 4 slots of 128k tokens do not fit beside the weights.
_FEWER_SLOTS = {('Llama-3.1-70B', 'v6e-16'): 2, ('Qwen3-8B', 'v5e-8'): 3}
CHUNK_BYTES = 16 << 20
WINDOW_BYTES = 16 * CHUNK_BYTES

_GIB = 1 << 30
_PREFILL = ('prefill', 'split')  # the other stages are decode's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
  """Chips that are rented together.

  Attributes:
    generation: a key of `tpu_compiler.CHIPS`.
    topology: for the compiler. A v5p-8 has 8 cores, in 4 chips.
    hbm_bytes: of a chip.
  """

  generation: str
  topology: str
  hbm_bytes: int


SLICES = {
  'v5e-8': Slice(generation='v5e', topology='v5e:2x4', hbm_bytes=16 * _GIB),
  'v5p-8': Slice(generation='v5p', topology='v5p:2x2x1', hbm_bytes=95 * _GIB),
  'v6e-8': Slice(generation='v6e', topology='v6e:2x4', hbm_bytes=32 * _GIB),
  'v5p-16': Slice(generation='v5p', topology='v5p:2x2x2', hbm_bytes=95 * _GIB),
  'v6e-16': Slice(generation='v6e', topology='v6e:4x4', hbm_bytes=32 * _GIB),
}
MODELS = {
  model.name: model
  for model in (presets.LLAMA_31_8B, presets.LLAMA_31_70B, presets.QWEN3_8B)
}
_PLACES = {
  'Llama-3.1-8B': ('v5e-8', 'v5p-8', 'v6e-8'),
  'Llama-3.1-70B': ('v5p-16', 'v6e-16'),
  'Qwen3-8B': ('v5e-8', 'v5p-8', 'v6e-8'),
}
# What each program says to other chips: two sums a layer; to look tokens up,
# one; to choose tokens, the best logit of each chip, and whose it is. Requests
# that sample enter a branch in which they choose so again, after 6 sums that
# find what top-k, top-p and min-p keep. A round chooses for drafts, and for the
# target.
_LAYERS = {'all-reduce': 2 * LAYERS_A_GROUP}
COLLECTIVES: dict[str, dict[str, int]] = {
  'prefill': _LAYERS,
  'split': {},
  'draft': _LAYERS,
  'verify': _LAYERS,
  'rounds': {
    'all-reduce': 2 * (1 + 2 * ROUND_LAYERS + 6),
    'all-gather': 2 * (2 + 2),
  },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """One program of one model on one slice.

  Attributes:
    model: a key of `MODELS`.
    topology: a key of `SLICES`; the side has all of its chips.
    stage: a key of `COLLECTIVES`.
    tokens: longest context: prompt, output and room for drafts.
  """

  model: str
  topology: str
  stage: str
  tokens: int

  @property
  def key(self) -> tuple[str, str, str, int]:
    return (self.model, self.topology, self.stage, self.tokens)

  @property
  def words(self) -> set[str]:
    """What it is chosen by; 32k and 32768 are the same."""
    return {*map(str, self.key), f'{self.tokens >> 10}k'}

  @property
  def slots(self) -> int:
    """Requests that decode holds, and prefill the KV of."""
    place = self.model, self.topology
    return _FEWER_SLOTS.get(place, SLOTS) if self.tokens >= _LONG else SLOTS


def cells() -> list[Cell]:
  """Returns all of them."""
  return [
    Cell(model=model, topology=topology, stage=stage, tokens=tokens)
    for model, places in _PLACES.items()
    for topology in places
    for tokens in (32 * 1024, _LONG)
    for stage in COLLECTIVES
  ]


class _Side:
  """Shapes of what one side holds, and of its programs' arguments."""

  def __init__(self, cell: Cell):
    self.stage, self.slots = cell.stage, cell.slots
    self.model = MODELS[cell.model]
    if cell.tokens > self.model.context_tokens:
      self.model = dataclasses.replace(
        self.model, context_tokens=_LONG, rope_scaling=presets.QWEN3_YARN
      )
    self.codec = CodecConfig()
    self.engine = EngineConfig(
      slots=self.slots,
      # A prefix of a round number of tokens, recent ones, and the output.
      prompt_tokens=cell.tokens - 2048 + self.codec.recent_tokens,
      output_tokens=1024,
      token_chunk=1024,
      layer_groups=self.model.layers // LAYERS_A_GROUP,
      chunk_bytes=CHUNK_BYTES,
      implementation=dispatch.PALLAS_TPU,
    )
    devices = tpu_compiler.devices(SLICES[cell.topology].topology)
    self.mesh = mesh_lib.make(devices, self.model)

  def budget(self) -> memory.Budget:
    """Returns the budget of the side that runs the stage."""
    of = memory.of_prefill if self.stage in _PREFILL else memory.of_decode
    wire = WireFormat(self.model, self.codec, self.engine)
    return of(wire, self.mesh, WINDOW_BYTES)

  def program(self) -> tuple[Any, tuple, Any, int]:
    """Returns program, arguments, the cache among them, and its layers."""
    scalar = self._array((), jnp.int32)
    chunk, kind = self.engine.token_chunk, self.engine.implementation
    model, layers = self.model, LAYERS_A_GROUP
    if self.stage == 'rounds':
      layers = ROUND_LAYERS
    # Only the layers that the program has.
    model = dataclasses.replace(self.model, layers=layers)
    engine = dataclasses.replace(
      self.engine, layer_groups=layers // LAYERS_A_GROUP
    )
    graphs, params = memory.params(model, self.mesh)
    group = layer_params(params, 0, LAYERS_A_GROUP)
    if self.stage in _PREFILL:
      heads = model.kv_heads, model.head_dim
      tokens = -(-engine.prompt_tokens // chunk) * chunk
      kv = self._array(
        (LAYERS_A_GROUP, tokens, *heads), jnp.bfloat16, 'L S K H'
      )
      dense = prefill.DenseKV(kv, kv)
      if self.stage == 'prefill':
        _, program, _ = prefill._programs(graphs, kind, self.mesh)
        h = self._array((1, chunk, model.model_dim), jnp.bfloat16)
        return program, (group, h, dense, scalar, scalar), dense, layers
      program = prefill._split_program(
        self.codec.k,
        self.codec.v,
        self.codec.group,
        self.codec.sinks,
        chunk,
        kind,
      )
      return program, (dense, scalar), dense, layers
    arguments: tuple
    cache = memory.cache(model, self.codec, engine, self.mesh)
    anchor = kv_cache.anchor_only(cache.prefix)
    programs = decode._programs(graphs, engine.verify_rows, kind, self.mesh)
    whole = cache.prefix, cache.tail
    if self.stage == 'rounds':
      arguments = (
        params,
        anchor,
        cache.prefix,
        cache.tail,
        self._empty(),
        self._array((self.slots,), jnp.bool_),
        scalar,
        scalar,
        self._array((1,), jnp.int32),  # ends of a text
      )
      return programs.rounds, arguments, whole, layers
    rows, prefix, program = 1, anchor, programs.draft_layers
    if self.stage == 'verify':
      rows, prefix = engine.verify_rows, cache.prefix
      program = programs.verify_layers
    column = self._array((self.slots,), jnp.int32)
    where = kv_cache.Rows(column, column, column.update(dtype=jnp.bool_))
    h = self._array((self.slots, rows, model.model_dim), jnp.bfloat16)
    arguments = group, h, prefix[0], cache.tail[0], where, None
    return program, arguments, whole, layers

  def _array(self, shape: tuple[int, ...], dtype: Any, axes: str = '') -> Any:
    """Returns a shape, split by its axes."""
    where = mesh_lib.place(self.mesh, mesh_lib.spec(axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

  def _empty(self) -> slots_lib.Slots:
    make = functools.partial(
      slots_lib.empty,
      self.slots,
      drafts=self.engine.backlog_tokens,
      output_tokens=self.engine.output_tokens,
    )
    where = mesh_lib.place(self.mesh, mesh_lib.spec('B'))
    return jax.tree.map(
      lambda x: x.update(sharding=where), jax.eval_shape(make)
    )


def measure(cell: Cell) -> dict[str, Any]:
  """Compiles a cell; returns its record."""
  side, slice_ = _Side(cell), SLICES[cell.topology]
  program, arguments, cache, layers = side.program()
  budget = side.budget()
  start_s, cpu_s = time.monotonic(), time.process_time()
  report = tpu_compiler.compile_module(slice_.generation, program, *arguments)
  return dataclasses.asdict(cell) | {
    'chips': side.mesh.size,
    'batch': 1 if cell.stage in _PREFILL else cell.slots,
    'slots': cell.slots,
    'layers': layers,
    'flops': report.flops,
    'bytes': report.bytes_accessed,
    'collectives': dict(tpu_compiler.collectives(report.hlo)),
    'hbm_bytes': budget.total_bytes + report.temp_bytes + report.result_bytes,
    'hbm_limit_bytes': slice_.hbm_bytes,
    'weights_bytes': budget.weights_bytes,
    'kv_bytes': budget.kv_bytes,
    'temp_bytes': report.temp_bytes,
    # 1 where the compiler lays arrays out as the budget counts them.
    'arguments_over_budget': round(
      report.argument_bytes / memory.shard_bytes(arguments), 4
    ),
    'cache_copies': _cache_copies(report.hlo, cache),
    'compile_s': round(time.monotonic() - start_s, 1),
    'compile_cpu_s': round(time.process_time() - cpu_s, 1),
  }


def fits(record: dict[str, Any]) -> bool:
  """Returns whether a record leaves the headroom."""
  return record['hbm_bytes'] <= (1 - HEADROOM) * record['hbm_limit_bytes']


def faults(
  new: dict[str, Any], old: dict[str, Any] | None = None
) -> Iterator[str]:
  """Yields what is wrong with a record, or worse than in an older one.

  One that copies is told by its record, and is no fault where the older record
  says so already.
  """
  known = old['cache_copies'] if old else []
  if len(new['cache_copies']) > len(known):
    yield f'copies {", ".join(new["cache_copies"])}'
  expected = COLLECTIVES[new['stage']]
  if new['collectives'] != expected:
    yield f'communicates {new["collectives"]}, not {expected}'
  if not fits(new):
    yield f'does not fit: {_of_chip(new)}'
  if old is None:
    return
  for name in COMPARED:
    if new[name] > old[name] * (1 + TOLERANCE):
      yield f'{name} {old[name]} -> {new[name]}'


def load() -> dict[tuple, dict[str, Any]]:
  """Returns the records of the file by the keys of their cells.

  Raises:
    OSError: it cannot be read.
    ValueError: it is damaged.
  """
  if not FILE.exists():
    return {}
  records = json.loads(FILE.read_text(encoding='utf-8'))
  names = [field.name for field in dataclasses.fields(Cell)]
  if not isinstance(records, list):
    raise ValueError(f'a {type(records).__name__}, no list of records')
  try:
    return {tuple(r[name] for name in names): r for r in records}
  except (KeyError, TypeError) as error:
    raise ValueError(f'what is no record: {error!r}') from error


def save(records: Sequence[dict[str, Any]]) -> None:
  """Replaces the file, so that nobody ever sees half of it."""
  part = FILE.with_name(FILE.name + '.part')
  try:
    part.write_text(json.dumps(records, indent=1) + '\n', encoding='utf-8')
    part.replace(FILE)
  finally:
    part.unlink(missing_ok=True)


def file_fault() -> str | None:
  """Returns why the file cannot be read or written, and what helps."""
  try:
    load()
  except ValueError as error:
    return f'{FILE} is damaged ({error}); `git restore {FILE}` brings it back'
  except OSError as error:
    return f'{FILE} cannot be read: {error.strerror}; see its rights'
  part = FILE.with_name(FILE.name + '.part')
  try:
    part.touch()
    part.unlink()
  except OSError as error:
    return f'{FILE} cannot be written: {error.strerror}; see its folder'
  if FILE.exists() and not os.access(FILE, os.W_OK):
    return f'{FILE} cannot be written; `chmod u+w` lets it'
  return None


def table(records: Sequence[dict[str, Any]]) -> str:
  """Returns what either side takes of a chip, and how many slots fit."""
  rows: dict[tuple, dict[bool, dict[str, Any]]] = {}
  for record in records:
    key = record['model'], record['topology'], record['tokens']
    side = record['stage'] in _PREFILL
    worst = rows.setdefault(key, {}).get(side, record)
    rows[key][side] = max(worst, record, key=lambda r: r['hbm_bytes'])
  lines = [
    '| model | slice | tokens | slots | prefill, GiB a chip | most slots '
    '| decode, GiB a chip | most slots |',
    '|---|---|---|---|---|---|---|---|',
  ]
  for (model, topology, tokens), sides in rows.items():
    if len(sides) < 2:  # `--cells` of one stage, and no record of others
      continue
    shown = [
      f'{_of_chip(sides[side])} | {most_slots(sides[side])}'
      for side in (True, False)
    ]
    lines.append(
      f'| {model} | {topology} | {tokens >> 10}k | {sides[True]["slots"]} '
      f'| {shown[0]} | {shown[1]} |'
    )
  return '\n'.join(lines)


def most_slots(record: dict[str, Any]) -> int:
  """Returns how many slots the side can have; its KV grows with them."""
  room = (1 - HEADROOM) * record['hbm_limit_bytes'] - record['hbm_bytes']
  slots = record['slots']
  return max(0, int(slots + room // (record['kv_bytes'] / slots)))


def _of_chip(record: dict[str, Any]) -> str:
  found = f'{record["hbm_bytes"] / _GIB:.1f}'
  limit = f'{record["hbm_limit_bytes"] / _GIB:.0f}'
  return f'{found} of {limit}{"" if fits(record) else " **no**"}'


def main(arguments: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
    '--cells',
    default='',
    help='only cells that have all of these words: v5e-8,32k,verify',
  )
  parser.add_argument(
    '--missing', action='store_true', help='only cells without a record'
  )
  parser.add_argument(
    '--jobs',
    type=int,
    default=os.cpu_count(),
    help='cells at a time, each in a process of its own (default: CPU cores)',
  )
  chosen = parser.parse_args(arguments)
  if not chosen.jobs or chosen.jobs < 1:
    parser.error(f'--jobs={chosen.jobs} must be 1 or more')
  words = {w.strip() for w in chosen.cells.split(',')} - {''}
  known = set().union(*(cell.words for cell in cells()))
  if not words <= known:
    parser.error(
      f'--cells: no cell has {", ".join(sorted(words - known))}; there are '
      f'{", ".join(sorted(known))}'
    )
  picked = [cell for cell in cells() if words <= cell.words]
  if not picked:
    parser.error(f'--cells: no cell has all of {", ".join(sorted(words))}')
  fault = file_fault()
  if fault is not None:  # not when the first cell is done
    print(f'error: {fault}', file=sys.stderr)
    return USER_MISTAKE
  tpu_compiler.write_no_listings()  # what workers inherit
  records, wrong, done = load(), [], 0
  missing = [c for c in picked if not (chosen.missing and c.key in records)]
  try:
    # Closed at once, so that an interrupt in this loop ends the workers too.
    with contextlib.closing(_measured(missing, chosen.jobs)) as measured:
      for cell, record in measured:
        old = records.get(cell.key)
        new = records | {cell.key: record}
        save([new[c.key] for c in cells() if c.key in new])
        records, done = new, done + 1
        print(
          f'{cell.model} {cell.topology} {cell.tokens >> 10}k {cell.stage}: '
          f'{_of_chip(record)} GiB, {record["collectives"]}, '
          f'{record["compile_s"]} s, {record["compile_cpu_s"]} of the CPU',
          flush=True,
        )
        wrong += [f'{cell.key}: {fault}' for fault in faults(record, old)]
  except KeyboardInterrupt:
    print('\n'.join(wrong))
    print(
      f'interrupted; {done} of {len(missing)} cells were compiled, and their '
      f'records are in {FILE}; --missing compiles cells without a record',
      file=sys.stderr,
      flush=True,
    )
    return INTERRUPTED
  print(table([*records.values()]))
  print('\n'.join(wrong))
  return bool(wrong)


def _measured(
  missing: Sequence[Cell], jobs: int
) -> Generator[tuple[Cell, dict[str, Any]], None, None]:
  """Yields cells with their records, as they are done.

  Whoever leaves before the end ends the workers, whatever they compile.
  """
  others = {*multiprocessing.active_children()}
  pool = futures.ProcessPoolExecutor(
    jobs,
    # A fork would have the parent's threads and locks.
    mp_context=multiprocessing.get_context('spawn'),
    initializer=tpu_compiler.write_no_listings,
  )
  finished = False
  try:
    # A terminal sends Ctrl-C to the workers, too, which inherit what is
    # blocked. The pool starts them here, one for each cell up to `jobs`.
    with _no_interrupt():
      tasks = {pool.submit(measure, cell): cell for cell in missing}
    for task in futures.as_completed(tasks):
      yield tasks[task], task.result()
    finished = True
  finally:
    with _no_interrupt():
      if not finished:
        for worker in {*multiprocessing.active_children()} - others:
          worker.kill()
      pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
  """Lets processes that are started inside ignore Ctrl-C."""
  before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _cache_copies(hlo: str, cache: Any) -> list[str]:
  """Returns the copies of a chip's part of a cache that a module makes."""
  shapes = {x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(cache)}
  return [
    str(made)
    for made in tpu_compiler.made(hlo)
    if made.opcode == 'copy' and made.shape in shapes
  ]


if __name__ == '__main__':
  sys.exit(main())
