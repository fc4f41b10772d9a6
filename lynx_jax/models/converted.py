# SPDX-License-Identifier: Apache-2.0
"""Writes a loaded model once with Orbax, and restores it sharded.

It knows no other format. A directory holds the config (`lynx_model.json`), the
parameters (`params/`), and the tokenizer's files if the caller puts them there.
"""

import contextlib
import dataclasses
import enum
import json
import os
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath
from flax import nnx

from lynx_jax import config as config_lib
from lynx_jax.models import errors, transformer, weights

_CONFIG, _PARAMS = 'lynx_model.json', 'params'
_PROBE = '.can_be_written'
_REPAIR = 'Convert the model again.'


def is_converted(path: epath.Path) -> bool:
  """Returns whether `save` has written the directory."""
  return (path / _CONFIG).exists()


def make(path: str | os.PathLike[str]) -> epath.Path:
  """Makes the directory of a model that is to be saved, and returns it.

  Raises:
    WeightsError: it holds a model already, or cannot be written.
  """
  root = epath.Path(path)
  if is_converted(root) or (root / _PARAMS).exists():
    raise errors.WeightsError(
      root, ['holds a model already'], 'Choose another directory.'
    )
  try:
    root.mkdir(parents=True, exist_ok=True)
    probe = root / _PROBE
    probe.write_text('', 'utf-8')
    probe.unlink()
  except OSError as error:
    raise errors.WeightsError(
      root, [f'cannot be written: {error.strerror}'], 'Choose another place.'
    ) from error
  return root


def save(
  path: str | os.PathLike[str],
  config: config_lib.ModelConfig,
  model: transformer.Transformer,
) -> None:
  """Writes a model to a new directory, local or in a bucket.

  Raises:
    WeightsError: the directory holds a model already, or cannot be written.
  """
  root = make(path)
  flat: Any = nnx.to_flat_state(nnx.split(model)[1])
  with _checkpointer() as checkpointer:
    checkpointer.save(
      (root / _PARAMS).resolve(),
      {
        _key(where): leaf.get_value()
        for where, leaf in flat
        if not isinstance(leaf, transformer.Constant)
      },
    )
  # Last: a conversion that was interrupted is no model.
  (root / _CONFIG).write_text(_to_json(config), 'utf-8')


def read_config(
  path: str | os.PathLike[str], *, dtype: str = 'float32'
) -> config_lib.ModelConfig:
  """Returns the dimensions of a converted model."""
  stored = _from_json(epath.Path(path) / _CONFIG)
  return dataclasses.replace(stored, dtype=dtype)


def check(
  path: str | os.PathLike[str], *, dtype: str = 'float32'
) -> config_lib.ModelConfig:
  """Checks all that `load` checks before it reads weights."""
  root = epath.Path(path)
  config = read_config(root, dtype=dtype)
  _, state = nnx.split(transformer.abstract_model(config))
  flat: Any = nnx.to_flat_state(state)
  shapes = {
    _key(parameter): leaf.get_value()
    for parameter, leaf in flat
    if not isinstance(leaf, transformer.Constant)
  }
  with _reading(root) as checkpointer:
    _check_shapes(checkpointer, root, shapes)
  return config


def load(
  path: str | os.PathLike[str],
  *,
  dtype: str = 'float32',
  placement: weights.Placement = None,
) -> tuple[config_lib.ModelConfig, transformer.Transformer]:
  """Restores a model straight onto its placement; see `weights.load`."""
  root = epath.Path(path)
  config = read_config(root, dtype=dtype)
  graph, state = nnx.split(transformer.abstract_model(config))
  flat: Any = nnx.to_flat_state(state)

  chosen = weights.places(placement, config, state)

  def where(parameter: weights.ParameterPath) -> jax.sharding.Sharding:
    place = chosen(parameter)
    if isinstance(place, jax.sharding.Sharding):
      return place
    return jax.sharding.SingleDeviceSharding(place or jax.devices()[0])

  wanted = {
    _key(parameter): jax.ShapeDtypeStruct(
      leaf.get_value().shape, leaf.get_value().dtype, sharding=where(parameter)
    )
    for parameter, leaf in flat
    if not isinstance(leaf, transformer.Constant)
  }
  with _reading(root) as checkpointer:
    _check_shapes(checkpointer, root, wanted)
    found = checkpointer.restore((root / _PARAMS).resolve(), wanted)
  arrays = {
    parameter: found[_key(parameter)]
    for parameter, _ in flat
    if _key(parameter) in found
  }
  leaves = weights.with_constants(config, flat, arrays, where)
  return config, nnx.merge(graph, nnx.from_flat_state(leaves))


def _checkpointer() -> Any:
  # Imported at first use: it takes a second.
  import orbax.checkpoint

  return orbax.checkpoint.StandardCheckpointer()


@contextlib.contextmanager
def _reading(root: epath.Path) -> Iterator[Any]:
  """Yields a checkpointer; what it cannot restore is a `WeightsError`."""
  with _checkpointer() as checkpointer:
    try:
      yield checkpointer
    except errors.WeightsError:
      raise
    except (OSError, ValueError, KeyError) as error:
      raise errors.WeightsError(
        root / _PARAMS, [f'cannot be restored: {error}'], _REPAIR
      ) from error


def _check_shapes(
  checkpointer: Any, path: epath.Path, wanted: dict[str, Any]
) -> None:
  """Lists all that differs: Orbax would cut or fill without a word."""
  found = checkpointer.metadata((path / _PARAMS).resolve()).item_metadata
  if found is None:
    raise FileNotFoundError('there is no checkpoint')
  stored = {name: tuple(entry.shape) for name, entry in found.tree.items()}
  problems = [f'{name} is missing' for name in wanted if name not in stored]
  for name, shape in stored.items():
    if name not in wanted:
      problems.append(f'{name} {shape} is not part of the model')
    elif shape != wanted[name].shape:
      problems.append(f'{name} is {shape}, must be {wanted[name].shape}')
  if problems:
    raise errors.WeightsError(path / _PARAMS, problems, _REPAIR)


def _key(path: weights.ParameterPath) -> str:
  return '.'.join(map(str, path))


def _to_json(config: config_lib.ModelConfig) -> str:
  def plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
      return value.value
    raise TypeError(value)

  return json.dumps(dataclasses.asdict(config), default=plain, indent=2) + '\n'


def _from_json(path: epath.Path) -> config_lib.ModelConfig:
  values = errors.read_json(path)
  try:
    if values.get('rope_scaling') is not None:
      scaling = values['rope_scaling']
      scaling['kind'] = config_lib.Scaling(scaling['kind'])
      values['rope_scaling'] = config_lib.RopeScaling(**scaling)
    if values.get('local') is not None:
      values['local']['layers'] = tuple(values['local']['layers'])
      values['local'] = config_lib.LocalLayers(**values['local'])
    values['activation'] = config_lib.Activation(values['activation'])
    return config_lib.ModelConfig(**values)
  except (KeyError, TypeError, ValueError, OverflowError) as error:
    raise errors.WeightsError(
      path, [f'makes no sense: {error}'], _REPAIR
    ) from (error)
