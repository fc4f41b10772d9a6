# SPDX-License-Identifier: Apache-2.0
"""The codec search: bits against KL and acceptance, and KL by layer.

    python -m experiments.main --config=configs/codec_search.py \
      --workdir=runs/codec_search

Prompts are the shipped texts, two at a time in either order: 20 of 4,000 to
7,000 tokens, four of them side by side. All candidates are compared on the
first four, those that count on all. Some at a time, as often as needed:

    --config.search.at_once=4

Other candidates are changes of fields of the codec:

    --config.search.codecs='v_axis=token; recent_tokens=128 sinks=8'

Cost: 57 minutes on 2 cores that other work shared, and 17 GB of memory
(measured); fewer --config.search.slots take less. Weights are float32: the
rounding of bfloat16 activations would count as divergence.
"""

import itertools

from configs import latency, smollm2_by_layer

_TEXTS = 'book', 'code', 'manual', 'chat', 'question'


def get_config(arg: str | None = None):
  """Returns the run; `arg` narrows it to one prompt."""
  values = latency.get_config(arg)
  values.study = 'codec_search'
  values.model.dtype = 'float32'
  values.acceptance.output_tokens = 64
  values.engine.layer_groups = 30  # ranges of layers are whole groups
  values.search.most_bits = 4.5
  values.search.drafted = 1
  values.search.slots = 4
  values.search.compared_prompts = 4
  values.search.codecs = (
    'k_rotation=none v_rotation=none;'
    'v_axis=token;'
    'recent_tokens=128;'
    'sinks=0;'
    'group=64;'
    'k=4,4 v=2,2,4;'
    'k=2,1,1,4 v=2,1,1,4 anchor=2;'
    'k=2,2,4 v=2,2,4;'
    'code=log;'
    "K of layer 18: layers='18:19 k=8';"
    f"bits by layer: layers='{smollm2_by_layer.LAYERS}';"
    'unrotated, by layer: k_rotation=none v_rotation=none '
    f"layers='{smollm2_by_layer.LAYERS}'"
  )
  if arg is None:
    pairs = itertools.permutations(_TEXTS, 2)
    values.prompt_file = ','.join('+'.join(pair) for pair in pairs)
    values.prompt_lengths = ''
    values.prompt_tokens = 8000
  return values
