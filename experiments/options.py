# SPDX-License-Identifier: Apache-2.0
"""The command line of a process that runs one side, or starts both.

It starts nothing and imports no JAX: mistakes are told before that.
"""

import dataclasses
import enum
import pathlib
from typing import TYPE_CHECKING, Any

from absl import flags

from lynx_jax.config import require

if TYPE_CHECKING:  # one process alone needs no gRPC
  from lynx_jax.transport import control


class Role(enum.StrEnum):
  """What a process does."""

  PREFILL = 'prefill'  # serves prompts until it is ended
  DECODE = 'decode'  # runs the study with prefill elsewhere
  LOCAL = 'local'  # starts both on this machine, and runs the study


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """The command line of a role.

  Attributes:
    role: what this process does.
    listen: ADDRESS:PORT of a prefill process.
    connect: ADDRESS:PORT of the prefill process that decode shall use.
    ends_with_stdin: a prefill process ends when its standard input does, as
      when whoever holds the other end of the pipe has gone.
    token_file: holds the token that both sides know.
    certificate, key, authority: PEM files; see `control.Security`.
  """

  role: Role
  listen: str | None = None
  connect: str | None = None
  ends_with_stdin: bool = False
  token_file: str | None = None
  certificate: str | None = None
  key: str | None = None
  authority: str | None = None

  def __post_init__(self):
    needs = {Role.PREFILL: 'listen', Role.DECODE: 'connect', Role.LOCAL: None}
    for name in ('listen', 'connect'):
      given = getattr(self, name) is not None
      wanted = needs[self.role] == name
      require(
        given == wanted,
        f'--role={self.role} '
        + (f'needs --{name}=ADDRESS:PORT' if wanted else f'takes no --{name}'),
      )
    if self.listen is not None:
      from lynx_jax.transport import control

      control.check_interface(self.listen)

  def security(self) -> 'control.Security':
    """Reads the files.

    Raises:
      OSError: one cannot be read.
    """
    from lynx_jax.transport import control

    files = {
      name: pathlib.Path(path).read_bytes()
      for name in ('certificate', 'key', 'authority')
      if (path := getattr(self, name)) is not None
    }
    token = None
    if self.token_file is not None:
      token = pathlib.Path(self.token_file).read_text('utf-8').strip()
      require(bool(token), f'{self.token_file!r} holds no token')
    return control.Security(token=token, **files)


def define(values: flags.FlagValues) -> None:
  """Defines the flags of `Options`."""
  flags.DEFINE_enum(
    'role',
    None,
    [*Role],
    'One side of the transfer, or both as two processes.',
    flag_values=values,
  )
  for name, text in [
    ('listen', 'ADDRESS:PORT of --role=prefill.'),
    ('connect', 'ADDRESS:PORT that --role=decode connects to.'),
    ('token_file', 'Holds the token that both sides know.'),
    ('certificate', "PEM of this side's certificate."),
    ('key', "PEM of this side's key."),
    ('authority', "PEM of who signed the other side's certificate."),
  ]:
    flags.DEFINE_string(name, None, text, flag_values=values)
  flags.DEFINE_bool(
    'ends_with_stdin',
    False,
    '--role=prefill ends when its standard input does.',
    flag_values=values,
  )


def read(values: flags.FlagValues) -> Options | None:
  """Returns what the flags say; None is one process, without a role.

  Raises:
    ConfigError: they do not go together.
  """
  given: dict[str, Any] = {
    field.name: values[field.name].value
    for field in dataclasses.fields(Options)
  }
  if given['role'] is None:
    for name, value in given.items():
      require(not value, f'--{name} needs a --role; see --help')
    return None
  return Options(**given | {'role': Role(given['role'])})
