# SPDX-License-Identifier: Apache-2.0
"""Writes the configuration reference out of the source: fields and their words.

What a field means is said once, where it is defined: in the `Attributes` of its
dataclass, or in the comment above it. Nothing is run.
"""

import ast
import dataclasses
import enum
import inspect
import pathlib
import re
import textwrap
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import ml_collections

from experiments import config, defaults
from lynx_jax import config as library

_FOLDER = pathlib.Path(__file__).parent
_LIBRARY = (
  library.EngineConfig,
  library.CodecConfig,
  library.TensorCodec,
  library.LayerCodec,
  library.ModelConfig,
  library.RopeScaling,
  library.LocalLayers,
)


def configuration() -> str:
  """Returns the tables of docs/configuration.md."""
  return '\n\n'.join((*_runs(), *_commands(), *_classes()))


def undocumented() -> list[str]:
  """Returns the fields of which neither they nor their group say anything."""
  comments = _comments_of_base()
  found = [
    name
    for name, _, text in _fields()
    if not text and not comments.get(name.rpartition('.')[0])
  ]
  for kind in _LIBRARY:
    found += [
      f'{kind.__name__}.{name}' for name, _, text in _members(kind) if not text
    ]
  return found


# --- Fields of a run ----------------------------------------------------------


def _runs() -> Iterator[str]:
  yield '## Fields of a run'
  yield (
    '`--config.FIELD=VALUE` sets a field; `configs/*.py` set several. '
    'A dash is chosen by the program.'
  )
  comments = _comments_of_base()
  groups: dict[str, list[tuple[str, str, str]]] = {}
  for name, default, text in _fields():
    group = name.rpartition('.')[0]
    groups.setdefault(group, []).append((f'`{name}`', default, text))
  for group, rows in groups.items():
    if group:
      yield f'### `{group}`'
      if comments.get(group):
        yield comments[group]
    yield _table(('field', 'default', 'meaning'), rows)


def _fields() -> Iterator[tuple[str, str, str]]:
  """Yields name, default and meaning of every field of a run."""
  comments, values = _comments_of_base(), defaults.base()
  types = typing.get_type_hints(config.Settings) | {
    'codec': library.CodecConfig
  }
  order = {name: place for place, name in enumerate(comments)}
  names = sorted(
    defaults.field_names(values),
    key=lambda name: (
      '.' in name,
      order.get(name.split('.')[0], 0),
      order.get(name, len(order)),
    ),
  )
  for name in names:
    group, _, leaf = name.rpartition('.')
    meanings = {}
    if dataclasses.is_dataclass(types.get(group)):
      meanings = attributes(types[group])
    text = comments.get(name) or meanings.get(leaf, '')
    if group == 'faults':
      text = text or _fault_words().get(leaf, '')
    default = values
    for part in name.split('.'):
      default = default[part]
    yield name, _value(default), text


def _fault_words() -> dict[str, str]:
  from lynx_jax.transport import fault_plan

  return {
    member.value: f'probability that {words}'
    for member, words in _enum_words(fault_plan.Fault).items()
  }


def _comments_of_base() -> dict[str, str]:
  """Returns the comments above the fields of `defaults.base`, by field.

  A comment belongs to the field that begins the line below it.
  """
  source = textwrap.dedent(inspect.getsource(defaults.base))
  lines = source.split('\n')
  found: dict[str, str] = {}

  def walk(node: ast.Dict, path: str) -> None:
    for key, value in zip(node.keys, node.values, strict=True):
      if not isinstance(key, ast.Constant):
        continue
      leaf = str(key.value)
      name = f'{path}{leaf}'
      above: list[str] = []
      if lines[key.lineno - 1].lstrip().startswith(f"'{leaf}'"):
        for line in reversed(lines[: key.lineno - 1]):
          if not line.strip().startswith('#'):
            break
          above.insert(0, line.strip().lstrip('# '))
      found[name] = ' '.join(above)
      if isinstance(value, ast.Dict):
        walk(value, f'{name}.')

  (top,) = [
    node.value.args[0]
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Call)
  ]
  assert isinstance(top, ast.Dict)
  walk(top, '')
  return found


# --- Command lines ------------------------------------------------------------


def _commands() -> Iterator[str]:
  yield '## Commands'
  yield (
    'Studies, by `--config`; what each costs and shows is said in its file.'
  )
  rows = [
    (f'`configs/{file.stem}.py`', _first_line(ast.parse(file.read_text())))
    for file in sorted((_FOLDER.parent / 'configs').glob('[!_]*.py'))
  ]
  yield _table(('file', 'study'), rows)
  yield 'Programs with options of their own, `python -m experiments.NAME`:'
  yield _table(('program', 'what it does', 'options'), list(_programs()))


