# SPDX-License-Identifier: Apache-2.0
"""A prefill side as all processes of a decode side see it at once.

Each process fetches the parts of its own devices, and they land at different
times. But all must start the same programs in the same order, and what an
engine starts depends on what has landed. So nothing is shown to it before it
is there in every process: once a step the processes exchange what is new, and
each derives the same from all that was said.

It knows no slot and no program.
"""

import dataclasses
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from lynx_jax import wire as wire_lib
from lynx_jax.config import Target
from lynx_jax.requests import Mode
from lynx_jax.sampling import GREEDY, Sampling
from lynx_jax.sender import (
  Computed,
  PrefillDone,
  PrefillFailed,
  PrefillSide,
  Record,
)
from lynx_jax.timeline import Timeline
from lynx_jax.transport.courier import Arrival
from lynx_jax.transport.exchange import Exchange
from lynx_jax.transport.streams import Chunk, ChunkKey, Slice, TransferError

_T = TypeVar('_T')
_TICK_S = 0.005  # longest wait before the others hear from this process


class ProcessFailed(TransferError):
  """Another process of the side cannot go on; it names the reason."""


class OutOfStep(TransferError):
  """The processes of the side were asked for different things."""


@dataclasses.dataclass
class _Landing:
  """A chunk whose parts land in one process after the other."""

  processes: int = 0
  slowest_s: float = 0.0
  substituted: bool = False


