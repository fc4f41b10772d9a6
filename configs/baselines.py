# SPDX-License-Identifier: Apache-2.0
"""The latency study with every baseline that a reviewer would ask for.

    make baselines

or, after `make setup`,

    python -m experiments.main --config=configs/baselines.py \
      --workdir=runs/baselines

One prompt, both modes, two of each: what `docs/baselines.md` describes, beside
the schemes of `make latency`.

Cost: 22 minutes on 2 quiet cores. Expected: the output of every scheme equals
its reference; TTFT of each is within 5 % of its bound.
"""

from configs import latency


def get_config(arg: str | None = None):
  """Returns the run; `arg` names another prompt than the book."""
  values = latency.get_config(arg or 'book')
  values.scheme = (
    'bf16,bf16_layers,prefill_continues,int8,int8_layers,int8_lookup,'
    'int4,kivi4,lynx'
  )
  values.repeats = 2
  values.acceptance.output_tokens = 0
  return values
