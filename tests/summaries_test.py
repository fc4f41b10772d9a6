# SPDX-License-Identifier: Apache-2.0
"""Summaries of a latency study, on records whose figures are known."""

import pytest

from experiments import results, summaries


def _request(scheme, *, exposed_s, prefill_s=3.0, repeat=0, **more):
  values = {
    'scheme': scheme,
    'mode': 'serial',
    'prefill_s': prefill_s,
    'split_s': 1.0,
    'ttft_provisional_s': prefill_s + 1.0 + exposed_s,
    'bound_ttft_s': prefill_s + 1.0 + exposed_s,
    'repeat': repeat,
  }
  return results.request_record(**(values | more))


def _summaries(records, constants=None, **more):
  constants = constants or summaries.Constants()
  found = summaries.summaries(records, constants, **more)
  return {record['name']: record for record in found}


def test_names_are_those_of_the_contract():
  assert set(_summaries([])) == {
    'ttft_lynx_over_int4',
    'ttft_lynx_over_bound',
    'ttft_over_bound_min',
    'ttft_int8_over_lynx',
    'bound_int8_over_lynx',
    'share',
    'bits_anchor',
    'bits_anchor_worst_length',
    'bits_bf16_codebook',
    'equal_to_reference',
    'equal_to_bf16_bf16',
    'equal_to_bf16_int8',
    'equal_to_bf16_int4',
    'equal_to_bf16_lynx',
    'equal_to_bf16_lynx_exact',
    'anchor_step_over_bf16_step',
    'recompiles_after_warmup',
    'fetches_per_draft_round',
    'commit_lag_verify_passes',
    'done_lynx_over_int8',
    'commit_lag_plain',
    'done_lynx_over_int8_plain',
    'lead_used_up_at_token',
  }


def test_what_was_not_measured_is_null():
  for record in _summaries([]).values():
    assert record['value'] is None
    assert record['label'] == 'measured'


def test_ratios_replace_each_prefill_by_the_median():
  """T_p is 4, 4 and 6 s, so T is 4: ratios are (6 + 4) / (3.5 + 4) and so."""
  records = [
    _request('int8', exposed_s=6.0),
    _request('lynx', exposed_s=3.5),
    # The slow prefill of this one must not show in its ratios.
    _request('int4', exposed_s=3.5, prefill_s=5.0),
  ]
  found = _summaries(records)
  assert found['ttft_int8_over_lynx']['value'] == pytest.approx(10 / 7.5)
  assert found['bound_int8_over_lynx']['value'] == pytest.approx(10 / 7.5)
  assert found['ttft_lynx_over_int4']['value'] == pytest.approx(1.0)


def test_pairs_are_of_one_repeat():
  """Unpaired medians would give 8 / 8 = 1; the pairs give 2, 1 and 2."""
  records = []
  for repeat, (int8, lynx) in enumerate([(8, 2), (4, 4), (16, 6)]):
    for scheme, total_s in (('int8', int8), ('lynx', lynx)):
      records.append(
        _request(scheme, exposed_s=total_s, repeat=repeat, prefill_s=0.0)
      )
  found = _summaries(records)['ttft_int8_over_lynx']
  # T is 1 s: 9/3, 5/5, 17/7.
  assert found['value'] == pytest.approx(17 / 7)
  assert found['n'] == 3


def test_a_request_without_a_partner_is_left_out():
  records = [
    _request('int8', exposed_s=6.0, repeat=0),
    _request('lynx', exposed_s=3.5, repeat=1),
  ]
  found = _summaries(records)['ttft_int8_over_lynx']
  assert (found['value'], found['n']) == (None, 0)


def test_over_bound_is_a_median_and_its_minimum_is_raw():
  records = [
    _request('lynx', exposed_s=4.0, bound_ttft_s=bound_s, repeat=i)
    for i, bound_s in enumerate([8.0, 7.9, 7.5])
  ] + [_request('bf16', exposed_s=4.0, bound_ttft_s=8.01, prefill_s=3.0)]
  found = _summaries(records)
  assert found['ttft_lynx_over_bound']['value'] == pytest.approx(8 / 7.9)
  assert found['ttft_over_bound_min']['value'] == pytest.approx(8 / 8.01)
  assert found['ttft_over_bound_min']['n'] == 4


