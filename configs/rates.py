# SPDX-License-Identifier: Apache-2.0
"""The rates study: every scheme over links of three rates, one prompt.

    make rates

or, after `make setup`, over links of your own,

    python -m experiments.main --config=configs/rates.py --workdir=runs/rates \
      --config.sweep.link_gbps=0.01,0.1,1 --config.sweep.rtt_ms=1,50

At the slowest link the transfer takes 60 % of a serial INT8 request on 2 quiet
cores; at the fastest a quarter, and what is overlapped hides behind prefill.

Cost: 35 minutes and 4 GB of memory on 2 quiet cores. Expected: the output of
every scheme equals its reference, and that of lynx_exact the one of bf16; TTFT
of each is within 5 % of its bound (of prefill_continues 6 %).
"""

from configs import latency


def get_config(arg: str | None = None):
  """Returns the run; `arg` names another shipped prompt."""
  values = latency.get_config(arg or 'question')
  values.study = 'rates'
  values.sweep.link_gbps = '0.0125,0.025,0.05'
  values.output_tokens = 24
  values.acceptance.output_tokens = 0
  return values
