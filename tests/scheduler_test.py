# SPDX-License-Identifier: Apache-2.0
"""Drives the scheduler with a simulated link; nothing sleeps.

They know no arrays and no threads.
"""

import itertools
import math
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from lynx_jax import config
from lynx_jax.transport import scheduler as scheduler_lib
from lynx_jax.transport import streams

ANCHOR, RESIDUAL, EXACT = streams.Stream


def chunk_of(
  request=0, stream=ANCHOR, token_chunk=0, layer_group=0, sequence=0, size=10
) -> streams.Chunk:
  return streams.Chunk(
    key=streams.ChunkKey(request, 0, token_chunk, sequence),
    stream=stream,
    layer_group=layer_group,
    slices=(),
    anchor_bytes=size if stream is ANCHOR else 0,
    residual_bytes=size if stream is RESIDUAL else 0,
    exact_bytes=size if stream is EXACT else 0,
  )


def drain(scheduler, now_s=0.0):
  """Issues and lands one chunk after the other."""
  order = []
  while (chunk := scheduler.next(now_s)) is not None:
    scheduler.landed(chunk, now_s)
    order.append(chunk)
  return order


def test_order_of_design():
  """Anchors by token chunk, then the rest by layer group, deadline first."""
  late, soon = 0, 1
  parts = list(itertools.product(streams.Stream, range(3), range(2)))
  requests = {}
  for request in (late, soon):
    requests[request] = [
      chunk_of(request, stream, token_chunk, layer_group, 10 * layer_group + s)
      for s, (stream, token_chunk, layer_group) in enumerate(parts)
    ]
  expected = [
    (stream, request, *place)
    for stream in streams.Stream
    for request in (soon, late)
    for place in itertools.product(
      *((range(3), range(2)) if stream is ANCHOR else (range(2), range(3)))
    )
  ]
  for seed in range(20):
    scheduler = scheduler_lib.Scheduler(0)
    offers = [c for chunks in requests.values() for c in chunks]
    random.Random(seed).shuffle(offers)
    for chunk in offers:
      scheduler.offer(
        [chunk],
        arrival_s=5.0 if chunk.request == soon else 4.0,
        ready_s=0.0,
        deadline_s=6.0 if chunk.request == soon else 7.0,
      )
    got = []
    for c in drain(scheduler):
      place = (c.token_chunk, c.layer_group)
      place = place if c.stream is ANCHOR else place[::-1]
      got.append((c.stream, c.request, *place))
    assert got == expected


def test_earlier_arrival_breaks_a_tie_of_deadlines():
  scheduler = scheduler_lib.Scheduler(0)
  scheduler.offer([chunk_of(1)], arrival_s=2.0, ready_s=3.0)
  scheduler.offer([chunk_of(2)], arrival_s=1.0, ready_s=3.0)
  assert [c.request for c in drain(scheduler, 3.0)] == [2, 1]


def test_tail_is_the_last_anchor_of_its_request():
  model = config.ModelConfig(
    name='tiny',
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    model_dim=32,
    ff_dim=32,
    vocab=32,
    context_tokens=4096,
  )
  # With whole layer groups one after the other, each brings its own tail.
  for order in (config.Order.ANCHOR_FIRST, config.Order.INTERLEAVED):
    engine = config.EngineConfig(layer_groups=2, chunk_bytes=5000, order=order)
    wire = streams.WireFormat(model, config.CodecConfig(), engine)
    chunks = [
      c for t in range(wire.token_chunks(600)) for c in wire.manifest(0, 600, t)
    ]
    random.Random(0).shuffle(chunks)
    scheduler = scheduler_lib.Scheduler(0)
    scheduler.offer(chunks, arrival_s=0.0, ready_s=0.0)
    issued = drain(scheduler)
    assert len(issued) == len(chunks)
    segments = [next(c.units()).segment for c in issued if c.stream is ANCHOR]
    first = segments.index(streams.Segment.TAIL)
    assert first > 0
    assert set(segments[first:]) == {streams.Segment.TAIL}


def test_residual_window_limits_what_is_outstanding():
  scheduler = scheduler_lib.Scheduler(25)
  residuals = [chunk_of(stream=RESIDUAL, sequence=i) for i in range(3)]
  scheduler.offer(residuals, arrival_s=0.0, ready_s=0.0)
  assert scheduler.next(0.0) is residuals[0]
  assert scheduler.next(0.0) is residuals[1]
  assert scheduler.next(0.0) is None  # 30 > 25
  exact = chunk_of(stream=EXACT, sequence=3, size=1)
  scheduler.offer([exact], arrival_s=0.0, ready_s=0.0)
  assert scheduler.next(0.0) is None  # it does not slip past a Residual
  assert scheduler.peek(0.0) is residuals[2]
  anchor = chunk_of(request=9, size=1000)
  scheduler.offer([anchor], arrival_s=0.0, ready_s=0.0)
  assert scheduler.next(0.0) is anchor  # no window holds an Anchor back
  assert scheduler.outstanding_bytes() == 1020
  assert scheduler.outstanding_bytes(RESIDUAL) == 20
  assert scheduler.landed(residuals[0], 4.0) == 4.0
  assert scheduler.next(4.0) is residuals[2]
  assert scheduler.next(4.0) is exact  # 21 bytes: the window is one for both
  scheduler.landed(exact, 4.0)
  scheduler.residual_window_bytes = 0
  scheduler.landed(residuals[1], 5.0)
  scheduler.landed(residuals[2], 5.0)
  big = chunk_of(stream=RESIDUAL, sequence=8, size=10**9)
  scheduler.offer([big], arrival_s=0.0, ready_s=5.0)
  assert scheduler.next(5.0) is big  # one may always be outstanding


