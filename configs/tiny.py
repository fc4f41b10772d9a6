# SPDX-License-Identifier: Apache-2.0
"""A tiny model with random weights: the same path, for trying things out.

    python -m experiments.main --config=configs/tiny.py --workdir=runs/tiny

Cost: under a minute, most of it compiling. Expected: every scheme's committed
tokens equal its reference; the text means nothing.
"""

from experiments import defaults


def get_config(arg: str | None = None):
  """Returns the run.

  Args:
    arg: the name of a shipped prompt, `configs/tiny.py:code`.
  """
  values = defaults.base()
  values.study = 'tiny'
  values.model.path = 'tiny'
  values.prompt_file = arg or 'book'
  values.prompt_tokens = 448
  values.output_tokens = 24
  values.repeats = 1
  values.engine.layer_groups = 2
  values.engine.token_chunk = 128
  values.engine.chunk_bytes = 8 * 1024
  values.engine.fused_rounds = False  # most of the time goes into compiling
  return values
