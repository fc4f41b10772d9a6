# SPDX-License-Identifier: Apache-2.0
"""The equivalence study: 24 varied prompts on a real model.

    make equivalence-study

or, after `make setup`, some prompts at a time, as often as needed,

    python -m experiments.main --config=configs/equivalence.py \
      --workdir=runs/equivalence --config.equivalence.at_once=4

Prompts are parts of five shipped texts and of the licence, from random places,
of 192 to 1,088 tokens. Expected: on every prompt the output of lynx is that of
int8, and that of lynx_exact the one of bf16, at 11.7 to 14.1 bits a value: the
more of a short prompt stays dense, the higher.
"""

from configs import smollm2


def get_config(arg: str | None = None):
  """Returns the run; `arg` narrows it to parts of one text."""
  values = smollm2.get_config(arg)
  values.study = 'equivalence'
  values.scheme = 'lynx'
  values.mode = 'serial'
  values.prompt_tokens = 1088
  values.output_tokens = 32
  # As long as prefill: the Residual lands while some 20 tokens are drafted.
  values.link.rate_gbps = 0.03
  values.acceptance.output_tokens = 32
  # Two layers each: a first verification waits for the last two and the head.
  values.engine.layer_groups = 15
  if arg is None:
    values.prompt_file = 'book,code,manual,chat,question,LICENSE'
  return values
