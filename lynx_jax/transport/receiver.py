# SPDX-License-Identifier: Apache-2.0
"""The receiving half of a transfer: fetches chunks by rank, and checks them.

It knows no cache and no control channel. All times are `time.monotonic()`.
"""

import collections
import contextlib
import dataclasses
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from lynx_jax import config
from lynx_jax.transport import digest, pull, streams
from lynx_jax.transport.courier import Arrival
from lynx_jax.transport.scheduler import Scheduler

# An array tells nobody that it is ready. It is looked after this often, from
# an eighth of its time on the link before it should be there.
_POLL_S, _LONGEST_POLL_S, _EARLY = 1e-3, 20e-3, 1 / 8
_LATEST_CREDIT_S = 0.2  # for how long the sender may wait for its credit
_LONGEST_WAIT_S = 60.0
_SAMPLES = 16  # landings from which the rate is measured


class CorruptChunk(streams.TransferError):
  """The bytes that came are not those that were sent."""


class Announced(NamedTuple):
  """A chunk that can be fetched under `uuid`; see `messages.Published`."""

  chunk: streams.Chunk
  uuid: int
  size_bytes: int
  digest: bytes


class Pace:
  """An emulated rate and round-trip time, kept in virtual time.

  A request for a chunk takes RTT / 2 to the sender; chunks leave it one after
  the other, each bytes / rate long, and are seen RTT / 2 later, or later than
  that by a random jitter of their own.

  Args:
    rate_gbps: 1 is 10**9 bits a second; inf is no limit.
    rtt_ms: round-trip time.
    jitter_ms: longest jitter; it has one seed.
  """

  def __init__(
    self, rate_gbps: float, rtt_ms: float = 0.0, jitter_ms: float = 0.0
  ):
    config.require(
      rate_gbps > 0,
      f'link rate_gbps={rate_gbps} must be positive, for example 0.1',
    )
    config.require(
      0 <= rtt_ms < math.inf, f'link rtt_ms={rtt_ms} must be 0 or more'
    )
    config.require(
      0 <= jitter_ms < math.inf, f'link jitter_ms={jitter_ms} must be 0 or more'
    )
    self.rate_gbps, self.rtt_ms = rate_gbps, rtt_ms
    self._jitter_s, self._random = jitter_ms / 1e3, random.Random(0)
    self._free_s = -math.inf

  @property
  def latency_s(self) -> float:
    """One way."""
    return self.rtt_ms / 2e3

  @property
  def next_s(self) -> float:
    """When to ask for the next chunk, so that the link never stands idle."""
    return self._free_s - self.latency_s

  def send(self, size_bytes: int, asked_s: float) -> tuple[float, float]:
    """Returns when a chunk's first bit is sent and its last one is seen."""
    start_s = max(asked_s + self.latency_s, self._free_s)
    self._free_s = start_s + size_bytes * 8 / (self.rate_gbps * 1e9)
    jitter_s = self._random.uniform(0.0, self._jitter_s)
    return start_s, self._free_s + self.latency_s + jitter_s


@dataclasses.dataclass(eq=False)
class _Flight:
  """A chunk that was asked for."""

  chunk: streams.Chunk
  uuid: int
  digest: bytes | None  # None: the scheduler does not know of it
  pull: pull.Pull
  asked_s: float
  start_s: float
  seen_s: float  # not before this; -inf without an emulated link
  wanted: bool  # else it is fetched only to free the sender
  payload: Any = None  # once it was checked
  ready_s: float = math.inf


@dataclasses.dataclass
class _Request:
  """What is known of a request's chunks that have not landed."""

  arrival_s: float
  deadline_s: float
  missing: dict[streams.ChunkKey, streams.Chunk]


