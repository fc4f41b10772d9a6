# SPDX-License-Identifier: Apache-2.0
"""Chooses which implementation of an op runs, and can say why.

It knows no op and no array: an op hands in one callable an implementation.
"""

import collections.abc
import contextlib
import contextvars
import dataclasses
import logging
from typing import TypeVar

import jax

from lynx_jax.config import IMPLEMENTATIONS, ConfigError

XLA, PALLAS_TPU, PALLAS_TPU_INTERPRET = IMPLEMENTATIONS

_Result = TypeVar('_Result')
_log = logging.getLogger(__name__)


class Unsupported(ConfigError, NotImplementedError):
  """A kernel cannot serve these shapes or dtypes.

  The message names what stands in the way and the nearest thing that works.
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """What one op call was traced with; `reason` says why not the kernel."""

  op: str
  implementation: str
  reason: str = ''

  def __str__(self) -> str:
    why = f': {self.reason}' if self.reason else ''
    return f'{self.op} runs as {self.implementation}{why}'


_recorder: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar(
  'lynx_kernel_choices', default=None
)


@contextlib.contextmanager
def record() -> collections.abc.Iterator[list[Choice]]:
  """Collects the choices made while tracing inside the `with` block.

  Jit's cache remembers a trace: record around the first call of a program.
  Without it every choice still goes to this module's logger, level INFO.
  """
  choices: list[Choice] = []
  token = _recorder.set(choices)
  try:
    yield choices
  finally:
    _recorder.reset(token)


def run(
  op: str,
  implementation: str | None,
  *,
  xla: collections.abc.Callable[[], _Result],
  pallas_tpu: collections.abc.Callable[[bool], _Result],
) -> _Result:
  """Runs one op as `implementation` says.

  Args:
    op: name, for messages.
    implementation: one of `IMPLEMENTATIONS`, which never falls back, or
      `None`: the TPU kernel where the default backend is a TPU and the kernel
      can serve the case, otherwise XLA.
    xla: computes the result in plain XLA.
    pallas_tpu: computes it by the TPU kernel; its argument is `interpret`.
      Raises `Unsupported` before it builds anything.

  Raises:
    ValueError: for an unknown implementation.
    Unsupported: if the kernel was asked for and cannot serve the case.
  """
  if implementation is None:
    backend = jax.default_backend()
    if backend != 'tpu':
      return _chosen(op, XLA, f'the backend is {backend}', xla)
    try:
      result = pallas_tpu(False)
    except Unsupported as error:
      return _chosen(op, XLA, str(error), xla)
    return _chosen(op, PALLAS_TPU, '', lambda: result)
  if implementation == XLA:
    return _chosen(op, XLA, 'it was asked for', xla)
  if implementation in (PALLAS_TPU, PALLAS_TPU_INTERPRET):
    interpret = implementation == PALLAS_TPU_INTERPRET
    return _chosen(op, implementation, '', lambda: pallas_tpu(interpret))
  raise ValueError(
    f'implementation={implementation!r} must be None or one of '
    f'{IMPLEMENTATIONS}'
  )


def _chosen(op, implementation, reason, compute):
  choice = Choice(op=op, implementation=implementation, reason=reason)
  _log.info('%s', choice)
  choices = _recorder.get()
  if choices is not None:
    choices.append(choice)
  return compute()
