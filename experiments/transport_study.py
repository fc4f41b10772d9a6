# SPDX-License-Identifier: Apache-2.0
"""Transfers over real, rate-limited links between two network namespaces.

    python -m experiments.transport_study --workdir=runs/transport

Needs root, `ip` and `tc`; about 3 minutes. A veth pair is limited by tbf; there
is no delay but that of the machine. Both sides are processes of their own and
move the chunks of an 8B model's manifest: real messages, windows, pulls,
digests. No model runs: each payload is an array that was made before, so what
prefill and the cut of slices cost is not in these figures.
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

from experiments import results
from lynx_jax import wire as wire_lib
from lynx_jax.config import CodecConfig, EngineConfig, ModelConfig
from lynx_jax.transport import control, messages, pull
from lynx_jax.transport.publisher import Announcement, Publisher
from lynx_jax.transport.receiver import Receiver
from lynx_jax.transport.streams import Stream, WireFormat

_MODEL = ModelConfig(
  name='8b',
  layers=32,
  heads=32,
  kv_heads=8,
  head_dim=128,
  model_dim=4096,
  ff_dim=14336,
  vocab=128256,
  context_tokens=131072,
)
_CODEC = CodecConfig(sinks=0, recent_tokens=0)
_WINDOW_BYTES = 64 * 2**20
_PAIRS = 5
_SPACES = ('lynx-send', 'lynx-receive')
_ADDRESSES = ('10.78.0.1', '10.78.0.2')
_SOCKET_PORT = 7999
_WAIT_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A link, and what goes over it.

  Attributes:
    name: in records.
    rate_mbit: of the link.
    chunk_bytes: of a transfer.
    tokens: of the long prompt, whose transfer takes seconds.
  """

  name: str
  rate_mbit: int
  chunk_bytes: int
  tokens: int

  @property
  def wire(self) -> WireFormat:
    return WireFormat(
      _MODEL,
      _CODEC,
      EngineConfig(
        prompt_tokens=self.tokens,
        token_chunk=256,
        layer_groups=8,
        chunk_bytes=self.chunk_bytes,
      ),
    )


CASES = {
  case.name: case
  for case in (
    Case(name='100mbit', rate_mbit=100, chunk_bytes=2**18, tokens=512),
    Case(name='1gbit', rate_mbit=1000, chunk_bytes=2**20, tokens=4096),
  )
}
_SHORT_TOKENS = 128  # one group: an Anchor of 4.5 MB


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--workdir', default='runs/transport')
  parser.add_argument('--case', choices=CASES, help='of one side')
  parser.add_argument('--side', choices=['send', 'receive'], help='one side')
  chosen = parser.parse_args(arguments)
  if chosen.side == 'send':
    send(CASES[chosen.case])
  elif chosen.side == 'receive':
    port = int(sys.stdin.readline())
    print(json.dumps(receive(CASES[chosen.case], port)), flush=True)
  else:
    with results.Writer(chosen.workdir) as writer:
      for case in CASES.values():
        for record in measure(case):
          writer.write(record)
          print(f'{record["name"]}: {record["value"]:.4g} {record["unit"]}')


