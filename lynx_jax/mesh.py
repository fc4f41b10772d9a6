# SPDX-License-Identifier: Apache-2.0
"""Meshes of devices, and the one table that says which axes they split.

It knows no model code, no cache and no transfer. An axis is named by its
letter in `shapes`:

| axis | is split over |
|---|---|
| B, batch slots | `data` |
| K, key/value heads | `kv` |
| N, query heads | `kv`, `replica` |
| F, feed-forward | `kv`, `replica` |
| V, vocabulary, where the devices divide it | `kv`, `replica` |

All others are on every device. A side, prefill or decode, has a mesh of its
own. With as many devices as KV heads or fewer, `replica` has size 1; with more,
each KV head lies on several devices, which share its query heads. Both together
are what is called the model axis elsewhere: tensor parallelism. A *row* of
`data` has the whole model and some of decode's slots; prefill has one row.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lynx_jax.config import ModelConfig, require

DATA, KV, REPLICA = 'data', 'kv', 'replica'
RULES = {
  'B': DATA,
  'K': KV,
  'N': (KV, REPLICA),
  'F': (KV, REPLICA),
  'V': (KV, REPLICA),
}


def make(
  devices: Sequence[jax.Device], model: ModelConfig, data: int = 1
) -> Mesh:
  """Returns the mesh of one side.

  Eight devices in one row and 32 query heads, for example:

  | KV heads | kv | replica | a device has |
  |---|---|---|---|
  | 8 | 8 | 1 | 1 KV head, its 4 query heads |
  | 2 | 2 | 4 | 1 KV head, 4 of its 16 query heads |
  | 16 | 8 | 1 | 2 KV heads, their 2 query heads each |

  Args:
    devices: row after row.
    model: whose heads they divide.
    data: how many rows they make.

  Raises:
    ConfigError: the devices of a row cannot divide the model's heads.
  """
  require(
    data > 0 and len(devices) % data == 0,
    f'{len(devices)} devices cannot make {data} equal rows of data',
  )
  count, heads = len(devices) // data, model.kv_heads
  kv = math.gcd(count, heads)
  replicas = count // kv
  able = [n for n in range(1, model.heads + 1) if _divides(n, model)]
  require(
    _divides(count, model),
    f'{count} devices cannot divide {model.name}: {heads} KV heads, '
    f'{model.heads} query heads, feed-forward {model.ff_dim}; '
    f'{", ".join(map(str, able))} can',
  )
  return Mesh(
    np.array(devices).reshape(data, kv, replicas), (DATA, KV, REPLICA)
  )


def _divides(count: int, model: ModelConfig) -> bool:
  kv = math.gcd(count, model.kv_heads)
  # Replicas share the query heads of one KV head, never of several.
  return (
    count > 0
    and kv in (count, model.kv_heads)
    and model.heads % count == 0
    and model.ff_dim % count == 0
  )


def of(tree: Any) -> Mesh:
  """Returns the mesh on which the arrays of a tree lie."""
  return of_sharding(jax.tree.leaves(tree)[0].sharding)


@functools.cache
def of_sharding(sharding: Sharding) -> Mesh:
  """Returns the mesh of a place; that of one device is made here."""
  if isinstance(sharding, NamedSharding):
    assert isinstance(sharding.mesh, Mesh)
    return sharding.mesh
  (device,) = sharding.device_set
  return Mesh(np.full((1, 1, 1), device, object), (DATA, KV, REPLICA))


def spec(axes: str) -> PartitionSpec:
  """Returns how an array is split, given its axes: 'B T N H'."""
  return PartitionSpec(*(RULES.get(axis) for axis in axes.split()))


def place(mesh: Mesh, spec: PartitionSpec) -> Sharding:
  """Returns where an array so split lies."""
  if mesh.size == 1:
    return jax.sharding.SingleDeviceSharding(*mesh.devices.flat)
  return NamedSharding(mesh, spec)


def if_several(mesh: Mesh) -> Mesh | None:
  """Returns the mesh as programs know it: None is any single device.

  So one function serves all of them.
  """
  return mesh if mesh.size > 1 else None


def outputs(mesh: Mesh | None, specs: Any) -> Any:
  """Returns `specs` as `program` takes them, for a mesh of `if_several`.

  On several devices a program that donates must say where its results lie.
  Otherwise XLA pairs donated buffers with results by their size alone, and
  copies where it pairs the wrong ones (jax 0.10.2).
  """
  if mesh is None:
    return None
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def firsts(mesh: Mesh) -> list[jax.Device]:
  """Returns the first device of each shard of KV heads, row after row."""
  return [*mesh.devices[:, :, 0].flat]


@functools.cache
def row(mesh: Mesh, index: int) -> Mesh:
  """Returns a row of a mesh's data axis.

  Raises:
    ConfigError: there are several rows, in several processes.
  """
  if mesh.shape[DATA] == 1:
    return mesh
  local(mesh)
  return Mesh(mesh.devices[index : index + 1], mesh.axis_names)


@functools.cache
def local(mesh: Mesh) -> Mesh:
  """Returns the part of a mesh that lies in this process: some KV heads.

  Raises:
    ConfigError: a KV head lies on devices of several processes, or there are
      several rows.
  """
  if not mesh.is_multi_process:
    return mesh
  require(
    mesh.shape[DATA] == 1,
    f'{mesh.shape[DATA]} rows of data on devices of several processes: a side '
    'of several processes has one row (decode_data=1)',
  )
  own = jax.process_index()
  (heads,) = mesh.devices
  processes = [{d.process_index for d in shard} for shard in heads]
  require(
    all(len(found) == 1 for found in processes),
    f'a mesh of {len(heads)} KV rows has rows in several processes; '
    'take as many processes as divide the KV heads',
  )
  here = [shard[0].process_index == own for shard in heads]
  return Mesh(heads[here][None], mesh.axis_names)


def own(x: jax.Array) -> jax.Array:
  """Returns the part of an array that lies in this process, without a copy.

  Programs on it need nothing of other processes, nor their order.
  """
  if x.is_fully_addressable:
    return x
  return _part(local(of_sharding(x.sharding)), x)


def on_row(index: int, function: Callable[[Mesh, Any], Any], tree: Any) -> Any:
  """Returns arrays of which `function` has changed one row, without a copy.

  Devices of other rows take no part.

  Args:
    index: of the row.
    function: of the row's mesh and the arrays' parts there, which it may
      donate; it returns arrays of the same shapes and places.
    tree: arrays on one mesh; they cannot be used any more.
  """
  mesh = of(tree)
  own = row(mesh, index)
  if own is mesh:
    return function(mesh, tree)
  leaves, structure = jax.tree.flatten(tree)
  # An array with a donated shard cannot be asked for its others.
  kept = [_shards(x) for x in leaves]
  parts = jax.tree.unflatten(structure, [_part(own, x) for x in leaves])
  fresh = jax.tree.leaves(function(own, parts))
  whole = [
    jax.make_array_from_single_device_arrays(
      x.shape, x.sharding, [*(shards | _shards(part)).values()]
    )
    for x, shards, part in zip(leaves, kept, fresh, strict=True)
  ]
  return jax.tree.unflatten(structure, whole)


def _shards(x: jax.Array) -> dict[jax.Device, jax.Array]:
  return {shard.device: shard.data for shard in x.addressable_shards}


def _part(mesh: Mesh, x: jax.Array) -> jax.Array:
  """Returns the shards of an array that lie on a part of its mesh."""
  shards = _shards(x)
  arrays = [shards[device] for device in mesh.devices.flat]
  if mesh.size == 1:
    return arrays[0]
  assert isinstance(x.sharding, NamedSharding)
  split = x.sharding.spec

  def count(axes):
    names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
    return math.prod(mesh.shape[name] for name in names)

  shape = tuple(
    size * count(axes)
    for size, axes in itertools.zip_longest(
      x.sharding.shard_shape(x.shape), split
    )
  )
  return jax.make_array_from_single_device_arrays(
    shape, NamedSharding(mesh, split), arrays
  )


def put(values: Any, where: Any) -> Any:
  """Places a tree of values that every process of the places has.

  Args:
    values: numpy arrays.
    where: their shardings.
  """
  return jax.tree.map(
    lambda x, place: jax.make_array_from_callback(
      x.shape, place, lambda index: x[index]
    ),
    values,
    where,
  )


def everywhere(mesh: Mesh, tree: Any) -> Any:
  """Returns small arrays so that every process of a mesh can read them."""
  if not mesh.is_multi_process:
    return tree
  return _everywhere_program(mesh)(tree)


@functools.cache
def _everywhere_program(mesh: Mesh):
  return jax.jit(
    lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec())
  )


def places(mesh: Mesh, params: nnx.State) -> nnx.State:
  """Returns where every parameter lies, by the axes that it was made with.

  One without axes lies on every device.
  """

  def one(param: nnx.Variable) -> nnx.Variable:
    axes = param.get_metadata().get('out_sharding', ())
    sizes = zip(axes, param.get_value().shape, strict=len(axes) > 0)
    devices = mesh.size // mesh.shape[DATA]
    split = (
      RULES.get(axis) if axis != 'V' or size % devices == 0 else None
      for axis, size in sizes
    )
    return param.replace(place(mesh, PartitionSpec(*split)))

  return jax.tree.map(
    one, params, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )


def on_each_shard(
  function: Callable, in_specs: Any, out_specs: Any, *arguments: Any
) -> Any:
  """Calls a function on every device with its own part of the arguments.

  The mesh is that on which the arguments lie; on one device a part is all.

  Args:
    function: of `arguments`; it sees no other devices.
    in_specs, out_specs: as for `jax.shard_map`.
    *arguments: traced arrays, of which at least one lies on the mesh.
  """
  meshes = {jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arguments)}
  mesh = max(meshes, key=lambda mesh: mesh.size)
  if mesh.size <= 1:
    return function(*arguments)
  # Varying axes are not checked: a Pallas call does not declare its own.
  return jax.shard_map(
    function,
    mesh=mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    check_vma=False,
  )(*arguments)


def parts(one: Mesh, other: Mesh) -> int:
  """Returns into how many parts KV heads are cut to go between two meshes.

  A part lies on one shard of either; see `wire`.

  Raises:
    ConfigError: both have several devices, and share some. Each side's thread
      starts its own programs; two that communicate could then wait for each
      other for ever, started in another order on another device.
  """
  shared = {*one.devices.flat} & {*other.devices.flat}
  require(
    not shared or 1 in (one.size, other.size),
    f'prefill and decode share {len(shared)} devices; sides of several devices '
    'need devices of their own',
  )
  return math.lcm(one.shape[KV], other.shape[KV])
