# SPDX-License-Identifier: Apache-2.0
"""A prefill side in another process: its session, its requests, recovery.

It knows no slot and no decode; `session` opens what it holds, and `patience`
says what to do about what does not come. Whatever goes wrong ends within the
times of `Patience` in a recovery or in a record that names a typed error.
"""

import collections
import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from lynx_jax import handshake, prefill, session
from lynx_jax import mesh as mesh_lib
from lynx_jax import wire as wire_lib
from lynx_jax.config import ConfigError, Target
from lynx_jax.patience import Patience, Policy, Tries
from lynx_jax.requests import Mode
from lynx_jax.sampling import GREEDY, Sampling
from lynx_jax.sender import PrefillDone, PrefillFailed, Record
from lynx_jax.timeline import Phase, Timeline
from lynx_jax.transport import control, digest, messages
from lynx_jax.transport.faults import Faults
from lynx_jax.transport.receiver import (
  Announced,
  CorruptChunk,
  Pace,
  Receiver,
)
from lynx_jax.transport.streams import (
  Chunk,
  Slice,
  TransferError,
  UnexpectedChunk,
  WireFormat,
)

_TICK_S = 0.02  # longest time in which nobody looks after stalls and leases
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.05, 1.0
_CREDITS = 4  # messages in which a window is given back
_NOBODY = -(2**31)  # request id of chunks that are fetched to be thrown away


class TransferStalled(TransferError):
  """A part of a request never came."""


class PrefillError(TransferError):
  """The prefill side could not compute a prompt; it names the reason."""


@dataclasses.dataclass(frozen=True)
class Fetched:
  """A prompt that was computed elsewhere: token 1 and every chunk."""

  token: int
  chunks: tuple[tuple[Chunk, Sequence[wire_lib.Parts]], ...]


@dataclasses.dataclass(eq=False)
class _Request:
  """A request that has not been dropped."""

  id: int
  prompt: np.ndarray
  mode: Mode
  sampling: Sampling
  deadline_s: float
  timeline: Timeline
  chunks: dict[tuple[int, int], Chunk]  # by token chunk and sequence
  target: Target
  # Exact strings, by layer group and token chunk, that are not in `chunks` yet.
  strings: set[tuple[int, int]]
  row: int  # of decode's mesh, to which it goes
  generation: int = 0
  recomputed: int = 0
  done: messages.Done | None = None
  released: bool = False  # the sender need not hold it any more
  refused: bool = False  # by a sender that drains
  failed: bool = False