def measure(case: Case) -> Iterator[dict[str, Any]]:
  """Runs both sides over a link, and yields summary records."""
  with contextlib.ExitStack() as stack:
    stack.enter_context(link(case.rate_mbit))
    sender = stack.enter_context(_side(case, 'send', _SPACES[0]))
    receiver = stack.enter_context(_side(case, 'receive', _SPACES[1]))
    receiver.stdin.write(sender.stdout.readline())
    receiver.stdin.flush()
    received = json.loads(receiver.stdout.readline())
    sender.stdin.close()  # it may end now
    sent = json.loads(sender.stdout.readline())
  gigabytes = received['bytes'] / 1e9
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
    # The sender's has what it takes for the plain socket in it as well.
    f'cpu_s_per_gb_send_{case.name}': (
      sent['cpu_s'] / gigabytes,
      's/GB',
      _PAIRS,
    ),
    f'cpu_s_per_gb_recv_{case.name}': (
      received['cpu_s'] / gigabytes,
      's/GB',
      _PAIRS,
    ),
    f'anchor_alone_{case.name}': (
      statistics.median(received['alone_s']),
      's',
      _PAIRS,
    ),
    f'anchor_behind_residual_over_alone_{case.name}': (
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
def link(rate_mbit: int) -> Iterator[None]:
  """Makes two namespaces with a limited link between them, and removes them."""

  def run(*command: str) -> None:
    subprocess.run(command, check=True)

  burst = max(131072, rate_mbit * 125)
  try:
    for space in _SPACES:
      run('ip', 'netns', 'add', space)
      run('ip', '-n', space, 'link', 'set', 'lo', 'up')
    run(
      *('ip', 'link', 'add', 'veth0', 'netns', _SPACES[0], 'type', 'veth'),
      *('peer', 'name', 'veth0', 'netns', _SPACES[1]),
    )
    for space, address in zip(_SPACES, _ADDRESSES, strict=True):
      run('ip', '-n', space, 'addr', 'add', f'{address}/24', 'dev', 'veth0')
      run('ip', '-n', space, 'link', 'set', 'veth0', 'up')
      run(
        *('ip', 'netns', 'exec', space, 'tc', 'qdisc', 'add', 'dev', 'veth0'),
        *('root', 'tbf', 'rate', f'{rate_mbit}mbit', 'burst', str(burst)),
        *('latency', '20ms'),
      )
    yield
  finally:
    for space in _SPACES:
      subprocess.run(['ip', 'netns', 'del', space], check=False)


@contextlib.contextmanager
def _side(case: Case, side: str, space: str) -> Iterator[Any]:
  command = [sys.executable, '-m', 'experiments.transport_study']
  process = subprocess.Popen(
    [
      *('ip', 'netns', 'exec', space, *command),
      *(f'--side={side}', f'--case={case.name}'),
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


def _payload(wire: WireFormat, chunk) -> tuple[Any, ...]:
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  specs = tuple(
    wire_lib.specs(wire, part, (sharding,)) for part in chunk.slices
  )
  return jax.tree.map(lambda x: _array(x.shape, str(x.dtype)), specs)


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
  prompts: dict[int, int] = {}
  cpu_s: list[float] = []

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
            chunks=tuple(
              (
                a.chunk.key.token_chunk,
                a.chunk.key.sequence,
                a.uuid,
                a.chunk.bytes,
                a.digests,
              )
              for a in group
            ),
          )
        )

    source = pull.PullSource(pull.start_server(_ADDRESSES[0]))
    publisher = Publisher(
      source,
      lambda chunk: _payload(wire, chunk),
      announce,
      failed=lambda error: channel.close(),
      window_bytes=_WINDOW_BYTES,
    )
    channel.send(
      messages.Welcome(
        session=secrets.token_hex(8),
        lease_s=_WAIT_S,
        window_bytes=_WINDOW_BYTES,
        address=source.address,
        probe=0,
      )
    )
    with contextlib.suppress(control.PeerLost):
      while (message := channel.receive(_WAIT_S)) is not None:
        match message:
          case messages.Submit(request=request, prompt=prompt):
            prompts[request] = len(prompt)
            now_s = time.monotonic()
            for token_chunk in range(wire.token_chunks(len(prompt))):
              publisher.offer(
                wire.manifest(request, len(prompt), token_chunk),
                arrival_s=now_s,
              )
          case messages.Landed(uuids=uuids):
            publisher.landed(uuids)
          case messages.Beat():  # CPU time from here on, or up to here
            cpu_s.append(time.process_time())
            channel.send(message)
          case messages.Drop(request=request):
            publisher.cancel(request)
    publisher.close()

  threading.Thread(target=_drain_sockets, daemon=True).start()
  server, port = control.serve(
    on_peer, lambda *_: iter(()), f'{_ADDRESSES[0]}:0'
  )
  print(port, flush=True)
  sys.stdin.read()
  print(json.dumps({'cpu_s': cpu_s[1] - cpu_s[0]}), flush=True)
  server.stop(grace=None).wait()


def _drain_sockets() -> None:
  """Sends as many bytes as a client asks for, over a plain socket."""
  with socket.create_server((_ADDRESSES[0], _SOCKET_PORT)) as listener:
    while True:
      connection, _ = listener.accept()
      with connection:
        left = int(connection.recv(64))
        block = os.urandom(2**20)
        while left > 0:
          connection.sendall(block[:left])
          left -= len(block)


class _Client:
  """A receiver, and the channel that feeds it."""

  def __init__(self, case: Case, port: int):
    self._wire = case.wire
    self._channel = control.ClientChannel(f'{_ADDRESSES[0]}:{port}')
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    self.receiver = Receiver(
      lambda chunk: tuple(
        wire_lib.specs(self._wire, part, (sharding,)) for part in chunk.slices
      ),
      case.chunk_bytes,
      pace=None,
      landed=lambda uuids: self._channel.send(
        messages.Landed(uuids=tuple(uuids))
      ),
      damaged=self._on_damaged,
    )
    self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    welcome = self._channel.receive(_WAIT_S)
    assert isinstance(welcome, messages.Welcome)
    assert welcome.address is not None
    self.receiver.attach(
      pull.PullLink(pull.start_server(_ADDRESSES[1]), welcome.address)
    )
    self.beats: queue.SimpleQueue[messages.Message] = queue.SimpleQueue()
    self._chunks: dict[int, dict[tuple[int, int], Any]] = {}
    self._left: dict[tuple[int, Stream], int] = {}
    self._next = 0
    threading.Thread(target=self._read, daemon=True).start()

  def submit(self, tokens: int) -> int:
    """Asks for a prompt; returns its id."""
    request, self._next = self._next, self._next + 1
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
    self._channel.send(
      messages.Submit(
        request=request,
        generation=0,
        prompt=bytes(tokens),  # only its length is used
        manifest='',
        mode='overlapped',
        deadline_in_s=None,
        landed=(),
      )
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
          for token_chunk, sequence, uuid, size_bytes, digests in published:
            chunk = self._chunks[request][token_chunk, sequence]
            self.receiver.published(chunk, uuid, size_bytes, digests)


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
  with socket.create_connection((_ADDRESSES[0], _SOCKET_PORT)) as connection:
    start_s = time.monotonic()
    connection.sendall(f'{size_bytes}'.encode())
    buffer, left = bytearray(2**20), size_bytes
    while left > 0:
      left -= connection.recv_into(buffer)
    return time.monotonic() - start_s


if __name__ == '__main__':
  main()
