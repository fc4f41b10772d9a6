# SPDX-License-Identifier: Apache-2.0
"""The memory budget of a side: bytes that one device holds, by purpose.

It allocates nothing and reads no device: shapes and meshes in, bytes out. What
a program needs beside its arguments is not in it: the compiler's
`memory_analysis` says that, and whoever compares with a limit leaves headroom.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, Sharding

from lynx_jax import handshake, kv_cache
from lynx_jax import mesh as mesh_lib
from lynx_jax.config import CodecConfig, Drafter, EngineConfig, ModelConfig
from lynx_jax.kv_cache import Cache
from lynx_jax.models import cached, transformer
from lynx_jax.transport.streams import WireFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
  """Bytes of one device.

  Attributes:
    weights_bytes: its shard of the parameters.
    kv_bytes: of prefill: as many of the longest prompts as decode has slots,
      dense and split, and a cache if it goes on decoding; of decode: the cache
      of its row's slots.
    window_bytes: what is published, or on its way, and has not landed.
  """

  weights_bytes: int
  kv_bytes: int
  window_bytes: int

  @property
  def total_bytes(self) -> int:
    return self.weights_bytes + self.kv_bytes + self.window_bytes


def of_prefill(wire: WireFormat, mesh: Mesh, window_bytes: int) -> Budget:
  """Returns the budget of a device of prefill's mesh."""
  _, weights = params(wire.model, mesh)
  parts = mesh.shape[mesh_lib.KV]
  kv_bytes = math.ceil(handshake.sender_bytes(wire, 0) / parts)
  if wire.engine.drafter is Drafter.PREFILL:
    kv_bytes += shard_bytes(cache(wire.model, wire.codec, wire.engine, mesh))
  return Budget(
    weights_bytes=shard_bytes(weights),
    kv_bytes=kv_bytes,
    window_bytes=math.ceil(window_bytes / parts),
  )


def of_decode(wire: WireFormat, mesh: Mesh, window_bytes: int) -> Budget:
  """Returns the budget of a device of decode's mesh.

  All of the window may be on its way to one row of the mesh.
  """
  _, weights = params(wire.model, mesh)
  return Budget(
    weights_bytes=shard_bytes(weights),
    kv_bytes=shard_bytes(cache(wire.model, wire.codec, wire.engine, mesh)),
    window_bytes=math.ceil(window_bytes / mesh.shape[mesh_lib.KV]),
  )


def params(model: ModelConfig, mesh: Mesh) -> tuple[cached.Graphs, nnx.State]:
  """Returns a model's graphs, and its parameters as shapes on a mesh."""
  graphs, state = cached.split(transformer.abstract_model(model))
  return graphs, placed(state, mesh_lib.places(mesh, state))


def cache(
  model: ModelConfig, codec: CodecConfig, engine: EngineConfig, mesh: Mesh
) -> Cache:
  """Returns decode's cache as shapes on a mesh."""
  shapes = jax.eval_shape(
    functools.partial(kv_cache.empty, model, codec, engine)
  )
  place = functools.partial(mesh_lib.place, mesh)
  return placed(shapes, jax.tree.map(place, kv_cache.specs(shapes)))


def placed(shapes: Any, places: Any) -> Any:
  """Returns shapes with shardings, of which one may serve a whole subtree."""
  return jax.tree.map(
    lambda place, part: jax.tree.map(lambda x: x.update(sharding=place), part),
    places,
    shapes,
    is_leaf=lambda x: isinstance(x, Sharding),
  )


def shard_bytes(tree: Any) -> int:
  """Returns the bytes that a device holds of arrays, or of placed shapes."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )
