# SPDX-License-Identifier: Apache-2.0
"""Decides which chunk goes next: a pure, deterministic policy over metadata.

It knows no arrays, no clock, no thread and no link; time is an argument.
"""

import heapq
import math
from collections.abc import Iterable

from lynx_jax import config
from lynx_jax.transport import streams


class Scheduler:
  """One queue over all requests, and what is outstanding of it.

  The order is total and does not depend on the order of `offer` calls:
  - Anchors before Residuals before exact planes, of whatever request;
  - Anchors by (deadline, arrival, request, token chunk, layer group,
    sequence); the dense tail is the last token chunk of its request;
  - Residuals by (deadline, arrival, request, layer group, token chunk,
    sequence), so that layer groups complete one after the other; exact planes
    likewise.

  Anchors are issued at once. A dispatched copy cannot be called back, so what
  an Anchor may have to wait behind is limited instead: all others are issued
  while their outstanding bytes stay within `residual_window_bytes`; one of
  them may always be outstanding, so nothing starves. It is work-conserving: as
  long as a chunk is ready and nothing is outstanding, `next` returns one.

  The object serves both ends. At a sender *issued* means given to the link and
  *landed* means that the link has let go of it. At a receiver, `next` grants
  credits, *landed* means arrived, and the window covers rate * RTT; it may be
  changed at any time. To retry a lost chunk, call `landed` and `offer` it
  again.

  Times given to `next`, `peek` and `landed` never decrease.
  """

  def __init__(self, residual_window_bytes: int):
    config.require(
      residual_window_bytes >= 0,
      f'residual_window_bytes={residual_window_bytes} must not be negative',
    )
    self.residual_window_bytes = residual_window_bytes
    self._later: list[tuple[float, tuple, streams.Chunk]] = []  # heap by ready
    self._ready: list[tuple[tuple, streams.Chunk]] = []  # heap by rank
    self._outstanding: dict[streams.ChunkKey, tuple[streams.Chunk, float]] = {}
    self._outstanding_bytes = [0] * len(streams.Stream)
    self._queued_bytes: dict[int, int] = {}
    self._keys: set[streams.ChunkKey] = set()  # queued or outstanding

  def offer(
    self,
    chunks: Iterable[streams.Chunk],
    *,
    arrival_s: float,
    ready_s: float,
    deadline_s: float = math.inf,
  ) -> None:
    """Queues chunks of one request.

    Args:
      chunks: in any order.
      arrival_s: when the request arrived.
      ready_s: when the chunks left split; they are not issued before.
      deadline_s: when the request wants its first token.
    """
    for chunk in chunks:
      if chunk.key in self._keys:
        raise ValueError(f'{chunk.key} is queued or outstanding already')
      self._keys.add(chunk.key)
      rank = _rank(chunk, deadline_s, arrival_s)
      heapq.heappush(self._later, (ready_s, rank, chunk))
      self._count(chunk.request, chunk.bytes)

  def next(self, now_s: float) -> streams.Chunk | None:
    """Issues the first chunk in order that is ready; None if none may go."""
    chunk = self.peek(now_s)
    if chunk is None or not self._fits(chunk):
      return None
    heapq.heappop(self._ready)
    self._count(chunk.request, -chunk.bytes)
    self._outstanding[chunk.key] = chunk, now_s
    self._outstanding_bytes[chunk.stream] += chunk.bytes
    return chunk

  def peek(self, now_s: float) -> streams.Chunk | None:
    """Returns what `next` would issue at `now_s` if nothing was outstanding."""
    while self._later and self._later[0][0] <= now_s:
      heapq.heappush(self._ready, heapq.heappop(self._later)[1:])
    return self._ready[0][1] if self._ready else None

  def ready_s(self) -> float:
    """Returns from when `peek` finds a chunk: -inf is now, inf is never."""
    if self._ready:
      return -math.inf
    return self._later[0][0] if self._later else math.inf

  def landed(self, chunk: streams.Chunk, now_s: float) -> float:
    """Takes an issued chunk off the outstanding ones.

    Returns:
      Seconds it was outstanding, from which windows can be adapted.
    """
    _, issued_s = self._outstanding.pop(chunk.key)
    self._outstanding_bytes[chunk.stream] -= chunk.bytes
    self._keys.discard(chunk.key)
    return now_s - issued_s

  def cancel(self, request: int) -> None:
    """Drops the request's queued chunks; outstanding ones stay until landed."""
    queued = [e[-1] for e in self._later] + [e[-1] for e in self._ready]
    self._keys -= {c.key for c in queued if c.request == request}
    self._later = [e for e in self._later if e[-1].request != request]
    self._ready = [e for e in self._ready if e[-1].request != request]
    heapq.heapify(self._later)
    heapq.heapify(self._ready)
    self._queued_bytes.pop(request, None)

  def outstanding_bytes(self, stream: streams.Stream | None = None) -> int:
    """Returns bytes issued and not landed, of one stream or of all."""
    if stream is None:
      return sum(self._outstanding_bytes)
    return self._outstanding_bytes[stream]

  def queued_bytes(self, request: int) -> int:
    """Returns the request's bytes that have not been issued."""
    return self._queued_bytes.get(request, 0)

  def _fits(self, chunk: streams.Chunk) -> bool:
    if chunk.stream is streams.Stream.ANCHOR:
      return True
    _, *others_bytes = self._outstanding_bytes
    outstanding = sum(others_bytes)
    return (
      not outstanding or outstanding + chunk.bytes <= self.residual_window_bytes
    )

  def _count(self, request: int, size: int) -> None:
    left = self._queued_bytes.get(request, 0) + size
    if left:
      self._queued_bytes[request] = left
    else:
      self._queued_bytes.pop(request, None)


def _rank(chunk: streams.Chunk, deadline_s: float, arrival_s: float) -> tuple:
  """Returns the sort key; it ends in the chunk's identity, so none are equal.

  The request comes before its parts: requests that tie go one after the other.
  """
  key = chunk.key
  if chunk.stream is streams.Stream.ANCHOR:
    place = key.token_chunk, chunk.layer_group
  else:
    place = chunk.layer_group, key.token_chunk
  return (
    chunk.stream,
    deadline_s,
    arrival_s,
    key.request,
    key.generation,
    *place,
    key.sequence,
  )
