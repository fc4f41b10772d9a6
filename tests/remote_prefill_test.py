# SPDX-License-Identifier: Apache-2.0
"""Prefill in another process: equal output, whatever goes wrong.

One prefill process lives through all tests that leave it alive. Every fault
must end within a bound, in the reference output or in a typed error.
"""

import contextlib
import dataclasses
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
from flax import nnx

from experiments import fault_schedules, pair
from lynx_jax import handshake
from lynx_jax.config import ConfigError, TensorCodec
from lynx_jax.engine import Engine, Mode, Request, Result, Sampling, State
from lynx_jax.patience import Patience, Policy
from lynx_jax.prefill_server import PrefillServer
from lynx_jax.remote_prefill import RemotePrefill, TransferStalled
from lynx_jax.transport import control, messages, pull
from lynx_jax.transport.fault_plan import Fault, FaultPlan
from lynx_jax.transport.faults import Faults
from lynx_jax.transport.receiver import CorruptChunk, Pace
from lynx_jax.transport.streams import WireFormat
from tests import engines, transfers

# One worker: the processes share two cores, and the engine's programs.
pytestmark = pytest.mark.xdist_group('transfer')
WIRE = transfers.FORMATS[0]
OUTPUTS = engines.OUTPUT_TOKENS
LENGTHS = (200, 97, 150, 33)
HASTY = Patience(handshake_s=2.0, reconnect_s=3.0, stall_s=0.3)
HASTIER = Patience(handshake_s=1.0, reconnect_s=1.0, stall_s=0.3)
BOUND_S = 30.0  # much more than any recovery takes, much less than for ever
SLOW_GBPS = 0.001  # the longest prompt's Anchor takes 0.2 s


@pytest.fixture(scope='module')
def children(tmp_path_factory) -> Iterator[Callable[[], transfers.Child]]:
  """Returns a prefill process, and starts the next one meanwhile."""
  cache = tmp_path_factory.mktemp('programs')  # the next ones start sooner
  started = [transfers.Child(cache)]

  def take() -> transfers.Child:
    started.append(transfers.Child(cache))
    return started[-2]

  yield take
  for child in started:
    child.close()


@pytest.fixture(scope='module')
def child(children, fingerprint, decode_model) -> transfers.Child:
  """The process that lives through all tests, with all programs compiled."""
  child = children()
  with _engine(child, fingerprint, decode_model) as engine:
    engine.warm_up()  # this side's, too: compiling must not use up a bound
  return child


@pytest.fixture(scope='module')
def fingerprint() -> str:
  return handshake.fingerprint(engines.model())


@pytest.fixture(scope='module')
def decode_model():
  graph, params = nnx.split(engines.model())
  return nnx.merge(graph, jax.device_put(params, engines.DECODE_DEVICE))


@pytest.fixture(scope='module')
def server():
  """This process's transfer server."""
  return pull.start_server('127.0.0.1')


@pytest.fixture(scope='module')
def references() -> dict[int, list[int]]:
  bench = engines.bench('lynx')
  return {n: bench.reference(engines.prompt(n), _how(n)) for n in LENGTHS}


@contextlib.contextmanager
def _engine(
  where: transfers.Child | Callable[[], str],
  fingerprint: str,
  model,
  server=None,
  wire: WireFormat = WIRE,
  **options,
) -> Iterator[Engine]:
  """Yields an engine that prefills elsewhere."""
  address = where if callable(where) else lambda: where.address
  remote = RemotePrefill(
    wire,
    fingerprint,
    transfers.placement(),
    dial=lambda: control.ClientChannel(address()),
    server=server,
    **({'patience': HASTY} | options),
  )
  with Engine(remote, model, wire.codec, wire.engine) as engine:
    yield engine


def _submit(engine: Engine, lengths=LENGTHS) -> list[int]:
  return [
    engine.submit(
      Request(
        prompt=engines.prompt(n).tolist(),
        output_tokens=OUTPUTS,
        mode=Mode.SERIAL,
        sampling=_how(n),
      )
    )
    for n in lengths
  ]


def _how(prompt_tokens: int) -> Sampling:
  """Lets every other length sample, so that token 1 is sampled over there."""
  return engines.SAMPLINGS[1] if prompt_tokens == 97 else engines.SAMPLINGS[0]


