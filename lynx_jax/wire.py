# SPDX-License-Identifier: Apache-2.0
"""Cuts slices out of what prefill made, and inserts them into a cache.

It knows no link, no order and no progress: `streams.Slice` says what a slice
is, and this module is the only place that turns one into arrays and back.

The payload of a slice has one row a unit, and `None` where a tensor has no
such plane:

| slice | arrays |
|---|---|
| plane 0 | k, v, k_scale, k_offset, v_scale, v_offset |
| plane p > 0 | k, v |
| dense prefix, sinks, tail | k, v |
| exact | pages of the string |

Pages of an exact string are gathered beside the cache (`gather`), in room for
its longest form, and go into it together, when the planes are there (`merge`).

A slice travels in parts, each with some of the KV heads, from one device to
one device: with p devices that divide the heads on one side and d on the other,
there are lcm(p, d) parts, each within one shard of either side. Two prefill and
three decode shards of 6 heads, for example:

| part | heads | prefill shard | decode shard |
|---|---|---|---|
| 0, 1 | 0, 1 | 0 | 0 |
| 2 | 2 | 0 | 1 |
| 3 | 3 | 1 | 1 |
| 4, 5 | 4, 5 | 1 | 2 |

Where decode's slots are split over rows of devices (`mesh.DATA`), a slice goes
to the row of its slot alone. In a payload that says so itself, the parts of
other rows are empty: for the second of two rows, (), (), part 0, part 1.

Both programs are compiled for each kind of slice and each power of two of
units (`WireFormat.slice_counts`), and `insert` for each row; slot, layers and
positions are traced. They run on each shard alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
  Mesh,
  NamedSharding,
  PartitionSpec,
  SingleDeviceSharding,
)

from lynx_jax import exact, kv_cache
from lynx_jax import mesh as mesh_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.config import CodecConfig, EngineConfig, require
from lynx_jax.kv_cache import Cache, Exact, Prefix
from lynx_jax.prefill import Prompt
from lynx_jax.programs import program
from lynx_jax.shapes import Array, BFloat16, Int32, UInt16
from lynx_jax.transport import digest
from lynx_jax.transport.streams import (
  DENSE_BYTES,
  PAGE_BYTES,
  TAIL_BLOCK,
  Chunk,
  Segment,
  Slice,
  WireFormat,
)

Arrays = tuple[Array | None, ...]
Parts = tuple[Arrays, ...]  # of a slice
Payload = tuple[Parts, ...]  # of a chunk, one entry a slice
String = UInt16[Array, '1 1 pages page']  # one layer, one slot: as a buffer

_PAGE = PAGE_BYTES // DENSE_BYTES  # units of exact.ExactPlane


def check_mesh(codec: CodecConfig, mesh: Mesh) -> None:
  """Raises `ConfigError` unless a side on the mesh can serve the codec.

  A string of the exact plane has all KV heads, and so all must lie together.
  """
  require(
    not codec.exact or mesh.size == 1,
    f'codec.exact=True needs one device a side, not {mesh.size}: a string of '
    'the exact plane holds all KV heads',
  )


def check_rows(codec: CodecConfig, engine: EngineConfig, mesh: Mesh) -> None:
  """Raises `ConfigError` unless slots can be split over a mesh's rows."""
  rows = mesh.shape[mesh_lib.DATA]
  require(
    engine.slots % rows == 0,
    f'engine.slots={engine.slots} must be a multiple of decode_data={rows}: '
    'every row of devices has as many slots',
  )
  require(
    not codec.generated or rows == 1,
    f'codec.generated=True needs decode_data=1, not {rows}: groups of '
    'generated tokens are packed on one row of devices',
  )


