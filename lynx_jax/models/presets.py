# SPDX-License-Identifier: Apache-2.0
"""Model dimensions under a name: published models, and a tiny one for tests.

It knows no weights and no files. Dimensions are those of the `config.json` that
is published beside the weights, https://huggingface.co/NAME/raw/main/config.json
with the name in the comment.
"""

import dataclasses

from lynx_jax import config
from lynx_jax.config import Activation, LocalLayers, RopeScaling, Scaling

SMOLLM2_135M_INSTRUCT = config.ModelConfig(
  name='SmolLM2-135M-Instruct',
  layers=30,
  heads=9,
  kv_heads=3,
  head_dim=64,
  model_dim=576,
  ff_dim=1536,
  vocab=49_152,
  context_tokens=8192,
  rope_theta=100_000.0,
  rms_eps=1e-5,
  tied_embeddings=True,
)

# HuggingFaceTB/SmolLM2-135M
SMOLLM2_135M = dataclasses.replace(SMOLLM2_135M_INSTRUCT, name='SmolLM2-135M')
# meta-llama/Llama-3.1-8B
LLAMA_31_8B = config.ModelConfig(
  name='Llama-3.1-8B',
  layers=32,
  heads=32,
  kv_heads=8,
  head_dim=128,
  model_dim=4096,
  ff_dim=14_336,
  vocab=128_256,
  context_tokens=131_072,
  rope_theta=500_000.0,
  rope_scaling=RopeScaling(kind=Scaling.LLAMA3, factor=8.0),
  rms_eps=1e-5,
  tied_embeddings=False,
  dtype='bfloat16',
)
# meta-llama/Llama-3.1-70B
LLAMA_31_70B = dataclasses.replace(
  LLAMA_31_8B,
  name='Llama-3.1-70B',
  layers=80,
  heads=64,
  model_dim=8192,
  ff_dim=28_672,
)
# Qwen/Qwen3-8B
QWEN3_8B = config.ModelConfig(
  name='Qwen3-8B',
  layers=36,
  heads=32,
  kv_heads=8,
  head_dim=128,
  model_dim=4096,
  ff_dim=12_288,
  vocab=151_936,
  context_tokens=40_960,
  rope_theta=1_000_000.0,
  rms_eps=1e-6,
  qk_norm=True,
  tied_embeddings=False,
  dtype='bfloat16',
)
# What its model card has `rope_scaling` be for more than 40,960 tokens.
QWEN3_YARN = RopeScaling(
  kind=Scaling.YARN,
  factor=4.0,
  high_freq_factor=32.0,
  original_context_tokens=32_768,
)
# Qwen/Qwen2.5-7B
QWEN25_7B = config.ModelConfig(
  name='Qwen2.5-7B',
  layers=28,
  heads=28,
  kv_heads=4,
  head_dim=128,
  model_dim=3584,
  ff_dim=18_944,
  vocab=152_064,
  context_tokens=131_072,
  rope_theta=1_000_000.0,
  rms_eps=1e-6,
  qkv_bias=True,
  tied_embeddings=False,
  dtype='bfloat16',
)
# mistralai/Mistral-7B-v0.3, which has no sliding window; that of v0.1 has one.
MISTRAL_7B = config.ModelConfig(
  name='Mistral-7B-v0.3',
  layers=32,
  heads=32,
  kv_heads=8,
  head_dim=128,
  model_dim=4096,
  ff_dim=14_336,
  vocab=32_768,
  context_tokens=32_768,
  rope_theta=1_000_000.0,
  rms_eps=1e-5,
  tied_embeddings=False,
  dtype='bfloat16',
)


def _gemma3(
  name: str,
  *,
  layers: int,
  heads: int,
  kv_heads: int,
  model_dim: int,
  ff_dim: int,
  vocab: int,
  context_tokens: int,
  window: int,
  rope_scaling: RopeScaling | None,
) -> config.ModelConfig:
  return config.ModelConfig(
    name=name,
    layers=layers,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=256,
    model_dim=model_dim,
    ff_dim=ff_dim,
    vocab=vocab,
    context_tokens=context_tokens,
    rope_theta=1_000_000.0,
    rope_scaling=rope_scaling,
    local=LocalLayers(
      window=window,
      layers=tuple(i for i in range(layers) if (i + 1) % 6),
      rope_theta=10_000.0,
    ),
    rms_eps=1e-6,
    qk_norm=True,
    post_norms=True,
    activation=Activation.GELU_TANH,
    embedding_scale=model_dim**0.5,
    logits_scale=256**-0.5,
    dtype='bfloat16',
  )


# google/gemma-3-1b-pt
GEMMA3_1B = _gemma3(
  'gemma-3-1b',
  layers=26,
  heads=4,
  kv_heads=1,
  model_dim=1152,
  ff_dim=6912,
  vocab=262_144,
  context_tokens=32_768,
  window=512,
  rope_scaling=None,
)
# google/gemma-3-4b-pt, its text model
GEMMA3_4B = _gemma3(
  'gemma-3-4b',
  layers=34,
  heads=8,
  kv_heads=4,
  model_dim=2560,
  ff_dim=10_240,
  vocab=262_208,
  context_tokens=131_072,
  window=1024,
  rope_scaling=RopeScaling(kind=Scaling.LINEAR, factor=8.0),
)


def tiny(
  *,
  layers: int = 4,
  heads: int = 4,
  kv_heads: int = 2,
  head_dim: int = 64,
  vocab: int = 256,
  context_tokens: int = 8192,
  tied_embeddings: bool = True,
  dtype: str = 'float32',
) -> config.ModelConfig:
  """Returns dimensions for random weights, compiled and run in milliseconds.

  The model dim is `heads * head_dim`, the feed-forward dim twice that.

  Raises:
    ConfigError: the dimensions do not fit together.
  """
  return config.ModelConfig(
    name='tiny',
    layers=layers,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    model_dim=heads * head_dim,
    ff_dim=2 * heads * head_dim,
    vocab=vocab,
    context_tokens=context_tokens,
    tied_embeddings=tied_embeddings,
    dtype=dtype,
  )
