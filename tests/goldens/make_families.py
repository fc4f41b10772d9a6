# SPDX-License-Identifier: Apache-2.0
"""Writes tiny random models of each family, and the logits of transformers.

  pip install torch transformers
  PYTHONPATH=. python tests/goldens/make_families.py

in an environment of its own; 10 seconds. The goldens were written with torch
2.13.0 and transformers 5.24.0. `families/NAME.json` holds the config
as transformers writes it and the names and shapes of the tensors that it
stores. Their values are not kept: they follow from the names
(`tests.families.values`), and are the same on both sides. Logits are those of
one pass in float64, so that an error seen in a test is that of lynx_jax.
"""

import json
import pathlib
import tempfile

import numpy as np
import safetensors.torch
import torch
import transformers

from tests import families  # knows no JAX

HERE = pathlib.Path(__file__).parent
WINDOW = 8  # far below the tokens of the prompt
COMMON = {
  'vocab_size': 80,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 3,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 16,  # not hidden_size / num_attention_heads
  'max_position_embeddings': 512,
  'rms_norm_eps': 1e-6,
  'bos_token_id': 0,
  'eos_token_id': 1,
  'pad_token_id': 2,
}
PLAIN = {'rope_type': 'default', 'rope_theta': 5000.0}
LOCAL_AND_GLOBAL = ['sliding_attention', 'sliding_attention', 'full_attention']
GEMMA = {
  'num_key_value_heads': 1,
  'sliding_window': WINDOW,
  'query_pre_attn_scalar': 24,  # not the head dim
}
GEMMA_3 = GEMMA | {
  'head_dim': 256,
  'layer_types': LOCAL_AND_GLOBAL,
  'rope_parameters': {
    'sliding_attention': {'rope_type': 'default', 'rope_theta': 100.0},
    'full_attention': {
      'rope_type': 'linear',
      'factor': 8.0,
      'rope_theta': 10_000.0,
    },
  },
}
FAMILIES = {
  'smollm2': (
    transformers.LlamaConfig,
    {'tie_word_embeddings': True, 'rope_parameters': PLAIN},
  ),
  # In 64 tokens the frequencies turn 10, 3.2, 1.0, 0.3 … times: kept, between
  # and divided.
  'llama3': (
    transformers.LlamaConfig,
    {
      'rope_parameters': {
        'rope_type': 'llama3',
        'rope_theta': 10_000.0,
        'factor': 8.0,
        'low_freq_factor': 1.0,
        'high_freq_factor': 4.0,
        'original_max_position_embeddings': 64,
      },
    },
  ),
  'mistral': (
    transformers.MistralConfig,
    {'sliding_window': WINDOW, 'rope_parameters': PLAIN},
  ),
  'qwen2': (
    transformers.Qwen2Config,
    # Named and not used, as in published configs.
    {'sliding_window': WINDOW, 'rope_parameters': PLAIN, 'head_dim': None},
  ),
  'qwen2_window': (
    transformers.Qwen2Config,
    {
      'sliding_window': WINDOW,
      'use_sliding_window': True,
      'max_window_layers': 1,
      'rope_parameters': PLAIN,
      'head_dim': None,
    },
  ),
  'qwen3': (
    transformers.Qwen3Config,
    {'tie_word_embeddings': True, 'rope_parameters': PLAIN},
  ),
  # Of 8 channels the first turns often enough to be kept, the next three are
  # between, the others divided.
  'qwen3_yarn': (
    transformers.Qwen3Config,
    {
      'rope_parameters': {
        'rope_type': 'yarn',
        'rope_theta': 10_000.0,
        'factor': 4.0,
        'original_max_position_embeddings': 256,
      },
    },
  ),
  'gemma2': (
    transformers.Gemma2Config,
    GEMMA
    | {
      'attn_logit_softcapping': 5.0,
      'final_logit_softcapping': 3.0,
      'rope_parameters': PLAIN,
    },
  ),
  'gemma3_text': (transformers.Gemma3TextConfig, GEMMA_3),
  'gemma3': (transformers.Gemma3TextConfig, GEMMA_3),
}


@torch.no_grad()
def main():
  tokens = families.tokens(COMMON['vocab_size'])
  logits = {}
  (HERE / 'families').mkdir(exist_ok=True)
  for name, (make, values) in FAMILIES.items():
    merged = {k: v for k, v in (COMMON | values).items() if v is not None}
    model = build(name, make(**merged))
    with tempfile.TemporaryDirectory() as folder:
      folder = pathlib.Path(folder)
      model.save_pretrained(folder)
      config = json.loads((folder / 'config.json').read_text('utf-8'))
      with safetensors.safe_open(folder / 'model.safetensors', 'pt') as file:
        names = file.keys()  # a method of the file, which is no dict
        shapes = {name: file.get_slice(name).get_shape() for name in names}
      safetensors.torch.save_file(
        {
          k: torch.from_numpy(families.values(k, shape, name))
          for k, shape in shapes.items()
        },
        folder / 'model.safetensors',
        metadata={'format': 'pt'},
      )
      model = type(model).from_pretrained(
        folder, dtype=torch.float64, attn_implementation='eager'
      )
    found = model.eval()(torch.from_numpy(tokens)[None]).logits[0].numpy()
    print(name, found.std(), sum(map(np.prod, shapes.values())))
    logits[name] = found.astype(np.float32)
    text = json.dumps({'config': config, 'shapes': shapes}, indent=1)
    (HERE / 'families' / f'{name}.json').write_text(text + '\n', 'utf-8')
  np.savez_compressed(HERE / 'families' / 'logits.npz', **logits)


def build(name, config):
  if name != 'gemma3':
    return transformers.AutoModelForCausalLM.from_config(config)
  # As Gemma 3 of 4B and more is published: the text model beside a vision
  # tower, which no text ever reaches.
  vision = transformers.SiglipVisionConfig(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    image_size=8,
    patch_size=4,
  )
  return transformers.Gemma3ForConditionalGeneration(
    transformers.Gemma3Config(
      text_config=config, vision_config=vision, mm_tokens_per_image=4
    )
  )


if __name__ == '__main__':
  main()
