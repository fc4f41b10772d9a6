# SPDX-License-Identifier: Apache-2.0
"""Requests of a small model between two processes: times and memory.

    python -m experiments.pair_study

Over an emulated link on this machine, and, as root, over a real one of 1
Gbit/s between two namespaces; about two minutes. Both processes share the
machine's cores: where prefill and decode run at once, they slow each other.
"""

import contextlib
import dataclasses
import itertools
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from experiments import namespaces, pair, results
from lynx_jax import handshake, timeline
from lynx_jax.engine import Engine, Mode, Request, Result, State
from lynx_jax.models.transformer import Transformer
from lynx_jax.remote_prefill import RemotePrefill
from lynx_jax.timeline import Phase
from lynx_jax.transport import control, messages, pull
from lynx_jax.transport.receiver import Pace

_KIND = pair.KINDS['bench']
_PAIRS = 5
_LONG_TOKENS, _SHORT_TOKENS = 4096, 1024
_OUTPUT_TOKENS = 500
_PROMPTS = 2  # at once at the sender, when it is to release them
_PACE_GBPS = 0.05  # an Anchor of 1,024 tokens takes 0.4 s
_FAST_GBPS = 0.2
_FREE_S = 1.0  # a sender must have freed everything after that
_WAIT_S = 60.0
_GBIT_MBIT = 1000


def main() -> None:
  """Runs everything and prints it; the real link only as root."""
  for record in itertools.chain(emulated(), real()):
    print(f'{record["name"]}: {record["value"]:.4g} {record["unit"]}')


def emulated() -> Iterator[dict[str, Any]]:
  """Yields what needs no root: several requests, and the sender's memory."""
  prefill = pair.Prefill('bench')
  with contextlib.closing(prefill):
    model = pair.weights(_KIND)
    server = pull.start_server('127.0.0.1')
    pace = Pace(_PACE_GBPS, rtt_ms=1.0)
    with _engine(prefill.address, model, server, pace) as engine:
      yield from _second_request(engine)
      yield from _steps_with_pulls(engine, pace)
    yield from _release(prefill, model, server)


