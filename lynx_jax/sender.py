# SPDX-License-Identifier: Apache-2.0
"""The prefill side: computes prompts, splits them, offers their chunks.

It knows no slot and no decode. What it tells decode besides chunks are the
records of the control channel: `PrefillDone`, `Continued`, `Encoded` and
`PrefillFailed`.
`PrefillSide` is what an engine sees of it, in this process or in another one.
"""

import collections
import dataclasses
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from lynx_jax import wire as wire_lib
from lynx_jax.config import Target
from lynx_jax.prefill import Prompt
from lynx_jax.programs import fetch
from lynx_jax.requests import Mode
from lynx_jax.sampling import GREEDY, Sampling
from lynx_jax.timeline import Phase, Timeline
from lynx_jax.transport.courier import Cut, Incoming, Outgoing
from lynx_jax.transport.links import Payload
from lynx_jax.transport.streams import Chunk, Slice, Stream, WireFormat


@dataclasses.dataclass(frozen=True)
class PrefillDone:
  """Closes a request's manifest: token 1 and when the prompt was computed.

  `seen_s` is when the receiver can know of it; `end_s` when prefill and, in
  serial mode, split had ended. `critical` has (ready_s, bytes) of the chunks
  that the first token of decode waits for, in their order; see
  `timeline.bound`.
  """

  request: int
  token: int
  critical: tuple[tuple[float, int], ...]
  end_s: float
  seen_s: float


@dataclasses.dataclass(frozen=True)
class PrefillFailed:
  """Nothing more of the request will come."""

  request: int
  error: Exception
  seen_s: float


@dataclasses.dataclass(frozen=True)
class Continued:
  """Tokens that follow all before: prefill goes on decoding."""

  request: int
  tokens: tuple[int, ...]
  seen_s: float


@dataclasses.dataclass(frozen=True)
class Encoded:
  """Closes the manifest of the exact plane.

  `strings` has (layer group, token chunk, pages) of each.
  """

  request: int
  strings: tuple[tuple[int, int, int], ...]
  seen_s: float


Record = PrefillDone | PrefillFailed | Continued | Encoded
Payloads = Iterator[tuple[Chunk, Sequence[wire_lib.Parts]]]
# Given a request, its prompt and all of its chunks, yields the tokens that
# follow token 1, those of a step at a time; None leaves them to decode.
Continue = Callable[[int, Prompt, Payloads], Iterator[list[int]] | None]
Wire = TypeVar('Wire', bound=Outgoing)


class Computed(Protocol):
  """A whole prompt as some prefill side has computed it."""

  @property
  def token(self) -> int:
    """What follows the prompt."""


class PrefillSide(Protocol):
  """What an engine needs of whatever computes prompts and sends them."""

  @property
  def transport(self) -> Incoming:
    """Brings the chunks."""

  def warm_up(self) -> Iterator[tuple[Slice, wire_lib.Parts]]:
    """Compiles what transfers need; yields a payload of every kind."""

  def compute(
    self,
    tokens: np.ndarray,
    known: Any = None,
    *,
    sampling: Sampling = GREEDY,
  ) -> Computed:
    """Computes a whole prompt at once, outside of all transfers.

    Args:
      tokens: the prompt.
      known: the same prompt as another engine's side computed it, for the same
        sampling; it may save the prefill.
      sampling: how token 1 is chosen.
    """

  def payloads(
    self, computed: Any
  ) -> Iterator[tuple[Chunk, Sequence[wire_lib.Parts]]]:
    """Yields every chunk of what `compute` returned, with its payload."""

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
    row: int = 0,
  ) -> None:
    """Queues a prompt; its `timeline` gets the events of prefill and split.

    Only the target EXACT has its exact plane sent. Chunks go to one row of
    decode's mesh.
    """

  def drop(self, request: int) -> None:
    """Frees the request's KV, and stops its prefill and its transfer."""

  def records(self) -> list[Record]:
    """Returns, without blocking, the control records seen since the last."""

  def close(self) -> None:
    """Stops; may be called twice."""