def cut(
  wire: WireFormat,
  prompt: Prompt,
  token_chunk: int,
  slices: Iterable[Slice],
  parts: int = 1,
) -> tuple[Parts, ...]:
  """Returns the payload of a chunk, one entry a slice.

  Args:
    wire: format of the request.
    prompt: it has split the token chunk; the tail needs all of it, and the
      exact plane that its string was encoded.
    token_chunk: of the chunk.
    slices: of the chunk.
    parts: that a slice travels in; a multiple of the prefill side's shards.

  Returns:
    The parts that lie in this process.
  """
  mesh = mesh_lib.of(prompt.kv)
  count = parts // mesh.shape[mesh_lib.KV]
  size, group = wire.engine.token_chunk, wire.codec.group
  first_group = token_chunk * size // group
  payload = []
  for part in slices:
    base, first, packed = 0, 0, False
    arrays: tuple[Array | None, ...]
    rows: tuple[int, ...]
    if part.segment is Segment.TAIL:
      kv = prompt.kv[part.layer_group]
      arrays = mesh_lib.own(kv.k), mesh_lib.own(kv.v)
      rows = (TAIL_BLOCK,) * 2
      base = prompt.prefix_tokens
    elif part.segment is Segment.EXACT:
      arrays, rows = (prompt.exact[part.layer_group, token_chunk],), (1,)
    else:
      split = prompt.split[token_chunk][part.layer_group]
      if part.segment is Segment.SINKS:
        arrays = (split.first.k, split.first.v)
        rows = (wire.codec.sinks,) * 2
      else:
        arrays, rows = _prefix_arrays(split.k, split.v, part.plane, group)
        packed, first = isinstance(split.k, PackedTensor), first_group
    cut_parts = _cut_program(rows, 2 if packed else 1, count)(
      arrays,
      np.asarray(part.layers, np.int32),
      np.asarray(part.indices, np.int32) - np.int32(first),
      np.int32(base),
    )
    payload.append(
      tuple(
        jax.tree.map(functools.partial(_on, device), arrays)
        for device in mesh_lib.firsts(mesh_lib.local(mesh))
        for arrays in cut_parts
      )
    )
  return tuple(payload)


def places(mesh: Mesh, parts: int) -> tuple[SingleDeviceSharding, ...]:
  """Returns where each part of a slice goes on a decode side's mesh.

  Args:
    mesh: what lies in this process.
    parts: that go to this process.
  """
  devices = mesh_lib.firsts(mesh)
  count = parts // len(devices)
  return tuple(
    SingleDeviceSharding(device) for device in devices for _ in range(count)
  )


def for_row(payload: Payload, row: int, rows: int) -> Payload:
  """Returns a payload that goes to one of several rows of decode's mesh."""

  def one(parts: Parts) -> Parts:
    none: Parts = ((),) * len(parts)
    return none * row + parts + none * (rows - 1 - row)

  return tuple(map(one, payload))


def destination(mesh: Mesh) -> Callable[[Sequence[Parts]], Any]:
  """Returns the function that says where a payload goes, for a link."""

  def of(payload: Sequence[Parts]) -> Any:
    own = mesh_lib.local(mesh)
    return tuple(places(own, len(parts)) for parts in payload)

  return of


def insert(
  wire: WireFormat, cache: Cache, slot: int, part: Slice, payload: Parts
) -> Cache:
  """Returns the cache with a slice in `slot`.

  The buffers that it changes are donated; the others are passed on. Each part
  of the payload lies where `places` says, for the mesh or for the row of it
  that has the slot.
  """
  prefix, tail = cache.prefix[part.layer_group], cache.tail[part.layer_group]
  buffers, rows, axis = _destination(wire, cache, part)
  count = mesh_lib.of(buffers).shape[mesh_lib.DATA]
  row, place = wire.engine.place(slot, count)

  def fill(mesh, held):
    return _insert_program(rows, axis, mesh_lib.if_several(mesh))(
      held,
      _joined(mesh, payload, 1 if axis == 3 else 2),
      np.int32(place),
      np.asarray(part.layers, np.int32),
      np.asarray(part.indices, np.int32),
    )

  filled = mesh_lib.on_row(row, fill, buffers)
  if part.segment is Segment.TAIL:
    tail = dataclasses.replace(tail, k=filled[0], v=filled[1])
  elif part.segment is Segment.SINKS:
    prefix = dataclasses.replace(prefix, sinks_k=filled[0], sinks_v=filled[1])
  else:
    prefix = _with_arrays(prefix, part.plane, filled)
  return dataclasses.replace(
    cache,
    prefix=_with(cache.prefix, part.layer_group, prefix),
    tail=_with(cache.tail, part.layer_group, tail),
  )


