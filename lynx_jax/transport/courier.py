# SPDX-License-Identifier: Apache-2.0
"""Carries chunks: asks the scheduler, cuts payloads, calls the link.

It knows no codec, no cache and no policy. All times are `time.monotonic()`.
"""

import collections
import dataclasses
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import jax

from lynx_jax.transport import links, streams
from lynx_jax.transport import scheduler as scheduler_lib

Cut = Callable[[streams.Chunk], links.Payload]
Script = Callable[[Sequence[streams.Chunk]], Iterable[streams.Chunk]]

_LONGEST_WAIT_S = 60.0  # a lock refuses waits of many years


@dataclasses.dataclass(frozen=True)
class Arrival:
  """A chunk that the receiver can use; its arrays are ready.

  `sent_s` is when its first bit went on the link, `arrived_s` when its last
  one could be seen by the receiver. A `substituted` one was made up, since the
  true one never came. `agreed_s` is how long it took in the slowest process of
  a side, if there are several.
  """

  chunk: streams.Chunk
  payload: links.Payload
  sent_s: float
  arrived_s: float
  substituted: bool = False
  agreed_s: float | None = None

  @property
  def seconds(self) -> float:
    """How long it took, as every process of the side knows it."""
    if self.agreed_s is not None:
      return self.agreed_s
    return self.arrived_s - self.sent_s


class Outgoing(Protocol):
  """What the prefill side needs of the wire."""

  @property
  def latency_s(self) -> float:
    """One way; that of the control channel too, which shares the path."""

  def offer(
    self,
    chunks: Iterable[streams.Chunk],
    *,
    arrival_s: float,
    ready_s: float | None = None,
    deadline_s: float = math.inf,
  ) -> None:
    """Queues chunks of one request, ready since `ready_s` (None: now)."""

  def cancel(self, request: int) -> None:
    """Drops the request: nothing of it will arrive any more."""

  def close(self) -> None:
    """Stops; may be called twice."""


class Incoming(Protocol):
  """What an engine needs of the wire."""

  def arrived(self) -> list[Arrival]:
    """Returns, without blocking, what has arrived since the last call."""

  def wait(self, timeout_s: float) -> bool:
    """Blocks until `arrived` has something; False if the time is over."""


class Transport(Outgoing, Incoming, Protocol):
  """Both halves, for two sides in one process."""


