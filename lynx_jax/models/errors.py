# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with model files, and optional packages that read them.

It knows no model format.
"""

import importlib
import json
import os
import types
from collections.abc import Collection, Sequence
from typing import Any

from etils import epath

from lynx_jax import config

_AGAIN = 'Fetch the model again.'
_MOST_LEVELS = 100  # of JSON: values are printed, by a function that recurs


class WeightsError(config.ConfigError):
  """A model file that cannot be used as it is.

  The message names the file, everything that is wrong with it, and a remedy.

  Attributes:
    path: the file or folder.
    problems: one entry a fault.
    remedy: what to do.
  """

  def __init__(
    self, path: str | os.PathLike[str], problems: Sequence[str], remedy: str
  ):
    self.path, self.remedy = os.fspath(path), remedy
    self.problems = tuple(problems)
    faults = ''.join(f'\n  - {problem}' for problem in self.problems)
    super().__init__(f'{self.path}:{faults}\n{remedy}')

  def line(self, most: int = 3) -> str:
    """Returns the message in one line, with at most `most` of the problems."""
    shown = '; '.join(self.problems[:most])
    left = len(self.problems) - most
    more = f'; and {left} more' if left > 0 else ''
    return f'{self.path}: {shown}{more}. {self.remedy}'


class MissingPackageError(ImportError):
  """An optional package that a model file needs is not installed."""


def optional_package(name: str) -> types.ModuleType:
  """Imports a package of the extra `weights` at first use.

  Raises:
    MissingPackageError: it is not installed.
  """
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise MissingPackageError(
      f'reading model files needs the package {name.split(".")[0]!r}: '
      "pip install 'lynx-jax[weights]'"
    ) from error


def read_text(path: epath.Path) -> str:
  """Reads a text file of a model.

  Raises:
    WeightsError: it is missing or not UTF-8.
  """
  try:
    return path.read_text('utf-8')
  except OSError as error:
    raise WeightsError(
      path,
      [f'cannot be read: {error.strerror}'],
      'Give a .gguf file, or a directory as Hugging Face writes it.',
    ) from error
  except UnicodeDecodeError as error:
    raise WeightsError(
      path, [f'is not UTF-8: {error}'], 'Fetch it again.'
    ) from (error)


def parse_json(text: str) -> Any:
  """Returns the value of a JSON text.

  Raises:
    ValueError: it is none, is nested too deep, or has a number of thousands of
      digits.
  """
  try:
    value = json.loads(text)
  except RecursionError as error:
    raise ValueError('it is nested too deep') from error
  level = [value]
  for _ in range(_MOST_LEVELS):
    level = [inner for outer in level for inner in _parts(outer)]
  if level:
    raise ValueError(f'it is nested deeper than {_MOST_LEVELS} levels')
  return value


def _parts(value: Any) -> Collection[Any]:
  if isinstance(value, dict):
    return value.values()
  return value if isinstance(value, list) else ()


def read_json(path: epath.Path) -> dict[str, Any]:
  """Reads a JSON object of a model.

  Raises:
    WeightsError: the file is missing or holds anything else.
  """
  text = read_text(path)
  try:
    value = parse_json(text)
  except ValueError as error:
    raise WeightsError(
      path, [f'is not JSON: {error}'], 'Fetch it again.'
    ) from (error)
  if not isinstance(value, dict):
    raise WeightsError(path, ['is not a JSON object'], _AGAIN)
  return value
