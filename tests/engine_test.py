# SPDX-License-Identifier: Apache-2.0
"""The engine beside its output: cancel, failures, limits, compiles, fetches."""

import contextlib
import dataclasses
import functools
import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lynx_jax import programs
from lynx_jax.config import ConfigError
from lynx_jax.engine import (
  Committed,
  Costs,
  Finished,
  Form,
  Provisional,
  Request,
  State,
)
from lynx_jax.prefill import NonFiniteError, Prefill
from lynx_jax.timeline import Phase
from lynx_jax.transport import courier, links, scheduler
from lynx_jax.transport.streams import Stream, TransferError
from tests import engines

# All use one engine, and share its programs with the equivalence test.
pytestmark = pytest.mark.xdist_group('lynx')
SETUP = engines.SETUPS['lynx']
OUTPUTS = engines.OUTPUT_TOKENS
POISON = 7  # a token id that some prompts hold


def _request(tokens: int, output_tokens: int = OUTPUTS, **options) -> Request:
  prompt = engines.prompt(tokens).tolist()
  return Request(prompt=prompt, output_tokens=output_tokens, **options)


def _nothing(chunks):
  del chunks
  return []


def _anchors(chunks):
  return [c for c in chunks if c.stream is Stream.ANCHOR]


@pytest.fixture
def bench():
  """The shared engine, idle before and after."""
  bench = engines.bench('lynx')
  bench.script = courier.shuffle(0)
  bench.configure(
    draft_tokens=3, backlog_tokens=12, layer_ready=True, sharpen=True
  )
  yield bench
  assert not bench.engine.busy
  bench.engine.step()  # whoever comes next sees no events of this test


def _step_until(bench, request: int, state: State) -> list:
  events = []
  for _ in range(100_000):
    if bench.engine.result(request).state is state:
      return events
    events += bench.engine.step()
  raise AssertionError(f'{bench.engine.result(request).state}, not {state}')


def _finish(bench) -> list:
  events = []
  while bench.engine.busy:
    events += bench.engine.step()
  return [*events, *bench.engine.step()]


@pytest.mark.parametrize('sampling', engines.SAMPLINGS[:2])
def test_a_stream_that_holds_tokens_only_ever_shows_what_is_final(
  bench, sampling
):
  expected = bench.reference(engines.prompt(150), sampling)
  bench.configure(draft_tokens=3)
  bench.script = engines.trickle(0)
  request = _request(150, sampling=sampling)
  tokens: list[int] = []
  *events, last = bench.engine.stream(request, provisional=False)
  for event in events:
    assert isinstance(event, Committed)
    tokens += event.tokens
    assert len(tokens) == event.upto
    assert tokens == expected[: event.upto]
  assert tokens == expected
  assert isinstance(last, Finished)
  result = bench.engine.forget(last.request)
  assert result.timeline.events(Phase.DRAFT)  # there was something to hold


REACHED_BY = {
  State.QUEUED: _nothing,
  State.RECEIVING: lambda chunks: chunks[::2] if len(chunks) > 8 else [],
  State.DRAFTING: _anchors,
  State.DECODING: list,
}


@pytest.mark.parametrize('state', REACHED_BY)
def test_cancel_frees_the_slot_in_every_state(bench, state):
  engine = bench.engine
  victim_request = _request(200)
  references = {
    tokens: bench.reference(engines.prompt(tokens))
    for tokens in (200, 150, 90, 33)
  }
  bench.configure(draft_tokens=3)
  bench.script = REACHED_BY[state]
  others = []
  if state is State.QUEUED:
    others = [engine.submit(_request(150)) for _ in range(SETUP.config.slots)]
  victim = engine.submit(victim_request)
  events = _step_until(bench, victim, state)
  if state is not State.QUEUED:
    others.append(engine.submit(_request(150)))
    for _ in range(3):  # into the middle of it
      events += engine.step()
  assert engine.result(victim).state is state

  engine.cancel(victim)
  engine.cancel(victim)
  bench.script = courier.shuffle(1)
  others += [engine.submit(_request(n)) for n in (90, 33, 200)]
  events += _finish(bench)
  mine = [e for e in events if e.request == victim]
  assert mine[-1] == Finished(victim, State.CANCELLED, mine[-1].at_s)
  reader = engines.Reader(references[200])
  for event in mine:
    reader.take(event)
  result = engine.forget(victim)
  assert result.tokens == result.shown == reader.shown
  assert len(result.tokens) < OUTPUTS
  for key in others:
    result = engine.forget(key)
    assert result.state is State.DONE
    assert result.tokens == references[result.prompt_tokens]
  with pytest.raises(KeyError):
    engine.result(victim)


