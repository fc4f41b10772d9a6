# SPDX-License-Identifier: Apache-2.0
"""Serves prefill to decode processes: handshake, leases, one sender a peer.

It knows no slot and no decode, and starts no process.
"""

import contextlib
import itertools
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx

from lynx_jax import handshake, mesh
from lynx_jax import sender as sender_lib
from lynx_jax import wire as wire_lib
from lynx_jax.config import ConfigError, Target
from lynx_jax.lockstep import Form, Lockstep, LockstepPrefill
from lynx_jax.models.transformer import Transformer
from lynx_jax.prefill import Prefill
from lynx_jax.requests import Mode
from lynx_jax.sampling import Sampling
from lynx_jax.sender import (
  Encoded,
  PrefillDone,
  PrefillFailed,
  Record,
  Sender,
)
from lynx_jax.timeline import Phase, Timeline
from lynx_jax.transport import control, digest, messages, pull
from lynx_jax.transport.byte_stream import ByteSource
from lynx_jax.transport.exchange import Exchange
from lynx_jax.transport.publisher import Announcement, Publisher
from lynx_jax.transport.streams import WireFormat

PROBE = (8,)  # bytes of the array that tries out a transfer server
_RECORD_S = 0.2  # longest wait before looking whether the session has ended
_SPANS = (Phase.PREFILL, Phase.SPLIT)


