# SPDX-License-Identifier: Apache-2.0
"""The codec search: bits against KL and acceptance on the shipped prompts.

    python -m experiments.main --config=configs/codec_search.py \
      --workdir=runs/codec_search

Other candidates are changes of fields of the codec:

    --config.search.codecs='v_axis=token; recent_tokens=128 sinks=8'

Cost: about 10 minutes and 5 GB of memory on 2 cores (projected from parts: the
whole was not run yet). Expected, from its parts: the rotated code has about 0.6
of the KL divergence of the unrotated one; at γ = 8 more than 0.9 of its drafts
are accepted, at 4.76 bits a value or less.
"""

from configs import latency


def get_config(arg: str | None = None):
  """Returns the run; `arg` narrows it to one prompt."""
  values = latency.get_config(arg)
  values.study = 'codec_search'
  values.search.codecs = (
    'k_rotation=none v_rotation=none;'
    'v_rotation=none;'
    'v_axis=token;'
    'sinks=0;'
    'group=64;'
    'k=2,2,4 v=2,2,4'
  )
  return values
