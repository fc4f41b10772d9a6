# SPDX-License-Identifier: Apache-2.0
"""A converted model is the model, sharded as asked, or one clear error."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from experiments import convert
from lynx_jax.models import converted, errors, weights
from lynx_jax.models.tokenizer import Tokenizer
from tests import families

GOLDENS = pathlib.Path(__file__).parent / 'goldens'


@pytest.fixture(scope='module')
def stored(tmp_path_factory):
  """Gemma 3: local layers, linear scaling, and constants that no file has."""
  folder = tmp_path_factory.mktemp('converted')
  config, model = weights.load(families.write('gemma3_text', folder / 'hf'))
  converted.save(folder / 'own', config, model)
  return folder / 'own', config, model


def leaves(model):
  return {
    path: np.asarray(leaf.get_value())
    for path, leaf in nnx.to_flat_state(nnx.split(model)[1])
  }


def test_a_converted_model_is_the_same(stored):
  path, config, model = stored
  found, restored = weights.load(path)
  assert found == config == weights.check(path)
  expected, got = leaves(model), leaves(restored)
  assert expected.keys() == got.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(got[name], value, err_msg=str(name))


def test_it_is_restored_sharded_in_another_dtype(stored):
  path, _, _ = stored
  mesh = jax.make_mesh((2,), ('model',))
  spec = jax.sharding.PartitionSpec

  def place(parameter):
    axes = spec(None, 'model') if parameter[-1] == 'gate' else spec()
    return jax.sharding.NamedSharding(mesh, axes)

  config, model = weights.load(path, dtype='bfloat16', placement=place)
  assert config.dtype == 'bfloat16'
  gate = model.layers[1].gate.get_value()
  assert gate.dtype == 'bfloat16'
  assert gate.sharding.shard_shape(gate.shape) == (32, 24)
  up = model.layers[1].up.get_value()
  assert up.sharding.is_fully_replicated
  assert up.devices() == set(mesh.devices.flat)


def test_all_that_differs_comes_in_one_error(stored, tmp_path):
  path = pathlib.Path(shutil.copytree(stored[0], tmp_path / 'model'))
  file = path / 'lynx_model.json'
  values = json.loads(file.read_text('utf-8'))
  values |= {'layers': 4, 'ff_dim': 64}
  file.write_text(json.dumps(values), 'utf-8')
  with pytest.raises(errors.WeightsError) as caught:
    weights.load(path)
  problems = caught.value.problems
  assert 'layers.3.q is missing' in problems
  assert 'layers.0.gate is (32, 48), must be (32, 64)' in problems
  with pytest.raises(errors.WeightsError) as caught:
    weights.check(path)
  assert caught.value.problems == problems
  shutil.rmtree(path / 'params')
  with pytest.raises(errors.WeightsError, match='cannot be restored'):
    weights.load(path)
  file.write_text('{"name": "x"}', 'utf-8')
  with pytest.raises(errors.WeightsError, match='makes no sense'):
    weights.load(path)


@pytest.mark.parametrize(
  'changes',
  [
    {'rope_theta': 10**400},
    {'heads': '4'},
    {'activation': []},
    {'rope_scaling': {'kind': []}},
    {'local': {'layers': 5}},
  ],
)
def test_a_value_that_makes_no_sense_is_refused(stored, changes, tmp_path):
  values = json.loads((stored[0] / 'lynx_model.json').read_text('utf-8'))
  file = tmp_path / 'lynx_model.json'
  file.write_text(json.dumps(values | changes), 'utf-8')
  with pytest.raises(errors.WeightsError, match='makes no sense'):
    weights.check(tmp_path)


def changed_tokenizer(folder):
  """Returns the folder of a tokenizer with other bytes and the same ids."""
  path = pathlib.Path(shutil.copytree(GOLDENS / 'tiny_llama', folder / 'words'))
  values = json.loads((path / 'tokenizer.json').read_text('utf-8'))
  values['added_tokens'][0]['lstrip'] = True
  (path / 'tokenizer.json').write_text(json.dumps(values), 'utf-8')
  return path


def test_the_command_converts_model_and_tokenizer(tmp_path, capsys):
  source, target = str(GOLDENS / 'tiny_llama'), str(tmp_path / 'own')
  arguments = ['convert', source, target, '--dtype=float32']
  assert convert.main(arguments) == 0
  before, after = map(Tokenizer.from_directory, (source, target))
  for field in ('vocab', 'bos', 'ends', 'chat_template', 'special_text'):
    assert getattr(before, field) == getattr(after, field), field
  assert after.encode('Hello, world!') == before.encode('Hello, world!')
  expected, got = (leaves(weights.load(p)[1]) for p in (source, target))
  jax.tree.map(np.testing.assert_array_equal, expected, got)

  # The model that is there keeps its own tokenizer, and nothing is loaded.
  words = pathlib.Path(target) / 'tokenizer.json'
  before = words.read_bytes()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(weights, 'load', None)
    for more in ([], [f'--tokenizer={changed_tokenizer(tmp_path)}']):
      assert convert.main([*arguments, *more]) == 2
      assert 'holds a model already' in capsys.readouterr().err
    assert words.read_bytes() == before
    assert convert.main(['convert', source, '/dev/null/own']) == 2
    assert 'null/own: cannot be written: Not a dir' in capsys.readouterr().err
  other = str(tmp_path / 'other')
  assert convert.main(['convert', 'no/where/at-all', other]) == 2
  assert capsys.readouterr().err.startswith('error: no/where/at-all')