def encode(
  wire: WireFormat, prompt: Prompt, layer_group: int, token_chunk: int
) -> Int32[Array, '']:
  """Encodes an exact string of a prompt; returns how many pages it has.

  Args:
    wire: format of the request.
    prompt: it has split the token chunk.
    layer_group, token_chunk: of the string.
  """
  size, codec = wire.engine.token_chunk, wire.codec
  start = token_chunk * size
  sinks = 0 if token_chunk else codec.sinks
  split = prompt.split[token_chunk][layer_group]
  dense = _rows_program(size)(prompt.kv[layer_group], np.int32(start))
  planes = []
  for x, packed in zip(dense, (split.k, split.v), strict=True):
    assert isinstance(packed, PackedTensor)
    planes.append(exact.encode(x, packed, sinks=sinks))
  string, pages = _join_program(wire.most_pages(layer_group))(
    *planes, np.int32((prompt.prefix_tokens - start) // codec.group)
  )
  prompt.exact[layer_group, token_chunk] = string
  return pages


def gather(
  wire: WireFormat, string: String | None, part: Slice, payload: Parts
) -> String:
  """Returns an exact string with the pages of a slice; it is donated."""
  if string is None:
    ((pages,),) = payload
    assert pages is not None
    shape = (1, 1, wire.most_pages(part.layer_group), _PAGE)
    string = jnp.zeros(shape, jnp.uint16, device=pages.sharding)
  (filled,) = _insert_program((1,), 2, None)(
    (string,),
    payload,
    np.int32(0),
    np.asarray(part.layers, np.int32),
    np.asarray(part.indices, np.int32),
  )
  return filled


def merge(
  wire: WireFormat,
  cache: Cache,
  slot: int,
  layer_group: int,
  token_chunk: int,
  string: String,
  prompt_tokens: int,
) -> Cache:
  """Returns the cache with what an exact string and the planes give.

  Args:
    wire: format of the request.
    cache: it holds all planes of the string's tokens; the exact prefix of the
      layer group is donated.
    slot: of the request.
    layer_group, token_chunk: of the string.
    string: whole.
    prompt_tokens: P.
  """
  codec, size = wire.codec, wire.engine.token_chunk
  prefix, held = cache.prefix[layer_group], cache.exact[layer_group]
  layers, heads, groups = wire.string_blocks(layer_group)
  shape = (layers, heads, groups, codec.group * wire.model.head_dim)
  first = token_chunk * size // codec.group
  end = codec.prefix_end(prompt_tokens) // codec.group
  sinks = 0 if token_chunk else codec.sinks
  planes = _part_program(shape)(string)
  packed = _groups_program(groups)(
    prefix.k, prefix.v, np.int32(slot), np.int32(first)
  )
  values = [
    exact.decode(*both, sinks=sinks)
    for both in zip(packed, planes, strict=True)
  ]
  held = _place_program(codec.group)(
    held, *values, np.int32(slot), np.int32(first), np.int32(end - first)
  )
  return dataclasses.replace(cache, exact=_with(cache.exact, layer_group, held))


def specs(
  wire: WireFormat,
  part: Slice,
  where: Sequence[SingleDeviceSharding],
  parts: int,
) -> Any:
  """Returns what the payload of a slice looks like, as `ShapeDtypeStruct`s.

  Args:
    wire: format of the request.
    part: the slice.
    where: each of the parts goes that come to this process; see `places`.
    parts: of the slice, in all processes.
  """
  if part.segment is Segment.EXACT:
    shape = (len(part.layers), 1, _PAGE)
    return tuple(
      (jax.ShapeDtypeStruct(shape, jnp.uint16, sharding=place),)
      for place in where
    )
  buffers, rows, axis = _destination(wire, _abstract_cache(wire), part)
  heads = 2 if axis == 3 else 3

  def one(place, buffer, size):
    if buffer is None:
      return None
    unit = list(buffer.shape)
    unit[axis] = size
    unit[heads] //= parts
    return jax.ShapeDtypeStruct(
      (len(part.layers), *unit[2:]), buffer.dtype, sharding=place
    )

  return tuple(
    tuple(map(functools.partial(one, place), buffers, rows)) for place in where
  )


class Layouts:
  """What the payloads of chunks look like on one placement.

  Slices of one kind and size look alike, so each is worked out once.

  Args:
    wire, where, parts: as for `specs`; by default all parts come here.
  """

  def __init__(
    self,
    wire: WireFormat,
    where: Sequence[SingleDeviceSharding],
    parts: int | None = None,
  ):
    self._wire, self._where = wire, where
    self._parts = len(where) if parts is None else parts
    self._known: dict[tuple[Any, ...], tuple[digest.Layout, ...]] = {}

  def __call__(self, chunk: Chunk) -> list[tuple[digest.Layout, ...]]:
    return [self.of(part) for part in chunk.slices]

  def of(self, part: Slice) -> tuple[digest.Layout, ...]:
    """Returns the layouts of a slice's parts; see `specs`."""
    key = part.segment, part.plane, part.layer_group, len(part.layers)
    if key not in self._known:
      self._known[key] = tuple(
        map(digest.Layout, specs(self._wire, part, self._where, self._parts))
      )
    return self._known[key]


@functools.cache
def _abstract_cache(wire: WireFormat) -> Cache:
  return jax.eval_shape(
    functools.partial(kv_cache.empty, wire.model, wire.codec, wire.engine)
  )


def _destination(
  wire: WireFormat, cache: Cache, part: Slice
) -> tuple[Any, tuple[int, ...], int]:
  """Returns the buffers of a slice, the rows of a unit in each, their axis."""
  prefix, tail = cache.prefix[part.layer_group], cache.tail[part.layer_group]
  if part.segment is Segment.TAIL:
    return (tail.k, tail.v), (TAIL_BLOCK,) * 2, 2
  if part.segment is Segment.SINKS:
    return (prefix.sinks_k, prefix.sinks_v), (wire.codec.sinks,) * 2, 2
  buffers, rows = _prefix_arrays(
    prefix.k, prefix.v, part.plane, wire.codec.group
  )
  return buffers, rows, 3 if isinstance(prefix.k, PackedTensor) else 2


def _on(device: jax.Device, x: Array) -> Array:
  """Returns the part of an array that lies on a device."""
  if len(x.sharding.device_set) == 1:
    return x
  (shard,) = [s for s in x.addressable_shards if s.device == device]
  return shard.data


def _joined(mesh: Mesh, payload: Parts, heads: int) -> Parts:
  """Returns arrays of the whole mesh, the i-th with each shard's i-th part.

  Args:
    mesh: of the decode side, or a row of it.
    payload: the parts that came to this process, and empty ones.
    heads: axis of the KV heads.
  """
  payload = tuple(arrays for arrays in payload if arrays)
  if mesh.size == 1:
    return payload
  (shards,) = mesh_lib.local(mesh).devices
  count = len(payload) // len(shards)

  def join(*own):
    # Devices with the same heads copy from the first of them.
    copies = [
      jax.device_put(x, device)
      for x, devices in zip(own, shards, strict=True)
      for device in devices
    ]
    shape = list(own[0].shape)
    shape[heads] *= mesh.shape[mesh_lib.KV]
    split = PartitionSpec(*[None] * heads, mesh_lib.KV)
    return jax.make_array_from_single_device_arrays(
      tuple(shape), NamedSharding(mesh, split), copies
    )

  return tuple(
    jax.tree.map(join, *payload[first::count]) for first in range(count)
  )


@functools.cache
def _cut_program(rows: tuple[int, ...], axis: int, parts: int):
  """Compiles: takes `rows[i]` entries along `axis` of array i, a unit."""
  heads = 3 - axis  # the axes of rows and heads are 1 and 2

  def cut(arrays, layers, indices, base):
    def one(x, size):
      if x is None:
        return [None] * parts

      def unit(layer, index):
        start = [jnp.zeros((), jnp.int32)] * x.ndim
        start[0], start[axis] = layer, base + index * size
        shape = (1, *x.shape[1:axis], size, *x.shape[axis + 1 :])
        return jax.lax.dynamic_slice(x, start, shape)[0]

      return jnp.split(jax.vmap(unit)(layers, indices), parts, heads)

    cuts = [one(x, n) for x, n in zip(arrays, rows, strict=True)]
    return tuple(zip(*cuts, strict=True))

  split = PartitionSpec(*[None] * heads, mesh_lib.KV)
  return program(
    functools.partial(
      mesh_lib.on_each_shard,
      cut,
      (split, PartitionSpec(), PartitionSpec(), PartitionSpec()),
      split,
    ),
    name='cut',
  )


@functools.cache
def _insert_program(rows: tuple[int, ...], axis: int, mesh: Mesh | None):
  """Compiles: puts `rows[i]` entries along `axis` of buffer i, a unit."""
  heads = 5 - axis  # the axes of rows and heads are 2 and 3

  def insert(
    buffers,
    payload,
    slot: Int32[Array, ''],
    layers: Int32[Array, 'm'],
    indices: Int32[Array, 'm'],
  ):
    def one(buffer, parts, size):
      if buffer is None:
        return None
      values = jnp.concatenate(parts, heads - 1)

      def unit(i, buffer):
        start = [jnp.zeros((), jnp.int32)] * buffer.ndim
        start[0], start[1], start[axis] = layers[i], slot, indices[i] * size
        return jax.lax.dynamic_update_slice(
          buffer, values[i][None, None], start
        )

      return jax.lax.fori_loop(0, layers.shape[0], unit, buffer)

    parts = zip(*payload, strict=True)
    return tuple(
      one(b, x, n) for b, x, n in zip(buffers, parts, rows, strict=True)
    )

  split = mesh_lib.spec('L B K R Q' if axis == 3 else 'L B S K H')
  part = PartitionSpec(*[None] * (heads - 1), mesh_lib.KV)
  return program(
    functools.partial(
      mesh_lib.on_each_shard,
      insert,
      (split, part, PartitionSpec(), PartitionSpec(), PartitionSpec()),
      split,
    ),
    name='insert',
    donate=(0,),
    out_shardings=mesh_lib.outputs(mesh, split),
  )


@functools.cache
def _rows_program(size: int):
  """Compiles: cuts a token chunk out of a layer group's keys and values."""

  def run(kv, start):
    return tuple(
      jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in (kv.k, kv.v)
    )

  return program(run, name='exact')


@functools.cache
def _join_program(pages: int):
  def run(k, v, groups):
    string, sent = exact.join(k, v, groups, pages=pages, page=_PAGE)
    return string[None], sent

  return program(run, name='exact')


@functools.cache
def _part_program(shape: tuple[int, ...]):
  def run(string: String):
    return exact.part(string[0, 0], shape)

  return program(run, name='exact')


@functools.cache
def _groups_program(count: int):
  """Compiles: takes `count` groups of a slot; behind the last, the last."""

  def run(
    k: PackedTensor,
    v: PackedTensor,
    slot: Int32[Array, ''],
    first: Int32[Array, ''],
  ):
    def cut(packed):
      def one(x):
        *_, rows, lanes = x.shape
        rows //= packed.groups
        parts = []
        for i in range(count):
          group = jnp.minimum(first + i, packed.groups - 1)
          parts.append(
            jax.lax.dynamic_slice(
              x,
              (0, slot, 0, group * rows, 0),
              (x.shape[0], 1, x.shape[2], rows, lanes),
            )
          )
        return jnp.concatenate(parts, axis=3)[:, 0]

      return jax.tree.map(one, packed)

    return cut(k), cut(v)

  return program(run, name='exact')


@functools.cache
def _place_program(size: int):
  """Compiles: puts the first `count` groups of `size` tokens into a slot."""

  def run(
    held: Exact,
    k: BFloat16[Array, 'L C K H'],
    v: BFloat16[Array, 'L C K H'],
    slot: Int32[Array, ''],
    first: Int32[Array, ''],
    count: Int32[Array, ''],
  ):
    def put(i, held):
      def one(buffer, values):
        part = jax.lax.dynamic_slice_in_dim(values, i * size, size, axis=1)
        start = (0, slot, (first + i) * size, 0, 0)
        return jax.lax.dynamic_update_slice(buffer, part[:, None], start)

      return Exact(one(held.k, k), one(held.v, v))

    most = k.shape[1] // size
    return jax.lax.fori_loop(0, jnp.minimum(count, most), put, held)

  return program(run, name='exact', donate=(0,))


def _prefix_arrays(k, v, plane, group):
  """Returns the arrays of a plane, and the rows that a group takes in each."""
  if not isinstance(k, PackedTensor):
    return (k, v), (group, group)
  arrays: list[Array | None] = []
  rows = []
  for packed in (k, v):
    bits = packed.planes[plane] if plane < len(packed.planes) else None
    arrays.append(bits)
    rows.append(0 if bits is None else bits.shape[-2] // packed.groups)
  if plane == 0:
    arrays += [k.scale, k.offset, v.scale, v.offset]
    rows += [1, 1, 1, 1]
  return tuple(arrays), tuple(rows)


def _with_arrays(prefix: Prefix, plane: int, arrays: Arrays) -> Prefix:
  """Puts back what `_prefix_arrays` took."""
  changed: dict[str, Any] = {}
  if not isinstance(prefix.k, PackedTensor):
    changed = {'k': arrays[0], 'v': arrays[1]}
    return dataclasses.replace(prefix, **changed)
  for i, name in enumerate('kv'):
    packed = getattr(prefix, name)
    if plane < len(packed.planes):
      packed = dataclasses.replace(
        packed, planes=_with(packed.planes, plane, arrays[i])
      )
    if plane == 0:
      scale, offset = arrays[2 + 2 * i : 4 + 2 * i]
      packed = dataclasses.replace(packed, scale=scale, offset=offset)
    changed[name] = packed
  return dataclasses.replace(prefix, **changed)


def _with(items: tuple, index: int, item) -> tuple:
  return (*items[:index], item, *items[index + 1 :])
