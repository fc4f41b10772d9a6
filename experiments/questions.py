# SPDX-License-Identifier: Apache-2.0
"""Prompts whose answers can be scored, and those of published benchmarks.

It knows no model. LongBench and RULER are read as their authors publish them,
from files of one JSON object a line.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

from experiments import results, text_metrics
from experiments.text_metrics import ListMetric, best
from lynx_jax.config import ConfigError, require

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """A prompt, and what its answer is compared with.

  Attributes:
    name: unique in a study.
    task: what is averaged together.
    prompt: text.
    answers: references.
    metric: scores an answer, 0 to 1.
    most_tokens: of the answer.
    first_line: the answer is the first line that is not empty.
    chat: a model with a chat template is asked by a message of a user.
    length: tokens that the prompt was made for, if it was.
    depth: where in the text the answer stands, 0 to 1, if that was chosen.
  """

  name: str
  task: str
  prompt: str
  answers: tuple[str, ...]
  metric: ListMetric
  most_tokens: int
  first_line: bool = False
  chat: bool = False
  length: int | None = None
  depth: float | None = None

  def answer(self, text: str) -> str:
    """Returns the answer in what a model said."""
    return text.lstrip('\n').split('\n')[0] if self.first_line else text

  def is_answered(self, text: str) -> bool:
    """Whether nothing that follows belongs to the answer."""
    return self.first_line and '\n' in text.lstrip('\n')

  def score(self, text: str) -> float:
    """Scores what a model said."""
    return self.metric(self.answer(text), self.answers)


def _by_class(classes: list[str]) -> ListMetric:
  return best(functools.partial(text_metrics.classification, classes=classes))


_F1, _ROUGE = best(text_metrics.token_f1), best(text_metrics.rouge_l)
_CODE = best(text_metrics.edit_similarity)
# English and code; what takes classes has a function of them.
_LONGBENCH: dict[str, ListMetric | None] = {
  'narrativeqa': _F1,
  'qasper': _F1,
  'multifieldqa_en': _F1,
  'hotpotqa': _F1,
  '2wikimqa': _F1,
  'musique': _F1,
  'gov_report': _ROUGE,
  'qmsum': _ROUGE,
  'multi_news': _ROUGE,
  'trec': None,  # by the classes of each line
  'triviaqa': _F1,
  'samsum': _ROUGE,
  'passage_count': best(text_metrics.count),
  'passage_retrieval_en': best(text_metrics.retrieval),
  'lcc': _CODE,
  'repobench-p': _CODE,
}
_FEW_SHOT = ('trec', 'triviaqa', 'samsum')  # whose first line is scored
_COMPLETED = (*_FEW_SHOT, 'lcc', 'repobench-p')  # without a chat template

# Beginnings of RULER's task names: metric, and tokens of an answer.
_RULER = {
  'niah': (text_metrics.all_found, 128),
  'vt': (text_metrics.all_found, 30),
  'cwe': (text_metrics.all_found, 120),
  'fwe': (text_metrics.all_found, 50),
  'qa': (text_metrics.any_found, 32),
}


def longbench(
  folder: str, settings_folder: str, most: int = 0
) -> Iterator[Question]:
  """Yields the questions of LongBench or LongBench-E.

  Args:
    folder: has DATASET.jsonl or DATASET_e.jsonl for each data set.
    settings_folder: has `dataset2prompt.json` and `dataset2maxlen.json` of the
      benchmark's repository (`config/`).
    most: so many lines of each file are taken; 0 is all.

  Raises:
    ConfigError: naming a file, and the line in it.
  """
  files = _files('fidelity.longbench', folder, '*.jsonl')
  prompts = _settings(settings_folder, 'dataset2prompt.json', str)
  lengths = _settings(settings_folder, 'dataset2maxlen.json', int)
  for file in files:
    data_set = file.stem.removesuffix('_e')
    require(
      data_set in _LONGBENCH,
      f'{file}: {data_set!r} must be one of {", ".join(_LONGBENCH)} (the '
      'Chinese sets need a word segmenter); take other files out of the folder',
    )
    for known, name in ((prompts, 'prompt'), (lengths, 'maxlen')):
      require(
        data_set in known,
        f'{pathlib.Path(settings_folder) / f"dataset2{name}.json"}: '
        f'{data_set!r} is missing',
      )
    require(
      lengths[data_set] > 0,
      f'{pathlib.Path(settings_folder) / "dataset2maxlen.json"}: '
      f'{data_set}={lengths[data_set]} must be positive',
    )
    _check_prompt(settings_folder, data_set, prompts[data_set])
    for number, place, record in _first(lines(file), most):
      fields = {
        name: _field(place, record, name, str) for name in ('context', 'input')
      }
      metric = _LONGBENCH[data_set]
      answers = _texts(place, record, 'answers')
      if data_set == 'passage_retrieval_en':
        _check_paragraphs(place, answers)
      task = file.stem
      if file.stem != data_set:
        task += '_' + _bucket(_field(place, record, 'length', int))
      yield Question(
        name=f'{file.stem}/{number}',
        task=task,
        prompt=prompts[data_set].format(**fields),
        answers=answers,
        metric=metric or _by_class([*_texts(place, record, 'all_classes')]),
        most_tokens=lengths[data_set],
        first_line=data_set in _FEW_SHOT,
        chat=data_set not in _COMPLETED,
      )


def _check_prompt(folder: str, data_set: str, prompt: str) -> None:
  """Takes no field but these two, nor a part or a format of them."""
  try:
    fields = [*string.Formatter().parse(prompt)]
    wrong = ''.join(
      f'{{{name}{"!" if conversion else ""}{conversion or ""}'
      f'{":" if form else ""}{form}}}'
      for _, name, form, conversion in fields
      if name is not None
      and (name not in ('context', 'input') or form or conversion)
    )
  except ValueError as error:
    wrong = str(error)
  file = pathlib.Path(folder) / 'dataset2prompt.json'
  require(
    not wrong,
    f'{file}: the prompt of {data_set!r} must have {{context}} and {{input}} '
    f'alone, written so ({wrong})',
  )


def _bucket(words: int) -> str:
  """Returns what LongBench-E averages together, by the context's length."""
  return '0-4k' if words < 4000 else '4-8k' if words < 8000 else '8k+'


