# SPDX-License-Identifier: Apache-2.0
"""Presets have the number of parameters that their publishers state."""

import dataclasses
import math

import jax
import pytest
from flax import nnx

from lynx_jax.models import presets, transformer

# As the pages of the models on the Hugging Face hub count them; of Gemma 3 4B
# its vision tower (416,866,032) and projector (2,950,272) are left out.
PUBLISHED = {
  'SMOLLM2_135M': 134_515_008,
  'LLAMA_31_8B': 8_030_261_248,
  'LLAMA_31_70B': 70_553_706_496,
  'QWEN3_8B': 8_190_735_360,
  'QWEN25_7B': 7_615_616_512,
  'MISTRAL_7B': 7_248_023_552,
  'GEMMA3_1B': 999_885_952,
  'GEMMA3_4B': 4_300_079_472 - 416_866_032 - 2_950_272,
}


def parameters(config, layers: int) -> int:
  config = dataclasses.replace(config, layers=layers, local=None)
  state = nnx.state(transformer.abstract_model(config))
  return sum(math.prod(x.shape) for x in jax.tree.leaves(state))


@pytest.mark.parametrize('name', PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name):
  config = getattr(presets, name)
  one, two = (parameters(config, layers) for layers in (1, 2))
  assert one + (config.layers - 1) * (two - one) == PUBLISHED[name]


def test_layers_of_gemma_3_alternate_as_published():
  config = presets.GEMMA3_1B
  windows = [config.window(layer) for layer in range(12)]
  assert windows == [*[512] * 5, None] * 2
  assert config.rope(0) == (10_000.0, None)
  assert config.rope(5) == (1_000_000.0, None)
