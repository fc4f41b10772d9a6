# SPDX-License-Identifier: Apache-2.0
"""Model dimensions under a name: the demo model, and one small enough to test.

It knows no weights and no files.
"""

from lynx_jax import config

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
