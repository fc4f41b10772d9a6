# SPDX-License-Identifier: Apache-2.0
"""Runs the courier over real and emulated links, and its scripted double.

They know no codec and no cache.
"""

import math
import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lynx_jax import config
from lynx_jax.transport import courier as courier_lib
from lynx_jax.transport import links, streams
from lynx_jax.transport import scheduler as scheduler_lib

ANCHOR, RESIDUAL = streams.Stream.ANCHOR, streams.Stream.RESIDUAL
TIMEOUT_S = 20.0


def chunk_of(sequence, size=1000, stream=ANCHOR, request=0) -> streams.Chunk:
  return streams.Chunk(
    key=streams.ChunkKey(request, 0, 0, sequence),
    stream=stream,
    layer_group=0,
    slices=(),
    anchor_bytes=size if stream is ANCHOR else 0,
    residual_bytes=size if stream is RESIDUAL else 0,
  )


def cut(chunk):
  data = np.full(chunk.bytes, chunk.key.sequence % 256, np.uint8)
  return (jax.device_put(data),)


def destination():
  return jax.devices()[1]


def courier_of(link, cut=cut):
  return courier_lib.Courier(scheduler_lib.Scheduler(0), link, cut)


def gather(courier, count):
  arrivals = []
  until_s = time.monotonic() + TIMEOUT_S
  while len(arrivals) < count:
    assert courier.wait(until_s - time.monotonic()), 'nothing arrives'
    arrivals += courier.arrived()
  return arrivals


def check_payloads(arrivals):
  for arrival in arrivals:
    (data,) = arrival.payload
    assert data.devices() == {destination()}
    assert data.is_ready()
    np.testing.assert_array_equal(
      np.asarray(data),
      np.full(arrival.chunk.bytes, arrival.chunk.key.sequence % 256),
    )


@pytest.mark.parametrize('rate_gbps', [0.0, -1.0, math.nan])
def test_a_rate_must_be_positive(rate_gbps):
  with pytest.raises(config.ConfigError, match='must be positive'):
    links.EmulatedLink(destination(), rate_gbps)


@pytest.mark.parametrize('rtt_ms', [-1.0, math.inf, math.nan])
def test_a_round_trip_must_be_finite(rtt_ms):
  with pytest.raises(config.ConfigError, match='rtt_ms'):
    links.EmulatedLink(destination(), 1.0, rtt_ms)


def test_virtual_time_of_the_emulated_link():
  """1 Mbit/s: 125 bytes take 1 ms. | ready | start | end |."""
  link = links.EmulatedLink(destination(), 1e-3, rtt_ms=10.0)
  table = [(5.0, 5.0, 5.001), (5.0, 5.001, 5.002), (7.0, 7.0, 7.001)]
  for ready_s, start_s, end_s in table:
    flight = link.send(jnp.zeros(125, jnp.uint8), 125, ready_s)
    assert flight.start_s == pytest.approx(start_s, abs=1e-9)
    assert flight.end_s == pytest.approx(end_s, abs=1e-9)
    assert flight.latency_s == 0.005
    assert link.free_s == flight.end_s


def test_a_destination_may_depend_on_the_payload():
  devices = jax.devices()
  link = links.DeviceLink(lambda p: tuple(devices[: len(p)]))
  flight = link.send((jnp.zeros(2), jnp.ones(3)), 20, 0.0)
  assert [x.devices() for x in flight.payload] == [{devices[0]}, {devices[1]}]


