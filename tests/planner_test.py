# SPDX-License-Identifier: Apache-2.0
"""The planner meets the bound, wastes no link, and finds its own costs."""

import dataclasses
import json
import re
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import plan as configured
from experiments import (
  cli,
  config,
  defaults,
  display,
  latency,
  pages,
  plan,
  planner,
  report,
  results,
  schemes,
)
from lynx_jax import timeline
from lynx_jax.config import (
  CodecConfig,
  ConfigError,
  Drafter,
  EngineConfig,
  Order,
)
from lynx_jax.engine import Mode
from lynx_jax.models import presets
from lynx_jax.transport.streams import WireFormat

MODEL = presets.SMOLLM2_135M
STEP_S = 0.05
ENGINE = EngineConfig(chunk_bytes=64 * 1024)
BF16, INT8, LYNX = (
  schemes.scheme(name, CodecConfig()) for name in ('bf16', 'int8', 'lynx')
)
SCHEMES = [
  *(
    schemes.scheme(name, CodecConfig())
    for name in schemes.SCHEMES
    if name != 'lynx_exact'
  ),
  dataclasses.replace(LYNX, order=Order.LAYERS),
]


def _wire(scheme, **engine):
  return WireFormat(
    MODEL, scheme.codec, dataclasses.replace(scheme.engine(ENGINE), **engine)
  )


def _costs(first_s=0.1, slope=0.0, **more):
  return planner.Costs(
    chunk_s=lambda start: first_s + slope * start,
    draft_s=lambda lengths: STEP_S,
    verify_s=lambda lengths: 2 * STEP_S,
    plain_s=lambda lengths: STEP_S,
    **more,
  )


def _ask(prompt_tokens, arrival_s=0.0, output_tokens=8):
  return planner.Ask(
    arrival_s=arrival_s,
    prompt_tokens=prompt_tokens,
    output_tokens=output_tokens,
  )


@settings(max_examples=30, deadline=None)
@given(
  scheme=st.sampled_from(SCHEMES),
  mode=st.sampled_from(Mode),
  prompt_tokens=st.integers(1, 2048),
  rate_gbps=st.floats(1e-3, 10),
  rtt_ms=st.floats(0, 100),
  first_s=st.floats(1e-3, 1),
  slope=st.floats(0, 1e-3),
)
def test_one_request_meets_its_bound(
  scheme, mode, prompt_tokens, rate_gbps, rtt_ms, first_s, slope
):
  wire = _wire(scheme)
  (outcome,) = planner.simulate(
    [_ask(prompt_tokens)],
    wire,
    _costs(first_s, slope),
    mode=mode,
    rate_gbps=rate_gbps,
    rtt_ms=rtt_ms,
  ).outcomes
  late_s = outcome.provisional_s - outcome.bound_s
  chunk_s = wire.engine.chunk_bytes * 8 / (rate_gbps * 1e9)
  longest_s = max(chunk_s, _unit_s(wire, rate_gbps))
  by_layer = scheme.order is Order.LAYERS
  size = wire.stream_bytes(prompt_tokens)
  last_step_s = _first_step_s(scheme, drafts=size.residual > 0)
  longest_s += last_step_s * by_layer  # their bound leaves it out
  assert -1e-9 <= late_s <= longest_s + 1e-9
  assert outcome.provisional_s <= outcome.committed_s <= outcome.done_s
  if mode is Mode.SERIAL:
    anchors_first = scheme.order is Order.ANCHOR_FIRST
    critical = size.anchor if anchors_first else size.total
    if scheme.drafter is Drafter.PREFILL:
      critical = 0
    least_s = critical * 8 / (rate_gbps * 1e9) + rtt_ms / 2e3
    if by_layer:
      layer_s = last_step_s / MODEL.layers
      least_s += layer_s * wire.layer_counts[-1]
      rest_s = last_step_s - layer_s * wire.layer_counts[-1]
      assert -1e-9 <= outcome.exposed_s - least_s <= rest_s + 1e-9
    else:
      assert outcome.exposed_s == pytest.approx(least_s + last_step_s)


