# SPDX-License-Identifier: Apache-2.0
"""INT8 over Lynx of the real model, on a real link and on an emulated one.

    python -m experiments.transport_study --parts=ratio

Both are runs of the main command with prefill in a process of its own, at the
same nominal rate; a real link takes 4 to 5 % of it for headers.
"""

import contextlib
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from experiments import namespaces, results
from experiments.options import SERVING

_RATE_MBIT = 40  # the transfer takes about 60 % of a serial INT8 request
_PAIRS = 3
_COMMAND = [
  *(sys.executable, '-m', 'experiments.main', '--config=configs/demo.py'),
  *('--config.scheme=int8,lynx', '--config.mode=serial'),
  *(f'--config.repeats={_PAIRS}', '--config.output_tokens=8'),
  f'--config.link.rate_gbps={_RATE_MBIT / 1000}',
]


def measure() -> Iterator[dict[str, Any]]:
  """Runs both and yields summary records; needs root."""
  found = {}
  with tempfile.TemporaryDirectory() as folder:
    for name, run in {'emulated': _emulated, 'real': _real}.items():
      workdir = pathlib.Path(folder, name)
      run(f'--workdir={workdir}')
      found[name] = _ratio(workdir)
      yield results.summary_record(
        f'ttft_int8_over_lynx_{name}', found[name], '', _PAIRS
      )
  yield results.summary_record(
    'ttft_int8_over_lynx_real_over_emulated',
    found['real'] / found['emulated'],
    f'at {_RATE_MBIT} Mbit/s',
    _PAIRS,
  )


def _emulated(workdir: str) -> None:
  _run([*_COMMAND, '--role=local', workdir])


def _real(workdir: str) -> None:
  sender, receiver = (
    namespaces.inside(space, *_COMMAND) for space in namespaces.SPACES
  )
  with contextlib.ExitStack() as stack:
    stack.enter_context(namespaces.link(_RATE_MBIT))
    listen = f'--listen={namespaces.ADDRESSES[0]}:0'
    prefill = stack.enter_context(
      subprocess.Popen(
        [*sender, '--role=prefill', listen, '--ends_with_stdin'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
      )
    )
    assert prefill.stdin is not None
    assert prefill.stdout is not None
    stack.callback(prefill.stdin.close)  # it ends then
    address = next(
      line.removeprefix(SERVING).strip()
      for line in prefill.stdout
      if line.startswith(SERVING)
    )
    _run(
      [
        *receiver,
        '--role=decode',
        f'--connect={address}',
        '--config.link.emulated=False',
        workdir,
      ]
    )


def _run(command: list[str]) -> None:
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _ratio(workdir: pathlib.Path) -> float:
  (value,) = [
    record['value']
    for record in results.read(workdir / results.FILE)
    if record.get('name') == 'ttft_int8_over_lynx'
  ]
  return value
