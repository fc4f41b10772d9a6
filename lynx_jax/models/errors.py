# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with model files, and optional packages that read them.

It knows no file format.
"""

import importlib
import os
import types
from collections.abc import Sequence

from lynx_jax import config


class WeightsError(config.ConfigError):
  """A model file that cannot be used as it is.

  The message names the file, everything that is wrong with it, and a remedy.

  Attributes:
    problems: one entry a fault.
  """

  def __init__(
    self, path: str | os.PathLike[str], problems: Sequence[str], remedy: str
  ):
    self.problems = tuple(problems)
    faults = ''.join(f'\n  - {problem}' for problem in self.problems)
    super().__init__(f'{os.fspath(path)}:{faults}\n{remedy}')


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