def test_cancel_in_the_middle_of_a_verification(bench):
  engine, references = bench.engine, {}
  for tokens in (200, 150):
    references[tokens] = bench.reference(engines.prompt(tokens))
  # As if verification took for ever: it begins with the first layer group.
  bench.configure(draft_tokens=3, costs=Costs(1.0, 1e9, 1.0))
  last = len(engine.wire.layer_counts) - 1
  bench.script = lambda chunks: [
    c for c in chunks if not c.residual_bytes or c.layer_group < last
  ]
  victim, other = engine.submit(_request(200)), engine.submit(_request(150))
  entry = engine._entries[victim]
  for _ in range(100_000):
    if entry.verifying is not None and entry.verifying.groups == last:
      break
    engine.step()
  else:
    raise AssertionError('no verification was open')
  engine.cancel(victim)
  bench.script = list
  again = engine.submit(_request(200))
  _finish(bench)
  assert engine.forget(victim).state is State.CANCELLED
  for key in (other, again):
    result = engine.forget(key)
    assert result.tokens == references[result.prompt_tokens]


@pytest.mark.parametrize('forget', [False, True])
def test_a_late_chunk_never_lands(bench, forget):
  """Not even from a transport that goes on after `cancel`."""
  engine = bench.engine
  expected = bench.reference(engines.prompt(150))
  bench.configure(draft_tokens=3)
  transport = engine._sender.transport
  arrived, caught = transport.arrived, []

  def catch():
    caught.extend(arrived())
    return []

  transport.arrived = catch
  try:
    victim = engine.submit(_request(200))
    while len(caught) < 5:
      engine.step()
    engine.cancel(victim)
    if forget:
      engine.forget(victim)
    engine.step()
    transport.arrived = lambda: [*caught, *arrived()]
    key = engine.submit(_request(150))
    _step_until(bench, key, State.DONE)
  finally:
    del transport.arrived
  assert engine.forget(key).tokens == expected


def test_a_payload_can_be_cut_until_its_transfer_is_cancelled(bench):
  """The courier's thread may be cutting just when the request is dropped."""
  engine, cut = bench.engine, []
  sender = engine._sender
  cancel = sender.transport.cancel

  def cut_and_cancel(request):
    for chunk in list(sender.transport._under_way.values()):
      cut.append(sender.cut(chunk))
    cancel(request)

  bench.script = _nothing
  sender.transport.cancel = cut_and_cancel
  try:
    key = engine.submit(_request(200))
    while not sender.transport._under_way:
      engine.step()
    engine.cancel(key)
  finally:
    del sender.transport.cancel
  assert cut


def test_an_abandoned_stream_cancels_its_request(bench):
  stream = bench.engine.stream(_request(150))
  assert isinstance(next(stream), Provisional)
  stream.close()
  assert not bench.engine.busy


def test_streams_side_by_side_keep_their_own_events(bench):
  """Whichever is asked for work, and when."""
  bench.configure(draft_tokens=2)
  engine, lengths = bench.engine, (150, 90, 33)
  expected = [bench.reference(engines.prompt(n)) for n in lengths]
  streams = [engine.stream(_request(n)) for n in lengths]
  quiet = engine.submit(_request(70))
  texts: list[list[int]] = [[] for _ in streams]
  for events in itertools.zip_longest(*streams):
    for text, event in zip(texts, events, strict=True):
      if isinstance(event, Committed):
        text.extend(event.tokens)
  assert texts == expected
  kept = []
  while engine.busy:
    kept += engine.step()
  kept += engine.step()
  assert {event.request for event in kept} == {quiet}
  assert isinstance(kept[-1], Finished)


def test_a_stream_that_others_have_run_to_its_end_is_there_to_read(bench):
  engine = bench.engine
  first = engine.stream(_request(150))
  assert isinstance(next(first), Provisional)
  engine.generate(_request(90))
  while engine.busy:
    assert engine.step() == []
  *_, last = first
  assert isinstance(last, Finished)