class AgreedPrefill:
  """A `PrefillSide` whose processes agree.

  Args:
    side: of this process.
    exchange: between all of them.
  """

  def __init__(self, side: PrefillSide, exchange: Exchange):
    self._side, self._exchange = side, exchange
    self._calls: list[tuple[Any, ...]] = []  # since the last exchange
    # Of requests under way: what has landed somewhere, and what has here.
    self._landing: dict[int, dict[ChunkKey, _Landing]] = {}
    self._here: dict[ChunkKey, Arrival] = {}
    self._tokens: dict[int, list[int]] = {}  # told by processes that have it
    self._done: dict[int, PrefillDone] = {}
    self._errors: dict[int, Exception] = {}
    self._agreed: list[Arrival] = []

  @property
  def transport(self) -> 'AgreedPrefill':
    """Brings the chunks."""
    return self

  def warm_up(self) -> Iterator[tuple[Slice, wire_lib.Parts]]:
    """Compiles what transfers need; yields a payload of every kind."""
    yield from self._together(lambda: [*self._side.warm_up()])

  def compute(
    self,
    tokens: np.ndarray,
    known: Any = None,
    *,
    sampling: Sampling = GREEDY,
  ) -> Computed:
    """Computes a whole prompt at once; see `PrefillSide`."""
    return self._together(
      lambda: self._side.compute(tokens, known, sampling=sampling)
    )

  def payloads(
    self, computed: Any
  ) -> Iterator[tuple[Chunk, Sequence[wire_lib.Parts]]]:
    """Yields every chunk of what `compute` returned, in one order."""
    yield from sorted(
      self._side.payloads(computed), key=lambda found: found[0].key[2:]
    )

  def submit(
    self,
    request: int,
    prompt: np.ndarray,
    *,
    mode: Mode,
    sampling: Sampling = GREEDY,
    deadline_s: float = math.inf,
    timeline: Timeline,
    target: Target = Target.PLANES,
  ) -> None:
    """Queues a prompt, in every process."""
    # With another prompt it would be a mixture of two that is decoded.
    self._calls.append(('submit', request, zlib.crc32(prompt.tobytes())))
    self._landing[request] = {}
    self._side.submit(
      request,
      prompt,
      mode=mode,
      sampling=sampling,
      deadline_s=deadline_s,
      timeline=timeline,
      target=target,
    )

  def drop(self, request: int) -> None:
    """Frees the request's KV, in every process."""
    self._calls.append(('drop', request))
    self._side.drop(request)
    self._landing.pop(request, None)
    for known in (self._tokens, self._done, self._errors):
      known.pop(request, None)
    self._here = {k: a for k, a in self._here.items() if k.request != request}
    self._agreed = [a for a in self._agreed if a.chunk.request != request]

  def records(self) -> list[Record]:
    """Exchanges what is new; returns the records that are everywhere.

    Raises:
      PeerLost: a process is gone.
      OutOfStep: one was asked for other things than this one.
      TransferError: the transport failed.
    """
    told = self._exchange.gather(self._news())
    for process, (calls, *_) in enumerate(told):
      if calls != told[0][0]:
        raise OutOfStep(
          f'process 0 was asked for {told[0][0]}, process {process} for {calls}'
        )
    records: list[Record] = []
    for process, (_, chunks, done, failed) in enumerate(told):
      self._land(chunks, len(told))
      records += self._finish(done, len(told))
      records += self._fail(failed, process)
    return records

  def arrived(self) -> list[Arrival]:
    """Returns the chunks of which every part has landed."""
    agreed, self._agreed = self._agreed, []
    return agreed

  def wait(self, timeout_s: float) -> bool:
    """Blocks until something lands here, but not long: it may elsewhere."""
    return self._side.transport.wait(min(timeout_s, _TICK_S))

  def close(self) -> None:
    """Stops; may be called twice."""
    self._side.close()

  def _together(self, run: Callable[[], _T]) -> _T:
    """Runs something in all processes; all fail if one does."""
    error: Exception | None = None
    try:
      result = run()
    except Exception as found:
      error = found
    said = self._exchange.gather(error and f'{type(error).__name__}: {error}')
    if error is not None:
      raise error
    for process, text in enumerate(said):
      if text is not None:
        raise ProcessFailed(f'process {process}: {text}')
    return result

  def _news(self) -> tuple[Any, ...]:
    """Takes in what is new here; returns it as the others shall hear it."""
    chunks = []
    for arrival in self._side.transport.arrived():
      key = arrival.chunk.key
      self._here[key] = arrival
      took_s = arrival.arrived_s - arrival.sent_s
      chunks.append((key, took_s, arrival.substituted))
    done, failed = [], []
    for record in self._side.records():
      if isinstance(record, PrefillDone):
        self._done[record.request] = record
        done.append((record.request, record.token))
      elif isinstance(record, PrefillFailed):
        text = f'{type(record.error).__name__}: {record.error}'
        self._errors[record.request] = record.error
        failed.append((record.request, text))
    calls, self._calls = self._calls, []
    return calls, chunks, done, failed

  def _land(self, news: Sequence[Any], processes: int) -> None:
    """Counts chunks of one process; those that are everywhere are agreed on."""
    for parts, took_s, substituted in news:
      key = ChunkKey(*parts)
      landing = self._landing.get(key.request, {}).setdefault(key, _Landing())
      landing.processes += 1
      landing.slowest_s = max(landing.slowest_s, took_s)
      landing.substituted |= substituted
      if landing.processes == processes and key.request in self._landing:
        self._agreed.append(
          dataclasses.replace(
            self._here.pop(key),
            substituted=landing.substituted,
            agreed_s=landing.slowest_s,
          )
        )

  def _finish(
    self, news: Sequence[Any], processes: int
  ) -> Iterator[PrefillDone]:
    """Counts records of one process; yields those that are everywhere."""
    for request, token in news:
      if request not in self._landing:
        continue
      tokens = self._tokens.setdefault(request, [])
      tokens.append(token)
      if len(tokens) == processes:
        if len({*tokens}) > 1:
          raise TransferError(f'request {request}: token 1 is one of {tokens}')
        yield self._done[request]

  def _fail(self, news: Sequence[Any], process: int) -> Iterator[PrefillFailed]:
    """Yields the requests that one process cannot go on with."""
    for request, text in news:
      if self._landing.pop(request, None) is not None:
        error = ProcessFailed(f'process {process}: {text}')
        yield PrefillFailed(
          request, self._errors.get(request, error), time.monotonic()
        )
