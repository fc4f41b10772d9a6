# SPDX-License-Identifier: Apache-2.0
"""Meshes of devices, and the one table that says which axes they split.

It knows no model code, no cache and no transfer. An axis is named by its
letter in `shapes`:

| axis | is split over |
|---|---|
| K, key/value heads | `kv` |
| N, query heads | `kv`, `replica` |
| F, feed-forward | `kv`, `replica` |
| V, vocabulary, where the devices divide it | `kv`, `replica` |

All others are on every device. A side, prefill or decode, has a mesh of its
own. With as many devices as KV heads or fewer, `replica` has size 1; with more,
each KV head lies on several devices, which share its query heads.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from lynx_jax.config import ModelConfig, require

KV, REPLICA = 'kv', 'replica'
RULES = {
  'K': KV,
  'N': (KV, REPLICA),
  'F': (KV, REPLICA),
  'V': (KV, REPLICA),
}


def make(devices: Sequence[jax.Device], model: ModelConfig) -> Mesh:
  """Returns the mesh of one side.

  Eight devices and 32 query heads, for example:

  | KV heads | kv | replica | a device has |
  |---|---|---|---|
  | 8 | 8 | 1 | 1 KV head, its 4 query heads |
  | 2 | 2 | 4 | 1 KV head, 4 of its 16 query heads |
  | 16 | 8 | 1 | 2 KV heads, their 2 query heads each |

  Raises:
    ConfigError: the devices cannot divide the model's heads.
  """
  count, heads = len(devices), model.kv_heads
  kv = math.gcd(count, heads)
  replicas = count // kv
  able = [n for n in range(1, model.heads + 1) if _divides(n, model)]
  require(
    _divides(count, model),
    f'{count} devices cannot divide {model.name}: {heads} KV heads, '
    f'{model.heads} query heads, feed-forward {model.ff_dim}; '
    f'{", ".join(map(str, able))} can',
  )
  return Mesh(np.array(devices).reshape(kv, replicas), (KV, REPLICA))


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
  return Mesh(np.full((1, 1), device, object), (KV, REPLICA))


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


@functools.cache
def local(mesh: Mesh) -> Mesh:
  """Returns the part of a mesh that lies in this process: all or some KV rows.

  Raises:
    ConfigError: a KV head lies on devices of several processes.
  """
  own = jax.process_index()
  processes = [{d.process_index for d in row} for row in mesh.devices]
  require(
    all(len(found) == 1 for found in processes),
    f'a mesh of {len(mesh.devices)} KV rows has rows in several processes; '
    'take as many processes as divide the KV heads',
  )
  here = [row[0].process_index == own for row in mesh.devices]
  return Mesh(mesh.devices[here], mesh.axis_names)


def own(x: jax.Array) -> jax.Array:
  """Returns the part of an array that lies in this process, without a copy.

  Programs on it need nothing of other processes, nor their order.
  """
  if x.is_fully_addressable:
    return x
  whole = of_sharding(x.sharding)
  mesh = local(whole)
  shards = [shard.data for shard in x.addressable_shards]
  if mesh.size == 1:
    return shards[0]
  assert isinstance(x.sharding, NamedSharding)
  split = x.sharding.spec
  count = len(whole.devices) // len(mesh.devices)
  shape = tuple(
    size // count if axis < len(split) and split[axis] else size
    for axis, size in enumerate(x.shape)
  )
  return jax.make_array_from_single_device_arrays(
    shape, NamedSharding(mesh, split), shards
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
    split = (
      RULES.get(axis) if axis != 'V' or size % mesh.size == 0 else None
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
  return math.lcm(len(one.devices), len(other.devices))
