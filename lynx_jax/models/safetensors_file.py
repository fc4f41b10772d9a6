# SPDX-License-Identifier: Apache-2.0
"""Reads the directory of safetensors files, checking that all of it is there.

It knows no architecture. The container is parsed here, so that ranges of a
tensor can be read from a bucket too, which the package `safetensors` cannot.

Format: https://github.com/huggingface/safetensors#format
"""

import dataclasses
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
_PICKLES = ('*.bin', '*.pth', '*.pt')
_SAVE_ANEW = (
  'Pickles (.bin, .pth, .pt) are not read, because they can run code. Fetch '
  'the model as safetensors, or save it so with transformers: '
  'AutoModelForCausalLM.from_pretrained(SOURCE).save_pretrained(TARGET, '
  'safe_serialization=True). Nothing was loaded.'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
  """Where a tensor lies: in which file, from which byte on, and its form.

  Attributes:
    path: the file.
    shape: as stored.
    dtype: of its values, or None where that is none that is read.
    start_byte: from the beginning of the file.
    fault: why it cannot be read, or None; no matter where it is not used.
  """

  path: epath.Path
  shape: tuple[int, ...]
  dtype: np.dtype | None
  start_byte: int
  fault: str | None = None

  def rows(self, start: int, stop: int, files: paths.Files) -> np.ndarray:
    """Returns rows `start..stop-1` in the stored dtype, which must be known."""
    assert self.dtype is not None, self.fault
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
  directory holds the single file `model.safetensors`. A tensor whose dtype is
  not known here has a `fault`: whether that matters is for the caller to say.

  Raises:
    WeightsError: a file is missing, damaged, or lacks what the index says; it
      lists all of that.
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
  elif not (root / _SINGLE).exists():
    raise errors.WeightsError(root, [_missing(root)], _SAVE_ANEW)
  tensors: dict[str, TensorInfo] = {}
  where: dict[str, str] = {}
  readable: set[str] = set()
  problems = []
  for shard in shards:
    try:
      whole, damaged = _read_shard(root, shard)
    except _Unreadable as error:
      problems.append(str(error))
      continue
    readable.add(shard)
    problems += damaged.values()
    where |= dict.fromkeys(damaged, shard)
    for name, tensor in whole.items():
      if name in tensors:
        problems.append(f'{name} is in {where[name]} and in {shard}')
      tensors[name], where[name] = tensor, shard
  for name, shard in weight_map.items():
    # A shard that could not be read has been reported as a whole.
    if str(shard) in readable and where.get(name) != shard:
      problems.append(f'{name} is not in {shard}, where the index has it')
  if problems:
    raise errors.WeightsError(root, problems, _REPAIR)
  return tensors


def _missing(root: epath.Path) -> str:
  """Says that there are no weights, or that they are pickles."""
  found = sorted(file.name for kind in _PICKLES for file in root.glob(kind))
  if not found:
    return f'{_SINGLE} is missing'
  more = f' and {len(found) - 1} more' if len(found) > 1 else ''
  return f'{_SINGLE} is missing; there is {found[0]}{more}, not read'


class _Unreadable(Exception):
  """A file that cannot be used; says why."""


def _read_shard(
  path: epath.Path, shard: str
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
  """Returns a file's tensors, and what is wrong with the others, by name."""
  # An index comes with the model: it must not lead out of the directory.
  if not shard or pathlib.PurePath(shard).name != shard:
    raise _Unreadable(f'{shard!r} is not a file name')
  file = path / shard
  try:
    size_bytes = file.stat().length
    with file.open('rb') as stream:
      header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), 'little')
      start = _LENGTH_BYTES + header_bytes
      # Checked first: a damaged length must not become a huge allocation.
      if start > size_bytes:
        raise ValueError(f'the header ends at byte {start} of {size_bytes}')
      header = errors.parse_json(stream.read(header_bytes).decode('utf-8'))
    if not isinstance(header, dict):
      raise ValueError('the header is no object')
  except FileNotFoundError as error:
    raise _Unreadable(f'{shard} is missing') from error
  except (ValueError, OSError) as error:
    raise _Unreadable(f'{shard} is damaged or cut short: {error}') from error
  header.pop('__metadata__', None)
  tensors, damaged = {}, {}
  for name, entry in header.items():
    try:
      tensors[name] = _locate(name, entry, file, start, size_bytes)
    except ValueError as error:
      damaged[name] = f'{shard} is damaged or cut short: {error}'
  return tensors, damaged


def _locate(
  name: str, entry: Any, file: epath.Path, start: int, size_bytes: int
) -> TensorInfo:
  nonsense = f'the entry of {name} makes no sense: {entry!r:.80}'
  try:
    dtype, shape = entry['dtype'], tuple(entry['shape'])
    first, last = (start + offset for offset in entry['data_offsets'])
    good = all(isinstance(n, int) and n >= 0 for n in (*shape, first, last))
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(nonsense) from error
  known = _DTYPES.get(dtype) if isinstance(dtype, str) else None
  if not good or not start <= first <= last:
    raise ValueError(nonsense)
  if known is not None and last - first != math.prod(shape) * known.itemsize:
    raise ValueError(nonsense)
  if last > size_bytes:
    raise ValueError(f'{name} ends at byte {last}, the file at {size_bytes}')
  fault = f'in {file.name} is {dtype!s:.40}, must be one of {tuple(_DTYPES)}'
  return TensorInfo(
    path=file,
    shape=shape,
    dtype=known,
    start_byte=first,
    fault=fault if known is None else None,
  )
