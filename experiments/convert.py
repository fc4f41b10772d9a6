# SPDX-License-Identifier: Apache-2.0
"""Converts a checkpoint once, so that it is restored sharded and fast.

    python -m experiments.convert SOURCE TARGET [--dtype=bfloat16]

SOURCE is what `--config.model.path` takes; TARGET is a new directory, local or
gs://, which `--config.model.path` takes from then on.
"""

import argparse
import sys
from collections.abc import Sequence

from lynx_jax.config import ConfigError
from lynx_jax.models.errors import WeightsError

_USER_MISTAKE = 2


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit code."""
  parser = argparse.ArgumentParser(
    prog='python -m experiments.convert', description=__doc__.split('\n')[0]
  )
  parser.add_argument('source', help='what --config.model.path takes')
  parser.add_argument('target', help='a new directory, local or gs://')
  parser.add_argument(
    '--dtype', choices=['float32', 'bfloat16'], default='bfloat16'
  )
  parser.add_argument(
    '--tokenizer', help="a directory with tokenizer.json; else the model's own"
  )
  own = parser.parse_args(argv[1:])
  import jax

  # A whole model need not fit one chip, and the host's memory is enough.
  jax.config.update('jax_platforms', 'cpu')
  try:
    convert(own.source, own.target, own.dtype, own.tokenizer)
  except WeightsError as error:
    print(f'error: {error.line()}', file=sys.stderr)
    return _USER_MISTAKE
  except (ConfigError, ImportError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return _USER_MISTAKE
  return 0


def convert(
  source: str, target: str, dtype: str, tokenizer: str | None = None
) -> None:
  """Writes model and tokenizer of `source` to the directory `target`."""
  from lynx_jax.models import converted, paths, weights
  from lynx_jax.models.tokenizer import Tokenizer

  # First: what cannot be written must not show after minutes of loading, and
  # another model there keeps its tokenizer.
  converted.make(target)
  if source == 'smollm2':
    source = str(weights.find_packaged_gguf())
  file = paths.locate(source)
  words = paths.locate(tokenizer) if tokenizer else file
  text = Tokenizer.read(words)
  config, model = weights.load(file, dtype=dtype)
  text.save(target)
  converted.save(target, config, model)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
