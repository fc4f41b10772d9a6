# SPDX-License-Identifier: Apache-2.0
"""Two prefill and two decode processes, each with two devices, end to end.

The decode processes must agree, whatever lands when; and a death on one side
must not abort the other.
"""

import contextlib
import json
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator

from tests import side_process

ROOT = pathlib.Path(__file__).parents[1]
SEEDS = 6


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

  def tell(self) -> None:
    assert self._process.stdin is not None
    print(file=self._process.stdin, flush=True)

  def kill(self) -> None:
    self._process.kill()
    self._process.communicate()

  @property
  def lives(self) -> bool:
    return self._process.poll() is None


@contextlib.contextmanager
def side(name: str, *rest: tuple[object, ...]) -> Iterator[list[Process]]:
  """Yields the processes of a side; `rest` has further arguments of each."""
  with socket.create_server(('127.0.0.1', 0)) as free:
    coordinator = f'127.0.0.1:{free.getsockname()[1]}'
  processes = [
    Process(name, coordinator, number, *arguments)
    for number, arguments in enumerate(rest)
  ]
  try:
    yield processes
  finally:
    for process in processes:
      process.kill()


def test_sides_of_two_processes():
  with side('prefill', (), ()) as prefill:
    addresses = [f'127.0.0.1:{process.read()}' for process in prefill]
    with side('decode', *((a, SEEDS) for a in addresses)) as decode:
      references = [process.read() for process in decode]
      assert references[0] == references[1]
      for _ in range(SEEDS):
        assert [process.read() for process in decode] == references
      prefill[1].kill()
      for process in decode:
        process.tell()
      for process in decode:
        assert 'TransferError' in process.read()
        assert process.lives
