# SPDX-License-Identifier: Apache-2.0
"""What the processes of one side tell each other: a star around process 0.

It knows no request and no array. The processes of a side are one
`jax.distributed` job: a side dies as a whole. Whoever ends says why, if it
still can; `watch` tells of those that cannot, and `jax.distributed` of those
that are silent. Sides are jobs of their own.
"""

import contextlib
import multiprocessing
import os
import queue
import secrets
import select
import socket
import threading
import time
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
_SPREAD_BYTES = 128  # what process 0 says of itself
_FAREWELL = b'\xc1'  # no msgpack value begins like this
_LONGEST_REASON = 1000  # bytes
_LOOK_S = 0.05  # longest wait before looking who is admitted
_REASON_S = 0.5  # in which a reader may come upon a farewell


class Ended(control.PeerLost):
  """A process of this side has ended because it was told to."""


class Exchange:
  """One process's end: process 0 has a link to every other, those to it alone.

  What is told is made of numbers, strings, bytes and tuples. Unencrypted.

  Args:
    links: to the other processes, in their order; or to process 0.
    process: own number.
  """

  def __init__(self, links: Sequence[connection.Connection], process: int):
    self.process = process
    first = 1 if self.leads else 0
    self._links = dict(enumerate(links, first))
    self._sending = threading.Lock()
    self._closed = False
    self._lost: Callable[[Exception], None] = lambda error: None
    self._reported = threading.Lock()  # held once somebody has

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
      with contextlib.suppress(control.PeerLost):  # it may have said why
        self.tell(value)
      return [*self._hear(0)]
    told = [_unpacked(_packed(value)), *map(self._hear, self._links)]
    self.tell(told)
    return told

  def tell(self, value: Any, process: int | None = None) -> None:
    """Tells a process, or all others; all but process 0 have it alone.

    Raises:
      PeerLost: it is gone.
    """
    data = _packed(value)
    with self._sending:
      for number in self._links if process is None else [process]:
        try:
          self._links[number].send_bytes(data)
        except OSError as error:
          raise _gone(number, error) from error

  def follow(
    self, heard: Callable[[int, Any], None], lost: Callable[[Exception], None]
  ) -> None:
    """Calls `heard` with process and value of whatever is told; returns.

    It is called from a thread a link; `lost` once a link has broken.
    """
    for process in self._links:
      threading.Thread(
        target=self._follow,
        args=(process, heard, lost),
        name=f'lynx-process-{process}',
        daemon=True,
      ).start()

  def watch(self, lost: Callable[[Exception], None]) -> None:
    """Calls `lost` once a process is gone, whatever this one is doing; returns.

    Its argument is an `Ended`, or a `PeerLost` that says why, if anybody has
    read that. It is called once, in the thread that has found out.
    """
    self._lost = lost
    threading.Thread(target=self._watch, name='lynx-watch', daemon=True).start()

  def leave(self, reason: str = '') -> None:
    """Tells the others why this process ends, and breaks all links.

    Args:
      reason: what went wrong; '' is that it was told to end.
    """
    if not self._closed:
      self._closed = True
      # Whoever holds it may be stuck, and half a message of its own is sent.
      if self._sending.acquire(timeout=_REASON_S):
        for link in self._links.values():
          with contextlib.suppress(OSError):
            link.send_bytes(_FAREWELL + reason.encode()[:_LONGEST_REASON])
        self._sending.release()
    self.close()

  def close(self) -> None:
    """Breaks all links; may be called twice."""
    self._closed = True
    for link in self._links.values():
      # Whoever reads from it finds its end, on either side.
      with _socket(link) as same, contextlib.suppress(OSError):
        same.shutdown(socket.SHUT_RDWR)

  def _follow(self, process, heard, lost) -> None:
    try:
      while True:
        heard(process, self._hear(process))
    except control.PeerLost as error:
      lost(error)

  def _watch(self) -> None:
    poll = select.poll()
    numbers = {link.fileno(): number for number, link in self._links.items()}
    for descriptor in numbers:
      poll.register(descriptor, select.POLLRDHUP)
    (descriptor, _), *_ = poll.poll()
    time.sleep(_REASON_S)
    self._report(_gone(numbers[descriptor]))

  def _report(self, error: Exception) -> None:
    if not self._closed and self._reported.acquire(blocking=False):
      self._lost(error)

  def _hear(self, process: int) -> Any:
    try:
      data = self._links[process].recv_bytes(control.messages.MAX_BYTES)
      if not data.startswith(_FAREWELL):
        return _unpacked(data)
      reason = data.removeprefix(_FAREWELL).decode(errors='replace')
      text = f'process {process} of this side has ended'
      error = control.PeerLost(f'{text}: {reason}') if reason else Ended(text)
    except (OSError, EOFError) as found:
      error = _gone(process, found)
    self._report(error)
    raise error


def join(host: str) -> Exchange | None:
  """Links the processes of this `jax.distributed` job; None if there is one.

  All must call it.

  Args:
    host: own numeric address; that of process 0 is where it listens.
  """
  process, processes = jax.process_index(), jax.process_count()
  if processes == 1:
    return None
  own = np.zeros(_SPREAD_BYTES, np.uint8)
  if process == 0:
    secret = secrets.token_bytes(_SECRET_BYTES)
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=processes)
    data = _packed((host, listener.getsockname()[1], secret))
    own[: len(data)], own[-1] = [*data], len(data)
  told = fetch(multihost_utils.broadcast_one_to_all(own), Read.TRANSFER)
  if process:
    shared = told.astype(np.uint8).tobytes()
    host, port, secret = _unpacked(shared[: shared[-1]])
    link = _prompt(connection.Client((host, port), _family(host), secret))
    link.send_bytes(_packed(process))
    return Exchange([link], process)
  with listener:
    found = [_prompt(link) for link in admit(listener, secret, processes - 1)]
  links = {_unpacked(link.recv_bytes()): link for link in found}
  return Exchange([links[i] for i in range(1, processes)], process)


def admit(
  listener: socket.socket, secret: bytes, count: int
) -> list[connection.Connection]:
  """Returns links to so many processes that know the secret.

  Whoever else comes, as a port scanner does, is turned away; one that says
  nothing keeps nobody waiting.
  """
  admitted: queue.SimpleQueue[connection.Connection] = queue.SimpleQueue()

  def meet(link: connection.Connection) -> None:
    try:
      connection.deliver_challenge(link, secret)
      connection.answer_challenge(link, secret)
    except (OSError, EOFError, multiprocessing.AuthenticationError):
      link.close()
    else:
      admitted.put(link)

  met: list[connection.Connection] = []
  listener.settimeout(_LOOK_S)
  while admitted.qsize() < count:
    with contextlib.suppress(TimeoutError, ConnectionError):
      stream, _ = listener.accept()
      stream.setblocking(True)
      met.append(connection.Connection(stream.detach()))
      threading.Thread(target=meet, args=(met[-1],), daemon=True).start()
  found = [admitted.get() for _ in range(count)]
  for stranger in set(met).difference(found):
    with contextlib.suppress(OSError), _socket(stranger) as same:
      same.shutdown(socket.SHUT_RDWR)  # its thread finds the end
  return found


def _family(host: str) -> str:
  return 'AF_INET6' if ':' in host else 'AF_INET'


def _gone(process: int, error: Exception | None = None) -> control.PeerLost:
  cause = f': {error}' if str(error or '') else ''
  return control.PeerLost(f'process {process} of this side is gone{cause}')


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
