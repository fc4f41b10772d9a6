# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of each family, written as transformers does.

It knows no JAX: the script that writes the goldens imports it too.
"""

import json
import pathlib
import zlib

import numpy as np

FOLDER = pathlib.Path(__file__).parent / 'goldens' / 'families'
TOKENS = 64


def names() -> list[str]:
  """Returns the families, each a golden."""
  return sorted(file.stem for file in FOLDER.glob('*.json'))


def tokens(vocab: int) -> np.ndarray:
  """Returns the prompt of the goldens, far longer than any window."""
  return np.random.RandomState(7).randint(0, vocab, TOKENS)


def values(name: str, shape, family: str) -> np.ndarray:
  """Returns a tensor that follows from its name alone.

  Norms are away from what they begin with, 1, or 0 where 1 is added, since
  that would hide a misplaced one. Attention is sharp, so that a window that is
  off by one shows.
  """
  # Of all of NumPy's streams this one is frozen.
  rng = np.random.RandomState(zlib.crc32(f'{family} {name}'.encode()))
  if name.endswith('norm.weight'):
    plus_one = family.startswith('gemma') and 'vision' not in name
    return rng.uniform(0.5, 1.5, shape).astype(np.float32) - plus_one
  scale = 0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
  return (rng.standard_normal(shape) * scale).astype(np.float32)


def tensors(family: str) -> dict[str, np.ndarray]:
  """Returns all tensors of a checkpoint."""
  golden = json.loads((FOLDER / f'{family}.json').read_text('utf-8'))
  return {
    name: values(name, shape, family)
    for name, shape in golden['shapes'].items()
  }


def config(family: str) -> dict:
  """Returns `config.json` of a checkpoint."""
  return json.loads((FOLDER / f'{family}.json').read_text('utf-8'))['config']


def logits(family: str) -> np.ndarray:
  """Returns f32[TOKENS, V], by transformers in float64."""
  with np.load(FOLDER / 'logits.npz') as arrays:
    return arrays[family]


def write(family: str, folder: pathlib.Path, **changes) -> pathlib.Path:
  """Writes a checkpoint directory, its config changed, and returns it."""
  import safetensors.numpy

  folder.mkdir(parents=True, exist_ok=True)
  safetensors.numpy.save_file(tensors(family), folder / 'model.safetensors')
  changed = json.dumps(config(family) | changes)
  (folder / 'config.json').write_text(changed, 'utf-8')
  return folder


# Architecture of GGUF → the family that is converted to it.
GGUFS = {
  'llama': 'smollm2',
  'qwen2': 'qwen2',
  'qwen3': 'qwen3_yarn',
  'gemma3': 'gemma3_text',
}


def write_gguf(architecture: str, path: pathlib.Path) -> pathlib.Path:
  """Converts a checkpoint by the rules, and with the names, of llama.cpp."""
  import gguf

  family = GGUFS[architecture]
  settings, values = config(family), tensors(family)
  names = gguf.get_tensor_name_map(
    getattr(gguf.MODEL_ARCH, architecture.upper()),
    settings['num_hidden_layers'],
  )
  writer = gguf.GGUFWriter(path, arch=architecture)
  writer.add_block_count(settings['num_hidden_layers'])
  writer.add_context_length(settings['max_position_embeddings'])
  writer.add_embedding_length(settings['hidden_size'])
  writer.add_feed_forward_length(settings['intermediate_size'])
  writer.add_head_count(settings['num_attention_heads'])
  writer.add_head_count_kv(settings['num_key_value_heads'])
  if 'head_dim' in settings:
    writer.add_key_length(settings['head_dim'])
    writer.add_value_length(settings['head_dim'])
  writer.add_layer_norm_rms_eps(settings['rms_norm_eps'])
  rope = settings['rope_parameters']
  if architecture == 'gemma3':
    writer.add_sliding_window(settings['sliding_window'])
    writer.add_uint32('gemma3.attention.sliding_window_pattern', 3)
    writer.add_float32('gemma3.rope.freq_base_swa', 100.0)
    rope = rope['full_attention']
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(rope['factor'])
  if rope['rope_type'] == 'yarn':
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope['factor'])
    writer.add_rope_scaling_orig_ctx_len(
      rope['original_max_position_embeddings']
    )
  writer.add_rope_freq_base(rope['rope_theta'])
  for key, value in values.items():
    if architecture == 'gemma3' and key.endswith('norm.weight'):
      value = value + 1
    if architecture == 'llama' and ('q_proj' in key or 'k_proj' in key):
      heads = value.reshape(-1, 2, settings['head_dim'] // 2, value.shape[-1])
      value = heads.swapaxes(1, 2).reshape(value.shape)
    stored = names.get_name(key, try_suffixes=('.weight', '.bias'))
    writer.add_tensor(stored, np.ascontiguousarray(value))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path
