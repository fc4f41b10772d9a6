# SPDX-License-Identifier: Apache-2.0
"""The checked-in figures of slices of TPU chips are whole and without fault."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from experiments import pod_compile

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / 'docs' / 'pods.md'


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


@pytest.fixture
def asked(checked_in, monkeypatch, tmp_path):
  """Compiles nothing; returns the cells that would have been."""
  cells = []

  def measured(missing, jobs):
    cells.extend(missing)
    for cell in missing:
      yield cell, checked_in[cell.key]

  file = tmp_path / 'costs.json'
  file.write_text(pod_compile.FILE.read_text('utf-8'))
  monkeypatch.setattr(pod_compile, 'FILE', file)
  monkeypatch.setattr(pod_compile, '_measured', measured)
  return cells


def test_words_that_contradict_each_other_are_refused(capsys, asked):
  with pytest.raises(SystemExit) as ended:
    pod_compile.main(['--cells=Qwen3-8B,Llama-3.1-8B'])
  assert ended.value.code == 2
  error = capsys.readouterr().err
  assert 'no cell has all of Llama-3.1-8B, Qwen3-8B' in error
  assert not asked


@pytest.mark.parametrize(
  'words', ['Qwen3-8B,v6e-8,32k', ' Qwen3-8B, v6e-8 ,,32768 ']
)
def test_tokens_are_chosen_as_the_table_has_them(asked, words):
  pod_compile.main([f'--cells={words}'])
  assert [cell.key for cell in asked] == [
    ('Qwen3-8B', 'v6e-8', stage, 32 * 1024) for stage in pod_compile.COLLECTIVES
  ]


def test_one_stage_alone_has_a_record_before_the_others(asked):
  """The table needs both sides."""
  pod_compile.FILE.unlink()
  assert pod_compile.main(['--cells=Qwen3-8B,v6e-8,32k,verify']) == 0
  assert [*pod_compile.load()] == [cell.key for cell in asked]


@pytest.mark.parametrize(
  'text',
  ['[{"model": "Qwen3-8B", "topolo', '{}', '[{"model": "Qwen3-8B"}]', '\udcff'],
)
def test_a_damaged_file_is_found_before_anything_compiles(capsys, asked, text):
  file = pod_compile.FILE
  file.write_text(text, 'utf-8', 'surrogateescape')
  assert pod_compile.main([]) == 2
  error = capsys.readouterr().err
  assert error.startswith(f'error: {file} is damaged (')
  assert f'`git restore {file}`' in error
  assert error.count('\n') == 1
  assert not asked
  assert file.read_text('utf-8', 'surrogateescape') == text


def test_a_file_that_cannot_be_written_is_found_before_anything_compiles(
  capsys, asked, monkeypatch, tmp_path
):
  file = tmp_path / 'absent' / 'costs.json'
  monkeypatch.setattr(pod_compile, 'FILE', file)
  assert pod_compile.main([]) == 2
  error = capsys.readouterr().err
  assert error.startswith(f'error: {file} cannot be written: No such file')
  assert error.count('\n') == 1
  assert not asked


def test_records_are_whole_though_writing_ends_early(asked, monkeypatch):
  before = pod_compile.FILE.read_bytes()

  def write(path, text, **options):
    path.write_bytes(text.encode()[: len(text) // 2])
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(pathlib.Path, 'write_text', write)
  with pytest.raises(OSError, match='space'):
    pod_compile.main(['--cells=Qwen3-8B,v6e-8,32k,verify'])
  assert pod_compile.FILE.read_bytes() == before
  assert [*pod_compile.FILE.parent.iterdir()] == [pod_compile.FILE]


# Spawned workers import it, too. A cell of prefill is done at once, others
# would take minutes.
PROGRAM = """
import os, pathlib, sys, time
from experiments import pod_compile

FOLDER = pathlib.Path(__file__).parent
RECORDS = pod_compile.load()

def measure(cell):
  if cell.stage != 'prefill':
    (FOLDER / f'{os.getpid()}.pid').touch()
    time.sleep(600)
  return RECORDS[cell.key]

if __name__ == '__main__':
  pod_compile.FILE = FOLDER / 'costs.json'
  pod_compile.measure = measure
  words = '--cells=Qwen3-8B,v6e-8,32k'
  sys.exit(pod_compile.main([words, '--jobs=2']))
"""


def test_ctrl_c_keeps_what_is_done_and_ends_the_workers(tmp_path):
  """At once, and in one line: a cell takes minutes."""
  program, file = tmp_path / 'program.py', tmp_path / 'costs.json'
  program.write_text(PROGRAM)
  process = subprocess.Popen(
    [sys.executable, program],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    start_new_session=True,
  )
  try:
    until_s = time.monotonic() + 120
    while not (file.exists() and len([*tmp_path.glob('*.pid')]) == 2):
      assert process.poll() is None, process.stderr.read()
      assert time.monotonic() < until_s
      time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, error = process.communicate(timeout=60)
  finally:
    with contextlib.suppress(ProcessLookupError):  # whoever is left
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
  assert process.returncode == 130
  assert error.startswith('interrupted; 1 of 5 cells were compiled')
  assert str(file) in error
  assert error.count('\n') == 1
  (record,) = json.loads(file.read_text('utf-8'))
  assert record['stage'] == 'prefill'
  for worker in tmp_path.glob('*.pid'):
    assert not pathlib.Path('/proc', worker.stem).exists()


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
