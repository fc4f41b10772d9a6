# SPDX-License-Identifier: Apache-2.0
"""Published benchmarks are read as published; a broken line is named."""

import json

import pytest

from experiments import questions
from lynx_jax.config import ConfigError

PROMPTS = {
  'qasper': 'Article: {context}\n\nQuestion: {input}\n\nAnswer:',
  'trec': '{context}\n{input}',
  'lcc': 'Complete.\n{context}Next line of code:\n',
  'passage_retrieval_en': '{context}\n{input}\nThe answer is: ',
}
LENGTHS = {'qasper': 128, 'trec': 64, 'lcc': 64, 'passage_retrieval_en': 32}
LINE = {
  'input': 'Who?',
  'context': 'It was {Ada}.',
  'answers': ['Ada Lovelace', 'Ada'],
  'length': 3,
  'dataset': 'qasper',
  'language': 'en',
  'all_classes': None,
  '_id': 'x',
}


@pytest.fixture
def folder(tmp_path):
  """Returns a folder with the benchmark's settings in it."""
  (tmp_path / 'dataset2prompt.json').write_text(json.dumps(PROMPTS))
  (tmp_path / 'dataset2maxlen.json').write_text(json.dumps(LENGTHS))
  (tmp_path / 'data').mkdir()
  return tmp_path


def _write(folder, name, *records):
  text = ''.join(json.dumps(record) + '\n' for record in records)
  file = folder / 'data' / name
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(text)
  return file


def _longbench(folder, most=0):
  return [*questions.longbench(str(folder / 'data'), str(folder), most)]


def _ruler(folder, most=0):
  return [*questions.ruler(str(folder / 'data'), most)]


def test_longbench(folder):
  long = {'answers': ['no'], 'length': 4000}
  _write(folder, 'qasper_e.jsonl', LINE | {'length': 3999}, LINE | long)
  trec = {'answers': ['Other entity'], 'all_classes': ['Other entity', 'City']}
  _write(folder, 'trec.jsonl', LINE | trec)
  first, second, third = _longbench(folder)
  assert first.name == 'qasper_e/1'
  tasks = [question.task for question in (first, second, third)]
  assert tasks == ['qasper_e_0-4k', 'qasper_e_4-8k', 'trec']
  assert first.prompt == 'Article: It was {Ada}.\n\nQuestion: Who?\n\nAnswer:'
  assert (first.most_tokens, first.chat, first.first_line) == (128, True, False)
  # The best of its references: F1 of 'ada' and 'ada lovelace' is 2/3.
  assert first.score('the Ada!') == 1.0
  assert second.score('the Ada!') == 0.0
  assert (third.chat, third.first_line) == (False, True)
  assert third.score('\nOther entity\nCity') == 1.0
  assert third.score('Other entity, City') == 0.5
  assert [q.name for q in _longbench(folder, most=1)] == [
    'qasper_e/1',
    'trec/1',
  ]


def test_ruler(folder):
  _write(
    folder,
    'niah_multivalue/validation.jsonl',
    {
      'index': 0,
      'input': 'Text. What are',
      'answer_prefix': ' They are',
      'outputs': ['12', '34'],
      'length': 9,
    },
  )
  _write(
    folder, 'qa_1.jsonl', {'index': 7, 'input': 'Q', 'outputs': ['Yes', 'Yep']}
  )
  needle, qa = _ruler(folder)
  assert needle.task == 'niah_multivalue'
  assert needle.prompt == 'Text. What are They are'
  assert needle.most_tokens == 128
  assert needle.score('34 only') == 0.5
  assert (qa.task, qa.prompt, qa.most_tokens) == ('qa_1', 'Q', 32)
  assert qa.score('I say yep.') == 1.0


@pytest.mark.parametrize(
  'line, message',
  [
    ('{"input": ', 'no JSON'),
    (' ', 'it is blank; remove it'),
    ('{"context": "a \\ud800", "input": ""}', 'half a character'),
    (
      '{"context": "", "input": "", "answers": ["\\ud800"]}',
      'half a character',
    ),
    ('\udcff', 'no JSON'),
    ('[1]', '[1] must be an object'),
    ('{"input": "q"}', "'context' is missing"),
    ('{"context": "c"}', "'input' is missing"),
    ('{"context": 3, "input": "q"}', 'context=3 must be of type str'),
    ('{"context": "", "input": "", "answers": []}', 'texts, one at least'),
    ('{"context": "", "input": "", "answers": [1]}', 'texts, one at least'),
    pytest.param('{"a": ' + '[' * 100_000, 'no JSON', id='deep'),
    pytest.param('{"a": ' + '9' * 5000 + '}', 'no JSON', id='digits'),
  ],
)
def test_a_broken_line_is_named(folder, line, message):
  file = _write(folder, 'qasper.jsonl', LINE)
  with file.open('ab') as end:
    end.write(line.encode('utf-8', 'surrogateescape') + b'\n')
  with pytest.raises(ConfigError) as caught:
    _longbench(folder)
  assert f'{file}:2: ' in str(caught.value)
  assert message in str(caught.value)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
  'name, record, message',
  [
    ('trec.jsonl', LINE, 'all_classes=None must be of type list'),
    ('passage_retrieval_en.jsonl', LINE, 'must be like "Paragraph 7"'),
    ('vcsum.jsonl', LINE, "'vcsum' must be one of"),
    ('hotpotqa.jsonl', LINE, "'hotpotqa' is missing"),
  ],
)
def test_a_data_set_must_fit(folder, name, record, message):
  file = _write(folder, name, record)
  with pytest.raises(ConfigError, match=message) as caught:
    _longbench(folder)
  assert file.stem in str(caught.value)