def _finish(engine: Engine, keys: list[int]) -> list[Result]:
  until_s = time.monotonic() + BOUND_S
  while engine.busy:
    engine.step()
    assert time.monotonic() < until_s, 'the engine hangs'
  return [engine.forget(key) for key in keys]


def _check(results: list[Result], references: dict[int, list[int]]) -> None:
  for result in results:
    assert result.error is None
    assert result.state is State.DONE
    assert result.tokens == references[result.prompt_tokens]
    assert not result.unverified


def _until(condition: Callable[[], bool], within_s: float) -> None:
  until_s = time.monotonic() + within_s
  while not condition():
    assert time.monotonic() < until_s, f'not within {within_s} s'
    time.sleep(0.01)


@pytest.fixture(params=['pulled', 'bytes'])
def link(request, server):
  """The transfer server of either link."""
  return server if request.param == 'pulled' else None


def test_output_equals_the_reference(
  child, fingerprint, decode_model, references, link
):
  with _engine(child, fingerprint, decode_model, link) as engine:
    tokens = engine.reference(engines.prompt(200).tolist(), OUTPUTS)
    assert tokens == references[200]
    keys = _submit(engine)
    doomed = engine.submit(
      Request(
        prompt=engines.prompt(200).tolist(),
        output_tokens=OUTPUTS,
        mode=Mode.SERIAL,
      )
    )
    for _ in range(5):
      engine.step()
    engine.cancel(doomed)
    results = _finish(engine, keys)
    _check(results, references)
    for result in results:
      sizes = WIRE.stream_bytes(result.prompt_tokens)
      assert (result.anchor_bytes, result.residual_bytes) == sizes
      spans = result.timeline.events()
      assert {'prefill', 'split'} <= {str(span.name) for span in spans}
      # One clock: the sender's times are turned into ours.
      assert -0.1 < result.prefill_end_s <= result.token_1_s + 0.1
    _until(lambda: child.held() == (0, 0, 1), within_s=1.0)
  _until(lambda: child.held() == (0, 0, 0), within_s=1.0)


@pytest.mark.parametrize('fault', [None, Fault.UNANNOUNCED])
def test_an_exact_target_arrives_from_another_process(
  child, fingerprint, decode_model, server, fault
):
  """Lengths of strings reach the manifest, even if an announcement is lost."""
  dense = engines.bench('dense')
  expected = {n: dense.reference(engines.prompt(n), _how(n)) for n in (200, 97)}
  # The sender compiles here, which a busy machine makes slow.
  options = {'patience': dataclasses.replace(HASTY, stall_s=5.0)}
  if fault is not None:
    options['patience'] = dataclasses.replace(HASTY, stall_s=1.0)
    options['faults'] = Faults(FaultPlan(seed=1, chances={fault: 0.5}, most=3))
  wire = transfers.FORMATS[2]
  with _engine(
    child, fingerprint, decode_model, server, wire, **options
  ) as engine:
    if fault is None:
      tokens = engine.reference(engines.prompt(200).tolist(), OUTPUTS)
      assert tokens == expected[200]
    results = _finish(engine, _submit(engine, (200, 97)))
    _check(results, expected)
    assert all(result.exact_bytes for result in results)
    assert fault is None or options['faults'].made[fault]
    _until(lambda: child.held() == (0, 0, 1), within_s=1.0)


def test_an_emulated_link_keeps_its_rate(
  child, fingerprint, decode_model, references, server
):
  pace = Pace(SLOW_GBPS, rtt_ms=4.0)
  with _engine(child, fingerprint, decode_model, server, pace=pace) as engine:
    (result,) = _finish(engine, _submit(engine, (200,)))
    _check([result], references)
    anchor = WIRE.stream_bytes(200).anchor
    transfer_s = anchor * 8 / (SLOW_GBPS * 1e9)
    exposed_s = result.anchor_s - result.prefill_end_s
    # Half an RTT each for the announcement, the request and the payload.
    assert transfer_s + 0.006 <= exposed_s <= 1.1 * (transfer_s + 0.006) + 0.02
    pace.rate_gbps = SLOW_GBPS / 1000  # references are not sent over it
    start_s = time.monotonic()
    assert engine.reference(engines.prompt(33).tolist(), 2)
    assert time.monotonic() - start_s < 5.0


