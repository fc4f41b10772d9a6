# SPDX-License-Identifier: Apache-2.0
"""Synthetic tasks: what is asked for stands in the text, where it should."""

import re

import pytest

from experiments import synthetic
from lynx_jax.config import ConfigError


def _encode(text: str) -> list[str]:
  """Takes words for tokens."""
  return text.split()


def _make(task, length=600, depth=None, sample=0, seed=0):
  return synthetic.make(task, length, depth, sample, encode=_encode, seed=seed)


def _body(question) -> str:
  """Returns the text between the task and the question."""
  return question.prompt.split('\n\n')[-2]


@pytest.mark.parametrize('length', [300, 600])
@pytest.mark.parametrize('task', synthetic.TASKS)
def test_prompts_are_as_long_as_they_may_be(task, length):
  question = _make(task, length, None if task in synthetic.SPREAD else 0.5)
  tokens = len(_encode(question.prompt))
  assert length - 70 < tokens <= length  # a sentence
  assert question.score(', '.join(question.answers)) == 1.0
  assert question.score('none of them') == 0.0


@pytest.mark.parametrize('depth', [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize('task', ['passkey', 'needle', 'needles'])
def test_the_answer_stands_at_its_depth(task, depth):
  question = _make(task, depth=depth)
  (answer,) = question.answers
  body = _body(question)
  at = body.index(answer) / len(body)
  assert abs(at - depth) < 0.15, at
  # Of the question's key there is only one.
  if task != 'passkey':
    key = re.search(r'magic number for (\w+) is$', question.prompt)[1]
    assert body.count(f'for {key} is {answer}.') == 1
    numbers = re.findall(r'magic number for \w+ is (\d+)', body)
    assert len(set(numbers)) == (4 if task == 'needles' else 1)


def test_a_chain_leads_to_the_value():
  question = _make('variables')
  body = _body(question)
  value = re.search(r'have the value (\d+)\?\n.*are$', question.prompt)[1]
  known, wanted = {value}, list(question.answers)
  for name, before in re.findall(r'VAR (\w+) = (?:VAR )?(\w+)\.', body):
    assert before in known  # in the order of the text
    known.add(name)
  assert known == {value, *wanted}
  assert len(wanted) == 5


def test_common_words_are_the_most_frequent():
  question = _make('common_words')
  words = re.findall(r'\d+\. (\w+)', _body(question))
  counts = sorted(
    ((words.count(word), word) for word in set(words)), reverse=True
  )
  assert {word for _, word in counts[:5]} == set(question.answers)
  assert counts[4][0] > counts[5][0]


def test_a_grid_is_full_and_always_the_same():
  def grid(seed=0, samples=1):
    return [
      *synthetic.grid(
        ['needle', 'variables'],
        [300, 400],
        [0.0, 1.0],
        samples,
        encode=_encode,
        seed=seed,
      )
    ]

  found = grid()
  assert [question.name for question in found] == [
    'needle/300/0/0',
    'needle/300/1/0',
    'variables/300/0',
    'variables/300/1',
    'needle/400/0/0',
    'needle/400/1/0',
    'variables/400/0',
    'variables/400/1',
  ]
  assert grid() == found
  assert len({question.answers for question in found}) == len(found)
  assert not {q.prompt for q in grid(seed=1)} & {q.prompt for q in found}
  assert len({q.name for q in grid(samples=2)}) == 16


def test_a_task_that_does_not_fit_is_told():
  with pytest.raises(ConfigError, match='variables does not fit into 50'):
    _make('variables', 50)
