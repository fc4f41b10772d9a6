# SPDX-License-Identifier: Apache-2.0
"""The study's closed form is that of its source, and it runs to its records."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import results, sampling_study
from tests import engines


@given(st.integers(0, 2**16), st.sampled_from([0.1, 1.0, 10.0]))
@settings(max_examples=30, deadline=None)
def test_the_chance_is_the_sum_over_all_pairs(seed, spread):
  draws = np.random.default_rng(seed)
  p, q = (spread * draws.normal(size=9).astype(np.float32) for _ in range(2))
  shared, overlap = _coupling(p[None, None], q[None, None], np.float32(0.7))
  p, q = (np.exp(x.astype(np.float64) / 0.7) for x in (p, q))
  p, q = p / p.sum(), q / q.sum()
  chance = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(9))
  np.testing.assert_allclose(shared[0, 0], chance, rtol=1e-4)
  np.testing.assert_allclose(overlap[0, 0], np.minimum(p, q).sum(), rtol=1e-4)


_coupling = jax.jit(sampling_study.coupling)


@pytest.mark.usefixtures('unoptimised')
def test_measurements_of_a_tiny_model(tmp_path):
  sampling_study.main(
    [
      'acceptance',
      'total_variation',
      f'--workdir={tmp_path}',
      '--model=tiny',
      '--prompt_file=book',
      '--prompt_tokens=300',
      '--text_tokens=64',
    ]
  )
  values = {r['name']: r for r in results.read(tmp_path / results.FILE)}
  for temperature in sampling_study.TEMPERATURES:
    shared, rejection = (
      values[f'acceptance_{name}_temperature{temperature:g}']['value']
      for name in ('shared_noise', 'rejection')
    )
    assert 0.5 < shared <= rejection <= 1
  assert 0 < values['sampling_total_variation']['value'] < 0.04
  assert values['sampling_total_variation']['n'] == 20_480


@pytest.mark.xdist_group('lynx')
def test_self_speculation_leaves_the_engine_as_it_was():
  bench = engines.bench('lynx')
  bench.script = list
  bench.configure(draft_tokens=3)
  prompt = engines.prompt(150).tolist()
  found = sampling_study.self_speculation(bench.engine, prompt, pairs=1)
  assert [record['name'] for record in found] == [
    'self_speculation_speedup',
    'self_speculation_over_plain',
  ]
  assert all(record['value'] > 0 for record in found)
  assert bench.engine.config.draft_tokens == 3


def test_an_unknown_measurement_is_named(tmp_path, capsys):
  with pytest.raises(SystemExit):
    sampling_study.main(['entropy', f'--workdir={tmp_path}'])
  assert "'entropy' must be one of acceptance" in capsys.readouterr().err