class RemotePrefill:
  """A `PrefillSide` over a channel; an engine takes it for a model.

  A thread holds the session: it answers, renews the lease, and mends what
  breaks. When the sender is lost it connects anew, perhaps to another address,
  and submits again what has not landed: the same program gives the same bits,
  so what landed before stays.

  Args:
    wire: format of the transfers.
    fingerprint: of the model; see `handshake.fingerprint`.
    sharding: of any array on the devices on which payloads shall lie.
    dial: opens a channel; it looks the address up each time.
    server: the process's transfer server; None fetches bytes.
    pace: an emulated link; None is the real one.
    patience: with faults.
    window_bytes: most bytes that the sender may publish ahead.
    faults: what goes wrong on purpose.

  Raises:
    HandshakeError: the sides do not fit together.
    PeerLost: the sender cannot be reached, or turns us away.
  """

  def __init__(
    self,
    wire: WireFormat,
    fingerprint: str,
    sharding: Any,
    *,
    dial: Callable[[], control.Channel],
    server: Any = None,
    pace: Pace | None = None,
    patience: Patience | None = None,
    window_bytes: int | None = None,
    faults: Faults | None = None,
  ):
    self._wire = wire
    mesh = mesh_lib.of_sharding(sharding)
    self._mesh = handshake.mesh_of(mesh)
    self._local = [
      mesh_lib.local(mesh_lib.row(mesh, row))
      for row in range(mesh.shape[mesh_lib.DATA])
    ]
    self._process = handshake.process_of(mesh)
    self._theirs: messages.Mesh | None = None  # the sender's; it may not change
    self._facts = handshake.facts(wire, fingerprint)
    self._dial, self._server = dial, server
    self._patience = patience or Patience()
    if window_bytes is None:
      window_bytes = max(4 * 2**20, 16 * wire.engine.chunk_bytes)
    self._window_bytes, self._faults = window_bytes, faults
    self._layouts: tuple[wire_lib.Layouts, ...] = ()  # for each row
    self._lock = threading.RLock()  # guards everything below
    self._requests: dict[int, _Request] = {}
    self._records: collections.deque[Record] = collections.deque()
    self._next_private = -1  # ids of references; an engine's are not negative
    self._channel: control.Channel | None = None
    self._lease_s = math.inf
    self._offset_s = 0.0  # the sender's clock less ours
    self._heard_s = self._beaten_s = -math.inf
    self._epoch = 0
    self._tries = Tries(self._patience.retries)
    self._broken: Exception | None = None  # what the link has said
    self._lost: Exception | None = None  # why there is no session
    self._warm = threading.Event()  # cleared while the sender warms up
    self._warm.set()
    self._awake = threading.Event()  # something to do for a lost session
    self._draining = self._closed = False
    self._transport = Receiver(
      lambda chunk: self._layouts[self._row(chunk.request)](chunk),
      wire.engine.chunk_bytes,
      pace=pace,
      landed=self._on_landed,
      damaged=self._on_damaged,
    )
    try:
      self._connect()
    except BaseException:
      self._transport.close()
      raise
    self._thread = threading.Thread(
      target=self._run, name='lynx-remote-prefill', daemon=True
    )
    self._thread.start()

  @property
  def transport(self) -> Receiver:
    """Brings the chunks."""
    return self._transport

  def warm_up(self) -> Iterator[tuple[Slice, wire_lib.Parts]]:
    """Lets both sides compile; yields zeros of every kind of payload.

    Raises:
      TransferError: the sender was lost meanwhile.
    """
    with self._lock:
      self._warm.clear()
      self._send(messages.WarmUp())
    try:
      for part in self._wire.slice_kinds():
        for row in self._layouts:
          layouts = row.of(part)
          packed = self._zeros(tuple(layout.packed for layout in layouts))
          (parts,), sums = digest.unpack((packed,), (layouts,))
          jax.block_until_ready(sums)
        yield part, parts
      while not self._warm.wait(_TICK_S):
        if self._lost is not None:
          raise control.PeerLost(f'while it warmed up: {self._lost}')
    finally:
      self._warm.set()

  def compute(
    self,
    tokens: np.ndarray,
    known: Any = None,
    *,
    sampling: Sampling = GREEDY,
  ) -> Fetched:
    """Fetches a whole prompt by a request of its own, at full speed.

    Args:
      tokens: the prompt.
      known: is not used: another codec's bits are of no help here.
      sampling: how token 1 is chosen.

    Raises:
      TransferError, ConfigError: what made it fail.
    """
    del known
    with self._lock:
      request, self._next_private = self._next_private, self._next_private - 1
    fetched: list[tuple[Chunk, Sequence[wire_lib.Parts]]] = []
    token = None
    with self._transport.unpaced():
      timeline = Timeline(time.monotonic())
      self.submit(
        request,
        tokens,
        mode=Mode.OVERLAPPED,
        sampling=sampling,
        timeline=timeline,
        target=self._wire.codec.target,
      )
      try:
        entry = self._requests[request]
        while (
          token is None
          or self._lacks(entry)
          or len(fetched) < len(entry.chunks)
        ):
          for record in self.records():
            if isinstance(record, PrefillFailed):
              raise record.error
            if isinstance(record, PrefillDone):
              token = record.token
          for arrival in self._transport.arrived():
            if arrival.substituted:
              raise TransferStalled('a reference must be whole')
            fetched.append((arrival.chunk, arrival.payload))
          self._transport.wait(_TICK_S)
      finally:
        self.drop(request)
    return Fetched(token, tuple(fetched))

  def payloads(
    self, computed: Fetched
  ) -> Iterator[tuple[Chunk, Sequence[wire_lib.Parts]]]:
    """Yields every chunk of what `compute` returned, with its payload."""
    yield from computed.chunks

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
    """Sends a prompt; its `timeline` gets the events of prefill and split."""
    strings = self._wire.strings(len(prompt))
    entry = _Request(
      request,
      prompt,
      mode,
      sampling,
      deadline_s,
      timeline,
      {},
      target,
      set(strings if target is Target.EXACT else ()),
      row,
    )
    with self._lock:
      self._ask_for(entry)  # the sender cuts its manifest while we cut ours
      entry.chunks = {
        (c.key.token_chunk, c.key.sequence): c
        for token_chunk in range(self._wire.token_chunks(len(prompt)))
        for c in self._wire.manifest(request, len(prompt), token_chunk)
      }
      self._transport.expect(
        request,
        entry.chunks.values(),
        arrival_s=timeline.arrival_s,
        deadline_s=deadline_s,
      )
      self._requests[request] = entry
    self._awake.set()

  def drop(self, request: int) -> None:
    """Frees the request's KV, and stops its prefill and its transfer."""
    with self._lock:
      entry = self._requests.pop(request, None)
      if entry is not None:
        self._release(entry)
      self._tries.forget(request)
    self._transport.cancel(request)

  def records(self) -> list[Record]:
    """Returns, without blocking, the control records seen since the last."""
    seen: list[Record] = []
    with self._lock:
      while self._records and self._records[0].seen_s <= time.monotonic():
        record = self._records.popleft()
        entry = self._requests.get(record.request)
        if entry is None:
          continue
        seen.append(record)
        if isinstance(record, PrefillDone):
          assert entry.done is not None
          for name, start_s, end_s, token_chunk in entry.done.spans:
            entry.timeline.add(
              Phase(name),
              start_s - self._offset_s,
              end_s - self._offset_s,
              token_chunk=token_chunk,
            )
    return seen

  def close(self) -> None:
    """Ends the session; may be called twice."""
    self._closed = True
    self._awake.set()
    self._hang_up()
    self._thread.join()
    self._transport.close()

  def _zeros(self, specs: Any) -> Any:
    return jax.tree.map(
      lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding), specs
    )

  # The session, all in its thread but for the first connection.

  def _run(self) -> None:
    while not self._closed:
      try:
        if self._channel is None:
          self._connect()
        while not self._closed:
          self._listen()
      except TransferError as error:
        if not self._closed:
          self._recover(error)
      except Exception as error:  # must reach the callers, not end in silence
        logging.exception('the session failed')
        self._give_up(TransferError(f'the session failed: {error!r}'))
    self._hang_up()

  def _recover(self, error: TransferError) -> None:
    """Drops the session, and makes the next one or gives up."""
    logging.warning('the prefill side is lost: %s', error)
    self._hang_up()
    until_s = time.monotonic() + self._patience.reconnect_s
    backoff_s = _FIRST_BACKOFF_S
    may_connect = self._tries.may_connect()
    while not self._closed and may_connect:
      try:
        self._connect()
        return
      except control.HandshakeError as differs:
        error = differs
        break
      except TransferError as lost:
        error = lost
      if time.monotonic() + backoff_s > until_s:
        break
      time.sleep(backoff_s)
      backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
    self._give_up(error)

  def _give_up(self, error: TransferError) -> None:
    """Fails all requests, and waits for another one before trying again."""
    self._hang_up()
    self._awake.clear()
    self._tries.gave_up()
    with self._lock:
      self._lost = error
      for entry in [*self._requests.values()]:
        self._fail(entry, error)
    while not self._closed and not self._awake.wait(_TICK_S):
      pass

  def _hang_up(self) -> None:
    with self._lock:
      channel, self._channel = self._channel, None
    if channel is not None:
      channel.close()
    self._transport.attach(None)

  def _connect(self) -> None:
    """Opens a session, and asks again for what has not landed."""
    channel = self._dial()
    if self._faults is not None:
      channel = self._faults.channel(channel)
    try:
      limit_s = self._patience.handshake_s
      hello = messages.Hello(
        version=messages.VERSION,
        facts=self._facts,
        choices=handshake.choices(self._wire.engine),
        window_bytes=self._window_bytes,
        pulls=self._server is not None,
        mesh=self._mesh,
        process=self._process,
      )
      answer = session.greet(channel, hello, limit_s)
      self._divide(answer.mesh)
      place, *_ = wire_lib.places(self._local[0], self._mesh[0])
      link = session.link(channel, answer, self._server, place)
      if self._faults is not None:
        link = self._faults.link(link)
      offset_s, rtt_s = session.compare_clocks(channel, limit_s)
    except BaseException:
      channel.close()
      raise
    with self._lock:
      self._offset_s, self._transport.rtt_s = offset_s, rtt_s
      self._transport.credit_bytes = answer.window_bytes // _CREDITS
      self._lease_s = answer.lease_s
      self._heard_s = self._beaten_s = time.monotonic()
      self._channel, self._broken, self._lost = channel, None, None
      self._epoch = 0
      self._tries.connected()
      self._draining = False
      self._transport.attach(link)
      if not self._warm.is_set():
        self._send(messages.WarmUp())
      for entry in self._requests.values():
        if not entry.failed:
          entry.generation += 1
          entry.released = entry.refused = False
          self._ask_for(entry)

  def _divide(self, theirs: messages.Mesh) -> None:
    """Says in which parts slices come from a sender with this mesh.

    Raises:
      HandshakeError: it does not fit; or the sender had another one before,
        with which it has computed other bits.
    """
    (shards, _, processes), heads = theirs, self._wire.model.kv_heads
    fits = shards > 0 and heads % shards == 0 and processes == self._mesh[2]
    if not fits or self._theirs not in (None, theirs):
      wanted = self._mesh if self._theirs is None else self._theirs
      raise control.HandshakeError(
        messages.MESH,
        handshake.described(theirs),
        handshake.described(wanted),
      )
    self._theirs = theirs
    parts = math.lcm(shards, self._mesh[0])
    self._layouts = tuple(
      wire_lib.Layouts(
        self._wire, wire_lib.places(mesh, parts // processes), parts
      )
      for mesh in self._local
    )

  def _row(self, request: int) -> int:
    """Returns where a request goes; what nobody wants may go anywhere."""
    entry = self._requests.get(request)
    return 0 if entry is None else entry.row

  def _listen(self) -> None:
    """Takes in one message, and looks after everything that may be stuck."""
    channel = self._channel
    if channel is None:
      raise control.PeerLost('the session was closed')
    message = channel.receive(_TICK_S)
    now_s = time.monotonic()
    if message is not None:
      self._heard_s = now_s
      self._on(message)
    elif now_s - self._heard_s > self._lease_s:
      raise control.PeerLost(f'silent for {self._lease_s} s')
    if now_s - self._beaten_s > self._lease_s / 4:
      self._beaten_s = now_s
      channel.send(messages.Beat(sent_s=now_s))
    self._look_after()

  def _on(self, message: messages.Message) -> None:
    match message:
      case messages.Beat():
        pass
      case messages.Published():
        self._on_published(message)
      case messages.Done():
        self._on_done(message)
      case messages.Encoded():
        self._on_encoded(message)
      case messages.Failed():
        self._on_failed(message)
      case messages.WarmUp():
        self._warm.set()
      case messages.Draining():
        logging.info('the prefill server drains')
        self._draining = True
      case _:
        raise messages.ProtocolError(f'{type(message).__name__} makes no sense')

  def _on_published(self, message: messages.Published) -> None:
    with self._lock:
      if message.epoch != self._epoch:
        return  # void: it was published before the last reset
      entry = self._current(message.request, message.generation)
      announced = []
      for (token_chunk, sequence, uuid, size_bytes, text), string in zip(
        message.chunks,
        message.strings or [(0, 0)] * len(message.chunks),
        strict=True,
      ):
        if entry is not None:
          self._extend(entry, string[0], token_chunk, string[1])
          chunk = entry.chunks.get((token_chunk, sequence))
        else:
          chunk = self._unwanted(
            message.prompt_tokens, token_chunk, sequence, *string
          )
        if chunk is None:
          raise UnexpectedChunk(
            f'token chunk {token_chunk} has no chunk {sequence}'
          )
        announced.append(Announced(chunk, uuid, size_bytes, text))
      self._transport.published(announced)

  def _extend(
    self, entry: _Request, layer_group: int, token_chunk: int, pages: int
  ) -> None:
    """Takes an exact string into the manifest of a request.

    Raises:
      UnexpectedChunk: the manifest says otherwise, or knows no such string.
    """
    if not pages:
      return
    chunks = self._string(entry.id, layer_group, token_chunk, pages)
    places = {(c.key.token_chunk, c.key.sequence): c for c in chunks}
    if (layer_group, token_chunk) in entry.strings:
      entry.strings.remove((layer_group, token_chunk))
      entry.chunks.update(places)
      self._transport.expect_more(entry.id, chunks)
    elif any(entry.chunks.get(place) != c for place, c in places.items()):
      raise UnexpectedChunk(
        f'{pages} pages of layer group {layer_group}, token chunk '
        f'{token_chunk} are not in the manifest'
      )

  def _string(
    self, request: int, layer_group: int, token_chunk: int, pages: int
  ) -> tuple[Chunk, ...]:
    try:
      return self._wire.exact_manifest(request, layer_group, token_chunk, pages)
    except (IndexError, ValueError) as error:
      raise UnexpectedChunk(f'no exact string: {error}') from error

  def _lacks(self, entry: _Request) -> bool:
    """Whether a part of the request has not landed."""
    return len(entry.strings) > 0 or not self._transport.complete(entry.id)

  def _unwanted(
    self,
    prompt_tokens: int,
    token_chunk: int,
    sequence: int,
    layer_group: int,
    pages: int,
  ) -> Chunk | None:
    """Returns a chunk of a dropped or older try, under nobody's name."""
    chunks = _manifest(self._wire, prompt_tokens, token_chunk)
    if pages:
      chunks = self._string(_NOBODY, layer_group, token_chunk, pages)
    return next((c for c in chunks if c.key.sequence == sequence), None)

  def _on_done(self, message: messages.Done) -> None:
    with self._lock:
      entry = self._current(message.request, message.generation)
      if entry is None:
        return
      if entry.done is not None:
        if entry.done.token != message.token:
          self._fail(
            entry,
            TransferError(
              f'prefilled again, token 1 is {message.token} and no longer '
              f'{entry.done.token}'
            ),
          )
        return
      entry.done = message
      self._transport.moved()  # from now on its chunks are due
      offset_s = self._offset_s
      self._records.append(
        PrefillDone(
          message.request,
          message.token,
          tuple((ready_s - offset_s, n) for ready_s, n in message.critical),
          message.end_s - offset_s,
          time.monotonic() + self._transport.latency_s,
        )
      )
    self._transport.poke()

  def _on_encoded(self, message: messages.Encoded) -> None:
    with self._lock:
      entry = self._current(message.request, message.generation)
      if entry is not None:
        for layer_group, token_chunk, pages in message.strings:
          self._extend(entry, layer_group, token_chunk, pages)
        self._transport.moved()  # from now on all of them are due

  def _on_failed(self, message: messages.Failed) -> None:
    with self._lock:
      entry = self._current(message.request, message.generation)
      if entry is None:
        return
      if message.kind == 'Draining':
        entry.refused = True  # it is asked for in the next session
      else:
        self._fail(entry, _typed(message))

  def _look_after(self) -> None:
    """Frees what is complete, and mends what is stuck."""
    with self._lock:
      entries = [e for e in self._requests.values() if e.done]
      for entry in entries:
        if not entry.released and not self._lacks(entry):
          self._release(entry)
      drained = all(e.released or e.refused for e in self._requests.values())
    if self._draining and drained:
      raise control.PeerLost('it drains, and holds nothing for us')
    if self._broken is not None:
      self._mend(self._broken)
    limit_s = self._patience.stall_limit_s(
      self._transport.outstanding_bytes, self._transport.rate_gbps
    )
    if self._transport.stalled_s() > limit_s:
      self._mend(TransferStalled(f'no bytes for {limit_s:.3g} s'))
    elif self._transport.starved_s() > limit_s:
      starved = [
        e
        for e in entries
        if not e.failed and not self._transport.complete(e.id)
      ]
      if starved and self._tries.may_reset:
        self._mend(TransferStalled(f'nothing published for {limit_s:.3g} s'))
        return
      with self._lock:
        for entry in starved:
          # It may have been dropped meanwhile.
          if entry.id in self._requests and not entry.failed:
            self._apply_policy(entry, limit_s)

  def _mend(self, error: Exception) -> None:
    """Connects the link anew and has everything published again."""
    if not self._tries.may_reset:
      raise control.PeerLost(
        f'{self._tries.resets} resets did not help: {error}'
      )
    self._tries.resets += 1
    logging.warning('the link is reset: %s', error)
    with self._lock:
      self._broken = None
      self._epoch += 1
      self._transport.reset()
      self._send(messages.Reset(epoch=self._epoch))

  def _apply_policy(self, entry: _Request, waited_s: float) -> None:
    """Does to a request that waits in vain what `patience` says."""
    missing = self._transport.missing(entry.id)
    stalled = TransferStalled(
      f'request {entry.id}: {len(missing)} chunks never came '
      f'(waited {waited_s:.3g} s, prefilled {entry.recomputed + 1} times)'
    )
    policy = self._patience.policy(
      lacks_anchor=any(chunk.anchor_bytes for chunk in missing),
      target=entry.target,
      recomputed=entry.recomputed,
    )
    match policy:
      case Policy.WAIT:
        pass
      case Policy.RECOMPUTE:
        logging.warning('%s: it is prefilled again', stalled)
        with self._lock:
          entry.recomputed += 1
          self._release(entry)
          entry.generation += 1
          entry.released = False
          self._ask_for(entry)
        self._transport.moved()
      case Policy.FAIL:
        self._fail(entry, stalled)
      case Policy.ANCHOR_OK:
        logging.error('%s: GOING ON UNVERIFIED, on the Anchor alone', stalled)
        self._transport.substitute(entry.id, self._zeros)

  def _ask_for(self, entry: _Request) -> None:
    missing = {chunk.key for chunk in self._transport.missing(entry.id)}
    deadline_in_s = None
    if entry.deadline_s < math.inf:
      deadline_in_s = entry.deadline_s - time.monotonic()
    self._send(
      messages.Submit(
        request=entry.id,
        generation=entry.generation,
        prompt=entry.prompt.astype('<i4').tobytes(),
        manifest=handshake.manifest_hash(self._wire, len(entry.prompt)),
        mode=entry.mode.value,
        sampling=dataclasses.astuple(entry.sampling),
        deadline_in_s=deadline_in_s,
        landed=tuple(
          place for place, c in entry.chunks.items() if c.key not in missing
        ),
        target=entry.target.value,
      )
    )

  def _release(self, entry: _Request) -> None:
    if not entry.released:
      entry.released = True
      self._send(messages.Drop(request=entry.id, generation=entry.generation))

  def _fail(self, entry: _Request, error: Exception) -> None:
    with self._lock:
      if not entry.failed:
        entry.failed = True
        self._release(entry)
        self._records.append(PrefillFailed(entry.id, error, time.monotonic()))
    self._transport.cancel(entry.id)
    self._transport.poke()

  def _current(self, request: int, generation: int) -> _Request | None:
    """Returns the request, unless it is another generation's business."""
    entry = self._requests.get(request)
    if entry is None or entry.generation != generation or entry.failed:
      return None
    return entry

  def _send(self, message: messages.Message) -> None:
    with self._lock:
      if self._channel is not None:
        self._channel.send(message)

  # Called from the receiver's thread.

  def _on_landed(self, uuids: Any) -> None:
    self._tries.landed()
    self._send(messages.Landed(uuids=tuple(uuids)))

  def _on_damaged(self, chunk: Chunk, uuid: int, error: Exception) -> None:
    if not isinstance(error, CorruptChunk):
      self._broken = error
      return
    logging.warning('%s; it is asked for again', error)
    with self._lock:
      entry = self._requests.get(chunk.request)
      if entry is None:
        return
      if self._tries.may_ask_again(chunk.key):
        self._send(messages.Again(uuids=(uuid,)))
      else:
        self._fail(entry, error)


@functools.lru_cache(maxsize=64)
def _manifest(
  wire: WireFormat, prompt_tokens: int, token_chunk: int
) -> tuple[Chunk, ...]:
  return wire.manifest(_NOBODY, prompt_tokens, token_chunk)


def _typed(message: messages.Failed) -> Exception:
  """Returns the exception that the sender has met."""
  kinds: dict[str, type[Exception]] = {
    'NonFiniteError': prefill.NonFiniteError,
    'ConfigError': ConfigError,
  }
  if message.kind in kinds:
    return kinds[message.kind](message.text)
  return PrefillError(f'{message.kind}: {message.text}')
