# SPDX-License-Identifier: Apache-2.0
"""The plan: which scheme to send, for slices and links that are not at hand.

    make plan     # 21 minutes, nearly all of it on loads of 1,000 requests

or, after `make setup`, for a case of your own,

    python -m experiments.main --config=configs/plan.py --workdir=runs/plan \
      --config.plan.models=Qwen3-8B --config.plan.slices=v6e-8 \
      --config.plan.prompt_tokens=32768 --config.plan.link_gbps=25,50 \
      --config.plan.in_flight=8 --config.plan.arrivals_per_s=2

It runs no model. All figures of the plan are *projected*; what the planner says
of measured latency studies is held against them first.
"""

from configs import smollm2


def get_config(arg: str | None = None):
  """Returns the run.

  Args:
    arg: records of latency studies to predict first, with commas between; by
      default those of `make latency` and `make rates`.
  """
  values = smollm2.get_config()
  values.study = 'plan'
  values.scheme = 'bf16,int8,int4,lynx,lynx_2bit'
  values.mode = 'serial,overlapped'
  values.engine.layer_groups = 8
  values.plan.records = arg or (
    'docs/records/latency.jsonl,docs/records/rates.jsonl'
  )
  values.plan.models = 'Llama-3.1-8B,Llama-3.1-70B'
  values.plan.slices = 'v5e-8,v5p-8,v6e-8'
  values.plan.prompt_tokens = '8192,32768,130944'
  values.plan.link_gbps = '10,40,100,400'
  values.plan.in_flight = '1,32,1000'
  return values