def _first_step_s(scheme, *, drafts):
  if scheme.drafter is not Drafter.ANCHOR:
    return 2 * STEP_S
  return 2 * STEP_S if drafts and scheme.order is Order.LAYERS else STEP_S


def _unit_s(wire, rate_gbps):
  sizes = [
    wire.unit_bytes(kind.segment, kind.plane, kind.layer_group)
    for kind in wire.slice_kinds()
  ]
  return max(sizes) * 8 / (rate_gbps * 1e9)


@settings(max_examples=30, deadline=None)
@given(
  scheme=st.sampled_from(SCHEMES),
  mode=st.sampled_from(Mode),
  lengths=st.lists(st.integers(1, 1024), min_size=1, max_size=6),
  slots=st.integers(1, 4),
  acceptance=st.sampled_from([0.0, 0.7, 1.0]),
  output_tokens=st.integers(1, 40),
)
def test_every_request_ends(
  scheme, mode, lengths, slots, acceptance, output_tokens
):
  wire = _wire(scheme, slots=slots)
  rate_gbps = 0.05
  prediction = planner.simulate(
    [
      _ask(length, arrival_s=0.1 * i, output_tokens=output_tokens)
      for i, length in enumerate(lengths)
    ],
    wire,
    _costs(acceptance=acceptance),
    mode=mode,
    rate_gbps=rate_gbps,
    rtt_ms=1.0,
  )
  for outcome in prediction.outcomes:
    assert outcome.done_s >= outcome.prefill_end_s > 0
  if output_tokens > 1:
    size = sum(wire.stream_bytes(n).total for n in lengths)
    sent_s = prediction.link_use * prediction.span_s
    all_s = size * 8 / (rate_gbps * 1e9)
    if scheme.drafter is Drafter.PREFILL:  # it may end before its cache is sent
      assert sent_s <= all_s * (1 + 1e-6)
    else:
      assert sent_s == pytest.approx(all_s)


def test_an_anchor_passes_the_residual_of_another_request():
  lynx = LYNX
  wire, rate_gbps = _wire(lynx, slots=2), 0.02
  both = [_ask(1024), _ask(1024, arrival_s=0.5)]
  alone, first, second = (
    outcome
    for asks in ([_ask(1024)], both)
    for outcome in planner.simulate(
      asks, wire, _costs(), mode=Mode.SERIAL, rate_gbps=rate_gbps, rtt_ms=0
    ).outcomes
  )
  # It waits for the other's Anchor at most, and its own Residual comes last.
  anchor_s = wire.stream_bytes(1024).anchor * 8 / (rate_gbps * 1e9)
  assert second.anchor_s <= alone.anchor_s + anchor_s
  assert first.residual_s > alone.residual_s


def _alone(name, rate_gbps, **fields):
  """Simulates one request of a scheme, in serial mode."""
  (outcome,) = planner.simulate(
    [_ask(1024, output_tokens=fields.pop('output_tokens', 40))],
    _wire(schemes.scheme(name, CodecConfig()), **fields),
    _costs(),
    mode=Mode.SERIAL,
    rate_gbps=rate_gbps,
    rtt_ms=2.0,
  ).outcomes
  return outcome


@settings(max_examples=20, deadline=None)
@given(rate_gbps=st.floats(1e-3, 1), groups=st.sampled_from([1, 2, 5, 10]))
def test_layer_by_layer_saves_a_part_of_one_step(rate_gbps, groups):
  whole, by_layer, waits = (
    _alone(name, rate_gbps, layer_groups=groups, layer_ready=ready)
    for name, ready in (
      ('int8', True),
      ('int8_layers', True),
      ('int8_layers', False),
    )
  )
  saved_s = whole.provisional_s - by_layer.provisional_s
  assert -1e-9 <= saved_s <= STEP_S * (1 - 1 / groups) + 1e-9
  assert whole.done_s - by_layer.done_s == pytest.approx(saved_s)
  assert waits.provisional_s == pytest.approx(whole.provisional_s)
  if rate_gbps < 0.01:  # all layer groups but the last wait for the link
    assert saved_s == pytest.approx(STEP_S * (1 - 1 / groups))