class PrefillServer:
  """Prefills for any number of peers; each has its own queue and window.

  A peer that is silent for `lease_s`, or whose channel breaks, is gone: all
  that was held for it is freed at once.

  Args:
    model: parameters, placed where prefill shall run.
    formats: what it serves: codecs, token chunks and layer groups, and the
      longest prompts.
    listen: ADDRESS:PORT of the control channel; port 0 takes a free one.
    security: of the control channel; None is no token and no TLS.
    pull_host: numeric address of the interface for transfer servers; None lets
      all payloads go through the control channel's stream of bytes.
    lease_s: longest silence of a peer.
    window_bytes: most bytes published for one peer and not landed.
    memory_bytes: what all peers' prompts and windows may take together; who
      does not fit is turned away. None is no limit.
    exchange: between the processes that prefill runs in, if there are several.
      Each has a server of its own, for the decode process of its number.

  Raises:
    ConfigError: an address cannot be bound.
  """

  def __init__(
    self,
    model: Transformer,
    formats: Sequence[WireFormat],
    *,
    listen: str = '127.0.0.1:0',
    security: control.Security | None = None,
    pull_host: str | None = '127.0.0.1',
    lease_s: float = 10.0,
    window_bytes: int = 64 * 2**20,
    memory_bytes: int | None = None,
    exchange: Exchange | None = None,
  ):
    self.model, self.lease_s, self.window_bytes = model, lease_s, window_bytes
    self._fingerprint = handshake.fingerprint(model)
    own = mesh.of(nnx.state(model))
    for wire in formats:
      wire_lib.check_mesh(wire.codec, own)
    self.mesh, self._process = handshake.mesh_of(own), handshake.process_of(own)
    self._formats = formats
    self._lockstep = (
      None if exchange is None else Lockstep(exchange, self._make)
    )
    self._pull_host, self._memory_bytes = pull_host, memory_bytes
    self._lock = threading.Lock()  # guards the three below
    self._reserved_bytes = 0
    # One transfer server a peer at a time: a published array can only be taken
    # back together with all others of its server.
    self._idle_servers: list[Any] = []
    self._sessions: dict[str, _Session] = {}
    self.draining = False
    self._server, self.port = control.serve(
      self._on_peer, self._on_fetch, listen, security
    )
    if pull_host is not None:
      server = self._start_server(pull_host)
      if server is None:
        self._pull_host = None
      else:
        with self._lock:
          self._idle_servers.append(server)

  def warm_up(self) -> None:
    """Compiles what prompts need, as long as nobody waits for them.

    What a peer chooses otherwise than the formats is compiled when it asks.
    """
    for wire in self._formats:
      prefill = self.prefill(wire)
      for _, parts in sender_lib.warm_up(prefill, wire, self.mesh[0]):
        jax.block_until_ready(digest.pack((parts,)))

  def prefill(self, wire: WireFormat) -> Prefill | LockstepPrefill:
    """Returns what computes prompts of one of the formats, or alike."""
    codecs = [served.codec for served in self._formats]
    chosen = handshake.choices(wire.engine)
    form = codecs.index(wire.codec), tuple(sorted(chosen.items()))
    if self._lockstep is None:
      return self._make(form)
    return self._lockstep.prefill(form)

  def _make(self, form: Form) -> Prefill:
    served, chosen = form
    wire = handshake.choose(self._formats[served], dict(chosen))
    return Prefill(self.model, wire.codec, wire.engine)

  def live_bytes(self) -> int:
    """Returns the bytes that are published and have not landed."""
    with self._lock:
      sessions = [*self._sessions.values()]
    return sum(session.live_bytes for session in sessions)

  @property
  def prompts(self) -> int:
    """How many prompts are held for peers."""
    with self._lock:
      return sum(session.prompts for session in self._sessions.values())

  @property
  def peers(self) -> int:
    """How many peers have passed the handshake and have not gone."""
    with self._lock:
      return len(self._sessions)

  def drain(self, patience_s: float) -> None:
    """Refuses new prompts, and waits until peers have what they asked for."""
    self.draining = True
    with self._lock:
      sessions = [*self._sessions.values()]
    for session in sessions:
      session.channel.send(messages.Draining())
    until_s = time.monotonic() + patience_s
    while self.prompts and time.monotonic() < until_s:
      time.sleep(0.01)

  def close(self) -> None:
    """Ends all sessions; may be called twice."""
    with self._lock:
      sessions = [*self._sessions.values()]
    for session in sessions:
      session.channel.close()
    self._server.stop(grace=0.5).wait()
    while self.peers:
      time.sleep(0.01)
    if self._lockstep is not None:
      self._lockstep.close()

  def match(self, hello: messages.Hello) -> WireFormat | messages.Refused:
    """Returns the format for a peer, or why there is none.

    Of several formats, the one is named that differs in the fewest facts.
    """
    if hello.version != messages.VERSION:
      return messages.Refused(
        field='protocol version',
        sender=messages.VERSION,
        receiver=hello.version,
      )
    differences = [
      handshake.difference(
        handshake.facts(wire, self._fingerprint), hello.facts
      )
      for wire in self._formats
    ]
    nearest = min(range(len(differences)), key=lambda i: len(differences[i]))
    if differences[nearest]:
      field, sender, receiver = differences[nearest][0]
      return messages.Refused(field=field, sender=sender, receiver=receiver)
    wire = self._formats[nearest]
    heads, (shards, _, processes) = wire.model.kv_heads, hello.mesh
    if shards < 1 or heads % shards or processes != self.mesh[2]:
      return messages.Refused(
        field=messages.MESH,
        sender=f'{heads} {handshake.described(self.mesh)}',
        receiver=handshake.described(hello.mesh),
      )
    if hello.process != self._process:
      return messages.Refused(
        field=messages.PROCESS,
        sender=self._process,
        receiver=hello.process,
      )
    try:
      return handshake.choose(wire, hello.choices)
    except ConfigError as error:
      return messages.Refused(
        field='choices', sender=str(error), receiver=str(hello.choices)
      )

  @contextlib.contextmanager
  def _reserved(
    self, wire: WireFormat, window_bytes: int
  ) -> Iterator[messages.Refused | None]:
    """Keeps memory for a peer inside the block; yields why there is none."""
    needed = handshake.sender_bytes(wire, window_bytes)
    with self._lock:
      free = math.inf
      if self._memory_bytes is not None:
        free = self._memory_bytes - self._reserved_bytes
      if needed <= free:
        self._reserved_bytes += needed
    if needed > free:
      yield messages.Refused(
        field=messages.MEMORY,
        sender=f'{free} bytes',
        receiver=f'{needed} bytes',
      )
      return
    try:
      yield None
    finally:
      with self._lock:
        self._reserved_bytes -= needed

  @contextlib.contextmanager
  def source(self, pulls: bool) -> Iterator[pull.PullSource | ByteSource]:
    """Yields where to publish for one peer."""
    server = None
    if pulls and self._pull_host is not None:
      with self._lock:
        server = self._idle_servers.pop() if self._idle_servers else None
      if server is None:
        server = self._start_server(self._pull_host)
    if server is None:
      yield ByteSource()
      return
    source = pull.PullSource(server)
    try:
      yield source
    finally:  # a session ends with an error, always
      source.reset()
      with self._lock:
        self._idle_servers.append(server)

  def _start_server(self, host: str) -> Any | None:
    try:
      return pull.start_server(host)
    except ConfigError:
      raise
    except Exception as error:  # whatever the runtime says
      logging.warning('no transfer server: %s; chunks go as bytes', error)
      return None

  def _on_peer(self, channel: control.ServerChannel) -> None:
    name = secrets.token_hex(16)
    try:
      hello = channel.receive(self.lease_s)
      if not isinstance(hello, messages.Hello):
        raise messages.ProtocolError(f'the first message is {hello!r}')
      wire = self.match(hello)
      if isinstance(wire, messages.Refused):
        channel.send(wire)
        return
      window_bytes = max(1, min(hello.window_bytes, self.window_bytes))
      with contextlib.ExitStack() as stack:
        refused = stack.enter_context(self._reserved(wire, window_bytes))
        if refused is not None:
          channel.send(refused)
          return
        source = stack.enter_context(self.source(hello.pulls))
        parts = math.lcm(self.mesh[0], hello.mesh[0])
        session = _Session(self, channel, wire, source, window_bytes, parts)
        with self._lock:
          self._sessions[name] = session
        try:
          session.run(name)
        finally:
          session.close()
          with self._lock:
            del self._sessions[name]
          for cancel in tuple(session.fetches):
            cancel()
    except control.PeerLost as error:
      logging.info('%s is gone: %s', channel.peer, error)
    except messages.ProtocolError as error:
      logging.warning('%s: %s', channel.peer, error)

  def _on_fetch(
    self,
    session: str,
    requests: Iterable[bytes],
    cancel: Callable[[], object],
  ) -> Iterator[bytes]:
    with self._lock:
      found = self._sessions.get(session)
      if found is None or not isinstance(found.source, ByteSource):
        return
      found.fetches.add(cancel)
    try:
      yield from found.source.frames(requests)
    finally:
      found.fetches.discard(cancel)


