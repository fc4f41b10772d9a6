# SPDX-License-Identifier: Apache-2.0
"""The command line of a process that runs one side, or starts both.

It starts nothing and imports no JAX: mistakes are told before that. A side may
have several processes, which `sides` brings together.
"""

import dataclasses
import enum
import pathlib
from typing import TYPE_CHECKING, Any

from absl import flags

from lynx_jax.config import require

if TYPE_CHECKING:  # one process alone needs no gRPC
  from lynx_jax.transport import control


SERVING = 'prefill serves at '  # and where: what a prefill process prints
START_S = 300  # hosts of a pod start minutes apart


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
    listen: ADDRESS:PORT of a prefill process; of a side of several, its own or
      a list of theirs.
    connect: ADDRESS:PORT of the prefill process that decode shall use; of a
      side of several, a list: one for each, in their order.
    coordinator: ADDRESS:PORT at process 0 of this side, which may have several.
    processes: how many there are.
    process: which of them this one is, from 0 on.
    distributed: JAX finds out these three, as on a TPU pod.
    start_s: longest time until all processes of this side are there.
    ends_with_stdin: a prefill process ends when its standard input does, as
      when whoever holds the other end of the pipe has gone.
    token_file: holds the token that both sides know.
    certificate, key, authority: PEM files; see `control.Security`.
  """

  role: Role
  listen: str | None = None
  connect: str | None = None
  coordinator: str | None = None
  processes: int | None = None
  process: int | None = None
  distributed: bool = False
  start_s: int = START_S
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
    self._check_processes()
    self._check_addresses()

  def _check_addresses(self) -> None:
    from lynx_jax.transport import control

    if self.listen is not None:
      for address in self.listen.split(','):
        control.check_interface(address)
    if self.connect is not None:
      for address in self.connect.split(','):
        control.check_address('connect', address)
    if self.coordinator is not None:
      control.check_address('coordinator', self.coordinator)

  def _check_processes(self) -> None:
    told = [self.coordinator, self.processes, self.process]
    require(
      None not in told or not any(x is not None for x in told),
      '--coordinator=ADDRESS:PORT, --processes=N and --process=I go together',
    )
    require(
      not self.distributed or self.coordinator is None,
      '--distributed finds out --coordinator, --processes and --process; leave '
      'them out, or leave it out',
    )
    require(
      not self.several or self.role is not Role.LOCAL,
      f'--role={Role.LOCAL} starts one process a side; start those of a side '
      f'of several with --role={Role.PREFILL} and --role={Role.DECODE}',
    )
    require(self.start_s > 0, f'--start_s={self.start_s} must be positive')
    if self.processes is not None and self.process is not None:
      require(
        self.processes > 0, f'--processes={self.processes} must be positive'
      )
      require(
        0 <= self.process < self.processes,
        f'--process={self.process} must be in 0..{self.processes - 1}, since '
        f'there are --processes={self.processes}',
      )

  @property
  def several(self) -> bool:
    """Whether this side may have several processes."""
    return self.distributed or self.coordinator is not None

  def of(self, process: int, processes: int) -> 'Options':
    """Returns the options with the addresses of one process of a side.

    Raises:
      ConfigError: a list has an address too few or too many.
    """
    chosen = {}
    for name in ('listen', 'connect'):
      given = getattr(self, name)
      if given is None:
        continue
      addresses = given.split(',')
      own = name == 'listen' and len(addresses) == 1
      require(
        own or len(addresses) == processes,
        f'--{name}={given} has {len(addresses)} addresses, but this side has '
        f'{processes} processes; name one for each, with commas between',
      )
      chosen[name] = addresses[0 if own else process]
    return dataclasses.replace(self, **chosen)

  def security(self) -> 'control.Security':
    """Reads the files.

    Raises:
      OSError: one cannot be read.
      ConfigError: the token is none.
    """
    from lynx_jax.transport import control

    files = {
      name: pathlib.Path(path).read_bytes()
      for name in ('certificate', 'key', 'authority')
      if (path := getattr(self, name)) is not None
    }
    token = None
    if self.token_file is not None:
      token = pathlib.Path(self.token_file).read_text('utf-8', 'replace')
      token = token.strip()
      require(
        bool(token) and token.isascii() and token.isprintable(),
        f'{self.token_file!r} holds no token: one line of printable ASCII '
        'characters',
      )
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
    ('coordinator', 'ADDRESS:PORT at process 0 of a side of several.'),
    ('token_file', 'Holds the token that both sides know.'),
    ('certificate', "PEM of this side's certificate."),
    ('key', "PEM of this side's key."),
    ('authority', "PEM of who signed the other side's certificate."),
  ]:
    flags.DEFINE_string(name, None, text, flag_values=values)
  for name, number, text in [
    ('processes', None, 'How many processes this side has.'),
    ('process', None, 'Which of them this one is, from 0 on.'),
    ('start_s', START_S, 'Longest wait for all of them to be there.'),
  ]:
    flags.DEFINE_integer(name, number, text, flag_values=values)
  flags.DEFINE_bool(
    'distributed',
    False,
    'JAX finds the processes of this side, as on a TPU pod.',
    flag_values=values,
  )
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
      default = Options.__dataclass_fields__[name].default
      unset = value == default or name == 'role'
      require(unset, f'--{name} needs a --role; see --help')
    return None
  options = Options(**given | {'role': Role(given['role'])})
  if not options.distributed:
    options.of(options.process or 0, options.processes or 1)
  return options