def test_an_anchor_overtakes_the_residual_of_another_request(
  child, fingerprint, decode_model, references, server
):
  pace = Pace(SLOW_GBPS / 3)
  with _engine(child, fingerprint, decode_model, server, pace=pace) as engine:
    first = _submit(engine, (200,))
    while not engine.result(first[0]).residual_bytes:
      engine.step()
    second = _submit(engine, (97,))
    while engine.result(second[0]).anchor_s is None or (
      engine.result(second[0]).state is State.RECEIVING
    ):
      engine.step()
    assert engine.result(first[0]).state is State.DRAFTING
    _check(_finish(engine, first + second), references)


@pytest.mark.parametrize('seed', range(20))
def test_a_fault_schedule_ends_well(
  child, fingerprint, decode_model, references, server, seed
):
  """Twenty of the schedules that `experiments.fault_study` runs 300 of."""
  bench = fault_schedules.Bench(
    wire=WIRE,
    model=decode_model,
    fingerprint=fingerprint,
    sharding=transfers.placement(),
    server=server,
    address=lambda: child.address,
    suffer=None,  # see below for processes that die or stop
    held=child.held,
    prompt=lambda length: engines.prompt(length).tolist(),
    sampling=_how,
    references=references,
    output_tokens=OUTPUTS,
  )
  outcome = bench.run(fault_schedules.draw(seed, LENGTHS, peers=False))
  assert outcome.good, outcome


def test_a_chunk_that_is_always_corrupt_is_a_typed_error(
  child, fingerprint, decode_model, references, server
):
  faults = Faults(FaultPlan(chances={Fault.CORRUPT: 1.0}, most=30))
  with _engine(
    child, fingerprint, decode_model, server, faults=faults
  ) as engine:
    (result,) = _finish(engine, _submit(engine, (33,)))
    assert result.state is State.FAILED
    assert isinstance(result.error, CorruptChunk)
    assert result.tokens == references[33][: len(result.tokens)]
    while faults.draw((Fault.CORRUPT,)):
      pass
    _check(_finish(engine, _submit(engine)), references)


class _Withheld:
  """A channel that never announces the chunks that `keep` refuses."""

  def __init__(
    self, channel, keep: Callable[[messages.Published, tuple], bool]
  ):
    self._channel, self._keep = channel, keep

  def receive(self, timeout_s: float):
    message = self._channel.receive(timeout_s)
    if isinstance(message, messages.Published):
      kept = tuple(c for c in message.chunks if self._keep(message, c))
      message = dataclasses.replace(message, chunks=kept)
    return message

  def __getattr__(self, name):
    return getattr(self._channel, name)


def _is_anchor(message: messages.Published, entry: tuple) -> bool:
  chunks = WIRE.manifest(0, message.prompt_tokens, entry[0])
  return not chunks[entry[1]].residual_bytes


@pytest.mark.parametrize('policy', Policy)
def test_a_residual_that_never_comes_ends_by_the_policy(
  child, fingerprint, decode_model, references, server, policy
):
  patience = dataclasses.replace(HASTY, residual=policy, stall_s=0.1, retries=2)
  withheld = True

  def keep(message, entry):
    return not withheld or _is_anchor(message, entry)

  remote = RemotePrefill(
    WIRE,
    fingerprint,
    transfers.placement(),
    dial=lambda: _Withheld(control.ClientChannel(child.address), keep),
    server=server,
    patience=patience,
  )
  with Engine(remote, decode_model, WIRE.codec, WIRE.engine) as engine:
    keys = _submit(engine, (200,))
    if policy is Policy.WAIT:
      engine.step()
      while engine.result(keys[0]).state is not State.DRAFTING:
        engine.step()
      until_s = time.monotonic() + 2.0
      while time.monotonic() < until_s:
        engine.step()
      assert engine.result(keys[0]).state is State.DRAFTING
      engine.cancel(keys[0])
      return
    if policy is Policy.RECOMPUTE:
      engine.step()
      entry = remote._requests[keys[0]]
      while entry.recomputed == 0:
        engine.step()
      withheld = False
      _check(_finish(engine, keys), references)
      return
    (result,) = _finish(engine, keys)
    if policy is Policy.FAIL:
      assert result.state is State.FAILED
      assert isinstance(result.error, TransferStalled)
    else:
      assert result.state is State.DONE
      assert result.unverified
      assert len(result.tokens) == OUTPUTS
      assert result.residual_bytes == 0