def test_prefill_goes_on_until_decode_has_taken_over():
  step_s = 2 * STEP_S
  for rate_gbps, output_tokens in ((1e-3, 40), (1.0, 40), (1.0, 400)):
    outcome = _alone(
      'prefill_continues', rate_gbps, output_tokens=output_tokens
    )
    # A token a step, from the end of prefill on, whatever the link does.
    assert outcome.exposed_s == pytest.approx(1e-3 + step_s)
    all_s = outcome.prefill_end_s + 1e-3 + step_s * (output_tokens - 1)
    assert outcome.committed_s == outcome.provisional_s
    slack_s = step_s + 1e-3 + 1e-9 if rate_gbps == 1.0 else 1e-9
    assert abs(outcome.done_s - all_s) <= slack_s


def test_prefill_goes_on_only_while_no_prompt_waits():
  both = [
    _ask(1024, output_tokens=100),
    _ask(1024, arrival_s=0.45, output_tokens=100),
  ]
  wire = _wire(schemes.scheme('prefill_continues', CodecConfig()), slots=2)
  first, second = planner.simulate(
    both, wire, _costs(), mode=Mode.SERIAL, rate_gbps=1e-3, rtt_ms=0
  ).outcomes
  step_s, prefill_s = 2 * STEP_S, 0.4
  assert second.prefill_end_s <= prefill_s + step_s
  assert first.done_s == pytest.approx(2 * prefill_s + 99 * step_s)
  # It is second in the queue of those that go on, too.
  assert second.done_s == pytest.approx(first.done_s - 0.45 + 99 * step_s)


def test_more_acceptance_ends_sooner():
  wire = _wire(LYNX)

  def done_s(acceptance):
    (outcome,) = planner.simulate(
      [_ask(512, output_tokens=64)],
      wire,
      _costs(acceptance=acceptance),
      mode=Mode.SERIAL,
      rate_gbps=0.1,
      rtt_ms=0,
    ).outcomes
    return outcome.done_s

  assert done_s(1.0) < done_s(0.5) < done_s(0.0)


@pytest.mark.parametrize(
  ('stays_s', 'advice'),
  [
    ({'bf16': 1.02, 'int8': 1.0, 'lynx': 0.995}, 'bf16'),
    ({'bf16': 2.0, 'int8': 1.02, 'lynx': 1.0}, 'int8'),
    ({'bf16': 2.0, 'int8': 1.5, 'lynx': 1.0, 'int4': 0.9}, 'lynx'),
    ({'lynx': 1.0}, 'lynx'),
    ({'int8': 2.0, 'lynx': 1.02, 'lynx_2bit': 1.0}, 'lynx'),
    ({'int8': 2.0, 'lynx': 1.2, 'lynx_2bit': 1.0}, 'lynx_2bit'),
  ],
)
def test_advice(stays_s, advice):
  assert planner.best(stays_s) == advice


@settings(max_examples=30, deadline=None)
@given(
  scheme=st.sampled_from(SCHEMES),
  mode=st.sampled_from(Mode),
  rate_gbps=st.floats(1e-3, 10),
  acceptance=st.sampled_from([0.0, 0.7, 1.0]),
  output_tokens=st.integers(2, 40),
)
def test_tokens_stay_between_the_first_and_the_last(
  scheme, mode, rate_gbps, acceptance, output_tokens
):
  (outcome,) = planner.simulate(
    [_ask(512, output_tokens=output_tokens)],
    _wire(scheme),
    _costs(acceptance=acceptance),
    mode=mode,
    rate_gbps=rate_gbps,
    rtt_ms=1.0,
  ).outcomes
  assert outcome.provisional_s <= outcome.stays_s <= outcome.done_s
  if acceptance == 0.0:  # whatever was drafted is taken back
    assert outcome.stays_s >= outcome.committed_s
  if output_tokens == 2:
    first_s = outcome.provisional_s, outcome.committed_s
    assert outcome.stays_s == pytest.approx(
      acceptance * first_s[0] + (1 - acceptance) * first_s[1]
    )


