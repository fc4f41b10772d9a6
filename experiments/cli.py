# SPDX-License-Identifier: Apache-2.0
"""The command line: flags, what a user's mistake looks like, exit codes.

It knows no study but the one that it starts; `main` has its help.
"""

import contextlib
import difflib
import functools
import json
import os
import pathlib
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from experiments import (
  cells,
  config,
  defaults,
  display,
  options,
  prompts,
  results,
  studies,
)
from lynx_jax.config import ConfigError, require
from lynx_jax.models.errors import WeightsError
from lynx_jax.transport.streams import TransferError

if TYPE_CHECKING:  # it imports JAX
  from experiments import sides

# Runs a study: writes records, shows what happens.
Study = Callable[[config.Settings, results.Writer, display.Screen], object]

USER_MISTAKE = 2
_PREFLIGHT = 'preflight'  # a page, and no records
PEER_LOST = 3
CELLS_MISSING = 4
_MOST_KEPT_BYTES = 1 << 30  # of compiled programs; the oldest go first
_WRITTEN_S = 60.0  # longer than another process may take to write a program
_EXAMPLE = '--config=configs/demo.py --workdir=runs/demo'


def run(argv: Sequence[str], study: Study | None = None) -> int:
  """Runs the command line `argv` and returns the exit code.

  Args:
    argv: the program's name, then the flags.
    study: what to run; None is the one that `study` in the config names, or
      the latency study.

  Raises:
    KeyboardInterrupt: after the records were closed.
  """
  try:
    return _run(argv, study)
  except BrokenPipeError:
    # The reader of our output has gone (`| head`): not worth a word, but
    # Python would complain when it flushes at exit.
    with contextlib.suppress(OSError):
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except WeightsError as error:
    _say(f'error: {error.line()}')
  except ConfigError as error:
    _say(f'error: {error}')
  except ImportError as error:
    # Of an optional package; the library's message names the extra.
    if error.name and error.name.split('.')[0] in ('lynx_jax', 'experiments'):
      raise
    _say(f'error: {error}')
  except results.WorkdirError as error:
    _say(f'error: {error}')
  except OSError as error:
    _say(f'error: {_os_error(error)}')
  except cells.CellsMissing as error:
    _say(f'error: {error}')
    return CELLS_MISSING
  except TransferError as error:
    _say(f'error: {error}')
    return PEER_LOST
  except MemoryError:
    _say(
      'error: out of memory; use fewer --config.prompt_tokens or a smaller '
      'model'
    )
  return USER_MISTAKE


def _run(argv: Sequence[str], study: Study | None) -> int:
  values, own = _parse(argv)
  role = options.read(own)
  settings = cells.settings(values)
  if study is None:
    _check_study(settings.study)
  if role is None and not settings.link.emulated:
    raise ConfigError('link.emulated=False needs a --role; see --help')
  if role is None and settings.link.jitter_ms:
    raise ConfigError(
      f'link.jitter_ms={settings.link.jitter_ms} needs a --role; see --help'
    )
  if role is None and not settings.faults.nothing:
    raise ConfigError('faults need a --role=decode or local; see --help')
  if settings.faults.peer and role and role.role is options.Role.DECODE:
    raise ConfigError(
      'faults.peer needs --role=local, which owns the prefill process'
    )
  if role is not None:
    cells.check_apart(settings)
    role.security()  # a file that cannot be read shows before anything runs
  if settings.study == _PREFLIGHT:
    with _joined(role, settings) as side, _screen(side) as screen:
      from experiments import preflight

      preflight.run(settings, side, argv, screen, own['workdir'].value)
    return 0
  if role is not None and role.role is options.Role.PREFILL:
    return _serve(settings, role, own)
  if role is not None and settings.study in studies.MODULES:
    require(
      settings.study == cells.STUDY,
      f'--role={role.role}: study {settings.study!r} runs in one process; '
      'leave it out',
    )
    require(
      role.role is options.Role.LOCAL,
      f'--role={role.role}: an ablation starts the prefill process of every '
      'cell; take --role=local',
    )
  if role is None or not role.process:
    _workdir(own)  # what process 0 lacks shows before anything runs
  for file, _ in settings.prompts:
    prompts.read(file)
  if role is None:
    return _study(settings, None, argv, values, own, study)
  with _joined(role, settings) as side:
    return _study(settings, side, argv, values, own, study)


def _check_study(name: str) -> None:
  """Refuses what looks like the misspelt name of another study.

  Any other name is a latency study, of which the name says what it is for.
  """
  known = [*studies.MODULES, _PREFLIGHT]
  near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
  require(
    name in known or not near,
    f'study={name!r} is no study; did you mean {near and near[0]!r}? A latency '
    'study may have any name that is less like one of the others',
  )