@pytest.mark.parametrize(
  'record, message',
  [
    ({'outputs': ['a']}, "'input' is missing"),
    ({'input': 'q'}, "'outputs' is missing"),
    ({'input': 'q', 'outputs': 'a'}, "outputs='a' must be of type list"),
    ({'input': 'q', 'outputs': ['']}, 'has an empty text'),
    ({'input': 'q', 'outputs': ['a', ' ']}, 'has an empty text'),
  ],
)
def test_a_line_of_ruler_must_fit(folder, record, message):
  file = _write(folder, 'vt/validation.jsonl', record)
  with pytest.raises(ConfigError, match=message) as caught:
    _ruler(folder)
  assert str(caught.value).startswith(f'{file}:1: ')


def test_an_unknown_task_of_ruler(folder):
  _write(folder, 'sums/validation.jsonl', {'input': 'q', 'outputs': ['a']})
  with pytest.raises(ConfigError, match="'sums' must begin with one of niah"):
    _ruler(folder)


@pytest.mark.parametrize(
  'names',
  [
    ('4096/data/vt/validation.jsonl', '8192/data/vt/validation.jsonl'),
    ('data/vt/validation.jsonl', 'pred/vt.jsonl'),  # as RULER leaves them
  ],
)
def test_lengths_and_predictions_of_ruler_are_not_mixed(folder, names):
  files = [_write(folder, n, {'input': 'q', 'outputs': ['a']}) for n in names]
  with pytest.raises(ConfigError, match="'vt' twice") as caught:
    _ruler(folder)
  assert all(str(file) in str(caught.value) for file in files)


def test_files_that_are_not_there(folder, tmp_path):
  with pytest.raises(ConfigError, match=r'fidelity.longbench=.*data'):
    _longbench(folder)
  with pytest.raises(ConfigError, match=r'fidelity.ruler=.*data'):
    _ruler(folder)
  _write(folder, 'qasper.jsonl')
  with pytest.raises(ConfigError, match=r'qasper.jsonl: is empty'):
    _longbench(folder)
  (tmp_path / 'dataset2maxlen.json').unlink()
  with pytest.raises(ConfigError, match=r'maxlen.json. does not exist'):
    _longbench(folder)


@pytest.mark.parametrize(
  'text, message',
  [
    ('{', 'no JSON'),
    ('[]', 'must be an object'),
    ('{"qasper": 1}', 'type str'),
    pytest.param('[' * 100_000, 'no JSON', id='deep'),
  ],
)
def test_broken_settings(folder, text, message):
  _write(folder, 'qasper.jsonl', LINE)
  (folder / 'dataset2prompt.json').write_text(text)
  with pytest.raises(ConfigError, match=f'dataset2prompt.json: .*{message}'):
    _longbench(folder)


@pytest.mark.parametrize(
  'length, message', [(0, 'qasper=0 must be positive'), (True, 'type int')]
)
def test_an_answer_without_tokens(folder, length, message):
  _write(folder, 'qasper.jsonl', LINE)
  (folder / 'dataset2maxlen.json').write_text(json.dumps({'qasper': length}))
  with pytest.raises(ConfigError, match=f'dataset2maxlen.json: .*{message}'):
    _longbench(folder)


@pytest.mark.parametrize('name', ['data/qasper.jsonl', 'dataset2prompt.json'])
def test_a_folder_in_place_of_a_file(folder, name):
  _write(folder, 'qasper.jsonl', LINE)
  (folder / name).unlink()
  (folder / name).mkdir()
  with pytest.raises(ConfigError, match='cannot be read: Is a dir') as caught:
    _longbench(folder)
  assert str(caught.value).startswith(str(folder / name))


@pytest.mark.parametrize(
  'field',
  [
    '{question}',
    '{context.foo}',
    '{context.__class__}',
    '{context[a]}',
    '{context[9]}',
    '{context!r}',
    '{context:5000000000}',
    '{input:{input}}',
    '{0}',
    '{}',
    '{',
  ],
)
def test_a_prompt_with_other_fields(folder, field):
  _write(folder, 'qasper.jsonl', LINE)
  prompts = json.dumps(PROMPTS | {'qasper': '{context} ' + field})
  (folder / 'dataset2prompt.json').write_text(prompts)
  with pytest.raises(ConfigError, match=r"'qasper' must have \{context"):
    _longbench(folder)
