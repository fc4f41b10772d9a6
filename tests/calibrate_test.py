# SPDX-License-Identifier: Apache-2.0
"""Measured values replace assumed ones where a record of the device exists."""

import json

from experiments import calibrate, tpu_compiler


def test_a_record_replaces_what_was_assumed(tmp_path, monkeypatch):
  monkeypatch.setattr(calibrate, 'FOLDER', tmp_path)
  assumed = tpu_compiler.CHIPS['v5e']
  assert calibrate.chip('v5e') == (assumed, 'assumed')
  found = {'clock_ghz': None, 'hbm_gbyte_s': 700.0}
  file = tmp_path / 'TPU_v5_lite.json'
  file.write_text(json.dumps(found), encoding='utf-8')
  chip, basis = calibrate.chip('v5e')
  assert (chip.hbm_gbyte_s, chip.clock_ghz) == (700.0, assumed.clock_ghz)
  assert basis == 'measured'
  assert calibrate.chip('v5p')[1] == 'assumed'


def test_timing_is_a_median_and_a_90th_percentile(monkeypatch):
  ticks = iter(x for n in range(1, 11) for x in (0, n))
  monkeypatch.setattr(calibrate.time, 'perf_counter', lambda: next(ticks))
  timing = calibrate.timed(lambda: 0, repeats=10)
  assert (timing.median_s, timing.p90_s) == (5.5, 9)
