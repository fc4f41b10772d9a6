# SPDX-License-Identifier: Apache-2.0
"""What a process of a peer is asked and answers, and how it is scored.

It knows no peer. Files are JSON: a task goes in, findings come out.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_TINY = 1e-9  # what a sum of float32 may lack


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """Token ids, and those that follow them in the same text (two or more)."""

  ids: list[int]
  following: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """What a process shall do.

  Attributes:
    gguf: the model's file.
    peers: names of caches.
    prompts: to read with each of them.
  """

  gguf: str
  peers: list[str]
  prompts: list[Prompt]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
  """What a cache did to one prompt.

  Attributes:
    figures: `kl`, `agreement`, `nll` and `nll_over_bf16`, all against the same
      implementation with its KV in float32.
    bits: a value of the prompt's KV, all metadata included.
    prefill_s: of the prompt, in the same implementation.
    coding_s: quantising its KV; None where it is a part of prefill.
  """

  figures: dict[str, float]
  bits: float
  prefill_s: float
  coding_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
  """What a process found.

  Attributes:
    found: by peer, one a prompt.
    not_run: by peer, why.
    versions: of the packages that ran.
  """

  found: dict[str, list[Finding]]
  not_run: dict[str, str]
  versions: dict[str, str]


def serve(measure: Callable[[Task], Findings]) -> None:
  """Runs `TASK.json ANSWER.json` of the command line."""
  source, target = map(pathlib.Path, sys.argv[1:])
  task = json.loads(source.read_text('utf-8'))
  task['prompts'] = [Prompt(**prompt) for prompt in task['prompts']]
  findings = measure(Task(**task))
  target.write_text(json.dumps(dataclasses.asdict(findings)), 'utf-8')


def read(text: str) -> Findings:
  """Parses what `serve` wrote."""
  values: dict[str, Any] = json.loads(text)
  values['found'] = {
    peer: [Finding(**one) for one in found]
    for peer, found in values['found'].items()
  }
  return Findings(**values)


def score(
  reference: np.ndarray, own: np.ndarray, following: Sequence[int]
) -> dict[str, float]:
  """Returns the figures of log-probabilities, as means over positions.

  Args:
    reference, own: f32[T, V], with KV in float32 and as the peer keeps it;
      -inf is a token whose probability is not known. Unknown tokens count as
      one, with what is left of either distribution: KL is then a lower bound.
    following: the T tokens that the text goes on with; unknown ones are left
      out of NLL.
  """
  known = np.isfinite(reference) & np.isfinite(own)
  p, q = (_normalised(x, known) for x in (reference, own))
  rest_p, rest_q = (np.maximum(1 - x.sum(axis=1), 0) for x in (p, q))
  ratio = np.log(np.where(known, p, 1)) - np.log(np.where(known, q, 1))
  kl = np.sum(p * ratio, axis=1)
  left = np.maximum(rest_p, _TINY), np.maximum(rest_q, _TINY)
  kl += rest_p * np.log(left[0] / left[1])
  at = np.arange(len(own)), np.asarray(following)
  before, nll = (
    -float(np.mean(x[at], where=known[at])) for x in (reference, own)
  )
  return {
    'kl': float(kl.mean()),
    'agreement': float((own.argmax(axis=1) == reference.argmax(axis=1)).mean()),
    'nll': nll,
    'nll_over_bf16': nll - before,
  }


def _normalised(logprobs: np.ndarray, known: np.ndarray) -> np.ndarray:
  """Returns known probabilities, f64[T, V], whose rounded sum is at most 1."""
  found = np.exp(np.where(known, logprobs, -np.inf).astype(np.float64))
  return found / np.maximum(found.sum(axis=1, keepdims=True), 1)
