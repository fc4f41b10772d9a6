# SPDX-License-Identifier: Apache-2.0
"""The one way to compile a program, and the one way to read its results.

It knows no model. Every program that computes is made by `program`, so that
the compiler options which equivalence needs hold everywhere; every value that
leaves a device for the host goes through `fetch`, so that host syncs can be
counted and found.
"""

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

_Tree = TypeVar('_Tree')
_Function = TypeVar('_Function', bound=Callable)


def program(
  function: Callable,
  *,
  name: str,
  donate: Sequence[int] = (),
  out_shardings: Any = None,
) -> Callable:
  """Returns `function` jitted as the program `name`.

  Without `xla_allow_excess_precision=False` XLA may keep bfloat16 values in
  float32 inside fusions, and the same layer then gives other bits when it is
  compiled alone, in a loop, or as a part of a longer program.

  Args:
    function: positional arguments only.
    name: shown in profiles and compile logs.
    donate: positions of arguments whose buffers the program may reuse.
    out_shardings: where results lie; see `mesh.outputs`.
  """

  @functools.wraps(function)
  def named(*args):
    with jax.named_scope(name):
      return function(*args)

  named.__name__ = named.__qualname__ = name
  return jax.jit(
    named,
    donate_argnums=tuple(donate),
    out_shardings=out_shardings,
    compiler_options={'xla_allow_excess_precision': False},
  )


def span(name: str) -> contextlib.AbstractContextManager[None]:
  """Names what the host does inside, for a profile; else it costs nothing."""
  return jax.profiler.TraceAnnotation(name)


def spanned(name: str) -> Callable[[_Function], _Function]:
  """Returns a decorator that runs a function in a `span`."""
  return functools.partial(jax.profiler.annotate_function, name=name)


class Read(enum.Enum):
  """What a value is for that leaves a device."""

  RESULT = 'result'  # of a program, which somebody waits for
  TRANSFER = 'transfer'  # a digest or a payload, by a thread of its own


@dataclasses.dataclass
class Counts:
  """Counts inside a `counting` block; `fetches` are those of results."""

  fetches: int = 0
  transfer_fetches: int = 0
  compiles: int = 0


_open_counts: list[Counts] = []


@contextlib.contextmanager
def counting():
  """Counts fetches and compilations of this process inside the block."""
  counts = Counts()
  _open_counts.append(counts)
  try:
    yield counts
  finally:
    _open_counts.remove(counts)


def fetch(tree: _Tree, read: Read = Read.RESULT) -> Any:
  """Waits for device values and returns them as numpy arrays.

  The only place of the library where a device value reaches the host.
  """
  for counts in tuple(_open_counts):
    if read is Read.RESULT:
      counts.fetches += 1
    else:
      counts.transfer_fetches += 1
  # As `jax.device_get` does, in half of its time on the host.
  leaves, structure = jax.tree.flatten(tree)
  for leaf in leaves[1:]:  # the first one is waited for at once
    if isinstance(leaf, jax.Array):
      leaf.copy_to_host_async()
  return jax.tree.unflatten(structure, [np.asarray(leaf) for leaf in leaves])


def _on_compile(event: str, duration_secs: float, **kwargs: str | int) -> None:
  del duration_secs, kwargs
  if event == '/jax/core/compile/backend_compile_duration':
    for counts in tuple(_open_counts):
      counts.compiles += 1


jax.monitoring.register_event_duration_secs_listener(_on_compile)
