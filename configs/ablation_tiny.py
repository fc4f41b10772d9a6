# SPDX-License-Identifier: Apache-2.0
"""An ablation of 24 cells on the tiny model: six codecs, four rates.

    python -m experiments.main --config=configs/ablation_tiny.py \
      --workdir=runs/ablation_tiny

Other axes are a matter of the command line, docs/ablation.md has the form:

    --config.ablation.axes='engine.chunk_bytes=2048|8192; link.rtt_ms=1|50'

Cost: 3 minutes on 2 cores that five other programs used too, 2 minutes of CPU
time; nearly all of it compiling for six engines, and a second run finds most of
that on disk. Expected: every cell has a result; TTFT within 10 % of its bound.
Weights are random, so that KL says nothing of real models.
"""

from configs import tiny


def get_config(arg: str | None = None):
  """Returns the run; `arg` names a shipped prompt."""
  values = tiny.get_config(arg)
  values.study = 'ablation'
  # Equal layer groups share programs: a layer each compiles in least time.
  values.engine.layer_groups = 4
  values.link.rate_gbps = 0.01
  values.acceptance.output_tokens = 64
  values.ablation.cells = (
    'scheme=bf16;'
    'scheme=int8;'
    'scheme=int4;'
    'scheme=lynx;'
    'scheme=lynx codec.group=32;'
    'scheme=lynx codec.k,codec.v=2,2,4'
  )
  values.ablation.axes = 'link.rate_gbps=0.004|0.008|0.016|0.032'
  return values
