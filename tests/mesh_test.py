# SPDX-License-Identifier: Apache-2.0
"""Which meshes serve a model, and where its parameters lie on them."""

import dataclasses
import math

import hypothesis
import jax
import pytest
from flax import nnx
from hypothesis import strategies as st

from lynx_jax import mesh
from lynx_jax.config import ConfigError
from lynx_jax.models import presets, transformer

MODEL = presets.tiny(layers=1, heads=8, kv_heads=4, head_dim=16, vocab=60)


@hypothesis.given(
  count=st.integers(1, 8),
  kv_heads=st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
  group=st.sampled_from([1, 2, 3, 4, 8]),
)
def test_a_mesh_gives_every_device_the_same_share(count, kv_heads, group):
  """Whole query groups, or equal shares of one KV head's queries."""
  model = dataclasses.replace(
    MODEL, kv_heads=kv_heads, heads=kv_heads * group, ff_dim=840
  )
  devices = jax.devices()[:count]
  shares = kv_heads % count == 0
  replicas, odd = divmod(count, kv_heads)
  if not shares and (odd or group % replicas):
    with pytest.raises(ConfigError, match=f'^{count} devices cannot divide'):
      mesh.make(devices, model)
    return
  made = mesh.make(devices, model)
  assert [*made.devices.flat] == devices
  assert made.shape[mesh.KV] == math.gcd(count, kv_heads)


def test_the_remedy_for_a_mesh_that_cannot_be_is_named():
  with pytest.raises(ConfigError, match=r'; 1, 2, 4, 8 can$'):
    mesh.make(jax.devices()[:3], MODEL)


def test_parameters_are_split_by_their_axes():
  made = mesh.make(jax.devices(), MODEL)  # kv=4, replica=2
  graph, state = nnx.split(transformer.abstract_model(MODEL))
  model = nnx.merge(graph, mesh.places(made, state))
  layer = model.layers[0]
  both = (mesh.KV, mesh.REPLICA)
  found = {
    name: getattr(layer, name).get_value().spec
    for name in ('q', 'k', 'v', 'o', 'gate', 'up', 'down', 'mlp_norm')
  }
  spec = jax.sharding.PartitionSpec
  assert found == {
    'q': spec(None, both, None),
    'k': spec(None, mesh.KV, None),
    'v': spec(None, mesh.KV, None),
    'o': spec(both, None, None),
    'gate': spec(None, both),
    'up': spec(None, both),
    'down': spec(both, None),
    'mlp_norm': spec(),
  }
  # 60 tokens on 8 devices: every device has them all.
  assert model.embedding.get_value().spec == spec(None, None)


def test_arrays_of_one_device_lie_on_a_mesh_of_it():
  device = jax.devices()[3]
  found = mesh.of([jax.device_put(0.0, device)])
  assert [*found.devices.flat] == [device]
  assert mesh.place(found, mesh.spec('B K')) == (
    jax.sharding.SingleDeviceSharding(device)
  )


@pytest.mark.parametrize('one, other, parts', [(1, 1, 1), (2, 4, 4), (4, 2, 4)])
def test_parts_lie_within_a_shard_of_either_side(one, other, parts):
  devices = jax.devices()
  sides = mesh.make(devices[:one], MODEL), mesh.make(devices[-other:], MODEL)
  assert mesh.parts(*sides) == parts


def test_sides_of_several_devices_share_none():
  devices = jax.devices()
  sides = mesh.make(devices[:4], MODEL), mesh.make(devices[3:5], MODEL)
  with pytest.raises(ConfigError, match='share 1 devices'):
    mesh.parts(*sides)