def test_a_narrower_anchor_must_be_accepted():
  """It shows its first token sooner, and takes more of what follows back."""
  narrow = schemes.scheme('lynx_2bit', CodecConfig())

  def outcome(scheme, acceptance):
    return planner.simulate(
      [_ask(1984, output_tokens=16)],
      _wire(scheme),
      _costs(acceptance=acceptance),
      mode=Mode.SERIAL,
      rate_gbps=0.02,
      rtt_ms=1.0,
    ).outcomes[0]

  wide = outcome(LYNX, 0.967)
  for acceptance, sooner in ((0.95, True), (0.6, False)):
    found = outcome(narrow, acceptance)
    assert found.provisional_s < wide.provisional_s
    assert (found.stays_s < wide.stays_s) == sooner
  of_2, of_4 = (planner.acceptance(s) for s in (narrow, LYNX))
  assert 0 < of_2 < of_4 < 1


def test_int4_alone_is_never_advised():
  with pytest.raises(ConfigError, match='int4'):
    planner.best({'int4': 1.0})


@pytest.mark.parametrize(
  ('rate_gbps', 'mode', 'advice'),
  [
    (0.01, 'serial', 'lynx'),
    (100.0, 'serial', 'bf16'),
    # All is hidden behind prefill but the last token chunk.
    (0.5, 'overlapped', 'bf16'),
  ],
)
def test_auto_follows_the_link(rate_gbps, mode, advice, capsys):
  values = defaults.base()
  values.scheme, values.mode = 'auto', mode
  study = config.settings(values)
  assert study.auto
  case = latency._Case(
    prompt='book',
    rate_gbps=1.0,  # what the user believes
    rtt_ms=0.0,
    int8_bytes=1,
    prefill_s=2.0,
    seen_gbps=rate_gbps,
  )
  with display.screen() as screen:
    chosen = latency._advised(
      study,
      types.SimpleNamespace(config=MODEL),
      {'book': [0] * 1984},
      latency.Plan(cases=(case,), engine=ENGINE, int8_step_s=STEP_S, of=()),
      screen,
    )
  assert chosen.name == advice
  assert f'scheme=auto takes {advice}' in capsys.readouterr().out


def test_auto_stands_alone():
  values = defaults.base()
  values.scheme = 'auto,lynx'
  with pytest.raises(ConfigError, match='auto chooses one scheme'):
    config.settings(values)


def test_a_study_that_the_planner_made_itself_is_predicted():
  """Records of simulated requests give back what they were made with."""
  values = defaults.base()
  values.scheme = 'bf16,bf16_layers,int8,lynx'
  values.mode = 'serial,overlapped'
  study = config.settings(values)
  records = [results.run_record(['main'], json.loads(values.to_json()))]
  for scheme in study.schemes:
    for mode in study.modes:
      records += _simulated(scheme, mode)
  compared = plan.compare(records)
  assert len(compared) == 8
  for one in compared:
    assert one['predicted_s'] == pytest.approx(one['measured_s'], rel=1e-6)
  for summary in plan.errors(compared):
    assert summary['value'] == pytest.approx(0, abs=1e-6)
  slow = [dict(one, measured_s=2 * one['measured_s']) for one in compared]
  by_name = {s['name']: s['value'] for s in plan.errors(slow)}
  assert by_name['planner_error_max'] == pytest.approx(0.5)


def _simulated(scheme, mode, prompt_tokens=1024, chunk_bytes=50_000):
  """Yields the records that a request of the study would have left."""
  name, first_s, slope = f'{scheme.name}/{mode}', 0.2, 1e-4
  wire = _wire(scheme, chunk_bytes=chunk_bytes)
  (outcome,) = planner.simulate(
    [_ask(prompt_tokens)],
    wire,
    _costs(first_s, slope),
    mode=mode,
    rate_gbps=0.03,
    rtt_ms=1.0,
  ).outcomes
  yield results.request_record(
    request=name,
    scheme=scheme.name,
    mode=mode.value,
    model=MODEL.name,
    prompt_tokens=prompt_tokens,
    output_tokens=8,
    form='plain',
    link_gbps=0.03,
    rtt_ms=1.0,
    ttft_provisional_s=outcome.provisional_s,
    exposed_s=outcome.exposed_s,
  )
  at_s = 0.0

  def event(phase, start_s, end_s, **detail):
    return results.event_record(
      name, timeline.Event(phase, start_s, end_s, detail)
    )

  for token_chunk in range(4):
    seconds = first_s + slope * 256 * token_chunk
    split_s = at_s + 0.9 * seconds
    yield event('prefill', at_s, split_s, token_chunk=token_chunk)
    at_s += seconds
    yield event('split', split_s, at_s, token_chunk=token_chunk)
  for chunk in wire.manifest(0, prompt_tokens, 0):
    yield event('anchor', 0.0, 0.0, bytes=chunk.bytes)
  yield event('verify', 9.0, 9.0 + STEP_S)


