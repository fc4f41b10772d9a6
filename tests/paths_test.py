# SPDX-License-Identifier: Apache-2.0
"""Where a model's path leads; nothing here touches a network."""

import pathlib
import sys
from typing import ClassVar

import huggingface_hub
import jax
import numpy as np
import pytest
from etils import epath
from flax import nnx
from fsspec.implementations import memory

from lynx_jax.models import errors, paths, weights
from tests import families


def test_local_paths_are_taken_as_they_are(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'org' / 'name').mkdir(parents=True)
  # What exists here is never looked for on a hub.
  monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
  assert pathlib.Path(paths.locate('org/name')) == pathlib.Path('org/name')
  for absent in ('absent', './org/absent', 'org/absent.gguf', 'a/b/c'):
    assert not paths.locate(absent).exists()
  monkeypatch.setenv('HOME', str(tmp_path))
  assert pathlib.Path(paths.locate('~/org')) == tmp_path / 'org'


@pytest.mark.parametrize('scheme', ['foo', 'http', 'file', 'GS', ''])
def test_an_unknown_scheme_names_those_that_are_known(scheme):
  with pytest.raises(errors.WeightsError) as caught:
    paths.locate(f'{scheme}://x/y')
  assert caught.value.problems == (
    f'{scheme}:// is no scheme that is read, must be one of gs://, s3://, '
    'az://, hf://',
  )


def test_a_hub_id_is_fetched_and_loaded(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  asked = []

  def snapshot_download(name, **patterns):
    asked.append((name, patterns))
    return str(families.write('smollm2', tmp_path / 'snapshot'))

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
  config, _ = weights.load('org/smollm2')
  assert config.layers == 3
  ((name, patterns),) = asked
  assert name == 'org/smollm2'
  stored = ['config.json', 'model-00001-of-00002.safetensors']
  others = ['consolidated.safetensors', 'original/params.json', 'README.md']
  fetched = huggingface_hub.utils.filter_repo_objects(
    stored + others, **patterns
  )
  assert [*fetched] == stored


def test_without_a_network_the_error_says_so(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)

  def snapshot_download(name, **patterns):
    raise OSError('Temporary failure in name resolution\nand a long story')

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', snapshot_download)
  with pytest.raises(errors.WeightsError) as caught:
    weights.load('org/name')
  line = caught.value.line()
  assert line.startswith('org/name: is no path on this machine, and the hub')
  assert 'OSError: Temporary failure in name resolution.' in line
  assert 'check name, network and access' in line


def test_a_bucket_needs_its_package(monkeypatch):
  for package in ('gcsfs', 'tensorflow'):
    monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(errors.MissingPackageError, match='gcsfs'):
    paths.locate('gs://bucket/model')


class _Bucket(memory.MemoryFileSystem):
  """Stands in for `gcsfs`: the same interface, of the package `fsspec`."""

  store: ClassVar[dict] = {}
  pseudo_dirs: ClassVar[list] = ['']

  @classmethod
  def _strip_protocol(cls, path):
    return '/' + path.removeprefix('gs://').strip('/')


@pytest.mark.parametrize('form', ['directory', 'gguf'])
def test_a_bucket_is_read_through_etils(form, tmp_path, monkeypatch):
  backend = epath.backend.fsspec_backend
  monkeypatch.setattr(backend, 'fs', lambda path: _Bucket())
  if form == 'gguf':
    source = families.write_gguf('qwen3', tmp_path / 'qwen3.gguf')
  else:
    source = families.write('qwen3', tmp_path / 'qwen3')
  address = f'gs://bucket/{source.name}'
  _Bucket().put(str(source), address, recursive=True)
  (expected, model), (config, read) = map(weights.load, (source, address))
  assert config == expected
  parameters = (jax.tree.leaves(nnx.state(m)) for m in (model, read))
  for a, b in zip(*parameters, strict=True):
    np.testing.assert_array_equal(a, b)
