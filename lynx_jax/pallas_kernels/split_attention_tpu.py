# SPDX-License-Identifier: Apache-2.0
"""TPU kernel of `split_attention`: flash decoding on packed planes.

It knows no cache and no model; `split_attention` is its meaning.

How the work is laid out:

* The centred codes of a group are an int8 matrix [channel, token], made from
  the planes by masks and shifts of whole 32-bit words; no value is dequantised.
  Scales and offsets are folded into the query and into the output.
* The MXU multiplies int8. A query row, and a row of softmax weights, goes in as
  two int8 digits (`tiles.digits`): 16-bit operands, and up to 16 rows cost the
  MXU no more than one.
* A *tile* is what one vector register of scores holds: two groups where there
  are at most 4 query rows (or head dim is 64), one group otherwise; see
  `Tile`. Every row of every tile has its own maximum, so that weights far
  below a slot's maximum (all but an attention sink's) keep their 16 bits.
* Many rows (a verification of 16 tokens x 4 heads is 64) are bound by issue,
  not by bytes: on v5e at head dim 128 a group of a head takes 112 bundles, 69
  would hide behind its bytes. Its 315 vector operations alone fill 79 bundles
  of four slots, its 25 lane reductions 67; the three MXU products take a
  quarter of their slots. Sums by way of the MXU instead of lane reductions
  (169 bundles), of the keys' bias too (396), int8 operands for V (126) and
  other runs, lags and head counts were no better: the MXU's results come in
  order, and every tile waits for them. Compiled, not measured.
* The grid runs over the (slot, block of tokens) pairs that hold tokens: ragged
  slots waste nothing. A block takes all its KV heads at once, in two phases:
  scores and weights of every tile, then their sums over V. The next block's
  bytes are on their way meanwhile.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lynx_jax import codec as codec_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.config import Axis, Rotation, TensorCodec
from lynx_jax.pallas_kernels import tiles, words
from lynx_jax.pallas_kernels.dispatch import Unsupported
from lynx_jax.pallas_kernels.split_attention import gather_groups, page_numbers
from lynx_jax.pallas_kernels.tiles import GROUP, LANES, LIMIT, Tile

# Most query rows a KV head: what compiles within every generation's VMEM.
MOST_ROWS = 128
# Stands for -inf: exp2 of a difference of two of them is 1, not NaN.
_MASKED = -1e30
# The compiler's default, 16 MiB on some generations, is a quarter of the least
# there is.
_VMEM_LIMIT_BYTES = 48 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
  """What one grid step takes.

  Attributes:
    tokens: of a slot; a multiple of 1024.
    heads: KV heads; fewer where a cache has fewer.
    tiles_per_dot: tiles (see `Tile`) that share an MXU product; 2 fills the
      256 columns of v6e and tpu7x at head dim 64.
    run: groups that are scored together, then summed; a multiple of the
      tile's groups. None is a step's all.
    lag: runs scored before the first is summed; None is a step's all.
  """

  tokens: int = 4096
  heads: int = 8
  tiles_per_dot: int = 1
  run: int | None = None
  lag: int | None = None

  @classmethod
  def default(
    cls, device_kind: str, *, head_dim: int, query_rows: int
  ) -> 'BlockSizes':
    """Returns what was best by compiled costs (`experiments.kernel_costs`)."""
    wide = any(name in device_kind for name in ('v6', '7'))  # 256 x 256 MXU
    if query_rows > 8:
      # Tiles are many registers each: few at a time, or they spill.
      run = 8
      if not wide and query_rows > 32:
        run = {64: 2, 128: 4 if query_rows <= 48 else 3}.get(head_dim, 4)
      return cls(heads=1, run=run, lag=1)
    return cls(tiles_per_dot=2 if wide and head_dim < LANES else 1)

  def __post_init__(self):
    if self.tokens <= 0 or self.tokens % 1024:
      raise ValueError(f'tokens={self.tokens} must be a multiple of 1024')
    if self.heads <= 0:
      raise ValueError(f'heads={self.heads} must be positive')


class _Packed(NamedTuple):
  """Planes, scale and offset: HBM refs, or VMEM buffers of two blocks."""

  planes: tuple[Any, ...]
  scale: Any
  offset: Any


def split_attention_tpu(
  q,
  k: PackedTensor,
  v: PackedTensor,
  *,
  layer,
  prefix_tokens,
  residual_tokens=None,
  sinks: int = 0,
  logits_scale: float,
  soft_cap: float | None = None,
  first_tokens=None,
  block_table=None,
  block_sizes: BlockSizes | None = None,
  interpret: bool = False,
):
  """Runs the kernel; see `split_attention` for what is not said here.

  Args:
    block_sizes: None takes a default that suits every generation.
    interpret: runs in Pallas's interpreter.

  Raises:
    Unsupported: the nearest shape that works is in the message.
  """
  batch, rows, heads, head_dim = q.shape
  kv_heads = k.scale.shape[2]
  per_head = heads // kv_heads
  if rows * per_head > MOST_ROWS:
    raise Unsupported(
      f'{rows} rows of {per_head} query heads a KV head: at most '
      f'{MOST_ROWS // per_head} rows ({MOST_ROWS} in all)'
    )
  if sinks > GROUP:
    raise Unsupported(f'sinks={sinks}: at most {GROUP}, the first group')
  if not interpret:
    words.check_device()
  blocks = block_sizes or BlockSizes.default(
    jax.devices()[0].device_kind,
    head_dim=head_dim,
    query_rows=rows * per_head,
  )
  for name, packed in (('k', k), ('v', v)):
    read = packed.codec.planes[: packed.depth]
    words.check_planes(name, read, head_dim, packed.group)
  tile = Tile.of(rows * per_head, head_dim)
  step_groups = words.groups_per_step(k.groups, blocks.tokens // GROUP)
  if blocks.run is not None and blocks.run % tile.pack:
    raise ValueError(f'run={blocks.run} must be a multiple of {tile.pack}')
  # An odd number is one step, whose last tile has a group that is never held.
  buffer_groups = -(-step_groups // tile.pack) * tile.pack
  step_heads = max(n for n in range(1, blocks.heads + 1) if kv_heads % n == 0)
  step_tokens = step_groups * GROUP

  q = q.astype(jnp.float32) * np.float32(logits_scale * math.log2(math.e))
  q = q.reshape(batch, rows, kv_heads, per_head, head_dim)
  q = jnp.moveaxis(q, 1, 2).reshape(batch, kv_heads, -1, head_dim)
  if k.codec.rotation is Rotation.HADAMARD:
    q = codec_lib.rotate(q)
  spare = tile.rows - rows * per_head
  q = tile.arrange(jnp.pad(q, ((0, 0), (0, 0), (0, spare), (0, 0))))

  prefix_tokens = prefix_tokens.astype(jnp.int32)
  if residual_tokens is None:
    residual_tokens = prefix_tokens
    mixed = False
  else:
    mixed = k.depth > 1 or v.depth > 1
  first = None
  if first_tokens is not None:
    first = jnp.min(first_tokens, 1) // step_tokens
  steps, slot, block = schedule(
    prefix_tokens, step_tokens, k.groups // step_groups, first
  )
  operands = tuple(
    _Packed(tuple(p for p in x.planes if p is not None), x.scale, x.offset)
    for x in (k, v)
  )
  layer = jnp.asarray(layer, jnp.int32).reshape(1)
  pages = None
  if block_table is not None:
    # Scales are too small for a copy of their own each.
    page = page_numbers(block_table)
    operands = tuple(
      x._replace(
        scale=gather_groups(x.scale[layer[0]], page)[None],
        offset=gather_groups(x.offset[layer[0]], page)[None],
      )
      for x in operands
    )
    pages = page // k.groups, page % k.groups
  scalars = _Scalars(
    layer,
    slot,
    block,
    prefix_tokens,
    residual_tokens.astype(jnp.int32),
    pages,
  )

  def buffers(packed):
    def buffer(x, groups):
      rows = groups * x.shape[3] // k.groups
      return pltpu.VMEM((2, step_heads, rows, x.shape[4]), x.dtype)

    # A DMA fills whole tiles or whole buffers, so scales have no spare row.
    return _Packed(
      tuple(buffer(plane, buffer_groups) for plane in packed.planes),
      buffer(packed.scale, step_groups),
      buffer(packed.offset, step_groups),
    )

  def per_slot(*shape):
    return pl.BlockSpec(
      (None, step_heads, *shape),
      lambda h, i, scalars: (scalars.slots[i], h, 0, 0),
    )

  firsts: Any = ()
  first_spec: Any = ()
  if first_tokens is not None:
    firsts = jnp.repeat(first_tokens.astype(jnp.int32), per_head, 1)
    firsts = jnp.pad(firsts, ((0, 0), (0, spare)))
    firsts = jnp.tile(firsts[:, :, None], (1, tile.pack, LANES))
    first_spec = pl.BlockSpec(
      (None, tile.sublanes, LANES),
      lambda h, i, scalars: (scalars.slots[i], 0, 0),
    )

  n_copies = len(jax.tree.leaves(operands))
  n_tiles = buffer_groups // tile.pack
  state = (step_heads, tile.sublanes, LANES)
  per_tile = pltpu.VMEM((step_heads, n_tiles, *state[1:]), jnp.float32)
  table = pltpu.VMEM((step_heads, buffer_groups, LANES), jnp.float32)
  channel_rows = buffer_groups * head_dim // tile.width
  channel = pltpu.VMEM((step_heads, channel_rows, tile.width), jnp.float32)
  scratch = _Scratch(
    k=buffers(operands[0]),
    v=buffers(operands[1]),
    arrived=pltpu.SemaphoreType.DMA((2, n_copies)),
    k_scale=channel if k.codec.axis is Axis.CHANNEL else table,
    k_bias=channel if k.codec.axis is Axis.CHANNEL else table,
    v_scale=channel if v.codec.axis is Axis.CHANNEL else table,
    v_bias=channel if v.codec.axis is Axis.CHANNEL else table,
    v_unit=table if v.codec.axis is Axis.TOKEN else None,
    staging=pltpu.VMEM((step_heads, 4, buffer_groups, head_dim), jnp.float32)
    if tile.stacked
    else None,
    weights=pltpu.VMEM(
      (step_heads, n_tiles, tile.sublanes, LANES), jnp.bfloat16
    )
    if tile.many
    else pltpu.VMEM((step_heads, n_tiles, 2 * tile.sublanes, LANES), jnp.int8),
    tops=per_tile,
    masses=per_tile,
    shifts=per_tile if v.codec.axis is Axis.TOKEN else None,
    top=pltpu.VMEM(state, jnp.float32),
    mass=pltpu.VMEM(state, jnp.float32),
    out=pltpu.VMEM((step_heads, tile.sublanes, tile.width), jnp.float32),
  )
  hbm = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), operands)
  call = pl.pallas_call(
    functools.partial(
      _kernel,
      tile=tile,
      codecs=(k.codec, v.codec),
      groups=buffer_groups,
      blocks=blocks,
      sinks=sinks,
      mixed=mixed,
      soft_cap=None if soft_cap is None else soft_cap * math.log2(math.e),
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(kv_heads // step_heads, steps),
      in_specs=[per_slot(tile.sublanes, tile.width), first_spec, *hbm],
      out_specs=[per_slot(tile.rows, head_dim), per_slot(tile.rows, LANES)],
      scratch_shapes=[scratch],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((batch, kv_heads, tile.rows, n), jnp.float32)
      for n in (head_dim, LANES)
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      disable_bounds_checks=True,
      vmem_limit_bytes=_VMEM_LIMIT_BYTES,
    ),
    interpret=interpret,
    name='split_attention',
  )

  @jax.jit
  def attend(*args):
    return call(*args[:-2], *(args[-2:] if interpret else _in_hbm(args[-2:])))

  out, lse = attend(scalars, q, firsts, *operands)

  seen = prefix_tokens > 0
  if first_tokens is not None:
    seen &= jnp.min(first_tokens, 1) < prefix_tokens
  held = seen[:, None, None, None]  # what no step visits was never written
  out, lse = jnp.where(held, out, 0.0), jnp.where(held, lse, -jnp.inf)
  if v.codec.rotation is Rotation.HADAMARD:
    out = codec_lib.rotate(out)

  def rows_first(x):
    x = x[:, :, : rows * per_head]
    x = x.reshape(batch, kv_heads, rows, per_head, x.shape[-1])
    return jnp.moveaxis(x, 2, 1).reshape(batch, rows, heads, -1)

  return rows_first(out), rows_first(lse)[..., 0]


def _in_hbm(operands):
  """Keeps XLA from copying a small cache to VMEM ahead of the kernel."""
  return jax.tree.map(
    lambda x: pltpu.with_memory_space_constraint(x, pltpu.HBM), operands
  )


def schedule(prefix_tokens, step_tokens, blocks, first=None):
  """Lists the (slot, block) pairs that hold tokens, slot by slot.

  A slot's blocks below `first` (None: 0) are left out.

  With blocks of 2048 tokens and prefix_tokens = [4096, 0, 128]:

  | step | slot | block |
  |---|---|---|
  | 0 | 0 | 0 |
  | 1 | 0 | 1 |
  | 2 | 2 | 0 |
  """
  count = -(-prefix_tokens // step_tokens)
  first = jnp.zeros_like(count) if first is None else jnp.minimum(first, count)
  end = jnp.cumsum(count - first)
  step = jnp.arange(len(prefix_tokens) * blocks, dtype=jnp.int32)
  slot = jnp.sum(step[:, None] >= end[None], 1).astype(jnp.int32)
  slot = jnp.minimum(slot, len(prefix_tokens) - 1)
  block = jnp.maximum(step - (end - count)[slot], 0)
  return end[-1], slot, block


class _Scalars(NamedTuple):
  """What the kernel and its index maps read from SMEM.

  Attributes:
    layer: [1].
    slots, blocks: of every step.
    prefix_tokens, residual_tokens: [B].
    pages: (slot, group) [B, S / Q] of a block table.
  """

  layer: Any
  slots: Any
  blocks: Any
  prefix_tokens: Any
  residual_tokens: Any
  pages: tuple[Any, Any] | None


class _Scratch(NamedTuple):
  """What a step keeps in VMEM.

  Attributes:
    k, v: two blocks each, one being read and one arriving.
    arrived: DMA semaphores, per buffer and operand.
    k_scale, k_bias, v_scale, v_bias: value = bias + scale * code byte.
    v_unit: undoes the scaling of weights (Axis.TOKEN).
    weights, tops, masses: of every tile, from the scores to the sums.
    top, mass, out: the softmax so far: maximum, sum of weights, sum of V.
  """

  k: Any
  v: Any
  arrived: Any
  k_scale: Any
  k_bias: Any
  v_scale: Any
  v_bias: Any
  v_unit: Any
  staging: Any
  weights: Any
  tops: Any
  masses: Any
  shifts: Any
  top: Any
  mass: Any
  out: Any


def _kernel(
  scalars,
  q_ref,
  first_ref,
  k_hbm,
  v_hbm,
  out_ref,
  lse_ref,
  scratch,
  *,
  tile: Tile,
  codecs: tuple[TensorCodec, TensorCodec],
  groups: int,
  blocks: BlockSizes,
  sinks: int,
  mixed: bool,
  soft_cap: float | None,
):
  heads = q_ref.shape[0]
  step, steps = pl.program_id(1), pl.num_programs(1)
  slot, block = scalars.slots[step], scalars.blocks[step]
  buffer = step & 1
  tokens = scalars.prefix_tokens[slot] - block * (groups * GROUP)
  held = lax.shift_right_logical(tokens, np.int32(7))
  copies = functools.partial(
    _copies,
    scalars,
    (k_hbm, v_hbm),
    scratch,
    pl.program_id(0) * heads,
    groups=groups,
    mixed=mixed,
  )

  # One loop starts both the first block's copies and the next block's, so that
  # their scalar code stands, and is counted, once.
  lax.fori_loop(
    jnp.where(step == 0, 0, step + 1),
    jnp.minimum(step + 2, steps),
    lambda n, _: copies(n, start=True),
    None,
  )

  @pl.when((step == 0) | (scalars.slots[jnp.maximum(step - 1, 0)] != slot))
  def _():
    scratch.top[...] = jnp.full_like(scratch.top, _MASKED)
    scratch.mass[...] = jnp.zeros_like(scratch.mass)
    scratch.out[...] = jnp.zeros_like(scratch.out)

  copies(step, start=False)
  k, v = (
    _Packed(
      tuple(p.at[buffer] for p in x.planes),
      x.scale.at[buffer],
      x.offset.at[buffer],
    )
    for x in (scratch.k, scratch.v)
  )
  full = None
  if mixed:
    full = scalars.residual_tokens[slot] - block * (groups * GROUP)
    full = jnp.right_shift(full, 7)
  # Positions inside this block from which a query row sees tokens.
  first = None
  if not isinstance(first_ref, tuple):
    first = first_ref[...] - block * (groups * GROUP)

  queries = [
    _prepare(h, q_ref, k, v, scratch, tile, codecs, held, full)
    for h in range(heads)
  ]
  together = blocks.tiles_per_dot * tile.pack
  run = min(blocks.run or groups, groups)
  runs = [
    (h, range(g, min(g + run, groups)))
    for h in range(heads)
    for g in range(0, groups, run)
  ]

  def weigh(h, run):
    for g in run[::together]:
      _weigh(
        h,
        range(g, min(g + together, run.stop), tile.pack),
        queries[h],
        k,
        scratch,
        tile=tile,
        codec=codecs[0],
        v_axis=codecs[1].axis,
        held=held,
        full=full,
        sinks=jnp.where(block == 0, sinks, 0) if sinks and g == 0 else None,
        first=first,
        soft_cap=soft_cap,
      )

  lag = len(runs) if blocks.lag is None else blocks.lag
  for n in range(len(runs) + lag):
    if n < len(runs):
      weigh(*runs[n])
    if 0 <= n - lag < len(runs):
      _accumulate(*runs[n - lag], v, scratch, tile, codecs[1], full, together)

  @pl.when(tokens <= groups * GROUP)
  def _():
    for h in range(heads):
      top, mass, out = tile.merge(
        scratch.top[h], scratch.mass[h], scratch.out[h]
      )
      some = top > _MASKED / 2
      share = jnp.where(some, 1.0 / mass, 0.0)
      out_ref[h] = out * share[:, :1]
      lse = (top + jnp.log2(mass)) * math.log(2)
      lse_ref[h] = jnp.where(some, lse, -jnp.inf)


def _copies(scalars, hbm, scratch, first_head, step, *, start, groups, mixed):
  """Starts the copies of a step's block into its buffer, or waits for them."""
  slot, block, buffer = scalars.slots[step], scalars.blocks[step], step & 1
  heads = pl.ds(first_head, scratch.top.shape[0])

  def copy(source, target, n, is_plane):
    rows = target.shape[2] // groups
    size = min(target.shape[2], source.shape[3])

    def part(slot, row, size, at):
      # Gathered scales are of one layer.
      layer = scalars.layer[0] if source.shape[0] > 1 else 0
      dma = pltpu.make_async_copy(
        source.at[layer, slot, heads, pl.ds(row, size)],
        target.at[buffer, :, pl.ds(at, size)],
        scratch.arrived.at[buffer, n],
      )
      dma.start() if start else dma.wait()

    if scalars.pages is None or not is_plane:
      # A whole capacity need not be whole tiles.
      whole = size == source.shape[3]
      part(slot, 0 if whole else pl.multiple_of(block * size, size), size, 0)
      return

    def page(i, _):
      slots, rows_of = scalars.pages
      row = pl.multiple_of(rows_of[slot, block * groups + i] * rows, rows)
      at = pl.multiple_of(i * rows, rows)
      part(slots[slot, block * groups + i], row, rows, at)

    lax.fori_loop(0, size // rows, page, None)

  n = 0
  for source, target in zip(hbm, (scratch.k, scratch.v), strict=True):
    pairs = list(zip(source.planes, target.planes, strict=True))
    for depth, pair in enumerate(pairs):
      later = functools.partial(copy, *pair, n + depth, True)
      if mixed and depth > 0:
        # No byte is read where no group has its Residual.
        least = block * (groups * GROUP) + GROUP
        pl.when(scalars.residual_tokens[slot] >= least)(later)
      else:
        later()
    n += len(pairs)
    copy(source.scale, target.scale, n, False)
    copy(source.offset, target.offset, n + 1, False)
    n += 2


def _prepare(h, q_ref, k, v, scratch, tile, codecs, held, full):
  """Fills the tables of one head; returns q as (plain, for digits, unit)."""

  def table(packed, codec, staging):
    size = packed.scale.shape[1:]
    group = lax.broadcasted_iota(jnp.int32, size, 0)
    scale = jnp.where(group < held, packed.scale[h].astype(jnp.float32), 0.0)
    offset = jnp.where(group < held, packed.offset[h].astype(jnp.float32), 0.0)
    depth = len(packed.planes)
    middle = _middle(codec, depth)
    if full is not None:
      middle = jnp.where(group < full, middle, _middle(codec, 1))
    # The code byte is the code moved to the top of 8 bits.
    tables: tuple[jax.Array, ...] = (
      scale * 2.0 ** (codec.bits - 8),
      offset + scale * middle,
    )
    if size[0] % tile.pack:
      spare = jnp.zeros((1, size[1]), jnp.float32)
      tables = tuple(jnp.concatenate([x, spare], 0) for x in tables)
    if codec.axis is Axis.CHANNEL:
      tables = tuple(map(tile.channel_rows, tables, staging))
    return tables

  q = q_ref[h]
  staging = [None] * 4
  if tile.stacked:
    staging = [scratch.staging.at[h, n] for n in range(4)]
  scale, scratch.k_bias[h] = table(k, codecs[0], staging[:2])
  scratch.k_scale[h] = scale
  size = jnp.abs(q)
  if codecs[0].axis is Axis.CHANNEL:
    largest = jnp.max(scale, axis=0, keepdims=True)
    size = size * largest
  size = jnp.max(size, axis=1, keepdims=True)
  size = jnp.maximum(size, np.float32(1e-30))

  scale, scratch.v_bias[h] = table(v, codecs[1], staging[2:])
  if codecs[1].axis is Axis.CHANNEL:
    scratch.v_scale[h] = scale if tile.many else scale * (1 / LIMIT)
  else:
    largest = jnp.max(scale, axis=1, keepdims=True)
    largest = jnp.maximum(largest, np.float32(1e-30))
    scratch.v_scale[h] = scale * (LIMIT / largest)
    scratch.v_unit[h] = jnp.broadcast_to(largest * (1 / LIMIT), scale.shape)
  return q, q * (LIMIT / size), size * (1 / LIMIT)


def _weigh(
  h,
  gs,
  query,
  k,
  scratch,
  *,
  tile,
  codec,
  v_axis,
  held,
  full,
  sinks,
  first,
  soft_cap,
):
  """Scores tiles and stores their weights, these' maxima and sums."""
  q, fine, unit = query
  size = (tile.sublanes, GROUP)
  digits, codes = [], []
  for g in gs:
    scaled = fine
    if codec.axis is Axis.CHANNEL:
      scaled = fine * tile.channels(scratch.k_scale, h, g)
    digits.append(tiles.digits(scaled))
    code = _codes(h, g, k.planes, codec, tile, full)
    codes.append(jnp.concatenate(code, 0 if tile.stacked else 1))
  for g, dot in zip(gs, tiles.products(digits, codes, 1), strict=True):
    score = tiles.join(dot, tile, GROUP)
    if codec.axis is Axis.CHANNEL:
      bias = q * tile.channels(scratch.k_bias, h, g)
      score = score * unit + jnp.sum(bias, 1, keepdims=True)
    else:
      score = score * (unit * tile.tokens(scratch.k_scale, h, g))
      bias = tile.tokens(scratch.k_bias, h, g)
      score += jnp.sum(q, 1, keepdims=True) * bias
    if soft_cap is not None:
      score = soft_cap * jnp.tanh(score * (1 / soft_cap))
    group = tile.per_group([g + i for i in range(tile.pack)])
    score = jnp.where(group < held, score, _MASKED)
    lane = lax.broadcasted_iota(jnp.int32, size, 1)
    if first is not None:
      score = jnp.where(group * GROUP + lane < first, _MASKED, score)
    if sinks is not None and g == 0:
      score = jnp.where((lane < sinks) & (group == 0), _MASKED, score)
    top = jnp.max(score, 1, keepdims=True)
    weight = jnp.exp2(score - top)
    n = g // tile.pack
    if v_axis is Axis.CHANNEL:
      scratch.weights[h, n] = _operand(
        weight if tile.many else weight * LIMIT, tile
      )
    else:
      fine_weight = weight * tile.tokens(scratch.v_scale, h, g)
      scratch.weights[h, n] = _operand(fine_weight, tile)
      shift = weight * tile.tokens(scratch.v_bias, h, g)
      shift = jnp.sum(shift, 1, keepdims=True)
      scratch.shifts[h, n] = jnp.broadcast_to(shift, size)
    mass = jnp.sum(weight, 1, keepdims=True)
    scratch.tops[h, n] = jnp.broadcast_to(top, size)
    scratch.masses[h, n] = jnp.broadcast_to(mass, size)


def _accumulate(h, run, v, scratch, tile, codec, full, together):
  """Adds a run of one head's tiles to its softmax."""
  tops = {g: scratch.tops[h, g // tile.pack] for g in run[:: tile.pack]}
  before = scratch.top[h]
  top = functools.reduce(jnp.maximum, tops.values(), before)
  rest = jnp.exp2(before - top)
  mass, out = scratch.mass[h] * rest, scratch.out[h] * tile.spread(rest)
  for g in run[::together]:
    gs = range(g, min(g + together, run.stop), tile.pack)
    weights = [scratch.weights[h, g // tile.pack] for g in gs]
    codes = [
      jnp.concatenate(_codes(h, g, v.planes, codec, tile, full), 0) for g in gs
    ]
    if tile.many:
      codes = [code.astype(jnp.bfloat16) for code in codes]
    for g, dot in zip(gs, tiles.products(weights, codes, 0), strict=True):
      n = g // tile.pack
      tile_mass = scratch.masses[h, n]
      value = tiles.join(dot, tile, tile.head_dim)
      if codec.axis is Axis.CHANNEL:
        value = value * tile.channels(scratch.v_scale, h, g)
        value += tile.spread(tile_mass) * tile.channels(scratch.v_bias, h, g)
      else:
        value = value * tile.spread(tile.tokens(scratch.v_unit, h, g))
        value += tile.spread(scratch.shifts[h, n])
      share = jnp.exp2(tops[g] - top)
      mass += tile_mass * share
      out += value * tile.spread(share)
  scratch.top[h], scratch.mass[h], scratch.out[h] = top, mass, out


def _middle(codec, depth):
  """Returns u where the code byte is 0: the midpoint of what is unread."""
  below = codec.bits - sum(codec.planes[:depth])
  return 2.0 ** (codec.bits - 1) + (2.0**below - 1) / 2


def _operand(weight, tile):
  """Returns weights as the MXU takes them."""
  return weight.astype(jnp.bfloat16) if tile.many else tiles.digits(weight)


def _codes(h, g, planes, codec, tile, full):
  """Returns the int8 code bytes [H, Q] of every group of a tile."""
  return [_code(h, g + i, planes, codec, tile, full) for i in range(tile.pack)]


def _code(h, g, planes, codec, tile, full):
  plane_words = []
  for ref, width in zip(planes, codec.planes, strict=False):
    rows = codec_lib.rows_per_group(width, tile.head_dim)
    bytes_ = ref[h, pl.ds(g * rows, rows), :]
    plane_words.append(pltpu.bitcast(bytes_, jnp.int32))
  only_first = None if full is None else g >= full
  code = words.code_bytes(plane_words, codec.planes, only_first)
  return pltpu.bitcast(code, jnp.int8)
