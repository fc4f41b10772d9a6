# SPDX-License-Identifier: Apache-2.0
"""The notebook: no outputs, no definitions, and it runs from top to bottom."""

import ast
import json
import os
import pathlib
import re

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from experiments import notebook, results

CELLS = json.loads(notebook.FILE.read_text(encoding='utf-8'))['cells']
CODE = [
  TransformerManager().transform_cell(''.join(cell['source']))
  for cell in CELLS
  if cell['cell_type'] == 'code'
]
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def test_it_holds_no_output():
  """Outputs would be of one machine, and would be read as of all."""
  for cell in CELLS:
    assert not cell.get('outputs')
    assert cell.get('execution_count') is None


def test_it_defines_nothing():
  for code in CODE:
    for node in ast.walk(ast.parse(code)):
      assert not isinstance(node, DEFINITIONS), ast.unparse(node)


def test_every_step_is_explained():
  kinds = [cell['cell_type'] for cell in CELLS]
  for before, kind in zip(['code', *kinds], kinds, strict=False):
    assert 'markdown' in (before, kind)


def test_it_installs_the_versions_of_the_lock():
  lock = (notebook.ROOT / 'requirements.lock').read_text(encoding='utf-8')
  (jax,) = re.findall(r'^jax==(\S+)', lock, re.MULTILINE)
  assert set(re.findall(r'"jax\[\w+\]==([\d.]+)"', CODE[0])) == {jax}
  assert CODE[0].count('--require-hashes') == 2


@pytest.fixture
def shell(tmp_path, monkeypatch):
  """Stands in for IPython's shell, in a folder of its own.

  It notes what it is asked to run, and does what `%cd` does and, if the
  repository is reachable, `git clone`.
  """

  class Shell:
    def __init__(self):
      self.ran, self.reachable = [], True

    def system(self, command):
      self.ran.append(command)
      if self.reachable:
        os.makedirs('lynx_checkout/lynx_jax', exist_ok=True)

    def run_line_magic(self, magic, line):
      self.ran.append(f'{magic} {line}')
      if magic == 'cd' and os.path.isdir(folder := line.split()[0]):
        os.chdir(folder)

  monkeypatch.chdir(tmp_path)
  return Shell()


def _install(shell, repository=''):
  code = CODE[0].replace("repository = ''", f'repository = {repository!r}')
  assert repository in code
  exec(code, {'get_ipython': lambda: shell})


def test_in_colab_it_installs_once_fetched_and_may_run_again(
  shell, tmp_path, monkeypatch
):
  monkeypatch.setenv('COLAB_RELEASE_TAG', 'any')
  with pytest.raises(AssertionError, match='fill in the address'):
    _install(shell)
  shell.reachable = False
  with pytest.raises(AssertionError, match='nowhere could not be fetched'):
    _install(shell, 'nowhere')
  shell.reachable = True
  _install(shell, 'https://host/lynx')
  here = pathlib.Path.cwd()
  _install(shell, 'https://host/lynx')
  assert pathlib.Path.cwd() == here == tmp_path / 'lynx_checkout'
  monkeypatch.chdir(tmp_path)  # as after a restart
  _install(shell, 'https://host/lynx')
  assert pathlib.Path.cwd() == here
  installs = [word for word in shell.ran if 'requirements.lock' in word]
  assert len(installs) == 3


def test_elsewhere_it_finds_the_root_and_installs_nothing(
  shell, tmp_path, monkeypatch
):
  monkeypatch.delenv('COLAB_RELEASE_TAG', raising=False)
  (tmp_path / 'lynx_jax').mkdir()
  (tmp_path / 'experiments').mkdir()
  monkeypatch.chdir(tmp_path / 'experiments')  # where Jupyter starts
  for _ in range(2):
    _install(shell)
    assert pathlib.Path.cwd() == tmp_path
  assert not [word for word in shell.ran if 'pip' in word]


in_one_worker = pytest.mark.xdist_group('notebook')


LAYERS = 10  # of the model's 30: one of each of the config's layer groups
LONGEST_S = 180.0


@pytest.fixture(scope='module')
def executed(tmp_path_factory):
  """Runs it as `make notebook` does, but for the depth of the model.

  Compiling all layers would take a tenth of the time of all tests. Programs may
  be those of a run before.
  """
  folder = tmp_path_factory.mktemp('notebook')
  whole = json.loads(notebook.FILE.read_text(encoding='utf-8'))
  (cell,) = [
    c for c in whole['cells'] if 'parameters' in c['metadata'].get('tags', ())
  ]
  cell['source'].append(f'\nfrom tests import shallow\nshallow.cut({LAYERS})')
  shallow = folder / notebook.FILE.name
  shallow.write_text(json.dumps(whole), encoding='utf-8')
  workdir = folder / 'a b'
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(notebook, 'FILE', shallow)
    patch.setenv('JAX_ENABLE_COMPILATION_CACHE', 'true')
    seconds = notebook.execute(workdir)
  assert seconds < LONGEST_S
  return workdir


@in_one_worker
def test_it_leaves_records_reports_and_pictures(executed):
  records = list(results.read(executed / results.FILE))
  requests = [r for r in records if r['kind'] == 'request']
  assert {r['scheme'] for r in requests} == {'int8', 'lynx'}
  assert {r['output_tokens'] for r in requests} == {24}
  assert any(r['kind'] == 'summary' for r in records)
  for name in ('report.html', 'timeline_serial.png', 'steps.png', 'split.png'):
    assert (executed / name).stat().st_size > 1000
  cells = json.loads((executed / notebook.FILE.name).read_text())['cells']
  pictures = [
    output
    for cell in cells
    for output in cell.get('outputs', ())
    if 'image/png' in output.get('data', ())
  ]
  assert len(pictures) == 4


@in_one_worker
def test_committed_tokens_are_those_of_int8_whatever_the_planes(executed):
  found = []
  for folder in (executed, executed / 'two_bits'):
    requests = [
      r
      for r in results.read(folder / results.FILE)
      if r['kind'] == 'request' and r['form'] == 'verify'
    ]
    assert requests
    assert all(r['equal_to_reference'] for r in requests)
    found += [r['token_ids'] for r in requests if r['scheme'] == 'lynx']
  assert found[0] == found[1]


def test_a_cell_that_fails_is_told(tmp_path, monkeypatch, capsys):
  text = notebook.FILE.read_text(encoding='utf-8')
  broken = tmp_path / notebook.FILE.name
  whole = json.loads(text)
  whole['cells'] = whole['cells'][:5]
  whole['cells'][-1]['source'].append('\nassert False, "reached"')
  broken.write_text(json.dumps(whole), encoding='utf-8')
  monkeypatch.setattr(notebook, 'FILE', broken)
  assert notebook.main([f'--workdir={tmp_path / "w"}']) == notebook.CELL_FAILED
  assert 'AssertionError: reached' in capsys.readouterr().err
  assert (tmp_path / 'w' / broken.name).exists()