def real() -> Iterator[dict[str, Any]]:
  """Yields TTFT over its bound on a real link of 1 Gbit/s; needs root."""
  with contextlib.ExitStack() as stack:
    stack.enter_context(namespaces.link(_GBIT_MBIT))
    sender, receiver = map(namespaces.inside, namespaces.SPACES)
    host = namespaces.ADDRESSES[0]
    prefill = stack.enter_context(
      contextlib.closing(pair.Prefill('bench', host, sender))
    )
    side = [sys.executable, '-m', 'experiments.pair_study', prefill.address]
    done = subprocess.run(
      [*receiver, *side], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
  yield results.summary_record(
    'ttft_over_bound_1gbit', found['ttft_over_bound'], '', _PAIRS
  )
  yield results.summary_record(
    'exposed_over_bound_1gbit', found['exposed_over_bound'], '', _PAIRS
  )


@contextlib.contextmanager
def _engine(
  address: str, model: Transformer, server: Any, pace: Pace | None
) -> Iterator[Engine]:
  remote = RemotePrefill(
    _KIND.wire,
    handshake.fingerprint(model),
    jax.tree.leaves(nnx.state(model))[0].sharding,
    dial=lambda: control.ClientChannel(address),
    server=server,
    pace=pace,
    window_bytes=_KIND.window_bytes,
  )
  with Engine(remote, model, _KIND.codec, _KIND.engine) as engine:
    engine.warm_up()
    yield engine


def _request(tokens: int, seed: int, output_tokens: int = 8) -> Request:
  return Request(
    prompt=pair.prompt(_KIND, tokens, seed),
    output_tokens=output_tokens,
    mode=Mode.SERIAL,
  )


def _steps(engine: Engine) -> Iterator[None]:
  """Steps an engine; whoever iterates knows when to stop."""
  until_s = time.monotonic() + _WAIT_S
  while True:
    yield
    engine.step()
    assert time.monotonic() < until_s, 'the engine hangs'


def _second_request(engine: Engine) -> Iterator[dict[str, Any]]:
  """A second request's TTFT while the first decodes, against it alone."""
  ratios = []
  for seed in range(_PAIRS):
    alone = engine.generate(_request(_SHORT_TOKENS, seed))
    first = engine.submit(
      _request(_SHORT_TOKENS, 100 + seed, output_tokens=_OUTPUT_TOKENS)
    )
    a = engine.result(first)
    for _ in _steps(engine):
      if len(a.tokens) > 50:
        break
    second = engine.submit(_request(_SHORT_TOKENS, seed))
    b = engine.result(second)
    for _ in _steps(engine):
      if b.provisional_s is not None:
        break
    assert a.state is State.DECODING, 'the first request ended too soon'
    rounds = [e.end_s - e.start_s for e in _events(a, Phase.VERIFY)]
    assert alone.provisional_s is not None
    assert b.provisional_s is not None
    ratios.append(
      b.provisional_s / (alone.provisional_s + statistics.median(rounds))
    )
    for request in (first, second):
      engine.forget(request)
  yield results.summary_record(
    'second_request_ttft_over_bound', statistics.median(ratios), '', _PAIRS
  )


def _steps_with_pulls(engine: Engine, pace: Pace) -> Iterator[dict[str, Any]]:
  """A round's time while another request's chunks come, against without."""
  pairs = []  # seconds with, without
  pace.rate_gbps = _FAST_GBPS
  for seed in range(_PAIRS):
    first = engine.submit(
      _request(_SHORT_TOKENS, 200 + seed, output_tokens=_OUTPUT_TOKENS)
    )
    a = engine.result(first)
    for _ in _steps(engine):
      if len(a.tokens) > 50:
        break
    began_s = time.monotonic()
    second = engine.submit(_request(_LONG_TOKENS, seed))
    b = engine.result(second)
    for _ in _steps(engine):
      if b.prefill_end_s is not None:
        break
    start_s = time.monotonic()
    for _ in _steps(engine):
      if b.state in (State.DECODING, State.DONE) or a.state is State.DONE:
        break
    end_s = time.monotonic()
    engine.forget(second)
    left = len(a.tokens)
    for _ in _steps(engine):
      if a.state is State.DONE or len(a.tokens) > left + 50:
        break
    spans = [
      (e.start_s + a.timeline.arrival_s, e.end_s - e.start_s)
      for e in _events(a, Phase.VERIFY)
      if e.detail['draft_tokens']  # not the first one, nor those of a backlog
    ]
    with_pulls = [s for at_s, s in spans if start_s <= at_s <= end_s]
    without = [s for at_s, s in spans if at_s < began_s or at_s > end_s]
    engine.forget(first)
    assert with_pulls, 'the first request ended too soon'
    pairs.append((statistics.median(with_pulls), statistics.median(without)))
  yield results.summary_record(
    'step_without_pulls_s',
    statistics.median(without_s for _, without_s in pairs),
    's',
    _PAIRS,
  )
  yield results.summary_record(
    'step_time_with_pulls_over_without',
    statistics.median(with_s / without_s for with_s, without_s in pairs),
    f'at {pace.rate_gbps} Gbit/s',
    _PAIRS,
  )


def _events(result: Result, phase: Phase) -> list[timeline.Event]:
  return [e for e in result.timeline.events() if e.name == phase]


def _release(
  prefill: pair.Prefill, model: Transformer, server: Any
) -> Iterator[dict[str, Any]]:
  """How long the sender keeps what nobody needs, for every way to end."""
  wire, fingerprint = _KIND.wire, handshake.fingerprint(model)
  slow = Pace(5e-3)  # a chunk on its way, 0.4 s long, cannot be called back

  def done(engine: Engine) -> None:
    engine.forget(engine.submit(_request(64, 0)))
    engine.generate(_request(_LONG_TOKENS, 0))

  def cancel(engine: Engine) -> None:
    keys = [engine.submit(_request(_LONG_TOKENS, s)) for s in range(_PROMPTS)]
    last = engine.result(keys[-1])
    for _ in _steps(engine):
      if last.prefill_end_s is not None:
        break
    for key in keys:
      engine.cancel(key)

  def raw(change: dict[str, Any], held: bool) -> control.ClientChannel:
    channel = control.ClientChannel(prefill.address)
    channel.send(
      messages.Hello(
        version=messages.VERSION,
        facts=handshake.facts(wire, fingerprint),
        choices=handshake.choices(wire.engine),
        window_bytes=_KIND.window_bytes,
        pulls=True,
      )
    )
    for request in range(_PROMPTS):
      ids = jax.numpy.asarray(pair.prompt(_KIND, _LONG_TOKENS, request))
      submit = messages.Submit(
        request=request,
        generation=0,
        prompt=jax.device_get(ids).astype('<i4').tobytes(),
        manifest=handshake.manifest_hash(wire, _LONG_TOKENS),
        mode='overlapped',
        deadline_in_s=None,
        landed=(),
      )
      channel.send(dataclasses.replace(submit, **change))
    wanted = messages.Done if held else messages.Failed
    left, until_s = _PROMPTS, time.monotonic() + _WAIT_S
    while left:
      channel.send(messages.Beat(sent_s=0.0))
      left -= isinstance(channel.receive(0.1), wanted)
      assert time.monotonic() < until_s, f'no {wanted.__name__}'
    return channel

  before = None
  seconds: dict[str, float] = {}
  held_bytes = 0
  for round_ in range(2):  # the first one warms allocators up
    with _engine(prefill.address, model, server, None) as engine:
      done(engine)
      seconds['done'] = _until_free(prefill, peers=1)
    with _engine(prefill.address, model, server, slow) as engine:
      cancel(engine)
      seconds['cancel'] = _until_free(prefill, peers=1)
    channel = raw({'manifest': 'another'}, held=False)
    seconds['reject'] = _until_free(prefill, peers=1)
    channel.close()
    channel = raw({}, held=True)
    held_bytes = max(held_bytes, prefill.held()[0])
    channel.close()
    seconds['abort'] = _until_free(prefill)
    channel = raw({}, held=True)
    silent_s = time.monotonic()
    seconds['lease'] = max(
      0.0, _until_free(prefill, since_s=silent_s) - _KIND.lease_s
    )
    channel.close()
    if round_ == 0:
      before = prefill.memory()
  assert before is not None
  assert 0 < held_bytes <= _KIND.window_bytes + _KIND.engine.chunk_bytes
  for name, value in seconds.items():
    yield results.summary_record(f'sender_release_{name}_s', value, 's', 1)
  yield results.summary_record(
    'sender_release_s', max(seconds.values()), 's', len(seconds)
  )
  yield results.summary_record(
    'sender_rss_after_over_before', prefill.memory() / before, '', 1
  )


def _until_free(
  prefill: pair.Prefill, peers: int = 0, since_s: float | None = None
) -> float:
  """Returns the seconds until the sender holds nothing for anybody."""
  start_s = time.monotonic() if since_s is None else since_s
  while True:
    live_bytes, prompts, left = prefill.held()
    seconds = time.monotonic() - start_s
    if not live_bytes and not prompts and left <= peers:
      return seconds
    assert seconds < _WAIT_S, f'{live_bytes} bytes are held for ever'
    time.sleep(0.005)


def _decode(address: str) -> None:
  """The decode side of `real`; prints what it has measured."""
  model = pair.weights(_KIND)
  server = pull.start_server(namespaces.ADDRESSES[1])
  raw_gbps = _socket_gbps()
  exposed, bound, prefill_s = [], [], []
  with _engine(address, model, server, None) as engine:
    assert engine.costs is not None
    engine.generate(_request(_LONG_TOKENS, 99))
    for seed in range(_PAIRS):
      result = engine.generate(_request(_LONG_TOKENS, seed))
      assert result.provisional_s is not None
      assert result.prefill_end_s is not None
      first = _events(result, Phase.DRAFT)[0]
      bound_s = timeline.bound(
        result.critical,
        rate_gbps=raw_gbps,
        rtt_ms=0.0,
        step_s=min(engine.costs.draft_s, first.end_s - first.start_s),
      )
      prefill_s.append(result.prefill_end_s)
      exposed.append(result.provisional_s - result.prefill_end_s)
      bound.append(bound_s - result.prefill_end_s)
  typical_s = statistics.median(prefill_s)
  found = {
    'ttft_over_bound': statistics.median(
      (e + typical_s) / (b + typical_s)
      for e, b in zip(exposed, bound, strict=True)
    ),
    'exposed_over_bound': statistics.median(
      e / b for e, b in zip(exposed, bound, strict=True)
    ),
  }
  print(json.dumps(found), flush=True)


def _socket_gbps(size: int = 2**26) -> float:
  """Returns what a plain socket moves over the same link, in reverse.

  The limit is the same both ways.
  """
  with socket.create_server((namespaces.ADDRESSES[1], 0)) as listener:
    port = listener.getsockname()[1]
    code = (
      'import socket;'
      f'c=socket.create_connection(("{namespaces.ADDRESSES[1]}",{port}));'
      f'c.sendall(bytes({size}));c.close()'
    )
    command = namespaces.inside(
      namespaces.SPACES[0], sys.executable, '-c', code
    )
    sender = threading.Thread(
      target=subprocess.run, args=(command,), kwargs={'check': True}
    )
    sender.start()
    connection, _ = listener.accept()
    buffer, left = bytearray(2**20), size
    start_s = time.monotonic()
    with connection:
      while left > 0 and (got := connection.recv_into(buffer)):
        left -= got
    seconds = time.monotonic() - start_s
    sender.join()
  return size * 8e-9 / seconds


if __name__ == '__main__':
  if len(sys.argv) > 1:
    _decode(sys.argv[1])
  else:
    main()
