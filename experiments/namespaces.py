# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces with a real, limited link between them.

Needs root, `ip` and `tc`. Without delay the link is a veth pair with tbf. With
delay it is a pair of TUN devices and a relay in Python, since not every kernel
has netem; it serves up to about 1 Gbit/s.
"""

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

SPACES = ('lynx-send', 'lynx-receive')
ADDRESSES = ('10.78.0.1', '10.78.0.2')
_DEVICE = 'lynx0'
_MTU = 9000  # jumbo frames: a relay pays by packet
_QUEUE_S = 0.03  # what the relay holds, in time on the link
_NEW_NET = 0x40000000  # CLONE_NEWNET
_SET_INTERFACE, _TUN = 0x400454CA, 0x1001  # TUNSETIFF, IFF_TUN | IFF_NO_PI


@contextlib.contextmanager
def link(rate_mbit: int, rtt_ms: float = 0.0) -> Iterator[None]:
  """Makes the namespaces and the link, and removes them."""
  with contextlib.ExitStack() as stack:
    stack.callback(_remove)
    for space in SPACES:
      _run('ip', 'netns', 'add', space)
      _run('ip', '-n', space, 'link', 'set', 'lo', 'up')
    if rtt_ms:
      stack.enter_context(_relayed(rate_mbit, rtt_ms))
    else:
      _run(
        *('ip', 'link', 'add', _DEVICE, 'netns', SPACES[0], 'type', 'veth'),
        *('peer', 'name', _DEVICE, 'netns', SPACES[1]),
      )
    for space, address in zip(SPACES, ADDRESSES, strict=True):
      _run('ip', '-n', space, 'addr', 'add', f'{address}/24', 'dev', _DEVICE)
      _run('ip', '-n', space, 'link', 'set', _DEVICE, 'up')
      if not rtt_ms:
        _run(
          *inside(space, 'tc', 'qdisc', 'add', 'dev', _DEVICE, 'root', 'tbf'),
          *('rate', f'{rate_mbit}mbit', 'latency', '20ms'),
          *('burst', str(max(131072, rate_mbit * 125))),
        )
    yield


def cut() -> None:
  """Takes the link down."""
  _run('ip', '-n', SPACES[0], 'link', 'set', _DEVICE, 'down')


def mend() -> None:
  """Brings the link up again."""
  _run('ip', '-n', SPACES[0], 'link', 'set', _DEVICE, 'up')


def inside(space: str, *command: str) -> list[str]:
  """Returns the command, run in a namespace."""
  return ['ip', 'netns', 'exec', space, *command]


def _run(*command: str) -> None:
  subprocess.run(command, check=True)


def _remove() -> None:
  for space in SPACES:
    subprocess.run(
      ['ip', 'netns', 'del', space], check=False, stderr=subprocess.DEVNULL
    )


@contextlib.contextmanager
def _relayed(rate_mbit: int, rtt_ms: float) -> Iterator[None]:
  process = subprocess.Popen(
    [sys.executable, __file__, str(rate_mbit), str(rtt_ms)],
    stdout=subprocess.PIPE,
  )
  assert process.stdout is not None
  try:
    process.stdout.readline()  # the devices are there
    for space in SPACES:
      _run('ip', '-n', space, 'link', 'set', _DEVICE, 'mtu', str(_MTU))
      _run('ip', '-n', space, 'link', 'set', _DEVICE, 'txqueuelen', '5000')
    yield
  finally:
    process.kill()
    process.wait()
    process.stdout.close()


def _relay(rate_mbit: float, rtt_ms: float) -> None:
  """Passes packets on: each takes its bits / rate, then RTT / 2; for ever."""
  ends = [_open(space) for space in SPACES]
  print('ready', flush=True)
  byte_s = 8e-6 / rate_mbit
  waiting: list[collections.deque[tuple[float, bytes]]] = [
    collections.deque() for _ in ends
  ]
  free_s = [0.0, 0.0]
  while True:
    now_s = time.monotonic()
    due_s = min((q[0][0] for q in waiting if q), default=now_s + 1.0)
    readable, _, _ = select.select(ends, [], [], max(0.0, due_s - now_s))
    for side, end in enumerate(ends):
      if end in readable:
        with contextlib.suppress(BlockingIOError):
          for _ in range(64):
            packet = os.read(end, _MTU + 100)
            now_s = time.monotonic()
            start_s = max(now_s, free_s[side])
            if start_s - now_s > _QUEUE_S:
              continue  # dropped, as by a router
            free_s[side] = start_s + len(packet) * byte_s
            waiting[side].append((free_s[side] + rtt_ms / 2e3, packet))
      now_s = time.monotonic()
      while waiting[side] and waiting[side][0][0] <= now_s:
        with contextlib.suppress(OSError):  # the device is down
          os.write(ends[1 - side], waiting[side].popleft()[1])


def _open(space: str) -> int:
  """Makes the TUN device of a namespace."""
  libc = ctypes.CDLL(None, use_errno=True)
  with open(f'/var/run/netns/{space}', 'rb') as name:
    if libc.setns(name.fileno(), _NEW_NET):
      raise OSError(ctypes.get_errno(), f'setns {space}')
  end = os.open('/dev/net/tun', os.O_RDWR | os.O_NONBLOCK)
  fcntl.ioctl(end, _SET_INTERFACE, struct.pack('16sH', _DEVICE.encode(), _TUN))
  return end


if __name__ == '__main__':
  _relay(float(sys.argv[1]), float(sys.argv[2]))
