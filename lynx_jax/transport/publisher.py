# SPDX-License-Identifier: Apache-2.0
"""The sending half of a transfer: publishes chunks as far as credit reaches.

It knows no codec, no cache and no peer; the receiver decides what travels when.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from lynx_jax.transport import digest, pull, streams
from lynx_jax.transport.courier import Cut
from lynx_jax.transport.scheduler import Scheduler

_BATCHES = 4  # announcements that a window is spread over, at least
_LONGEST_WAIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Announcement:
  """A chunk that can be fetched.

  `epoch` counts the resets before it was published; for `digest` see
  `digest.texts`.
  """

  chunk: streams.Chunk
  uuid: int
  epoch: int
  digest: bytes

  @property
  def entry(self) -> tuple[int, int, int, int, bytes]:
    """What `messages.Published.chunks` has of it."""
    key = self.chunk.key
    return (
      key.token_chunk,
      key.sequence,
      self.uuid,
      self.chunk.bytes,
      self.digest,
    )


class Publisher:
  """A thread that cuts chunks and publishes them, in the scheduler's order.

  What is published is one array of bytes a part of a slice; see `digest.pack`.

  At most `window_bytes` are published and not yet landed, half of them
  Residual, so that an Anchor always finds room. The window is the receiver's
  credit, given ahead of need: it costs no message a chunk, and bounds what the
  sender holds besides its prompts.

  An exception in the thread, `cut` included, is given to `failed`.

  Args:
    source: where payloads are published.
    cut: returns the payload of a chunk.
    announce: tells the receiver; called from the thread.
    failed: is told what ended the thread.
    window_bytes: most bytes published and not landed; a single chunk may
      always be.
  """

  latency_s = 0.0

  def __init__(
    self,
    source: pull.Source,
    cut: Cut,
    announce: Callable[[Sequence[Announcement]], None],
    failed: Callable[[Exception], None],
    window_bytes: int,
  ):
    self._source, self._cut = source, cut
    self._announce, self._failed = announce, failed
    self._window_bytes = window_bytes
    self._scheduler = Scheduler(window_bytes // 2)
    self._changed = threading.Condition()  # guards everything below
    self._orders: dict[int, tuple[float, float]] = {}  # arrival, deadline
    self._published: dict[int, streams.Chunk] = {}
    self._skipped: dict[int, frozenset[tuple[int, int]]] = {}
    self._epoch = 0
    self._closed = False
    self._batch_bytes = 0  # then what is published is announced
    self._thread = threading.Thread(
      target=self._run, name='lynx-publisher', daemon=True
    )
    self._thread.start()

  @property
  def live_bytes(self) -> int:
    """Bytes that are published, or being cut, and have not landed."""
    with self._changed:
      return self._scheduler.outstanding_bytes()

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
      chunks = [
        c
        for c in chunks
        if (c.key.token_chunk, c.key.sequence)
        not in self._skipped.get(c.request, ())
      ]
      for chunk in chunks:
        self._orders[chunk.request] = arrival_s, deadline_s
      self._scheduler.offer(
        chunks,
        arrival_s=arrival_s,
        ready_s=time.monotonic() if ready_s is None else ready_s,
        deadline_s=deadline_s,
      )
      self._changed.notify_all()

  def skip(self, request: int, landed: Iterable[tuple[int, int]]) -> None:
    """Leaves out chunks that the receiver has: (token chunk, sequence)."""
    with self._changed:
      self._skipped[request] = frozenset(landed)

  def cancel(self, request: int) -> None:
    """Publishes nothing more of a request.

    What is published stays until the receiver says that it has landed.
    """
    with self._changed:
      self._orders.pop(request, None)
      self._skipped.pop(request, None)
      self._scheduler.cancel(request)
      self._changed.notify_all()  # smaller ones behind it may fit

  def landed(self, uuids: Iterable[int]) -> None:
    """Takes back the credit of chunks that the receiver has."""
    with self._changed:
      for uuid in uuids:
        self._land(uuid)
      self._changed.notify_all()

  def again(self, uuids: Iterable[int]) -> None:
    """Publishes chunks anew that came damaged."""
    with self._changed:
      for uuid in uuids:
        chunk = self._land(uuid)
        if chunk is not None and chunk.request in self._orders:
          arrival_s, deadline_s = self._orders[chunk.request]
          self._scheduler.offer(
            [chunk],
            arrival_s=arrival_s,
            ready_s=time.monotonic(),
            deadline_s=deadline_s,
          )
      self._changed.notify_all()

  def reset(self, epoch: int) -> None:
    """Forgets what is published, and publishes it anew in another epoch."""
    with self._changed:
      self._epoch = epoch
      self._source.reset()
      uuids = tuple(self._published)
    self.again(uuids)

  def close(self) -> None:
    """Frees everything, and stops; may be called twice."""
    with self._changed:
      self._closed = True
      self._source.reset()
      for uuid in tuple(self._published):
        self._land(uuid)
      self._changed.notify_all()
    self._thread.join()
    self._source.reset()  # what the thread has published meanwhile

  def _land(self, uuid: int) -> streams.Chunk | None:
    self._source.forget(uuid)
    chunk = self._published.pop(uuid, None)  # None: told twice, or made up
    if chunk is not None:
      self._scheduler.landed(chunk, time.monotonic())
    return chunk

  def _run(self) -> None:
    try:
      while (chunk := self._take(_LONGEST_WAIT_S)) is not None:
        self._publish(chunk)
    except Exception as error:  # reaches the peer as the session's end
      self._failed(error)

  def _publish(self, chunk: streams.Chunk | None) -> None:
    """Publishes one chunk and what else may go now, in one announcement.

    The first announcement is not kept waiting, later ones are twice as long.
    """
    batch, size = [], 0
    while chunk is not None:
      payload = self._payload(chunk)
      if payload is not None:
        packed, sums = digest.pack(payload)
        with self._changed:
          uuid = self._source.publish(packed)
          self._published[uuid] = chunk
          batch.append((chunk, uuid, self._epoch, sums))
        size += chunk.bytes
      if size >= self._batch_bytes:
        break
      chunk = self._take(0.0)
    self._batch_bytes = min(2 * size, self._window_bytes // _BATCHES)
    texts = digest.texts([sums for *_, sums in batch])
    announcements = [
      Announcement(chunk, uuid, epoch, text)
      for (chunk, uuid, epoch, _), text in zip(batch, texts, strict=True)
    ]
    if announcements:
      self._announce(announcements)

  def _take(self, patience_s: float) -> streams.Chunk | None:
    """Returns the next chunk that credit allows.

    It waits for one unless `patience_s` is 0; None if there is none now, or
    once closed.
    """
    with self._changed:
      while not self._closed:
        now_s = time.monotonic()
        outstanding = self._scheduler.outstanding_bytes()
        first = self._scheduler.peek(now_s)
        left_s = patience_s
        fits = first is not None and (
          not outstanding or outstanding + first.bytes <= self._window_bytes
        )
        if fits and (chunk := self._scheduler.next(now_s)) is not None:
          return chunk
        # What does not fit waits for `landed`, which notifies.
        if (ready_s := self._scheduler.ready_s()) > now_s:
          left_s = min(patience_s, ready_s - now_s)
        if left_s <= 0:
          return None
        self._changed.wait(left_s)
    return None

  def _payload(self, chunk: streams.Chunk):
    """Cuts a chunk; None if its request was cancelled meanwhile."""
    try:
      return self._cut(chunk)
    except Exception:
      with self._changed:
        self._scheduler.landed(chunk, time.monotonic())
        if chunk.request in self._orders:
          raise
      return None  # the source of a cancelled request may be gone
