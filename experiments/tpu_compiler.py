# SPDX-License-Identifier: Apache-2.0
"""Compiles with the real TPU compiler, without a TPU, and reads its figures.

It knows no kernel: any JAX function goes in. All figures are *compiled*.

Import it before anything initialises libtpu, which reads its flags once.
Several processes may compile at a time.
"""

import collections
import collections.abc
import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import tempfile

_DUMP = pathlib.Path(tempfile.mkdtemp(prefix='tpu_dump_'))
_OWN_FLAGS = os.environ.get('LIBTPU_INIT_ARGS', '')
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
# Else the second process that loads libtpu fails, though none has a chip.
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
os.environ['LIBTPU_INIT_ARGS'] = ' '.join(
  (
    _OWN_FLAGS,
    f'--xla_jf_dump_to={_DUMP}',
    '--xla_jf_dump_llo_text=true',
    '--xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra|utilization',
  )
)

import jax  # noqa: E402  (the flags above must be set before libtpu loads)
import numpy as np  # noqa: E402  (likewise)
from jax.experimental import topologies  # noqa: E402  (likewise)

# A program that comes from a cache leaves no dump to read.
jax.config.update('jax_enable_compilation_cache', False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """What turns compiled counts into projected times.

  Attributes:
    topology: its name for `get_topology_desc`.
    clock_ghz: assumed; no compiler output states it.
    hbm_gbyte_s: the compiler's own rate, read back by way of
      `pl.CostEstimate` and `cost_analysis()['optimal_seconds']`.
    vmem_bytes: scoped VMEM a kernel gets unless it asks for more.
  """

  topology: str
  clock_ghz: float
  hbm_gbyte_s: float
  vmem_bytes: int

  @property
  def bytes_per_cycle(self) -> float:
    return self.hbm_gbyte_s / self.clock_ghz


_MIB = 1 << 20
CHIPS = {
  'v4': Chip(
    topology='v4:2x2x1', clock_ghz=1.05, hbm_gbyte_s=491, vmem_bytes=16 * _MIB
  ),
  'v5e': Chip(
    topology='v5e:2x2', clock_ghz=1.5, hbm_gbyte_s=737.7, vmem_bytes=16 * _MIB
  ),
  'v5p': Chip(
    topology='v5p:2x2x1', clock_ghz=1.75, hbm_gbyte_s=2350, vmem_bytes=16 * _MIB
  ),
  'v6e': Chip(
    topology='v6e:2x2', clock_ghz=1.75, hbm_gbyte_s=1638, vmem_bytes=32 * _MIB
  ),
  'tpu7x': Chip(
    topology='tpu7x:2x2x1',
    clock_ghz=1.9,
    hbm_gbyte_s=3650,
    vmem_bytes=32 * _MIB,
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelReport:
  """Figures of one Pallas kernel in a module.

  Attributes:
    name: of the `pallas_call`.
    bundles: VLIW bundles after register allocation, stalls included, by loop
      depth: [outside the grid loop, a grid step, …]. DMA waits are not in it.
    loops: bundles of every loop inside the grid's, in their order; each is in
      `bundles` once, however often it runs.
    slots: operations issued, by slot (`MXU`, `VALU`, `VSTORE:SPILL`, …).
    capacity: operations a bundle can hold, by slot.
    vmem_bytes: all buffers, both copies of double-buffered ones.
    window_bytes: bytes of one copy of every pipelined operand's window.
  """

  name: str
  bundles: tuple[int, ...]
  loops: tuple[int, ...]
  slots: dict[str, int]
  capacity: dict[str, int]
  vmem_bytes: int
  window_bytes: int

  @property
  def spills(self) -> int:
    """Vector registers stored to VMEM for want of room."""
    return self.slots.get('VSTORE:SPILL', 0)

  def utilisation(self) -> dict[str, float]:
    """Returns the share of each slot that is used; the limit is near 1."""
    total = sum(self.bundles)
    return {
      slot: count / (total * self.capacity[slot])
      for slot, count in self.slots.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleReport:
  """Figures of one compiled module.

  Attributes:
    calls: of Pallas kernels, by name.
    kernels: the different ones among them; `compile_module` reads none.
    argument_bytes: HBM of its arguments, as the compiler lays them out.
    result_bytes: HBM of results that take over no argument's.
    temp_bytes: HBM the module allocates besides arguments and results.
    flops, bytes_accessed: the compiler's count, kernels left out.
    optimal_s: the compiler's own estimate for XLA fusions.
    copies: those of at least 1 MiB that it makes, as 'dtype[shape] opcode'.
    hlo: the optimised module.
  """

  calls: tuple[str, ...]
  kernels: tuple[KernelReport, ...]
  argument_bytes: int
  result_bytes: int
  temp_bytes: int
  flops: float
  bytes_accessed: float
  optimal_s: float
  copies: tuple[str, ...]
  hlo: str


def write_no_listings() -> None:
  """Halves the time to compile; before libtpu is loaded, and for good.

  Nothing is then known of kernels: only `compile_module` can be used.
  """
  os.environ['LIBTPU_INIT_ARGS'] = _OWN_FLAGS


def compile_for(
  generation: str,
  fn: collections.abc.Callable,
  *args,
  **jit_options,
) -> ModuleReport:
  """Compiles `fn`, and reads the listings of its kernels.

  Args and errors are those of `compile_module`.
  """
  report = compile_module(generation, fn, *args, **jit_options)
  return dataclasses.replace(report, kernels=tuple(_kernels(report.calls)))


def compile_module(
  generation: str,
  fn: collections.abc.Callable,
  *args,
  **jit_options,
) -> ModuleReport:
  """Compiles `fn` for one chip, or for several.

  Args:
    generation: a key of `CHIPS`.
    fn: what `jax.jit` takes, or has returned.
    *args: pytrees of `jax.ShapeDtypeStruct`; those with shardings, which must
      be of `devices` of that generation, keep them.
    **jit_options: for `jax.jit`, if it is not jitted.

  Raises:
    Whatever the compiler raises.
  """
  chip = devices(CHIPS[generation].topology)[0]
  one = jax.sharding.SingleDeviceSharding(chip)
  placed = jax.tree.map(
    lambda x: x if x.sharding else x.update(sharding=one), args
  )
  for file in _DUMP.iterdir():
    shutil.rmtree(file) if file.is_dir() else file.unlink()
  jitted = fn if hasattr(fn, 'trace') else jax.jit(fn, **jit_options)
  compiled = jitted.trace(*placed).lower(lowering_platforms=('tpu',)).compile()
  hlo = compiled.as_text()
  calls = tuple(
    re.findall(
      r'%(\S+) = [^\n]*custom-call\([^\n]*'
      r'custom_call_target="tpu_custom_call"',
      hlo,
    )
  )
  memory, costs = compiled.memory_analysis(), compiled.cost_analysis()
  return ModuleReport(
    calls=calls,
    kernels=(),
    argument_bytes=memory.argument_size_in_bytes,
    result_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
    temp_bytes=memory.temp_size_in_bytes,
    flops=costs.get('flops', 0.0),
    bytes_accessed=costs.get('bytes accessed', 0.0),
    optimal_s=costs.get('optimal_seconds', 0.0),
    copies=tuple(large_copies(hlo)),
    hlo=hlo,
  )


def devices(topology: str) -> list[jax.Device]:
  """Returns the chips of a topology, such as that of a `Chip`."""
  return topologies.get_topology_desc(
    platform='tpu', topology_name=topology
  ).devices


def collectives(hlo: str) -> collections.Counter[str]:
  """Counts the collective operations of a module by their opcode."""
  found = re.findall(
    r' (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|'
    r'collective-broadcast)(?:-start)?\(',
    hlo,
  )
  return collections.Counter(found)


def collective_groups(hlo: str) -> list[tuple[str, np.ndarray]]:
  """Returns result and groups of every collective that has groups.

  A group is a row of device numbers, in the order of the mesh. XLA writes two
  groups of two in one of these ways:

  | text | groups |
  |---|---|
  | `{{0,1},{2,3}}` | 0 1, 2 3 |
  | `[2,2]<=[2,2]T(1,0)` | 0 2, 1 3 |
  | `mesh['a'=2,'b'=2] {'a'}` | 0 2, 1 3 |
  | `mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}` | 0 1, 2 3 |
  """
  found = re.findall(
    r'= (\S+|\(.*?\)) (?:all-\w+|reduce-scatter)(?:-start)?\(.*?'
    r'replica_groups=(\{\{.*?\}\}|\[.*?\]<=\S+(?=,)|mesh\[.*?\{.*?\})',
    hlo,
  )
  return [(result, _groups(text)) for result, text in found]


def _groups(text):
  if text.startswith('{'):
    rows = re.findall(r'\{([\d,]+)\}', text)
    return np.array([[int(n) for n in row.split(',')] for row in rows])
  if text.startswith('['):
    shape, order = text.split('<=')
    return _ordered(order).reshape(_numbers(shape))
  axes = re.findall(r"'(\w+)'=(\d+)", text)
  sizes = [int(size) for _, size in axes]
  order = re.search(r'device_ids=\((.*?\)?)\) ', text)
  devices = _ordered(order[1]) if order else np.arange(math.prod(sizes))
  inside = re.findall(r"'(\w+)'", text[text.rindex('{') :])
  names = [name for name, _ in axes]
  across = [names.index(name) for name in inside]
  devices = np.moveaxis(devices.reshape(sizes), across, range(-len(across), 0))
  return devices.reshape(-1, math.prod(sizes[axis] for axis in across))


def _ordered(text):
  """Returns device numbers as `[2,3]T(1,0)` orders them: 0 3 1 4 2 5."""
  shape, *turned = text.split('T')
  sizes = _numbers(shape)
  devices = np.arange(math.prod(sizes)).reshape(sizes)
  return devices.transpose(_numbers(turned[0]) if turned else None).ravel()


def _numbers(text):
  return [int(n) for n in re.findall(r'\d+', text)]


def _kernels(calls):
  memory = _vmem_report() if calls else {}
  for name in calls:
    # Calls with equal bodies are compiled, and listed, once.
    if not list(_DUMP.glob(f'*-{name}-*-packed-bundles-post-ra.txt')):
      continue
    capacity, slots = _slots(
      _one(f'*-{name}-*-final_hlo-static-per-bundle-utilization.txt')
    )
    windows = memory[name]['blocks'][0]['allocations']
    listing = _one(f'*-{name}-*[0-9]-packed-bundles-post-ra.txt')
    yield KernelReport(
      name=name,
      bundles=bundles_by_depth(listing),
      loops=inner_loops(listing),
      slots=slots,
      capacity=capacity,
      vmem_bytes=memory[name]['total_size'],
      window_bytes=sum(map(_window_bytes, windows)),
    )


def _window_bytes(allocation):
  levels = re.search(r'has (\d+) buffering', allocation['tag'])
  return allocation['size'] // int(levels[1]) if levels else 0


def _one(pattern):
  # A kernel compiled twice in one module leaves two identical listings.
  files = sorted(_DUMP.glob(pattern))
  if not files:
    raise RuntimeError(
      f'the compiler left no {pattern}: libtpu was in use before '
      f'{__name__} was imported; set JAX_PLATFORMS=cpu'
    )
  return files[-1].read_text(errors='replace')


def bundles_by_depth(listing: str) -> tuple[int, ...]:
  """Counts the bundles of a listing by loop depth, stalls included."""
  # A stall prints as a bare '{}' without the '>' marks of its loop: it belongs
  # to the depth of the bundle before it.
  counts, depth = [0], 0
  line = re.compile(
    r'^\s*(?:0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2})?\s*:\s*(>*)\s*(\{\s*\}\s*$)?', re.M
  )
  for match in line.finditer(listing):
    if match[2] is None or match[1]:
      depth = len(match[1])
    counts += [0] * (depth + 1 - len(counts))
    counts[depth] += 1
  return tuple(counts)


def inner_loops(listing: str) -> tuple[int, ...]:
  """Counts the bundles of every loop but the outermost, in their order."""
  # A loop is what a branch backwards spans: depths, by which stalls are not
  # marked, do not part two loops that follow each other.
  loops = []
  for match in re.finditer(
    r'^\s*(0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2})?\s*:.*?target bundleno = (\d+)',
    listing,
    re.M,
  ):
    branch, target = int(match[1], 0), int(match[2])
    if target < branch:
      loops.append((target, branch + 1))
  return tuple(
    stop - start
    for start, stop in sorted(loops)
    if any(a < start and stop < b for a, b in loops)
  )


def _slots(listing):
  lines = listing.splitlines()
  names = [name.strip() for name in lines[1].split(',')]
  capacity = dict(zip(names, map(int, lines[2].split()), strict=True))
  used = [0] * len(names)
  for line in lines[4:]:
    used = [a + int(b) for a, b in zip(used, line.split(), strict=True)]
  return capacity, dict(zip(names, used, strict=True))


def _vmem_report():
  # The report is a web page; its data is one JSON object in a script.
  page = _one('*-vmem_report.html')
  data, _ = json.JSONDecoder().raw_decode(
    page, page.index('{', page.index('DATA ='))
  )
  return data['hlo_breakdowns']


_BYTES = {'bf16': 2, 'f32': 4, 's32': 4, 'u32': 4, 's4': 0.5, 'u4': 0.5}
# They name an array that exists already.
_NAMING = ('parameter', 'get-tuple-element', 'tuple', 'bitcast', 'while')


@dataclasses.dataclass(frozen=True)
class Made:
  """An array that an instruction of a module makes, outside of fusions.

  Inside a fusion a copy is only an order of reading.
  """

  opcode: str
  dtype: str
  shape: tuple[int, ...]

  @property
  def size_bytes(self) -> int:
    return int(_BYTES.get(self.dtype, 1) * math.prod(self.shape))

  def __str__(self) -> str:
    return f'{self.dtype}{list(self.shape)} {self.opcode}'


def made(hlo: str) -> collections.abc.Iterator[Made]:
  """Yields what a module's instructions make; of a tuple its first array."""
  fused = set(re.findall(r'fusion\(.*?calls=%?([\w.-]+)', hlo))
  for computation in re.split(r'\n(?=%|ENTRY )', hlo):
    header = re.match(r'%([\w.-]+) ', computation)
    if header and header[1] in fused:
      continue
    for dtype, shape, opcode in re.findall(
      r' = \(*(\w+)\[([\d,]*)\].*? ([a-z][a-z-]*)\(', computation
    ):
      if opcode not in _NAMING:
        yield Made(opcode, dtype, tuple(int(n) for n in shape.split(',') if n))


def large_copies(hlo: str, minimum: int = _MIB) -> list[str]:
  """Returns the copies of at least `minimum` bytes that a module makes."""
  return [
    str(array)
    for array in made(hlo)
    if array.opcode.startswith('copy') and array.size_bytes >= minimum
  ]


def summed(hlo: str) -> collections.abc.Iterator[tuple[str, tuple[int, ...]]]:
  """Yields opcode and sizes of the dimensions over which a module sums.

  Of every dot, convolution and reduction of numbers, fused ones too. What a
  Pallas kernel does inside is not in the module.
  """
  shapes = {
    name: tuple(int(n) for n in shape.split(',') if n)
    for name, shape in re.findall(r'%([\w.-]+) = \(*\w+\[([\d,]*)\]', hlo)
  }
  for dtype, opcode, operands, rest in re.findall(
    r' = \(*(\w+)\[[^\n]*? (dot|convolution|reduce|reduce-window)'
    r'\(([^)]*)\)([^\n]*)',
    hlo,
  ):
    if dtype == 'pred':
      continue
    names = re.findall(r'%([\w.-]+)', operands)
    first, second = shapes[names[0]], shapes[names[1]]
    if opcode == 'convolution':
      labels = re.search(r'dim_labels=(\w+)_(\w+)->', rest)
      assert labels is not None
      # The kernel's output channels are the only ones that are not summed.
      sizes = [n for n, c in zip(second, labels[2], strict=True) if c != 'o']
      sizes += [n for n, c in zip(first, labels[1], strict=True) if c == 'f']
    elif opcode == 'reduce-window':
      window = re.search(r'size=([\dx]+)', rest)
      assert window is not None
      sizes = [int(n) for n in window[1].split('x')]
    else:
      key = 'dimensions' if opcode == 'reduce' else 'lhs_contracting_dims'
      found = re.search(rf'\b{key}={{([\d,]*)}}', rest)
      assert found is not None
      sizes = [first[int(i)] for i in found[1].split(',') if i]
    yield opcode, tuple(sizes)
