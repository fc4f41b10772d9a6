# SPDX-License-Identifier: Apache-2.0
"""Metrics by hand, and against what the benchmarks' packages returned."""

import functools

import pytest

from experiments import text_metrics

# The last column is rouge 1.0.1: `Rouge().get_scores(…)[0]['rouge-l']['f']`.
ROUGE = [
  ('The cat sat on the mat.', 'the cat is on the mat', 0.727272722),
  (
    'A summary of two sentences. The second one is here.',
    'The second sentence is here. A summary of two.',
    0.842105258,
  ),
  (
    'to be or not to be that is the question',
    'to be is to do. to do is to be. do be do be do',
    0.333333329,
  ),
  ('one two three four five', 'five four three two one', 0.199999995),
  ('word.\nline two.  \n', 'word. line two', 0.857142852),
  ('nothing shared at all', 'completely different words', 0.0),
  ('w1 w2 w6 w7 w8. w1 w3 w8 w9 w5', 'w1 w2 w3 w4 w5', 0.615384611),
  ('', 'reference', 0.0),
  ('...', 'reference', 0.0),
  (
    'g g. h e f d e. b e c b f b f d h e. a. g',
    'a f f b d c h. f h. e f d e g d d a e',
    0.874999995,
  ),
  ('c a g e d g h', 'f. b f d. e. d c a. c d. b. d b f b. a', 0.666666662),
  ('b a a b b e c. h.', 'g f h c d a c', 0.54545454),
  (
    'e. h a g e g e a b a c',
    'f f c g b. d c h g. g a b c',
    0.769230764,
  ),
]


@pytest.mark.parametrize('prediction, reference, score', ROUGE)
def test_rouge_l_is_that_of_the_package(prediction, reference, score):
  found = text_metrics.rouge_l(prediction, reference)
  assert found == pytest.approx(score, abs=1e-8)


# The last column is fuzzywuzzy 0.18.0 on the first line of code.
@pytest.mark.parametrize(
  'prediction, reference, score',
  [
    ('  return x + 1\n', '  return x + 1', 1.0),
    ('# comment\nfor i in range(3):', 'for i in range(4):', 0.94),
    ('```python\nx = 1\n```', 'x = 1', 1.0),
    ('', 'x', 0.0),
    ('x // y', '', 1.0),  # there is no line: both are empty
    ('\n\nx = 2\nx = 1', 'x = 1', 0.8),
    ('def f(a, b):\n  pass', 'def g(b, a):', 0.75),
  ],
)
def test_edit_similarity_is_that_of_the_package(prediction, reference, score):
  assert text_metrics.edit_similarity(prediction, reference) == score


@pytest.mark.parametrize(
  'prediction, reference, score',
  [
    ('The Eiffel Tower!', 'an eiffel tower', 1.0),
    ('in the Eiffel tower', 'Eiffel Tower', 0.8),  # 2/3 and 2/2
    ('a a b', 'a b b', 2 / 3),  # `a` is an article: {b} of {b, b}
    ('x x y', 'x y y', 2 / 3),
    ('Paris', 'London', 0.0),
    ('', 'London', 0.0),
    ('the', 'a', 0.0),
  ],
)
def test_token_f1(prediction, reference, score):
  found = text_metrics.token_f1(prediction, reference)
  assert found == pytest.approx(score)


@pytest.mark.parametrize(
  'prediction, reference, score',
  [
    ('Number', 'Number', 1.0),
    ('Number or City', 'Number', 0.5),
    ('City', 'Number', 0.0),
    ('', 'Number', 0.0),
    # A part of the right name does not count, unless one such comes before.
    ('Other number', 'Other number', 1.0),
    ('Big Other number', 'Big Other number', 0.5),
  ],
)
def test_classification(prediction, reference, score):
  classes = ['City', 'Other', 'number', 'Number', 'Other number']
  classes += ['Big Other number']
  if reference == 'Other number':
    classes.remove('number')
  if reference == 'Big Other number':
    classes.remove('Other number')
  found = text_metrics.classification(prediction, reference, classes)
  assert found == score


def test_numbers():
  assert text_metrics.count('There are 7, not 8.', '7') == 0.5
  assert text_metrics.count('none', '7') == 0.0
  assert text_metrics.count('07', '7') == 0.0
  retrieval = functools.partial(text_metrics.retrieval, reference='Paragraph 3')
  assert retrieval('Paragraph 3') == 1.0
  assert retrieval('3 or 13 or 3?') == pytest.approx(2 / 3)
  assert retrieval('Paragraph 30') == 0.0
  with pytest.raises(ValueError, match='Paragraph 7'):
    text_metrics.retrieval('3', '3')


def test_strings_of_ruler():
  assert text_metrics.all_found('A or\x00b', ['a', 'B', 'c', 'd']) == 0.5
  assert text_metrics.any_found('A and b', ['x', 'B']) == 1.0
  assert text_metrics.any_found('A and b', ['x']) == 0.0


def test_the_best_reference_counts():
  best = text_metrics.best(text_metrics.token_f1)
  assert best('ada', ['someone', 'Ada', 'Ada Lovelace']) == 1.0