def test_records_without_int8_are_refused():
  values = defaults.base()
  records = [
    results.run_record(['main'], json.loads(values.to_json())),
    *_simulated(BF16, Mode.SERIAL),
  ]
  with pytest.raises(ConfigError, match='int8 among its schemes'):
    plan.compare(records)
  with pytest.raises(ConfigError, match='no run of a latency study'):
    plan.compare([])


def test_the_scatter_says_what_its_marks_are():
  compared = [
    results.compared_record(
      request=mode,
      scheme='lynx',
      mode=mode,
      link_gbps=0.03,
      predicted_s=1.0,
      measured_s=1.1,
    )
    for mode in ('serial', 'overlapped')
  ]
  (drawn,) = plan.draw(compared)
  (axes,) = drawn.figure.axes
  words = {text.get_text() for text in axes.get_legend().get_texts()}
  assert words == {'within 10 %', 'lynx', 'serial', 'overlapped'}
  assert axes.get_xlabel().endswith('s (n = 2 requests)')


def test_no_two_schemes_of_a_scatter_have_one_mark():
  names = [*schemes.SCHEMES]
  compared = [
    results.compared_record(
      request=name,
      scheme=name,
      mode='serial',
      link_gbps=0.03,
      predicted_s=1.0,
      measured_s=1.1,
    )
    for name in names
  ]
  (drawn,) = plan.draw(compared)
  legend = drawn.figure.axes[0].get_legend()
  words = [text.get_text() for text in legend.get_texts()]
  marks = dict(zip(words, legend.legend_handles, strict=True))
  assert len({marks[name].get_marker() for name in names}) == len(names)


def _row(**fields):
  return {
    'model': 'm',
    'slice': 'v5e-8',
    'prompt_tokens': 8192,
    'rtt_ms': 1.0,
    'mode': 'serial',
    'in_flight': 1,
    'link_gbps': 10.0,
    'scheme': 'lynx',
    'int8_over_it': 1.5,
    'requests': {'lynx': 3, 'bf16': 1},
    'link_use': 0.25,
    'memory_use': 0.5,
  } | fields


def test_a_map_says_that_it_is_projected():
  nothing = dict.fromkeys(
    ('scheme', 'int8_over_it', 'link_use', 'memory_use', 'requests')
  )
  rows = results.rows_record(rows=[_row(), _row(link_gbps=40.0, **nothing)])
  (drawn,) = plan.draw([rows])
  (foot,) = [text.get_text() for text in drawn.figure.texts]
  assert foot.startswith('projected · m · 8,192 prompt tokens · 10')
  (axes,) = drawn.figure.axes
  assert [text.get_text() for text in axes.texts] == ['lynx\n1.50', '–']
  assert axes.get_ylabel() == 'prompt tokens'
  found = {
    caption.split(':')[0]: rows for caption, _, rows in plan.tables([rows])
  }
  assert found == {
    'Advice': [['one request, serial', 'lynx 1']],
    'Requests': [['one request, serial', 'bf16 25%, lynx 75%']],
    'Gain': [['one request, serial', '1.50']],
    'Link': [['one request, serial', '25%']],
    'Memory': [['one request, serial', '50%']],
  }


def _without(*names):
  return lambda records: [r for r in records if r.get('name') not in names]


