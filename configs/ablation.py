# SPDX-License-Identifier: Apache-2.0
"""The ablation of a real model: 24 cells, one change each.

    make ablation

or, after `make setup`,

    python -m experiments.main --config=configs/ablation.py \
      --workdir=runs/ablation

Ended by whatever, the same command goes on where it stopped. Cells go through
a grid as well, such as four rates (96 cells):

    --config.ablation.axes='link.rate_gbps=0.01|0.03|0.1|0.3'

Cost: 24 minutes and 4 GB of memory on 2 cores, of which another program took
what was left over. Expected: TTFT of every cell within 5 % of its bound; a
coarser Anchor has less TTFT and more KL.
"""

from configs import smollm2

_CELLS = (
  'scheme=lynx',
  'scheme=bf16',
  'scheme=int8',
  'scheme=int4',
  'scheme=lynx_exact',
  'codec.k,codec.v=2,2,4',
  'codec.v=2,2,4',
  'codec.group=64',
  'codec.group=32',
  'codec.sinks=0',
  'codec.recent_tokens=0',
  'codec.recent_tokens=128',
  'codec.k_rotation,codec.v_rotation=none',
  'engine.chunk_bytes=32768',
  'engine.order=interleaved',
  'engine.draft_tokens=0',
  'engine.draft_tokens=4',
  'engine.draft_tokens=15',
  'engine.backlog_tokens=8',
  'engine.layer_ready=False',
  'engine.sharpen=False',
  'mode=overlapped',
  'link.rtt_ms=50.0',
  'prompt_tokens=960',
)


def get_config(arg: str | None = None):
  """Returns the run; `arg` names a shipped prompt."""
  values = smollm2.get_config(arg)
  values.study = 'ablation'
  values.scheme = 'lynx'
  values.repeats = 1
  values.output_tokens = 24
  # Where INT8 takes some 60 % of a serial request on 2 cores.
  values.link.rate_gbps = 0.04
  values.acceptance.output_tokens = 64
  values.ablation.cells = '; '.join(_CELLS)
  return values
