# SPDX-License-Identifier: Apache-2.0
"""Models are placed on the two sides of the devices."""

import jax
import pytest
from flax import nnx

from experiments import config, serving
from lynx_jax.config import CodecConfig, ConfigError, EngineConfig
from lynx_jax.engine import Request

PROMPT = list(b'Call me Ishmael. Some years ago, never mind how long. ' * 5)


def _devices(model) -> set[jax.Device]:
  return {
    device
    for leaf in jax.tree.leaves(nnx.state(model))
    for device in leaf.devices()
  }


@pytest.mark.parametrize('prefill_devices, at', [(None, 4), (1, 1), (7, 7)])
def test_both_sides_have_a_copy(prefill_devices, at):
  model = serving.load('tiny', 'float32', prefill_devices)
  assert _devices(model.prefill) == {jax.devices()[0]}
  assert _devices(model.decode) == {jax.devices()[at]}


@pytest.mark.parametrize('prefill_devices', [-1, 0, 8])
def test_devices_that_are_not_there(prefill_devices):
  with pytest.raises(ConfigError, match=r'must be in 1\.\.7: there are 8'):
    serving.load('tiny', 'float32', prefill_devices)


def test_one_seventh_of_the_devices_serves_the_rest():
  """The link ends where decode is, and the output is the reference."""
  model = serving.load('tiny', 'float32', prefill_devices=1)
  scheme = config.scheme('lynx', CodecConfig())
  engine_config = EngineConfig(
    prompt_tokens=len(PROMPT), output_tokens=9, layer_groups=2
  )
  with serving.connect(model, scheme, engine_config, rate_gbps=0.05) as line:
    expected = line.engine.reference(PROMPT, 9)
    result = line.engine.generate(Request(prompt=PROMPT, output_tokens=9))
  assert result.tokens == expected
