# SPDX-License-Identifier: Apache-2.0
"""Any supported checkpoint on any text file.

    python -m experiments.main --config=configs/checkpoint.py \
        --config.model.path=DIR_OR_GGUF --config.prompt_file=FILE \
        --workdir=runs/checkpoint

`model.path` is a .gguf file, a Hugging Face directory, one that
`experiments.convert` has written, a gs:// address of these, or the id of a
model on the hub. docs/models.md lists families and formats. Cost: that of the
model; SmolLM2-135M (`smollm2`, the default) takes 2 minutes on 2 cores.
Expected: the committed text of both schemes equals their references.
"""

from experiments import defaults


def get_config(arg: str | None = None):
  """Returns the run.

  Args:
    arg: the model's path, `configs/checkpoint.py:DIR_OR_GGUF`.
  """
  values = defaults.base()
  values.study = 'checkpoint'
  values.scheme = 'int8,lynx'
  values.model.path = arg or 'smollm2'
  values.repeats = 1
  return values
