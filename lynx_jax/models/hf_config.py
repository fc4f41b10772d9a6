# SPDX-License-Identifier: Apache-2.0
"""Reads the `config.json` of a Hugging Face directory."""

import re
from typing import Any

from etils import epath

from lynx_jax.config import Activation, LocalLayers, RopeScaling, Scaling
from lynx_jax.models import errors, families
from lynx_jax.models.families import Family, Stored
from lynx_jax.models.fields import Fields, Raw, given

# Fields of config.json in which null is a value: there is none.
_NULLABLE = (
  'sliding_window',
  'attn_logit_softcapping',
  'final_logit_softcapping',
)
# What changes the output and no value of `ModelConfig` can express: the name,
# and what is as good as leaving it out.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
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
_ACTIVATIONS = {
  'silu': Activation.SILU,
  'gelu_pytorch_tanh': Activation.GELU_TANH,
}
_TOP = {
  'model.embed_tokens.weight': 'embedding',
  'model.norm.weight': 'final_norm',
  'lm_head.weight': 'unembedding',
}
_LAYER = {
  'input_layernorm.weight': 'attention_norm',
  'self_attn.q_proj.weight': 'q',
  'self_attn.k_proj.weight': 'k',
  'self_attn.v_proj.weight': 'v',
  'self_attn.o_proj.weight': 'o',
  'mlp.gate_proj.weight': 'gate',
  'mlp.up_proj.weight': 'up',
  'mlp.down_proj.weight': 'down',
}
_BIAS = {
  'self_attn.q_proj.bias': 'q_bias',
  'self_attn.k_proj.bias': 'k_bias',
  'self_attn.v_proj.bias': 'v_bias',
}
_QK_NORM = {
  'self_attn.q_norm.weight': 'q_norm',
  'self_attn.k_norm.weight': 'k_norm',
}
_PRE_NORM = {'post_attention_layernorm.weight': 'mlp_norm'}
_POST_NORMS = {
  'post_attention_layernorm.weight': 'attention_post_norm',
  'pre_feedforward_layernorm.weight': 'mlp_norm',
  'post_feedforward_layernorm.weight': 'mlp_post_norm',
}
# Old checkpoints store a table that follows from rope_theta; Gemma 3 of 4B and
# more comes with a vision tower.
_IGNORED = re.compile(
  r'model\.(layers\.\d+\.self_attn\.)?rotary_emb\..*'
  r'|(model\.)?(vision_tower|multi_modal_projector)\..*'
)
_SLIDING = 'sliding_attention'


def read(path: epath.Path, dtype: str) -> Stored:
  """Reads `config.json` in the spelling of transformers 4 or 5.

  Raises:
    WeightsError: it names an architecture or a value that is not supported.
  """
  source = path / 'config.json'
  whole = errors.read_json(source)
  kind = whole.get('model_type')
  family = families.HUGGING_FACE.get(kind) if isinstance(kind, str) else None
  if family is None:
    raise errors.WeightsError(
      source,
      [
        f'model_type is {kind!r}, must be one of '
        f'{", ".join(families.HUGGING_FACE)}'
      ],
      families.SUPPORTED,
    )
  text = whole.get('text_config', {}) if kind == 'gemma3' else whole
  if not isinstance(text, dict):
    raise errors.WeightsError(
      source, ['text_config is no object'], families.REPAIR
    )
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
  values['context_tokens'] = families.stretched(values)
  if family.is_gemma:
    values['embedding_scale'] = model_dim**0.5
    values['logits_scale'] = fields.number('query_pre_attn_scalar') ** -0.5
    for field, name in (
      ('attn_logit_softcapping', 'attention_soft_cap'),
      ('final_logit_softcapping', 'final_soft_cap'),
    ):
      values[name] = fields.optional(field)
  if layers <= families.MOST_LAYERS:
    values['local'] = _hf_local(raw, family, layers, local_theta, fields)
  for name, neutral in _NEUTRAL.items():
    fields.expect(name, *neutral)
  if whole is not text and whole.get('quantization_config') is not None:
    fields.refuse('quantization_config', whole['quantization_config'])
  config = families.checked(fields, source, values)
  return Stored(
    config=config,
    names=families.names(
      config,
      top=_TOP,
      layer=_LAYER | (_POST_NORMS if config.post_norms else _PRE_NORM),
      bias=_BIAS,
      qk_norm=_QK_NORM,
      pattern='model.layers.{}.{}',
      prefix='language_model.' if kind == 'gemma3' else '',
    ),
    ignored=_IGNORED,
    norm_offset=1.0 if family.is_gemma else 0.0,
  )


def _hf_rope(raw: Raw, fields: Fields) -> tuple[dict[str, Any], float | None]:
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
  inner = fields.inner({'rope_theta': raw.get('rope_theta')} | given(rope))
  kind = _rope_kind(inner)
  scaling = None
  if isinstance(kind, str) and kind in {known.value for known in Scaling}:
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
  inner_local = fields.inner({'rope_theta': theta} | given(local))
  kind = _rope_kind(inner_local)
  if kind != 'default':
    inner_local.refuse('rope_type', kind)
  return {
    'rope_theta': inner.number('rope_theta', 10_000.0),
    'rope_scaling': fields.build(RopeScaling, scaling),
  }, inner_local.optional('rope_theta')


def _rope_kind(rope: Fields) -> Any:
  """Returns how RoPE is scaled; what has no type must have no scaling."""
  rope.expect('partial_rotary_factor', 1)
  values = given(rope.values)
  kind = values.get('rope_type', values.get('type'))
  if values.get('type', kind) != kind:
    rope.problem(
      f'rope_type={kind!r} and type={values["type"]!r} differ: leave out one'
    )
    return 'default'
  if kind is None:
    for name in ('factor', 'short_factor', 'long_factor', 'mrope_section'):
      if name in values:
        rope.problem(f'{name}={values[name]!r} needs a rope_type beside it')
    return 'default'
  return kind


def _hf_local(
  raw: Raw,
  family: Family,
  layers: int,
  theta: float | None,
  fields: Fields,
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
    # A count of 0 is a problem already.
    if not isinstance(types, list) or (layers and len(types) != layers):
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