def test_baselines_count_in_their_faster_form():
  records = [
    _request('lynx', exposed_s=3.0),
    _request('int8', exposed_s=6.2, form='verify'),
    _request('int8', exposed_s=6.0, form='plain'),
  ]
  found = _summaries(records)
  assert found['ttft_int8_over_lynx']['value'] == pytest.approx(10 / 7)


def test_a_form_that_ran_less_often_does_not_count():
  """It would be the one of a single prompt, which may have been lucky."""
  records = [
    _request('lynx', exposed_s=3.0),
    *(_request('int8', exposed_s=6.2, form='plain') for _ in range(3)),
    _request('int8', exposed_s=6.0, form='verify'),
  ]
  assert summaries.fastest_form(records, 'int8') == records[1:4]


def test_equality_is_of_the_verify_form_and_needs_every_request():
  records = [
    _request('lynx', exposed_s=1.0, equal_to_reference=True),
    _request('int8', exposed_s=1.0, equal_to_reference=True),
    _request('int8', exposed_s=0.9, form='plain'),
  ]
  assert _summaries(records)['equal_to_reference']['value'] is True
  assert _summaries(records)['equal_to_reference']['n'] == 2
  records.append(_request('int4', exposed_s=1.0, equal_to_reference=False))
  assert _summaries(records)['equal_to_reference']['value'] is False
  assert _summaries(records)['equal_to_bf16_lynx']['value'] is None


def test_constants_and_suffix():
  constants = summaries.Constants(
    anchor_step_over_bf16_step=0.8,
    steps=20,
    recompiles_after_warmup=0,
  )
  found = _summaries([], constants, suffix='_overlapped')
  step = found['anchor_step_over_bf16_step_overlapped']
  assert step['value'] == pytest.approx(0.8)
  assert step['n'] == 20
  assert found['recompiles_after_warmup_overlapped']['value'] == 0


def test_other_modes_are_left_out():
  records = [_request('lynx', exposed_s=1.0, share=0.6)]
  assert _summaries(records)['share']['value'] == 0.6
  assert _summaries(records, mode='overlapped')['share']['value'] is None


def test_commit_lags_are_medians_of_exposed_times():
  """Token 2 lags by 1, 2 and 9 s: 2; token 3 by -1 in all."""
  pairs = [
    (
      _request('lynx', exposed_s=1.0, commit_times_s=[4.0, 6.0 + lag, 7.0]),
      # A second of prefill more must not count.
      _request(
        'int8', exposed_s=1.0, prefill_s=4.0, commit_times_s=[5.0, 7.0, 9.0]
      ),
    )
    for lag in (1.0, 2.0, 9.0)
  ]
  assert summaries.commit_lags(pairs) == pytest.approx([2.0, -1.0])


def test_acceptance_counts_full_rounds_alone():
  run = {
    'draft_tokens': 4,
    'rounds': [(4, 4), (4, 2), (3, 0)],
    'token_ids': [1, 2, 3, 4, 1, 2, 3, 4],
  }
  found = {r['name']: r for r in summaries.acceptance([run])}
  assert found['acceptance_gamma4']['value'] == pytest.approx(6 / 8)
  assert found['acceptance_gamma4_rounds']['value'] == 2
  # 1234 2341 3412 4123 1234
  distinct = found['acceptance_gamma4_distinct_4grams']['value']
  assert distinct == pytest.approx(4 / 5)


def test_interval_holds_the_median_and_needs_three():
  assert summaries.interval([1.0, 2.0]) == (None, None)
  low, high = summaries.interval([1.0, 2.0, 3.0, 4.0, 5.0])
  assert 1.0 <= low < 3.0 < high <= 5.0