def _changed(**fields):
  return lambda records: [
    {**r, **{k: v for k, v in fields.items() if k in r}} for r in records
  ]


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (_without('anchor'), 'no requests with their transfers'),
    (lambda records: records[:1], 'no requests with their transfers'),
    (_without('verify'), 'no INT8 request with its events'),
    (_without('prefill', 'split'), 'no INT8 request with its events'),
    (_changed(scheme='bf16_layers'), 'no requests with their transfers'),
    (_changed(model='tiny'), "of the model 'tiny'"),
    (
      _changed(detail={'config': {'gone': 1}}),
      r'cannot read: config.gone does not exist',
    ),
    (_changed(detail={'config': {'seed': 'x'}}), 'this version cannot read'),
  ],
)
def test_records_that_cannot_be_predicted_are_refused(change, message):
  values = defaults.base()
  records = [
    results.run_record(['main'], json.loads(values.to_json())),
    *_simulated(INT8, Mode.SERIAL),
  ]
  assert plan.compare(records)
  with pytest.raises(ConfigError, match=message):
    plan.compare(change(records))


def test_every_scheme_of_a_study_is_predicted():
  values = defaults.base()
  values.scheme = 'int8,int8_layers,prefill_continues,int8_lookup,kivi4'
  study = config.settings(values)
  records = [results.run_record(['main'], json.loads(values.to_json()))]
  for scheme in study.schemes:
    records += _simulated(scheme, Mode.SERIAL)
  assert {one['scheme'] for one in plan.compare(records)} == {
    scheme.name for scheme in study.schemes
  }


def test_the_command_writes_a_plan(tmp_path, capsys):
  code = cli.run(
    [
      'main',
      '--config=configs/plan.py',
      f'--workdir={tmp_path}',
      '--config.plan.models=Llama-3.1-70B',
      '--config.plan.slices=v5e-8,v6e-16',
      '--config.plan.prompt_tokens=8192',
      '--config.plan.link_gbps=1,400',
      '--config.plan.in_flight=1,3',
      '--config.plan.records=',
    ]
  )
  assert code == 0, capsys.readouterr().err
  records = list(results.read(tmp_path / results.FILE))
  cells = [r for r in records if r['kind'] == 'request']
  # Weights of 141 GB do not fit into 8 chips of 16 GB, and that is said.
  assert all(
    (r['ttft_provisional_s'] is None) == (r['plan']['slice'] == 'v5e-8')
    for r in cells
  )
  assert {r['label'] for r in cells} == {'projected'}
  slow = {
    r['scheme']: r['plan']['stays_s']
    for r in cells
    if r['link_gbps'] == 1 and r['mode'] == 'serial' and r['bound_ttft_s']
  }
  assert planner.best(slow).startswith('lynx')
  said = capsys.readouterr().out
  assert 'Advice: schemes' in said
  assert 'Gain: time of INT8' in said
  (_, header, advice), (*_, requests), (*_, gains), *_ = plan.tables(records)
  assert header == ['load', '1 Gbit/s', '400 Gbit/s']
  names = 'one request, serial', 'one request, overlapped'
  assert [row[0] for row in advice[:2]] == [row[0] for row in gains[:2]]
  assert [row[0] for row in advice[:2]] == [*names]
  # One slice of the two, one model and length: a cell a load and rate.
  assert all(cell[-2:] == ' 1' for row in advice for cell in row[1:])
  # One request alone is best off with what is best for the load.
  alone = [row for row in advice if row[0] in names]
  assert [[cell[:-1] + '100%' for cell in row[1:]] for row in alone] == [
    row[1:] for row in requests if row[0] in names
  ]
  # What is simpler may be as much slower.
  least = 1 / planner._ALIKE - 0.005
  assert all(float(row[1]) > float(row[2]) >= least for row in gains)
  assert (tmp_path / report.FILE).exists()
  assert (tmp_path / 'advice_serial.png').exists()


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('models', 'Lama-3.1-8B', 'must be one of'),
    ('slices', 'v9-8', 'must be one of'),
    ('in_flight', '0', 'plan.in_flight'),
    ('link_gbps', 'fast', 'plan.link_gbps'),
    ('prompt_tokens', '', 'must not be empty'),
    ('spread', 1, 'plan.spread=1.0 must be 0 or more, and less'),
    ('arrivals_per_s', 1e-30, 'plan.arrivals_per_s=1e-30 must be'),
    ('arrivals_per_s', float('inf'), 'plan.arrivals_per_s=inf must be'),
    ('in_flight', 1.5, 'plan.in_flight: 1.5 is no whole number'),
    ('models', 'Llama-3.1-8B,SmolLM2-135M', 'exceeds the context'),
    ('records', '/nowhere/results.jsonl', 'nowhere'),
    ('records', 'README.md', 'README.md:1: no JSON'),
  ],
)
def test_a_mistake_is_one_line(field, value, message, tmp_path, capsys):
  code = cli.run(
    [
      'main',
      '--config=configs/plan.py',
      f'--workdir={tmp_path}',
      '--config.plan.records=',
      f'--config.plan.{field}={value}',
    ]
  )
  said = capsys.readouterr().err.strip().splitlines()
  assert code == cli.USER_MISTAKE
  assert len(said) == 1
  assert message in said[0]


