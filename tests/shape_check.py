# SPDX-License-Identifier: Apache-2.0
"""The type checker that conftest puts on every function of the library.

Beartype, but for one case: JAX rebuilds a pytree by calling its class with
whatever a `tree.map` returned, such as shardings, shapes or None. A dataclass
is therefore checked only when its array fields hold arrays.
"""

import functools
import inspect
import pathlib
import typing

import beartype
import jax
import jaxtyping

LIBRARY = pathlib.Path(__file__).parents[1] / 'lynx_jax'

# An int is a float where the annotation says float, as for any type checker.
_beartype = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def modules_with_arrays() -> list[str]:
  """Returns the modules of the library that annotate arrays."""
  root = LIBRARY.parent
  return [
    '.'.join(file.relative_to(root).with_suffix('').parts)
    for file in sorted(LIBRARY.rglob('*.py'))
    if 'lynx_jax.shapes import' in file.read_text(encoding='utf-8')
  ]


def check(function):
  """Returns `function` with its annotations checked in every call."""
  checked = _beartype(function)
  if function.__name__ != '__init__':
    return checked
  signature = inspect.signature(function)
  array_fields = [
    name
    for name, parameter in signature.parameters.items()
    if _names_array(parameter.annotation)
  ]

  @functools.wraps(checked)
  def checked_if_arrays(*args, **kwargs):
    values = signature.bind(*args, **kwargs).arguments
    leaves = jax.tree.leaves([values.get(name) for name in array_fields])
    if leaves and all(isinstance(leaf, jax.Array) for leaf in leaves):
      return checked(*args, **kwargs)
    return None

  return checked_if_arrays


def _names_array(annotation) -> bool:
  if inspect.isclass(annotation) and issubclass(
    annotation, jax.Array | jaxtyping.AbstractArray
  ):
    return True
  return any(map(_names_array, typing.get_args(annotation)))