class Courier:
  """A thread that keeps one link busy; the only owner of its scheduler.

  One chunk is on the link at a time, and the next is chosen when the link
  becomes free, so an Anchor waits behind at most one chunk. While a chunk is
  on the link, the payload of the probable next one is cut; if another outranks
  it meanwhile, the cut payload is kept until its turn.

  Choices are made in the link's virtual time: at the instant at which the link
  became free, among the chunks ready by then, however late the thread wakes
  up. `arrived_s` is exact, unless the real copy took longer than the emulated
  one: then it is the time at which the copy was there.

  An exception in the thread, `cut` included, is raised by `arrived` and `wait`
  as the cause of a `TransferError`.
  """

  def __init__(
    self, scheduler: scheduler_lib.Scheduler, link: links.Link, cut: Cut
  ):
    self._scheduler, self._link, self._cut = scheduler, link, cut
    self._changed = threading.Condition()  # guards everything below
    # Chunks in the thread's hands, with the payload once it is cut. A chunk
    # that `cancel` has taken out of here is dropped at the next chance.
    self._held: dict[streams.ChunkKey, links.Payload | None] = {}
    self._arrivals: collections.deque[Arrival] = collections.deque()
    self._start_s = -math.inf  # virtual time never goes back
    self._error: BaseException | None = None
    self._closed = False
    # A daemon, so that Ctrl-C during an endless copy still ends the program.
    self._thread = threading.Thread(
      target=self._run, name='lynx-courier', daemon=True
    )
    self._thread.start()

  @property
  def latency_s(self) -> float:
    return self._link.latency_s

  def __enter__(self) -> 'Courier':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def offer(
    self,
    chunks: Iterable[streams.Chunk],
    *,
    arrival_s: float,
    ready_s: float | None = None,
    deadline_s: float = math.inf,
  ) -> None:
    """Queues chunks of one request, ready since `ready_s` (None: now)."""
    with self._changed:
      self._scheduler.offer(
        chunks,
        arrival_s=arrival_s,
        ready_s=time.monotonic() if ready_s is None else ready_s,
        deadline_s=deadline_s,
      )
      self._changed.notify_all()

  def arrived(self) -> list[Arrival]:
    """Returns, without blocking, what has arrived since the last call."""
    with self._changed:
      streams.raise_failed(self._error)
      now_s = time.monotonic()
      seen = []
      while self._arrivals and self._arrivals[0].arrived_s <= now_s:
        seen.append(self._arrivals.popleft())
      return seen

  def wait(self, timeout_s: float) -> bool:
    """Blocks until `arrived` has something; False if the time is over."""
    until_s = time.monotonic() + timeout_s
    with self._changed:
      while True:
        streams.raise_failed(self._error)
        now_s = time.monotonic()
        first_s = self._arrivals[0].arrived_s if self._arrivals else math.inf
        if first_s <= now_s:
          return True
        if until_s <= now_s or self._closed:
          return False
        left_s = min(first_s, until_s) - now_s
        self._changed.wait(min(left_s, _LONGEST_WAIT_S))

  def cancel(self, request: int) -> None:
    """Drops the request: nothing of it will arrive any more.

    A chunk on the link keeps the link busy to its end, as on a real one.
    """
    with self._changed:
      self._scheduler.cancel(request)
      for key in [k for k in self._held if k.request == request]:
        del self._held[key]
      self._arrivals = collections.deque(
        a for a in self._arrivals if a.chunk.request != request
      )
      self._changed.notify_all()

  def queued_bytes(self, request: int) -> int:
    """Returns the request's bytes that have not gone on the link."""
    with self._changed:
      return self._scheduler.queued_bytes(request)

  def close(self) -> None:
    """Stops after the copy or cut that is running; may be called twice."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    self._thread.join()

  def _run(self) -> None:
    try:
      while (job := self._take()) is not None:
        self._carry(*job)
    except BaseException as error:
      with self._changed:
        self._error = error
        self._held.clear()
        self._changed.notify_all()

  def _take(self) -> tuple[streams.Chunk, float] | None:
    """Blocks for the next chunk and when it starts; None once closed."""
    with self._changed:
      while not self._closed:
        start_s = max(
          self._start_s, self._link.free_s, self._scheduler.ready_s()
        )
        left_s = start_s - time.monotonic()
        if left_s <= 0:
          chunk = self._scheduler.next(start_s)
          # Nothing is outstanding here, so the scheduler must have one.
          assert chunk is not None
          self._start_s = start_s
          self._held.setdefault(chunk.key, None)
          return chunk, start_s
        self._changed.wait(min(left_s, _LONGEST_WAIT_S))
    return None

  def _carry(self, chunk: streams.Chunk, start_s: float) -> None:
    payload = self._payload(chunk)
    if payload is None:
      with self._changed:
        self._scheduler.landed(chunk, start_s)
      return
    put_s = time.monotonic()  # after `start_s` by as much as we woke up late
    flight = self._link.send(payload, chunk.bytes, start_s)
    del payload  # the sender's copy is not needed any longer
    with self._changed:
      if chunk.key in self._held:
        self._held[chunk.key] = None
    self._prepare(flight.end_s)
    self._sleep(flight.end_s)
    if self._closed:
      return
    end_s = max(flight.end_s, put_s)
    if not _is_ready(flight.payload):
      jax.block_until_ready(flight.payload)
      end_s = max(end_s, time.monotonic())
    with self._changed:
      self._scheduler.landed(chunk, flight.end_s)
      if chunk.key in self._held:
        del self._held[chunk.key]
        self._arrivals.append(
          Arrival(
            chunk, flight.payload, flight.start_s, end_s + flight.latency_s
          )
        )
      self._changed.notify_all()

  def _prepare(self, free_s: float) -> None:
    """Cuts what would go next if nothing was offered until `free_s`."""
    with self._changed:
      chunk = self._scheduler.peek(free_s)
      if chunk is None or chunk.key in self._held:
        return
      self._held[chunk.key] = None
    self._payload(chunk)

  def _payload(self, chunk: streams.Chunk) -> links.Payload | None:
    """Returns the payload, cut now or before; None if it was cancelled."""
    with self._changed:
      if chunk.key not in self._held:
        return None
      if self._held[chunk.key] is not None:
        return self._held[chunk.key]
    try:
      payload = self._cut(chunk)
    except Exception:
      with self._changed:
        if chunk.key in self._held:
          raise
      return None  # the source of a cancelled request may be gone
    with self._changed:
      if chunk.key not in self._held:
        return None
      self._held[chunk.key] = payload
    return payload

  def _sleep(self, until_s: float) -> None:
    with self._changed:
      while not self._closed:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
          return
        self._changed.wait(min(left_s, _LONGEST_WAIT_S))


def _is_ready(payload: links.Payload) -> bool:
  return all(array.is_ready() for array in jax.tree.leaves(payload))


class ScriptedCourier:
  """A `Transport` without thread or time: a script says what arrives when.

  For tests of whatever sits on a transport. Each call of `arrived` asks the
  script once; nothing depends on the clock.

  Args:
    link: moves the payloads; its rate is ignored.
    cut: returns the payload of a chunk.
    script: is given the chunks under way, in the order of their offers, and
      returns those that arrive now, in this order. `shuffle` makes one.
  """

  def __init__(self, link: links.Link, cut: Cut, script: Script):
    self._link, self._cut, self._script = link, cut, script
    self._under_way: dict[streams.ChunkKey, streams.Chunk] = {}
    self.latency_s = 0.0

  def offer(
    self,
    chunks: Iterable[streams.Chunk],
    *,
    arrival_s: float,
    ready_s: float | None = None,
    deadline_s: float = math.inf,
  ) -> None:
    """Adds chunks to those under way."""
    del arrival_s, ready_s, deadline_s
    self._under_way.update((chunk.key, chunk) for chunk in chunks)

  def arrived(self) -> list[Arrival]:
    """Returns what the script lets arrive now."""
    arrivals = []
    for chunk in list(self._script(tuple(self._under_way.values()))):
      del self._under_way[chunk.key]
      now_s = time.monotonic()
      flight = self._link.send(self._cut(chunk), chunk.bytes, now_s)
      payload = jax.block_until_ready(flight.payload)
      arrivals.append(Arrival(chunk, payload, now_s, now_s))
    return arrivals

  def wait(self, timeout_s: float) -> bool:
    """Returns whether anything is under way, without waiting."""
    del timeout_s
    return bool(self._under_way)

  def cancel(self, request: int) -> None:
    """Drops the request: nothing of it will arrive any more."""
    for key in [k for k in self._under_way if k.request == request]:
      del self._under_way[key]

  def close(self) -> None:
    """Does nothing; there is no thread."""


def shuffle(seed: int) -> Script:
  """Returns a script that lets random chunks arrive, in random order.

  A call may let none arrive, but never two calls running.
  """
  rng = random.Random(seed)
  least = 0

  def script(chunks: Sequence[streams.Chunk]) -> list[streams.Chunk]:
    nonlocal least
    count = rng.randint(min(least, len(chunks)), len(chunks))
    least = 1 if count == 0 else 0
    return rng.sample(chunks, count)

  return script
