# SPDX-License-Identifier: Apache-2.0
"""Synthetic tasks in the manner of RULER (arXiv:2404.06654 §3), seeded.

It knows no model: a tokenizer's `encode` tells how long a prompt is. Text to
hide things in, and words, are those of the shipped prompts. Wording is our
own, so scores cannot be compared with published ones; `questions.ruler` reads
the benchmark's own files.

| task | hidden in the text | asked for |
|---|---|---|
| `passkey` | one number, said twice (arXiv:2305.16300 §4.2) | it |
| `needle` | a number for a word | it |
| `needles` | numbers for four words | that of one word |
| `variables` | a chain of five assignments | all five names |
| `common_words` | a list with five words six times, others once | the five |
"""

import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence

from experiments import prompts, text_metrics
from experiments.questions import Question
from lynx_jax.config import require

Encode = Callable[[str], Sequence[int]]
# Puts pieces of text into so much filler that ends at a sentence.
_Make = Callable[[random.Random, int, float], tuple[str, tuple[str, ...]]]

_FILLER = ('book', 'question')  # prose, in sentences
_NEEDLES, _CHAIN, _COMMON = 4, 5, 5


def make(
  task: str,
  length: int,
  depth: float | None,
  sample: int,
  *,
  encode: Encode,
  seed: int,
) -> Question:
  """Returns one question, as long as it can be within `length` tokens.

  Args:
    task: one of TASKS.
    length: most tokens of the prompt.
    depth: where in the text the answer stands, 0 to 1; None for a task that
      has no such place.
    sample: which of the questions that are otherwise alike.
    encode: of the tokenizer.
    seed: of the study.

  Raises:
    ConfigError: the task does not fit into `length`.
  """
  place = '' if depth is None else f'/{depth:g}'
  name = f'{task}/{length}{place}/{sample}'

  def made(size: int) -> tuple[str, tuple[str, ...]]:
    rng = random.Random(f'{seed}/{name}')
    return TASKS[task][0](rng, size, 0.0 if depth is None else depth)

  least, most = 1, 2
  while len(encode(made(most)[0])) <= length:
    least, most = most, 2 * most
  while most - least > 1:
    middle = (least + most) // 2
    if len(encode(made(middle)[0])) <= length:
      least = middle
    else:
      most = middle
  prompt, answers = made(least)
  require(
    len(encode(prompt)) <= length,
    f'fidelity.lengths: {task} does not fit into {length} tokens',
  )
  return Question(
    name=name,
    task=task,
    prompt=prompt,
    answers=answers,
    metric=text_metrics.all_found,
    most_tokens=TASKS[task][1],
    first_line=True,
    length=length,
    depth=depth,
  )


def grid(
  tasks: Sequence[str],
  lengths: Sequence[int],
  depths: Sequence[float],
  samples: int,
  *,
  encode: Encode,
  seed: int,
) -> Iterator[Question]:
  """Yields as many questions of every task and length.

  Tasks without a depth get samples in its stead.
  """
  for length in lengths:
    for task in tasks:
      for i, depth in enumerate(depths):
        for sample in range(samples):
          spread = task in SPREAD
          yield make(
            task,
            length,
            None if spread else depth,
            i * samples + sample if spread else sample,
            encode=encode,
            seed=seed,
          )


def _passkey(rng, size, depth):
  key = str(rng.randint(10_000, 99_999))
  text = _hide(
    rng, size, {depth: f'The pass key is {key}. Remember it: {key}.'}
  )
  return (
    'A pass key is hidden in the text below. Find it and remember it.\n\n'
    f'{text}\n\nWhat is the pass key? The pass key is',
    (key,),
  )


def _needle(rng, size, depth, others=0):
  keys = rng.sample(_words(), 1 + others)
  numbers = rng.sample(range(1_000_000, 10_000_000), 1 + others)
  depths = [depth, *(rng.random() for _ in range(others))]
  text = _hide(
    rng,
    size,
    {
      at: f'The magic number for {key} is {number}.'
      for at, key, number in zip(depths, keys, numbers, strict=True)
    },
  )
  return (
    'Magic numbers are hidden in the text below. Remember them.\n\n'
    f'{text}\n\nWhat is the magic number for {keys[0]}? '
    f'The magic number for {keys[0]} is',
    (str(numbers[0]),),
  )


def _variables(rng, size, depth):
  del depth
  parts = []
  for count in (2, size):  # an example first
    names = [
      ''.join(rng.choices('ABCDEFGHIJKLMNOPQRSTUVWXYZ', k=5))
      for _ in range(_CHAIN)
    ]
    value = rng.randint(10_000, 99_999)
    chain = [
      f'VAR {name} = {before}.'
      for name, before in zip(
        names, [value, *(f'VAR {name}' for name in names)], strict=False
      )
    ]
    depths = sorted(rng.random() for _ in chain)
    text = _hide(rng, count, dict(zip(depths, chain, strict=True)))
    parts.append(
      'Keep track of the variables that are assigned in the text below.\n\n'
      f'{text}\n\nQuestion: Which variables have the value {value}?\n'
      f'Answer: The {_CHAIN} variables with the value {value} are'
    )
    if len(parts) == 1:
      parts[0] += f' {", ".join(names)}.\n\n'
  return ''.join(parts), tuple(names)


def _common_words(rng, size, depth):
  del depth
  parts = []
  for count, repeats in ((_COMMON, 3), (size, 6)):  # an example first
    words = rng.sample(_words(), min(_COMMON + count, len(_words())))
    common, rest = words[:_COMMON], words[_COMMON:]
    # More words than there are come again, but never as often as common ones.
    listed = common * (repeats * -(-count // len(rest)))
    listed += (rest * -(-count // len(rest)))[:count]
    rng.shuffle(listed)
    parts.append(
      'Some words of the list below stand there more often than others. '
      'Remember those.\n\n'
      + ' '.join(f'{i}. {word}' for i, word in enumerate(listed, 1))
      + f'\n\nQuestion: Which {_COMMON} words stand in the list most often?\n'
      f'Answer: The {_COMMON} most frequent words are'
    )
    if len(parts) == 1:
      parts[0] += f' {", ".join(common)}.\n\n'
  return ''.join(parts), tuple(common)


# How a prompt is made of so many sentences or words, and the most tokens of
# an answer.
TASKS: dict[str, tuple[_Make, int]] = {
  'passkey': (_passkey, 8),
  'needle': (_needle, 12),
  'needles': (functools.partial(_needle, others=_NEEDLES - 1), 12),
  'variables': (_variables, 32),
  'common_words': (_common_words, 24),
}
SPREAD = ('variables', 'common_words')  # all over the text: without a depth


def _hide(rng: random.Random, size: int, hidden: dict[float, str]) -> str:
  """Returns `size` sentences of filler with texts at relative depths."""
  sentences = _sentences()
  start = rng.randrange(len(sentences))
  text = [sentences[(start + i) % len(sentences)] for i in range(size)]
  for depth in sorted(hidden, reverse=True):
    text.insert(round(depth * size), hidden[depth])
  return ' '.join(text)


@functools.cache
def _sentences() -> tuple[str, ...]:
  text = ' '.join(prompts.read(name) for name in _FILLER)
  parts = re.split(r'(?<=[.?!]) +', ' '.join(text.split()))
  return tuple(part for part in parts if 20 < len(part) < 320)


@functools.cache
def _words() -> tuple[str, ...]:
  text = ' '.join(prompts.read(name) for name in prompts.KEEPS_END)
  return tuple(sorted(set(re.findall(r'(?<![\w-])[a-z]{5,8}(?![\w-])', text))))
