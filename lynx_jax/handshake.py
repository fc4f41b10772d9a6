# SPDX-License-Identifier: Apache-2.0
"""What must be equal on both sides of a transfer, and what decode may choose.

It knows no channel: values in, values out.
"""

import dataclasses
import enum
import functools
import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from lynx_jax.config import (
  ConfigError,
  EngineConfig,
  Order,
  check_together,
)
from lynx_jax.models import cached
from lynx_jax.models.transformer import Transformer
from lynx_jax.transport import digest
from lynx_jax.transport.messages import Mesh, Scalar
from lynx_jax.transport.streams import DENSE_BYTES, Segment, WireFormat

# Of EngineConfig: what decides which bits are made, and what decode decides.
_FIXED = ('token_chunk', 'layer_groups')
_CHOSEN = ('prompt_tokens', 'slots', 'chunk_bytes', 'order')


def fingerprint(model: Transformer) -> str:
  """Returns a hash of all parameters, summed where they lie."""
  _, params = cached.split(model)
  leaves = jax.tree.leaves(params)
  sums = digest.texts([[digest.digest((leaf,))] for leaf in leaves])
  return hashlib.sha256(b''.join(sums)).hexdigest()[:32]


def facts(wire: WireFormat, model_fingerprint: str) -> dict[str, Scalar]:
  """Returns everything that must be equal, by name.

  The same program on the same platform gives the same bits, so a request can
  be prefilled again, in another process, in the middle of its transfer.
  """
  engine = {name: getattr(wire.engine, name) for name in _FIXED}
  return {
    'jax': jax.__version__,
    'platform': jax.default_backend(),
    **_flat('model', dataclasses.asdict(wire.model)),
    'model.fingerprint': model_fingerprint,
    **_flat('codec', dataclasses.asdict(wire.codec)),
    **_flat('engine', engine),
  }


def choices(engine: EngineConfig) -> dict[str, Scalar]:
  """Returns what decode decides about its transfers, by name."""
  return _flat('', {name: getattr(engine, name) for name in _CHOSEN})


def choose(wire: WireFormat, chosen: Mapping[str, Scalar]) -> WireFormat:
  """Returns a sender's format with what the receiver has decided.

  Raises:
    ConfigError: it does not fit; longer prompts than the sender's config has
      are refused, since they take its memory.
  """
  values: dict[str, Any] = dict(chosen)
  if values.keys() != set(_CHOSEN):
    raise ConfigError(f'{sorted(values)} must be {sorted(_CHOSEN)}')
  try:
    values['order'] = Order(values['order'])
    engine = dataclasses.replace(wire.engine, **values)
    check_together(wire.model, wire.codec, engine)
  except (TypeError, ValueError) as error:
    raise ConfigError(str(error)) from error
  if engine.prompt_tokens > wire.engine.prompt_tokens:
    raise ConfigError(
      f'prompt_tokens={engine.prompt_tokens} exceeds '
      f'{wire.engine.prompt_tokens}'
    )
  return WireFormat(wire.model, wire.codec, engine)


def sender_bytes(wire: WireFormat, window_bytes: int) -> int:
  """Returns what a sender holds for a peer at most, its weights aside.

  As many prompts as the receiver has slots, each of the longest length, as
  prefill computes them and as split cuts them, in whole token chunks; and what
  is published.
  """
  model, engine = wire.model, wire.engine
  chunks = math.ceil(engine.prompt_tokens / engine.token_chunk)
  tokens = chunks * engine.token_chunk
  groups = tokens // wire.codec.group
  prompt = tokens * 2 * model.layers * model.kv_heads * model.head_dim
  prompt *= DENSE_BYTES
  for layer_group, layers in enumerate(wire.layer_counts):
    planes = sum(
      wire.unit_bytes(Segment.PREFIX, plane, layer_group)
      for plane in range(wire.planes(layer_group))
    )
    first = wire.unit_bytes(Segment.SINKS, 0, layer_group)  # of every chunk
    prompt += layers * (groups * planes + chunks * first)
  return engine.slots * prompt + window_bytes


def mesh_of(mesh: jax.sharding.Mesh) -> Mesh:
  """Returns what a side says of its mesh, of which all rows are alike."""
  processes = {device.process_index for device in mesh.devices.flat}
  _, shards, replicas = mesh.devices.shape
  return shards, replicas, len(processes)


def process_of(mesh: jax.sharding.Mesh) -> int:
  """Returns which of the mesh's processes this one is."""
  processes = {device.process_index for device in mesh.devices.flat}
  return sorted(processes).index(jax.process_index())


def described(mesh: Mesh) -> str:
  """Returns a mesh in words."""
  shards, replicas, processes = mesh
  return (
    f'KV heads in {shards} parts, each on {replicas} devices, in {processes} '
    'processes'
  )


def difference(
  sender: Mapping[str, Scalar], receiver: Mapping[str, Scalar]
) -> list[tuple[str, Scalar, Scalar]]:
  """Returns (name, sender's value, receiver's value) of what differs."""
  names = [*sender, *(name for name in receiver if name not in sender)]
  return [
    (name, sender.get(name), receiver.get(name))
    for name in names
    if sender.get(name) != receiver.get(name)
  ]


@functools.lru_cache(maxsize=256)
def manifest_hash(wire: WireFormat, prompt_tokens: int) -> str:
  """Returns a hash of everything that a request's manifest says.

  Token chunks that are shifted copies of others are counted, not read.
  """
  count = wire.token_chunks(prompt_tokens)
  found = hashlib.sha256(f'{prompt_tokens} {count}'.encode())
  for token_chunk in wire.distinct(prompt_tokens):
    for chunk in wire.manifest(0, prompt_tokens, token_chunk):
      found.update(repr(chunk).encode())
  return found.hexdigest()[:32]


def _flat(name: str, value: Any) -> dict[str, Scalar]:
  """Returns the leaves of nested dictionaries and lists by dotted name."""
  if isinstance(value, enum.Enum):
    value = value.value
  items: Iterable[tuple[Any, Any]]
  if isinstance(value, Mapping):
    items = value.items()
  elif isinstance(value, tuple | list):
    if all(isinstance(each, int) for each in value):
      return {name: ','.join(map(str, value))}
    items = enumerate(value)
  else:
    return {name: value}
  found: dict[str, Scalar] = {}
  for key, each in items:
    found |= _flat(f'{name}.{key}'.removeprefix('.'), each)
  return found
