# SPDX-License-Identifier: Apache-2.0
"""Real models with their first layers only, which compile in a third of time.

Their text means nothing; all else is as with the whole model.
"""

import dataclasses

from flax import nnx

from experiments import serving
from lynx_jax.models.transformer import Transformer


def cut(layers: int) -> None:
  """Lets `serving.load` in this process return so many layers of a model."""
  load = serving.load

  def first_layers(*args, **kwargs) -> serving.Model:
    whole = load(*args, **kwargs)
    config = dataclasses.replace(whole.config, layers=layers)

    def part(model: Transformer) -> Transformer:
      made = nnx.clone(model)
      made.config = config
      made.layers = nnx.List([*model.layers][:layers])
      return made

    return dataclasses.replace(
      whole,
      config=config,
      prefill=part(whole.prefill),
      decode=part(whole.decode),
    )

  serving.load = first_layers
