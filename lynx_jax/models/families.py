# SPDX-License-Identifier: Apache-2.0
"""What model files say about an architecture, as values of `ModelConfig`.

It reads no tensor. A family is a row of a table here, and nowhere else a name
to branch on. What a file says and no value can express is refused, by name:
nothing is ever ignored silently.

Sources: the configuration classes of transformers 5.24
(https://github.com/huggingface/transformers, src/transformers/models/*) and
the loaders of llama.cpp (https://github.com/ggml-org/llama.cpp, src/models).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath

from lynx_jax import config as config_lib
from lynx_jax.config import Activation, LocalLayers, RopeScaling, Scaling
from lynx_jax.models import errors, gguf_file, transformer

# A parameter's path in the module, such as ('layers', 3, 'q').
ParameterPath = tuple[str | int, ...]
Raw = Mapping[str, Any]

REPAIR = 'Fetch or convert the model again; nothing was loaded.'


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

  config: config_lib.ModelConfig
  names: dict[str, ParameterPath]
  ignored: re.Pattern[str]
  norm_offset: float = 0.0
  rope_pairs: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Family:
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
  local: Callable[['Fields'], Callable[[int], bool]] | None = None
  is_gemma: bool = False


def _qwen_local(fields: 'Fields') -> Callable[[int], bool]:
  if not fields.boolean('use_sliding_window'):
    return lambda layer: False
  first = fields.integer('max_window_layers', least=0)
  return lambda layer: layer >= first


def _gemma3_local(fields: 'Fields') -> Callable[[int], bool]:
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
_GEMMA2 = _Family(
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
_GEMMA3 = _Family(
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
_HF_FAMILIES = {
  'llama': _Family(),
  'mistral': _Family(
    defaults={'sliding_window': 4096},
    local=lambda fields: lambda layer: True,
  ),
  'qwen2': _Family(
    values={'qkv_bias': True}, defaults=_QWEN_DEFAULTS, local=_qwen_local
  ),
  'qwen3': _Family(
    values={'qk_norm': True},
    defaults=_QWEN_DEFAULTS | {'head_dim': 128},
    local=_qwen_local,
  ),
  'gemma2': _GEMMA2,
  'gemma3_text': _GEMMA3,
  'gemma3': _GEMMA3,  # its `text_config`
}
_GGUF_FAMILIES = {
  'llama': _Family(),  # of Llama, Mistral and SmolLM2
  'qwen2': _HF_FAMILIES['qwen2'],
  'qwen3': _HF_FAMILIES['qwen3'],
  'gemma3': _GEMMA3,
}
# Blocks of Gemma 3 27B, whose logits are scaled by 1 / sqrt(D / N); a GGUF does
# not say so.
_GEMMA3_27B_LAYERS = 62

SUPPORTED = (
  f'Supported are {", ".join(_HF_FAMILIES)} as Hugging Face directories and '
  f'{", ".join(_GGUF_FAMILIES)} as GGUF, without experts, quantised '
  'safetensors or RoPE scaling other than linear and llama3.'
)

# Fields of config.json in which null is a value: there is none.
_NULLABLE = (
  'sliding_window',
  'attn_logit_softcapping',
  'final_logit_softcapping',
)
# What changes the output and no value of `ModelConfig` can express: the name,
# and what is as good as leaving it out.
_HF_NEUTRAL: dict[str, tuple[Any, ...]] = {
  'attention_bias': (False,),
  'mlp_bias': (False,),
  'use_bidirectional_attention': (False,),
  'partial_rotary_factor': (1,),
  'quantization_config': (),
  # Of relatives of Llama; a config may have been renamed.
  'attention_multiplier': (),
  'embedding_multiplier': (1,),
  'residual_multiplier': (1,),
  'logits_scaling': (1,),
  'logit_scale': (1,),
  'clip_qkv': (),
  'use_qk_norm': (False,),
  'no_rope_layers': ([],),
  'num_experts': (0,),
  'num_local_experts': (0,),
}
# The same of a GGUF, after `ARCHITECTURE.`.
_GGUF_NEUTRAL: dict[str, tuple[Any, ...]] = {
  'attn_logit_softcapping': (),
  'attention.causal': (True,),
  'attention.clamp_kqv': (0,),
  'attention.max_alibi_bias': (0,),
  'attention.scale': (0,),
  'embedding_scale': (0, 1),
  'expert_count': (0,),
  'logit_scale': (0, 1),
  'residual_scale': (0, 1),
  'rope.scaling.attn_factor': (1,),
  'use_parallel_residual': (False,),
}

_ACTIVATIONS = {
  'silu': Activation.SILU,
  'gelu_pytorch_tanh': Activation.GELU_TANH,
}
_HF_TOP = {
  'model.embed_tokens.weight': 'embedding',
  'model.norm.weight': 'final_norm',
  'lm_head.weight': 'unembedding',
}
_HF_LAYER = {
  'input_layernorm.weight': 'attention_norm',
  'self_attn.q_proj.weight': 'q',
  'self_attn.k_proj.weight': 'k',
  'self_attn.v_proj.weight': 'v',
  'self_attn.o_proj.weight': 'o',
  'mlp.gate_proj.weight': 'gate',
  'mlp.up_proj.weight': 'up',
  'mlp.down_proj.weight': 'down',
}
_HF_BIAS = {
  'self_attn.q_proj.bias': 'q_bias',
  'self_attn.k_proj.bias': 'k_bias',
  'self_attn.v_proj.bias': 'v_bias',
}
_HF_QK_NORM = {
  'self_attn.q_norm.weight': 'q_norm',
  'self_attn.k_norm.weight': 'k_norm',
}
_HF_PRE_NORM = {'post_attention_layernorm.weight': 'mlp_norm'}
_HF_POST_NORMS = {
  'post_attention_layernorm.weight': 'attention_post_norm',
  'pre_feedforward_layernorm.weight': 'mlp_norm',
  'post_feedforward_layernorm.weight': 'mlp_post_norm',
}
# Old checkpoints store a table that follows from rope_theta; Gemma 3 of 4B and
# more comes with a vision tower.
_HF_IGNORED = re.compile(
  r'model\.(layers\.\d+\.self_attn\.)?rotary_emb\..*'
  r'|(model\.)?(vision_tower|multi_modal_projector)\..*'
)
_GGUF_TOP = {
  'token_embd.weight': 'embedding',
  'output_norm.weight': 'final_norm',
  'output.weight': 'unembedding',
}
_GGUF_LAYER = {
  'attn_norm.weight': 'attention_norm',
  'attn_q.weight': 'q',
  'attn_k.weight': 'k',
  'attn_v.weight': 'v',
  'attn_output.weight': 'o',
  'ffn_norm.weight': 'mlp_norm',
  'ffn_gate.weight': 'gate',
  'ffn_up.weight': 'up',
  'ffn_down.weight': 'down',
}
_GGUF_BIAS = {
  'attn_q.bias': 'q_bias',
  'attn_k.bias': 'k_bias',
  'attn_v.bias': 'v_bias',
}
_GGUF_QK_NORM = {'attn_q_norm.weight': 'q_norm', 'attn_k_norm.weight': 'k_norm'}
_GGUF_POST_NORMS = {
  'post_attention_norm.weight': 'attention_post_norm',
  'post_ffw_norm.weight': 'mlp_post_norm',
}
# Of Llama 3: by what each RoPE frequency is divided.
ROPE_DIVISORS = 'rope_freqs.weight'


def of_directory(path: epath.Path, dtype: str) -> Stored:
  """Reads `config.json` in the spelling of transformers 4 or 5.

  Raises:
    WeightsError: it names an architecture or a value that is not supported.
  """
  source = path / 'config.json'
  whole = errors.read_json(source)
  kind = whole.get('model_type')
  family = _HF_FAMILIES.get(kind) if isinstance(kind, str) else None
  if family is None:
    raise errors.WeightsError(
      source,
      [f'model_type is {kind!r}, must be one of {", ".join(_HF_FAMILIES)}'],
      SUPPORTED,
    )
  text = whole.get('text_config', {}) if kind == 'gemma3' else whole
  if not isinstance(text, dict):
    raise errors.WeightsError(source, ['text_config is no object'], REPAIR)
  raw = dict(family.defaults) | {
    name: value
    for name, value in text.items()
    if value is not None or name in _NULLABLE
  }
  fields = Fields(raw, lambda name: name)
  heads = fields.integer('num_attention_heads')
  model_dim = fields.integer('hidden_size')
  layers = fields.integer('num_hidden_layers')
  rope, local_theta = _hf_rope(raw, fields)
  values: dict[str, Any] = {
    'name': path.resolve().name,
    'layers': layers,
    'heads': heads,
    'kv_heads': fields.integer('num_key_value_heads', heads),
    'head_dim': fields.integer('head_dim', model_dim // heads if heads else 0),
    'model_dim': model_dim,
    'ff_dim': fields.integer('intermediate_size'),
    'vocab': fields.integer('vocab_size'),
    'context_tokens': fields.integer('max_position_embeddings'),
    'rms_eps': fields.number('rms_norm_eps'),
    'tied_embeddings': fields.boolean('tie_word_embeddings'),
    'activation': fields.choice(
      'hidden_activation' if family.is_gemma else 'hidden_act',
      _ACTIVATIONS,
      'silu',
    ),
    'dtype': dtype,
    **rope,
    **family.values,
  }
  values['context_tokens'] = _stretched(values)
  if family.is_gemma:
    values['embedding_scale'] = model_dim**0.5
    values['logits_scale'] = fields.number('query_pre_attn_scalar') ** -0.5
    for field, name in (
      ('attn_logit_softcapping', 'attention_soft_cap'),
      ('final_logit_softcapping', 'final_soft_cap'),
    ):
      values[name] = fields.optional(field)
  if layers <= _MOST_LAYERS:
    values['local'] = _hf_local(raw, family, layers, local_theta, fields)
  for name, neutral in _HF_NEUTRAL.items():
    fields.expect(name, *neutral)
  if whole is not text and whole.get('quantization_config') is not None:
    fields.refuse('quantization_config', whole['quantization_config'])
  config = fields.config(source, values)
  return Stored(
    config=config,
    names=_names(
      config,
      top=_HF_TOP,
      layer=_HF_LAYER | (_HF_POST_NORMS if config.post_norms else _HF_PRE_NORM),
      bias=_HF_BIAS,
      qk_norm=_HF_QK_NORM,
      pattern='model.layers.{}.{}',
      prefix='language_model.' if kind == 'gemma3' else '',
    ),
    ignored=_HF_IGNORED,
    norm_offset=1.0 if family.is_gemma else 0.0,
  )


# A damaged count may be in the millions; it is refused with the tensors.
_MOST_LAYERS = 10_000
_SLIDING = 'sliding_attention'


def _hf_rope(raw: Raw, fields: 'Fields') -> tuple[dict[str, Any], float | None]:
  """Returns base and scaling, and the base of local layers if it differs."""
  # 5 keeps RoPE in one dict, or in one for each type of layer; 4 has top-level
  # bases and an optional scaling.
  names = ('rope_parameters', 'rope_scaling')
  new, old = (raw.get(name) for name in names)
  if new and old and new != old:
    fields.problem(
      f'rope_parameters={new!r} and rope_scaling={old!r} differ: leave out one'
    )
  rope = new or old or {}
  local: Any = {}
  if isinstance(rope, dict) and (
    'full_attention' in rope or 'sliding_attention' in rope
  ):
    local = rope.get('sliding_attention') or {}
    rope = rope.get('full_attention') or {}
  if not isinstance(rope, dict) or not isinstance(local, dict):
    fields.problem(f'RoPE parameters are {rope!r}, must be a dict')
    return {}, None
  inner = fields.inner({'rope_theta': raw.get('rope_theta')} | _given(rope))
  kind = _rope_kind(inner)
  scaling = None
  if kind in {known.value for known in Scaling}:
    scaling = {'kind': Scaling(kind), 'factor': inner.number('factor')}
    if kind == Scaling.LLAMA3.value:
      scaling['low_freq_factor'] = inner.number('low_freq_factor')
      scaling['high_freq_factor'] = inner.number('high_freq_factor')
    if kind == Scaling.YARN.value:
      scaling['low_freq_factor'] = inner.number('beta_slow', 1.0)
      scaling['high_freq_factor'] = inner.number('beta_fast', 32.0)
      inner.expect('truncate', True)
      for name in ('attention_factor', 'mscale', 'mscale_all_dim'):
        inner.expect(name, None)
    if kind != Scaling.LINEAR.value:
      scaling['original_context_tokens'] = inner.integer(
        'original_max_position_embeddings'
      )
  elif kind != 'default':
    inner.refuse('rope_type', kind)
  theta = raw.get('rope_local_base_freq')
  inner_local = fields.inner({'rope_theta': theta} | _given(local))
  kind = _rope_kind(inner_local)
  if kind != 'default':
    inner_local.refuse('rope_type', kind)
  return {
    'rope_theta': inner.number('rope_theta', 10_000.0),
    'rope_scaling': fields.build(RopeScaling, scaling),
  }, inner_local.optional('rope_theta')


def _rope_kind(rope: 'Fields') -> Any:
  """Returns how RoPE is scaled; what has no type must have no scaling."""
  rope.expect('partial_rotary_factor', 1)
  values = _given(rope.values)
  kind = values.get('rope_type', values.get('type'))
  if kind is None:
    for name in ('factor', 'short_factor', 'long_factor', 'mrope_section'):
      if name in values:
        rope.problem(f'{name}={values[name]!r} needs a rope_type beside it')
    return 'default'
  return kind


def _stretched(values: Mapping[str, Any]) -> int:
  """Returns the context; YaRN is added to configs that still name the old one.

  So does the model card of Qwen3, for example.
  """
  tokens, scaling = values['context_tokens'], values.get('rope_scaling')
  if scaling is None or scaling.kind is not Scaling.YARN:
    return tokens
  return max(tokens, int(scaling.factor * scaling.original_context_tokens))


def _hf_local(
  raw: Raw,
  family: _Family,
  layers: int,
  theta: float | None,
  fields: 'Fields',
) -> LocalLayers | None:
  types = raw.get('layer_types')
  window = raw.get('sliding_window')
  if types is None:
    if family.local is None:
      fields.expect('sliding_window')
      return None
    # Mistral and Qwen2 name no window where they use none.
    if window is None and not family.is_gemma:
      return None
    is_local = family.local(fields)
    local = tuple(i for i in range(layers) if is_local(i))
  else:
    if not isinstance(types, list) or len(types) != layers:
      fields.problem(f'layer_types must be a list of {layers}')
      return None
    known = {'full_attention', _SLIDING}
    for kind in sorted({str(kind) for kind in types} - known):
      fields.refuse('layer_types', kind)
    local = tuple(i for i, kind in enumerate(types) if kind == _SLIDING)
    if local and not fields.boolean('use_sliding_window', True):
      fields.problem(f'layer_types has {_SLIDING}, use_sliding_window is false')
  if not local:
    return None
  return fields.build(
    LocalLayers,
    {
      'window': fields.integer('sliding_window'),
      'layers': local,
      'rope_theta': theta,
    },
  )


def of_gguf(file: gguf_file.GgufFile, dtype: str) -> Stored:
  """Reads the dimensions from a GGUF's metadata.

  Raises:
    WeightsError: it names an architecture or a value that is not supported.
  """
  architecture = file.metadata.get('general.architecture')
  family = (
    _GGUF_FAMILIES.get(architecture) if isinstance(architecture, str) else None
  )
  if family is None:
    raise errors.WeightsError(
      file.path,
      [
        f'general.architecture is {architecture!r}, must be one of '
        f'{", ".join(_GGUF_FAMILIES)}'
      ],
      SUPPORTED,
    )
  parts = file.metadata.get('split.count', 1)
  if parts != 1:
    raise errors.WeightsError(
      file.path,
      [f'split.count={parts!r}: this is one of several files of a model'],
      'Make one of them: llama-gguf-split --merge FIRST_FILE TARGET.gguf',
    )
  fields = Fields(file.metadata, lambda name: f'{architecture}.{name}')
  heads = fields.integer('attention.head_count')
  model_dim = fields.integer('embedding_length')
  head_dim = fields.integer(
    'attention.key_length', model_dim // heads if heads else 0
  )
  layers = fields.integer('block_count')
  embedding = file.tensors.get('token_embd.weight')
  rows = embedding.shape[0] if embedding else 0
  rope_theta = fields.number('rope.freq_base', 10_000.0)
  values: dict[str, Any] = {
    'name': file.path.stem,
    'layers': layers,
    'heads': heads,
    'kv_heads': fields.integer('attention.head_count_kv', heads),
    'head_dim': head_dim,
    'model_dim': model_dim,
    'ff_dim': fields.integer('feed_forward_length'),
    # Old converters did not write the size.
    'vocab': fields.integer('vocab_size', rows),
    'context_tokens': fields.integer('context_length'),
    'rope_theta': rope_theta,
    'rope_scaling': _gguf_scaling(file, head_dim, rope_theta, fields),
    'rms_eps': fields.number('attention.layer_norm_rms_epsilon'),
    # The format's own rule: no unembedding means that it is the embedding.
    'tied_embeddings': 'output.weight' not in file.tensors,
    'dtype': dtype,
    **family.values,
  }
  values['context_tokens'] = _stretched(values)
  if family.is_gemma:
    pattern = fields.integer('attention.sliding_window_pattern', 6)
    values |= {
      'activation': Activation.GELU_TANH,
      'embedding_scale': model_dim**0.5,
      'final_soft_cap': fields.optional('final_logit_softcapping'),
      'local': fields.build(
        LocalLayers,
        {
          'window': fields.integer('attention.sliding_window'),
          'layers': tuple(
            i
            for i in range(min(layers, _MOST_LAYERS))
            if pattern and (i + 1) % pattern
          ),
          'rope_theta': fields.number('rope.freq_base_swa', 10_000.0),
        },
      ),
    }
    if layers == _GEMMA3_27B_LAYERS and heads:
      values['logits_scale'] = (model_dim // heads) ** -0.5
  else:
    fields.expect('attention.sliding_window', 0)
    fields.expect('final_logit_softcapping')
  fields.expect('rope.dimension_count', head_dim)
  fields.expect('attention.value_length', head_dim)
  for name, neutral in _GGUF_NEUTRAL.items():
    fields.expect(name, *neutral)
  config = fields.config(file.path, values)
  return Stored(
    config=config,
    names=_names(
      config,
      top=_GGUF_TOP,
      layer=_GGUF_LAYER | (_GGUF_POST_NORMS if config.post_norms else {}),
      bias=_GGUF_BIAS,
      qk_norm=_GGUF_QK_NORM,
      pattern='blk.{}.{}',
    ),
    ignored=re.compile(re.escape(ROPE_DIVISORS)),
    rope_pairs=architecture == 'llama',
  )


def _gguf_scaling(
  file: gguf_file.GgufFile, head_dim: int, theta: float, fields: 'Fields'
) -> RopeScaling | None:
  kind = file.metadata.get(fields.key('rope.scaling.type'))
  if ROPE_DIVISORS in file.tensors:
    fields.expect('rope.scaling.type', 'none')
    return _llama3_scaling(file, head_dim, theta, fields)
  fields.expect('rope.scale_linear', 1.0)  # of old files
  has_factor = fields.key('rope.scaling.factor') in file.metadata
  # llama.cpp's own default of the kind is linear.
  if kind == Scaling.LINEAR.value or (kind is None and has_factor):
    factor = fields.number('rope.scaling.factor')
    return fields.build(RopeScaling, {'kind': Scaling.LINEAR, 'factor': factor})
  if kind == Scaling.YARN.value:
    for name in ('attn_factor', 'yarn_attn_factor', 'yarn_ext_factor'):
      fields.expect(f'rope.scaling.{name}', 1.0)
    fields.expect('rope.scaling.yarn_log_multiplier', None)
    slow = fields.number('rope.scaling.yarn_beta_slow', 1.0)
    fast = fields.number('rope.scaling.yarn_beta_fast', 32.0)
    return fields.build(
      RopeScaling,
      {
        'kind': Scaling.YARN,
        'factor': fields.number('rope.scaling.factor'),
        'low_freq_factor': slow,
        'high_freq_factor': fast,
        'original_context_tokens': fields.integer(
          'rope.scaling.original_context_length'
        ),
      },
    )
  fields.expect('rope.scaling.type', 'none')
  return None


def _llama3_scaling(
  file: gguf_file.GgufFile, head_dim: int, theta: float, fields: 'Fields'
) -> RopeScaling | None:
  """Recognises the rule behind a table of divisors.

  Converters write the table for Llama 3.1 and later, whose rules differ in the
  factor alone: the largest divisor.
  """
  divisors = file.tensor(ROPE_DIVISORS)
  scaling = fields.build(
    RopeScaling,
    {'kind': Scaling.LLAMA3, 'factor': float(divisors.max(initial=0.0))},
  )
  if scaling is None or head_dim < 2:
    return None
  plain, scaled = (
    transformer.rope_frequencies(head_dim, theta, rule)
    for rule in (None, scaling)
  )
  if divisors.shape != plain.shape or not np.allclose(
    plain / divisors, scaled, rtol=1e-4
  ):
    fields.problem(
      f'{ROPE_DIVISORS} does not follow the rule of Llama 3 (factor '
      f'{scaling.factor:g}, 1 to 4 turns in 8192 tokens)'
    )
  return scaling


def _names(
  config: config_lib.ModelConfig,
  *,
  top: Mapping[str, str],
  layer: Mapping[str, str],
  bias: Mapping[str, str],
  qk_norm: Mapping[str, str],
  pattern: str,
  prefix: str = '',
) -> dict[str, ParameterPath]:
  """Returns the parameter that each stored name of a model fills."""
  names: dict[str, ParameterPath] = {
    prefix + name: (parameter,)
    for name, parameter in top.items()
    if parameter != 'unembedding' or not config.tied_embeddings
  }
  parts = dict(layer)
  if config.qkv_bias:
    parts |= bias
  if config.qk_norm:
    parts |= qk_norm
  for i in range(min(config.layers, _MOST_LAYERS)):
    for name, parameter in parts.items():
      names[prefix + pattern.format(i, name)] = ('layers', i, parameter)
  return names


# What float32 holds.
_SMALLEST, _LARGEST = (
  float(value) for value in (np.finfo('f4').tiny, np.finfo('f4').max)
)


def _given(values: Raw) -> dict[str, Any]:
  return {name: value for name, value in values.items() if value is not None}


class Fields:
  """Reads typed values and gathers what is wrong with them."""

  def __init__(
    self,
    values: Raw,
    key: Callable[[str], str],
    problems: list[str] | None = None,
  ):
    self.key = key
    self.problems: list[str] = [] if problems is None else problems
    self.values = values

  def inner(self, values: Raw) -> 'Fields':
    """Returns the fields of an object within, with the same problems."""
    return Fields(values, lambda name: name, self.problems)

  def boolean(self, name: str, default: bool = False) -> bool:
    value = self.values.get(self.key(name))
    if value is not None and not isinstance(value, bool):
      self.problem(f'{self.key(name)}={value!r} must be true or false')
    return default if value is None else value is True

  def integer(
    self, name: str, default: int | None = None, *, least: int = 1
  ) -> int:
    what = 'a positive integer' if least else 'an integer, 0 or more'
    return self._typed(name, default, int, what, least) or 0

  def number(self, name: str, default: float | None = None) -> float:
    kind = int | float
    value = self._typed(name, default, kind, 'a positive number', _SMALLEST)
    # GGUF stores float32: 1e-5 must not come back as 9.99999975e-06.
    return float(str(np.float32(value or 1.0)))

  def optional(self, name: str) -> float | None:
    if self.values.get(self.key(name)) is None:
      return None
    return self.number(name)

  def choice(self, name: str, known: Mapping[str, Any], default: str) -> Any:
    value = self.values.get(self.key(name))
    value = default if value is None else value
    if not isinstance(value, str) or value not in known:
      self.refuse(name, value)
      value = default
    return known[value]

  def expect(self, name: str, *neutral: Any) -> None:
    """Takes no value but these; absent is fine."""
    value = self.values.get(self.key(name))
    if value is not None and value not in neutral:
      self.refuse(name, value)

  def refuse(self, name: str, value: Any) -> None:
    self.problem(f'{self.key(name)}={value!r} is not supported')

  def problem(self, text: str) -> None:
    self.problems.append(text)

  def build(self, kind: Callable[..., Any], values: Raw | None) -> Any:
    """Returns `kind(**values)`; what is wrong with it becomes a problem."""
    if values is None or self.problems:
      return None
    try:
      return kind(**values)
    except config_lib.ConfigError as error:
      self.problem(str(error))
      return None

  def config(self, source: epath.Path, values: Raw) -> config_lib.ModelConfig:
    """Returns the config, or raises all problems as one error."""
    config = self.build(config_lib.ModelConfig, values)
    if config is not None:
      return config
    raise errors.WeightsError(source, self.problems, f'{SUPPORTED} {REPAIR}')

  def _typed(
    self, name: str, default: Any, kind: Any, what: str, least: float
  ) -> Any:
    value = self.values.get(self.key(name))
    value = default if value is None else value
    # To Python a boolean is an integer.
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if is_number and least <= value <= _LARGEST:
      return value
    self.problem(f'{self.key(name)}={value!r} must be {what}')
    return None
