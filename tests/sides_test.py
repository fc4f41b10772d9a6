# SPDX-License-Identifier: Apache-2.0
"""Two prefill and two decode processes, each with two devices, end to end.

From the command line: what a user sees, and how a side ends with one of its
processes. And from the library, where all that lands can come late: the decode
processes must agree, whatever lands when.
"""

import contextlib
import json
import os
import pathlib
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from experiments import cli, results
from tests import side_process

ROOT = pathlib.Path(__file__).parents[1]
SEEDS = 6
BOUND_S = 100.0  # programs are compiled meanwhile
COMMAND = [
  *(sys.executable, '-m', 'experiments.main', '--config=configs/tiny.py'),
  '--config.scheme=int8',  # its programs are needed in any case
  '--config.prompt_tokens=260',
  '--config.output_tokens=4',
  '--config.link.rate_gbps=0.1',
  '--config.patience.reconnect_s=1.0',
  '--config.prefill_mesh=4',
  '--config.decode_mesh=4',
  # Few programs to compile.
  '--config.engine.chunk_bytes=1',
  '--config.engine.draft_tokens=0',
  '--config.engine.layer_groups=1',
  '--config.engine.sharpen=False',
  '--config.engine.slots=1',
]
MEASURES = 'measuring prefill'  # what decode says once it has a session
# One worker: these tests start many processes.
pytestmark = pytest.mark.xdist_group('transfer')


@pytest.fixture(scope='module')
def environment(tmp_path_factory) -> dict[str, str]:
  """What one process has compiled the next ones find; none optimises."""
  return os.environ | {
    'JAX_ENABLE_COMPILATION_CACHE': 'true',
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
    'JAX_COMPILATION_CACHE_DIR': str(tmp_path_factory.mktemp('programs')),
  }


class Command:
  """A process of the command line."""

  def __init__(self, environment: dict[str, str], *flags: str):
    self.process = subprocess.Popen(
      [*COMMAND, *flags],
      cwd=ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=environment,
    )
    self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    self._error: list[str] = []
    self._readers = [
      threading.Thread(target=self._read_out),
      threading.Thread(target=self._read_error),
    ]
    for reader in self._readers:
      reader.start()

  def until(self, start: str) -> str:
    """Returns what follows this in the next line that has it."""
    for line in self._further():
      if start in line:
        return line.partition(start)[-1].strip()
    raise AssertionError(self.end())

  def rest(self) -> list[str]:
    """Returns all further lines, once it has ended, but those that gloo says.

    It does not say them in one piece.
    """
    lines = self._further()
    return [x for x in lines if 'Gloo' not in x and 'peer ranks' not in x]

  def end(self, within_s: float = BOUND_S) -> tuple[int, str]:
    """Waits for its end; returns exit code and the last line of its errors."""
    code = self.process.wait(timeout=within_s)
    for reader in self._readers:
      reader.join()
    errors = ''.join(self._error)
    assert 'Traceback' not in errors, errors
    return code, errors.splitlines()[-1] if errors else ''

  def close(self) -> None:
    self.process.kill()
    self.process.wait()
    for reader in self._readers:
      reader.join()
    for pipe in (self.process.stdout, self.process.stderr):
      pipe.close()

  @property
  def lives(self) -> bool:
    return self.process.poll() is None

  def _further(self) -> Iterator[str]:
    return iter(lambda: self._lines.get(timeout=BOUND_S), None)

  def _read_out(self) -> None:
    for line in self.process.stdout:
      if line.strip():
        self._lines.put(line)
    self._lines.put(None)

  def _read_error(self) -> None:
    self._error.extend(self.process.stderr)


@contextlib.contextmanager
def commands(
  environment: dict[str, str], *flags: str, count: int = 2
) -> Iterator[list[Command]]:
  """Yields the processes of a side, joined by flags."""
  joined = f'--coordinator=127.0.0.1:{free_port()}', f'--processes={count}'
  found = [
    Command(environment, *flags, *joined, f'--process={i}')
    for i in range(count)
  ]
  try:
    yield found
  finally:
    for one in found:
      one.close()


def free_port(within: range = range(1)) -> int:
  """Returns a port that is free, one of some or any."""
  for port in within:
    with (
      contextlib.suppress(OSError),
      socket.create_server(('127.0.0.1', port)) as free,
    ):
      return free.getsockname()[1]
  raise AssertionError('no port is free')


