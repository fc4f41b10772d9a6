# SPDX-License-Identifier: Apache-2.0
"""The studies that a config can name.

Each is a module with `run(settings, writer, screen)`, which writes records, and
perhaps `draw(records)`, which returns the `drawing.Drawing`s of its report, and
`tables(records)` and `notes(records)`, which return (caption, header, rows) and
paragraphs for it. They run in one process. Any
other name is a latency study.
"""

import importlib
import types

MODULES = {
  'ablation': 'experiments.ablation',
  'codec_search': 'experiments.codec_search',
  'equivalence': 'experiments.equivalence',
  'plan': 'experiments.plan',
  'fidelity': 'experiments.fidelity_study',
}


def load(study: str) -> types.ModuleType:
  """Returns the module of a study."""
  return importlib.import_module(MODULES[study])


def subject(module: types.ModuleType) -> str:
  """Returns what a study is about: the first line of its module's docstring."""
  return (module.__doc__ or '').strip().split('\n')[0]
