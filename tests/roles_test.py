# SPDX-License-Identifier: Apache-2.0
"""Roles of a process: flags, and processes that end with each other."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from experiments import cell_rows, cli, main, options, results, sides
from lynx_jax.config import ConfigError
from lynx_jax.transport import control

ROOT = pathlib.Path(__file__).parents[1]
COMMAND = [sys.executable, '-m', 'experiments.main']
SMALL = [
  '--config=configs/tiny.py',
  '--config.scheme=int8,lynx',
  '--config.prompt_tokens=260',
  '--config.output_tokens=4',
  '--config.link.rate_gbps=0.1',
  '--config.engine.chunk_bytes=1',  # a unit a chunk: few shapes to compile
]
# What one process has compiled the next ones find. None optimises: tokens of
# optimised programs in two processes are compared in remote_prefill_test.
ENVIRONMENT = os.environ | {
  'JAX_ENABLE_COMPILATION_CACHE': 'true',
  'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  'JAX_DISABLE_MOST_OPTIMIZATIONS': 'true',
}
# One worker: these tests and those of the transfer start many processes.
pytestmark = pytest.mark.xdist_group('transfer')


@pytest.fixture(scope='module', autouse=True)
def _programs_of_these_tests(tmp_path_factory):
  """Keeps them where nobody else looks."""
  cache = tmp_path_factory.mktemp('programs')
  ENVIRONMENT['JAX_COMPILATION_CACHE_DIR'] = str(cache)


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--config.link.emulated=False'], 'emulated=False needs a --role'),
    (['--role=both'], 'should be one of <prefill|decode|local>'),
    (['--role=prefill'], '--role=prefill needs --listen=ADDRESS:PORT'),
    (['--role=decode'], '--role=decode needs --connect=ADDRESS:PORT'),
    (['--role=local', '--listen=127.0.0.1:0'], 'local takes no --listen'),
    (['--listen=127.0.0.1:0'], '--listen needs a --role'),
    (['--process=0'], '--process needs a --role'),
    (['--role=prefill', '--listen=7000'], "'7000' must be ADDRESS:PORT"),
    (['--role=prefill', '--listen=0.0.0.0:0'], 'every interface'),
    (['--role=prefill', '--listen=127.0.0.1:65536'], 'must be ADDRESS:PORT'),
    (['--role=decode', '--connect=prefill-0'], "--connect='prefill-0' must be"),
    (['--role=decode', f'--connect=a:{10**30}'], 'must be ADDRESS:PORT'),
    (['--role=local', '--key=/no/such'], "'/no/such': No such file"),
    (
      [
        '--role=decode',
        '--connect=127.0.0.1:1',
        '--config.faults.peer=kill@pull:1',
      ],
      'faults.peer needs --role=local',
    ),
    (['--config.faults.peer=kill@pull:1'], 'faults need a --role'),
    (['--config.link.jitter_ms=1.0'], 'jitter_ms=1.0 needs a --role'),
  ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, flags, message):
  monkeypatch.chdir(ROOT)
  argv = ['main', *SMALL, f'--workdir={tmp_path}', *flags]
  assert main.main(argv) == cli.USER_MISTAKE
  error = capsys.readouterr().err
  assert error.startswith('error: ')
  assert error.count('\n') == 1, error
  assert message in error


PREFILL = {'role': options.Role.PREFILL, 'listen': '127.0.0.1:0'}
DECODE = {'role': options.Role.DECODE, 'connect': '127.0.0.1:1,127.0.0.1:2'}


def _one_of(number: int, count: int, **more) -> dict:
  coordinator = f'127.0.0.1:{_unused_port()}'
  return more | {
    'coordinator': coordinator,
    'processes': count,
    'process': number,
    'start_s': 1,
  }


def _unused_port() -> int:
  with socket.create_server(('127.0.0.1', 0)) as free:
    return free.getsockname()[1]


@pytest.mark.parametrize(
  'given, message',
  [
    (_one_of(2, 2, **PREFILL), r'--process=2 must be in 0\.\.1'),
    (_one_of(-1, 2, **PREFILL), r'--process=-1 must be in 0\.\.1'),
    (_one_of(0, 0, **PREFILL), '--processes=0 must be positive'),
    (PREFILL | {'processes': 2}, 'go together'),
    (PREFILL | {'process': 0}, 'go together'),
    (_one_of(0, 2, **PREFILL) | {'distributed': True}, 'leave them out'),
    (PREFILL | {'distributed': True, 'start_s': 0}, '--start_s=0 must be'),
    ({'role': options.Role.LOCAL, 'distributed': True}, 'one process a side'),
    (DECODE, 'has 2 addresses, but this side has 1 processes'),
    (_one_of(0, 3, **DECODE), 'has 2 addresses, but this side has 3 processes'),
    (_one_of(0, 2, **PREFILL | {'listen': '10.0.0.1:0,0.0.0.0:0'}), 'every'),
    (_one_of(0, 2, **PREFILL) | {'coordinator': 'a:b'}, "--coordinator='a:b'"),
  ],
)
def test_processes_that_do_not_fit(given, message):
  def read() -> None:
    one = options.Options(**given)
    one.of(one.process or 0, one.processes or 1)

  with pytest.raises(ConfigError, match=message):
    read()


@pytest.mark.parametrize(
  'content', [b' \n', b'\xff\xfe', 'schlüssel'.encode(), b'one\ntwo']
)
def test_what_a_header_cannot_carry_is_no_token(tmp_path, content):
  file = tmp_path / 'token'
  file.write_bytes(content)
  role = options.Options(**PREFILL, token_file=str(file))
  with pytest.raises(ConfigError, match='holds no token'):
    role.security()


@pytest.mark.parametrize('host', ['127.0.0.1', '::1'])
def test_what_a_prefill_process_prints_can_be_connected_to(host):
  assert sides.numeric(sides.together(host, 7000)) == (host, 7000)


@pytest.mark.parametrize(
  'given, error, message',
  [
    (_one_of(1, 2, **DECODE), control.PeerLost, 'no process 0 at'),
    (
      _one_of(0, 2, **DECODE) | {'coordinator': '192.0.2.1:7000'},
      ConfigError,
      '192.0.2.1:7000 cannot be bound',
    ),
    (_one_of(0, 3, **PREFILL), ConfigError, 'prefill_mesh=4 cannot be shared'),
    (PREFILL | {'distributed': True}, ConfigError, 'finds no TPU pod'),
  ],
)
def test_processes_that_do_not_come_together(given, error, message):
  """It shows before JAX is asked, whose own waits are longer."""
  with (
    pytest.raises(error, match=message),
    sides.joined(options.Options(**given), 4, lambda count: None),
  ):
    pass


def test_processes_that_count_each_other_differently():
  """Each of the two would be one of a side with 12 devices."""
  flags = _one_of(0, 2, listen='127.0.0.1:0') | {'start_s': 60}
  flags['config.prefill_mesh'] = 12
  started = []
  for changes in ({}, {'processes': 3, 'process': 1}):
    argv = [f'--{name}={value}' for name, value in (flags | changes).items()]
    started.append(
      subprocess.Popen(
        [*COMMAND, *SMALL, '--role=prefill', *argv],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
      )
    )
  for process, count in zip(started, (2, 3), strict=True):
    _, err = process.communicate(timeout=120)
    assert process.returncode == cli.USER_MISTAKE, err
    assert f'error: --processes={count} with {12 // count} devices' in err
    assert 'Traceback' not in err


def test_process_0_needs_a_workdir(monkeypatch, capsys):
  monkeypatch.chdir(ROOT)
  flags = _one_of(0, 2, connect='127.0.0.1:1,127.0.0.1:2')
  argv = [f'--{name}={value}' for name, value in flags.items()]
  assert main.main(['main', *SMALL, '--role=decode', *argv]) == cli.USER_MISTAKE
  assert '--workdir is missing' in capsys.readouterr().err


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--role=decode', '--connect=127.0.0.1:1'], 'UNAVAILABLE'),
    (
      ['--role=local', '--config.transfer.prefill_bytes=1000'],
      "differ in free memory: prefill has '1000 bytes'",
    ),
    (
      [
        *('--role=prefill', '--listen=127.0.0.1:0', '--config.prefill_mesh=2'),
        f'--coordinator=127.0.0.1:{_unused_port()}',
        *('--processes=2', '--process=0', '--start_s=1'),
      ],
      'not all 2 processes of this side came within --start_s=1',
    ),
  ],
)
def test_what_the_other_side_says_is_one_line(tmp_path, flags, message):
  done = subprocess.run(
    [*COMMAND, *SMALL, f'--workdir={tmp_path}', *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=ENVIRONMENT,
    check=False,
  )
  assert done.returncode in (cli.USER_MISTAKE, cli.PEER_LOST)
  lines = [x for x in done.stderr.splitlines() if x.startswith('error: ')]
  assert len(lines) == 1
  assert message in lines[0]
  assert 'Traceback' not in done.stderr


def _children(parent: int) -> list[int]:
  """Returns the processes that a process has started."""
  found = []
  for task in pathlib.Path(f'/proc/{parent}/task').iterdir():
    with contextlib.suppress(OSError):
      found += map(int, (task / 'children').read_text().split())
  return found


def _lives(process: int) -> bool:
  try:
    state = pathlib.Path(f'/proc/{process}/stat').read_text().rpartition(')')[2]
  except OSError:
    return False
  return state.split()[0] != 'Z'


def _until(condition, within_s: float) -> None:
  until_s = time.monotonic() + within_s
  while not condition():
    assert time.monotonic() < until_s, f'not within {within_s} s'
    time.sleep(0.02)


@contextlib.contextmanager
def _started(*flags: str) -> Iterator[subprocess.Popen]:
  """Yields a process, and ends it if the test has not."""
  with subprocess.Popen(
    [*COMMAND, *SMALL, *flags],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=ENVIRONMENT,
  ) as process:
    try:
      yield process
    finally:
      process.kill()


def test_every_cell_of_an_ablation_has_a_prefill_process(tmp_path):
  """The window bounds what is under way, which takes a second process."""
  command = [
    *COMMAND,
    '--config=configs/ablation_tiny.py',
    *SMALL[2:],
    f'--workdir={tmp_path}',
    '--role=local',
    '--config.scheme=int8',
    '--config.mode=serial',
    '--config.transfer.window_bytes=9',  # each cell has its own
    '--config.link.rtt_ms=40',
    '--config.acceptance.output_tokens=0',
    '--config.ablation.cells=',
    '--config.ablation.axes=transfer.window_bytes=8192|1048576',
  ]
  for left in (2, 0):  # the second time there is nothing to do
    done = subprocess.run(
      command,
      cwd=ROOT,
      capture_output=True,
      text=True,
      env=ENVIRONMENT,
      check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f'2 cells, of which {left} are to be run' in done.stdout
    assert done.stdout.count('starting the prefill process') == left
  small, large = cell_rows.written([*results.read(tmp_path / results.FILE)])[
    'rows'
  ]
  # A window of few chunks waits a round trip for the next ones.
  assert small['ttft_provisional_s'] > large['ttft_provisional_s'] + 0.1
  assert min(row['ttft_over_bound'] for row in (small, large)) >= 1


def test_both_sides_on_this_machine(tmp_path):
  """Each of four devices pulls its part of what two have computed."""
  meshes = '--config.prefill_mesh=2', '--config.decode_mesh=4'
  with _started(f'--workdir={tmp_path}', '--role=local', *meshes) as process:
    out, err = process.communicate(timeout=280)
  assert process.returncode == 0, err
  assert 'chunks go as bytes' not in err
  assert 'starting the prefill process' in out
  records = [*results.read(tmp_path / results.FILE)]
  requests = [r for r in records if r['kind'] == 'request']
  assert {r['scheme'] for r in requests} == {'int8', 'lynx'}
  # The receiver's reads of digests are not among them.
  (fetches,) = [
    r['value'] for r in records if r.get('name') == 'fetches_per_draft_round'
  ]
  assert fetches == 1
  for record in requests:
    assert record['equal_to_reference'] in (True, None)
    # Nothing beats the bound, whose clock and bytes come from two processes.
    assert record['ttft_provisional_s'] > 0.99 * record['bound_ttft_s']
  assert any(r['equal_to_reference'] for r in requests)


def test_faults_of_the_config_end_in_the_reference(tmp_path):
  """Chunks break, the prefill process dies in a transfer and is back."""
  flags = [
    '--config.scheme=lynx',
    '--config.faults.most=5',
    '--config.faults.corrupt=0.2',
    '--config.faults.unannounced=0.2',
    '--config.faults.peer=kill@pull:20',
    '--config.faults.back_s=0.0',
    '--config.patience.stall_s=5.0',  # it compiles anew meanwhile
    '--config.patience.reconnect_s=60.0',
  ]
  done = subprocess.run(
    [*COMMAND, *SMALL, f'--workdir={tmp_path}', '--role=local', *flags],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env=ENVIRONMENT,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert 'faults on purpose: ' in done.stdout
  assert '1 pull' in done.stdout
  requests = [
    r for r in results.read(tmp_path / results.FILE) if r['kind'] == 'request'
  ]
  assert [r['equal_to_reference'] for r in requests] == [True]


def test_ctrl_c_ends_a_prefill_process(tmp_path):
  with _started('--role=prefill', '--listen=127.0.0.1:0') as process:
    assert any(line.startswith('prefill serves') for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
  assert process.returncode == 130
  assert 'Traceback' not in err


@pytest.mark.parametrize('ending', [signal.SIGINT, signal.SIGKILL])
def test_the_prefill_process_ends_with_its_parent(tmp_path, ending):
  started = []
  with _started(f'--workdir={tmp_path}', '--role=local') as process:

    def serves() -> bool:
      started[:] = _children(process.pid)
      return bool(started)

    _until(serves, within_s=60.0)
    process.send_signal(ending)
    _, err = process.communicate(timeout=60)
  assert process.returncode == (130 if ending is signal.SIGINT else -ending)
  if ending is signal.SIGINT:
    assert err.endswith('interrupted; the records written so far are whole\n')
  _until(lambda: not any(map(_lives, started)), within_s=30.0)
