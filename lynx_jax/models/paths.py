# SPDX-License-Identifier: Apache-2.0
"""Where model files are: on this machine, in a bucket, or on a hub.

It knows no format.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import IO

from etils import epath

from lynx_jax.models import errors

_SCHEMES = ('gs', 's3', 'az', 'hf')  # of etils.epath 1.14
_SCHEME = re.compile('([^/]*)://')
_HUB_ID = re.compile(r'[\w-][\w.-]*/[\w-][\w.-]*')
# Of a hub's repository: what is read here, and no second copy of the weights
# (Mistral's is called consolidated.safetensors, others lie in folders).
_HUB_FILES = ('*.safetensors', '*.json', '*.jinja')
_HUB_LEFT_OUT = ('consolidated*', '*/*')


def locate(path: str | os.PathLike[str]) -> epath.Path:
  """Returns where a model's files are, after fetching them if need be.

  Args:
    path: a local file or directory, a URI such as `gs://bucket/folder`, or the
      id of a model on the Hugging Face hub, `organisation/name`, where no such
      local path exists.

  Raises:
    WeightsError: it is none of these, or the hub does not give it.
    MissingPackageError: a package that such a place needs is not installed.
  """
  name = os.path.expanduser(os.fspath(path))  # no shell does behind a '='
  scheme = _SCHEME.match(name)
  if scheme and scheme[1] not in _SCHEMES:
    raise errors.WeightsError(
      name,
      [
        f'{scheme[0]} is no scheme that is read, must be one of '
        + ', '.join(f'{known}://' for known in _SCHEMES)
      ],
      'Give one of these, a path on this machine, or the id of a model on the '
      'Hugging Face hub.',
    )
  try:
    found = epath.Path(name)
    exists = found.exists()
  except ImportError as error:  # of the package for a kind of bucket
    raise errors.MissingPackageError(
      f'{name!r} cannot be reached: {_first_line(error)}'
    ) from error
  except Exception as error:  # whatever that package raises
    raise errors.WeightsError(
      name,
      [f'cannot be reached: {type(error).__name__}: {_first_line(error)}'],
      'Check the address, the network and your credentials.',
    ) from error
  if exists or not _HUB_ID.fullmatch(name) or name.endswith('.gguf'):
    return found
  hub = errors.optional_package('huggingface_hub')
  try:
    fetched = hub.snapshot_download(
      name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_LEFT_OUT
    )
    return epath.Path(fetched)
  except Exception as error:  # of the network, the hub or the package
    raise errors.WeightsError(
      name,
      [
        'is no path on this machine, and the hub does not give it: '
        f'{type(error).__name__}: {_first_line(error)}'
      ],
      'Check the path; for a hub id check name, network and access.',
    ) from error


class Files:
  """Reads ranges of files, each of which is opened once."""

  def __init__(self, stack: contextlib.ExitStack):
    self._stack = stack
    self._open: dict[epath.Path, IO[bytes]] = {}

  def read(self, path: epath.Path, start: int, size: int) -> bytes:
    """Returns the bytes [start, start + size)."""
    if path not in self._open:
      self._open[path] = self._stack.enter_context(path.open('rb'))
    file = self._open[path]
    file.seek(start)
    return file.read(size)


@contextlib.contextmanager
def files() -> Iterator[Files]:
  """Yields a reader, and closes what it has opened."""
  with contextlib.ExitStack() as stack:
    yield Files(stack)


def _first_line(error: Exception) -> str:
  return (str(error).strip().splitlines() or [''])[0]
