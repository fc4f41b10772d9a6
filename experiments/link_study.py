# SPDX-License-Identifier: Apache-2.0
"""Transfers over real, rate-limited links between two network namespaces.

    python -m experiments.link_study --case=1gbit

Needs root; see `namespaces`. Both sides are processes of their own and move the
chunks of an 8B model's manifest: real messages, windows, pulls, digests. No
model runs: each payload is an array that was made before, so what prefill and
the cut of slices cost is not in these figures. The case `control` moves no
payload at all and needs no namespace: it is the control path of a prompt of
131,072 tokens.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import queue
import random
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from experiments import namespaces, results
from experiments.namespaces import ADDRESSES
from lynx_jax import handshake
from lynx_jax import wire as wire_lib
from lynx_jax.config import CodecConfig, EngineConfig, ModelConfig
from lynx_jax.transport import control, messages, pull
from lynx_jax.transport.publisher import Announcement, Publisher
from lynx_jax.transport.receiver import Announced, Receiver
from lynx_jax.transport.streams import Chunk, Stream, WireFormat

_MODEL = ModelConfig(
  name='8b',
  layers=32,
  heads=32,
  kv_heads=8,
  head_dim=128,
  model_dim=4096,
  ff_dim=14336,
  vocab=128256,
  context_tokens=2 * 131072,  # a prompt of 128k and its output
)
_CODEC = CodecConfig(sinks=0, recent_tokens=0)
_CONTROL_GBPS = 100.0
_CREDITS = 4  # messages in which a window is given back
_PAIRS = 5
_SOCKET_PORT = 7999
_WAIT_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A link, and what goes over it.

  Attributes:
    name: in records.
    rate_mbit: of the link; None is the control path alone, over loopback.
    rtt_ms: of the link, besides its own.
    chunk_bytes: of a transfer.
    token_chunk: of prefill, which no chunk crosses.
    tokens: of the long prompt, whose transfer takes seconds.
    window_bytes: published and not landed.
  """

  name: str
  rate_mbit: int | None
  rtt_ms: float = 0.0
  chunk_bytes: int
  token_chunk: int = 256
  tokens: int
  window_bytes: int = 64 * 2**20

  @property
  def address(self) -> str:
    """Where the sender serves."""
    return ADDRESSES[0] if self.rate_mbit else '127.0.0.1'

  @property
  def wire(self) -> WireFormat:
    return WireFormat(
      _MODEL,
      _CODEC,
      EngineConfig(
        prompt_tokens=self.tokens,
        token_chunk=self.token_chunk,
        layer_groups=8,
        chunk_bytes=self.chunk_bytes,
      ),
    )


CASES = {
  case.name: case
  for case in (
    Case(name='100mbit', rate_mbit=100, chunk_bytes=2**18, tokens=512),
    Case(name='1gbit', rate_mbit=1000, chunk_bytes=2**20, tokens=4096),
    Case(
      name='1gbit_rtt20',
      rate_mbit=1000,
      rtt_ms=20.0,
      chunk_bytes=2**20,
      tokens=4096,
    ),
    Case(
      name='control',
      rate_mbit=None,
      chunk_bytes=16 * 2**20,
      token_chunk=2048,
      tokens=131072,
      window_bytes=2**30,  # 86 ms at 100 Gbit/s
    ),
  )
}
_SHORT_TOKENS = 128  # one group: an Anchor of 4.5 MB


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--case', choices=CASES, required=True)
  parser.add_argument('--side', choices=['send', 'receive'], help='one side')
  chosen = parser.parse_args(arguments)
  case = CASES[chosen.case]
  if chosen.side == 'send':
    send(case)
  elif chosen.side == 'receive':
    port = int(sys.stdin.readline())
    found = receive_nothing if case.rate_mbit is None else receive
    print(json.dumps(found(case, port)), flush=True)
  else:
    for record in measure(case):
      print(f'{record["name"]}: {record["value"]:.4g} {record["unit"]}')