class Receiver:
  """A thread that fetches published chunks; an engine's `Incoming`.

  Order and priority are made here: among what is published, the scheduler
  picks, Anchors at once, Residuals while their outstanding bytes stay within a
  window of max(2 chunks, 2 · rate · RTT), of the measured rate.

  A chunk reaches the engine when its bytes are there and their digest is the
  one that the sender announced.

  Args:
    layouts: returns what the parts of every slice of a chunk look like.
    chunk_bytes: size of a chunk, for the window.
    credit_bytes: the sender is told of so much at once, unless nothing else is
      under way: a message costs 0.5 ms of CPU time on either side. It may be
      changed at any time.
    pace: an emulated link; None is the real one.
    landed: is told, from the thread, which uuids the sender can forget.
    damaged: is told, from the thread, of a chunk that came damaged or not at
      all, under which uuid, and why.
  """

  def __init__(
    self,
    layouts: Callable[[streams.Chunk], Sequence[Sequence[digest.Layout]]],
    chunk_bytes: int,
    *,
    credit_bytes: int = 0,
    pace: Pace | None,
    landed: Callable[[Sequence[int]], None],
    damaged: Callable[[streams.Chunk, int, Exception], None],
  ):
    self._layouts, self._chunk_bytes = layouts, chunk_bytes
    self._pace = pace
    self._landed, self._damaged = landed, damaged
    self._changed = threading.Condition()  # guards everything below
    self._link: pull.Link | None = None
    self._scheduler = Scheduler(2 * chunk_bytes)
    self._requests: dict[int, _Request] = {}
    # uuid and digest of chunks that are published and not asked for.
    self._published: dict[streams.ChunkKey, tuple[int, bytes]] = {}
    self._flights: list[_Flight] = []
    # uuids of which the sender is not told yet, their bytes, and since when.
    self._freed: list[int] = []
    self._freed_bytes, self._freed_s = 0, -math.inf
    self._arrivals: collections.deque[Arrival] = collections.deque()
    self._recent: collections.deque[tuple[float, int]] = collections.deque(
      maxlen=_SAMPLES
    )
    self._known_gbps: float | None = None  # the last rate that was measured
    self._came_s = -math.inf  # when a payload last came
    self._moved_s = time.monotonic()  # when something last came
    self._asked_s = -math.inf  # virtual time never goes back
    self._blocked = False  # the next chunk does not fit into the window
    self._poked = self._closed = False
    self._error: BaseException | None = None
    self.credit_bytes = credit_bytes
    self.rtt_s = 0.0  # measured by whoever owns the control channel
    self._thread = threading.Thread(
      target=self._run, name='lynx-receiver', daemon=True
    )
    self._thread.start()

  @property
  def latency_s(self) -> float:
    """One way, of the emulated link; a real one delays by itself."""
    return self._pace.latency_s if self._pace else 0.0

  def attach(self, link: pull.Link | None) -> None:
    """Takes another link; what was published over the last one is void."""
    with self._changed:
      if self._link is not None:
        self._link.close()
      self._link = link
      self._void()
      self._changed.notify_all()

  def reset(self) -> None:
    """Gives up all flights and connects anew; what was published is void."""
    with self._changed:
      if self._link is not None:
        self._link.reset()
      self._void()

  def expect(
    self,
    request: int,
    chunks: Iterable[streams.Chunk],
    *,
    arrival_s: float,
    deadline_s: float,
  ) -> None:
    """Declares all chunks of a request; no others are delivered."""
    with self._changed:
      self._requests[request] = _Request(
        arrival_s, deadline_s, {chunk.key: chunk for chunk in chunks}
      )
      self._moved_s = time.monotonic()

  def expect_more(self, request: int, chunks: Iterable[streams.Chunk]) -> None:
    """Declares further chunks of a request, unless it was cancelled."""
    with self._changed:
      if (found := self._requests.get(request)) is not None:
        found.missing.update((chunk.key, chunk) for chunk in chunks)

  @contextlib.contextmanager
  def unpaced(self):
    """Leaves the emulated link out inside the block; nothing is under way."""
    pace, self._pace = self._pace, None
    try:
      yield
    finally:
      self._pace = pace

  def complete(self, request: int) -> bool:
    """Whether every chunk has landed."""
    with self._changed:
      found = self._requests.get(request)
      return found is None or not found.missing

  def missing(self, request: int) -> list[streams.Chunk]:
    """Returns the chunks that have not landed."""
    with self._changed:
      found = self._requests.get(request)
      return [*found.missing.values()] if found is not None else []

  def published(self, announced: Iterable[Announced]) -> None:
    """Takes in that chunks can be fetched.

    One that nobody misses, since its request was cancelled or it has landed or
    was published before, is not delivered; the sender is made to free it.

    Raises:
      UnexpectedChunk: one has not the size that the manifest gives it; those
        before it are taken in.
    """
    with self._changed:
      self._moved_s = now_s = time.monotonic()
      asked = {f.chunk.key for f in self._flights if f.wanted}
      for chunk, uuid, size_bytes, text in announced:
        if chunk.bytes != size_bytes:
          raise streams.UnexpectedChunk(
            f'{chunk.key} of {size_bytes} bytes; the manifest has {chunk.bytes}'
          )
        request = self._requests.get(chunk.request)
        under_way = chunk.key in self._published or chunk.key in asked
        if request is None or chunk.key not in request.missing or under_way:
          self._discard(chunk, uuid)
          continue
        self._published[chunk.key] = uuid, text
        self._scheduler.offer(
          [chunk],
          arrival_s=request.arrival_s,
          ready_s=now_s + self.latency_s,
          deadline_s=request.deadline_s,
        )
        self._blocked = False  # it may be an Anchor
      self._changed.notify_all()

  def cancel(self, request: int) -> None:
    """Drops the request: nothing of it will arrive any more."""
    with self._changed:
      dropped = self._requests.pop(request, None)
      self._scheduler.cancel(request)
      for flight in self._flights:
        if flight.chunk.request == request:
          flight.wanted = False
      for key in [k for k in self._published if k.request == request]:
        uuid, _ = self._published.pop(key)
        assert dropped is not None
        self._discard(dropped.missing[key], uuid)
      self._arrivals = collections.deque(
        a for a in self._arrivals if a.chunk.request != request
      )
      self._changed.notify_all()

  def substitute(self, request: int, make: Callable[[Any], Any]) -> None:
    """Delivers made-up payloads for all chunks that are missing.

    Args:
      request: whose.
      make: returns the arrays of a slice for their specs.
    """
    now_s = time.monotonic()
    with self._changed:
      found = self._requests[request]
      chunks = [*found.missing.values()]
      self._scheduler.cancel(request)
      for chunk in chunks:
        if chunk.key in self._published:
          self._discard(chunk, self._published.pop(chunk.key)[0])
      for flight in self._flights:
        if flight.chunk.request == request:
          flight.wanted = False
      found.missing.clear()
      self._arrivals += [
        Arrival(
          chunk,
          tuple(
            tuple(make(layout.specs) for layout in parts)
            for parts in self._layouts(chunk)
          ),
          now_s,
          now_s,
          substituted=True,
        )
        for chunk in chunks
      ]
      self._changed.notify_all()

  def stalled_s(self) -> float:
    """Returns for how long nothing has come of what was asked for."""
    with self._changed:
      asked = [f.asked_s for f in self._flights if f.payload is None]
      if not asked:
        return 0.0
      return time.monotonic() - max(self._moved_s, min(asked))

  def moved(self) -> None:
    """Counts as progress: what is missing was asked for in another way."""
    with self._changed:
      self._moved_s = time.monotonic()

  def starved_s(self) -> float:
    """Returns for how long there has been nothing to ask for."""
    with self._changed:
      if self._flights or self._published:
        return 0.0
      return time.monotonic() - self._moved_s

  @property
  def outstanding_bytes(self) -> int:
    """Bytes asked for that have not landed."""
    with self._changed:
      return self._scheduler.outstanding_bytes()

  @property
  def rate_gbps(self) -> float | None:
    """The rate measured over the last chunks; None if not known yet."""
    with self._changed:
      return self._known_gbps

  def arrived(self) -> list[Arrival]:
    """Returns, without blocking, what has arrived since the last call."""
    with self._changed:
      streams.raise_failed(self._error)
      arrivals, self._arrivals = [*self._arrivals], collections.deque()
      return arrivals

  def wait(self, timeout_s: float) -> bool:
    """Blocks until `arrived` has something, or somebody pokes.

    Returns:
      False if the time is over.
    """
    with self._changed:
      self._changed.wait_for(
        lambda: self._arrivals or self._poked or self._closed or self._error,
        timeout_s,
      )
      streams.raise_failed(self._error)
      woken = self._poked or bool(self._arrivals)
      self._poked = False
      return woken

  def poke(self) -> None:
    """Ends the `wait` that runs now, or the next one."""
    with self._changed:
      self._poked = True
      self._changed.notify_all()

  def close(self) -> None:
    """Stops; may be called twice."""
    self.attach(None)
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    self._thread.join()

  def _void(self) -> None:
    now_s = time.monotonic()
    for request in self._requests:
      self._scheduler.cancel(request)
    for flight in self._flights:
      self._leave(flight, now_s)
    self._flights.clear()
    self._published.clear()
    self._freed, self._freed_bytes = [], 0
    self._recent.clear()
    self._known_gbps = None
    self._moved_s = now_s

  def _discard(self, chunk: streams.Chunk, uuid: int) -> None:
    """Frees what the sender has published and nobody wants."""
    if self._link is None:
      return
    now_s = time.monotonic()
    fetched = self._link.discard(uuid, self._packed(chunk))
    if fetched is None:
      self._free(uuid, chunk, now_s)
    else:
      self._flights.append(
        _Flight(chunk, uuid, None, fetched, now_s, now_s, -math.inf, False)
      )

  def _packed(self, chunk: streams.Chunk) -> tuple[Any, ...]:
    """Returns what a chunk looks like on the link."""
    return tuple(
      tuple(layout.packed for layout in parts) for parts in self._layouts(chunk)
    )

  def _free(self, uuid: int, chunk: streams.Chunk, now_s: float) -> None:
    if not self._freed:
      self._freed_s = now_s
    self._freed.append(uuid)
    self._freed_bytes += chunk.bytes

  def _credit(self, now_s: float) -> list[int]:
    """Returns the uuids of which the sender shall be told now."""
    idle = not self._flights and not self._published
    due = self._freed_bytes >= self.credit_bytes or idle
    if not due and now_s < self._freed_s + _LATEST_CREDIT_S:
      return []
    freed, self._freed, self._freed_bytes = self._freed, [], 0
    return freed

  def _leave(self, flight: _Flight, now_s: float) -> None:
    if flight.digest is not None:
      self._scheduler.landed(flight.chunk, now_s)

  def _run(self) -> None:
    try:
      while not self._closed:
        with self._changed:
          self._ask(time.monotonic())
          came = [
            f for f in self._flights if f.payload is None and f.pull.ready()
          ]
        broken = self._check(came)
        with self._changed:
          now_s = time.monotonic()
          news = self._deliver(now_s) or broken  # others may go for these
          freed = self._credit(now_s)
          pause_s = 0.0 if freed or news else self._pause_s(now_s)
          if pause_s > 0 and not self._closed:
            self._changed.wait(pause_s)
        if freed:
          self._landed(freed)
        for flight, error in broken:
          self._damaged(flight.chunk, flight.uuid, error)
    except BaseException as error:
      with self._changed:
        self._error = error
        self._changed.notify_all()

  def _ask(self, now_s: float) -> None:
    """Asks for whatever may go now."""
    self._blocked = False
    while self._link is not None:
      start_s = now_s
      if self._pace is not None:
        start_s = self._ask_s()
        if start_s > now_s:
          return
      chunk = self._scheduler.next(start_s)
      if chunk is None:
        self._blocked = True
        return
      self._asked_s = start_s
      uuid, text = self._published.pop(chunk.key)
      fetched = self._link.pull(uuid, self._packed(chunk))
      first_s, seen_s = start_s, -math.inf
      if self._pace is not None:
        first_s, seen_s = self._pace.send(chunk.bytes, start_s)
      self._flights.append(
        _Flight(chunk, uuid, text, fetched, now_s, first_s, seen_s, True)
      )

  def _ask_s(self) -> float:
    """Returns when the next chunk is due, in virtual time."""
    earliest_s = max(self._asked_s, self._scheduler.ready_s())
    if self._pace is not None:
      earliest_s = max(earliest_s, self._pace.next_s)
    return earliest_s

  def _check(
    self, came: list[_Flight]
  ) -> list[tuple[_Flight, streams.TransferError]]:
    """Keeps good payloads; returns the flights that brought none, and why."""
    payloads: dict[_Flight, Any] = {}
    broken: list[tuple[_Flight, streams.TransferError]] = []
    sums: dict[_Flight, Any] = {}
    for flight in came:
      try:
        packed = flight.pull.take()
      except streams.TransferError as error:
        broken.append((flight, error))
        continue
      payloads[flight] = ()
      if flight.wanted:
        payloads[flight], sums[flight] = digest.unpack(
          packed, self._layouts(flight.chunk)
        )
    texts = dict(zip(sums, digest.texts([*sums.values()]), strict=True))
    now_s = time.monotonic()
    good = []
    for flight, payload in payloads.items():
      if texts.get(flight, flight.digest) != flight.digest:
        corrupt = CorruptChunk(f'{flight.chunk.key} has another digest')
        broken.append((flight, corrupt))
      else:
        good.append((flight, payload))
    with self._changed:
      for flight, payload in good:
        flight.payload, flight.ready_s = payload, now_s
      # Those of a link that was given up meanwhile are no news.
      broken = [b for b in broken if b[0] in self._flights]
      for flight, _ in broken:
        self._flights.remove(flight)
        self._leave(flight, now_s)
      if good:
        self._moved_s = self._came_s = now_s
    return [b for b in broken if b[0].wanted]

  def _deliver(self, now_s: float) -> bool:
    """Hands over what can be seen now; returns whether anything landed."""
    landed = []
    for flight in [*self._flights]:
      if flight.payload is None or flight.seen_s > now_s:
        continue
      self._flights.remove(flight)
      self._leave(flight, now_s)
      self._free(flight.uuid, flight.chunk, now_s)
      arrived_s = max(flight.seen_s, flight.ready_s)
      if self._blocked:  # until now
        self._asked_s = max(self._asked_s, arrived_s)
      landed.append(flight.chunk)
      request = self._requests.get(flight.chunk.request)
      if not flight.wanted or request is None:
        continue
      del request.missing[flight.chunk.key]
      self._arrivals.append(
        Arrival(flight.chunk, flight.payload, flight.start_s, arrived_s)
      )
      self._changed.notify_all()
    if landed:
      self._measure(landed, now_s)
    return bool(landed)

  def _pause_s(self, now_s: float) -> float:
    """Returns for how long there is nothing to do, if nobody notifies."""
    under_way = [f.chunk.bytes for f in self._flights if f.payload is None]
    if under_way:
      rate_gbps = self._known_gbps if self._pace is None else None
      if rate_gbps is None:  # what comes over an emulated link is here at once
        return _POLL_S
      chunk_s = under_way[0] * 8e-9 / rate_gbps
      left_s = self._came_s + chunk_s - now_s
      least_s = max(_POLL_S, chunk_s * _EARLY)
      return min(max(left_s * (1 - _EARLY), least_s), _LONGEST_POLL_S)
    due_s = [f.seen_s for f in self._flights]
    if self._freed:
      due_s.append(self._freed_s + _LATEST_CREDIT_S)
    if self._link is not None and not self._blocked:
      due_s.append(self._ask_s())
    return min(min(due_s, default=math.inf) - now_s, _LONGEST_WAIT_S)

  def _measure(self, landed: Iterable[streams.Chunk], now_s: float) -> None:
    """Adapts the window to the rate at which chunks have come lately."""
    self._recent += [(now_s, chunk.bytes) for chunk in landed]
    self._known_gbps = rate_gbps = self._rate_gbps() or self._known_gbps
    if not self._flights:
      self._recent.clear()  # what comes next has waited for something else
    if rate_gbps is not None:
      rtt_s = self.rtt_s + 2 * self.latency_s
      window = 2 * rate_gbps * 1e9 / 8 * rtt_s
      self._scheduler.residual_window_bytes = max(
        2 * self._chunk_bytes, round(window)
      )

  def _rate_gbps(self) -> float | None:
    if len(self._recent) < 3:
      return None
    seconds = self._recent[-1][0] - self._recent[0][0]
    size_bytes = sum(size for _, size in self._recent) - self._recent[0][1]
    return size_bytes * 8e-9 / seconds if seconds > 0 else None
