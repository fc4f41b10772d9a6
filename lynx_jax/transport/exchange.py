# SPDX-License-Identifier: Apache-2.0
"""What the processes of one side tell each other: a star around process 0.

It knows no request and no array. The processes of a side are one
`jax.distributed` job: a side dies as a whole, and `jax.distributed` sees to it
that none of its processes outlives a dead or silent one. Sides are jobs of
their own.
"""

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing import connection
from typing import Any

import jax
import msgpack
import numpy as np
from jax.experimental import multihost_utils

from lynx_jax.programs import Read, fetch
from lynx_jax.transport import control

_SECRET_BYTES = 32


class Exchange:
  """One process's end: process 0 has a link to every other, those to it alone.

  What is told is made of numbers, strings, bytes and tuples. Unencrypted.

  Args:
    links: to the other processes, in their order; or to process 0.
    process: own number.
  """

  def __init__(self, links: Sequence[connection.Connection], process: int):
    self._links, self.process = tuple(links), process
    self._sending = threading.Lock()

  @property
  def leads(self) -> bool:
    """Whether this is process 0."""
    return self.process == 0

  def gather(self, value: Any) -> list[Any]:
    """Returns what every process has given, in their order.

    All must call it, and wait for the last one; no `follow` may run.

    Raises:
      PeerLost: a process is gone.
    """
    if not self.leads:
      self.tell(value)
      return [*self._hear(self._links[0])]
    told = [_unpacked(_packed(value)), *map(self._hear, self._links)]
    self.tell(told)
    return told

  def tell(self, value: Any, process: int | None = None) -> None:
    """Tells a process, or all others; all but process 0 have it alone.

    Raises:
      PeerLost: it is gone.
    """
    data = _packed(value)
    links = self._links if process is None else self._links[process - 1 :][:1]
    with self._sending:
      for link in links:
        try:
          link.send_bytes(data)
        except OSError as error:
          raise control.PeerLost(f'a process of this side: {error}') from error

  def follow(
    self, heard: Callable[[int, Any], None], lost: Callable[[Exception], None]
  ) -> None:
    """Calls `heard` with process and value of whatever is told; returns.

    It is called from a thread a link; `lost` once a link has broken.
    """
    first = 1 if self.leads else 0
    for process, link in enumerate(self._links, first):
      threading.Thread(
        target=self._follow,
        args=(process, link, heard, lost),
        name=f'lynx-process-{process}',
        daemon=True,
      ).start()

  def close(self) -> None:
    """Breaks all links; may be called twice."""
    for link in self._links:
      # Whoever reads from it finds its end, on either side.
      with _socket(link) as same, contextlib.suppress(OSError):
        same.shutdown(socket.SHUT_RDWR)

  def _follow(self, process, link, heard, lost) -> None:
    try:
      while True:
        heard(process, self._hear(link))
    except control.PeerLost as error:
      lost(error)

  def _hear(self, link: connection.Connection) -> Any:
    try:
      return _unpacked(link.recv_bytes(control.messages.MAX_BYTES))
    except (OSError, EOFError) as error:
      raise control.PeerLost(
        f'a process of this side is gone: {error or type(error).__name__}'
      ) from error


def join(host: str) -> Exchange | None:
  """Links the processes of this `jax.distributed` job; None if there is one.

  All must call it.

  Args:
    host: numeric address of process 0, where it listens for the others.
  """
  process, processes = jax.process_index(), jax.process_count()
  if processes == 1:
    return None
  own = np.zeros(2 + _SECRET_BYTES, np.uint8)
  family = 'AF_INET6' if ':' in host else 'AF_INET'
  if process == 0:
    secret = secrets.token_bytes(_SECRET_BYTES)
    listener = connection.Listener((host, 0), family, processes, secret)
    own[:] = [*listener.address[1].to_bytes(2, 'big'), *secret]
  told = fetch(multihost_utils.broadcast_one_to_all(own), Read.TRANSFER)
  shared = told.astype(np.uint8).tobytes()
  if process:
    port, secret = int.from_bytes(shared[:2], 'big'), shared[2:]
    link = _prompt(connection.Client((host, port), family, secret))
    link.send_bytes(_packed(process))
    return Exchange([link], process)
  with listener:
    found = [_prompt(listener.accept()) for _ in range(processes - 1)]
  links = {_unpacked(link.recv_bytes()): link for link in found}
  return Exchange([links[i] for i in range(1, processes)], process)


def _prompt(link: connection.Connection) -> connection.Connection:
  """Lets a link send small messages at once, not when the last was received."""
  with _socket(link) as same:
    same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  return link


def _socket(link: connection.Connection) -> socket.socket:
  return socket.socket(fileno=os.dup(link.fileno()))


def _packed(value: Any) -> bytes:
  return msgpack.packb(value)


def _unpacked(data: bytes) -> Any:
  return msgpack.unpackb(data, use_list=False)
