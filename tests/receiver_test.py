# SPDX-License-Identifier: Apache-2.0
"""The receiver's order, window and virtual time, over a link of its own."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from lynx_jax.config import CodecConfig, ConfigError, EngineConfig
from lynx_jax.models import presets
from lynx_jax.transport import digest
from lynx_jax.transport.receiver import Announced, Pace, Receiver
from lynx_jax.transport.streams import (
  ChunkKey,
  Stream,
  TransferError,
  UnexpectedChunk,
  WireFormat,
)

CHUNK_BYTES = 2000
WIRE = WireFormat(
  presets.tiny(layers=2, head_dim=16),
  CodecConfig(group=32, sinks=0, recent_tokens=0),
  EngineConfig(
    prompt_tokens=512,
    output_tokens=8,
    token_chunk=64,
    layer_groups=2,
    chunk_bytes=CHUNK_BYTES,
  ),
)
PAYLOAD = (((jnp.arange(8, dtype=jnp.uint8),),),)
LAYOUTS = [
  [
    digest.Layout(
      [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in p]
    )
    for p in parts
  ]
  for parts in PAYLOAD
]
PACKED, _SUMS = digest.pack(PAYLOAD)
(DIGEST,) = digest.texts([_SUMS])
digest.unpack(PACKED, LAYOUTS)  # compiled here, not while time is taken
WAIT_S = 10.0


@dataclasses.dataclass
class _Pull:
  done: threading.Event

  def ready(self) -> bool:
    return self.done.is_set()

  def take(self):
    return PACKED


class _Link:
  """Keeps what was asked for, in its order; `held` pulls do not end."""

  def __init__(self):
    self.asked: list[int] = []
    self.discarded: list[int] = []
    self.held: set[int] = set()
    self.pulls: dict[int, _Pull] = {}

  def pull(self, uuid: int, specs) -> _Pull:
    self.asked.append(uuid)
    self.pulls[uuid] = _Pull(threading.Event())
    if uuid not in self.held:
      self.pulls[uuid].done.set()
    return self.pulls[uuid]

  def discard(self, uuid: int, specs) -> None:
    self.discarded.append(uuid)

  def reset(self) -> None:
    self.asked.append(-1)

  def close(self) -> None:
    pass


class _Bench:
  def __init__(self, pace: Pace | None = None):
    self.link, self.freed, self.damaged = _Link(), [], []
    self.receiver = Receiver(
      lambda chunk: LAYOUTS,
      CHUNK_BYTES,
      pace=pace,
      landed=self.freed.extend,
      damaged=lambda *what: self.damaged.append(what),
    )
    self.receiver.attach(self.link)

  def chunks(self, request: int, stream: Stream | None = None, tokens=256):
    found = [
      chunk
      for token_chunk in range(WIRE.token_chunks(tokens))
      for chunk in WIRE.manifest(request, tokens, token_chunk)
    ]
    return [c for c in found if stream in (None, c.stream)]

  def expect(self, request: int, arrival_s: float = 0.0) -> None:
    self.receiver.expect(
      request,
      self.chunks(request),
      arrival_s=arrival_s,
      deadline_s=float('inf'),
    )

  def publish(self, chunks, first_uuid: int = 0) -> list[int]:
    uuids = [*range(first_uuid, first_uuid + len(chunks))]
    self.receiver.published(
      Announced(chunk, uuid, chunk.bytes, DIGEST)
      for chunk, uuid in zip(chunks, uuids, strict=True)
    )
    return uuids

  def take(self, count: int) -> list:
    found = []
    until_s = time.monotonic() + WAIT_S
    while len(found) < count:
      self.receiver.wait(0.1)
      found += self.receiver.arrived()
      assert time.monotonic() < until_s, f'{len(found)} of {count}'
    return found


@pytest.fixture
def bench():
  bench = _Bench()
  yield bench
  bench.receiver.close()


def _until(condition) -> None:
  until_s = time.monotonic() + WAIT_S
  while not condition():
    assert time.monotonic() < until_s
    time.sleep(0.001)


def test_residuals_stay_within_the_window_and_anchors_do_not_wait(bench):
  bench.expect(0)
  bench.expect(1)
  residual = bench.chunks(0, Stream.RESIDUAL)
  (size,) = {chunk.bytes for chunk in residual}
  window = 2 * CHUNK_BYTES // size
  assert 1 < window < len(residual)
  bench.link.held = set(range(1000))
  uuids = bench.publish(residual)
  _until(lambda: len(bench.link.asked) == window)
  anchors = bench.publish(bench.chunks(1, Stream.ANCHOR), 500)
  _until(lambda: len(bench.link.asked) == window + len(anchors))
  assert set(bench.link.asked[window:]) == set(anchors)
  time.sleep(0.02)
  assert len(bench.link.asked) == window + len(anchors)
  bench.link.pulls[bench.link.asked[0]].done.set()
  _until(lambda: len(bench.link.asked) == window + len(anchors) + 1)
  for pulled in bench.link.pulls.values():
    pulled.done.set()
  bench.link.held.clear()
  bench.take(len(uuids) + len(anchors))
  _until(lambda: sorted(bench.freed) == sorted(uuids + anchors))


def test_what_nobody_misses_is_freed_and_not_delivered(bench):
  bench.expect(0)
  chunks = bench.chunks(0)
  bench.publish(chunks[:3])
  bench.take(3)
  bench.publish(chunks[:3], 100)  # they have landed
  other = [
    dataclasses.replace(c, key=ChunkKey(7, *c.key[1:])) for c in chunks[:3]
  ]
  bench.publish(other, 200)  # of a request that is not there
  bench.link.held = {300}
  bench.publish(chunks[3:4], 300)
  bench.publish(chunks[3:4], 301)  # under way
  expected = [100, 101, 102, 200, 201, 202, 301]
  assert bench.link.discarded == expected
  _until(lambda: set(expected) <= set(bench.freed))
  bench.receiver.cancel(0)
  bench.link.pulls[300].done.set()
  _until(lambda: 300 in bench.freed)
  assert bench.receiver.arrived() == []


def test_a_cancelled_request_never_arrives(bench):
  bench.expect(0)
  bench.publish(bench.chunks(0))
  _until(lambda: len(bench.freed) > 2)
  bench.receiver.cancel(0)
  assert bench.receiver.arrived() == []
  time.sleep(0.02)
  assert bench.receiver.arrived() == []


def test_a_chunk_of_another_size_is_refused(bench):
  bench.expect(0)
  chunk = bench.chunks(0)[0]
  with pytest.raises(UnexpectedChunk, match=f'of 7 bytes.*{chunk.bytes}'):
    bench.receiver.published([Announced(chunk, 1, 7, DIGEST)])


def test_another_digest_is_damage(bench):
  bench.expect(0)
  chunk = bench.chunks(0)[0]
  bench.receiver.published(
    [Announced(chunk, 1, chunk.bytes, bytes(len(DIGEST)))]
  )
  _until(lambda: bench.damaged)
  assert bench.damaged[0][:2] == (chunk, 1)
  assert bench.receiver.missing(0) == bench.chunks(0)
  bench.publish([chunk], 2)
  (arrival,) = bench.take(1)
  assert arrival.chunk == chunk


def test_a_reset_voids_what_was_asked_for(bench):
  bench.expect(0)
  chunks = bench.chunks(0)
  bench.link.held = {*range(100)}
  bench.publish(chunks)
  _until(lambda: len(bench.link.asked) > 2)
  time.sleep(0.01)
  assert bench.receiver.stalled_s() > 0
  bench.receiver.reset()
  assert bench.receiver.stalled_s() == 0
  for pulled in [*bench.link.pulls.values()]:
    pulled.done.set()
  time.sleep(0.02)
  assert bench.receiver.arrived() == []
  bench.publish(chunks, 1000)
  arrivals = bench.take(len(chunks))
  assert {a.chunk.key for a in arrivals} == {c.key for c in chunks}


@pytest.mark.parametrize('rtt_ms', [0.0, 20.0])
@pytest.mark.parametrize('idle_s', [0.0, 0.1])
def test_virtual_time_is_exact_and_never_in_the_past(rtt_ms, idle_s):
  rate_gbps = 0.002  # a chunk of 2000 bytes takes 8 ms
  bench = _Bench(Pace(rate_gbps, rtt_ms))
  try:
    for request in range(2):
      bench.expect(request)
      time.sleep(idle_s)  # an idle link saves nothing up
      chunks = bench.chunks(request)
      before_s = time.monotonic()
      bench.publish(chunks, 100 * request)
      after_s = time.monotonic()
      arrivals = bench.take(len(chunks))
      moving_s = sum(c.bytes for c in chunks) * 8 / (rate_gbps * 1e9)
      # Half an RTT each for the announcement, the request and the payload.
      least_s = 1.5 * rtt_ms / 1e3 + moving_s
      end_s = max(a.arrived_s for a in arrivals)
      assert before_s + least_s <= end_s <= after_s + least_s + 0.1
      starts = sorted((a.sent_s, a.chunk.bytes) for a in arrivals)
      for (one_s, size), (other_s, _) in zip(starts, starts[1:], strict=False):
        assert other_s >= one_s + size * 8 / (rate_gbps * 1e9) - 1e-9
      if rtt_ms == 0:  # it is never idle while something waits
        assert end_s - starts[0][0] <= moving_s + 0.05
  finally:
    bench.receiver.close()


def test_memory_that_runs_out_is_a_typed_error(bench):
  def pull(uuid, specs):
    raise MemoryError('no room for the payload')

  bench.link.pull = pull
  bench.expect(0)
  bench.publish(bench.chunks(0)[:1])
  with pytest.raises(TransferError, match='no room for the payload'):
    bench.receiver.wait(WAIT_S)


def test_jitter_delays_chunks_and_is_repeatable():
  def seen():
    pace = Pace(1.0, rtt_ms=2.0, jitter_ms=5.0)
    return [pace.send(1000, 0.0)[1] for _ in range(50)]

  exact = Pace(1.0, rtt_ms=2.0)
  delays = [s - exact.send(1000, 0.0)[1] for s in seen()]
  assert seen() == seen()
  assert 0 <= min(delays) < 0.001
  assert 0.004 < max(delays) <= 0.005
  with pytest.raises(ConfigError, match='jitter_ms=-1'):
    Pace(1.0, jitter_ms=-1)