def measure(case: Case) -> Iterator[dict[str, Any]]:
  """Runs both sides over a link, and yields summary records."""
  with contextlib.ExitStack() as stack:
    if case.rate_mbit is not None:
      stack.enter_context(namespaces.link(case.rate_mbit, case.rtt_ms))
    sender = stack.enter_context(_side(case, 'send', namespaces.SPACES[0]))
    receiver = stack.enter_context(_side(case, 'receive', namespaces.SPACES[1]))
    receiver.stdin.write(sender.stdout.readline())
    receiver.stdin.flush()
    received = json.loads(receiver.stdout.readline())
    sender.stdin.close()  # it may end now
    sent = json.loads(sender.stdout.readline())
  yield from _summaries(case, received, sent)


def _summaries(
  case: Case, received: dict[str, Any], sent: dict[str, Any]
) -> Iterator[dict[str, Any]]:
  if case.rate_mbit is None:
    transfer_s = received['bytes'] * 8e-9 / _CONTROL_GBPS
    yield results.summary_record(
      'control_share_8b_128k_100gbit',
      statistics.median(received['control_s']) / transfer_s,
      f'of {transfer_s:.3g} s',
      _PAIRS,
    )
    return
  gigabytes = received['bytes'] / 1e9
  # The contract's names without a link are those of 1 Gbit/s.
  over = '' if case.name == '1gbit' else f'_{case.name}'
  figures = {
    f'link_use_{case.name}': (
      _ratio(received['goodput_mbit'], received['socket_mbit']),
      'of a plain socket',
      _PAIRS,
    ),
    f'goodput_{case.name}': (
      statistics.median(received['goodput_mbit']),
      'Mbit/s',
      _PAIRS,
    ),
    f'cpu_s_per_gb_send{over}': (
      sent['cpu_s'] / gigabytes,
      's/GB',
      _PAIRS,
    ),
    f'cpu_s_per_gb_recv{over}': (
      received['cpu_s'] / gigabytes,
      's/GB',
      _PAIRS,
    ),
    f'anchor_alone_{case.name}': (
      statistics.median(received['alone_s']),
      's',
      _PAIRS,
    ),
    f'anchor_behind_residual_over_alone{over}': (
      _ratio(received['behind_s'], received['alone_s']),
      '',
      _PAIRS,
    ),
    f'link_use_with_anchors_{case.name}': (
      received['busy_mbit'] / statistics.median(received['socket_mbit']),
      'of a plain socket',
      _PAIRS,
    ),
  }
  for name, (value, unit, n) in figures.items():
    yield results.summary_record(name, value, unit, n)


def _ratio(ones: Sequence[float], others: Sequence[float]) -> float:
  """Returns the median of the ratios of pairs."""
  return statistics.median(
    one / other for one, other in zip(ones, others, strict=True)
  )


