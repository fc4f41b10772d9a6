# SPDX-License-Identifier: Apache-2.0
"""Runs the processes of peers; what does not run is told, never an error.

It knows no record and no figure.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Sequence

from experiments.peers import caches, exchange

_ROOT = pathlib.Path(__file__).parents[2]
_LONGEST_S = 3600.0


def run(
  python: str,
  gguf: str,
  peers: Sequence[str],
  prompts: Sequence[exchange.Prompt],
) -> exchange.Findings:
  """Returns what every peer found, or why it did not run.

  Args:
    python: interpreter of the environment that has their packages.
    gguf: the model's file.
    peers: of `caches.NAMES`.
    prompts: for each of them.
  """
  found: dict[str, list[exchange.Finding]] = {}
  not_run: dict[str, str] = {}
  versions: dict[str, str] = {}
  for module, names in caches.MODULES.items():
    asked = [name for name in names if name in peers]
    if not asked:
      continue
    task = exchange.Task(gguf=gguf, peers=asked, prompts=[*prompts])
    try:
      findings = _run(python, module, task)
    except _NotRunError as error:
      not_run |= dict.fromkeys(asked, str(error))
      continue
    found |= findings.found
    not_run |= findings.not_run
    versions |= findings.versions
  return exchange.Findings(found=found, not_run=not_run, versions=versions)


class _NotRunError(Exception):
  """A process did not answer."""


def _run(python: str, module: str, task: exchange.Task) -> exchange.Findings:
  interpreter = pathlib.Path(python).absolute()  # a link must stay one
  if not interpreter.exists():
    raise _NotRunError(f'there is no {python}; `make peers` makes it')
  with tempfile.TemporaryDirectory() as folder:
    source, target = (pathlib.Path(folder) / n for n in ('task', 'answer'))
    source.write_text(json.dumps(dataclasses.asdict(task)), 'utf-8')
    words = [str(interpreter), '-m', module]
    try:
      ended = subprocess.run(
        [*words, str(source), str(target)],
        cwd=_ROOT,
        env=os.environ | {'HF_HUB_OFFLINE': '1'},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors='replace',
        timeout=_LONGEST_S,
      )
    except (OSError, subprocess.TimeoutExpired) as error:
      raise _NotRunError(str(error)) from error
    if ended.returncode:
      lines = ended.stderr.strip().splitlines() or ['it said nothing']
      raise _NotRunError(f'exit code {ended.returncode}: {lines[-1]}')
    try:
      findings = exchange.read(target.read_text('utf-8'))
    except (OSError, ValueError, TypeError, KeyError) as error:
      raise _NotRunError(
        f'{python} -m {module} gave no answer that can be read '
        f'({type(error).__name__}: {error}); remove it and run make peers'
      ) from error
  for name, found in findings.found.items():
    if len(found) != len(task.prompts):
      raise _NotRunError(
        f'{name} answered on {len(found)} of {len(task.prompts)} prompts'
      )
  return findings
