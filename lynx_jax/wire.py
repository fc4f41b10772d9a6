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

Both programs are compiled for each kind of slice and each power of two of
units (`WireFormat.slice_counts`); slot, layers and positions are traced. They
run on each shard alone.
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

from lynx_jax import kv_cache
from lynx_jax import mesh as mesh_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.kv_cache import Cache, Prefix
from lynx_jax.prefill import Prompt
from lynx_jax.programs import program
from lynx_jax.shapes import Array, Int32
from lynx_jax.transport.streams import (
  TAIL_BLOCK,
  Segment,
  Slice,
  WireFormat,
)

Arrays = tuple[Array | None, ...]
Parts = tuple[Arrays, ...]  # of a slice


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
    prompt: it has split the token chunk; the tail needs all of it.
    token_chunk: of the chunk.
    slices: of the chunk.
    parts: that a slice travels in; a multiple of the prefill side's shards.
  """
  devices = mesh_lib.of(prompt.kv).devices
  size, group = wire.engine.token_chunk, wire.codec.group
  first_group = token_chunk * size // group
  payload = []
  for part in slices:
    base, first, packed = 0, 0, False
    if part.segment is Segment.TAIL:
      kv = prompt.kv[part.layer_group]
      arrays, rows = (kv.k, kv.v), (TAIL_BLOCK,) * 2
      base = prompt.prefix_tokens
    else:
      split = prompt.split[token_chunk][part.layer_group]
      if part.segment is Segment.SINKS:
        arrays = (split.first.k, split.first.v)
        rows = (wire.codec.sinks,) * 2
      else:
        arrays, rows = _prefix_arrays(split.k, split.v, part.plane, group)
        packed, first = isinstance(split.k, PackedTensor), first_group
    cut_parts = _cut_program(rows, 2 if packed else 1, parts // len(devices))(
      arrays,
      np.asarray(part.layers, np.int32),
      np.asarray(part.indices, np.int32) - np.int32(first),
      np.int32(base),
    )
    payload.append(
      tuple(
        jax.tree.map(functools.partial(_on, device), arrays)
        for device, *_ in devices
        for arrays in cut_parts
      )
    )
  return tuple(payload)


def places(mesh: Mesh, parts: int) -> tuple[SingleDeviceSharding, ...]:
  """Returns where each part of a slice goes on a decode side's mesh."""
  count = parts // len(mesh.devices)
  return tuple(
    SingleDeviceSharding(device)
    for device, *_ in mesh.devices
    for _ in range(count)
  )


def destination(mesh: Mesh) -> Callable[[Sequence[Parts]], Any]:
  """Returns the function that says where a payload goes, for a link."""

  def of(payload: Sequence[Parts]) -> Any:
    return tuple(places(mesh, len(parts)) for parts in payload)

  return of


def insert(
  wire: WireFormat, cache: Cache, slot: int, part: Slice, payload: Parts
) -> Cache:
  """Returns the cache with a slice in `slot`.

  The buffers that it changes are donated; the others are passed on. Each part
  of the payload lies where `places` says.
  """
  prefix, tail = cache.prefix[part.layer_group], cache.tail[part.layer_group]
  buffers, rows, axis = _destination(wire, cache, part)
  mesh = mesh_lib.of(buffers)
  filled = _insert_program(rows, axis, mesh_lib.if_several(mesh))(
    buffers,
    _joined(mesh, payload, 1 if axis == 3 else 2),
    np.int32(slot),
    np.asarray(part.layers, np.int32),
    np.asarray(part.indices, np.int32),
  )
  if part.segment is Segment.TAIL:
    tail = dataclasses.replace(tail, k=filled[0], v=filled[1])
  elif part.segment is Segment.SINKS:
    prefix = dataclasses.replace(prefix, sinks_k=filled[0], sinks_v=filled[1])
  else:
    prefix = _with_arrays(prefix, part.plane, filled)
  return Cache(
    _with(cache.prefix, part.layer_group, prefix),
    _with(cache.tail, part.layer_group, tail),
  )


def specs(
  wire: WireFormat, part: Slice, where: Sequence[SingleDeviceSharding]
) -> Any:
  """Returns what the payload of a slice looks like, as `ShapeDtypeStruct`s.

  Args:
    wire: format of the request.
    part: the slice.
    where: each of its parts goes; see `places`.
  """
  buffers, rows, axis = _destination(wire, _abstract_cache(wire), part)
  heads = 2 if axis == 3 else 3

  def one(place, buffer, size):
    if buffer is None:
      return None
    unit = list(buffer.shape)
    unit[axis] = size
    unit[heads] //= len(where)
    return jax.ShapeDtypeStruct(
      (len(part.layers), *unit[2:]), buffer.dtype, sharding=place
    )

  return tuple(
    tuple(map(functools.partial(one, place), buffers, rows)) for place in where
  )


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
    mesh: of the decode side.
    payload: its parts.
    heads: axis of the KV heads.
  """
  if mesh.size == 1:
    return payload
  count = len(payload) // len(mesh.devices)

  def join(*own):
    # Devices with the same heads copy from the first of them.
    copies = [
      jax.device_put(x, device)
      for x, devices in zip(own, mesh.devices, strict=True)
      for device in devices
    ]
    shape = list(own[0].shape)
    shape[heads] *= len(own)
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

  split = PartitionSpec(*[None] * heads, mesh_lib.KV)
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