@contextlib.contextmanager
def _side(case: Case, side: str, space: str) -> Iterator[Any]:
  command = [sys.executable, '-m', 'experiments.link_study']
  process = subprocess.Popen(
    [
      *([] if case.rate_mbit is None else namespaces.inside(space)),
      *(*command, f'--side={side}', f'--case={case.name}'),
    ],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    yield process
  finally:
    process.kill()
    process.wait()


def _payload(layouts: wire_lib.Layouts, chunk: Chunk) -> tuple[Any, ...]:
  def part(layout):
    return tuple(
      None if spec is None else _array(spec.shape, str(spec.dtype))
      for spec in layout.specs
    )

  return tuple(tuple(map(part, parts)) for parts in layouts(chunk))


_ARRAYS: dict[tuple, jax.Array] = {}


def _array(shape: tuple[int, ...], dtype: str) -> jax.Array:
  """Returns random bits, the same ones for a shape."""
  if (shape, dtype) not in _ARRAYS:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    bits = np.random.default_rng(0).bytes(size)
    values = np.frombuffer(bits, dtype).reshape(shape)
    _ARRAYS[shape, dtype] = jax.device_put(values)
  return _ARRAYS[shape, dtype]


def send(case: Case) -> None:
  """Publishes whatever is asked for, until standard input ends."""
  wire = case.wire
  layouts = wire_lib.Layouts(
    wire, [jax.sharding.SingleDeviceSharding(jax.devices()[0])]
  )
  prompts: dict[int, int] = {}
  cpu_s: list[float] = []
  socket_s = [0.0]

  def on_peer(channel: control.ServerChannel) -> None:
    def announce(announcements: Sequence[Announcement]) -> None:
      grouped = itertools.groupby(announcements, lambda a: a.chunk.request)
      for request, group in grouped:
        channel.send(
          messages.Published(
            request=request,
            generation=0,
            prompt_tokens=prompts[request],
            epoch=0,
            chunks=tuple(a.entry for a in group),
          )
        )

    source: pull.Source = _NoSource()
    if case.rate_mbit is not None:
      source = pull.PullSource(pull.start_server(case.address))
    publisher = Publisher(
      source,
      lambda chunk: () if case.rate_mbit is None else _payload(layouts, chunk),
      announce,
      failed=lambda error: channel.close(),
      window_bytes=case.window_bytes,
    )
    channel.send(
      messages.Welcome(
        session=secrets.token_hex(8),
        lease_s=_WAIT_S,
        window_bytes=case.window_bytes,
        address=getattr(source, 'address', None),
        probe=0,
      )
    )
    with contextlib.suppress(control.PeerLost):
      while (message := channel.receive(_WAIT_S)) is not None:
        match message:
          case messages.Submit(request=request, prompt=prompt):
            prompts[request] = len(prompt)
            assert (
              handshake.manifest_hash(wire, len(prompt)) == message.manifest
            )
            now_s = time.monotonic()
            for token_chunk in range(wire.token_chunks(len(prompt))):
              publisher.offer(
                wire.manifest(request, len(prompt), token_chunk),
                arrival_s=now_s,
              )
          case messages.Landed(uuids=uuids):
            publisher.landed(uuids)
          case messages.Beat():  # CPU time from here on, or up to here
            cpu_s.append(time.process_time() - socket_s[0])
            channel.send(message)
          case messages.Drop(request=request):
            publisher.cancel(request)
    publisher.close()

  if case.rate_mbit is not None:
    threading.Thread(
      target=_drain_sockets, args=(socket_s,), daemon=True
    ).start()
  server, port = control.serve(
    on_peer, lambda *_: iter(()), f'{case.address}:0'
  )
  print(port, flush=True)
  sys.stdin.read()
  print(json.dumps({'cpu_s': cpu_s[-1] - cpu_s[0]}), flush=True)
  server.stop(grace=None).wait()


def _drain_sockets(used_s: list[float]) -> None:
  """Sends as many bytes as a client asks for, over a plain socket.

  Args:
    used_s: its only item is kept at this thread's CPU time.
  """
  with socket.create_server((ADDRESSES[0], _SOCKET_PORT)) as listener:
    while True:
      connection, _ = listener.accept()
      with connection:
        left = int(connection.recv(64))
        block = os.urandom(2**20)
        while left > 0:
          connection.sendall(block[:left])
          left -= len(block)
      used_s[0] = time.thread_time()


class _Client:
  """A receiver, and the channel that feeds it."""

  def __init__(self, case: Case, port: int):
    self._wire = case.wire
    self._no_payload = case.rate_mbit is None
    self._channel = control.ClientChannel(f'{case.address}:{port}')
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    self.receiver = Receiver(
      (lambda chunk: [])
      if self._no_payload
      else wire_lib.Layouts(self._wire, [sharding]),
      case.chunk_bytes,
      credit_bytes=case.window_bytes // _CREDITS,
      pace=None,
      landed=lambda uuids: self._channel.send(
        messages.Landed(uuids=tuple(uuids))
      ),
      damaged=self._on_damaged,
    )
    self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    welcome = self._channel.receive(_WAIT_S)
    assert isinstance(welcome, messages.Welcome)
    link: pull.Link = _NoLink()
    if welcome.address is not None:
      link = pull.PullLink(pull.start_server(ADDRESSES[1]), welcome.address)
    self.receiver.attach(link)
    self.beats: queue.SimpleQueue[messages.Message] = queue.SimpleQueue()
    self._chunks: dict[int, dict[tuple[int, int], Any]] = {}
    self._left: dict[tuple[int, Stream], int] = {}
    self._submitting = threading.Lock()  # chunks may be published meanwhile
    self._next = 0
    threading.Thread(target=self._read, daemon=True).start()

  def submit(self, tokens: int) -> int:
    """Asks for a prompt; returns its id."""
    request, self._next = self._next, self._next + 1
    with self._submitting:
      self._channel.send(
        messages.Submit(
          request=request,
          generation=0,
          prompt=bytes(tokens),  # only its length is used
          manifest=handshake.manifest_hash(self._wire, tokens),
          mode='overlapped',
          deadline_in_s=None,
          landed=(),
        )
      )
      chunks = {
        (c.key.token_chunk, c.key.sequence): c
        for token_chunk in range(self._wire.token_chunks(tokens))
        for c in self._wire.manifest(request, tokens, token_chunk)
      }
      self._chunks[request] = chunks
      self.receiver.expect(
        request,
        chunks.values(),
        arrival_s=time.monotonic(),
        deadline_s=math.inf,
      )
      self._left |= {
        (request, stream): sum(c.stream is stream for c in chunks.values())
        for stream in Stream
      }
    return request

  def beat(self) -> None:
    """Lets the sender read its CPU time."""
    self._channel.send(messages.Beat(sent_s=0.0))
    self.beats.get(timeout=_WAIT_S)

  def take(self, request: int, stream: Stream, come: int | None = None) -> int:
    """Waits for a stream, or its first chunks; returns the bytes of all."""
    size = 0
    until_s = time.monotonic() + _WAIT_S
    left = 0 if come is None else self._left[request, stream] - come
    while self._left[request, stream] > left:
      self.receiver.wait(0.1)
      for arrival in self.receiver.arrived():
        size += arrival.chunk.bytes
        self._left[arrival.chunk.request, arrival.chunk.stream] -= 1
      assert self.errors.empty(), self.errors.get()
      assert time.monotonic() < until_s, f'{stream} never came'
    return size

  def _on_damaged(self, chunk, uuid, error) -> None:
    self.errors.put(error)

  def _read(self) -> None:
    while (message := self._channel.receive(_WAIT_S)) is not None:
      match message:
        case messages.Beat():
          self.beats.put(message)
        case messages.Published(request=request, chunks=published):
          with self._submitting:
            wanted = self._chunks[request]
          self.receiver.published(
            Announced(
              wanted[token_chunk, sequence],
              uuid,
              size_bytes,
              text,
            )
            for token_chunk, sequence, uuid, size_bytes, text in published
          )


def receive(case: Case, port: int) -> dict[str, Any]:
  """Measures one link from its receiving end."""
  client = _Client(case, port)

  def fetch(tokens: int) -> tuple[float, int]:
    start_s = time.monotonic()
    request = client.submit(tokens)
    size = sum(client.take(request, stream) for stream in Stream)
    return time.monotonic() - start_s, size

  fetch(case.tokens)  # compiles, and opens the connection's window
  beaten_s = time.monotonic()
  client.beat()
  client.receiver.rtt_s = time.monotonic() - beaten_s
  ours, theirs, cpu_s, size = [], [], 0.0, 0
  for _ in range(_PAIRS):
    before_s = time.process_time()
    seconds, size = fetch(case.tokens)
    cpu_s += time.process_time() - before_s
    ours.append(seconds)
    theirs.append(_over_socket(size))
  client.beat()
  found: dict[Any, list[Any]] = {_alone: [], _behind: []}
  order = random.Random(0)
  for _ in range(_PAIRS):
    for measured in order.sample([_alone, _behind], 2):
      found[measured].append(measured(client, case))
  return {
    'bytes': size * _PAIRS,
    'cpu_s': cpu_s,
    'goodput_mbit': [size * 8e-6 / seconds for seconds in ours],
    'socket_mbit': [size * 8e-6 / seconds for seconds in theirs],
    'alone_s': [seconds for seconds, _ in found[_alone]],
    'behind_s': [seconds for seconds, _ in found[_behind]],
    'busy_mbit': statistics.median(mbit for _, mbit in found[_behind]),
  }


def receive_nothing(case: Case, port: int) -> dict[str, Any]:
  """Measures the control path: everything but payloads and their digests."""
  client = _Client(case, port)
  client.receiver.rtt_s = 0.01  # a window of 250 MB at 100 Gbit/s
  control_s = []
  client.beat()
  for _ in range(1 + _PAIRS):
    start_s = time.monotonic()
    request = client.submit(case.tokens)
    for stream in Stream:
      client.take(request, stream)
    control_s.append(time.monotonic() - start_s)
  client.beat()
  size = case.wire.stream_bytes(case.tokens).total
  return {'bytes': size, 'control_s': control_s[1:]}


class _NoSource:
  """Publishes nothing."""

  def publish(self, payload: Any) -> int:
    return secrets.randbits(62)

  def forget(self, uuid: int) -> None:
    pass

  def reset(self) -> None:
    pass


class _NoLink:
  """Fetches nothing, at once."""

  def pull(self, uuid: int, specs: Any) -> pull.Pull:
    return _Nothing()

  def discard(self, uuid: int, specs: Any) -> None:
    pass

  def reset(self) -> None:
    pass

  def close(self) -> None:
    pass


class _Nothing:
  def ready(self) -> bool:
    return True

  def take(self) -> tuple[()]:
    return ()


def _alone(client: _Client, case: Case) -> tuple[float, float | None]:
  """Returns the seconds of a short prompt's Anchor on an idle link."""
  del case
  start_s = time.monotonic()
  request = client.submit(_SHORT_TOKENS)
  client.take(request, Stream.ANCHOR)
  seconds = time.monotonic() - start_s
  client.take(request, Stream.RESIDUAL)
  return seconds, None


def _behind(client: _Client, case: Case) -> tuple[float, float | None]:
  """Times it while another request's Residual fills the link.

  Returns:
    Its seconds, and the Mbit/s of all from then to the end of both.
  """
  long = client.submit(case.tokens)
  client.take(long, Stream.ANCHOR)
  client.take(long, Stream.RESIDUAL, come=2)
  start_s = time.monotonic()
  short = client.submit(_SHORT_TOKENS)
  size = client.take(short, Stream.ANCHOR)
  seconds = time.monotonic() - start_s
  size += client.take(long, Stream.RESIDUAL)
  size += client.take(short, Stream.RESIDUAL)
  return seconds, size * 8e-6 / (time.monotonic() - start_s)


def _over_socket(size_bytes: int) -> float:
  """Returns the seconds that the bytes take over a plain socket."""
  with socket.create_connection((ADDRESSES[0], _SOCKET_PORT)) as connection:
    start_s = time.monotonic()
    connection.sendall(f'{size_bytes}'.encode())
    buffer, left = bytearray(2**20), size_bytes
    while left > 0:
      left -= connection.recv_into(buffer)
    return time.monotonic() - start_s


if __name__ == '__main__':
  main()
