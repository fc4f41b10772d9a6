# SPDX-License-Identifier: Apache-2.0
"""`results.jsonl` is valid line by line, whatever happens to the writer."""

import errno
import json
import os

import numpy as np
import pytest

from experiments import results
from lynx_jax.config import ConfigError


def _lines(path):
  return path.read_bytes().split(b'\n')


def test_records_are_appended_over_runs(tmp_path):
  for value in (1, 2):
    with results.Writer(tmp_path / 'a b') as writer:
      writer.write({'value': value})
  assert [r['value'] for r in results.read(writer.path)] == [1, 2]


def test_unknown_is_null_and_unknown_fields_are_refused():
  record = results.request_record(scheme='lynx')
  assert set(results.REQUEST_FIELDS) < set(record)
  assert record['ttft_provisional_s'] is None
  with pytest.raises(ValueError, match='ttft_s'):
    results.request_record(ttft_s=1.0)


def test_numpy_values_become_numbers(tmp_path):
  with results.Writer(tmp_path) as writer:
    writer.write({'a': np.float32(0.5), 'b': np.arange(2)})
  assert list(results.read(writer.path)) == [{'a': 0.5, 'b': [0, 1]}]


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_what_json_has_not_is_refused_and_nothing_written(tmp_path, value):
  with results.Writer(tmp_path) as writer:
    with pytest.raises(ValueError, match='JSON'):
      writer.write({'value': value})
  assert writer.path.read_bytes() == b''


@pytest.mark.parametrize('text', ['a\u2028b\x85c', 'a\nb\r', '\ud800', '🙂'])
def test_no_text_breaks_a_line(tmp_path, text):
  with results.Writer(tmp_path) as writer:
    writer.write({'text': text})
  (line,) = writer.path.read_text(encoding='utf-8').splitlines()
  assert json.loads(line) == {'text': text}


@pytest.mark.parametrize('length', [1, 9, 70_000, 200_000])
def test_a_half_line_is_isolated(tmp_path, length):
  half = b'{"text": "' + b'x' * length
  path = tmp_path / results.FILE
  path.write_bytes(b'{"n": 1}\n' + half)
  with results.Writer(tmp_path) as writer:
    assert writer.isolated is not None
    assert writer.isolated.read_bytes() == half + b'\n'
    writer.write({'n': 2})
  assert [r['n'] for r in results.read(path)] == [1, 2]


def test_a_whole_line_without_its_end_is_kept(tmp_path):
  path = tmp_path / results.FILE
  path.write_bytes(b'{"n": 1}\n{"n": 2}')
  with results.Writer(tmp_path) as writer:
    assert writer.isolated is None
    writer.write({'n': 3})
  assert [r['n'] for r in results.read(path)] == [1, 2, 3]


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
  with results.Writer(tmp_path) as writer:
    writer.write({'n': 1})
    write = os.write
    calls = iter([5])

    def full(file, data):
      for size in calls:
        return write(file, data[:size])
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
      patch.setattr(os, 'write', full)
      with pytest.raises(results.WorkdirError, match=r'jsonl.*free some space'):
        writer.write({'n': 2})
    writer.write({'n': 3})
  assert [r['n'] for r in results.read(writer.path)] == [1, 3]


def test_a_really_full_device(tmp_path):
  (tmp_path / results.FILE).symlink_to('/dev/full')
  with results.Writer(tmp_path) as writer:
    with pytest.raises(results.WorkdirError, match='No space left on device'):
      writer.write({'n': 1})


def test_a_workdir_that_is_a_file(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(results.WorkdirError, match='choose another --workdir'):
    results.Writer(tmp_path / 'file')


@pytest.mark.parametrize('line', [b'half', b'', b'[1]', b'\xff'])
def test_reading_names_the_bad_line(line, tmp_path):
  path = tmp_path / results.FILE
  path.write_bytes(b'{}\n' + line + b'\n')
  with pytest.raises(ConfigError, match=r'results\.jsonl:2: .*; remove that'):
    list(results.read(path))


def test_summary_label_is_one_of_three():
  assert results.summary_record('x', 1.0, 's', 3)['label'] == 'measured'
  with pytest.raises(ValueError, match='projected'):
    results.summary_record('x', 1.0, 's', 3, label='guessed')