def test_a_stream_is_submitted_at_once(bench):
  engine = bench.engine
  with pytest.raises(ConfigError, match='the prompt has no tokens'):
    engine.stream(Request(prompt=[], output_tokens=4))
  stream = engine.stream(_request(150))
  assert engine.busy
  del stream
  assert not engine.busy


def test_a_stream_whose_request_is_forgotten_ends(bench):
  engine = bench.engine
  for steps in range(3):
    stream = engine.stream(_request(150))
    key = 0
    for _ in range(steps):
      key = next(stream).request
    engine.forget(key or max(engine._entries))
    assert list(stream) == []
    assert not engine.busy
  stream = engine.stream(_request(150))
  engine.forget(next(stream).request)
  stream.close()


def test_an_interrupt_of_the_work_cancels_the_request(bench, monkeypatch):
  stream = bench.engine.stream(_request(150))
  next(stream)

  def interrupt():
    raise KeyboardInterrupt

  monkeypatch.setattr(bench.engine, '_do_work', interrupt)
  with pytest.raises(KeyboardInterrupt):
    list(stream)
  assert not bench.engine.busy


def test_a_stream_that_is_collected_in_the_middle_of_work(bench, monkeypatch):
  """Its request ends when that is done: buffers are donated meanwhile."""
  engine, expected = bench.engine, bench.reference(engines.prompt(150))
  cycle = [engine.stream(_request(90))]
  cycle.append(cycle)
  having, seen = engine._having, []

  def collect(*which):
    gc.collect()
    seen.append(len(engine._running))
    return having(*which)

  other = engine.stream(_request(150))
  monkeypatch.setattr(engine, '_having', collect)
  next(other)
  del cycle
  tokens = [t for e in other if isinstance(e, Committed) for t in e.tokens]
  assert tokens == expected[-len(tokens) :]
  assert max(seen) == 2  # it was still there when it had been collected
  assert not engine.busy


def test_an_error_thrown_into_a_stream_cancels_its_request(bench):
  stream = bench.engine.stream(_request(150))
  next(stream)
  with pytest.raises(ZeroDivisionError):
    stream.throw(ZeroDivisionError())
  assert not bench.engine.busy


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'form': 'plain'}, "form='plain' of a request must be of type Form"),
    ({'mode': 'serial'}, "mode='serial' of a request must be of type Mode"),
    ({'target': 'exact'}, "target='exact' of a request must be of type Target"),
    ({'sampling': None}, 'sampling=None of a request must be of type Sampling'),
    ({'deadline_s': None}, 'deadline_s=None of a request must be of type Real'),
    ({'deadline_s': float('nan')}, 'deadline_s=nan of a request must be'),
    ({'output_tokens': 2.5}, 'output_tokens=2.5 of a request must be of type'),
  ],
)
def test_values_of_another_type_are_no_request(change, message):
  with pytest.raises(ConfigError, match=message):
    Request(**{'prompt': [1], 'output_tokens': 4} | change)


@pytest.mark.parametrize(
  ('prompt', 'message'),
  [
    ('text', r'the prompt is <U4\[\]; give the ids'),
    ([[1], [2, 3]], 'the prompt is no row of token ids'),
    ([1.5, 2.0], r'the prompt is float64\[2\]; give the ids'),
    (np.ones((2, 3), np.int32), r'the prompt is int32\[2, 3\]; give the ids'),
  ],
)
def test_what_is_no_row_of_token_ids_is_refused(prompt, message, bench):
  with pytest.raises(ConfigError, match=message):
    bench.engine.submit(Request(prompt=prompt, output_tokens=4))
  assert not bench.engine.busy


def test_a_forgotten_request_shows_no_events(bench):
  key = bench.engine.submit(_request(150))
  bench.engine.forget(key)
  assert bench.engine.step() == []


def test_results_of_other_requests_are_kept_while_one_streams(bench):
  expected = bench.reference(engines.prompt(90))
  bench.configure(draft_tokens=3)
  other = bench.engine.submit(_request(90, 5))
  result = bench.engine.generate(_request(150))
  assert len(result.tokens) == OUTPUTS
  _finish(bench)
  assert bench.engine.forget(other).tokens == expected[:5]


def test_a_prompt_may_change_after_submission(bench):
  expected = bench.reference(engines.prompt(90))
  request = _request(90)
  key = bench.engine.submit(request)
  request.prompt.clear()
  _finish(bench)
  assert bench.engine.forget(key).tokens == expected


