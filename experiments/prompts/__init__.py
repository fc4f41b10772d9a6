# SPDX-License-Identifier: Apache-2.0
"""The shipped prompts: reads them, checks them, cuts them to a length.

It knows no tokenizer: `cut` works on token ids.
"""

import hashlib
import pathlib
from collections.abc import Sequence

from lynx_jax.config import require

FOLDER = pathlib.Path(__file__).parent

# Texts that end in a task lose their beginning when cut, the others their end.
KEEPS_END = {
  'book': False,
  'code': False,
  'manual': False,
  'chat': True,
  'question': True,
}


def path(name: str) -> pathlib.Path:
  """Returns the file of the shipped prompt `name`."""
  require(
    name in KEEPS_END, f'prompt {name!r} must be one of {sorted(KEEPS_END)}'
  )
  return FOLDER / f'{name}.txt'


def read(file: str | pathlib.Path) -> str:
  """Returns the text of a prompt file.

  Args:
    file: a path, or the name of a shipped prompt (`book`), or several of
      them, one after the other (`book+code`).

  Raises:
    ConfigError: if the file is empty or is not UTF-8 text.
    OSError: if it cannot be read.
  """
  names = str(file).split('+')
  if len(names) > 1 and {*names} <= {*KEEPS_END}:
    return '\n\n'.join(map(read, names))
  shipped = str(file) in KEEPS_END
  source = path(str(file)) if shipped else pathlib.Path(file)
  data = source.read_bytes()
  try:
    text = data.decode('utf-8')
  except UnicodeDecodeError as error:
    require(
      False,
      f'prompt_file={str(source)!r} must be UTF-8 text '
      f'(byte {error.start} is {data[error.start]:#04x})',
    )
  require(
    bool(text.strip()),
    f'prompt_file={str(source)!r} is empty; it must hold at least one word',
  )
  return text


def cut(
  token_ids: Sequence[int], tokens: int, *, keeps_end: bool = False
) -> list[int]:
  """Cuts a tokenised prompt to at most `tokens`.

  Args:
    token_ids: the whole prompt, without BOS.
    tokens: most tokens to keep, positive.
    keeps_end: whether the beginning is dropped, not the end.
  """
  require(tokens > 0, f'prompt_tokens={tokens} must be positive')
  kept = token_ids[-tokens:] if keeps_end else token_ids[:tokens]
  return list(kept)


def checksums() -> dict[str, str]:
  """Returns the recorded SHA-256 of every shipped prompt, by file name."""
  lines = (FOLDER / 'SHA256SUMS').read_text().splitlines()
  return {name: digest for digest, name in (line.split() for line in lines)}


def digest(name: str) -> str:
  """Returns the SHA-256 of the shipped prompt `name` as it is on disk."""
  return hashlib.sha256(path(name).read_bytes()).hexdigest()
