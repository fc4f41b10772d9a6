# SPDX-License-Identifier: Apache-2.0
"""Reads a GGUF file's metadata and tensors, checking that all of it is there.

It knows no architecture and no tokenizer.

The container is parsed here and not by the package `gguf`, whose reader takes
seconds over the lists of a vocabulary (4.3 s for SmolLM2's 49,152 tokens) and
cannot name what a truncated file lacks. That package decodes the quantised
blocks.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import functools
import math
import os
import struct
from typing import Any

import numpy as np
from etils import epath

from lynx_jax.models import errors, paths

MAGIC = b'GGUF'
VERSIONS = (2, 3)
_SCALARS = {
  0: '<B',
  1: '<b',
  2: '<H',
  3: '<h',
  4: '<I',
  5: '<i',
  6: '<f',
  7: '<?',
  10: '<Q',
  11: '<q',
  12: '<d',
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_DAMAGED = 'The file is damaged or was cut short: fetch it again.'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
  """Where a tensor lies in the file.

  Attributes:
    shape: outermost dimension first (the file has it last).
    kind: name of the ggml type, such as `Q4_1`.
    start_byte: from the beginning of the file.
    size_bytes: of the encoded data.
  """

  shape: tuple[int, ...]
  kind: str
  start_byte: int
  size_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufFile:
  """Metadata and tensor directory of one file; every tensor lies within it."""

  path: epath.Path
  metadata: dict[str, Any]
  tensors: dict[str, TensorInfo]

  def tensor(self, name: str) -> np.ndarray:
    """Returns a tensor as float32, dequantised where need be."""
    with paths.files() as files:
      return self.rows(name, 0, self.tensors[name].shape[0], files)

  def rows(
    self, name: str, start: int, stop: int, files: paths.Files
  ) -> np.ndarray:
    """Returns rows `start..stop-1` of a tensor, as `tensor` does.

    The rows of a vector are its values, which no quantised type has.
    """
    info = self.tensors[name]
    row_bytes = info.size_bytes // info.shape[0]
    data = np.frombuffer(
      files.read(
        self.path,
        info.start_byte + start * row_bytes,
        (stop - start) * row_bytes,
      ),
      np.uint8,
    )
    return _decode(data, info.kind).reshape(stop - start, *info.shape[1:])

  def check_kinds(self) -> None:
    """Raises a `WeightsError` with all tensors that cannot be decoded."""
    gguf = errors.optional_package('gguf')

    @functools.cache
    def is_known(kind: str) -> bool:
      _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
      try:
        _decode(np.zeros(block_bytes, np.uint8), kind)
      except NotImplementedError:
        return False
      return True

    problems = [
      f'{name} is stored as {info.kind}, which cannot be decoded'
      for name, info in self.tensors.items()
      if not is_known(info.kind)
    ]
    if problems:
      raise errors.WeightsError(
        self.path, problems, 'Convert the model to Q8_0, Q4_K, F16 or F32.'
      )


def _decode(data: np.ndarray, kind: str) -> np.ndarray:
  """Returns the float32 values of whole quantised blocks."""
  gguf = errors.optional_package('gguf')
  if kind in ('F32', 'F16'):  # the package wants these typed already
    data = data.view('<f4' if kind == 'F32' else '<f2')
  # As one row: the package takes 16 rows at a time, and a loop over rows of a
  # small model takes as long as what is done in it.
  found = gguf.quants.dequantize(data[None], gguf.GGMLQuantizationType[kind])
  return found[0].astype(np.float32, copy=False)


def read(path: str | os.PathLike[str]) -> GgufFile:
  """Reads metadata and directory, and checks that the file holds all tensors.

  Raises:
    WeightsError: the file is missing, not a GGUF, damaged or truncated.
  """
  file = epath.Path(path)
  try:
    size_bytes = file.stat().length
    with file.open('rb') as stream:
      cursor = _Cursor(stream, size_bytes)
      metadata, entries = _read_header(cursor)
      data_byte = _align(cursor.byte, metadata)
  except OSError as error:
    raise errors.WeightsError(
      file, [f'cannot be read: {error.strerror}'], 'Check the path.'
    ) from error
  except _Damaged as error:
    raise errors.WeightsError(file, [str(error)], error.remedy) from error
  tensors: dict[str, TensorInfo] = {}
  problems = []
  for name, shape, kind, offset in entries:
    info, problem = _locate(shape, kind, data_byte + offset, size_bytes)
    if name in tensors:
      problem = 'occurs twice'
    if problem:
      problems.append(f'{name} {problem}')
    if info is not None:
      tensors[name] = info
  if problems:
    raise errors.WeightsError(file, problems, _DAMAGED)
  return GgufFile(path=file, metadata=metadata, tensors=tensors)


class _Damaged(Exception):
  """The header makes no sense; says why."""

  def __init__(self, problem: str, remedy: str = _DAMAGED):
    super().__init__(problem)
    self.remedy = remedy


class _Cursor:
  """Reads values one after the other, never past the end of the file."""

  def __init__(self, stream, size_bytes: int):
    self.stream = stream
    self.size_bytes = size_bytes
    self.byte = stream.tell()  # asking 200,000 times takes its time

  def take(self, count: int) -> bytes:
    # Checked first: a damaged length must not become a huge allocation.
    if count > self.size_bytes - self.byte:
      raise _Damaged(
        f'the header ends early: {count} bytes wanted at byte '
        f'{self.byte} of {self.size_bytes}'
      )
    self.byte += count
    return self.stream.read(count)

  def scalar(self, kind: int) -> Any:
    code = _SCALARS[kind]
    return struct.unpack(code, self.take(struct.calcsize(code)))[0]

  def string(self) -> str:
    data = self.take(int.from_bytes(self.take(8), 'little'))
    try:
      return data.decode('utf-8')
    except UnicodeDecodeError as error:
      raise _Damaged(f'{data[:40]!r} is not UTF-8') from error

  def value(self, kind: int) -> Any:
    if kind == _STRING:
      return self.string()
    if kind == _ARRAY:
      kind, count = self.scalar(4), self.scalar(10)
      if kind == _STRING:
        return [self.string() for _ in range(count)]
      code = self._code(kind)
      data = self.take(count * struct.calcsize(code))
      return [item for (item,) in struct.iter_unpack(code, data)]
    self._code(kind)
    return self.scalar(kind)

  def _code(self, kind: int) -> str:
    if kind not in _SCALARS:
      raise _Damaged(f'unknown metadata type {kind} before byte {self.byte}')
    return _SCALARS[kind]


def _read_header(
  cursor: _Cursor,
) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]]]:
  """Returns metadata, and (name, shape, type, offset) of each tensor."""
  magic = cursor.stream.read(len(MAGIC))
  cursor.byte += len(magic)
  if magic != MAGIC:
    raise _Damaged(
      f'begins with {magic!r}, not {MAGIC!r}',
      'This is not a GGUF file. Give a .gguf, or a directory with '
      'config.json and safetensors.',
    )
  version = cursor.scalar(4)
  if version not in VERSIONS:
    raise _Damaged(
      f'GGUF version {version} is not one of {VERSIONS}',
      'Convert the model with a current llama.cpp (little-endian).',
    )
  tensor_count, value_count = cursor.scalar(10), cursor.scalar(10)
  metadata = {}
  for _ in range(value_count):
    key = cursor.string()
    metadata[key] = cursor.value(cursor.scalar(4))
  entries = []
  for _ in range(tensor_count):
    name, dims = cursor.string(), cursor.scalar(4)
    if dims > _MAX_DIMS:
      raise _Damaged(f'{name} has {dims} dimensions')
    shape = tuple(cursor.scalar(10) for _ in range(dims))[::-1]
    entries.append((name, shape, cursor.scalar(4), cursor.scalar(10)))
  return metadata, entries


def _align(byte: int, metadata: dict[str, Any]) -> int:
  """Rounds up to the file's alignment, where tensor data begins."""
  alignment = metadata.get('general.alignment', 32)
  if not isinstance(alignment, int) or alignment < 1:
    raise _Damaged(f'general.alignment is {alignment!r}')
  return -(-byte // alignment) * alignment


def _locate(
  shape: tuple[int, ...], kind: int, start_byte: int, file_bytes: int
) -> tuple[TensorInfo | None, str | None]:
  """Returns where a tensor lies, or what is wrong with that."""
  gguf = errors.optional_package('gguf')
  try:
    ggml_type = gguf.GGMLQuantizationType(kind)
  except ValueError:
    return None, f'has the unknown ggml type {kind}'
  values, size_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
  if not shape or not math.prod(shape) or shape[-1] % values:
    return None, (
      f'{shape} does not hold whole {ggml_type.name} blocks of {values}'
    )
  size_bytes *= math.prod(shape) // values
  end_byte = start_byte + size_bytes
  if end_byte > file_bytes:
    return None, f'ends at byte {end_byte}, the file at {file_bytes}'
  return TensorInfo(
    shape=shape,
    kind=ggml_type.name,
    start_byte=start_byte,
    size_bytes=size_bytes,
  ), None
