# SPDX-License-Identifier: Apache-2.0
"""The main job on a tiny model, from the command line to the report."""

import functools
import io

import jax
import pytest

from configs import tiny
from experiments import (
  config,
  display,
  latency,
  main,
  profiling,
  report,
  results,
  selection,
)
from lynx_jax.config import ConfigError
from lynx_jax.models import presets
from tests import engines

# One run serves all tests here. That optimised programs commit the reference
# is for equivalence_test.
pytestmark = pytest.mark.usefixtures('unoptimised')
SCHEMES = ('bf16', 'prefill_continues', 'int8', 'lynx', 'lynx_exact')
MODES = ('serial', 'overlapped')


@pytest.mark.parametrize(('rate_gbps', 'rtt_ms'), [(1e-9, 0.0), (1.0, 1e7)])
def test_a_link_that_takes_hours_is_refused(rate_gbps, rtt_ms):
  latency.check_wait('book', 10**9, 1.0, 1000.0)
  with pytest.raises(ConfigError, match=r'hours at .*; take a faster link'):
    latency.check_wait('book', 10**9, rate_gbps, rtt_ms)


def test_a_plan_of_another_run_is_refused(tmp_path):
  settings = config.settings(tiny.get_config())
  plan = latency.Plan(cases=(), engine=settings.engine, int8_step_s=1.0, of=())
  with (
    results.Writer(tmp_path) as writer,
    display.screen(io.StringIO()) as screen,
    pytest.raises(ConfigError, match='run without a plan'),
  ):
    latency.run(settings, writer, screen, plan=plan)


@pytest.fixture(scope='module')
def study(tmp_path_factory):
  """The records of one run, and its folder."""
  workdir = tmp_path_factory.mktemp('run')
  run = functools.partial(latency.run, profile=workdir / profiling.FOLDER)
  # As many tokens as above: the same programs.
  flags = 'scheme=' + ','.join(SCHEMES), 'acceptance.output_tokens=12'
  return _run(workdir, run, f'mode={",".join(MODES)}', *flags), workdir


def _run(workdir, run, *flags):
  """Returns the records of a run."""
  argv = [
    'main',
    '--config=configs/tiny.py',
    f'--workdir={workdir}',
    '--config.output_tokens=12',
    '--config.sampling.temperature=1.5',
    '--config.sampling.seed=3',
    '--config.engine.chunk_bytes=1',  # a unit a chunk: few shapes to compile
    *(f'--config.{flag}' for flag in flags),
  ]
  small = functools.partial(presets.tiny, layers=2, head_dim=16)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(presets, 'tiny', small)
    assert main.main(argv, run) == 0
  return [*results.read(workdir / results.FILE)]


def _requests(records, **fields):
  return [
    r
    for r in records
    if r['kind'] == 'request'
    and all(r[name] == value for name, value in fields.items())
  ]


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('scheme', SCHEMES)
def test_every_scheme_and_mode_equals_its_reference(study, scheme, mode):
  verified = _requests(study[0], scheme=scheme, mode=mode, form='verify')
  assert verified
  for record in verified:
    assert record['equal_to_reference'] is True
    assert record['output_tokens'] == 12
    assert record['sampling']['temperature'] == 1.5
    assert record['ttft_provisional_s'] >= record['bound_ttft_s']


@pytest.mark.usefixtures('study')  # it has compiled the programs
def test_what_does_not_arrive_is_not_equal(tmp_path, monkeypatch):
  """Though the reference, and each repeat, leave the prompt in the cache."""
  engines.lose_arrivals(monkeypatch)
  records = _run(tmp_path, latency.run, 'scheme=lynx', 'repeats=2')
  found = [r['equal_to_reference'] for r in _requests(records, scheme='lynx')]
  assert found == [False, False]
  summaries = {r['name']: r for r in records if r['kind'] == 'summary'}
  assert summaries['equal_to_reference']['value'] is False


def test_summaries_hold_what_was_measured(study):
  values = {r['name']: r for r in study[0] if r['kind'] == 'summary'}
  for suffix in ('', '_overlapped'):
    assert values[f'equal_to_reference{suffix}']['value'] is True
    assert values[f'recompiles_after_warmup{suffix}']['value'] == 0
    assert values[f'fetches_per_draft_round{suffix}']['value'] == 1
    assert values[f'ttft_lynx_over_bound{suffix}']['n'] == 1
    assert values[f'ttft_lynx_over_int4{suffix}']['value'] is None
    assert values[f'equal_to_bf16_lynx_exact{suffix}']['value'] is True
  assert values['acceptance_gamma8_rounds']['value'] > 0


def test_a_codebook_would_save_its_part_of_the_transfer(study):
  """It has the bound of bf16 with fewer bytes, and with nothing else."""
  bits = {r['name']: r['value'] for r in study[0] if r['kind'] == 'summary'}[
    'bits_bf16_codebook'
  ]
  assert 12 <= bits < 12.5
  (record, *_) = _requests(study[0], scheme='bf16', mode='serial')
  transfer_s = record['bytes_anchor'] * 8e-9 / record['link_gbps']
  saved_s = record['bound_ttft_s'] - record['bound_codebook_s']
  assert saved_s == pytest.approx((1 - bits / 16) * transfer_s, rel=1e-3)
  for scheme in set(SCHEMES) - {'bf16'}:
    for other in _requests(study[0], scheme=scheme):
      assert 'bound_codebook_s' not in other


def test_the_report_sees_the_backlog_of_drafts(study):
  """Its figures read the engine's own events, not only those of their tests."""
  traces = [
    trace
    for trace in report.traces(study[0])
    if trace['scheme'] == 'lynx' and trace['mode'] == 'serial'
  ]
  _, committed, shown = selection.counts(traces[0])
  assert max(s - c for s, c in zip(shown, committed, strict=True)) > 0
  assert shown[-1] == committed[-1] == 12
  assert (study[1] / 'report.html').stat().st_size > 10_000


def test_the_trace_names_phases_as_the_timeline_does(study):
  """On the host as spans, and on the device by programs."""
  (file,) = (study[1] / profiling.FOLDER).rglob('*.xplane.pb')
  names = {
    event.name
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes
    for line in plane.lines
    for event in line.events
  }
  phases = {'prefill', 'split', 'draft', 'verify', 'commit'}
  assert phases <= names
  # Those of the timeline that are not programs are the transfer's, or instants.
  events = {r['name'] for r in study[0] if r['kind'] == 'event'}
  assert phases <= events
