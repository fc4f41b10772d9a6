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
* A *tile* is the scores of one group, or of two where there are at most 4 query
  rows (which fills a vector register) or head dim is 64; see `Tile`.
* The grid runs over the (slot, block of tokens) pairs that hold tokens: ragged
  slots waste nothing. A block takes all its KV heads at once; the next block's
  bytes are on their way meanwhile. `few_rows_tpu` and `many_rows_tpu` say what
  is done with a block: up to 8 query rows are bound by bytes, more by issue.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
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
from lynx_jax.pallas_kernels import few_rows_tpu, many_rows_tpu, words
from lynx_jax.pallas_kernels.attention_block_tpu import (
  MASKED,
  Block,
  Packed,
  Side,
  Softmax,
  Tables,
)
from lynx_jax.pallas_kernels.dispatch import Unsupported
from lynx_jax.pallas_kernels.split_attention import gather_groups, page_numbers
from lynx_jax.pallas_kernels.tiles import GROUP, LANES, Tile

# Most query rows a KV head: what compiles within every generation's VMEM.
MOST_ROWS = 128
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
      256 columns of v6e and tpu7x.
    key_dtype: what keys are multiplied as where rows are many: int8, or
      bfloat16 for an MXU that is 256 deep.
    heads_ahead: where rows are many, heads that are scored before the first of
      them is summed over V.
  """

  tokens: int = 4096
  heads: int = 8
  tiles_per_dot: int = 1
  key_dtype: Any = jnp.int8
  heads_ahead: int = 1

  @classmethod
  def default(
    cls, device_kind: str, *, head_dim: int, query_rows: int
  ) -> 'BlockSizes':
    """Returns what was best by compiled costs (`experiments.kernel_costs`)."""
    wide = any(name in device_kind for name in ('v6', '7'))  # 256 x 256 MXU
    if query_rows > 8 and wide:
      fits = head_dim <= LANES and query_rows <= 64  # in VMEM
      return cls(
        tokens=8192 if fits else 4096,
        tiles_per_dot=2,
        key_dtype=jnp.bfloat16,
        heads_ahead=2,
      )
    return cls(tiles_per_dot=2 if wide and head_dim < LANES else 1)

  def ahead(self, heads: int) -> int:
    """Returns `heads_ahead` where a step has a multiple of it, otherwise 1."""
    return self.heads_ahead if heads % self.heads_ahead == 0 else 1

  def __post_init__(self):
    if self.tokens <= 0 or self.tokens % 1024:
      raise ValueError(f'tokens={self.tokens} must be a multiple of 1024')
    for name in ('heads', 'tiles_per_dot', 'heads_ahead'):
      if getattr(self, name) <= 0:
        raise ValueError(f'{name}={getattr(self, name)} must be positive')


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
    Packed(tuple(p for p in x.planes if p is not None), x.scale, x.offset)
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
    return Packed(
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
  table = pltpu.VMEM((step_heads, buffer_groups, LANES), jnp.float32)
  channel_rows = buffer_groups * head_dim // tile.width
  channel = pltpu.VMEM((step_heads, channel_rows, tile.width), jnp.float32)

  def tables(codec):
    return Tables(*[channel if codec.axis is Axis.CHANNEL else table] * 2)

  v_of_channels = v.codec.axis is Axis.CHANNEL
  stage = pltpu.VMEM((step_heads, 2, buffer_groups, head_dim), jnp.float32)
  state = pltpu.VMEM((step_heads, tile.sublanes, LANES), jnp.float32)
  scratch = _Scratch(
    k=buffers(operands[0]),
    v=buffers(operands[1]),
    arrived=pltpu.SemaphoreType.DMA((2, n_copies)),
    tables=(tables(k.codec), tables(v.codec)),
    staging=(stage, stage) if tile.stacked else (None, None),
    rows=many_rows_tpu.scratch_shapes(
      tile, step_heads, buffer_groups, blocks.ahead(step_heads)
    )
    if tile.many
    else few_rows_tpu.scratch_shapes(
      tile, step_heads, buffer_groups, v_of_channels=v_of_channels
    ),
    softmax=Softmax(
      state,
      state,
      pltpu.VMEM((step_heads, tile.sublanes, tile.width), jnp.float32),
    ),
  )
  hbm = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), operands)
  call = pl.pallas_call(
    functools.partial(
      _kernel,
      tile=tile,
      codecs=(k.codec, v.codec),
      groups=buffer_groups,
      attend=functools.partial(
        many_rows_tpu.attend,
        key_dtype=blocks.key_dtype,
        tiles_per_dot=blocks.tiles_per_dot,
      )
      if tile.many
      else functools.partial(
        few_rows_tpu.attend, tiles_per_dot=blocks.tiles_per_dot
      ),
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
    tables, staging: of k and v; see `Side`.
    rows: of `few_rows_tpu` or `many_rows_tpu`.
    softmax: of the slot so far.
  """

  k: Packed
  v: Packed
  arrived: Any
  tables: tuple[Tables, Tables]
  staging: tuple[Any, Any]
  rows: Any
  softmax: Softmax


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
  attend: Callable[..., None],
  sinks: int,
  mixed: bool,
  soft_cap: float | None,
):
  heads, softmax = q_ref.shape[0], scratch.softmax
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
    softmax.top[...] = jnp.full_like(softmax.top, MASKED)
    softmax.mass[...] = jnp.zeros_like(softmax.mass)
    softmax.out[...] = jnp.zeros_like(softmax.out)

  copies(step, start=False)
  sides = [
    Side(
      packed=Packed(
        tuple(p.at[buffer] for p in x.planes),
        x.scale.at[buffer],
        x.offset.at[buffer],
      ),
      codec=codec,
      tables=tables,
      staging=staging,
    )
    for x, codec, tables, staging in zip(
      (scratch.k, scratch.v),
      codecs,
      scratch.tables,
      scratch.staging,
      strict=True,
    )
  ]
  full = None
  if mixed:
    full = scalars.residual_tokens[slot] - block * (groups * GROUP)
    full = jnp.right_shift(full, 7)
  # Positions inside this block from which a query row sees tokens.
  first = None
  if not isinstance(first_ref, tuple):
    first = first_ref[...] - block * (groups * GROUP)

  attend(
    Block(
      tile=tile,
      groups=groups,
      held=held,
      full=full,
      sinks=jnp.where(block == 0, sinks, 0) if sinks else None,
      first=first,
      soft_cap=soft_cap,
      k=sides[0],
      v=sides[1],
    ),
    q_ref,
    softmax,
    scratch.rows,
  )

  @pl.when(tokens <= groups * GROUP)
  def _():
    for h in range(heads):
      top, mass, out = tile.merge(
        softmax.top[h], softmax.mass[h], softmax.out[h]
      )
      some = top > MASKED / 2
      share = jnp.where(some, 1.0 / mass, 0.0)
      out_ref[h] = out * share[:, :1]
      lse = (top + jnp.log2(mass)) * math.log(2)
      lse_ref[h] = jnp.where(some, lse, -jnp.inf)


def _copies(scalars, hbm, scratch, first_head, step, *, start, groups, mixed):
  """Starts the copies of a step's block into its buffer, or waits for them."""
  slot, block, buffer = scalars.slots[step], scalars.blocks[step], step & 1
  heads = pl.ds(first_head, scratch.softmax.top.shape[0])

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