def ruler(folder: str, most: int = 0) -> Iterator[Question]:
  """Yields the questions of RULER's synthetic tasks.

  Args:
    folder: has TASK/validation.jsonl or TASK.jsonl for each task.
    most: so many lines of each file are taken; 0 is all.

  Raises:
    ConfigError: naming a file, and the line in it.
  """
  found: dict[str, pathlib.Path] = {}
  for file in _files('fidelity.ruler', folder, '**/*.jsonl'):
    split = file.stem in ('validation', 'test')
    task = file.parent.name if split else file.stem
    kind = task.split('_')[0]
    require(
      kind in _RULER,
      f'{file}: task {task!r} must begin with one of {", ".join(_RULER)}',
    )
    other = found.setdefault(task, file)
    require(
      other == file,
      f'fidelity.ruler={folder!r} has task {task!r} twice, in {other} and '
      f'{file}; it must be a folder of one length, and of prompts alone',
    )
    metric, most_tokens = _RULER[kind]
    for number, place, record in _first(lines(file), most):
      prompt = _field(place, record, 'input', str)
      if 'answer_prefix' in record:
        prompt += _field(place, record, 'answer_prefix', str)
      answers = _texts(place, record, 'outputs')
      require(
        all(answer.strip() for answer in answers),
        f'{place}: outputs={answers!r:.40} has an empty text, which any answer '
        'holds; remove it',
      )
      yield Question(
        name=f'{task}/{number}',
        task=task,
        prompt=prompt,
        answers=answers,
        metric=metric,
        most_tokens=most_tokens,
      )


def lines(file: pathlib.Path) -> Iterator[tuple[int, str, Record]]:
  """Yields number, place (`FILE:LINE`) and object of every line.

  Raises:
    ConfigError: a line is no JSON object, there is none, or the file cannot be
      read.
  """
  number = 0
  try:
    content = file.read_bytes()
  except OSError as error:
    raise ConfigError(f'{file}: cannot be read: {error.strerror}') from error
  for number, line in enumerate(content.splitlines(), 1):
    place = f'{file}:{number}'
    require(bool(line.strip()), f'{place}: no JSON, it is blank; remove it')
    yield number, place, results.parse(line, place)
  require(number > 0, f'{file}: is empty; it must have one JSON object a line')


def _first(found: Iterator, most: int) -> Iterator:
  return itertools.islice(found, most or None)


def _files(field: str, folder: str, pattern: str) -> list[pathlib.Path]:
  files = sorted(pathlib.Path(folder).glob(pattern))
  require(bool(files), f'{field}={folder!r} must be a folder with {pattern}')
  return files


def _settings(folder: str, name: str, kind: type) -> dict[str, Any]:
  file = pathlib.Path(folder) / name
  try:
    values = json.loads(file.read_bytes())
  except FileNotFoundError:
    raise ConfigError(
      f'{str(file)!r} does not exist; fidelity.longbench_config must be the '
      "folder config/ of LongBench's repository"
    ) from None
  except OSError as error:
    raise ConfigError(f'{file}: cannot be read: {error.strerror}') from error
  except (ValueError, RecursionError) as error:
    raise ConfigError(f'{file}: no JSON: {error}') from error
  require(
    isinstance(values, dict)
    and all(type(value) is kind for value in values.values()),
    f'{file}: must be an object whose values are of type {kind.__name__}',
  )
  return values


def _field(place: str, record: Record, name: str, kind: type) -> Any:
  require(name in record, f'{place}: {name!r} is missing')
  value = record[name]
  require(
    isinstance(value, kind),
    f'{place}: {name}={value!r:.40} must be of type {kind.__name__}',
  )
  if kind is str:
    _check_characters(place, name, value)
  return value


def _texts(place: str, record: Record, name: str) -> tuple[str, ...]:
  values = _field(place, record, name, list)
  require(
    bool(values) and all(isinstance(value, str) for value in values),
    f'{place}: {name}={values!r:.40} must be texts, one at least',
  )
  for value in values:
    _check_characters(place, name, value)
  return tuple(values)


def _check_characters(place: str, name: str, text: str) -> None:
  half = re.search('[\\ud800-\\udfff]', text)  # JSON has a notation for it
  require(
    half is None,
    f'{place}: {name} has half a character, {half and half[0]!r}; remove it',
  )


def _check_paragraphs(place: str, answers: tuple[str, ...]) -> None:
  for answer in answers:
    try:
      text_metrics.retrieval('', answer)
    except ValueError as error:
      raise ConfigError(f'{place}: {error}') from error