class Computing(Protocol):
  """What a `Sender` needs of `prefill.Prefill`."""

  def chunks(
    self, prompt: np.ndarray, sampling: Sampling = GREEDY
  ) -> Iterator[Prompt]:
    """Yields the growing prompt."""

  def split(self, prompt: Prompt, token_chunk: int) -> None:
    """Splits one computed token chunk."""


def warm_up(
  prefill: Computing, wire: WireFormat, parts: int = 1
) -> Iterator[tuple[Slice, wire_lib.Parts]]:
  """Compiles what a prompt needs; yields a payload of every kind.

  Args:
    prefill: the programs.
    wire: format of the transfers.
    parts: that slices travel in; see `wire`.
  """
  tokens = np.zeros(wire.engine.token_chunk, np.int32)
  computed = _whole(prefill, wire, tokens, None, GREEDY)
  for layer_group in range(len(wire.layer_counts)):
    if wire.codec.exact:
      wire_lib.encode(wire, computed, layer_group, 0)
  for part in wire.slice_kinds():
    (arrays,) = wire_lib.cut(wire, computed, 0, (part,), parts)
    yield part, arrays


def _whole(
  prefill: Computing,
  wire: WireFormat,
  tokens: np.ndarray,
  known: Prompt | None,
  sampling: Sampling,
) -> Prompt:
  """Prefills, unless it is known, and splits a whole prompt."""
  if known is None:
    *_, known = prefill.chunks(tokens, sampling)
  end = wire.codec.prefix_end(len(tokens))
  computed = Prompt(len(tokens), end, known.kv, known.token)
  for token_chunk in range(wire.token_chunks(len(tokens)) - 1):
    prefill.split(computed, token_chunk)
  return computed


@dataclasses.dataclass
class _Job:
  request: int
  prompt: np.ndarray
  mode: Mode
  sampling: Sampling
  deadline_s: float
  timeline: Timeline
  target: Target
  row: int
  computed: Prompt | None = None
  critical: list[tuple[float, int]] = dataclasses.field(default_factory=list)
  dropped: threading.Event = dataclasses.field(default_factory=threading.Event)