@pytest.fixture(scope='module')
def prefill(environment) -> Iterator[list[Command]]:
  """A prefill side that lives until the last test, which ends it."""
  flags = '--role=prefill', '--listen=127.0.0.1:0'
  with commands(environment, *flags) as found:
    yield found


@pytest.fixture(scope='module')
def addresses(prefill) -> str:
  return ','.join(one.until('prefill serves at ') for one in prefill)


def test_both_sides_in_two_processes(environment, addresses, tmp_path):
  """Decode finds its processes by itself, as on a cluster."""
  first = 2**16 - 2**12  # where JAX looks for the coordinator of a job of Slurm
  job = free_port(range(first, 2**16)) - first
  cluster = environment | {
    'SLURM_JOB_ID': str(job),
    'SLURM_STEP_NODELIST': '127.0.0.1',
    'SLURM_NTASKS': '2',
  }
  flags = '--role=decode', '--distributed', f'--connect={addresses}'
  processes = [
    Command(
      cluster | {'SLURM_PROCID': str(i), 'SLURM_LOCALID': str(i)},
      *flags,
      f'--workdir={tmp_path / str(i)}',
    )
    for i in range(2)
  ]
  try:
    assert [one.end() for one in processes] == [(0, '')] * 2
    shown, quiet = (one.rest() for one in processes)
  finally:
    for one in processes:
      one.close()
  assert any('equals reference' in line and 'yes' in line for line in shown)
  assert not quiet
  assert not (tmp_path / '1').exists()
  requests = [
    record
    for record in results.read(tmp_path / '0' / results.FILE)
    if record['kind'] == 'request'
  ]
  # One-row decode has no reference.
  assert {r['equal_to_reference'] for r in requests} == {None, True}
  assert (tmp_path / '0' / 'report.html').exists()


def test_a_side_ends_with_one_of_its_processes(
  environment, prefill, addresses, tmp_path
):
  """Of decode that is process 0, by which the others have found each other."""
  flags = '--role=decode', f'--connect={addresses}', f'--workdir={tmp_path}'
  with commands(environment, *flags) as (one, other):
    one.until('loading')
    one.process.kill()
    code, error = other.end(within_s=30.0)
    assert code == cli.PEER_LOST
    assert error == 'error: process 0 of this side is gone'
  assert all(one.lives for one in prefill)
  # A death in the other side.
  with commands(environment, *flags) as decode:
    decode[0].until(MEASURES)
    prefill[1].process.kill()
    code, error = prefill[0].end(within_s=30.0)
    assert code == cli.PEER_LOST
    assert error == 'error: process 1 of this side is gone'
    for one in decode:
      code, error = one.end(within_s=30.0)
      assert code == cli.PEER_LOST
      assert error.startswith('error: ')


class Process:
  """One process of a side; see `side_process`."""

  def __init__(self, side: str, *arguments: object):
    self._process = subprocess.Popen(
      [
        *(sys.executable, '-m', 'tests.side_process', side),
        *map(str, arguments),
      ],
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )

  def read(self):
    """Returns what it says next; gloo prints lines of its own."""
    assert self._process.stdout is not None
    for line in self._process.stdout:
      if line.startswith(side_process.SAYS):
        return json.loads(line.removeprefix(side_process.SAYS))
    raise AssertionError(f'it ended with code {self._process.wait()}')

  def kill(self) -> None:
    self._process.kill()
    self._process.communicate()


@contextlib.contextmanager
def side(name: str, *rest: tuple[object, ...]) -> Iterator[list[Process]]:
  """Yields the processes of a side; `rest` has further arguments of each."""
  coordinator = f'127.0.0.1:{free_port()}'
  processes = [
    Process(name, coordinator, number, *arguments)
    for number, arguments in enumerate(rest)
  ]
  try:
    yield processes
  finally:
    for process in processes:
      process.kill()


def test_decode_processes_agree_whatever_lands_when():
  with side('prefill', (), ()) as prefill:
    addresses = [f'127.0.0.1:{process.read()}' for process in prefill]
    with side('decode', *((a, SEEDS) for a in addresses)) as decode:
      references = [process.read() for process in decode]
      assert references[0] == references[1]
      for _ in range(SEEDS):
        assert [process.read() for process in decode] == references