class _Session:
  """One peer from its handshake to its end."""

  def __init__(
    self,
    server: PrefillServer,
    channel: control.ServerChannel,
    wire: WireFormat,
    source: pull.PullSource | ByteSource,
    window_bytes: int,
    parts: int,
  ):
    self.channel, self.source = channel, source
    # What breaks off the peer's streams of bytes, guarded by the server.
    self.fetches: set[Callable[[], object]] = set()
    self._server, self._wire = server, wire
    self._window_bytes, self._parts = window_bytes, parts
    self._lock = threading.Lock()  # guards the three below
    # The sender has an id of its own for every try of a request.
    self._ids: dict[tuple[int, int], int] = {}
    self._tries: dict[int, tuple[int, int, int]] = {}  # with prompt tokens
    self._timelines: dict[int, Timeline] = {}
    self._next_id = itertools.count()
    self._sender: Sender[Publisher] | None = None
    self._closed = threading.Event()

  @property
  def live_bytes(self) -> int:
    return self._sender.transport.live_bytes if self._sender else 0

  @property
  def prompts(self) -> int:
    with self._lock:
      return len(self._ids)

  def run(self, name: str) -> None:
    """Answers the peer until it is gone.

    Raises:
      PeerLost: it has closed the channel, or its lease has ended.
      ProtocolError: it says what makes no sense.
    """
    pulls = isinstance(self.source, pull.PullSource)
    probe = jnp.arange(*PROBE, dtype=jnp.uint8)
    self.channel.send(
      messages.Welcome(
        session=name,
        lease_s=self._server.lease_s,
        window_bytes=self._window_bytes,
        address=self.source.address
        if isinstance(self.source, pull.PullSource)
        else None,
        probe=self.source.publish((probe,)) if pulls else 0,
        mesh=self._server.mesh,
      )
    )
    while True:
      message = self.channel.receive(self._server.lease_s)
      if message is None:
        raise control.PeerLost(f'silent for {self._server.lease_s} s')
      self._on(message)

  def close(self) -> None:
    """Frees everything that was held for the peer."""
    self._closed.set()
    if self._sender is not None:
      self._sender.close()

  def _on(self, message: messages.Message) -> None:
    match message:
      case messages.Beat(sent_s=sent_s):
        now_s = time.monotonic()
        self.channel.send(messages.Beat(sent_s=sent_s, sender_s=now_s))
      case messages.Fallback() if self._sender is None:
        self.source = ByteSource()
      case messages.Submit():
        self._submit(self._started(), message)
      case messages.Drop(request=request, generation=generation):
        self._drop(self._started(), (request, generation))
      case messages.Landed(uuids=uuids):
        self._started().transport.landed(uuids)
      case messages.Again(uuids=uuids):
        self._started().transport.again(uuids)
      case messages.Reset(epoch=epoch):
        self._started().transport.reset(epoch)
      case messages.WarmUp():
        threading.Thread(
          target=self._warm_up, args=(self._started(),), daemon=True
        ).start()
      case _:
        raise messages.ProtocolError(f'{type(message).__name__} makes no sense')

  def _started(self) -> Sender[Publisher]:
    if self._sender is None:
      self._sender = Sender(
        self._server.prefill(self._wire),
        self._wire,
        lambda cut: Publisher(
          self.source, cut, self._announce, self._fail, self._window_bytes
        ),
        self._parts,
      )
      threading.Thread(
        target=self._pass_records_on, args=(self._sender,), daemon=True
      ).start()
    return self._sender

  def _submit(
    self, sender: Sender[Publisher], submitted: messages.Submit
  ) -> None:
    key = submitted.request, submitted.generation
    if key in self._ids:
      return  # told twice
    problem = self._problem(submitted)
    if problem is not None:
      self.channel.send(
        messages.Failed(
          request=key[0], generation=key[1], kind=problem[0], text=problem[1]
        )
      )
      return
    prompt = np.frombuffer(submitted.prompt, '<i4').astype(np.int32)
    now_s = time.monotonic()
    name = next(self._next_id)
    deadline_in_s = submitted.deadline_in_s
    with self._lock:
      self._ids[key] = name
      self._tries[name] = *key, len(prompt)
      self._timelines[name] = Timeline(now_s)
    sender.transport.skip(name, submitted.landed)
    sender.submit(
      name,
      prompt,
      mode=Mode(submitted.mode),
      sampling=_sampling(submitted),
      deadline_s=math.inf if deadline_in_s is None else now_s + deadline_in_s,
      timeline=self._timelines[name],
      target=Target(submitted.target),
    )

  def _problem(self, submitted: messages.Submit) -> tuple[str, str] | None:
    """Returns kind and text of what is wrong with a prompt."""
    if self._server.draining:
      return 'Draining', 'the prefill server takes no more prompts'
    tokens, odd = divmod(len(submitted.prompt), 4)
    longest = self._wire.engine.prompt_tokens
    if odd or not 1 <= tokens <= longest:
      return 'ConfigError', f'{tokens} prompt tokens must be in 1..{longest}'
    prompt = np.frombuffer(submitted.prompt, '<i4')
    vocab = self._wire.model.vocab
    if prompt.min() < 0 or prompt.max() >= vocab:
      return 'ConfigError', f'prompt token ids must be in 0..{vocab - 1}'
    modes = [mode.value for mode in Mode]
    if submitted.mode not in modes:
      return 'ConfigError', f'mode={submitted.mode!r} must be one of {modes}'
    targets = [target.value for target in Target]
    if submitted.target not in targets:
      return (
        'ConfigError',
        f'target={submitted.target!r} must be one of {targets}',
      )
    try:
      _sampling(submitted)
    except ConfigError as error:
      return 'ConfigError', str(error)
    own = handshake.manifest_hash(self._wire, tokens)
    if own != submitted.manifest:
      return (
        'HandshakeError',
        f'the manifest is {own}, not {submitted.manifest}',
      )
    return None

  def _drop(self, sender: Sender[Publisher], key: tuple[int, int]) -> None:
    with self._lock:
      name = self._ids.pop(key, None)
    if name is not None:
      sender.drop(name)
      with self._lock:
        self._timelines.pop(name, None)

  def _warm_up(self, sender: Sender[Publisher]) -> None:
    try:
      for _, parts in sender.warm_up():
        jax.block_until_ready(digest.pack((parts,)))
    except Exception as error:  # the peer waits for an answer
      self._fail(error)
    else:
      self.channel.send(messages.WarmUp())

  def _announce(self, announcements: Sequence[Announcement]) -> None:
    """Tells the peer, request by request, in the order of publication."""
    grouped = itertools.groupby(
      announcements, key=lambda a: (a.chunk.request, a.epoch)
    )
    for (name, epoch), found in grouped:
      group = [*found]
      with self._lock:
        request, generation, prompt_tokens = self._tries[name]
      self.channel.send(
        messages.Published(
          request=request,
          generation=generation,
          prompt_tokens=prompt_tokens,
          epoch=epoch,
          chunks=tuple(a.entry for a in group),
          strings=tuple((a.chunk.layer_group, a.chunk.pages) for a in group)
          if any(a.chunk.pages for a in group)
          else (),
        )
      )

  def _fail(self, error: Exception) -> None:
    logging.error('%s: the session failed: %r', self.channel.peer, error)
    self.channel.close()

  def _pass_records_on(self, sender: Sender[Publisher]) -> None:
    while not self._closed.is_set():
      if (record := sender.next_record(_RECORD_S)) is not None:
        self._tell(record)

  def _tell(self, record: Record) -> None:
    with self._lock:
      request, generation, _ = self._tries[record.request]
      timeline = self._timelines.get(record.request)
    if timeline is None:
      return  # dropped meanwhile
    match record:
      case PrefillDone():
        start_s = timeline.arrival_s
        spans = [
          (
            str(event.name),
            event.start_s + start_s,
            event.end_s + start_s,
            event.detail['token_chunk'],
          )
          for event in timeline.events()
          if event.name in _SPANS
        ]
        self.channel.send(
          messages.Done(
            request=request,
            generation=generation,
            token=record.token,
            critical=record.critical,
            end_s=record.end_s,
            spans=tuple(spans),
          )
        )
      case Encoded(strings=strings):
        self.channel.send(
          messages.Encoded(
            request=request, generation=generation, strings=strings
          )
        )
      case PrefillFailed(error=error):
        self.channel.send(
          messages.Failed(
            request=request,
            generation=generation,
            kind=type(error).__name__,
            text=str(error)[:2000],
          )
        )


def _sampling(submitted: messages.Submit) -> Sampling:
  temperature, top_k, top_p, min_p, seed = submitted.sampling
  return Sampling(
    temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
  )