PHASES = {
  'before the anchor': lambda result: True,
  'during the anchor': lambda result: result.anchor_bytes > 0,
  'after the anchor': lambda result: result.state is State.DRAFTING,
  'during the residual': lambda result: result.residual_bytes > 0,
}


@pytest.mark.parametrize('phase', PHASES)
def test_a_killed_sender_comes_back_on_another_port(
  children, child, fingerprint, decode_model, references, server, phase
):
  first = children()
  living = [first]
  with _engine(
    lambda: living[0].address,
    fingerprint,
    decode_model,
    server,
    pace=Pace(SLOW_GBPS),
  ) as engine:
    keys = _submit(engine, (200, 97))
    while not PHASES[phase](engine.result(keys[0])):
      engine.step()
    living[0] = child
    first.signal(signal.SIGKILL)
    _check(_finish(engine, keys), references)


def test_a_sender_that_is_killed_while_it_warms_up_is_replaced(
  children, child, fingerprint
):
  first = children()
  living = [first]
  remote = RemotePrefill(
    WIRE,
    fingerprint,
    transfers.placement(),
    dial=lambda: control.ClientChannel(living[0].address),
    patience=HASTY,
  )
  with contextlib.closing(remote):
    first.signal(signal.SIGSTOP)  # it cannot answer any more
    kinds = remote.warm_up()
    next(kinds)
    living[0] = child
    first.signal(signal.SIGKILL)
    warm = threading.Thread(target=list, args=(kinds,), daemon=True)
    warm.start()
    _until(lambda: not warm.is_alive(), within_s=BOUND_S)
    assert remote._lost is None


def test_a_damaged_chunk_of_nobody_leaves_no_trace(child, fingerprint):
  remote = RemotePrefill(
    WIRE,
    fingerprint,
    transfers.placement(),
    dial=lambda: control.ClientChannel(child.address),
    patience=HASTY,
  )
  with contextlib.closing(remote):
    chunk, *_ = WIRE.manifest(7, 200, 0)
    remote._on_damaged(chunk, 1, CorruptChunk('of a request that is gone'))
    assert not remote._tries._damaged


def test_a_sender_that_never_comes_back_is_a_typed_error(
  children, fingerprint, decode_model, server
):
  gone = children()
  with _engine(
    gone,
    fingerprint,
    decode_model,
    server,
    pace=Pace(SLOW_GBPS / 10),  # it must not end while the sender does
    patience=HASTIER,
  ) as engine:
    keys = _submit(engine, (200, 33))
    while not engine.result(keys[0]).anchor_bytes:
      engine.step()
    gone.close()
    start_s = time.monotonic()
    results = _finish(engine, keys)
    assert time.monotonic() - start_s < 2 * HASTIER.reconnect_s + 1.0
    for result in results:
      assert result.state is State.FAILED
      assert isinstance(result.error, control.PeerLost)
    (late,) = _finish(engine, _submit(engine, (33,)))
    assert isinstance(late.error, control.PeerLost)
    with pytest.raises(control.PeerLost):
      engine.reference([1, 2, 3], 2)


def test_a_stopped_sender_is_waited_for_and_then_given_up(
  child, fingerprint, decode_model, references, server
):
  with _engine(
    child,
    fingerprint,
    decode_model,
    server,
    pace=Pace(SLOW_GBPS),
    patience=HASTIER,
  ) as engine:
    keys = _submit(engine, (200,))
    while not engine.result(keys[0]).anchor_bytes:
      engine.step()
    child.signal(signal.SIGSTOP)
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
      engine.step()
    child.signal(signal.SIGCONT)
    _check(_finish(engine, keys), references)

    keys = _submit(engine, (200,))
    while not engine.result(keys[0]).anchor_bytes:
      engine.step()
    child.signal(signal.SIGSTOP)
    (result,) = _finish(engine, keys)
    assert isinstance(result.error, control.PeerLost)
    child.signal(signal.SIGCONT)
    _check(_finish(engine, _submit(engine)), references)


