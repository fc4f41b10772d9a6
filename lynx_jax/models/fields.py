# SPDX-License-Identifier: Apache-2.0
"""Reads typed values of a model's description, and gathers what is wrong."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lynx_jax import config as config_lib

Raw = Mapping[str, Any]

# What float32 holds.
_SMALLEST, _LARGEST = (
  float(value) for value in (np.finfo('f4').tiny, np.finfo('f4').max)
)


def given(values: Raw) -> dict[str, Any]:
  """Returns the values that are not null."""
  return {name: value for name, value in values.items() if value is not None}


class Fields:
  """Reads typed values and gathers what is wrong with them."""

  def __init__(
    self,
    values: Raw,
    key: Callable[[str], str],
    problems: list[str] | None = None,
  ):
    self.key = key
    self.problems: list[str] = [] if problems is None else problems
    self.values = values

  def inner(self, values: Raw) -> 'Fields':
    """Returns the fields of an object within, with the same problems."""
    return Fields(values, lambda name: name, self.problems)

  def boolean(self, name: str, default: bool = False) -> bool:
    value = self.values.get(self.key(name))
    if value is not None and not isinstance(value, bool):
      self.problem(f'{self.key(name)}={value!r} must be true or false')
    return default if value is None else value is True

  def integer(
    self, name: str, default: int | None = None, *, least: int = 1
  ) -> int:
    if (
      default == 0 and self.problems and self.values.get(self.key(name)) is None
    ):
      return 0  # it would follow from what is a problem already
    what = 'a positive integer' if least else 'an integer, 0 or more'
    return self._typed(name, default, int, what, least) or 0

  def number(self, name: str, default: float | None = None) -> float:
    kind = int | float
    value = self._typed(name, default, kind, 'a positive number', _SMALLEST)
    # GGUF stores float32: 1e-5 must not come back as 9.99999975e-06.
    return float(str(np.float32(value or 1.0)))

  def optional(self, name: str) -> float | None:
    if self.values.get(self.key(name)) is None:
      return None
    return self.number(name)

  def choice(self, name: str, known: Mapping[str, Any], default: str) -> Any:
    value = self.values.get(self.key(name))
    value = default if value is None else value
    if not isinstance(value, str) or value not in known:
      self.refuse(name, value)
      value = default
    return known[value]

  def expect(self, name: str, *neutral: Any) -> None:
    """Takes no value but these; absent is fine."""
    value = self.values.get(self.key(name))
    if value is not None and value not in neutral:
      self.refuse(name, value)

  def refuse(self, name: str, value: Any) -> None:
    self.problem(f'{self.key(name)}={value!r} is not supported')

  def problem(self, text: str) -> None:
    self.problems.append(text)

  def build(self, kind: Callable[..., Any], values: Raw | None) -> Any:
    """Returns `kind(**values)`; what is wrong with it becomes a problem."""
    if values is None or self.problems:
      return None
    try:
      return kind(**values)
    except config_lib.ConfigError as error:
      self.problem(str(error))
      return None

  def _typed(
    self, name: str, default: Any, kind: Any, what: str, least: float
  ) -> Any:
    value = self.values.get(self.key(name))
    value = default if value is None else value
    # To Python a boolean is an integer.
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if is_number and least <= value <= _LARGEST:
      return value
    self.problem(f'{self.key(name)}={value!r} must be {what}')
    return None
