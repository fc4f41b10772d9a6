# SPDX-License-Identifier: Apache-2.0
"""Predicts what requests meet: a discrete-event simulation of both sides.

The scheduler, the manifests and the bound are the engine's own objects, driven
in simulated time; only computing takes its seconds from `Costs`. It knows no
array, no file and no clock.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence

from experiments.schemes import FAITHFUL, Scheme
from lynx_jax import timeline
from lynx_jax.config import Drafter, Order, require
from lynx_jax.engine import Mode
from lynx_jax.speculative import draft_length
from lynx_jax.transport.scheduler import Scheduler
from lynx_jax.transport.streams import Chunk, Stream, WireFormat

_RESIDUAL_WINDOW_BYTES = 0  # as `serving` has it
# Chance that a draft on an Anchor of 2 and of 4 bits is accepted, given that
# those before were: its powers have the mean over the first eight positions of
# the share of rounds that got there (docs/equivalence.md, SmolLM2-135M).
_ACCEPTED_2, _ACCEPTED_4 = 0.878, 0.967
NOT_EXACT = (
  'the bits of an exact plane follow from the prompt and are not predicted; '
  'leave out lynx_exact'
)
_FIRST_TOKENS = 8  # of decode, whose times are those of `Outcome.stays_s`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """Seconds of the two sides, for one scheme.

  Attributes:
    chunk_s: of the token chunk that starts at a token, its split included.
    draft_s: of a draft step, given the prompt lengths of the slots in it.
    verify_s: of a verification pass, likewise.
    plain_s: of a decode step of one row a slot, likewise.
    acceptance: chance that a draft is accepted, given that those before were.
  """

  chunk_s: Callable[[int], float]
  draft_s: Callable[[Sequence[int]], float]
  verify_s: Callable[[Sequence[int]], float]
  plain_s: Callable[[Sequence[int]], float]
  acceptance: float = 0.9


def acceptance(scheme: Scheme) -> float:
  """Returns the chance that a draft is accepted, by the bits of K's Anchor.

  It was measured for 2 and 4 bits, on a small model. Others are interpolated,
  and wider Anchors taken for one of 4 bits.
  """
  bits = next(iter(scheme.codec.k.planes), 4)
  part = min(max(bits - 2, 0), 2) / 2
  return (1 - part) * _ACCEPTED_2 + part * _ACCEPTED_4


def steady(
  chunk_s: float, step_s: float, acceptance: float = Costs.acceptance
) -> Costs:
  """Returns costs that depend on nothing: of a token chunk, and of any step."""
  return Costs(
    chunk_s=lambda start: chunk_s,
    draft_s=lambda lengths: step_s,
    verify_s=lambda lengths: step_s,
    plain_s=lambda lengths: step_s,
    acceptance=acceptance,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
  """A request to come: when, how long its prompt is, and how many tokens."""

  arrival_s: float
  prompt_tokens: int
  output_tokens: int


@dataclasses.dataclass(kw_only=True)
class Outcome:
  """What becomes of a request; all times are seconds since its arrival.

  Attributes:
    ask: the request.
    prefill_end_s: prefill and split have ended, T_p.
    anchor_s, residual_s: the last byte of the stream has arrived; None where
      there is none, or all was said before it came.
    provisional_s: first token of decode.
    committed_s: first verified one.
    stays_s: when a token is there to stay, a mean over the first eight of
      decode: a draft with the chance that it and those before are accepted,
      else what is committed in its place.
    done_s: the last one is committed.
    bound_s: `timeline.bound` of the request alone; only those that never met
      another one can be held against it.
  """

  ask: Ask
  prefill_end_s: float = math.nan
  anchor_s: float | None = None
  residual_s: float | None = None
  provisional_s: float = math.nan
  committed_s: float = math.nan
  stays_s: float = math.nan
  done_s: float = math.nan
  bound_s: float = math.nan

  @property
  def exposed_s(self) -> float:
    return self.provisional_s - self.prefill_end_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
  """What a scheme makes of a load.

  Attributes:
    outcomes: of the requests, in the order given.
    span_s: from the first arrival to the last token.
    link_use: the part of the span in which the link was busy.
    prefill_use, decode_use: likewise, of the two sides.
  """

  outcomes: tuple[Outcome, ...]
  span_s: float
  link_use: float
  prefill_use: float
  decode_use: float

  def median(self, field: str) -> float | None:
    """Returns the median of a field of the outcomes, where it is known."""
    values = [getattr(o, field) for o in self.outcomes]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def simulate(
  asks: Sequence[Ask],
  wire: WireFormat,
  costs: Costs,
  *,
  mode: Mode,
  rate_gbps: float,
  rtt_ms: float,
  seed: int = 0,
) -> Prediction:
  """Runs requests through both sides in simulated time.

  One prompt is in prefill at a time and one chunk on the link; decode has
  `wire.engine.slots` slots and does one program at a time: a round of drafts
  for those whose Anchor is there, else a round for those that have all. As in
  the engine, a request waits for a slot before its prefill begins. With
  `Order.LAYERS` a first step follows the layer groups as they land; with
  `Drafter.PREFILL` the prefill side decodes on while no prompt waits. What the
  engine does beyond that is left out: layer-ready verification of drafts and
  drafts that sharpen make commits earlier than predicted here, and what prompt
  lookup finds is not known.

  Args:
    asks: in any order.
    wire: how caches are cut; of the scheme.
    costs: of the scheme.
    mode: serial or overlapped.
    rate_gbps, rtt_ms: of the link.
    seed: of the acceptance of drafts.

  Returns:
    The same prediction for the same arguments.

  Raises:
    ConfigError: there is no request, or the codec is exact.
  """
  require(bool(asks), 'a plan needs at least one request')
  require(not wire.codec.exact, NOT_EXACT)
  run = _Run(asks, wire, costs, mode, rate_gbps, rtt_ms, seed)
  return run.end()


class _Slot:
  """A request from its admission on."""

  def __init__(self, key: int, ask: Ask):
    self.key, self.outcome = key, Outcome(ask=ask)
    self.missing: collections.Counter[Stream] = collections.Counter()
    self.speculates = False  # a Residual is, or was, to come
    self.token_1 = False  # it is here, and all chunks are known
    self.shown = self.committed = 1  # token 1 counts
    # What decode has committed itself, is about to confirm, and what the
    # prefill side, where it goes on, has decoded.
    self.decoded, self.confirms, self.ahead = 1, 0, 1
    # Of the first tokens of decode: when they were drafted, before any
    # verification, and when they were committed.
    self.drafts_s: list[float] = []
    self.commits_s: list[float] = []
    self.critical: list[tuple[float, int]] = []
    self.landed_s: dict[int, float] = {}  # by layer group: the last chunk yet

  @property
  def wanted(self) -> int:
    return self.outcome.ask.output_tokens

  @property
  def drafts(self) -> bool:
    """Whether the Anchor is here, and the rest is not or no draft was made."""
    return (
      self.token_1
      and self.speculates
      and not self.landed_s
      and not self.missing[Stream.ANCHOR]
      and (self.shown == 1 or self.missing[Stream.RESIDUAL] > 0)
    )

  @property
  def decodes(self) -> bool:
    return self.token_1 and not any(self.missing.values()) and not self.drafts


def _needed_as(chunk: Chunk) -> Stream:
  """Returns ANCHOR for what a first draft waits for, whatever its class."""
  return Stream.ANCHOR if chunk.anchor_bytes else chunk.stream


class _Run:
  """The state of a simulation; its methods are what can happen."""

  def __init__(self, asks, wire, costs, mode, rate_gbps, rtt_ms, seed):
    self._wire: WireFormat = wire
    self._manifest = functools.cache(functools.partial(wire.manifest, 0))
    self._costs: Costs = costs
    self._overlapped = mode is Mode.OVERLAPPED
    self._by_layer = (
      wire.engine.order is Order.LAYERS and wire.engine.layer_ready
    )
    drafter = wire.engine.drafter
    self._prefill_continues = drafter is Drafter.PREFILL
    # A step of schemes without drafts on an Anchor, by how many rows it has.
    self._decode_s = (
      costs.plain_s if drafter is Drafter.ANCHOR else costs.verify_s
    )
    self._bytes_s = rate_gbps * 1e9 / 8
    self._rate_gbps, self._rtt_ms = rate_gbps, rtt_ms
    self._latency_s = rtt_ms / 2e3
    self._chance = random.Random(seed)
    self._scheduler = Scheduler(_RESIDUAL_WINDOW_BYTES)
    self._slots = [_Slot(key, ask) for key, ask in enumerate(asks)]
    self._free = wire.engine.slots
    self._waiting: collections.deque[_Slot] = collections.deque()
    self._here: dict[int, _Slot] = {}  # admitted
    # Of those, who could be in the next program; see `_place`.
    self._drafting: dict[int, _Slot] = {}
    self._decoding: dict[int, _Slot] = {}
    self._prefills: collections.deque[_Slot] = collections.deque()
    self._continuing: dict[int, _Slot] = {}  # decode has not taken over yet
    self._busy = dict.fromkeys(('prefill', 'link', 'decode'), False)
    self._used = dict.fromkeys(self._busy, 0.0)
    self._drafted_last = False
    self._events: list[tuple[float, int, Callable[[float], None]]] = []
    self._count = itertools.count()
    self._drafts = draft_length.best(
      [],
      draft_s=costs.draft_s([wire.engine.prompt_tokens]),
      verify_s=costs.verify_s([wire.engine.prompt_tokens]),
      most=wire.engine.verify_rows - 1,
    )

  def end(self) -> Prediction:
    """Lets everything happen, and returns what came of it."""
    for slot in self._slots:
      self._at(slot.outcome.ask.arrival_s, self._arrive, slot)
    now_s = 0.0
    while self._events:
      now_s, _, happen = heapq.heappop(self._events)
      happen(now_s)
    start_s = min(slot.outcome.ask.arrival_s for slot in self._slots)
    span_s = now_s - start_s
    return Prediction(
      outcomes=tuple(slot.outcome for slot in self._slots),
      span_s=span_s,
      **{f'{who}_use': used / span_s for who, used in self._used.items()},
    )

  def _at(self, time_s: float, happen: Callable, *what) -> None:
    heapq.heappush(
      self._events,
      (time_s, next(self._count), lambda now_s: happen(now_s, *what)),
    )

  def _occupy(self, who: str, now_s: float, seconds: float, then, *what):
    """Keeps a side busy for so long; `then` happens at the end of it."""
    self._busy[who] = True
    self._used[who] += seconds
    self._at(now_s + seconds, self._release, who, then, *what)

  def _release(self, now_s: float, who: str, then, *what) -> None:
    self._busy[who] = False
    then(now_s, *what)

  # Prefill.

  def _arrive(self, now_s: float, slot: _Slot) -> None:
    self._waiting.append(slot)
    self._admit(now_s)

  def _admit(self, now_s: float) -> None:
    while self._waiting and self._free:
      slot = self._waiting.popleft()
      self._free -= 1
      self._here[slot.key] = slot
      self._prefills.append(slot)
    self._prefill(now_s)

  def _prefill(self, now_s: float) -> None:
    """Starts the next prompt, or where none waits a step of the oldest."""
    if self._busy['prefill']:
      return
    if self._prefills:
      self._compute(now_s, self._prefills.popleft(), 0)
    elif self._continuing:
      slot = next(iter(self._continuing.values()))
      seconds = self._costs.verify_s([slot.outcome.ask.prompt_tokens])
      self._occupy('prefill', now_s, seconds, self._continued, slot)

  def _compute(self, now_s: float, slot: _Slot, token_chunk: int) -> None:
    seconds = self._costs.chunk_s(token_chunk * self._wire.engine.token_chunk)
    self._occupy('prefill', now_s, seconds, self._computed, slot, token_chunk)

  def _computed(self, now_s: float, slot: _Slot, token_chunk: int) -> None:
    ask = slot.outcome.ask
    last = self._wire.token_chunks(ask.prompt_tokens) - 2
    if self._overlapped:
      self._offer(now_s, slot, token_chunk)
    if token_chunk < last:
      self._compute(now_s, slot, token_chunk + 1)
      return
    if not self._overlapped:
      for each in range(last + 1):
        self._offer(now_s, slot, each)
    self._offer(now_s, slot, last + 1)  # the dense tail
    slot.outcome.prefill_end_s = now_s - ask.arrival_s
    self._at(now_s + self._latency_s, self._prefill_done, slot)
    if self._prefill_continues and slot.wanted > 1:
      slot.critical = [(slot.outcome.prefill_end_s, 0)]  # waits for no chunk
      self._continuing[slot.key] = slot
    self._prefill(now_s)

  def _continued(self, now_s: float, slot: _Slot) -> None:
    if slot.key in self._continuing:
      slot.ahead += 1
      if slot.ahead == slot.wanted:
        del self._continuing[slot.key]
      self._at(now_s + self._latency_s, self._told, slot, slot.ahead)
    self._prefill(now_s)

  def _told(self, now_s: float, slot: _Slot, ahead: int) -> None:
    """Commits a token of the prefill side; it is what decode would commit."""
    if slot.key in self._here and ahead > slot.committed:
      self._commit(now_s, slot, 1)
      self._place(slot)

  def _offer(self, now_s: float, slot: _Slot, token_chunk: int) -> None:
    ask = slot.outcome.ask
    chunks = [
      dataclasses.replace(chunk, key=chunk.key._replace(request=slot.key))
      for chunk in self._manifest(ask.prompt_tokens, token_chunk)
    ]
    for chunk in chunks:
      slot.missing[_needed_as(chunk)] += 1
      slot.speculates |= chunk.residual_bytes > 0
      if _needed_as(chunk) is Stream.ANCHOR:
        slot.critical.append((now_s - ask.arrival_s, chunk.bytes))
    self._scheduler.offer(chunks, arrival_s=ask.arrival_s, ready_s=now_s)
    self._send(now_s)

  def _prefill_done(self, now_s: float, slot: _Slot) -> None:
    slot.token_1 = True
    if slot.wanted == 1:
      self._finish(now_s, slot)
    self._place(slot)
    self._decode(now_s)

  # The link.

  def _send(self, now_s: float) -> None:
    if self._busy['link']:
      return
    chunk = self._scheduler.next(now_s)
    if chunk is not None:
      seconds = chunk.bytes / self._bytes_s
      self._occupy('link', now_s, seconds, self._sent, chunk)

  def _sent(self, now_s: float, chunk: Chunk) -> None:
    self._scheduler.landed(chunk, now_s)
    self._at(now_s + self._latency_s, self._land, chunk)
    self._send(now_s)

  def _land(self, now_s: float, chunk: Chunk) -> None:
    slot = self._here.get(chunk.request)
    if slot is None:
      return  # all is said: token 1 was enough, or prefill went on
    stream = _needed_as(chunk)
    slot.missing[stream] -= 1
    since_s = now_s - slot.outcome.ask.arrival_s
    if stream is Stream.ANCHOR:
      slot.outcome.anchor_s = since_s
    if chunk.residual_bytes:
      slot.outcome.residual_s = since_s
    if self._by_layer:
      for part in chunk.slices:
        slot.landed_s[part.layer_group] = now_s
    if not slot.missing[stream]:  # else there is nothing new to do
      self._place(slot)
      self._decode(now_s)

  # Decode.

  def _place(self, slot: _Slot) -> None:
    """Notes what a slot can do next; after every change of it.

    To ask all slots before every program took most of a simulation of many.
    """
    here = slot.key in self._here
    room = min(self._wire.engine.backlog_tokens, slot.wanted - slot.committed)
    drafts = slot.drafts and slot.shown - slot.committed < room
    for slots, fits in (
      (self._drafting, drafts),
      (self._decoding, slot.decodes),
    ):
      if here and fits:
        slots[slot.key] = slot
      else:
        slots.pop(slot.key, None)

  def _decode(self, now_s: float) -> None:
    """Starts the next program, those who wait for their first token first."""
    if self._busy['decode']:
      return
    drafting = [*self._drafting.values()]
    decoding = [*self._decoding.values()]
    new = any(slot.shown == 1 for slot in drafting)
    if drafting and (new or not decoding or not self._drafted_last):
      self._drafted_last = True
      self._step(now_s, self._costs.draft_s, drafting, self._drafted)
      return
    self._drafted_last = False
    if not decoding:
      return
    started = [slot for slot in decoding if slot.landed_s]
    if started:
      self._end_first_step(now_s, started[0])
      return
    speculating = [slot for slot in decoding if slot.speculates]
    if not speculating:
      most = self._wire.engine.verify_rows - 1
      for slot in decoding:
        slot.confirms = min(slot.committed - slot.decoded, most)
      self._step(now_s, self._decode_s, decoding, self._decoded)
      return
    behind = [s for s in speculating if s.shown > s.committed]
    if behind:
      self._step(now_s, self._costs.verify_s, behind, self._verified)
      return
    lengths = [slot.outcome.ask.prompt_tokens for slot in speculating]
    seconds = self._drafts * self._costs.draft_s(lengths)
    seconds += self._costs.verify_s(lengths)
    self._occupy('decode', now_s, seconds, self._rounded, speculating)

  def _end_first_step(self, now_s: float, slot: _Slot) -> None:
    """Goes through the layer groups that a first step has not gone through.

    It went through the others as they landed, which is taken to hinder no
    other request; the last one is left at least.
    """
    cost = self._costs.verify_s if slot.speculates else self._decode_s
    counts = self._wire.layer_counts
    layer_s = cost([slot.outcome.ask.prompt_tokens]) / sum(counts)
    end_s = -math.inf
    for group, layers in enumerate(counts):
      end_s = max(end_s, slot.landed_s.get(group, now_s)) + layers * layer_s
    slot.landed_s.clear()
    left_s = max(end_s - now_s, counts[-1] * layer_s)
    then = self._verified if slot.speculates else self._decoded
    self._occupy('decode', now_s, left_s, then, [slot])

  def _step(self, now_s: float, cost, slots: list[_Slot], then) -> None:
    lengths = [slot.outcome.ask.prompt_tokens for slot in slots]
    self._occupy('decode', now_s, cost(lengths), then, slots)

  def _drafted(self, now_s: float, slots: list[_Slot]) -> None:
    for slot in slots:
      self._show(now_s, slot)
      slot.shown += 1
      if slot.committed == 1:
        slot.drafts_s.append(now_s - slot.outcome.ask.arrival_s)
      self._place(slot)
    self._decode(now_s)

  def _decoded(self, now_s: float, slots: list[_Slot]) -> None:
    for slot in slots:
      if slot.key not in self._here:
        continue  # the prefill side was sooner
      slot.decoded += slot.confirms + 1
      if slot.decoded > slot.committed:
        self._continuing.pop(slot.key, None)
        self._commit(now_s, slot, slot.decoded - slot.committed)
      self._place(slot)
    self._decode(now_s)

  def _verified(self, now_s: float, slots: list[_Slot]) -> None:
    """Commits what is accepted of the backlog, and one token more."""
    rows = self._wire.engine.verify_rows
    for slot in slots:
      tried = min(slot.shown - slot.committed, rows - 1)
      accepted = self._accepted(tried)
      left = slot.shown - slot.committed - accepted - 1
      self._commit(now_s, slot, accepted + 1)
      # After a rejection nothing stays; else the rest is next.
      slot.shown += max(0, left) if accepted == tried else 0
      self._place(slot)
    self._decode(now_s)

  def _rounded(self, now_s: float, slots: list[_Slot]) -> None:
    for slot in slots:
      self._commit(now_s, slot, 1 + self._accepted(self._drafts))
      self._place(slot)
    self._decode(now_s)

  def _accepted(self, tried: int) -> int:
    for accepted in range(tried):
      if self._chance.random() >= self._costs.acceptance:
        return accepted
    return tried

  def _show(self, now_s: float, slot: _Slot) -> None:
    outcome = slot.outcome
    if not math.isnan(outcome.provisional_s):
      return
    outcome.provisional_s = now_s - outcome.ask.arrival_s
    cost = self._costs.draft_s if slot.speculates else self._decode_s
    step_s = cost([outcome.ask.prompt_tokens])
    outcome.bound_s = timeline.bound(
      slot.critical,
      rate_gbps=self._rate_gbps,
      rtt_ms=self._rtt_ms,
      step_s=0.0 if self._by_layer else step_s,  # as `serving.bound_s` has it
    )

  def _commit(self, now_s: float, slot: _Slot, tokens: int) -> None:
    self._show(now_s, slot)
    outcome = slot.outcome
    if math.isnan(outcome.committed_s):
      outcome.committed_s = now_s - outcome.ask.arrival_s
    if len(slot.commits_s) < _FIRST_TOKENS:
      slot.commits_s += [now_s - outcome.ask.arrival_s] * tokens
    slot.committed = slot.shown = min(slot.committed + tokens, slot.wanted)
    if slot.committed == slot.wanted:
      self._finish(now_s, slot)

  def _finish(self, now_s: float, slot: _Slot) -> None:
    slot.outcome.done_s = now_s - slot.outcome.ask.arrival_s
    slot.outcome.stays_s = self._stays_s(slot)
    if self._scheduler.queued_bytes(slot.key):
      self._scheduler.cancel(slot.key)
    self._continuing.pop(slot.key, None)
    if slot.missing[Stream.ANCHOR]:
      slot.outcome.anchor_s = None
    if slot.missing[Stream.RESIDUAL]:
      slot.outcome.residual_s = None
    del self._here[slot.key]
    self._free += 1
    self._admit(now_s)

  def _stays_s(self, slot: _Slot) -> float:
    committed_s = slot.commits_s[: min(_FIRST_TOKENS, slot.wanted - 1)]
    if not committed_s:
      return slot.outcome.prefill_end_s  # token 1 is all
    expected_s, kept = [], 1.0
    for drafted_s, late_s in itertools.zip_longest(
      slot.drafts_s[: len(committed_s)], committed_s
    ):
      kept *= 0.0 if drafted_s is None else self._costs.acceptance
      expected_s.append(kept * (drafted_s or 0.0) + (1 - kept) * late_s)
    return statistics.fmean(expected_s)


_ALIKE = 1.03  # ratio of times that a user does not tell apart


def best(stays_s: Mapping[str, float]) -> str:
  """Returns the scheme to send.

  It is the one of `FAITHFUL` whose first tokens are there to stay soonest; of
  those within 3 % of it, the simplest. Time to the first provisional token
  would always advise the narrowest Anchor, however much of it is taken back.

  Args:
    stays_s: `Outcome.stays_s` by scheme; others are passed over.

  Raises:
    ConfigError: none of `FAITHFUL` is among them.
  """
  known = {name: stays_s[name] for name in FAITHFUL if name in stays_s}
  require(
    bool(known),
    f'of the schemes {", ".join(stays_s) or "(none)"} none can be '
    f'advised; add one of {", ".join(FAITHFUL)}',
  )
  least = min(known.values())
  return next(name for name, s in known.items() if s <= _ALIKE * least)
