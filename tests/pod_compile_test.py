# SPDX-License-Identifier: Apache-2.0
"""The checked-in figures of slices of TPU chips are whole and without fault."""

import pathlib
import re

import pytest

from experiments import pod_compile

DOCS = pathlib.Path(__file__).parents[1] / 'docs' / 'pods.md'


@pytest.fixture(scope='module')
def checked_in():
  return pod_compile.load()


def test_records_are_of_cells_in_their_order_and_without_fault(checked_in):
  assert [*checked_in] == [cell.key for cell in pod_compile.cells()]
  wrong = {
    key: [*pod_compile.faults(record)]
    for key, record in checked_in.items()
    if [*pod_compile.faults(record)]
  }
  # With two KV heads a chip, rounds copy sinks: docs/pods.md.
  assert {key[1:3] for key in wrong} <= {('v5p-8', 'rounds')}
  assert all(fault.startswith('copies bf16') for (fault,) in wrong.values())
  assert not re.search(r'\bu8\[', str(wrong))  # planes never


def test_the_compiler_lays_arrays_out_as_the_budget_counts(checked_in):
  """Else `hbm_bytes`, which rests on the budget, would be too small."""
  for key, record in checked_in.items():
    assert 0.99 < record['arguments_over_budget'] < 1.01, key


def test_docs_show_what_fits(checked_in):
  assert pod_compile.table([*checked_in.values()]) in DOCS.read_text('utf-8')


def test_words_that_pick_no_cell_are_refused(capsys, monkeypatch):
  monkeypatch.setattr(pod_compile, 'measure', None)
  with pytest.raises(SystemExit) as ended:
    pod_compile.main(['--cells=Qwen3-8B,v5e8'])
  assert ended.value.code == 2
  assert 'no cell has v5e8; there are ' in capsys.readouterr().err


@pytest.mark.xdist_group('libtpu')
def test_cells_compile_side_by_side_as_their_records_say(
  checked_in, monkeypatch, tmp_path
):
  file = tmp_path / 'costs.json'
  file.write_text(pod_compile.FILE.read_text('utf-8'))
  monkeypatch.setattr(pod_compile, 'FILE', file)
  words = 'Llama-3.1-8B', 'v5e-8', 'split'
  assert pod_compile.main([f'--cells={",".join(words)}', '--jobs=2']) == 0
  made, compiled = pod_compile.load(), set()
  assert list(made) == list(checked_in)
  for key, record in made.items():
    assert record.keys() == checked_in[key].keys()
    if {*words} <= {*map(str, key)}:
      compiled.add(key[-1])
      assert record['compile_s'] > 0
    else:
      assert record == checked_in[key]
  assert compiled == {32 * 1024, 128 * 1024}


@pytest.mark.parametrize(
  'change, words',
  [
    ({'cache_copies': ['u8[2] copy']}, r'copies u8\[2\] copy'),
    ({'collectives': {'all-gather': 1}}, 'communicates .*all-gather'),
    ({'hbm_bytes': 15 << 30}, r'does not fit: 15\.0 of 16 \*\*no\*\*'),
    ({'flops': 104.0}, 'flops 100.0 -> 104.0'),
  ],
)
def test_what_is_wrong_or_worse_is_named(change, words):
  record = {
    'stage': 'split',
    'collectives': {},
    'cache_copies': [],
    'flops': 100.0,
    'bytes': 100.0,
    'hbm_bytes': 14 << 30,
    'hbm_limit_bytes': 16 << 30,
  }
  assert not [*pod_compile.faults(record | {'flops': 103.0}, record)]
  fault, *_ = pod_compile.faults(record | change, record)
  assert re.search(words, fault)


def test_slots_fill_what_may_be_used():
  record = {
    'hbm_limit_bytes': 1000,
    'hbm_bytes': 500,
    'kv_bytes': 400,
    'slots': 4,
  }
  assert pod_compile.most_slots(record) == 8
  assert pod_compile.most_slots(record | {'hbm_bytes': 901}) == 3
