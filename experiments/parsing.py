# SPDX-License-Identifier: Apache-2.0
"""What is written in a field becomes a value, or an error that names the field.

It knows of fields nothing but their names, and those of a codec.
"""

import dataclasses
import difflib
import enum
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_collections

from lynx_jax.config import (
  WIDTHS,
  Axis,
  CodecConfig,
  ConfigError,
  LayerCodec,
  Rotation,
  TensorCodec,
  require,
)


def codec(values: ml_collections.ConfigDict) -> CodecConfig:
  """Turns the fields of `codec` into the library's config.

  Raises:
    ConfigError: naming the field and what would work.
  """
  tensors = {}
  for name in 'kv':
    try:
      tensors[name] = TensorCodec(
        planes=planes(f'codec.{name}', values[name]),
        axis=member(f'codec.{name}_axis', Axis, values[f'{name}_axis']),
        rotation=member(
          f'codec.{name}_rotation', Rotation, values[f'{name}_rotation']
        ),
      )
    except ConfigError as error:
      field = '' if str(error).startswith('codec.') else f'codec.{name}: '
      raise ConfigError(f'{field}{error}') from None
  return CodecConfig(
    k=tensors['k'],
    v=tensors['v'],
    group=values.group,
    sinks=values.sinks,
    recent_tokens=values.recent_tokens,
    exact=values.exact,
    generated=values.generated,
    layers=layer_codecs(values.layers, tensors),
  )


def layer_codecs(
  text: str, tensors: Mapping[str, TensorCodec]
) -> tuple[LayerCodec, ...]:
  """Parses overrides of layer ranges.

  `0:6 k=8 v=4,4; 24:30 v=2,2` gives layers 0 to 5 other widths for both, and
  layers 24 to 29 for V alone.

  Raises:
    ConfigError: if an entry has another form.
  """
  entries = []
  for part in filter(None, (part.strip() for part in text.split(';'))):
    words = part.split()
    span = re.fullmatch(r'(\d+):(\d+)', words[0])
    pairs = [word.partition('=') for word in words[1:]]
    if not span or not pairs or any(p[0] not in ('k', 'v') for p in pairs):
      raise ConfigError(
        f'codec.layers={part!r} must be START:STOP and widths for k or v, '
        "for example '0:6 k=8 v=4,4; 24:30 v=2,2'"
      )
    own = dict(tensors)
    for name, _, widths in pairs:
      own[name] = dataclasses.replace(
        own[name], planes=planes(f'codec.layers {words[0]} {name}', widths)
      )
    entries.append(
      LayerCodec(start=int(span[1]), stop=int(span[2]), k=own['k'], v=own['v'])
    )
  return tuple(entries)


def planes(field: str, value: Any) -> tuple[int, ...]:
  """Parses widths of bit planes.

  `4,4` is (4, 4), `(8,)` is (8,), and `()` is no plane: dense bfloat16.

  Raises:
    ConfigError: if it is no list of numbers.
  """
  if not isinstance(value, str):
    value = ','.join(map(str, value))
  text = value.strip().removeprefix('(').removesuffix(')').strip().rstrip(',')
  parts = [part.strip() for part in text.split(',')] if text else []
  require(
    all(re.fullmatch('[0-9]+', part) for part in parts),
    f'{field}={value!r} must be widths in bits with commas between, Anchor '
    f'first, each one of {WIDTHS}, for example 4,4',
  )
  return tuple(map(int, parts))


def names(field: str, value: Any, known: Iterable[str]) -> tuple[str, ...]:
  """Parses a list of names, each of which must be known."""
  parts = value.split(',') if isinstance(value, str) else list(value)
  found = [str(part).strip() for part in parts if str(part).strip()]
  known = list(known)
  require(bool(found), f'{field}={value!r} must name one of {", ".join(known)}')
  for name in found:
    require(
      name in known,
      f'{field}={name!r} must be one of {", ".join(known)}' + hint(name, known),
    )
  return tuple(dict.fromkeys(found))


def numbers(
  field: str, value: Any, least: float | None = None
) -> tuple[float, ...]:
  """Parses numbers with commas between: at least `least`, or positive."""
  if not isinstance(value, str):
    value = ','.join(map(str, value))
  parts = [part.strip() for part in value.split(',') if part.strip()]
  try:
    found = tuple(map(float, parts))
  except ValueError:
    found = (math.nan,)
  good = (n > 0 if least is None else n >= least for n in found)
  require(
    all(good) and all(map(math.isfinite, found)),
    f'{field}={value!r} must be numbers with commas between, each '
    + ('above 0' if least is None else f'at least {least:g}'),
  )
  return found


def member(field: str, kind: type[enum.Enum], value: str) -> Any:
  """Returns the member of an enum whose value is `value`."""
  known = [member.value for member in kind]
  require(
    value in known,
    f'{field}={value!r} must be one of {", ".join(known)}'
    + hint(str(value), known),
  )
  return kind(value)


def positive(field: str, value: int) -> int:
  """Returns a number that must be positive."""
  require(value > 0, f'{field}={value} must be positive')
  return value


def split(name: str, text: str, separator: str) -> list[str]:
  """Splits at a character; what stands in single quotes stays together.

  Parts without a character are left out, but for those of `|`.
  """
  require(
    text.count("'") % 2 == 0, f"{name}: {text!r} must have another quote, '"
  )
  one = rf"(?:^|[{separator}])((?:'[^']*'|[^{separator}'])*)"
  parts = re.findall(one, text)
  return [part.strip() for part in parts if part.strip() or separator == '|']


def hint(name: str, known: Iterable[str]) -> str:
  """Returns the end of an error's message: the known name nearest to `name`."""
  near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
  return f'; did you mean {near[0]!r}?' if near else ''
