# SPDX-License-Identifier: Apache-2.0
"""Models are placed on the two sides of the devices."""

import functools

import jax
import pytest
from flax import nnx

from experiments import schemes, serving
from lynx_jax.config import CodecConfig, ConfigError, EngineConfig
from lynx_jax.engine import Request
from lynx_jax.models import presets

# Tokens of optimised programs on meshes are compared in sharding_test.
pytestmark = pytest.mark.usefixtures('unoptimised')
PROMPT = list(b'Call me Ishmael. Some years ago, never mind how long. ' * 5)


def _devices(model) -> set[jax.Device]:
  return {
    device
    for leaf in jax.tree.leaves(nnx.state(model))
    for device in leaf.devices()
  }


@pytest.mark.parametrize('sides', [(1, 1), (2, 4), (4, 1)])
def test_each_side_has_devices_of_its_own(sides):
  model = serving.load('tiny', 'float32', sides)
  devices, (first, second) = jax.devices(), sides
  assert _devices(model.prefill) == {*devices[:first]}
  assert _devices(model.decode) == {*devices[first : first + second]}


def test_a_process_with_one_side_has_one_copy():
  model = serving.load('tiny', 'float32', (2,))
  assert model.prefill is model.decode
  assert _devices(model.prefill) == {*jax.devices()[:2]}


@pytest.mark.parametrize(
  'sides, message',
  [
    ((4, 5), r'4 \+ 5 devices .* more than the 8 there are'),
    ((3, 1), '3 devices cannot divide tiny.*; 1, 2, 4 can'),
  ],
)
def test_devices_that_cannot_serve(sides, message):
  with pytest.raises(ConfigError, match=message):
    serving.load('tiny', 'float32', sides)


def test_two_devices_prefill_for_four(monkeypatch):
  """The link ends where decode is, and the output is the reference."""
  small = functools.partial(presets.tiny, layers=2)
  monkeypatch.setattr(presets, 'tiny', small)
  model = serving.load('tiny', 'float32', (2, 4))
  scheme = schemes.scheme('lynx', CodecConfig())
  engine_config = EngineConfig(
    prompt_tokens=len(PROMPT),
    output_tokens=9,
    layer_groups=2,
    chunk_bytes=1,  # a unit a chunk: few shapes to compile
  )
  with serving.connect(model, scheme, engine_config, rate_gbps=0.05) as line:
    expected = line.engine.reference(PROMPT, 9)
    result = line.engine.generate(Request(prompt=PROMPT, output_tokens=9))
  assert result.tokens == expected
