# SPDX-License-Identifier: Apache-2.0
"""What both processes of the transfer's tests share: model, formats, child."""

import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np

from lynx_jax import handshake
from lynx_jax.transport import messages
from lynx_jax.transport.streams import WireFormat
from tests import engines

ROOT = pathlib.Path(__file__).parents[1]
SETUP = engines.SETUPS['lynx']
WINDOW_BYTES = 64 * 1024
LEASE_S = 2.0
FORMATS = [
  WireFormat(engines.MODEL, engines.SETUPS[name].codec, SETUP.config)
  for name in ('lynx', 'dense', 'exact')
]
model = engines.model
ENVIRONMENT = os.environ | {
  'JAX_ENABLE_COMPILATION_CACHE': 'true',
  'JAX_NUM_CPU_DEVICES': '2',
}


class Child:
  """A prefill process.

  Args:
    cache: folder of compiled programs.
  """

  def __init__(self, cache: pathlib.Path):
    self._process = subprocess.Popen(
      [sys.executable, '-m', 'tests.prefill_process'],
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=ENVIRONMENT
      | {
        'JAX_COMPILATION_CACHE_DIR': str(cache),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      },
    )
    self._port = 0

  @property
  def address(self) -> str:
    """HOST:PORT; blocks until the process serves."""
    if not self._port:
      assert self._process.stdout is not None
      self._port = int(self._process.stdout.readline())
    return f'127.0.0.1:{self._port}'

  def held(self) -> tuple[int, int, int]:
    """Returns published bytes, prompts and peers that the process holds."""
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    print('held', file=self._process.stdin, flush=True)
    live, prompts, peers = self._process.stdout.readline().split()
    return int(live), int(prompts), int(peers)

  def drain(self) -> None:
    assert self._process.stdin is not None
    print('drain', file=self._process.stdin, flush=True)

  def signal(self, number: signal.Signals) -> None:
    self._process.send_signal(number)

  def end(self) -> None:
    self._process.kill()
    self._process.wait()
    for pipe in (self._process.stdin, self._process.stdout):
      assert pipe is not None
      pipe.close()


def placement():
  return jax.sharding.SingleDeviceSharding(engines.DECODE_DEVICE)


def submitted(wire: WireFormat, prompt: np.ndarray) -> messages.Submit:
  """Returns the message that asks for a prompt."""
  return messages.Submit(
    request=0,
    generation=0,
    prompt=prompt.astype('<i4').tobytes(),
    manifest=handshake.manifest_hash(wire, len(prompt)),
    mode='serial',
    deadline_in_s=None,
    landed=(),
  )
