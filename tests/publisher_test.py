# SPDX-License-Identifier: Apache-2.0
"""The window of a publisher, with links and receivers that are simulated."""

import random
import threading

import hypothesis
import jax.numpy as jnp
from hypothesis import strategies as st

from lynx_jax.transport import streams
from lynx_jax.transport.publisher import Publisher
from tests.scheduler_test import chunk_of

WINDOW_BYTES = 100
PATIENCE_S = 10.0


class Memory:
  """Counts what is published, as `pull.Source`."""

  def __init__(self):
    self.published = 0

  def publish(self, payload):
    self.published += 1
    return self.published

  def forget(self, uuid):
    pass

  def reset(self):
    pass


@hypothesis.given(
  sizes=st.lists(
    st.tuples(st.sampled_from(streams.Stream), st.integers(1, 120)),
    min_size=1,
    max_size=30,
  ),
  seed=st.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=50, deadline=None)
def test_no_more_than_a_window_is_published(sizes, seed):
  """Whatever chunks there are, and in whatever order they land."""
  chance = random.Random(seed)
  chunks = [
    chunk_of(stream=stream, sequence=sequence, size=size)
    for sequence, (stream, size) in enumerate(sizes)
  ]
  payload = (((jnp.zeros(4, jnp.uint8),),),)
  cutting, failures = [], []
  announced, arrived = [], threading.Semaphore(0)

  def cut(chunk):
    cutting.append((publisher.live_bytes, chunk.bytes))
    return payload

  def announce(announcements):
    announced.extend(announcements)
    for _ in announcements:
      arrived.release()

  def fail(error):
    failures.append(error)
    arrived.release()

  publisher = Publisher(Memory(), cut, announce, fail, WINDOW_BYTES)
  try:
    publisher.offer(chunks, arrival_s=0.0, ready_s=0.0)
    landed = set()
    while len(landed) < len(chunks):
      assert arrived.acquire(timeout=PATIENCE_S)
      assert not failures
      there = [a for a in announced if a.uuid not in landed]
      # The oldest of them at least: a receiver fetches in this order.
      some = chance.sample(there[1:], chance.randint(0, len(there) - 1))
      for one in (there[0], *some):
        landed.add(one.uuid)
        publisher.landed([one.uuid])
      for _ in some:
        arrived.acquire()
    assert publisher.live_bytes == 0
    assert not failures
  finally:
    publisher.close()
  assert {a.chunk.key for a in announced} == {c.key for c in chunks}
  for live, size in cutting:
    assert live <= max(WINDOW_BYTES, size)
