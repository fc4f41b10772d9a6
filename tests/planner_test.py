# SPDX-License-Identifier: Apache-2.0
"""The planner meets the bound, wastes no link, and finds its own costs."""

import dataclasses
import re
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import (
  config,
  defaults,
  display,
  latency,
  pages,
  planner,
  results,
  schemes,
)
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
  case = latency.Case(
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
