# SPDX-License-Identifier: Apache-2.0
"""The page of a pre-flight: what passes, what fails, and the exit code."""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import pytest

from experiments import main, preflight
from tests import engines

pytestmark = pytest.mark.usefixtures('unoptimised')
ROOT = pathlib.Path(__file__).parents[1]
FLAGS = (
  'main',
  '--config=configs/tiny.py',
  '--config.study=preflight',
  '--config.scheme=int8,lynx',
  '--config.engine.chunk_bytes=1',  # a unit a chunk: few shapes to compile
)


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
  monkeypatch.chdir(ROOT)
  jax.devices()  # so that the command line cannot make others


def page(capsys, *flags: str) -> tuple[int, dict[str, str], str]:
  """Returns exit code, mark by name of a check, and all output."""
  code = main.main([*FLAGS, *flags])
  said = capsys.readouterr()
  marks = {
    line[6:].split('  ')[0].strip(): line[:4].strip()
    for line in said.out.splitlines()
    if line[:4] in ('ok  ', 'FAIL')
  }
  return code, marks, said.out + said.err


def test_a_run_that_would_work(capsys):
  """No work directory is needed."""
  code, marks, text = page(capsys)
  assert code == 0, text
  assert marks == dict.fromkeys(
    [
      'versions',
      'devices',
      'model',
      'mesh',
      'memory of prefill',
      'memory of decode',
      'text',
      'files',
      'port',
      'transfer',
    ],
    'ok',
  )
  assert text.endswith('all 10 checks passed\n')


def _taken() -> socket.socket:
  listening = socket.socket()
  listening.bind(('127.0.0.1', 0))
  listening.listen()
  return listening


@pytest.mark.parametrize(
  'flags, failed, said',
  [
    (['--config.prefill_mesh=3'], 'mesh', '1, 2, 4 can'),
    (['--config.decode_mesh=8'], 'mesh', '1 + 8 devices'),
    (['--config.engine.slots=9999999'], 'memory of decode', 'engine.slots'),
    (['--config.model.path=/no/such'], 'model', '/no/such'),
    (['--config.prompt_file=/no/such'], 'text', 'No such file'),
    (['--workdir=/dev/null/no'], 'files', '/dev/null/no cannot be written'),
    (
      ['--config.model.path=tests/goldens/tiny_llama'],
      'text',
      'the model 120 ids: model.tokenizer must name',
    ),
    (['--role=decode', '--connect=127.0.0.1:1'], 'port', 'start --role'),
    (['--role=prefill', '--listen=127.0.0.1:TAKEN'], 'port', 'that is free'),
  ],
)
def test_what_would_fail(capsys, flags, failed, said):
  with _taken() as listening:
    port = str(listening.getsockname()[1])
    flags = [flag.replace('TAKEN', port) for flag in flags]
    code, marks, text = page(capsys, *flags)
  assert code == 2
  assert marks[failed] == 'FAIL'
  assert 'transfer' not in marks
  assert said in text
  error = text.splitlines()[-1]
  assert error.startswith('error: ')
  assert failed in error


def test_a_machine_whose_chips_jax_does_not_see(tmp_path, monkeypatch):
  monkeypatch.setattr(preflight, '_CHIPS', (str(tmp_path),))
  assert 'this machine has TPU chips' in preflight._devices().fault


def test_what_does_not_arrive_is_no_pass(capsys, monkeypatch):
  engines.lose_arrivals(monkeypatch)
  code, marks, text = page(capsys)
  assert code == 2
  assert marks['transfer'] == 'FAIL'
  assert 'is not the reference' in text


def test_another_jax_than_the_tested_one(monkeypatch):
  assert preflight._versions().fault is None
  monkeypatch.setattr(jax, '__version__', '0.9.0')
  assert 'jax must be 0.10.x' in preflight._versions().fault


@pytest.mark.xdist_group('transfer')
def test_two_processes():
  """The one that prefills, on two devices, makes checks of its own."""
  command = [sys.executable, '-m', 'experiments.main', *FLAGS[1:]]
  done = subprocess.run(
    [*command, '--role=local', '--config.prefill_mesh=2'],
    cwd=ROOT,
    env=os.environ | {'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true'},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert 'ok    transfer' in done.stdout
