# SPDX-License-Identifier: Apache-2.0
"""Processes of a side in threads: what they agree on, and what they compute.

Programs are left out: `sides_test` runs them in real processes.
"""

import contextlib
import gc
import itertools
import multiprocessing
import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from multiprocessing import connection
from typing import Any

import numpy as np
import pytest

from lynx_jax import agreed_prefill, lockstep
from lynx_jax.prefill import Prompt
from lynx_jax.requests import Mode
from lynx_jax.sampling import GREEDY
from lynx_jax.sender import PrefillDone, PrefillFailed
from lynx_jax.timeline import Timeline
from lynx_jax.transport import control
from lynx_jax.transport import exchange as exchange_lib
from lynx_jax.transport.courier import Arrival
from lynx_jax.transport.exchange import Ended, Exchange
from lynx_jax.transport.streams import Chunk, ChunkKey, Stream

PROCESSES = 3
BOUND_S = 20.0


def exchanges(count: int = PROCESSES) -> list[Exchange]:
  """Returns linked exchanges, one a process."""
  pairs = [multiprocessing.Pipe() for _ in range(count - 1)]
  first = Exchange([one for one, _ in pairs], 0)
  return [first, *(Exchange([p], i) for i, (_, p) in enumerate(pairs, 1))]


def in_each(
  run: Callable[[int, Exchange], Any], count: int = PROCESSES
) -> list:
  """Runs a function in a thread a process; returns what each has returned."""
  linked = exchanges(count)
  with futures.ThreadPoolExecutor(count) as pool:
    found = [pool.submit(run, i, own) for i, own in enumerate(linked)]
    try:
      return [one.result(timeout=BOUND_S) for one in found]
    finally:
      for own in linked:
        own.close()


def test_who_does_not_know_the_secret_keeps_nobody_waiting():
  listener = socket.create_server(('127.0.0.1', 0))
  address, secret = listener.getsockname(), b'known to the side'

  def knock(key: bytes) -> bool:
    try:
      with connection.Client(address, authkey=key) as link:
        link.send_bytes(b'here')
        return link.recv_bytes() == b'welcome'
    except (OSError, EOFError, multiprocessing.AuthenticationError):
      return False

  with listener, contextlib.ExitStack() as strangers:
    for junk in (b'', b'GET / HTTP/1.1\r\n\r\n', b'\xff' * 12, bytes(4)):
      stranger = socket.create_connection(address)
      strangers.enter_context(stranger).sendall(junk)
    socket.create_connection(address).close()
    with futures.ThreadPoolExecutor() as pool:
      knocks = [pool.submit(knock, key) for key in (b'guess', secret, secret)]
      admitted = pool.submit(exchange_lib.admit, listener, secret, 2)
      for link in admitted.result(timeout=BOUND_S):
        assert link.recv_bytes() == b'here'
        link.send_bytes(b'welcome')
      heard = [one.result(timeout=BOUND_S) for one in knocks]
  assert heard == [False, True, True]


class Side:
  """A prefill side of which chunks and records come when `script` says so.

  Args:
    script: (request, what) in the order of its coming: a sequence number, a
      `PrefillDone` or an exception.
    rng: how much comes at once.
  """

  def __init__(self, script: list[tuple[int, Any]], rng: random.Random):
    self._script, self._random = script, rng
    self._records: list[Any] = []
    self.transport = self

  def submit(self, request: int, *rest: Any, **options: Any) -> None:
    pass

  def drop(self, request: int) -> None:
    self._script = [one for one in self._script if one[0] != request]

  def wait(self, timeout_s: float) -> bool:
    time.sleep(self._random.choice((0.0, 0.001)))
    return True

  def arrived(self) -> list[Arrival]:
    arrivals = []
    for _ in range(self._random.randint(0, 3)):
      if self._script:
        request, what = self._script.pop(0)
        if isinstance(what, int):
          arrivals.append(Arrival(chunk(request, what), what, 0.0, 0.1 * what))
        elif isinstance(what, Exception):
          self._records.append(PrefillFailed(request, what, 0.0))
        else:
          self._records.append(what)
    return arrivals

  def records(self) -> list[Any]:
    records, self._records = self._records, []
    return records


