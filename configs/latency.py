# SPDX-License-Identifier: Apache-2.0
"""The latency study: every baseline, five prompts, both modes, and γ = 8.

    make latency

or, after `make setup`,

    python -m experiments.main --config=configs/latency.py \
      --workdir=runs/latency

Every prompt is cut to a length without a ragged group; `experiments/prompts`
has their checksums. A sweep over links instead:

    --config.sweep.link_gbps=0.01,0.03,0.1 --config.sweep.rtt_ms=1,50

`docs/baselines.md` says what the schemes are.

Cost: 72 minutes and 4 GB of memory on 2 quiet cores. Expected: the output of
every scheme equals its reference; TTFT of each is within 5 % of its bound in
both modes (of prefill_continues 6 %); lynx within 3 % of int4.
"""

from configs import smollm2


def get_config(arg: str | None = None):
  """Returns the run; `arg` narrows it to one prompt."""
  values = smollm2.get_config(arg)
  values.study = 'latency'
  values.scheme = (
    'bf16,bf16_layers,prefill_continues,int8,int8_layers,int8_lookup,'
    'int4,kivi4,lynx,lynx_exact,interleaved'
  )
  values.mode = 'serial,overlapped'
  values.repeats = 1
  values.output_tokens = 48
  values.acceptance.output_tokens = 256
  if arg is None:
    values.prompt_file = 'book,code,manual,chat,question'
    # 64 recent tokens and whole groups of 128: 64 + 128 n.
    values.prompt_lengths = '1984,1856,1728,1600,1984'
  return values