def test_one_token_needs_no_transfer(bench):
  bench.script = _nothing
  result = bench.engine.generate(_request(200, 1))
  assert result.tokens == bench.reference(engines.prompt(200))[:1]
  assert result.anchor_bytes == 0


@pytest.mark.parametrize(
  'prompt, output_tokens, message',
  [
    ([], 4, 'no tokens'),
    ([1] * 201, 4, '201 tokens.*prompt_tokens=200'),
    ([1, 64], 4, r'1\.\.64 must be in 0\.\.63'),
    ([-1], 4, r'-1\.\.-1 must be'),
    ([1], 0, 'output_tokens=0 must be'),
    ([1], OUTPUTS + 1, rf'={OUTPUTS + 1} must be in 1\.\.{OUTPUTS}'),
  ],
)
def test_what_does_not_fit_is_refused(bench, prompt, output_tokens, message):
  with pytest.raises(ConfigError, match=message):
    bench.engine.submit(Request(prompt=prompt, output_tokens=output_tokens))


def test_two_engines_take_turns_on_one_model(bench):
  other = engines.Bench(SETUP, engines.model())
  other.configure(draft_tokens=5)
  expected = bench.reference(engines.prompt(150))
  bench.configure(draft_tokens=1)
  with other.engine:
    keys = [b.engine.submit(_request(150)) for b in (bench, other)]
    while bench.engine.busy or other.engine.busy:
      bench.engine.step()
      other.engine.step()
    for b, key in zip((bench, other), keys, strict=True):
      assert b.engine.forget(key).tokens == expected


def test_a_backlog_is_drafted_one_fetch_a_round_and_bounded(bench):
  bench.configure(backlog_tokens=7)
  bench.script = _anchors
  engine = bench.engine
  key = engine.submit(_request(200))
  events = _step_until(bench, key, State.DRAFTING)
  while len(engine.result(key).shown) < 1 + 7:
    with programs.counting() as counts:
      events = engine.step()
    assert [type(e) for e in events] == [Provisional]
    assert counts.fetches == 1
  with programs.counting() as counts:
    assert engine.step() == []
  assert counts.fetches == 0
  assert len(engine.result(key).tokens) == 1
  bench.script = list
  _finish(bench)
  result = engine.forget(key)
  drafted, _ = result.rounds[0]
  assert drafted == SETUP.config.verify_rows - 1  # the backlog goes by blocks
  assert result.tokens == bench.reference(engines.prompt(200))


def _all_but_one(total_bytes: int) -> courier.Script:
  """Lets all chunks arrive at once but the last one; the Anchor comes last."""

  def script(chunks):
    if sum(chunk.bytes for chunk in chunks) < total_bytes:
      return []
    late = max(
      (c for c in chunks if c.stream is Stream.RESIDUAL),
      key=lambda c: (c.layer_group, max(unit.index for unit in c.units())),
    )
    last = _anchors(chunks)
    return [c for c in chunks if c is not late and c not in last] + last

  return script


def test_drafts_read_the_residual_as_far_as_it_is_there(bench):
  """All of it but one chunk makes them agree with the target for longer."""
  engine, agreed = bench.engine, {False: 0, True: 0}
  for tokens in (200, 199, 195):
    expected = bench.reference(engines.prompt(tokens))
    for sharpen in agreed:
      bench.configure(sharpen=sharpen, layer_ready=False, draft_tokens=3)
      bench.script = _all_but_one(engine.wire.stream_bytes(tokens).total)
      key = engine.submit(_request(tokens))
      _step_until(bench, key, State.DRAFTING)
      while engine.step():  # until the backlog is full
        pass
      shown = engine.result(key).shown
      assert len(shown) == 1 + engine.config.backlog_tokens
      pairs = zip(shown, expected, strict=False)
      agreed[sharpen] += [*(a == b for a, b in pairs), False].index(False)
      bench.script = list
      _finish(bench)
      assert engine.forget(key).tokens == expected
  assert agreed[True] > 1.5 * agreed[False]  # 34 and 14


