# SPDX-License-Identifier: Apache-2.0
"""The memory budget is what engines really hold."""

import jax
import numpy as np
import pytest
from flax import nnx

from lynx_jax import kv_cache, memory, prefill
from lynx_jax import mesh as mesh_lib
from lynx_jax.models import presets, transformer
from lynx_jax.transport.streams import WireFormat
from tests import engines

WINDOW_BYTES = 1000


@pytest.mark.parametrize('name', ['lynx', 'dense', 'mixed', 'exact'])
@pytest.mark.parametrize('devices', [1, 2, 4])
def test_decode_holds_its_budget(name, devices):
  setup = engines.SETUPS[name]
  mesh = mesh_lib.make(jax.devices()[:devices], engines.MODEL)
  wire = WireFormat(engines.MODEL, setup.codec, setup.config)
  budget = memory.of_decode(wire, mesh, WINDOW_BYTES)
  params = nnx.state(engines.model())
  params = jax.device_put(params, mesh_lib.places(mesh, params))
  assert budget.weights_bytes == memory.shard_bytes(params)
  cache = kv_cache.allocate(engines.MODEL, setup.codec, setup.config, mesh)
  assert budget.kv_bytes == memory.shard_bytes(cache)
  held = sum(
    x.nbytes
    for array in jax.tree.leaves((params, cache))
    for x in (array.addressable_shards[-1].data,)
  )
  assert budget.total_bytes == held + WINDOW_BYTES // mesh.shape[mesh_lib.KV]


@pytest.mark.parametrize('name', ['lynx', 'dense', 'mixed'])
def test_prefill_holds_its_budget_when_all_slots_have_the_longest_prompt(name):
  setup = engines.SETUPS[name]
  mesh = mesh_lib.make(jax.devices()[:1], engines.MODEL)
  wire = WireFormat(engines.MODEL, setup.codec, setup.config)
  budget = memory.of_prefill(wire, mesh, WINDOW_BYTES)
  assert budget.window_bytes == WINDOW_BYTES
  side = prefill.Prefill(engines.model(), setup.codec, setup.config)
  prompt = engines.prompt(setup.config.prompt_tokens)
  *_, computed = side.chunks(prompt)
  for token_chunk in range(wire.token_chunks(len(prompt)) - 1):
    side.split(computed, token_chunk)
  held = memory.shard_bytes((computed.kv, computed.split))
  assert held * setup.config.slots == budget.kv_bytes


def test_a_mesh_divides_heads_and_weights():
  model = presets.LLAMA_31_8B
  setup = engines.setup(
    (4, 4), group=128, prompt_tokens=1024, token_chunk=256, layer_groups=16
  )
  wire = WireFormat(model, setup.codec, setup.config)
  one, eight = (
    memory.of_decode(wire, mesh_lib.make(jax.devices()[:n], model), 0)
    for n in (1, 8)
  )
  assert one.kv_bytes == 8 * eight.kv_bytes
  # Norms alone are on every device.
  assert np.isclose(one.weights_bytes, 8 * eight.weights_bytes, rtol=1e-3)
  state = nnx.state(transformer.abstract_model(model))
  assert one.weights_bytes == sum(
    x.size * x.dtype.itemsize for x in jax.tree.leaves(state)
  )
