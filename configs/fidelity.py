# SPDX-License-Identifier: Apache-2.0
"""The fidelity study: what each scheme does to the output of a real model.

    make fidelity

or, after `make setup`, a part alone, or those that are left,

    python -m experiments.main --config=configs/fidelity.py \
      --workdir=runs/fidelity --config.fidelity.parts=tasks

Published benchmarks, from files that you have:

    --config.fidelity.parts=longbench,ruler --config.fidelity.longbench=DATA \
      --config.fidelity.longbench_config=CONFIG --config.fidelity.ruler=DATA

Cost: 31 minutes on 2 cores, of which another study took most for 22. Expected:
the answers of int8 and lynx are those of bf16 on nearly all synthetic prompts;
lynx_exact equals bf16 in every figure.
"""

from configs import smollm2


def get_config(arg: str | None = None):
  """Returns the run; `arg` narrows it to one shipped prompt."""
  values = smollm2.get_config(arg)
  values.study = 'fidelity'
  values.scheme = 'bf16,int8,int4,lynx,lynx_exact'
  # Weights and activations: so that only what is read of the KV cache is
  # rounded, as the scheme has it.
  values.model.dtype = 'float32'
  # 64 recent tokens and whole groups of 128; 129 more are forced.
  values.prompt_tokens = 1856
  values.acceptance.output_tokens = 96
  if arg is None:
    values.prompt_file = 'book,code,manual,chat,question,LICENSE'
  return values
