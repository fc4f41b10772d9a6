# SPDX-License-Identifier: Apache-2.0
"""The main job: five schemes on a real model, serial and overlapped.

    make demo

or, after `make setup`,

    python -m experiments.main --config=configs/demo.py --role=local \
      --workdir=runs/demo

Without the role one process does both, as it must on a single accelerator.

The rate is set so that the transfer's share of a serial INT8 request is 60 %.
Cost: 6 to 8 minutes and 5 GB of memory on 2 cores. Expected: every
scheme's committed text equals its reference; TTFT of lynx is near that of int4;
the ratios to the bound are between 1.00 and 1.05.
"""

from configs import smollm2


def get_config(arg: str | None = None):
  """Returns the run; `arg` as in `configs/smollm2.py`."""
  values = smollm2.get_config(arg)
  values.study = 'demo'
  values.mode = 'serial,overlapped'
  values.repeats = 2
  values.prompt_tokens = 1984
  values.output_tokens = 48
  values.link.share = 0.60
  return values