def _study(
  settings: config.Settings,
  side: 'sides.Side | None',
  argv: Sequence[str],
  values: ml_collections.ConfigDict,
  own: flags.FlagValues,
  study: Study | None,
) -> int:
  """Runs a study; of several processes, the first writes and shows."""
  leads = side is None or side.leads
  profile = _profile(own, settings, side)
  with contextlib.ExitStack() as stack:
    writer = results.Writer(_workdir(own)) if leads else results.Nowhere()
    stack.enter_context(writer)
    screen = stack.enter_context(_screen(side))
    if writer.isolated:
      screen.note(
        f'an earlier run left half a record; it is now in {writer.isolated}'
      )
    writer.write(
      results.run_record(
        ['python', '-m', 'experiments.main', *argv[1:]],
        json.loads(values.to_json_best_effort()),
      )
    )
    if study is None:
      study = _named_study(settings, side, argv, profile)
    missing = None
    try:
      study(settings, writer, screen)
    except cells.CellsMissing as error:
      missing = error  # the report shows the others, and why
    if leads:
      with screen.step('drawing the report'):
        from experiments import report

        page = report.write(_workdir(own))
      screen.note(f'report: {page}')
  if missing is not None:
    raise missing
  return 0


def _screen(
  side: 'sides.Side | None',
) -> contextlib.AbstractContextManager[display.Screen]:
  """Returns the screen of a process; but for process 0 it shows nothing."""
  return display.screen(quiet=side is not None and not side.leads)


def _joined(
  role: options.Options | None, settings: config.Settings
) -> 'contextlib.AbstractContextManager[sides.Side | None]':
  """Returns the side that a process belongs to; without a role it is none."""
  if role is None:
    _make_devices(settings.cpu_devices)
    return contextlib.nullcontext()
  # JAX takes a second to import: mistakes in flags are told before.
  from experiments import sides

  devices = settings.sides[role.role is not options.Role.PREFILL]
  return sides.joined(role, devices, _make_devices)


def _profile(
  own: flags.FlagValues,
  settings: config.Settings,
  side: 'sides.Side | None',
) -> str | None:
  """Returns the folder of the trace that is asked for, and makes it.

  JAX would find out that it cannot be written when the traced request has run.
  """
  if not own['profile'].value:
    return None
  require(
    settings.study not in studies.MODULES,
    f'--profile: study {settings.study!r} has no trace; leave it out',
  )
  folder = os.path.join(_workdir(own), 'profile')
  if side is not None:
    number = '' if side.leads else f'-{side.process}'
    folder = os.path.join(folder, f'{side.options.role}{number}')
  try:
    os.makedirs(folder, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
  except OSError as error:
    raise ConfigError(
      f'--profile: {folder!r} cannot be written ({error.strerror}); choose '
      'another --workdir'
    ) from error
  return folder


def _serve(
  settings: config.Settings, role: options.Options, own: flags.FlagValues
) -> int:
  if own['profile'].value:
    _workdir(own)
  with _joined(role, settings) as side, _screen(side) as screen:
    from experiments import roles

    assert side is not None
    profile = _profile(own, settings, side)
    roles.serve(settings, side, screen, profile=profile)
  return 0


def _named_study(
  settings: config.Settings,
  side: 'sides.Side | None',
  argv: Sequence[str],
  profile: str | None,
) -> Study:
  if side is None:
    _make_devices(settings.cpu_devices)
    if settings.study in studies.MODULES:
      return studies.load(settings.study).run
  from experiments import latency, roles

  if side is None:
    return functools.partial(latency.run, profile=profile)

  def run(settings, writer, screen):
    with roles.remote(settings, side, argv, screen) as remote:
      latency.run(settings, writer, screen, remote, profile=profile)

  def run_cells(settings, writer, screen):
    def start(cell):
      return roles.remote(
        cell.settings, side, cells.command(argv, cell), screen
      )

    studies.load(cells.STUDY).run(settings, writer, screen, start)

  return run_cells if settings.study == cells.STUDY else run


def _make_devices(cpu_devices: int) -> None:
  import jax

  with contextlib.suppress(RuntimeError):  # a notebook has made its backend
    jax.config.update('jax_num_cpu_devices', cpu_devices)
  keep_programs()


def keep_programs() -> None:
  """Lets JAX keep what it compiles on disk, unless its own settings say where.

  Hosts that share a home keep theirs apart: code for one CPU may not run on
  another. Without a place that can be written all is compiled as ever.
  """
  import jax

  chosen: Any = jax.config  # its options are unknown to the type checker
  if (
    chosen.jax_compilation_cache_dir or not chosen.jax_enable_compilation_cache
  ):
    return
  base = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  place = os.path.join(base, 'lynx_jax', 'programs', platform.node())
  with contextlib.suppress(OSError):
    os.makedirs(place, exist_ok=True)
    if os.access(place, os.W_OK):
      _drop_halves(place)
      jax.config.update('jax_compilation_cache_dir', place)
      jax.config.update('jax_compilation_cache_max_size', _MOST_KEPT_BYTES)
      jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.05)


