# SPDX-License-Identifier: Apache-2.0
"""The command line: one clear line and exit code 2 for a user's mistake."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments import cli, main, results
from lynx_jax.config import ConfigError
from lynx_jax.models.errors import WeightsError
from lynx_jax.transport.streams import TransferError

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
  monkeypatch.chdir(ROOT)


def _study(settings, writer, screen):
  screen.note(f'ran {settings.study}')
  writer.write(results.request_record(study=settings.study))


def _main(workdir, *flags, config='configs/tiny.py', study=_study) -> int:
  argv = ['main', f'--config={config}', f'--workdir={workdir}', *flags]
  return main.main(argv, study)


def test_a_study_runs_with_overrides(tmp_path, capsys):
  code = _main(tmp_path / 'a b', '--config.study', 'mine', '--config.seed=3')
  assert code == 0
  assert capsys.readouterr().out.startswith('ran mine\n')
  run, record = results.read(tmp_path / 'a b' / results.FILE)
  assert '--config.seed=3' in run['detail']['command']
  assert run['detail']['config']['seed'] == 3
  assert record['study'] == 'mine'


def test_placeholders_can_be_set():
  values, workdir = cli.parse(
    [
      'main',
      '--config=configs/tiny.py',
      '--workdir=w',
      '--config.link.rate_gbps=2.5',
      '--config.engine.draft_tokens=3',
      '--config.codec.k=8',
    ]
  )
  assert workdir == 'w'
  assert values.link.rate_gbps == 2.5
  assert values.engine.draft_tokens == 3
  assert values.codec.k == '8'


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--config.schem=lynx'], 'did you mean config.scheme?'),
    (['--config.codec.kk=4'], 'did you mean config.codec.k?'),
    (['--config.codec=4'], 'config.codec is a group of fields'),
    (['--config.scheme=lnyx'], "did you mean 'lynx'?"),
    (['--config.codec.k=5'], 'plane width 5'),
    (['--config.output_tokens=many'], 'invalid literal for int'),
    (['--config.link.rate_gbps=0'], 'link.rate_gbps=0.0 must be positive'),
    (['--config.link.rate_gbps=-2'], 'link.rate_gbps=-2.0 must be positive'),
    (['--config.prompt_file=/no/such'], "'/no/such': No such file"),
    (['--config.prompt_file=/'], "'/': Is a directory"),
    (['--config.prompt_file=/dev/null'], "'/dev/null' is empty"),
    (['--workdri=x'], 'Did you mean: workdir'),
    (['more'], "'more' is no flag"),
    (['--workdir='], '--workdir is missing'),
    (['--config=configs/nope.py'], "'configs/nope.py' does not exist"),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
  tmp_path, capsys, flags, message
):
  assert _main(tmp_path / 'w', *flags) == 2
  error = capsys.readouterr().err
  assert message in error
  assert error.startswith('error: ')
  assert error.count('\n') == 1, error
  assert not (tmp_path / 'w').exists()


@pytest.mark.parametrize(
  'source',
  [
    'def get_config(',
    'import nothing_like_this',
    'def get_config(arg=None):\n  return 1 / 0',
    'x = 1',
  ],
)
def test_a_broken_config_file_is_one_line(tmp_path, capsys, source):
  file = tmp_path / 'broken.py'
  file.write_text(source)
  # A good one first: nothing of it may stand in for what the broken one lacks.
  assert _main(tmp_path / 'good') == 0
  capsys.readouterr()
  assert _main(tmp_path / 'w', config=file) == 2
  assert capsys.readouterr().err.count('\n') == 1


@pytest.mark.parametrize('name', ['abblation', 'fidelty', 'preflght', 'plans'])
def test_a_misspelt_study_is_not_a_latency_study(tmp_path, capsys, name):
  assert _main(tmp_path / 'w', f'--config.study={name}', study=None) == 2
  error = capsys.readouterr().err
  assert error.startswith(f'error: study={name!r} is no study; did you mean ')
  assert not (tmp_path / 'w').exists()


def test_a_damaged_model_is_told_in_one_line(tmp_path, capsys):
  def study(*_):
    raise WeightsError('m.gguf', [f'no tensor {i}' for i in range(9)], 'Mend.')

  assert _main(tmp_path, study=study) == 2
  error = capsys.readouterr().err
  assert error.count('\n') == 1
  assert 'no tensor 2; and 6 more. Mend.' in error


def test_an_unwritable_workdir(tmp_path, capsys):
  (tmp_path / 'file').write_text('')
  assert _main(tmp_path / 'file' / 'w') == 2
  error = capsys.readouterr().err
  assert 'Not a directory; choose another --workdir' in error


def test_an_unwritable_folder_for_a_trace_shows_first(tmp_path, capsys):
  (tmp_path / 'profile').write_text('not a folder')
  assert _main(tmp_path, '--profile') == 2
  said = capsys.readouterr()
  assert said.out == ''
  assert said.err.startswith(f"error: --profile: '{tmp_path}/profile' cannot")


def test_a_full_disk(tmp_path, capsys):
  (tmp_path / results.FILE).symlink_to('/dev/full')
  assert _main(tmp_path) == 2
  assert 'No space left on device; free some space' in capsys.readouterr().err


def test_half_a_record_of_a_crash_is_told(tmp_path, capsys):
  (tmp_path / results.FILE).write_text('{"kind": "req')
  assert _main(tmp_path) == 0
  assert 'half a record' in capsys.readouterr().out
  assert len(list(results.read(tmp_path / results.FILE))) == 2


@pytest.mark.parametrize(
  'raised, code, said',
  [
    (KeyboardInterrupt(), 130, 'interrupted'),
    (ConfigError('x=1 must be 2'), 2, 'error: x=1 must be 2\n'),
    (MemoryError(), 2, 'out of memory'),
    (ModuleNotFoundError("No module named 'gguf'", name='gguf'), 2, 'gguf'),
    (BrokenPipeError(), 1, ''),
    (TransferError('prefill is gone'), 3, 'error: prefill is gone\n'),
  ],
)
def test_what_a_study_raises(tmp_path, capsys, monkeypatch, raised, code, said):
  def study(*_):
    raise raised

  monkeypatch.setattr(os, 'dup2', lambda *_: None)
  assert _main(tmp_path, study=study) == code
  assert said in capsys.readouterr().err


def test_a_fault_of_the_program_is_not_hidden(tmp_path):
  def study(*_):
    raise AssertionError('a fault')

  with pytest.raises(AssertionError):
    _main(tmp_path, study=study)


def test_compiled_programs_are_kept_where_that_can_be_written(
  tmp_path, monkeypatch
):
  import jax

  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
  (tmp_path / 'file').touch()  # no folder can be made below it
  names = (
    'jax_compilation_cache_dir',
    'jax_compilation_cache_max_size',
    'jax_enable_compilation_cache',
    'jax_persistent_cache_min_compile_time_secs',
  )
  before = {name: getattr(jax.config, name) for name in names}
  try:
    jax.config.update('jax_compilation_cache_dir', None)
    jax.config.update('jax_enable_compilation_cache', False)
    cli.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None
    jax.config.update('jax_enable_compilation_cache', True)
    cli.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    cli.keep_programs()
    kept = pathlib.Path(jax.config.jax_compilation_cache_dir)
    assert kept.is_dir()
    assert kept.is_relative_to(tmp_path / 'lynx_jax')
    monkeypatch.setenv('XDG_CACHE_HOME', '/elsewhere')
    cli.keep_programs()  # a choice that was made stays
    assert jax.config.jax_compilation_cache_dir == str(kept)
    # Writing was cut short a minute ago, or may be under way, or has ended.
    for name, age_s in (('half', 61), ('fresh', 0), ('whole', 61)):
      (kept / f'{name}-cache').write_bytes(b'code')
      written = time.time() - age_s
      os.utime(kept / f'{name}-cache', (written, written))
    (kept / 'whole-atime').touch()
    jax.config.update('jax_compilation_cache_dir', None)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    cli.keep_programs()
    left = {path.name for path in kept.glob('*-cache')}
    assert left == {'fresh-cache', 'whole-cache'}
  finally:
    for name, value in before.items():
      jax.config.update(name, value)


def test_help(capsys):
  assert main.main(['main', '--help']) == 0
  assert '--config.codec.k=4,4' in capsys.readouterr().out


def _python(code, **more):
  return subprocess.Popen(
    [sys.executable, '-c', code],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    **more,
  )


def test_as_a_module():
  command = [sys.executable, '-m', 'experiments.main']
  command += ['--config=configs/x.py', '--workdir=w']
  done = subprocess.run(
    command, cwd=ROOT, capture_output=True, text=True, check=False
  )
  assert done.returncode == 2
  assert done.stderr.startswith("error: --config cannot be read: 'configs/x.py")
  assert 'Traceback' not in done.stderr


def test_ctrl_c_in_a_running_process(tmp_path):
  code = f"""
import sys, time
from experiments import main
def study(settings, writer, screen):
  writer.write({{'n': 1}})
  screen.note('running')
  time.sleep(60)
sys.exit(main.main(
  ['main', '--config=configs/tiny.py', '--workdir={tmp_path}'], study))
"""
  process = _python(code)
  assert process.stdout.readline() == 'running\n'
  time.sleep(0.1)
  process.send_signal(signal.SIGINT)
  _, error = process.communicate(timeout=30)
  assert process.returncode == 130
  assert error == 'interrupted; the records written so far are whole\n'
  assert list(results.read(tmp_path / results.FILE))[1:] == [{'n': 1}]