def test_nothing_goes_before_it_is_ready():
  scheduler = scheduler_lib.Scheduler(0)
  assert scheduler.ready_s() == math.inf
  scheduler.offer([chunk_of(sequence=1)], arrival_s=0.0, ready_s=2.0)
  scheduler.offer([chunk_of(sequence=0)], arrival_s=0.0, ready_s=3.0)
  assert scheduler.next(1.9) is None
  assert scheduler.ready_s() == 2.0
  assert scheduler.peek(2.0).key.sequence == 1
  assert scheduler.ready_s() == -math.inf
  assert scheduler.next(3.0).key.sequence == 0


def test_cancel_drops_what_is_queued_and_keeps_what_is_outstanding():
  scheduler = scheduler_lib.Scheduler(0)
  mine = [chunk_of(1, sequence=i) for i in range(4)]
  scheduler.offer(mine[:3], arrival_s=0.0, ready_s=0.0)
  scheduler.offer(mine[3:], arrival_s=0.0, ready_s=9.0)
  scheduler.offer([chunk_of(2)], arrival_s=1.0, ready_s=0.0)
  assert scheduler.next(0.0) is mine[0]
  assert scheduler.queued_bytes(1) == 30
  scheduler.cancel(1)
  assert scheduler.queued_bytes(1) == 0
  assert scheduler.queued_bytes(2) == 10
  assert scheduler.outstanding_bytes() == 10
  with pytest.raises(ValueError, match='already'):
    scheduler.offer(mine[:1], arrival_s=0.0, ready_s=0.0)
  scheduler.landed(mine[0], 1.0)
  assert scheduler.next(9.0).request == 2
  assert scheduler.next(9.0) is None
  scheduler.offer(mine, arrival_s=0.0, ready_s=9.0)  # a retry
  assert len(drain(scheduler, 9.0)) == 4


def test_a_negative_window_is_refused():
  with pytest.raises(config.ConfigError, match='-1'):
    scheduler_lib.Scheduler(-1)


chunk_lists = st.lists(
  st.builds(
    lambda request, stream, token_chunk, layer_group, size, ready: (
      (request, stream, token_chunk, layer_group, size),
      ready,
    ),
    st.integers(0, 3),
    st.sampled_from(streams.Stream),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(1, 50),
    st.integers(0, 400).map(float),
  ),
  max_size=40,
)


def simulate(offers, window):
  """Sends one byte a second; returns (chunk, ready, start, end), in order."""
  scheduler = scheduler_lib.Scheduler(window)
  ready = {}
  for i, ((request, stream, *place, size), at_s) in enumerate(offers):
    chunk = chunk_of(request, stream, *place, sequence=i, size=size)
    ready[chunk.key] = at_s
    scheduler.offer([chunk], arrival_s=float(request // 2), ready_s=at_s)
  sent, free_s = [], 0.0
  while (ready_s := scheduler.ready_s()) < math.inf:
    start_s = max(free_s, ready_s)
    chunk = scheduler.next(start_s)
    assert chunk is not None, 'the link is idle though a chunk is ready'
    free_s = start_s + chunk.bytes
    scheduler.landed(chunk, free_s)
    sent.append((chunk, ready[chunk.key], start_s, free_s))
  return sent


@hypothesis.given(chunk_lists, st.integers(0, 100))
@hypothesis.settings(max_examples=200, deadline=None)
def test_work_conserving_and_no_anchor_waits_behind_two_chunks(offers, window):
  sent = simulate(offers, window)
  assert len(sent) == len(offers)
  free_s = 0.0
  for i, (chunk, ready_s, start_s, end_s) in enumerate(sent):
    # The link starts at the first instant at which anything is ready.
    assert start_s == max(free_s, min(r for _, r, _, _ in sent[i:]))
    if chunk.stream is ANCHOR:
      overtaken = [
        c
        for c, _, s, e in sent[:i]
        if c.stream is not ANCHOR and e > ready_s and s < start_s
      ]
      assert len(overtaken) <= 1
    free_s = end_s


@hypothesis.given(chunk_lists, st.integers(0, 100), st.randoms())
@hypothesis.settings(max_examples=100, deadline=None)
def test_the_order_does_not_depend_on_the_order_of_offers(offers, window, rng):
  numbered = list(enumerate(offers))
  rng.shuffle(numbered)

  def issue(pairs):
    scheduler = scheduler_lib.Scheduler(window)
    for i, ((request, stream, *place, size), _) in pairs:
      scheduler.offer(
        [chunk_of(request, stream, *place, sequence=i, size=size)],
        arrival_s=float(request // 2),
        ready_s=0.0,
      )
    return [c.key for c in drain(scheduler)]

  assert issue(numbered) == issue(enumerate(offers))