def chunk(request: int, sequence: int) -> Chunk:
  return Chunk(
    key=ChunkKey(request, 0, 0, sequence),
    stream=Stream.ANCHOR,
    layer_group=0,
    slices=(),
    anchor_bytes=1,
    residual_bytes=0,
  )


def submit(agreed: agreed_prefill.AgreedPrefill, request: int) -> None:
  agreed.submit(
    request, np.zeros(1, np.int32), mode=Mode.SERIAL, timeline=Timeline(0.0)
  )


@pytest.mark.parametrize('seed', range(20))
def test_all_see_the_same_in_the_same_order(seed):
  """Whatever comes where in which order; one request fails in one process."""
  plan = random.Random(seed)
  count = plan.randint(1, 8)
  fails_in = plan.choice([None, *range(PROCESSES)])
  cancelled_at = plan.choice([None, 3])

  def run(process: int, exchange: Exchange) -> tuple[list[Any], list[Any]]:
    rng = random.Random(PROCESSES * seed + process)
    script: list[tuple[int, Any]] = [
      (request, sequence) for request in range(3) for sequence in range(count)
    ]
    script += [(r, PrefillDone(r, 7 + r, (), 0.0, 0.0)) for r in range(3)]
    if process == fails_in:
      script.append((1, ValueError('broken')))
    rng.shuffle(script)
    agreed = agreed_prefill.AgreedPrefill(Side(script, rng), exchange)
    for request in range(3):
      submit(agreed, request)
    seen: list[Any] = []
    took: list[Any] = []
    left = {0, 1, 2}
    for step in itertools.count():
      if step == cancelled_at:
        agreed.drop(2)
        left.discard(2)
      for record in agreed.records():
        seen.append((type(record).__name__, record.request))
        if isinstance(record, PrefillFailed):
          agreed.drop(record.request)
          left.discard(record.request)
          known = isinstance(record.error, agreed_prefill.ProcessFailed)
          assert known == (process != fails_in)
          assert 'broken' in str(record.error)
      for arrival in agreed.arrived():
        seen.append(arrival.chunk.key)
        took.append(arrival.seconds)
        assert arrival.payload == arrival.chunk.key.sequence
      for request in [*left]:
        keys = [k for k in seen if k[0] == request and k != ('x',)]
        if len(keys) == count and ('PrefillDone', request) in seen:
          agreed.drop(request)
          left.discard(request)
      if not left:
        return seen, took
      agreed.wait(1.0)
    raise AssertionError

  found = in_each(run)
  assert all(one == found[0] for one in found)
  seen, _ = found[0]
  whole = {0} | ({1} if fails_in is None else set())
  for request in whole:
    assert len([k for k in seen if k[0] == request]) == count


def test_processes_that_are_asked_for_different_things_are_told():
  def run(process: int, exchange: Exchange) -> None:
    agreed = agreed_prefill.AgreedPrefill(Side([], random.Random(0)), exchange)
    submit(agreed, 0 if process else 1)
    with pytest.raises(agreed_prefill.OutOfStep, match='submit'):
      agreed.records()

  in_each(run)


def test_a_process_that_is_gone_is_a_lost_peer():
  def run(process: int, exchange: Exchange) -> None:
    agreed = agreed_prefill.AgreedPrefill(Side([], random.Random(0)), exchange)
    agreed.records()
    if process == 1:
      exchange.close()
      return
    with pytest.raises(control.PeerLost):
      [*iter(agreed.records, None)]
    exchange.close()  # as the system does once it has ended

  in_each(run)


