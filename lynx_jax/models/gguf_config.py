# SPDX-License-Identifier: Apache-2.0
"""Reads the metadata of a GGUF."""

import re
from typing import Any

import numpy as np

from lynx_jax.config import Activation, LocalLayers, RopeScaling, Scaling
from lynx_jax.models import errors, families, gguf_file, transformer
from lynx_jax.models.families import Stored
from lynx_jax.models.fields import Fields

# What changes the output and no value of `ModelConfig` can express: the name
# after `ARCHITECTURE.`, and what is as good as leaving it out.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
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
# Blocks of Gemma 3 27B, whose logits are scaled by 1 / sqrt(D / N); a GGUF does
# not say so.
_GEMMA3_27B_LAYERS = 62
_TOP = {
  'token_embd.weight': 'embedding',
  'output_norm.weight': 'final_norm',
  'output.weight': 'unembedding',
}
_LAYER = {
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
_BIAS = {
  'attn_q.bias': 'q_bias',
  'attn_k.bias': 'k_bias',
  'attn_v.bias': 'v_bias',
}
_QK_NORM = {'attn_q_norm.weight': 'q_norm', 'attn_k_norm.weight': 'k_norm'}
_POST_NORMS = {
  'post_attention_norm.weight': 'attention_post_norm',
  'post_ffw_norm.weight': 'mlp_post_norm',
}
# Of Llama 3: by what each RoPE frequency is divided.
_ROPE_DIVISORS = 'rope_freqs.weight'


def read(file: gguf_file.GgufFile, dtype: str) -> Stored:
  """Reads the dimensions from a GGUF's metadata.

  Raises:
    WeightsError: it names an architecture or a value that is not supported.
  """
  architecture = file.metadata.get('general.architecture')
  family = (
    families.GGUF.get(architecture) if isinstance(architecture, str) else None
  )
  if family is None:
    raise errors.WeightsError(
      file.path,
      [
        f'general.architecture is {architecture!r}, must be one of '
        f'{", ".join(families.GGUF)}'
      ],
      families.SUPPORTED,
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
    'vocab': fields.integer('vocab_size', rows or None),
    'context_tokens': fields.integer('context_length'),
    'rope_theta': rope_theta,
    'rope_scaling': _scaling(file, head_dim, rope_theta, fields),
    'rms_eps': fields.number('attention.layer_norm_rms_epsilon'),
    # The format's own rule: no unembedding means that it is the embedding.
    'tied_embeddings': 'output.weight' not in file.tensors,
    'dtype': dtype,
    **family.values,
  }
  values['context_tokens'] = families.stretched(values)
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
            for i in range(min(layers, families.MOST_LAYERS))
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
  if head_dim:  # or else it is a problem already
    fields.expect('rope.dimension_count', head_dim)
    fields.expect('attention.value_length', head_dim)
  for name, neutral in _NEUTRAL.items():
    fields.expect(name, *neutral)
  config = families.checked(fields, file.path, values)
  return Stored(
    config=config,
    names=families.names(
      config,
      top=_TOP,
      layer=_LAYER | (_POST_NORMS if config.post_norms else {}),
      bias=_BIAS,
      qk_norm=_QK_NORM,
      pattern='blk.{}.{}',
    ),
    ignored=re.compile(re.escape(_ROPE_DIVISORS)),
    rope_pairs=architecture == 'llama',
  )


def _scaling(
  file: gguf_file.GgufFile, head_dim: int, theta: float, fields: Fields
) -> RopeScaling | None:
  kind = file.metadata.get(fields.key('rope.scaling.type'))
  if _ROPE_DIVISORS in file.tensors:
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
  file: gguf_file.GgufFile, head_dim: int, theta: float, fields: Fields
) -> RopeScaling | None:
  """Recognises the rule behind a table of divisors.

  Converters write the table for Llama 3.1 and later, whose rules differ in the
  factor alone: the largest divisor.
  """
  divisors = file.tensor(_ROPE_DIVISORS)
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
      f'{_ROPE_DIVISORS} does not follow the rule of Llama 3 (factor '
      f'{scaling.factor:g}, 1 to 4 turns in 8192 tokens)'
    )
  return scaling