def _programs() -> Iterator[tuple[str, str, str]]:
  for file in sorted(_FOLDER.glob('*.py')):
    source = file.read_text(encoding='utf-8')
    if "if __name__ == '__main__'" not in source:
      continue
    tree = ast.parse(source)
    options = [
      option
      for node in ast.walk(tree)
      if isinstance(node, ast.Call) and (option := _option(node))
    ]
    yield f'`{file.stem}`', _first_line(tree), ', '.join(options) or '–'


def _option(call: ast.Call) -> str | None:
  """Returns how a call of `add_argument` looks on the command line."""
  name = getattr(call.func, 'attr', '')
  first = call.args[0] if call.args else None
  if name != 'add_argument' or not isinstance(first, ast.Constant):
    return None
  more = {word.arg: word.value for word in call.keywords}
  text = str(first.value)
  if not text.startswith('-'):
    return f'`{text.upper()}`'
  default = more.get('default')
  if 'action' in more:
    return f'`{text}`'
  if isinstance(default, ast.Constant) and default.value not in (None, ''):
    return f'`{text}={default.value!s}`'
  return f'`{text}=…`'


# --- Classes of the library ---------------------------------------------------


def _classes() -> Iterator[str]:
  yield '## Classes of the library'
  yield (
    'Frozen, keyword-only and checked when they are made: a value that cannot '
    'work is a `ConfigError` that names it. All are in `lynx_jax.config`.'
  )
  for kind in _LIBRARY:
    yield f'### `{kind.__name__}`'
    yield _first_paragraph(inspect.getdoc(kind) or '')
    rows = [
      (f'`{name}`', default, text) for name, default, text in _members(kind)
    ]
    yield _table(('field', 'default', 'meaning'), rows)


def _members(kind: Any) -> Iterator[tuple[str, str, str]]:
  """Yields name, default and meaning of every field of a class."""
  meanings = _trailing_comments(kind) | attributes(kind)
  types = typing.get_type_hints(kind)
  for field in dataclasses.fields(kind):
    default = ''
    if field.default is not dataclasses.MISSING:
      default = _value(field.default)
    words = meanings.get(field.name, ''), _allowed(types[field.name])
    yield field.name, default, '; '.join(filter(None, words))


def attributes(kind: type) -> dict[str, str]:
  """Returns what a class says of its attributes, by name.

  Of `a, b: text` both have the text.
  """
  text = inspect.getdoc(kind) or ''
  _, _, section = text.partition('\nAttributes:\n')
  found: dict[str, str] = {}
  names: list[str] = []
  for line in section.split('\n'):
    start = re.match(r'  (\w+(?:, \w+)*): (.*)', line)
    if start:
      names = start[1].split(', ')
      found |= dict.fromkeys(names, start[2])
    elif line.startswith('    ') and names:
      for name in names:
        found[name] += f' {line.strip()}'
    elif line.strip():
      break
  return found


def _trailing_comments(kind: type) -> dict[str, str]:
  """Returns the comments beside the fields of a class."""
  return dict(
    re.findall(r'^  (\w+): [^\n#]*  # (.*)$', inspect.getsource(kind), re.M)
  )


def _enum_words(kind: type[enum.Enum]) -> dict[enum.Enum, str]:
  """Returns the comments beside the members of an enum."""
  words = dict(
    re.findall(r'^  (\w+) = [^#\n]*  # (.*)$', inspect.getsource(kind), re.M)
  )
  return {member: words.get(member.name, '') for member in kind}


def _allowed(annotation: Any) -> str:
  """Returns the members that a field may have, where it is an enum."""
  if not (isinstance(annotation, type) and issubclass(annotation, enum.Enum)):
    return ''
  words = [
    f'`{annotation.__name__}.{member.name}`' + (f': {text}' if text else '')
    for member, text in _enum_words(annotation).items()
  ]
  return f'one of {"; ".join(words)}'


# --- Words --------------------------------------------------------------------


def _value(value: Any) -> str:
  if value is None:
    return '–'
  if isinstance(value, enum.Enum):
    return f'`{value.value}`'
  if dataclasses.is_dataclass(value):
    return f'`{type(value).__name__}()`'
  if isinstance(value, ml_collections.ConfigDict):
    raise TypeError('a group of fields has no value of its own')
  return "`''`" if value == '' else f'`{value}`'


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
  lines = [header, ('---',) * len(header), *rows]
  return '\n'.join(
    f'| {" | ".join(cell.replace("|", chr(92) + "|") for cell in line)} |'
    for line in lines
  )


def _first_line(tree: ast.Module) -> str:
  return _first_paragraph(ast.get_docstring(tree) or '')


def _first_paragraph(text: str) -> str:
  return ' '.join(text.split('\n\n')[0].split())
