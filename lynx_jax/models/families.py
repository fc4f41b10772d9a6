# SPDX-License-Identifier: Apache-2.0
"""Families of models, as values of `ModelConfig`: a row of a table each.

Nowhere else is a family a name to branch on. `hf_config` and `gguf_config` read
what files say; what is known to change the output, and no value can express, is
refused by name. Of a `config.json` and of a GGUF's metadata only fields known
here are looked at: others are taken to change nothing.

Sources: the configuration classes of transformers 5.24
(https://github.com/huggingface/transformers, src/transformers/models/*) and
the loaders of llama.cpp (https://github.com/ggml-org/llama.cpp, src/models).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from lynx_jax.config import ModelConfig, Scaling
from lynx_jax.models import errors
from lynx_jax.models.fields import Fields, Raw

# A parameter's path in the module, such as ('layers', 3, 'q').
ParameterPath = tuple[str | int, ...]

REPAIR = 'Fetch or convert the model again; nothing was loaded.'
# A damaged count may be in the millions; it is refused with the tensors.
MOST_LAYERS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
  """A model as a format stores it.

  Attributes:
    config: its dimensions.
    names: stored tensor → the parameter that it fills.
    ignored: names of tensors that are no part of a text model, or that follow
      from others.
    norm_offset: added to stored norm weights (Gemma stores w of 1 + w).
    rope_pairs: Q and K rows stand in pairs (2i, 2i + 1) instead of halves.
  """

  config: ModelConfig
  names: dict[str, ParameterPath]
  ignored: re.Pattern[str]
  norm_offset: float = 0.0
  rope_pairs: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A row of the table.

  Attributes:
    values: of `ModelConfig`.
    defaults: of the fields of `config.json` that published ones leave out, or
      have as null.
    local: fields → layer → whether that has a sliding window, where
      `layer_types` does not say; None has none.
    is_gemma: embeddings scaled by sqrt(D), norms of 1 + w, logits scaled by
      `query_pre_attn_scalar`.
  """

  values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  local: Callable[[Fields], Callable[[int], bool]] | None = None
  is_gemma: bool = False


def _qwen_local(fields: Fields) -> Callable[[int], bool]:
  if not fields.boolean('use_sliding_window'):
    return lambda layer: False
  first = fields.integer('max_window_layers', least=0)
  return lambda layer: layer >= first


def _gemma3_local(fields: Fields) -> Callable[[int], bool]:
  period = fields.integer('_sliding_window_pattern', 6)
  period = fields.integer('sliding_window_pattern', period) or 1
  return lambda layer: (layer + 1) % period != 0


_QWEN_DEFAULTS = {
  'use_sliding_window': False,
  'sliding_window': 4096,
  'max_window_layers': 28,
}
_GEMMA_DEFAULTS = {
  'num_attention_heads': 8,
  'num_key_value_heads': 4,
  'head_dim': 256,
  'rms_norm_eps': 1e-6,
  'hidden_activation': 'gelu_pytorch_tanh',
  'query_pre_attn_scalar': 256,
  'sliding_window': 4096,
  'tie_word_embeddings': True,
}
_GEMMA2 = Family(
  values={'post_norms': True},
  defaults=_GEMMA_DEFAULTS
  | {
    'vocab_size': 256_000,
    'max_position_embeddings': 8192,
    'attn_logit_softcapping': 50.0,
    'final_logit_softcapping': 30.0,
  },
  local=lambda fields: lambda layer: layer % 2 == 0,
  is_gemma=True,
)
_GEMMA3 = Family(
  values={'post_norms': True, 'qk_norm': True},
  defaults=_GEMMA_DEFAULTS
  | {
    'vocab_size': 262_208,
    'max_position_embeddings': 131_072,
    'rope_theta': 1_000_000.0,
    'rope_local_base_freq': 10_000.0,
  },
  local=_gemma3_local,
  is_gemma=True,
)
HUGGING_FACE = {
  'llama': Family(),
  'mistral': Family(
    defaults={'sliding_window': 4096},
    local=lambda fields: lambda layer: True,
  ),
  'qwen2': Family(
    values={'qkv_bias': True}, defaults=_QWEN_DEFAULTS, local=_qwen_local
  ),
  'qwen3': Family(
    values={'qk_norm': True},
    defaults=_QWEN_DEFAULTS | {'head_dim': 128},
    local=_qwen_local,
  ),
  'gemma2': _GEMMA2,
  'gemma3_text': _GEMMA3,
  'gemma3': _GEMMA3,  # its `text_config`
}
GGUF = {
  'llama': Family(),  # of Llama, Mistral and SmolLM2
  'qwen2': HUGGING_FACE['qwen2'],
  'qwen3': HUGGING_FACE['qwen3'],
  'gemma3': _GEMMA3,
}
SUPPORTED = (
  f'Supported are {", ".join(HUGGING_FACE)} as Hugging Face directories and '
  f'{", ".join(GGUF)} as GGUF, without experts, quantised '
  'safetensors or RoPE scaling other than linear, llama3 and yarn.'
)


def checked(fields: Fields, source: epath.Path, values: Raw) -> ModelConfig:
  """Returns the config, or raises all problems of its fields as one error."""
  config = fields.build(ModelConfig, values)
  if config is not None:
    return config
  raise errors.WeightsError(source, fields.problems, f'{SUPPORTED} {REPAIR}')


def stretched(values: Mapping[str, Any]) -> int:
  """Returns the context; YaRN is added to configs that still name the old one.

  So does the model card of Qwen3, for example.
  """
  tokens, scaling = values['context_tokens'], values.get('rope_scaling')
  if scaling is None or scaling.kind is not Scaling.YARN:
    return tokens
  return max(tokens, int(scaling.factor * scaling.original_context_tokens))


def names(
  config: ModelConfig,
  *,
  top: Mapping[str, str],
  layer: Mapping[str, str],
  bias: Mapping[str, str],
  qk_norm: Mapping[str, str],
  pattern: str,
  prefix: str = '',
) -> dict[str, ParameterPath]:
  """Returns the parameter that each stored name of a model fills."""
  found: dict[str, ParameterPath] = {
    prefix + name: (parameter,)
    for name, parameter in top.items()
    if parameter != 'unembedding' or not config.tied_embeddings
  }
  parts = dict(layer)
  if config.qkv_bias:
    parts |= bias
  if config.qk_norm:
    parts |= qk_norm
  for i in range(min(config.layers, MOST_LAYERS)):
    for name, parameter in parts.items():
      found[prefix + pattern.format(i, name)] = ('layers', i, parameter)
  return found
