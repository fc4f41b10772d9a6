# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct with the bits by layer that the codec search found.

    python -m experiments.main --config=configs/smollm2_by_layer.py \
        --config.prompt_file=FILE --workdir=runs/mine

`docs/codec_search.md` says how they were found, and what they give: a third
less KL of the drafts than with `configs/smollm2.py`, for 0.07 bits a value.

Cost: as `configs/smollm2.py`, with three times the layer groups to compile.
"""

from configs import smollm2

# Where KL by layer was largest, and smallest: four tensors of 8 bits and six
# whose Anchor has 2.
LAYERS = (
  '17:19 k=8; 20:21 k=8; 22:23 v=2,2,4; 23:24 k=8; 25:26 k=2,2,4 v=2,2,4; '
  '27:28 k=2,2,4 v=2,2,4; 29:30 v=2,2,4'
)


def get_config(arg: str | None = None):
  """Returns the run; `arg` as in `configs/smollm2.py`."""
  values = smollm2.get_config(arg)
  values.study = 'smollm2_by_layer'
  values.scheme = 'bf16,int8,lynx'
  values.engine.layer_groups = 30  # ranges of layers are whole groups
  values.codec.layers = LAYERS
  return values