def test_parameters_are_those_of_the_published_models():
  # 8.03 and 70.6 billion by the models' cards.
  for model, billions in (
    (presets.LLAMA_31_8B, 8.03),
    (presets.LLAMA_31_70B, 70.55),
  ):
    assert plan.weight_bytes(model) / 2e9 == pytest.approx(billions, rel=0.01)


def test_its_config_names_the_study():
  assert configured.get_config().study == 'plan'


def _run_plan(workdir, scheme, *flags):
  return cli.run(
    [
      'main',
      '--config=configs/plan.py',
      f'--workdir={workdir}',
      f'--config.scheme={scheme}',
      '--config.plan.models=Llama-3.1-8B',
      '--config.plan.slices=v6e-8',
      '--config.plan.prompt_tokens=8192',
      '--config.plan.link_gbps=1',
      '--config.plan.in_flight=1',
      '--config.plan.records=',
      *flags,
    ]
  )


def test_a_plan_needs_something_to_advise(tmp_path, capsys):
  assert _run_plan(tmp_path, 'int4') == cli.USER_MISTAKE
  assert 'advises one of bf16, int8, lynx, lynx_2bit' in capsys.readouterr().err


def test_what_is_not_predicted_is_refused_before_the_first_cell(
  tmp_path, capsys
):
  assert _run_plan(tmp_path, 'int8,lynx_exact') == cli.USER_MISTAKE
  said = capsys.readouterr().err
  assert 'scheme=lynx_exact: the bits of an exact plane' in said
  records = results.read(tmp_path / results.FILE)
  assert not [r for r in records if r['kind'] == 'request']


def test_a_plan_takes_every_other_scheme(tmp_path, capsys):
  """A prefill side that goes on may have said all before a byte landed."""
  names = [name for name in schemes.SCHEMES if name != 'lynx_exact']
  code = _run_plan(tmp_path, ','.join(names), '--config.plan.link_gbps=0.05')
  assert code == 0, capsys.readouterr().err
  records = [*results.read(tmp_path / results.FILE)]
  cells = [r for r in records if r['kind'] == 'request']
  assert {r['scheme'] for r in cells} == set(names)
  for cell in cells:
    ahead = cell['scheme'] == 'prefill_continues'
    assert (cell['anchor_arrival_s'] is None) == ahead
    assert cell['done_s'] >= cell['ttft_provisional_s'] > 0


@pytest.mark.parametrize(
  ('name', 'chance'),
  [('2 bits', planner._ACCEPTED_2), ('4 bits', planner._ACCEPTED_4)],
)
def test_chances_of_acceptance_are_those_of_the_equivalence_study(name, chance):
  found = [
    accepted
    for record in pages.records_of('equivalence')
    if record.get('name') == results.EQUIVALENCE
    for run in record['detail']['rounds']
    if run['label'] == f'{name}, Anchor alone'
    for drafts, accepted in run['rounds']
    if drafts >= planner._FIRST_TOKENS
  ]
  positions = range(1, planner._FIRST_TOKENS + 1)
  reached = [sum(n >= i for n in found) / len(found) for i in positions]
  powers = [chance**i for i in positions]
  assert sum(powers) == pytest.approx(sum(reached), rel=5e-3)
  page = pages.DOCS.joinpath('planning.md').read_text(encoding='utf-8')
  chances = re.search(
    r'Chances are (\S+) a draft on 4\s+bits and (\S+) on', page
  )
  assert chances is not None
  assert f'{chance}' in chances.groups()
