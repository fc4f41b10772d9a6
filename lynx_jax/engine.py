# SPDX-License-Identifier: Apache-2.0
"""Requests in, committed tokens out: slots, admission, and what runs next.

It knows no flag, no file and no scheme by name: a scheme is a `CodecConfig`.

  engine = Engine(prefill_model, decode_model, codec, config, connect=…)
  for event in engine.stream(Request(prompt=ids, output_tokens=48)): …

A request goes through these states:

  QUEUED → RECEIVING → DRAFTING → DECODING → DONE
           Anchor       the rest   complete

The rest is the Residual and, for the target EXACT, the exact plane; DRAFTING is
skipped where there is neither. Until the rest is there, a slot drafts in short
rounds with a look at arrivals in between. Its first verification starts before
the end: it goes through the layer groups as they land. Then the slot repeats
draft → verify → commit on the device.
"""

import collections
import contextlib
import dataclasses
import enum
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from lynx_jax import continuation, kv_cache
from lynx_jax import mesh as mesh_lib
from lynx_jax import wire as wire_lib
from lynx_jax.agreed_prefill import AgreedPrefill
from lynx_jax.config import (
  CodecConfig,
  ConfigError,
  Drafter,
  EngineConfig,
  Order,
  Target,
  check_together,
  layer_ranges,
  require,
)
from lynx_jax.models import cached
from lynx_jax.models.transformer import Transformer
from lynx_jax.prefill import Prefill, Prompt
from lynx_jax.programs import fetch, span, spanned
from lynx_jax.requests import (
  ENDED,
  Committed,
  Event,
  Finished,
  Form,
  Mode,
  Provisional,
  Request,
  Result,
  Retracted,
  State,
)
from lynx_jax.sampling import GREEDY, Sampling
from lynx_jax.sender import (
  Computed,
  Continued,
  Payloads,
  PrefillDone,
  PrefillFailed,
  PrefillSide,
  Sender,
)
from lynx_jax.speculative import decode, draft_length, prompt_lookup
from lynx_jax.speculative import slots as slots_lib
from lynx_jax.timeline import Phase, Timeline
from lynx_jax.transport.courier import Arrival, Cut, Transport
from lynx_jax.transport.exchange import Exchange
from lynx_jax.transport.progress import Progress
from lynx_jax.transport.streams import (
  Chunk,
  Segment,
  Slice,
  Stream,
  TransferError,
  WireFormat,
)

__all__ = [
  'Committed',
  'Costs',
  'Engine',
  'Event',
  'Finished',
  'Form',
  'Mode',
  'Provisional',
  'Request',
  'Result',
  'Retracted',
  'Sampling',
  'State',
  'Step',
  'Target',
]

# Exact strings that are not merged yet, by layer group and token chunk.
_Strings = dict[tuple[int, int], wire_lib.String]

# An adapted draft length holds for so many rounds on the device, and follows
# the acceptance of so many rounds before. Rounds without drafts count among
# those: after a bad stretch drafts are tried again.
_ADAPTED_ROUNDS = 8
_RECENT_ROUNDS = 32
# A first verification is opened so much earlier than its steps take alone: what
# arrives is unpacked and inserted at the same time.
_OPENS_EARLY = 1.5
_POLL_S = 0.02  # longest wait for an arrival before looking at the rest
_UNBOUNDED = np.iinfo(np.int32).max
_PHASES = {
  Stream.ANCHOR: Phase.ANCHOR,
  Stream.RESIDUAL: Phase.RESIDUAL,
  Stream.EXACT: Phase.EXACT,
}


@dataclasses.dataclass
class _Entry:
  """A request and what the host knows of it beside its result."""

  id: int
  request: Request
  prompt: np.ndarray  # a copy: the caller's list may change
  target: Target
  result: Result
  progress: Progress
  strings: _Strings = dataclasses.field(default_factory=dict)
  slot: int | None = None
  token: int | None = None  # token 1, once its record has come
  decoded: int = 1  # tokens that decode has committed; prefill may be ahead
  rate: float = 0.0  # bytes a second of the chunk after the Anchor, the last
  verifying: decode.Pass | None = None  # the first verification, if it is open
  verifying_s: float = 0.0  # since when


class Step(enum.Enum):
  """A step that can be timed alone."""

  DRAFT = 'draft'  # one token, Anchor only
  SHARP = 'sharp'  # one token, Residual as far as it is there
  VERIFY = 'verify'  # the verify program
  PLAIN = 'plain'  # one token, whole target cache
  ROUND = 'round'  # one draft, one verification, in one program


@dataclasses.dataclass(frozen=True)
class Costs:
  """Seconds of one step alone, its fetch included: the least of four.

  Noise only adds, and a bound must not be built on it. Where nothing drafts,
  a draft would be a plain step.
  """

  draft_s: float
  verify_s: float
  plain_s: float