class Sender(Generic[Wire]):
  """A thread that takes prompt after prompt.

  With a `Transport` it is a `PrefillSide` for an engine in this process.

  Args:
    prefill: the programs.
    wire: format of the transfers.
    connect: makes the transport, given the function that cuts payloads.
    parts: that slices travel in; see `wire`.
    rows: of decode's mesh.
    continues: decodes until decode takes over, a step at a time while no other
      prompt waits; None leaves that to decode.
  """

  def __init__(
    self,
    prefill: Computing,
    wire: WireFormat,
    connect: Callable[[Cut], Wire],
    parts: int = 1,
    rows: int = 1,
    continues: Continue | None = None,
  ):
    self._prefill, self._wire, self._continues = prefill, wire, continues
    self._parts, self._rows = parts, rows
    self._jobs: dict[int, _Job] = {}
    # Held while chunks are offered or a request is dropped: nothing may be
    # offered after its transfer was cancelled.
    self._dropping = threading.Lock()
    self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
    self._records: queue.SimpleQueue[Record] = queue.SimpleQueue()
    self._held_back: Record | None = None  # read, but not yet to be seen
    self.transport: Wire = connect(self.cut)
    self._thread = threading.Thread(
      target=self._run, name='lynx-prefill', daemon=True
    )
    self._thread.start()

  def warm_up(self) -> Iterator[tuple[Slice, wire_lib.Parts]]:
    """Compiles what transfers need; yields a payload of every kind."""
    yield from warm_up(self._prefill, self._wire, self._parts)

  def compute(
    self,
    tokens: np.ndarray,
    known: Prompt | None = None,
    *,
    sampling: Sampling = GREEDY,
  ) -> Prompt:
    """Prefills and splits a prompt at once, in the calling thread.

    For warm-up and references; nothing is offered or timed.

    Args:
      tokens: the prompt.
      known: the same prompt as another codec's sender computed it, for the
        same sampling: its keys, values and token are taken over, and split
        anew.
      sampling: how token 1 is chosen.
    """
    return _whole(self._prefill, self._wire, tokens, known, sampling)

  def payloads(self, computed: Prompt) -> Payloads:
    """Yields every chunk of what `compute` returned, with its payload."""
    wire = self._wire
    manifests = [
      wire.manifest(0, computed.tokens, token_chunk)
      for token_chunk in range(wire.token_chunks(computed.tokens))
    ]
    for string in wire.strings(computed.tokens):
      pages = fetch(wire_lib.encode(wire, computed, *string)).item()
      manifests.append(wire.exact_manifest(0, *string, pages))
    for chunk in itertools.chain(*manifests):
      yield chunk, self._cut(computed, chunk.token_chunk, chunk.slices)

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
    row: int = 0,
  ) -> None:
    """Queues a prompt; its `timeline` gets the events of prefill and split."""
    job = _Job(
      request, prompt, mode, sampling, deadline_s, timeline, target, row
    )
    self._jobs[request] = job
    self._waiting.put(job)

  def drop(self, request: int) -> None:
    """Frees the request's KV, and stops its prefill and its transfer."""
    with self._dropping:
      if request in self._jobs:
        self._jobs[request].dropped.set()
      # First of all: a payload that is being cut must not miss its source
      # before the transport knows that nobody wants it.
      self.transport.cancel(request)
      self._jobs.pop(request, None)

  def records(self) -> list[Record]:
    """Returns, without blocking, the control records seen since the last."""
    seen: list[Record] = []
    while True:
      record = self._held_back
      if record is None:
        try:
          record = self._records.get_nowait()
        except queue.Empty:
          return seen
      self._held_back = record
      if record.seen_s > time.monotonic():
        return seen
      self._held_back = None
      if record.request in self._jobs:
        seen.append(record)

  def next_record(self, timeout_s: float) -> Record | None:
    """Blocks for the next record; None if the time is over.

    For whoever passes records on: it does not wait until they can be seen.
    """
    try:
      return self._records.get(timeout=timeout_s)
    except queue.Empty:
      return None

  def cut(self, chunk: Chunk) -> Payload:
    """Returns the payload of a chunk that was offered."""
    job = self._jobs[chunk.request]
    assert job.computed is not None
    payload = self._cut(job.computed, chunk.token_chunk, chunk.slices)
    return wire_lib.for_row(payload, job.row, self._rows)

  def _cut(
    self, prompt: Prompt, token_chunk: int, slices: Iterable[Slice]
  ) -> tuple[wire_lib.Parts, ...]:
    return wire_lib.cut(self._wire, prompt, token_chunk, slices, self._parts)

  def close(self) -> None:
    """Stops after the chunk being computed; may be called twice.

    What is on its way is freed before that: nobody waits for a compilation.
    """
    for request in tuple(self._jobs):
      self.drop(request)
    self._waiting.put(None)
    self.transport.close()
    self._thread.join()

  def _run(self) -> None:
    # Prompts with steps left that are not urgent: they are done one after the
    # other, while no new prompt waits.
    later: collections.deque[tuple[_Job, Iterator[None]]] = collections.deque()
    while True:
      try:
        job = self._waiting.get(block=not later)
      except queue.Empty:
        if not self._go_on(*later[0]):
          later.popleft()
        continue
      if job is None:
        return
      steps = self._compute(job)
      if self._go_on(job, steps):
        later.append((job, steps))

  def _go_on(self, job: _Job, steps: Iterator[None]) -> bool:
    """Does the next step; returns whether there are more."""
    try:
      next(steps)
      return True
    except StopIteration:
      return False
    except Exception as error:  # reaches the caller as a record
      seen_s = time.monotonic() + self.transport.latency_s
      self._records.put(PrefillFailed(job.request, error, seen_s))
      return False

  def _compute(self, job: _Job) -> Iterator[None]:
    """Does all that is urgent, then yields before each step that is not."""
    if job.dropped.is_set():
      return
    overlapped = job.mode is Mode.OVERLAPPED
    start_s = time.monotonic()
    for token_chunk, prompt in enumerate(
      self._prefill.chunks(job.prompt, job.sampling)
    ):
      if job.dropped.is_set():
        return
      job.computed = prompt
      end_s = time.monotonic()
      job.timeline.add(Phase.PREFILL, start_s, end_s, token_chunk=token_chunk)
      if overlapped:
        self._split(job, token_chunk)
        self._offer(job, token_chunk, time.monotonic())
      start_s = time.monotonic()
    last = self._wire.token_chunks(len(job.prompt)) - 1  # the dense tail
    if not overlapped:
      for token_chunk in range(last):
        self._split(job, token_chunk)
    end_s = time.monotonic()
    for token_chunk in range(last if overlapped else 0, last + 1):
      self._offer(job, token_chunk, end_s)
    steps = None
    if self._continues is not None:
      steps = self._continues(job.request, prompt, self.payloads(prompt))
    if steps is not None:
      job.critical = [(end_s, 0)]  # the next token waits for no chunk
    self._records.put(
      PrefillDone(
        job.request,
        prompt.token,
        tuple(job.critical),
        end_s,
        end_s + self.transport.latency_s,
      )
    )
    if steps is not None:
      yield
      start_s = time.monotonic()
      while not job.dropped.is_set() and (tokens := next(steps, None)):
        end_s = time.monotonic()
        job.timeline.add(Phase.CONTINUE, start_s, end_s)
        seen_s = end_s + self.transport.latency_s
        self._records.put(Continued(job.request, tuple(tokens), seen_s))
        yield
        start_s = time.monotonic()
    if job.target is Target.PLANES:
      return
    encoded = []
    for string in self._wire.strings(len(job.prompt)):
      yield
      if job.dropped.is_set():
        return
      encoded.append((*string, self._encode(job, *string)))
    seen_s = time.monotonic() + self.transport.latency_s
    self._records.put(Encoded(job.request, tuple(encoded), seen_s))

  def _split(self, job: _Job, token_chunk: int) -> None:
    start_s = time.monotonic()
    assert job.computed is not None
    self._prefill.split(job.computed, token_chunk)
    job.timeline.add(
      Phase.SPLIT, start_s, time.monotonic(), token_chunk=token_chunk
    )

  def _encode(self, job: _Job, layer_group: int, token_chunk: int) -> int:
    """Encodes and offers an exact string; returns how many pages it has."""
    start_s = time.monotonic()
    assert job.computed is not None
    string = layer_group, token_chunk
    pages = fetch(wire_lib.encode(self._wire, job.computed, *string)).item()
    end_s = time.monotonic()
    job.timeline.add(
      Phase.ENCODE,
      start_s,
      end_s,
      token_chunk=token_chunk,
      layer_group=layer_group,
    )
    chunks = self._wire.exact_manifest(job.request, *string, pages)
    self._put(job, chunks, end_s)
    return pages

  def _offer(self, job: _Job, token_chunk: int, ready_s: float) -> None:
    chunks = self._wire.manifest(job.request, len(job.prompt), token_chunk)
    job.critical += [
      (ready_s, chunk.bytes)
      for chunk in chunks
      if chunk.stream is Stream.ANCHOR or chunk.anchor_bytes
    ]
    self._put(job, chunks, ready_s)

  def _put(self, job: _Job, chunks: Sequence[Chunk], ready_s: float) -> None:
    with self._dropping:
      if not job.dropped.is_set():
        self.transport.offer(
          chunks,
          arrival_s=job.timeline.arrival_s,
          ready_s=ready_s,
          deadline_s=job.deadline_s,
        )