def _drop_halves(place: str) -> None:
  """Removes programs whose writing was cut short, as by a full disk.

  JAX writes a program, then its `-atime` (0.10.2). While one has none nothing
  else can be kept, and half a program would be read in vain for ever.
  """
  for program in pathlib.Path(place).glob('*-cache'):
    written = program.with_name(program.name.removesuffix('-cache') + '-atime')
    is_old = time.time() - program.stat().st_mtime > _WRITTEN_S
    if is_old and not written.exists():
      program.unlink()


def parse(argv: Sequence[str]) -> tuple[ml_collections.ConfigDict, str]:
  """Returns the config with its overrides, and the work directory.

  Raises:
    ConfigError: naming the flag and what would work.
  """
  values, own = _parse(argv)
  return values, _workdir(own)


def _parse(
  argv: Sequence[str],
) -> tuple[ml_collections.ConfigDict, flags.FlagValues]:
  """Returns the config with its overrides, and all flags."""
  own, overrides = _split_overrides(argv)
  values, _ = _parse_flags(own)
  known = set(defaults.field_names(values))
  for name in overrides:
    if name not in known:
      fields = [field for field in known if field.startswith(f'{name}.')]
      if fields:
        raise ConfigError(
          f'config.{name} is a group of fields; set one of them: '
          f'{", ".join(sorted(fields))}'
        )
      raise ConfigError(defaults.unknown_field(name))
  return _parse_flags(argv)


def _workdir(own: flags.FlagValues) -> str:
  if not own['workdir'].value:
    raise ConfigError(f'--workdir is missing; for example {_EXAMPLE}')
  return own['workdir'].value


def _split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
  """Returns the arguments without overrides, and the overridden fields."""
  own, names = [], []
  arguments = iter(argv)
  for argument in arguments:
    flag = argument.removeprefix('--').removeprefix('-').removeprefix('no')
    if not argument.startswith('-') or not flag.startswith('config.'):
      own.append(argument)
      continue
    name, equals, _ = flag.removeprefix('config.').partition('=')
    names.append(name)
    if not equals:
      next(arguments, None)  # its value stands apart
  return own, names


def _parse_flags(
  argv: Sequence[str],
) -> tuple[ml_collections.ConfigDict, flags.FlagValues]:
  # Own flag values, so that a test or a notebook can parse more than once.
  values = flags.FlagValues()
  flags.DEFINE_string('workdir', None, 'Where results go.', flag_values=values)
  flags.DEFINE_bool(
    'profile', False, 'Writes an xprof trace.', flag_values=values
  )
  options.define(values)
  config_flags.DEFINE_config_file(
    'config',
    None,
    'The config file.',
    flag_values=values,
    sys_argv=list(argv),
  )
  # ml_collections loads every config file into this one module, and what an
  # earlier file had defined would stand in for what this one lacks.
  sys.modules.pop('config_config', None)
  try:
    rest = values(list(argv))
    loaded = values['config'].value
    _ = loaded and loaded.keys()  # a failure to load shows at the first use
  except (flags.Error, ValueError, TypeError, AttributeError) as error:
    raise ConfigError(f'{_one_line(error)} (see --help)') from error
  except OSError as error:
    # The package wraps the error in its own story; the path is in its end.
    story = _one_line(error)
    missing = re.search(r"No such file or directory: '([^']*)'", story)
    problem = f'{missing[1]!r} does not exist' if missing else story
    raise ConfigError(
      f'--config cannot be read: {problem}; for example {_EXAMPLE}'
    ) from error
  except Exception as error:  # whatever the user's file raises
    raise ConfigError(
      f'the config file fails: {type(error).__name__}: {_one_line(error)}'
    ) from error
  if len(rest) > 1:
    raise ConfigError(
      f'{rest[1]!r} is no flag (see --help); write --flag=value'
    )
  if loaded is None:
    raise ConfigError(f'--config is missing; for example {_EXAMPLE}')
  return loaded, values


def _one_line(error: Exception) -> str:
  return ' '.join(str(error).split())


def _os_error(error: OSError) -> str:
  """Returns what failed on which file, and what to do."""
  remedies = {
    'FileNotFoundError': 'check the path',
    'PermissionError': 'choose another place or change its permissions',
    'NotADirectoryError': 'choose another place',
  }
  remedy = remedies.get(type(error).__name__, 'check the disk and the path')
  where = f'{error.filename!r}: ' if error.filename else ''
  return f'{where}{error.strerror or error}; {remedy}'


def _say(message: str) -> None:
  with contextlib.suppress(OSError):
    print(message, file=sys.stderr, flush=True)