@pytest.mark.parametrize('pulls', [True, False])
def test_a_killed_receiver_frees_the_sender(child, pulls):
  command = [sys.executable, '-m', 'tests.decode_process', child.address]
  victim = subprocess.Popen(
    [*command, str(int(pulls))],
    cwd=pair.ROOT,
    env=os.environ | transfers.ENVIRONMENT,
  )
  try:
    # The first prompt's bytes may be there before the second is asked for.
    _until(lambda: child.held()[1:] == (2, 1), within_s=BOUND_S)
    _until(lambda: child.held()[0] > 0, within_s=BOUND_S)
    live, prompts, peers = child.held()
    assert 0 < live <= transfers.WINDOW_BYTES
    assert (prompts, peers) == (2, 1)
  finally:
    victim.kill()
    victim.wait()
  _until(lambda: child.held() == (0, 0, 0), within_s=1.0)


def test_a_silent_receiver_loses_its_lease(child, fingerprint):
  channel = control.ClientChannel(child.address)
  channel.send(_hello(fingerprint))
  assert isinstance(channel.receive(BOUND_S), messages.Welcome)
  channel.send(transfers.submitted(WIRE, engines.prompt(200)))
  _until(lambda: child.held()[1] == 1, within_s=1.0)
  _until(lambda: child.held() == (0, 0, 0), within_s=transfers.LEASE_S + 1.0)
  with pytest.raises(control.PeerLost):
    _read_all(channel)
  channel.close()


def test_a_silent_receiver_holds_no_stream_of_bytes(fingerprint):
  """A process that is stopped would keep it open, and a thread busy."""
  server = PrefillServer(
    engines.model(), [WIRE], pull_host=None, lease_s=transfers.LEASE_S
  )
  with contextlib.closing(server):
    channel = control.ClientChannel(f'127.0.0.1:{server.port}')
    channel.send(_hello(fingerprint))
    welcome = channel.receive(BOUND_S)
    assert isinstance(welcome, messages.Welcome)
    asked: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    frames = channel.fetch(welcome.session, iter(asked.get, None))
    with pytest.raises(control.PeerLost, match='CANCELLED'):
      next(frames)
    assert server.peers == 0
    asked.put(None)
    channel.close()


def _read_all(channel: control.ClientChannel) -> None:
  while channel.receive(BOUND_S) is not None:
    pass


def _hello(fingerprint: str, wire: WireFormat = WIRE, **changes):
  return messages.Hello(
    **{
      'version': messages.VERSION,
      'facts': handshake.facts(wire, fingerprint),
      'choices': handshake.choices(wire.engine),
      'window_bytes': transfers.WINDOW_BYTES,
      'pulls': False,
    }
    | changes
  )


def _differing(name: str) -> tuple[WireFormat, str | None]:
  """Returns a format, or a fingerprint, that the process does not serve."""
  model, codec, engine = WIRE.model, WIRE.codec, WIRE.engine
  match name:
    case 'model.fingerprint':
      return WIRE, 'of another model'
    case 'model.dtype':
      model = dataclasses.replace(model, dtype='bfloat16')
    case 'model.layers':
      model = dataclasses.replace(model, layers=3)
    case 'codec.k.planes':
      codec = dataclasses.replace(codec, k=TensorCodec(planes=(2, 4)))
    case 'engine.token_chunk':
      engine = dataclasses.replace(engine, token_chunk=32)
    case 'choices':
      engine = dataclasses.replace(engine, prompt_tokens=201)
  return WireFormat(model, codec, engine), None


@pytest.mark.parametrize(
  'field',
  [
    'model.fingerprint',
    'model.dtype',
    'model.layers',
    'codec.k.planes',
    'engine.token_chunk',
    'choices',
  ],
)
def test_a_mismatch_names_both_values(child, fingerprint, field):
  wire, other = _differing(field)
  with pytest.raises(control.HandshakeError) as caught:
    RemotePrefill(
      wire,
      other or fingerprint,
      transfers.placement(),
      dial=lambda: control.ClientChannel(child.address),
      patience=HASTY,
    )
  assert caught.value.field == field
  for value in (caught.value.sender, caught.value.receiver):
    assert value is not None
    assert repr(value) in str(caught.value)
  assert caught.value.sender != caught.value.receiver