def test_unwatched_requests_decode_in_one_call_with_drafts(bench):
  bench.script = list
  result = bench.engine.generate(_request(200, streamed=False))
  # Token 1, one backlog round, then everything at once.
  assert len(set(result.commit_times_s)) <= 3
  assert any(drafted == 3 for drafted, _ in result.rounds[1:])


def test_an_adapted_draft_length_is_chosen_anew_every_few_rounds(bench):
  expected = bench.reference(engines.prompt(200))
  # Drafts cost too much: every round commits one token.
  bench.configure(draft_tokens=None, costs=Costs(1.0, 0.01, 1.0))
  bench.script = list
  result = bench.engine.generate(_request(200, streamed=False))
  assert result.tokens == expected
  _, *calls = result.timeline.events(Phase.VERIFY)  # the first has a backlog
  assert len(calls) > 1
  assert {event.detail['draft_tokens'] for event in calls} == {0}
  assert max(event.detail['committed'] for event in calls) == 8


def test_nothing_is_compiled_after_warm_up():
  # A model that no other test has, so that nothing is compiled before.
  setup = engines.setup(
    (4, 4), slots=2, prompt_tokens=130, output_tokens=9, layer_groups=1
  )
  bench = engines.Bench(setup, engines.model(layers=1))
  with bench.engine as engine:
    with programs.counting() as counts:
      costs = engine.warm_up()
    assert counts.compiles > 10
    assert min(dataclasses.astuple(costs)) > 0
    assert engine.costs == costs
    prompts = {n: engines.prompt(n) for n in setup.lengths}
    with programs.counting() as counts:
      expected = {n: engine.reference(p, 9) for n, p in prompts.items()}
      keys = {}
      for index, tokens in enumerate(prompts):
        request = _request(
          tokens,
          9,
          form=Form.PLAIN if index % 5 == 4 else Form.VERIFY,
          streamed=index % 3 == 0,
        )
        keys[engine.submit(request)] = request
      cancelled = engine.submit(_request(100, 9))
      engine.cancel(cancelled)
      late = engine.submit(_request(130, 9))
      engine.step()
      engine.cancel(late)
      while engine.busy:
        engine.step()
    assert counts.compiles == 0
    for key, request in keys.items():
      if request.form is Form.VERIFY:
        assert engine.result(key).tokens == expected[len(request.prompt)]
    engine.warm_up()
    assert isinstance(engine.costs, Costs)


def test_a_measured_step_leaves_no_trace(bench):
  before = bench.reference(engines.prompt(150))
  bench.configure(ends=[0])  # the steps must do their work all the same
  bench.engine.warm_up()
  try:
    bench.configure(draft_tokens=None)  # chosen from the costs
    result = bench.engine.generate(_request(150))
  finally:
    bench.engine.costs = None
  assert result.tokens == before
  key = bench.engine.submit(_request(33))
  with pytest.raises(RuntimeError, match=r'warm_up\(\) needs an engine'):
    bench.engine.warm_up()
  with pytest.raises(RuntimeError, match=r'spoil_cache\(\) needs an engine'):
    bench.engine.spoil_cache()
  bench.engine.cancel(key)


def _poisoned(path: tuple, index) -> object:
  """Returns the model with NaN in one place of one parameter."""
  graph, state = nnx.split(engines.model())
  leaf = functools.reduce(lambda node, key: node[key], path, state)
  value = leaf.get_value().at[index].set(jnp.nan)
  state = jax.tree.map(lambda x: value if x is leaf.get_value() else x, state)
  return nnx.merge(graph, state)


@pytest.mark.parametrize('name, other', [('k', 'v'), ('v', 'k')])
def test_not_finite_values_are_named(name, other):
  model = _poisoned(('layers', 1, name), (0, 0, 0))
  prefill = Prefill(model, SETUP.codec, SETUP.config)
  with pytest.raises(NonFiniteError) as caught:
    list(prefill.chunks(engines.prompt(100)))
  message = str(caught.value)
  assert 'tokens 0..63' in message
  assert f'{name} of layer 1' in message
  assert f'{other} of layer 1' not in message
  assert 'layer 0' not in message


