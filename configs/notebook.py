# SPDX-License-Identifier: Apache-2.0
"""What the notebook runs: a serial pair, INT8 and Lynx, on a short prompt.

    make notebook

executes `experiments/lynx_colab.ipynb`; its run without the notebook is

    python -m experiments.main --config=configs/notebook.py \
        --workdir=runs/notebook

Cost: 2 to 3 minutes and 3 GB of memory on 2 cores. Expected: Lynx shows its
first token of decode in 0.8 of INT8's time; both outputs equal their
references.
"""

from configs import smollm2


def get_config(arg: str | None = None):
  """Returns the run; `arg` as in `configs/smollm2.py`."""
  values = smollm2.get_config(arg)
  values.study = 'notebook'
  values.scheme = 'int8,lynx'
  values.repeats = 1
  # Whole groups: 64 recent tokens and 3 of 128.
  values.prompt_tokens = 448
  values.output_tokens = 24
  # The program of whole rounds takes half a minute to compile, twice here.
  values.engine.fused_rounds = False
  return values