class Engine:
  """Runs requests over one prefill side and one decode side.

  Not thread-safe: one thread submits and steps. Close it, or use it in `with`.

  Args:
    prefill: the model, placed where prefill shall run; or a prefill side that
      runs elsewhere, which the engine will close.
    decode_model: the same model, placed where decode shall run.
    codec: the scheme.
    config: static sizes and policies.
    connect: makes the transport from a model in this process, given the
      function that cuts payloads; like any prefill side, it must deliver to
      the devices of `decode_model`.
    end_tokens: ids after which nothing follows.
    exchange: between the processes that decode runs in, if there are several.
      Each has an engine, of which the same things must be asked in the same
      order, and a `RemotePrefill` that brings the parts of its own devices.

  Raises:
    ConfigError: these do not fit together.
  """

  def __init__(
    self,
    prefill: Transformer | PrefillSide,
    decode_model: Transformer,
    codec: CodecConfig,
    config: EngineConfig,
    *,
    connect: Callable[[Cut], Transport] | None = None,
    end_tokens: Sequence[int] = (),
    exchange: Exchange | None = None,
  ):
    model = decode_model.config
    check_together(model, codec, config)
    self.config, self.codec, self.model_config = config, codec, model
    self.wire = WireFormat(model, codec, config)
    self.costs: Costs | None = None
    graphs, self._params = cached.split(decode_model)
    self._mesh = mesh = mesh_lib.of(self._params)
    wire_lib.check_mesh(codec, mesh)
    wire_lib.check_rows(codec, config, mesh)
    self._rows = mesh.shape[mesh_lib.DATA]
    self._decoder = decode.Decoder(
      graphs,
      layer_ranges(model, config),
      rows=config.verify_rows,
      end_tokens=tuple(end_tokens),
      implementation=config.implementation,
      mesh=mesh_lib.if_several(mesh),
    )
    self._cache = kv_cache.allocate(model, codec, config, mesh)
    self._slots = jax.device_put(
      slots_lib.of(
        config,
        slots_lib.Growth(codec.group, codec.recent_tokens)
        if codec.generated
        else None,
      ),
      mesh_lib.place(mesh, mesh_lib.spec('B')),
    )
    self._exchange = exchange
    self._has_residual = any(
      self.wire.planes(group) > 1
      for group in range(len(self.wire.layer_counts))
    )
    self._continuation: continuation.Continuation | None = None
    self._entries: dict[int, _Entry] = {}
    # One row after the other, so that requests have links of their own.
    self._free = sorted(
      range(config.slots), key=lambda slot: config.place(slot, self._rows)[1]
    )
    self._queue: list[int] = []
    # Those in a slot; the others have not begun, or have ended.
    self._running: dict[int, _Entry] = {}
    self._events: list[Event] = []  # for `step`
    self._streams: dict[int, collections.deque[Event]] = {}
    self._given_up: list[int] = []  # streams, in the middle of some work
    self._undisturbed = False
    self._next_id = 0
    self._closed = False
    self._sender: PrefillSide
    if isinstance(prefill, Transformer):
      assert connect is not None, 'a model in this process needs a transport'
      first = mesh_lib.of(nnx.state(prefill))
      wire_lib.check_mesh(codec, first)
      parts = mesh_lib.parts(first, mesh)
      if config.drafter is Drafter.PREFILL:
        continuation.check(codec, first, mesh)
        self._continuation = continuation.Continuation(
          prefill, self.wire, end_tokens
        )
      self._sender = Sender(
        Prefill(prefill, codec, config),
        self.wire,
        connect,
        parts,
        self._rows,
        continues=self._continue if self._continuation else None,
      )
    else:
      require(
        config.drafter is not Drafter.PREFILL,
        'engine.drafter=prefill needs both sides in one process',
      )
      self._sender = (
        prefill if exchange is None else AgreedPrefill(prefill, exchange)
      )

  def __enter__(self) -> 'Engine':
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def close(self) -> None:
    """Stops all work; may be called twice.

    Requests that have not ended never will; results stay readable.
    """
    self._closed = True
    self._sender.close()

  def warm_up(self) -> Costs:
    """Compiles what requests of the highest target need; measures the steps.

    Nothing is compiled after it, but for requests of another target. `costs`
    keeps the times for the choice of the draft length.

    Raises:
      RuntimeError: requests are under way.
    """
    self._require_idle('warm_up')
    strings: _Strings = {}
    for part, arrays in self._sender.warm_up():
      for row in range(self._rows):
        mesh = mesh_lib.local(mesh_lib.row(self._mesh, row))
        where = wire_lib.places(mesh, len(arrays))
        slot = row * (self.config.slots // self._rows)
        moved = jax.device_put(arrays, where)
        self._insert(slot, 0, part, moved, strings)
    self._merge(0, strings, self.config.prompt_tokens)
    if self._continuation is not None:
      self._continuation.warm_up(self._sender.warm_up())
    if self.codec.generated:
      self._pack(0, self.config.prompt_tokens + self.codec.group)
    by_anchor = self.config.drafter is Drafter.ANCHOR
    if (
      self._drafts(self.codec.target) and by_anchor and self.config.fused_rounds
    ):
      self.time_step(Step.ROUND)
    if self._has_residual and self.config.sharpen:
      self.time_step(Step.SHARP)
    if not by_anchor:
      self._propose([])
    times = {}
    drafts = Step.DRAFT if self._drafts(self.codec.target) else Step.PLAIN
    for step in dict.fromkeys((drafts, Step.VERIFY, Step.PLAIN)):
      self.time_step(step)  # compiles
      times[step] = min(self.time_step(step) for _ in range(4))
    costs = times[drafts], times[Step.VERIFY], times[Step.PLAIN]
    if self._exchange is not None:  # what is decided by them is decided alike
      costs, *_ = self._exchange.gather(costs)
    self.costs = Costs(*costs)
    return self.costs

  def time_step(self, step: Step) -> float:
    """Runs one step in slot 0 with the longest prompt; returns its seconds.

    The time includes the fetch. What the cache holds does not matter. The
    target is the codec's highest.

    Raises:
      RuntimeError: requests are under way.
    """
    self._require_idle('time_step')
    asked, mask = self.config.output_tokens, np.arange(self.config.slots) == 0
    # A slot that has ended would give loops nothing to do.
    ends = self._decoder.end_tokens
    token = next(t for t in itertools.count() if t not in ends)
    self._start(0, self.config.prompt_tokens, token=token, output_tokens=asked)
    arguments = self._params, self._cache, self._slots, mask
    target = self.codec.target
    start_s = time.monotonic()
    match step:
      case Step.DRAFT:
        changed = self._decoder.draft(*arguments, self.config.backlog_tokens)
      case Step.SHARP:
        landed = np.zeros(
          (len(self.wire.layer_counts), self.config.slots), np.int32
        )
        changed = self._decoder.draft(
          *arguments, self.config.backlog_tokens, landed
        )
      case Step.VERIFY:
        changed = self._decoder.verify(*arguments, target=target)
      case Step.PLAIN:
        changed = self._decoder.verify(*arguments, rows=1, target=target)
      case Step.ROUND:
        changed = self._decoder.rounds(*arguments, 1, 1, target)
    self._cache, self._slots = changed
    state = fetch(self._slots)
    seconds = time.monotonic() - start_s
    # Else it was not the work of a step that was measured.
    assert state.length[0] + state.n_drafts[0] > self.config.prompt_tokens
    self._slots = self._decoder.stop(self._slots, np.int32(0))
    return seconds

  def spoil_cache(self) -> None:
    """Overwrites the cache: planes with 0xFF, dense values with NaN.

    What a request does not bring is then seen in its output; else a slot may
    still hold the same from another request, or from `reference`. Compiles and
    fetches nothing.

    Raises:
      RuntimeError: requests are under way.
    """
    self._require_idle('spoil_cache')

    def spoilt(x: jax.Array) -> jax.Array:
      shape, where = x.shape, x.sharding
      ones = np.frombuffer(b'\xff' * x.dtype.itemsize, x.dtype)  # NaN, if float
      x.delete()  # there may be no room for two
      return mesh_lib.put(np.broadcast_to(ones, shape), where)

    self._cache = jax.block_until_ready(jax.tree.map(spoilt, self._cache))

  def compute(
    self, prompt: Sequence[int], sampling: Sampling = GREEDY
  ) -> Computed:
    """Prefills a prompt and nothing else; see `reference`."""
    self._require_idle('compute')
    self._check(prompt, 1)
    return self._sender.compute(np.asarray(prompt, np.int32), sampling=sampling)

  def reference(
    self,
    prompt: Sequence[int],
    output_tokens: int,
    computed: Computed | None = None,
    *,
    sampling: Sampling = GREEDY,
    target: Target | None = None,
  ) -> list[int]:
    """Returns the reference output: no transfer, no drafts; slot 0 alone.

    It prefills the prompt, puts the scheme's complete cache in place, and runs
    `reference_decode`.

    Args:
      prompt: token ids.
      output_tokens: most tokens, token 1 included.
      computed: what `compute` returned for the same prompt and sampling,
        perhaps of an engine with another codec; it saves the prefill.
      sampling: how tokens are chosen.
      target: as in `Request`.

    Raises:
      ConfigError: the request does not fit the engine.
      RuntimeError: requests are under way.
    """
    self._require_idle('reference')
    self._check(prompt, output_tokens)
    target = self._target(target)
    computed = self._sender.compute(
      np.asarray(prompt, np.int32), computed, sampling=sampling
    )
    strings: _Strings = {}
    to = wire_lib.destination(mesh_lib.row(self._mesh, 0))  # slot 0's
    for chunk, payload in self._sender.payloads(computed):
      payload = jax.device_put(payload, to(payload))
      self._put(0, chunk, payload, strings)
    self._merge(0, strings, len(prompt))
    self._start(
      0,
      len(prompt),
      token=computed.token,
      output_tokens=output_tokens,
      sampling=sampling,
    )
    tokens, self._cache, self._slots = decode.reference_decode(
      self._decoder, self._params, self._cache, self._slots, target
    )
    return tokens[0]

  def submit(self, request: Request) -> int:
    """Queues a request and returns its id.

    Raises:
      ConfigError: the request does not fit the engine; nothing was queued.
      RuntimeError: the engine is closed.
    """
    self._require_open()
    self._check(request.prompt, request.output_tokens)
    target = self._target(request.target)
    prompt = np.array(request.prompt, np.int32)
    key = self._next_id
    self._next_id += 1
    timeline = Timeline(time.monotonic())
    self._entries[key] = _Entry(
      key,
      request,
      prompt,
      target,
      Result(key, State.QUEUED, len(prompt), timeline),
      Progress(self.wire, key, len(prompt), target=target),
    )
    self._queue.append(key)
    return key

  def result(self, request: int) -> Result:
    """Returns what is known of a request; KeyError for an unknown id."""
    return self._entries[request].result

  def forget(self, request: int) -> Result:
    """Returns the result, ends the request if it runs, and drops it.

    No later `step` returns an event of it, and its stream ends. Results of
    requests that are never forgotten are kept for good.
    """
    self.cancel(request)
    self._events = [e for e in self._events if e.request != request]
    self._streams.pop(request, collections.deque()).clear()
    return self._entries.pop(request).result

  def cancel(self, request: int) -> None:
    """Ends a request in whatever state; does nothing if it has ended."""
    with self._undisturbed_work():
      self._end(self._entries[request], State.CANCELLED)

  @property
  def busy(self) -> bool:
    """Whether any request has not ended."""
    return bool(self._queue) or len(self._free) < self.config.slots

  def step(self) -> list[Event]:
    """Does the next piece of work, and returns what came out of it.

    Events of a stream are left to whoever iterates over it. A piece of work
    takes in what has arrived, then runs one short round of drafts, layer groups
    of a first verification, one call of decode rounds, or waits up to 20 ms for
    arrivals.

    Raises:
      TransferError: the transport failed; close the engine.
      RuntimeError: the engine is closed.
    """
    self._work()
    events, self._events = self._events, []
    return events

  def _work(self) -> None:
    self._require_open()
    with self._undisturbed_work():
      self._do_work()

  def _do_work(self) -> None:
    self._admit()
    self._receive()
    worked = False
    for form, target in itertools.product(Form, Target):
      if ready := self._having(State.DECODING, form, target):
        self._decode(ready, form, target)
        worked = True
    for entry in self._having(State.DRAFTING):
      worked |= self._verify_landed(entry)
    drafting = [
      entry
      for entry in self._having(State.DRAFTING)
      if entry.verifying is None and self._room(entry)
    ]
    if drafting:
      self._draft(drafting)
      worked = True
    if not worked and self.busy:
      self._sender.transport.wait(_POLL_S)

  def stream(
    self, request: Request, *, provisional: bool = True
  ) -> Iterator[Event]:
    """Submits a request and returns its events, until it has ended.

    Iterating does the engine's work, that of other requests too; their events
    are kept for their own streams, or for `step`. Whoever stops iterating
    cancels the request.

    Args:
      request: what to run.
      provisional: False holds tokens until they are committed: events are
        `Committed`, whose `tokens` make up the text, and at last `Finished`.

    Raises:
      ConfigError: the request does not fit the engine; nothing was queued.
      RuntimeError: the engine is closed.
    """
    key = self.submit(request)
    self._streams[key] = collections.deque()
    events = self._events_of(key, provisional)
    next(events)  # a generator that has begun is told when it is given up
    return cast(Iterator[Event], events)

  def _events_of(self, key: int, provisional: bool) -> Iterator[Event | None]:
    """Yields None, and then the events of a stream."""
    events = self._streams[key]
    event: Event | None = None
    try:
      yield event
      while not isinstance(event, Finished):
        while not events:
          if key not in self._streams:
            return  # forgotten
          self._work()
        event = events.popleft()
        if provisional or not isinstance(event, Provisional | Retracted):
          yield event
    except TransferError:
      raise  # nothing can be cancelled any more
    except BaseException:  # of whoever iterates; Ctrl-C is one
      self._given_up.append(key)
      if not self._undisturbed:
        self._cancel_given_up()
      raise
    finally:
      self._streams.pop(key, None)

  @contextlib.contextmanager
  def _undisturbed_work(self) -> Iterator[None]:
    """Puts off what the garbage collector gives up in the middle of it."""
    self._undisturbed = True
    try:
      yield
    finally:
      self._undisturbed = False
    self._cancel_given_up()

  def _cancel_given_up(self) -> None:
    while self._given_up:
      if (key := self._given_up.pop()) in self._entries:
        self.cancel(key)

  def generate(self, request: Request) -> Result:
    """Runs a request to its end.

    Raises:
      Exception: what made it fail.
    """
    *_, finished = self.stream(request)
    result = self.forget(finished.request)
    if result.error is not None:
      raise result.error
    return result

  def _require_open(self) -> None:
    if self._closed:
      raise RuntimeError('the engine is closed; make a new one')

  def _require_idle(self, what: str) -> None:
    self._require_open()
    if self.busy:
      raise RuntimeError(f'{what}() needs an engine without running requests')

  def _check(self, prompt: Sequence[int], output_tokens: int) -> None:
    try:
      ids = np.asarray(prompt)
    except ValueError as error:
      raise ConfigError(
        f'the prompt is no row of token ids: {error}'
      ) from error
    length = ids.size
    require(length > 0, 'the prompt has no tokens; give at least one')
    require(
      ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer),
      f'the prompt is {ids.dtype}{[*ids.shape]}; give the ids of its tokens, '
      'one integer each',
    )
    require(
      length <= self.config.prompt_tokens,
      f'the prompt has {length} tokens; engine.prompt_tokens='
      f'{self.config.prompt_tokens} allows no more: shorten it or raise that',
    )
    require(
      1 <= output_tokens <= self.config.output_tokens,
      f'output_tokens={output_tokens} must be in '
      f'1..{self.config.output_tokens} (engine.output_tokens)',
    )
    low, high = ids.min(), ids.max()
    require(
      low >= 0 and high < self.model_config.vocab,
      f'prompt token ids {low}..{high} must be in '
      f'0..{self.model_config.vocab - 1}',
    )

  def _target(self, wanted: Target | None) -> Target:
    require(
      wanted is not Target.EXACT or self.codec.exact,
      'target=exact needs an engine with codec.exact=True',
    )
    return wanted or self.codec.target

  def _drafts(self, target: Target) -> bool:
    """Whether anything travels after the Anchor."""
    return self._has_residual or target is Target.EXACT

  def _put(
    self,
    slot: int,
    chunk: Chunk,
    payload: Sequence[wire_lib.Parts],
    strings: _Strings,
  ) -> None:
    for part, arrays in zip(chunk.slices, payload, strict=True):
      self._insert(slot, chunk.token_chunk, part, arrays, strings)

  def _insert(
    self,
    slot: int,
    token_chunk: int,
    part: Slice,
    arrays: wire_lib.Parts,
    strings: _Strings,
  ) -> None:
    """Puts a slice into a slot, or into the string that it is a part of."""
    if part.segment is Segment.EXACT:
      place = part.layer_group, token_chunk
      strings[place] = wire_lib.gather(
        self.wire, strings.get(place), part, arrays
      )
    else:
      self._cache = wire_lib.insert(self.wire, self._cache, slot, part, arrays)

  def _merge(
    self,
    slot: int,
    strings: _Strings,
    prompt_tokens: int,
    progress: Progress | None = None,
  ) -> None:
    """Merges and drops strings: all, or those that `progress` allows."""
    for place in [*strings]:
      if progress is None or progress.mergeable(*place):
        self._cache = wire_lib.merge(
          self.wire,
          self._cache,
          slot,
          *place,
          strings.pop(place),
          prompt_tokens,
        )

  def _having(
    self,
    state: State,
    form: Form | None = None,
    target: Target | None = None,
  ) -> list[_Entry]:
    return [
      entry
      for entry in self._running.values()
      if entry.result.state is state
      and (form is None or entry.request.form is form)
      and (target is None or entry.target is target)
    ]

  def _admit(self) -> None:
    while self._queue and self._free:
      entry = self._entries[self._queue.pop(0)]
      entry.slot = self._free.pop(0)
      self._running[entry.id] = entry
      entry.result.state = State.RECEIVING
      self._sender.submit(
        entry.id,
        entry.prompt,
        mode=entry.request.mode,
        sampling=entry.request.sampling,
        deadline_s=entry.result.timeline.arrival_s + entry.request.deadline_s,
        timeline=entry.result.timeline,
        target=entry.target,
        row=self.config.place(entry.slot, self._rows)[0],
      )

  def _receive(self) -> None:
    for record in self._sender.records():
      entry = self._entries[record.request]
      if entry.result.state in ENDED:
        continue  # by a record before this one
      if isinstance(record, PrefillFailed):
        entry.result.error = record.error
        self._end(entry, State.FAILED)
      elif isinstance(record, Continued):
        self._show_ahead(entry, record.tokens)
      elif isinstance(record, PrefillDone):
        entry.token = record.token
        start_s = entry.result.timeline.arrival_s
        entry.result.prefill_end_s = record.end_s - start_s
        entry.result.critical = [
          (ready_s - start_s, size) for ready_s, size in record.critical
        ]
        self._show_first(entry)
        only = entry.request.output_tokens == 1
        if only or entry.token in self._decoder.end_tokens:
          self._end(entry, State.DONE)  # what is still under way is not needed
    for arrival in self._sender.transport.arrived():
      self._land(arrival)
    for state in (State.RECEIVING, State.DRAFTING):
      for entry in self._having(state):
        self._advance(entry)

  def _land(self, arrival: Arrival) -> None:
    chunk, entry = arrival.chunk, self._entries.get(arrival.chunk.request)
    if entry is None or entry.result.state in ENDED:
      return  # a late one: its slot may belong to another request
    assert entry.slot is not None
    entry.progress.land(chunk)
    result = entry.result
    self._put(entry.slot, chunk, arrival.payload, entry.strings)
    self._merge(entry.slot, entry.strings, result.prompt_tokens, entry.progress)
    if arrival.substituted:
      result.unverified = True
      return  # nothing of it was on the link
    result.anchor_bytes += chunk.anchor_bytes
    result.residual_bytes += chunk.residual_bytes
    result.exact_bytes += chunk.exact_bytes
    at_s = arrival.arrived_s - result.timeline.arrival_s
    if chunk.stream is Stream.ANCHOR or chunk.anchor_bytes:
      result.anchor_s = at_s
    if chunk.residual_bytes:
      result.residual_s = at_s
    if chunk.exact_bytes:
      result.exact_s = at_s
    if chunk.residual_bytes or chunk.exact_bytes:
      entry.rate = chunk.bytes / max(arrival.seconds, 1e-9)
    anchor = not chunk.residual_bytes and not chunk.exact_bytes
    result.timeline.add(
      _PHASES[Stream.ANCHOR if anchor else chunk.stream],
      arrival.sent_s,
      arrival.arrived_s,
      token_chunk=chunk.token_chunk,
      layer_group=chunk.layer_group,
      bytes=chunk.bytes,
    )

  def _advance(self, entry: _Entry) -> None:
    """Starts a slot whose Anchor is there, or ends its drafting."""
    if entry.result.state is State.RECEIVING:
      ready = entry.progress.anchor_complete
      if self.config.order is Order.LAYERS and not self._packs_first(entry):
        ready = entry.progress.layer_groups > 0
      if entry.token is None or not ready:
        return
      assert entry.slot is not None
      self._start(
        entry.slot,
        entry.result.prompt_tokens,
        token=entry.token,
        output_tokens=entry.request.output_tokens,
        sampling=entry.request.sampling,
      )
      entry.result.state = State.DRAFTING
      if self._drafts(entry.target) and self._room(entry):
        self._draft([entry])
    drafting = entry.result.state is State.DRAFTING and entry.verifying is None
    if drafting and entry.progress.complete:
      entry.result.state = State.DECODING

  def _packs_first(self, entry: _Entry) -> bool:
    """Whether `_start` packs a group, out of the tails of all layers."""
    tokens, codec = entry.result.prompt_tokens, self.codec
    reach = tokens + self.config.verify_rows - 1
    return codec.generated and codec.prefix_end(reach) > codec.prefix_end(
      tokens
    )

  def _start(
    self,
    slot: int,
    prompt_tokens: int,
    *,
    token: int,
    output_tokens: int,
    sampling: Sampling = GREEDY,
  ) -> None:
    self._slots = self._decoder.place(
      self._slots,
      np.int32(slot),
      np.int32(self.codec.prefix_end(prompt_tokens)),
      np.int32(prompt_tokens),
      np.int32(token),
      np.int32(output_tokens),
      self._decoder.end_tokens,
      sampling.row(),
    )
    self._pack(slot, prompt_tokens)

  def _pack(self, slot: int, length: int) -> None:
    """Packs what a slot with so many tokens and no generated group needs."""
    held = self.codec.prefix_end(min(length, self.config.prompt_tokens))
    self._cache, self._slots = self._decoder.pack(
      self._cache, self._slots, slot, length, held
    )

  def _room(self, entry: _Entry) -> bool:
    """Whether the slot may draft more; the device checks the same limits."""
    if not entry.progress.anchor_complete:
      return False
    result = entry.result
    pending = len(result.shown) - len(result.tokens)
    left = entry.request.output_tokens - len(result.tokens)
    ended = result.shown[-1] in self._decoder.end_tokens
    return pending < min(self.config.backlog_tokens, left) and not ended

  @spanned(Phase.DRAFT)
  def _draft(self, entries: list[_Entry]) -> None:
    start_s = time.monotonic()
    self._cache, self._slots = self._decoder.draft(
      self._params,
      self._cache,
      self._slots,
      self._mask(entries),
      self.config.backlog_tokens,
      self._landed(entries) if self.config.sharpen else None,
    )
    self._read(entries, Phase.DRAFT, start_s)

  def _landed(self, entries: list[_Entry]) -> np.ndarray | None:
    """Returns `residual_tokens` of all layer groups; None while all are 0.

    What is not there at all need not be unpacked either.
    """
    landed = np.zeros(
      (len(self.wire.layer_counts), self.config.slots), np.int32
    )
    for entry in entries:
      landed[:, entry.slot] = entry.progress.residual_tokens
    residual = [
      group
      for group in range(len(self.wire.layer_counts))
      if self.wire.planes(group) > 1
    ]
    return landed if landed[residual].any() else None

  def _verify_landed(self, entry: _Entry) -> bool:
    """Runs the first verification as far as its layer groups have landed.

    Returns:
      Whether there was anything to run.
    """
    landed = entry.progress.layer_groups
    if entry.verifying is None:
      if not landed or not self._verifies_now(entry, landed):
        return False
      entry.verifying_s = time.monotonic()
      entry.verifying = self._decoder.open_verify(
        self._params,
        self._slots,
        self._mask([entry]),
        1 if entry.request.form is Form.PLAIN else None,
        entry.target,
      )
    if landed == entry.verifying.groups:
      return False
    with span(Phase.VERIFY):
      self._cache, entry.verifying = self._decoder.resume(
        self._params, self._cache, entry.verifying, landed
      )
      if landed == len(self.wire.layer_counts):
        self._slots = self._decoder.close_verify(
          self._params, self._slots, entry.verifying
        )
        entry.verifying = None
        entry.result.state = State.DECODING
        self._read([entry], Phase.VERIFY, entry.verifying_s, draft_tokens=0)
    return True

  def _verifies_now(self, entry: _Entry, landed: int) -> bool:
    """Whether the first verification is worth more than another draft.

    While it is open the slot cannot draft. It is opened when the groups that
    have landed keep it busy until the rest is there, or nothing is left to
    draft.
    """
    if not self.config.layer_ready:
      return False
    if entry.request.form is Form.PLAIN:
      return not entry.progress.anchor_complete  # else it is as fast at once
    if not self._room(entry):
      return True
    if self.costs is None:
      return landed == len(self.wire.layer_counts) - 1
    result = entry.result
    size = self.wire.stream_bytes(result.prompt_tokens).residual
    left = size - result.residual_bytes + entry.progress.exact_bytes_left
    left_s = left / max(entry.rate, 1e-9)
    own_s = self.costs.verify_s + self.costs.draft_s
    return left_s <= _OPENS_EARLY * own_s

  @spanned(Phase.VERIFY)
  def _decode(self, entries: list[_Entry], form: Form, target: Target) -> None:
    start_s = time.monotonic()
    backlog = any(len(e.result.shown) > len(e.result.tokens) for e in entries)
    drafts = 0 if backlog else self._draft_tokens(entries, target)
    proposes = self.config.drafter is not Drafter.ANCHOR
    if proposes and form is Form.VERIFY and not backlog:
      drafts = self._propose(entries)
    arguments = self._params, self._cache, self._slots, self._mask(entries)
    looks_up = self._looks_up(entries)
    plain = drafts == 0 and (backlog or looks_up or not self._drafts(target))
    if form is Form.PLAIN:
      changed = self._decoder.verify(*arguments, rows=1, target=target)
    elif proposes or plain:
      changed = self._decoder.verify(*arguments, target=target)
    elif not self.config.fused_rounds:
      changed = self._decoder.one_round(*arguments, drafts, target)
    else:
      adapts = self.config.draft_tokens is None
      most = 1 if looks_up else _ADAPTED_ROUNDS if adapts else _UNBOUNDED
      changed = self._decoder.rounds(*arguments, drafts, most, target)
    self._cache, self._slots = changed
    self._read(entries, Phase.VERIFY, start_s, draft_tokens=drafts)

  def _propose(self, entries: list[_Entry]) -> int:
    """Gives slots what their texts hold, or prefill has decoded, as drafts.

    Returns:
      The most of one slot.
    """
    most = self.config.verify_rows - 1
    if self.config.draft_tokens is not None:
      most = self.config.draft_tokens
    tokens = np.zeros((self.config.slots, self.config.verify_rows), np.int32)
    counts = np.zeros(self.config.slots, np.int32)
    longest = 0
    for entry in entries:
      if self._continuation is not None:
        found = entry.result.tokens[entry.decoded :][:most]
      else:
        found = prompt_lookup.propose(entry.prompt, entry.result.tokens, most)
      tokens[entry.slot, : len(found)] = found
      counts[entry.slot] = len(found)
      longest = max(longest, len(found))
    self._slots = self._decoder.propose(self._slots, tokens, counts)
    return longest

  def _looks_up(self, entries: list[_Entry]) -> bool:
    """Whether somebody waits for more than the end of these requests."""
    others = self.config.slots - len(self._free) > len(entries)
    watched = any(entry.request.streamed for entry in entries)
    return others or watched or bool(self._queue)

  def _draft_tokens(self, entries: list[_Entry], target: Target) -> int:
    if not self._drafts(target):
      return 0
    if self.config.draft_tokens is not None:
      return self.config.draft_tokens
    if self.costs is None:
      return self.config.verify_rows // 2
    return draft_length.best(
      [r for e in entries for r in e.result.rounds[-_RECENT_ROUNDS:]],
      draft_s=self.costs.draft_s,
      verify_s=self.costs.verify_s,
      most=self.config.verify_rows - 1,
    )

  def _mask(self, entries: list[_Entry]) -> np.ndarray:
    mask = np.zeros(self.config.slots, bool)
    for entry in entries:
      mask[entry.slot] = True
    return mask

  def _read(
    self, entries: list[_Entry], phase: Phase, start_s: float, **detail: int
  ) -> None:
    """Fetches the slots once, and turns what changed into events."""
    state = fetch(self._slots)
    end_s = time.monotonic()
    for entry in entries:
      slot = entry.slot
      committed = state.out[slot, : state.n_out[slot]].tolist()
      drafts = state.drafts[slot, : state.n_drafts[slot]].tolist()
      count = state.n_rounds[slot]
      rounds = zip(
        state.round_drafts[slot, :count].tolist(),
        state.round_accepted[slot, :count].tolist(),
        strict=True,
      )
      entry.result.rounds = list(rounds)
      entry.result.drafted = sum(r[0] for r in entry.result.rounds)
      entry.result.accepted = sum(r[1] for r in entry.result.rounds)
      entry.result.timeline.add(
        phase,
        start_s,
        end_s,
        backlog=len(drafts),
        committed=len(committed) - entry.decoded,
        **detail,
      )
      entry.decoded = len(committed)
      if self._continuation is not None:
        ahead = self._ahead(entry, committed)
        if ahead is None:
          continue
        committed = ahead
      self._show(entry, committed, drafts, end_s)
      if state.remaining[slot] == 0:
        self._end(entry, State.DONE)
    self._cache, self._slots = self._decoder.grow(
      self._cache, self._slots, state
    )

  def _show(
    self, entry: _Entry, committed: list[int], drafts: list[int], now_s: float
  ) -> None:
    """Turns what is committed and drafted now into events."""
    commits = len(committed) > len(entry.result.tokens)
    with span(Phase.COMMIT) if commits else contextlib.nullcontext():
      self._emit(entry.id, *entry.result.show(committed, drafts, now_s))

  def _show_first(self, entry: _Entry) -> None:
    """Token 1 comes from prefill's exact logits and is final."""
    now_s = time.monotonic()
    entry.result.token_1_s = now_s - entry.result.timeline.arrival_s
    assert entry.token is not None
    self._show(entry, [entry.token], [], now_s)

  def _continue(
    self, request: int, computed: Prompt, payloads: Payloads
  ) -> Iterator[list[int]] | None:
    """Decodes at the prefill side; runs in the sender's thread."""
    assert self._continuation is not None
    entry = self._entries.get(request)
    if entry is None or entry.request.form is Form.PLAIN:
      return None  # nobody waits, or in another program than decode's
    return self._continuation.tokens(entry.request, computed, payloads)

  def _show_ahead(self, entry: _Entry, tokens: tuple[int, ...]) -> None:
    """Takes over what prefill has decoded: it is what decode would commit."""
    known = [*entry.result.tokens, *tokens]
    self._show(entry, known, [], time.monotonic())
    full = len(known) == entry.request.output_tokens
    if full or known[-1] in self._decoder.end_tokens:
      self._end(entry, State.DONE)

  def _ahead(self, entry: _Entry, committed: list[int]) -> list[int] | None:
    """Returns the tokens of the side that is ahead.

    Decode takes over where it is. None says that the sides disagree, and that
    the request has failed.
    """
    known = entry.result.tokens
    for position, (one, other) in enumerate(
      zip(known, committed, strict=False)
    ):
      if one != other:
        entry.result.error = RuntimeError(
          f'token {position + 1} is {one} for prefill, which has shown it, and '
          f'{other} for decode; engine.drafter=prefill needs devices that '
          'round alike'
        )
        self._end(entry, State.FAILED)
        return None
    if len(known) > len(committed):
      return known
    if entry.progress.complete:
      self._sender.drop(entry.id)
    return committed

  def _end(self, entry: _Entry, state: State) -> None:
    result = entry.result
    if result.state in ENDED:
      return
    if result.state is State.QUEUED:
      self._queue.remove(entry.id)
    else:
      assert entry.slot is not None
      self._sender.drop(entry.id)
      if state is not State.DONE:
        self._slots = self._decoder.stop(self._slots, np.int32(entry.slot))
      self._free.append(entry.slot)
      del self._running[entry.id]
    now_s = time.monotonic()
    if len(result.shown) > len(result.tokens):
      self._emit(entry.id, *result.show(result.tokens, [], now_s))
    entry.strings.clear()
    result.state = state
    result.done_s = now_s - result.timeline.arrival_s
    result.timeline.add(Phase.DONE, now_s)
    self._emit(entry.id, Finished(entry.id, state, result.done_s))

  def _emit(self, request: int, *events: Event) -> None:
    self._streams.get(request, self._events).extend(events)