def test_another_protocol_version_is_refused(child, fingerprint):
  channel = control.ClientChannel(child.address)
  channel.send(_hello(fingerprint, version=messages.VERSION + 1))
  assert channel.receive(BOUND_S) == messages.Refused(
    field='protocol version',
    sender=messages.VERSION,
    receiver=messages.VERSION + 1,
  )
  channel.close()


def test_a_prompt_that_does_not_fit_is_a_typed_error(child, fingerprint):
  channel = control.ClientChannel(child.address)
  channel.send(_hello(fingerprint))
  assert isinstance(channel.receive(BOUND_S), messages.Welcome)
  good = transfers.submitted(WIRE, engines.prompt(33))
  for change, text in [
    ({'prompt': b''}, '0 prompt tokens'),
    ({'prompt': bytes(4 * 201)}, '201 prompt tokens'),
    ({'prompt': b'\xff' * 8}, 'must be in 0..63'),
    ({'manifest': 'another'}, 'not another'),
  ]:
    channel.send(dataclasses.replace(good, **change))
    answer = channel.receive(BOUND_S)
    assert isinstance(answer, messages.Failed)
    assert text in answer.text
  channel.close()


def test_a_prompt_that_is_told_twice_is_computed_once(child, fingerprint):
  channel = control.ClientChannel(child.address)
  channel.send(_hello(fingerprint))
  assert isinstance(channel.receive(BOUND_S), messages.Welcome)
  one = transfers.submitted(WIRE, engines.prompt(33))
  for submitted in (one, one, dataclasses.replace(one, request=1)):
    channel.send(submitted)
  done: list[int] = []
  while 1 not in done:
    channel.send(messages.Beat(sent_s=0.0))
    answer = channel.receive(BOUND_S)
    assert answer is not None
    if isinstance(answer, messages.Done):
      done.append(answer.request)
  assert done == [0, 1]
  channel.close()


def test_junk_on_the_control_port_harms_nobody(
  child, fingerprint, decode_model, references
):
  host, port = child.address.split(':')
  rng = np.random.default_rng(0)
  junk = [b'', b'GET / HTTP/1.1\r\n\r\n', bytes(4), rng.bytes(5000)]
  for data in [*junk, b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + rng.bytes(500)]:
    with socket.create_connection((host, int(port)), timeout=5) as connection:
      with contextlib.suppress(OSError):
        connection.sendall(data)
  # Well-formed gRPC that carries no messages, or one at the wrong time.
  with control.grpc.insecure_channel(child.address) as raw:
    call = raw.stream_stream('/lynx.Prefill/Session')(iter([rng.bytes(100)]))
    with pytest.raises(control.grpc.RpcError):
      next(call)
    assert not list(raw.stream_stream('/lynx.Prefill/Fetch')(iter([b'x'])))
  channel = control.ClientChannel(child.address)
  channel.send(messages.Reset(epoch=1))
  with pytest.raises(control.PeerLost):
    channel.receive(BOUND_S)
  channel.close()
  with _engine(child, fingerprint, decode_model) as engine:
    _check(_finish(engine, _submit(engine)), references)


def test_a_server_that_drains_finishes_and_sends_others_elsewhere(
  children, child, fingerprint, decode_model, references, server
):
  old = children()
  living = [old]
  with _engine(
    lambda: living[0].address,
    fingerprint,
    decode_model,
    server,
    pace=Pace(SLOW_GBPS),
  ) as engine:
    keys = _submit(engine, (200,))
    while not engine.result(keys[0]).anchor_bytes:
      engine.step()
    living[0] = child
    old.tell('drain')
    time.sleep(0.1)
    keys += _submit(engine, (97,))
    _check(_finish(engine, keys), references)


def test_addresses_that_are_no_single_interface_are_refused():
  everywhere = '0.0.0.0:0', '0:0', '0x0:0', '[::]:0', '[::ffff:0.0.0.0]:0'
  for listen in (*everywhere, 'nonsense', ':7', '127.0.0.1:65536'):
    with pytest.raises(ConfigError):
      control.serve(lambda channel: None, lambda name, r, end: r, listen)
  for host in ('0.0.0.0', '::ffff:0.0.0.0', 'localhost'):
    with pytest.raises(ConfigError):
      pull.start_server(host)