@pytest.mark.parametrize('who', range(PROCESSES))
@pytest.mark.parametrize('reason', ['the disk is full', ''])
def test_a_process_that_leaves_says_why(who, reason):
  """Others hear it, perhaps from process 0, and nobody waits for it."""

  def run(process: int, exchange: Exchange) -> None:
    lost: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    exchange.watch(lost.put)
    exchange.gather('all are there')
    if process == who:
      exchange.leave(reason)
      return
    with pytest.raises(control.PeerLost) as found:
      exchange.gather('more')
    exchange.leave(str(found.value))
    told = lost.get(timeout=BOUND_S)
    assert told is found.value
    assert reason in str(told)
    if 0 in (process, who):  # linked with it
      assert f'process {who} ' in str(told)
      assert isinstance(told, Ended) == (not reason)
    assert lost.empty()

  in_each(run)


def test_a_process_that_dies_is_missed_whatever_others_do():
  """As in a program that waits for it: nobody listens."""

  def run(process: int, exchange: Exchange) -> None:
    lost: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    exchange.watch(lost.put)
    if process == 1:
      exchange.gather('all are there')
      exchange.close()
      return
    exchange.gather('all are there')
    error = lost.get(timeout=BOUND_S)
    assert isinstance(error, control.PeerLost)
    assert 'process 1 of this side is gone' in str(error)

  in_each(run, count=2)


class Prefill:
  """Computes four token chunks a prompt; the last token is the result."""

  CHUNKS = 4

  def __init__(self):
    self.steps: list[tuple[int, int]] = []  # of all prompts
    self.prompts = 0

  def chunks(self, prompt: np.ndarray, sampling: Any):
    assert sampling == GREEDY
    name = int(prompt[0])
    state = Prompt(len(prompt), 0, ())
    for index in range(self.CHUNKS):
      if name < 0 and index == 2:
        raise ValueError('not finite')
      self.steps.append((name, index))
      state.token = 10 * name + index
      yield state


@pytest.mark.parametrize('seed', range(20))
def test_all_compute_the_same_in_the_same_order(seed):
  """Whoever is asked first, last, again, or drops a prompt half-way."""

  def run(process: int, exchange: Exchange) -> list[tuple[int, int]]:
    rng = random.Random(PROCESSES * seed + process)
    prefill = Prefill()
    shared = lockstep.Lockstep(exchange, lambda form: prefill)

    def take(name: int) -> None:
      time.sleep(rng.uniform(0, 0.02))
      stop = rng.choice((Prefill.CHUNKS, Prefill.CHUNKS, rng.randint(0, 3)))
      steps = shared.prefill((0, ('a', 1))).chunks(
        np.asarray([name], np.int32), GREEDY
      )
      if stop < Prefill.CHUNKS:
        steps = itertools.islice(steps, stop)
      token = -1
      for index, prompt in enumerate(steps):
        assert prompt.token >= 10 * name + index
        token = prompt.token
      assert stop < Prefill.CHUNKS or token == 10 * name + stop - 1

    def fail() -> None:
      with pytest.raises(ValueError, match='not finite'):
        for _ in shared.chunks((0,), np.asarray([-1], np.int32), GREEDY):
          pass

    names = [1, 2, 2, 3]
    rng.shuffle(names)
    threads = [threading.Thread(target=take, args=(n,)) for n in names]
    threads.append(threading.Thread(target=fail))
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    take(names[0])  # again
    gc.collect()
    exchange_until_empty(shared)
    return prefill.steps

  found = in_each(run)
  shortest = min(map(len, found))  # the others may have been told to go on
  assert all(steps[:shortest] == found[0][:shortest] for steps in found)
  assert shortest >= Prefill.CHUNKS


def exchange_until_empty(shared: lockstep.Lockstep) -> None:
  """Waits until nothing is held any more."""
  until_s = time.monotonic() + BOUND_S
  while shared._computations:
    assert time.monotonic() < until_s, 'a prompt is held for ever'
    time.sleep(0.001)


def test_prompts_of_a_side_that_falls_apart_fail():
  def run(process: int, exchange: Exchange) -> None:
    shared = lockstep.Lockstep(exchange, lambda form: Prefill())
    if process == 1:
      time.sleep(0.05)
      shared.close()
      return
    time.sleep(0.1)
    with pytest.raises(control.PeerLost):
      [*shared.chunks((0,), np.asarray([1], np.int32), GREEDY)]

  in_each(run, count=2)
