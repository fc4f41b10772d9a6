# SPDX-License-Identifier: Apache-2.0
"""Executes the notebook in a fresh kernel, as `make notebook` does.

    python -m experiments.notebook --workdir=runs/notebook

The notebook writes its records and reports to the work directory; beside them
this leaves the notebook with its outputs. It knows nothing of what cells do.
"""

import argparse
import pathlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

FILE = pathlib.Path(__file__).with_name('lynx_colab.ipynb')
ROOT = FILE.parents[1]
USER_MISTAKE, CELL_FAILED = 2, 1
_LONGEST_CELL_S = 600


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line and returns the exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--workdir', type=pathlib.Path, default=pathlib.Path('runs/notebook')
  )
  workdir = parser.parse_args(arguments).workdir
  try:
    seconds = execute(workdir)
  except ImportError as error:
    _say(f"error: {error}; pip install 'lynx-jax[notebook]'")
    return USER_MISTAKE
  except OSError as error:
    _say(f'error: {error}; choose another --workdir')
    return USER_MISTAKE
  except RuntimeError as error:
    _say(f'error: a cell failed:\n{error}')
    return CELL_FAILED
  print(f'executed {workdir / FILE.name} in {seconds:.0f} s')
  return 0


def execute(workdir: pathlib.Path) -> float:
  """Executes every cell and writes the notebook with outputs to `workdir`.

  Returns:
    Seconds, the kernel's start included.

  Raises:
    ImportError: the extra `notebook` is not installed.
    RuntimeError: a cell failed; the outputs up to there are written.
    OSError: the work directory cannot be written.
  """
  import nbclient
  import nbformat
  import traitlets.config
  from nbclient.exceptions import CellExecutionError

  workdir.mkdir(parents=True, exist_ok=True)
  notebook = nbformat.read(FILE, as_version=4)
  (cell,) = [c for c in notebook.cells if 'parameters' in _tags(c)]
  cell.source += f'\nworkdir = pathlib.Path({str(workdir.resolve())!r})'
  client = nbclient.NotebookClient(
    notebook,
    timeout=_LONGEST_CELL_S,
    kernel_name='python3',
    # Over TCP anybody on this machine could read it.
    config=traitlets.config.Config({'KernelManager': {'transport': 'ipc'}}),
    resources={'metadata': {'path': str(ROOT)}},
  )
  start_s = time.monotonic()
  try:
    client.execute()
  except CellExecutionError as error:
    plain = re.sub(r'\x1b\[[\d;]*m', '', str(error))  # a log has no colours
    raise RuntimeError(plain) from error
  finally:
    nbformat.write(notebook, workdir / FILE.name)
  return time.monotonic() - start_s


def _tags(cell: Any) -> Sequence[str]:
  return cell.metadata.get('tags', ())


def _say(message: str) -> None:
  print(message, file=sys.stderr, flush=True)


if __name__ == '__main__':
  sys.exit(main())