def test_pacing_is_exact_while_the_main_thread_computes():
  """100 chunks at 33 Mbit/s: 1 % of the total, and no stamp goes back."""
  size, rate_gbps = 100 * 1024, 0.033
  chunk_s = size * 8 / (rate_gbps * 1e9)
  chunks = [chunk_of(i, size) for i in range(100)]
  step = jax.jit(lambda x: x @ x / jnp.float32(300.0))
  x = jnp.ones((300, 300), jnp.float32)
  step(x).block_until_ready()
  link = links.EmulatedLink(destination(), rate_gbps, rtt_ms=4.0)
  arrivals = []
  with courier_of(link) as courier:
    begin_s = time.monotonic()
    courier.offer(chunks, arrival_s=begin_s, ready_s=begin_s)
    while len(arrivals) < len(chunks):
      assert time.monotonic() < begin_s + TIMEOUT_S
      x = step(x).block_until_ready()
      arrivals += courier.arrived()
    seen_s = time.monotonic() - begin_s
  stamps = [a.arrived_s - begin_s for a in arrivals]
  ideal = [(i + 1) * chunk_s + 0.002 for i in range(len(chunks))]
  assert [a.chunk for a in arrivals] == chunks
  assert stamps == sorted(stamps)
  assert stamps[-1] == pytest.approx(ideal[-1], rel=0.01)
  # The test's own thread is late by what a loaded machine makes it.
  assert stamps[-1] <= seen_s < 1.03 * ideal[-1]
  # No chunk is early, and a late copy does not delay those after it.
  late = [s - i for s, i in zip(stamps, ideal, strict=True)]
  assert min(late) > -1e-6
  assert sorted(late)[len(late) // 2] < 1e-6
  assert [a.sent_s for a in arrivals[1:]] == pytest.approx(
    [begin_s + (i + 1) * chunk_s for i in range(len(chunks) - 1)]
  )
  check_payloads(arrivals[::20])


@pytest.mark.parametrize('rate_gbps', [1e6, math.inf, None])
def test_a_link_faster_than_python_still_delivers_in_order(rate_gbps):
  if rate_gbps is None:
    link = links.DeviceLink(destination())
  else:
    link = links.EmulatedLink(destination(), rate_gbps)
  chunks = [chunk_of(i) for i in range(200)]
  with courier_of(link) as courier:
    begin_s = time.monotonic()
    courier.offer(chunks, arrival_s=begin_s)
    arrivals = gather(courier, len(chunks))
    end_s = time.monotonic()
  assert [a.chunk for a in arrivals] == chunks
  stamps = [a.arrived_s for a in arrivals]
  assert stamps == sorted(stamps)
  assert begin_s <= stamps[0]
  assert stamps[-1] <= end_s
  check_payloads(arrivals[::50])


def test_an_anchor_waits_behind_one_residual_and_the_cut_one_is_kept():
  chunk_s, size = 0.2, 1000
  link = links.EmulatedLink(destination(), size * 8 / chunk_s / 1e9)
  cuts = []

  def counting(chunk):
    cuts.append(chunk.key)
    return cut(chunk)

  residuals = [chunk_of(i, size, RESIDUAL) for i in range(4)]
  anchor = chunk_of(9, size, request=1)
  with courier_of(link, counting) as courier:
    begin_s = time.monotonic()
    courier.offer(residuals, arrival_s=begin_s, ready_s=begin_s)
    gather(courier, 1)  # the second is on the link, the third perhaps cut
    courier.offer([anchor], arrival_s=time.monotonic())
    rest = gather(courier, 4)
  assert [a.chunk for a in rest] == [residuals[1], anchor, *residuals[2:]]
  # The link never paused: five chunks took five times one.
  assert rest[-1].arrived_s - begin_s == pytest.approx(5 * chunk_s, abs=0.01)
  assert sorted(cuts) == sorted(c.key for c in (*residuals, anchor))


def test_the_next_payload_is_cut_while_the_link_is_busy():
  chunk_s, size = 0.3, 1000
  cut_s = []

  def timed(chunk):
    cut_s.append(time.monotonic())
    return cut(chunk)

  link = links.EmulatedLink(destination(), size * 8 / chunk_s / 1e9)
  with courier_of(link, timed) as courier:
    begin_s = time.monotonic()
    courier.offer(
      [chunk_of(i, size) for i in range(3)], arrival_s=begin_s, ready_s=begin_s
    )
    (first,) = gather(courier, 1)
    # One ahead and no further: what is cut is memory, and may be outranked.
    assert [s < first.arrived_s for s in cut_s[:3]] in (
      [True, True],
      [True, True, False],
    )


def test_a_slow_cut_is_seen_late_and_never_early():
  def slow(chunk):
    time.sleep(0.03)
    return cut(chunk)

  link = links.EmulatedLink(destination(), 1e6)
  with courier_of(link, slow) as courier:
    begin_s = time.monotonic()
    courier.offer([chunk_of(0)], arrival_s=begin_s, ready_s=begin_s)
    (arrival,) = gather(courier, 1)
  assert arrival.arrived_s >= begin_s + 0.03


def test_nothing_is_seen_before_half_a_round_trip():
  link = links.EmulatedLink(destination(), 1e6, rtt_ms=400.0)
  with courier_of(link) as courier:
    begin_s = time.monotonic()
    courier.offer([chunk_of(0)], arrival_s=begin_s, ready_s=begin_s)
    assert not courier.wait(0.02)
    assert courier.arrived() == []
    (arrival,) = gather(courier, 1)
    assert time.monotonic() >= begin_s + 0.2
  assert 0.2 <= arrival.arrived_s - begin_s < 0.4


def test_cancel_drops_what_is_queued_on_the_link_and_arrived():
  chunk_s = 0.2
  link = links.EmulatedLink(destination(), 1000 * 8 / chunk_s / 1e9)
  mine = [chunk_of(i, request=1) for i in range(4)]
  other = chunk_of(0, request=2)
  with courier_of(link) as courier:
    begin_s = time.monotonic()
    courier.offer(mine, arrival_s=begin_s, ready_s=begin_s)
    time.sleep(1.5 * chunk_s)  # one has arrived, one is on the link
    courier.offer([other], arrival_s=time.monotonic())
    courier.cancel(1)
    assert courier.queued_bytes(1) == 0
    (arrival,) = gather(courier, 1)
    assert arrival.chunk is other
    # The chunk on the link could not be called back.
    assert arrival.arrived_s - begin_s == pytest.approx(3 * chunk_s, abs=0.01)
    retry = [
      streams.Chunk(**{**vars(c), 'key': c.key._replace(generation=1)})
      for c in mine
    ]
    courier.offer(retry, arrival_s=time.monotonic())
    assert [a.chunk for a in gather(courier, 4)] == retry


def test_a_cut_that_fails_after_cancel_is_no_error():
  entered, go_on = threading.Event(), threading.Event()

  def gone(chunk):
    if chunk.request == 1:
      entered.set()
      go_on.wait(TIMEOUT_S)
      raise RuntimeError('Array has been deleted')
    return cut(chunk)

  with courier_of(links.DeviceLink(destination()), gone) as courier:
    courier.offer([chunk_of(0, request=1)], arrival_s=0.0)
    assert entered.wait(TIMEOUT_S)
    courier.cancel(1)
    go_on.set()
    courier.offer([chunk_of(0, request=2)], arrival_s=0.0)
    assert gather(courier, 1)[0].chunk.request == 2


def test_an_exception_reaches_the_consumer():
  def broken(chunk):
    raise KeyError(f'no slot for {chunk.request}')

  with courier_of(links.DeviceLink(destination()), broken) as courier:
    courier.offer([chunk_of(0)], arrival_s=0.0)
    with pytest.raises(streams.TransferError, match='no slot for 0') as info:
      courier.wait(TIMEOUT_S)
    assert isinstance(info.value.__cause__, KeyError)
    with pytest.raises(streams.TransferError):
      courier.arrived()


def test_close_is_prompt_and_may_be_called_twice():
  link = links.EmulatedLink(destination(), 1e-12)  # years a chunk
  courier = courier_of(link)
  courier.offer([chunk_of(0), chunk_of(1)], arrival_s=0.0)
  assert not courier.wait(0.05)
  begin_s = time.monotonic()
  courier.close()
  courier.close()
  assert time.monotonic() - begin_s < 1.0
  assert courier.wait(5.0) is False
  assert 'lynx-courier' not in [t.name for t in threading.enumerate()]


def test_scripted_courier_lets_the_test_decide():
  chunks = [chunk_of(i) for i in range(4)]
  turns = iter([[2], [], [0, 3]])

  def script(under_way):
    wanted = next(turns)
    return sorted(
      (c for c in under_way if c.key.sequence in wanted),
      key=lambda c: wanted.index(c.key.sequence),
    )

  courier = courier_lib.ScriptedCourier(
    links.DeviceLink(destination()), cut, script
  )
  courier.offer(chunks, arrival_s=0.0)
  got = [[a.chunk.key.sequence for a in courier.arrived()] for _ in range(3)]
  assert got == [[2], [], [0, 3]]
  assert courier.wait(0.0)
  courier.cancel(0)
  assert not courier.wait(0.0)


def test_shuffle_delivers_all_and_differs_by_seed():
  orders = set()
  for seed in range(10):
    courier = courier_lib.ScriptedCourier(
      links.DeviceLink(destination()), cut, courier_lib.shuffle(seed)
    )
    courier.offer([chunk_of(i) for i in range(8)], arrival_s=0.0)
    arrivals = []
    for _ in range(16):
      arrivals += courier.arrived()
    assert not courier.wait(0.0)
    check_payloads(arrivals)
    orders.add(tuple(a.chunk.key.sequence for a in arrivals))
    assert sorted(orders.copy().pop()) == list(range(8))
  assert len(orders) > 5


def test_many_requests_in_random_turns_all_arrive():
  """Offers, cancels and polls race with the thread; nothing is lost."""
  rng = random.Random(3)
  link = links.EmulatedLink(destination(), 0.5, rtt_ms=1.0)
  cancelled, got = set(), []
  with courier_of(link) as courier:
    for request in range(30):
      courier.offer(
        [
          chunk_of(
            i, rng.randint(1, 5000), ANCHOR if i < 3 else RESIDUAL, request
          )
          for i in range(6)
        ],
        arrival_s=float(request),
      )
      if rng.random() < 0.3:
        victim = rng.randint(0, request)
        courier.cancel(victim)
        cancelled.add(victim)
      got += courier.arrived()
      got = [a for a in got if a.chunk.request not in cancelled]
      time.sleep(rng.choice((0.0, 0.001)))
    while courier.wait(0.3):
      new = courier.arrived()
      assert not {a.chunk.request for a in new} & cancelled
      got += new
  counts = {r: sum(a.chunk.request == r for a in got) for r in range(30)}
  assert counts == {r: 0 if r in cancelled else 6 for r in range(30)}
  check_payloads(got[::17])
