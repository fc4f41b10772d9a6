# SPDX-License-Identifier: Apache-2.0
"""The plan: held against measured studies; its advice, tables and figures."""

import dataclasses
import json

import pytest

from configs import plan as configured
from experiments import (
  cli,
  config,
  defaults,
  plan,
  planner,
  report,
  results,
  schemes,
)
from lynx_jax import timeline
from lynx_jax.config import ConfigError
from lynx_jax.engine import Mode
from lynx_jax.models import presets
from tests import planner_test


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
    assert one['levelled_s'] == pytest.approx(one['measured_s'], rel=1e-6)
  for summary in plan.errors(compared):
    assert summary['value'] == pytest.approx(0, abs=1e-6)
  slow = [dict(one, levelled_s=2 * one['levelled_s']) for one in compared]
  by_name = {s['name']: s['value'] for s in plan.errors(slow)}
  assert by_name['planner_error_max'] == pytest.approx(0.5)
  assert by_name['planner_error_max_as_measured'] < 1e-6


def test_the_noise_of_prefill_is_no_error():
  """A request whose prefill was slow is off as measured, and not levelled."""
  values = defaults.base()
  records = [results.run_record(['main'], json.loads(values.to_json()))]
  for repeat in range(3):
    for record in _simulated(planner_test.INT8, Mode.SERIAL):
      record['request'] += f'/{repeat}'
      if record['kind'] == 'request' and repeat == 2:
        for field in ('prefill_s', 'ttft_provisional_s'):
          record[field] += 1.0
      records.append(record)
  (cell,) = plan.cells_of(plan.compare(records))
  assert cell.ratios == pytest.approx([1.0] * 3)
  assert cell.raw_ratios[:2] == pytest.approx([1.0] * 2)
  assert cell.raw_ratios[2] < 0.9


def _simulated(scheme, mode, prompt_tokens=1024, chunk_bytes=50_000):
  """Yields the records that a request of the study would have left."""
  name, first_s, slope = f'{scheme.name}/{mode}', 0.2, 1e-4
  codec = dataclasses.replace(scheme.codec, exact=False)
  wire = planner_test._wire(
    dataclasses.replace(scheme, codec=codec), chunk_bytes=chunk_bytes
  )
  (outcome,) = planner.simulate(
    [planner_test._ask(prompt_tokens)],
    wire,
    planner_test._costs(first_s, slope),
    mode=mode,
    rate_gbps=0.03,
    rtt_ms=1.0,
  ).outcomes
  yield results.request_record(
    request=name,
    scheme=scheme.name,
    mode=mode.value,
    model=planner_test.MODEL.name,
    prompt_tokens=prompt_tokens,
    output_tokens=8,
    form='plain',
    link_gbps=0.03,
    rtt_ms=1.0,
    prefill_s=outcome.prefill_end_s,
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
  yield event('verify', 9.0, 9.0 + planner_test.STEP_S)


def test_records_without_int8_are_refused():
  values = defaults.base()
  records = [
    results.run_record(['main'], json.loads(values.to_json())),
    *_simulated(planner_test.BF16, Mode.SERIAL),
  ]
  with pytest.raises(ConfigError, match='int8 among its schemes'):
    plan.compare(records)
  with pytest.raises(ConfigError, match='no run of a latency study'):
    plan.compare([])


def _compared(**fields):
  return results.compared_record(
    **{
      'request': 'one',
      'study': 'latency',
      'scheme': 'lynx',
      'mode': 'serial',
      'link_gbps': 0.012,
      'predicted_s': 1.0,
      'measured_s': 1.5,
      'levelled_s': 1.25,
    }
    | fields
  )


def test_the_scatter_says_what_its_marks_are():
  """A row a scheme, a panel a mode, a mark a study and, in a sweep, a rate."""
  names = [*schemes.SCHEMES]
  records = [
    _compared(scheme=name, mode=mode, **at)
    for name in names
    for mode in ('serial', 'overlapped')
    for at in (
      {'link_gbps': 0.012},
      {'link_gbps': 0.013},
      {'study': 'rates', 'link_gbps': 0.0125},
      {'study': 'rates', 'link_gbps': 0.05},
    )
  ]
  (drawn,) = plan.draw(records)
  for axes in drawn.figure.axes:
    marks = [line for line in axes.lines if line.get_marker() != 'None']
    assert [len(line.get_xdata()) for line in marks] == [2 * len(names)] + [
      len(names)
    ] * 2
    assert len({line.get_marker() for line in marks}) == len(marks)
    assert {x for line in marks for x in line.get_xdata()} == {0.8}
  rows = [text.get_text() for text in drawn.figure.axes[0].get_yticklabels()]
  assert sorted(rows) == sorted(names)
  (legend,) = drawn.figure.legends
  assert [text.get_text() for text in legend.get_texts()] == [
    'latency, 12 Mbit/s–13 Mbit/s',
    'rates, 12.5 Mbit/s',
    'rates, 50 Mbit/s',
  ]
  (foot,) = [text.get_text() for text in drawn.figure.texts]
  assert f'n = {len(records)} requests' in foot


def test_rates_of_a_sweep_have_errors_of_their_own():
  records = [
    _compared(predicted_s=predicted_s, measured_s=2.0, levelled_s=1.0, **at)
    for predicted_s, at in (
      (1.01, {'link_gbps': 0.012}),
      (1.03, {'link_gbps': 0.013}),
      (1.04, {'study': 'rates', 'link_gbps': 0.0125}),
      (0.88, {'study': 'rates', 'link_gbps': 0.05}),
    )
  ]
  ((_, header, rows),) = plan.tables(records)
  assert len(header) == len(rows[0])
  assert rows == [
    [
      'latency',
      '12 Mbit/s–13 Mbit/s',
      '2',
      '2.0%',
      '2.0%',
      '49.0%',
      '50%',
      '0',
    ],
    ['rates', '12.5 Mbit/s', '1', '4.0%', '4.0%', '48.0%', '48%', '0'],
    ['rates', '50 Mbit/s', '1', '12.0%', '12.0%', '56.0%', '56%', '0'],
  ]
  errors = {
    one['name']: (one['value'], one['n'])
    for one in plan.errors([record['detail'] for record in records])
  }
  assert errors == {
    'planner_error_max': (pytest.approx(0.12), 3),
    'planner_error_median': (pytest.approx(0.04), 3),
    'planner_error_max_as_measured': (pytest.approx(0.56), 3),
    'planner_error_median_as_measured': (pytest.approx(0.49), 3),
  }


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
    (
      _without('prefill', 'split'),
      'no INT8 request with its events',
    ),
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
    *_simulated(planner_test.INT8, Mode.SERIAL),
  ]
  assert plan.compare(records)
  with pytest.raises(ConfigError, match=message):
    plan.compare(change(records))


def test_every_scheme_of_a_study_is_predicted():
  values = defaults.base()
  values.scheme = (
    'int8,int8_layers,prefill_continues,int8_lookup,kivi4,lynx,lynx_exact'
  )
  study = config.settings(values)
  records = [results.run_record(['main'], json.loads(values.to_json()))]
  for scheme in study.schemes:
    records += _simulated(scheme, Mode.SERIAL)
  found = {one['scheme']: one for one in plan.compare(records)}
  assert set(found) == {scheme.name for scheme in study.schemes}
  assert {one['study'] for one in found.values()} == {study.study}
  # No first token waits for an exact plane.
  first = [found[name]['predicted_s'] for name in ('lynx', 'lynx_exact')]
  assert first[0] == first[1]


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