@pytest.mark.parametrize('setup', ['lynx', 'interleaved'])
def test_a_failed_prefill_is_an_error_and_the_engine_goes_on(setup):
  bench = engines.Bench(
    engines.SETUPS[setup],
    engines.model(),
    prefill_model=_poisoned(('embedding',), POISON),
  )
  good = np.where(engines.prompt(150) == POISON, 0, engines.prompt(150))
  spoilt = good.copy()
  spoilt[140] = POISON  # in the third token chunk
  request = Request(prompt=spoilt.tolist(), output_tokens=8)
  with bench.engine as engine:
    other = engine.submit(Request(prompt=good.tolist(), output_tokens=OUTPUTS))
    with pytest.raises(
      NonFiniteError, match=r'tokens 128\.\.149.*k of layer 0'
    ):
      engine.generate(request)
    key = engine.submit(request)
    _finish(bench)
    failed = engine.result(key)
    assert failed.state is State.FAILED
    assert isinstance(failed.error, NonFiniteError)
    assert failed.tokens == failed.shown == []
    expected = bench.reference(good)
    assert engine.result(other).tokens == expected
    assert engine.generate(
      Request(prompt=good.tolist(), output_tokens=OUTPUTS)
    ).tokens == (expected)


def test_an_error_of_the_transport_surfaces():
  def connect(cut):
    def broken(chunk):
      if chunk.token_chunk == 1:
        raise OSError('the cable is gone')
      return cut(chunk)

    link = links.DeviceLink(engines.DECODE_DEVICE)
    return courier.Courier(scheduler.Scheduler(1), link, broken)

  bench = engines.Bench(SETUP, engines.model(), connect=connect)
  with bench.engine as engine:
    with pytest.raises(TransferError, match='the cable is gone'):
      engine.generate(_request(200))
    with pytest.raises(TransferError):
      engine.step()


@pytest.mark.parametrize(
  'rate_gbps, rtt_ms',
  [
    (0.1, 2.0),
    (1e9, 60.0),  # the round trip takes longer than any transfer
    (0.004, 0.0),  # the transfer takes longer than all the rest
  ],
)
def test_a_real_courier_serves_several_requests(bench, rate_gbps, rtt_ms):
  """The thread, its races included, instead of the script."""
  expected = {n: bench.reference(engines.prompt(n)) for n in (200, 97, 33, 1)}

  def connect(cut):
    link = links.EmulatedLink(engines.DECODE_DEVICE, rate_gbps, rtt_ms)
    return courier.Courier(scheduler.Scheduler(1), link, cut)

  other = engines.Bench(SETUP, engines.model(), connect=connect)
  with other.engine as engine:
    for round_ in range(4):
      keys = [engine.submit(_request(n)) for n in expected]
      doomed = engine.submit(_request(150))
      for _ in range(4 * round_):
        engine.step()
      engine.cancel(doomed)
      while engine.busy:
        engine.step()
      for key in keys:
        result = engine.forget(key)
        assert result.tokens == expected[result.prompt_tokens]


def test_sixteen_requests_at_once_are_served_in_turn(bench):
  lengths = [200, 97, 33, 1] * 4
  expected = {n: bench.reference(engines.prompt(n)) for n in set(lengths)}
  bench.configure(draft_tokens=3)
  keys = [bench.engine.submit(_request(n)) for n in lengths]
  first = [
    event.request for event in _finish(bench) if isinstance(event, Provisional)
  ]
  seen = list(dict.fromkeys(first))
  # Prefill computes one prompt after the other, in the order of submission.
  assert seen == keys
  for key in keys:
    result = bench.engine.forget(key)
    assert result.state is State.DONE
    assert result.tokens == expected[result.prompt_tokens]


def test_close_stops_a_prefill_and_says_so_afterwards():
  bench = engines.Bench(SETUP, engines.model())
  engine = bench.engine
  keys = [engine.submit(_request(200)) for _ in range(5)]
  engine.step()
  engine.close()
  engine.close()
  assert not engine._sender._thread.is_alive()
  assert engine.result(keys[0]).state is State.RECEIVING
  for call in (engine.step, engine.warm_up, lambda: engine.submit(_request(9))):
    with pytest.raises(RuntimeError, match='the engine is closed'):
      call()


def test_an_interrupt_leaves_an_engine_that_can_be_closed():
  bench = engines.Bench(SETUP, engines.model())

  def interrupt(chunks):
    raise KeyboardInterrupt

  with contextlib.suppress(KeyboardInterrupt), bench.engine as engine:
    bench.script = interrupt
    engine.generate(_request(200))
    raise AssertionError('not interrupted')
  assert not engine._sender._thread.is_alive()
