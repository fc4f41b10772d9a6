# SPDX-License-Identifier: Apache-2.0
"""Tests the bound against brute force, the share, and the timeline.

They know no clock.
"""

import itertools
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from lynx_jax import timeline

BYTE_A_SECOND = 8e-9  # Gbit/s


@pytest.mark.parametrize(
  ('chunks', 'expected'),
  [
    ([(1.0, 2), (1.0, 3)], 6),
    ([(1.0, 2), (5.0, 3)], 8),
    ([(1.0, 9), (5.0, 3)], 13),
  ],
)
def test_bound_follows_the_table(chunks, expected):
  got = timeline.bound(
    chunks, rate_gbps=BYTE_A_SECOND, rtt_ms=1000.0, step_s=0.25
  )
  assert got == pytest.approx(expected + 0.5 + 0.25)


def test_serial_bound_telescopes():
  sizes = [262_144] * 20 + [77]
  got = timeline.bound(
    [(3.7, size) for size in sizes], rate_gbps=0.033, rtt_ms=10.0, step_s=0.1
  )
  assert got == pytest.approx(3.7 + sum(sizes) * 8 / 33e6 + 0.005 + 0.1)


small = st.tuples(st.integers(0, 20).map(float), st.integers(1, 9))


@hypothesis.given(st.lists(small, min_size=1, max_size=5))
@hypothesis.settings(deadline=None)
def test_no_order_is_faster_than_the_bound_in_order_of_readiness(chunks):
  def end(order):
    return timeline.bound(
      order, rate_gbps=BYTE_A_SECOND, rtt_ms=0.0, step_s=0.0
    )

  best = min(end(order) for order in itertools.permutations(chunks))
  assert end(sorted(chunks)) == pytest.approx(best)
  # No work-conserving link can do better than its rate from any chunk on.
  for ready_s, _ in chunks:
    rest = sum(size for r, size in chunks if r >= ready_s)
    assert best >= ready_s + rest - 1e-9


def test_bound_needs_a_chunk():
  with pytest.raises(ValueError, match='at least one'):
    timeline.bound([], rate_gbps=1.0, rtt_ms=0.0, step_s=0.0)


def test_share_and_its_inverse():
  times = {'prefill_s': 3.7, 'step_s': 0.08}
  rate = timeline.rate_for_share(0.6, 11_000_000, **times)
  assert timeline.share(11_000_000, rate_gbps=rate, **times) == (
    pytest.approx(0.6)
  )
  # 60 % of the whole is 1.5 times the rest.
  assert 11e6 * 8 / (rate * 1e9) == pytest.approx(1.5 * 3.78)
  for wrong in (0.0, 1.0, -0.1, math.nan):
    with pytest.raises(ValueError, match='between 0 and 1'):
      timeline.rate_for_share(wrong, 1, **times)


def test_timeline_counts_from_the_arrival():
  line = timeline.Timeline(100.0)
  line.add(timeline.Phase.PREFILL, 101.0, 102.0, token_chunk=0)
  line.add(timeline.Phase.PREFILL, 102.0, 104.0, token_chunk=1)
  line.add(timeline.Phase.COMMIT, 105.0, tokens=1)
  assert [e.name for e in line.events()] == [
    'arrival',
    'prefill',
    'prefill',
    'commit',
  ]
  assert line.first_s(timeline.Phase.PREFILL) == 1.0
  assert line.last_s(timeline.Phase.PREFILL) == 4.0
  assert line.seconds(timeline.Phase.PREFILL) == 3.0
  assert line.events(timeline.Phase.COMMIT)[0] == timeline.Event(
    timeline.Phase.COMMIT, 5.0, 5.0, {'tokens': 1}
  )
  assert line.first_s(timeline.Phase.DONE) is None
  with pytest.raises(ValueError, match='before its start'):
    line.add(timeline.Phase.DRAFT, 3.0, 2.0)
