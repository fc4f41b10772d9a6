# SPDX-License-Identifier: Apache-2.0
"""Reads the directory of safetensors files, checking that all of it is there.

It knows no architecture. The container is parsed here, so that ranges of a
tensor can be read from a bucket too, which the package `safetensors` cannot.

Format: https://github.com/huggingface/safetensors#format
"""

import dataclasses
import json
import math
import os
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from lynx_jax.models import errors, paths

_INDEX = 'model.safetensors.index.json'
_SINGLE = 'model.safetensors'
_LENGTH_BYTES = 8  # of the header's length, little-endian
_DTYPES = {
  'F32': np.dtype('<f4'),
  'F16': np.dtype('<f2'),
  'BF16': np.dtype(jnp.bfloat16),
}
_REPAIR = 'Fetch or convert the model again; nothing was loaded.'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
  """Where a tensor lies: in which file, from which byte on, and its form."""

  path: epath.Path
  shape: tuple[int, ...]
  dtype: np.dtype
  start_byte: int

  def rows(self, start: int, stop: int, files: paths.Files) -> np.ndarray:
    """Returns rows `start..stop-1` in the stored dtype."""
    row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
    data = files.read(
      self.path, self.start_byte + start * row_bytes, (stop - start) * row_bytes
    )
    return np.frombuffer(data, self.dtype).reshape(
      stop - start, *self.shape[1:]
    )


def read_directory(path: str | os.PathLike[str]) -> dict[str, TensorInfo]:
  """Returns all tensors of a directory by name, none of them read yet.

  `model.safetensors.index.json` is followed where there is one; otherwise the
  directory holds the single file `model.safetensors`.

  Raises:
    WeightsError: a file is missing, damaged, or lacks what the index says.
  """
  root = epath.Path(path)
  index = root / _INDEX
  weight_map: dict[str, Any] = {}
  shards = [_SINGLE]
  if index.exists():
    found = errors.read_json(index).get('weight_map')
    if not isinstance(found, dict) or not found:
      raise errors.WeightsError(index, ['has no weight_map'], _REPAIR)
    weight_map = found
    shards = sorted(set(map(str, weight_map.values())))
  tensors: dict[str, TensorInfo] = {}
  where: dict[str, str] = {}
  problems = []
  for shard in shards:
    try:
      for name, tensor in _read_shard(root, shard).items():
        if name in tensors:
          problems.append(f'{name} is in {where[name]} and in {shard}')
        tensors[name], where[name] = tensor, shard
    except _Unreadable as error:
      problems.append(str(error))
  for name, shard in weight_map.items():
    # A shard that could not be read has been reported as a whole.
    if shard in where.values() and where.get(name) != shard:
      problems.append(f'{name} is not in {shard}, where the index has it')
  if problems:
    raise errors.WeightsError(root, problems, _REPAIR)
  return tensors


class _Unreadable(Exception):
  """A file that cannot be used; says why."""


def _read_shard(path: epath.Path, shard: str) -> dict[str, TensorInfo]:
  # An index comes with the model: it must not lead out of the directory.
  if pathlib.PurePath(shard).name != shard:
    raise _Unreadable(f'{shard} is not a file name')
  file = path / shard
  try:
    size_bytes = file.stat().length
    with file.open('rb') as stream:
      header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), 'little')
      start = _LENGTH_BYTES + header_bytes
      # Checked first: a damaged length must not become a huge allocation.
      if start > size_bytes:
        raise ValueError(f'the header ends at byte {start} of {size_bytes}')
      header = json.loads(stream.read(header_bytes).decode('utf-8'))
    if not isinstance(header, dict):
      raise ValueError('the header is no object')
    header.pop('__metadata__', None)
    return {
      name: _locate(name, entry, file, start, size_bytes)
      for name, entry in header.items()
    }
  except FileNotFoundError as error:
    raise _Unreadable(f'{shard} is missing') from error
  except (ValueError, OSError) as error:
    raise _Unreadable(f'{shard} is damaged or cut short: {error}') from error


def _locate(
  name: str, entry: Any, file: epath.Path, start: int, size_bytes: int
) -> TensorInfo:
  try:
    dtype, shape = entry['dtype'], tuple(entry['shape'])
    first, last = (start + offset for offset in entry['data_offsets'])
    good = all(isinstance(n, int) and n >= 0 for n in (*shape, first, last))
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f'the entry of {name} makes no sense') from error
  if dtype not in _DTYPES:
    raise _Unreadable(
      f'{name} in {file.name} is {dtype}, must be one of {tuple(_DTYPES)}'
    )
  wanted = math.prod(shape) * _DTYPES[dtype].itemsize if good else -1
  if last - first != wanted or first < start:
    raise ValueError(f'the entry of {name} makes no sense')
  if last > size_bytes:
    raise ValueError(f'{name} ends at byte {last}, the file at {size_bytes}')
  return TensorInfo(
    path=file, shape=shape, dtype=_DTYPES[dtype], start_byte=first
  )
