# SPDX-License-Identifier: Apache-2.0
"""The metrics of LongBench and RULER: texts in, a score of 0 to 1 out.

It knows no file and no model. Scores can be compared with published ones, so
the definitions are those of the benchmarks' own code with its oddities:
LongBench's `metrics.py` (https://github.com/THUDM/LongBench, arXiv:2308.14508)
on rouge 1.0.1 and fuzzywuzzy 0.18.0 without python-Levenshtein, and RULER's
`scripts/eval` (https://github.com/NVIDIA/RULER, arXiv:2404.06654).
`tests/text_metrics_test.py` has what those packages return. Chinese needs a
word segmenter and is left out.
"""

import collections
import difflib
import re
import string
from collections.abc import Callable, Sequence

# Scores a prediction against one reference, or against all of them.
Metric = Callable[[str, str], float]
ListMetric = Callable[[str, Sequence[str]], float]


def best(metric: Metric) -> ListMetric:
  """Returns the metric that takes the reference with the highest score."""

  def scored(prediction: str, references: Sequence[str]) -> float:
    return max((metric(prediction, r) for r in references), default=0.0)

  return scored


def token_f1(prediction: str, reference: str) -> float:
  """Returns F1 over words, without case, punctuation and articles.

  It is the metric of SQuAD (arXiv:1606.05250 §6.1).
  """
  found, wanted = (
    collections.Counter(_words(text)) for text in (prediction, reference)
  )
  common = (found & wanted).total()
  return 2 * common / (found.total() + wanted.total()) if common else 0.0


def _words(text: str) -> list[str]:
  text = text.lower().translate(str.maketrans('', '', string.punctuation))
  return re.sub(r'\b(a|an|the)\b', ' ', text).split()


def rouge_l(prediction: str, reference: str) -> float:
  """Returns the F-score of ROUGE-L at the level of summaries.

  For every pair of a sentence of either, the words of their longest common
  subsequence; the union of these over the words of each text. A word counts
  once, however often it stands there.
  """
  found, wanted = _sentences(prediction), _sentences(reference)
  if not (found and wanted):
    return 0.0
  common = {
    word
    for one in wanted
    for other in found
    for word in common_subsequence(one, other)
  }
  precision, recall = (
    len(common) / len({word for sentence in text for word in sentence})
    for text in (found, wanted)
  )
  return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
  """Returns words by sentence; one of white space alone has the word ''."""
  parts = (part for part in text.split('.') if part)
  return [' '.join(part.split()).split(' ') for part in parts]


def common_subsequence(one: Sequence[str], other: Sequence[str]) -> list[str]:
  """Returns a longest common subsequence; of several, that of rouge 1.0.1."""
  lengths = [[0] * (len(other) + 1)]
  for word in one:
    above, row = lengths[-1], [0]
    for j, candidate in enumerate(other):
      longer = above[j] + 1 if word == candidate else max(above[j + 1], row[j])
      row.append(longer)
    lengths.append(row)
  i, j, found = len(one), len(other), []
  while i and j:
    if one[i - 1] == other[j - 1]:
      i, j = i - 1, j - 1
      found.append(one[i])
    elif lengths[i - 1][j] > lengths[i][j - 1]:
      i -= 1
    else:
      j -= 1
  return found[::-1]


def classification(
  prediction: str, reference: str, classes: Sequence[str]
) -> float:
  """Returns 1 / (classes that are named), or 0 if the right one is not.

  A class that is a part of the right one's name does not count; but LongBench
  does not look at the class that comes after such a one in its list.
  """
  named = [name for name in classes if name in prediction]
  i = 0
  while i < len(named):
    if named[i] in reference and named[i] != reference:
      del named[i]  # the next one moves here, and is passed over
    i += 1
  return 1 / len(named) if reference in named else 0.0


def retrieval(prediction: str, reference: str) -> float:
  """Returns the share of the numbers that are that of `Paragraph 7`.

  Raises:
    ValueError: the reference names no paragraph.
  """
  number = re.search(r'Paragraph (\d+)', reference)
  if number is None:
    raise ValueError(f'{reference!r} must be like "Paragraph 7"')
  return count(prediction, number[1])


def count(prediction: str, reference: str) -> float:
  """Returns the share of the numbers in the prediction that are right."""
  numbers = re.findall(r'\d+', prediction)
  return numbers.count(reference) / len(numbers) if numbers else 0.0


def edit_similarity(prediction: str, reference: str) -> float:
  """Returns how similar the first line of code is, in steps of 0.01.

  Twice the characters in matching blocks over all characters, by `difflib`.
  Lines with a backquote, `#` or `//` are taken for comments.
  """
  lines = prediction.lstrip('\n').split('\n')
  comment = re.compile('`|#|//')
  line = next((text for text in lines if not comment.search(text)), '')
  if not line or not reference:
    return float(line == reference)
  return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / (
    100
  )


def all_found(prediction: str, references: Sequence[str]) -> float:
  """Returns the share of the references that stand in the prediction."""
  text = _printable(prediction)
  return sum(r.lower() in text for r in references) / len(references)


def any_found(prediction: str, references: Sequence[str]) -> float:
  """Returns 1 if one of the references stands in the prediction, else 0."""
  text = _printable(prediction)
  return float(any(r.lower() in text for r in references))


def _printable(text: str) -> str:
  return re.sub(r'[\x00-\x1f]', '\n', text).lower()
