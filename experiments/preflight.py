# SPDX-License-Identifier: Apache-2.0
"""Says on one page what of a run would fail, before it loads any weights.

Add `--config.study=preflight` to a command line, on either side; see `main`.
Of a side of several processes each makes the checks, and process 0 shows what
would fail in any. It measures nothing but its own smoke transfer: one layer
with the model's heads and random weights, from prefill to decode over the run's
own link.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import socket
import time
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from experiments import config, display, prompts, roles, serving, sides
from experiments.options import Role
from lynx_jax import memory
from lynx_jax import mesh as mesh_lib
from lynx_jax import wire as wire_lib
from lynx_jax.config import ConfigError, ModelConfig, check_together, require
from lynx_jax.engine import Request
from lynx_jax.models import presets, weights
from lynx_jax.models.errors import WeightsError
from lynx_jax.models.transformer import Transformer
from lynx_jax.transport.fault_plan import FaultPlan
from lynx_jax.transport.streams import TransferError, WireFormat

HEADROOM = 0.1  # of a device's memory: what programs need beside the budget
_LOCK = pathlib.Path(__file__).parents[1] / 'requirements.lock'
_TESTED = ('jax', 'jaxlib', 'flax', 'numpy', 'grpcio')
_CHIPS = ('/dev/accel0', '/dev/vfio/0')  # of a TPU VM, older and newer ones
_FREE_BYTES = 1 << 30  # compiled programs, records and a report
_OUTPUT_TOKENS = 3


@dataclasses.dataclass(frozen=True)
class Check:
  """One line of the page.

  Attributes:
    name: what was looked at.
    found: what is there.
    fault: what would fail, and the remedy; None if nothing would.
  """

  name: str
  found: str
  fault: str | None = None

  def __str__(self) -> str:
    mark = 'ok  ' if self.fault is None else 'FAIL'
    said = '; '.join(filter(None, (self.found, self.fault)))
    return f'{mark}  {self.name:<9}  {said}'


def run(
  settings: config.Settings,
  side: sides.Side | None,
  argv: Sequence[str],
  screen: display.Screen,
  workdir: str | None = None,
) -> None:
  """Prints the page; `side` is None in a process without a role.

  A prefill process whose checks are good then serves smoke transfers until it
  is told to end, as it would serve prompts.

  Raises:
    ConfigError: something would fail; nothing was changed.
  """
  devices = _side_devices(settings, side)
  checks: list[Check] = []
  model: ModelConfig | None = None

  def add(check: Check) -> Check:
    screen.note(str(check))
    checks.append(check)
    return check

  add(_versions())
  add(_devices())
  try:
    model = _model_config(settings)
    add(Check('model', f'{model.name}, {model.dtype}'))
  except (ConfigError, ImportError, OSError) as error:
    add(Check('model', settings.model_path, _line(error)))
  if model is not None:
    try:
      meshes = _meshes(settings, model, devices)
      add(Check('mesh', _shown(meshes)))
      for name, mesh in meshes.items():
        here = sum(devices.values()) // jax.process_count()
        add(_memory(settings, model, name, mesh, here))
    except ConfigError as error:
      add(Check('mesh', '', _line(error)))
  add(_text(settings, model))
  add(_files(workdir))
  add(_port(side))
  _require_passed(checks, side, screen)
  assert model is not None
  small = _small(settings, model)
  if side is not None and side.options.role is Role.PREFILL:
    smoke = _smoke_model(small, model, devices)
    roles.serve(small, side, screen, model=smoke)
    return
  with screen.step('smoke transfer'):
    smoke = _smoke_model(small, model, devices)
    add(_smoke(small, smoke, side, argv, screen))
  _require_passed(checks, side, screen)
  screen.note(f'all {len(checks)} checks passed')


def _require_passed(
  checks: Sequence[Check], side: sides.Side | None, screen: display.Screen
) -> None:
  """Raises `ConfigError` if a check has failed, in whichever process."""
  faults = [check.name for check in checks if check.fault]
  lines = [str(check) for check in checks if check.fault]
  told = [lines] if side is None else side.gather(lines)
  others = {i: found for i, found in enumerate(told) if i and found}
  for process, found in others.items():
    for line in found:
      screen.note(f'process {process}: {line}')
  require(
    not faults,
    f'{len(faults)} of {len(checks)} checks failed: {", ".join(faults)}',
  )
  require(
    not any(told),
    'checks failed in other processes of this side: '
    f'{", ".join(str(i) for i, found in enumerate(told) if found)}',
  )


def _side_devices(
  settings: config.Settings, side: sides.Side | None
) -> dict[Role, int]:
  """Returns how many devices each side has that this process runs."""
  both = dict(zip((Role.PREFILL, Role.DECODE), settings.sides, strict=True))
  if side is None:
    return both
  prefills = side.options.role is Role.PREFILL
  own = Role.PREFILL if prefills else Role.DECODE
  return {own: both[own]}


def _versions() -> Check:
  """Compares what is installed with what was tested."""
  tested = dict(
    re.findall(r'^(\S+)==(\S+) \\$', _LOCK.read_text('utf-8'), re.M)
  )
  found, other = [f'Python {platform.python_version()}'], []
  for name in _TESTED:
    try:
      version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      version = 'none'
    found.append(f'{name} {version}')
    if version != tested[name]:
      other.append(f'{name} {tested[name]}')
  text = ', '.join(found)
  if other:
    text += f' (tested with {", ".join(other)})'
  # Its transfer server and Pallas change between minor versions.
  minor = tested['jax'].rsplit('.', 1)[0]
  fault = None
  if not jax.__version__.startswith(f'{minor}.'):
    fault = f'jax must be {minor}.x: pip install jax=={tested["jax"]}'
  return Check('versions', text, fault)


def _devices() -> Check:
  device, fault = jax.devices()[0], None
  if device.platform == 'cpu' and any(map(os.path.exists, _CHIPS)):
    fault = (
      'this machine has TPU chips, but JAX runs on the CPU: unset '
      f'JAX_PLATFORMS, and pip install "jax[tpu]=={jax.__version__}"'
    )
  found = f'{len(jax.devices())} x {device.device_kind} ({device.platform})'
  if jax.process_count() > 1:
    found += f', {len(jax.local_devices())} of them in this process'
  return Check('devices', found, fault)


def _model_config(settings: config.Settings) -> ModelConfig:
  path = settings.model_path
  if path == serving.TINY:
    return presets.tiny(dtype=settings.model_dtype)
  return weights.check(serving.locate(path), dtype=settings.model_dtype)


def _meshes(
  settings: config.Settings, model: ModelConfig, devices: dict[Role, int]
) -> dict[Role, jax.sharding.Mesh]:
  """Returns the meshes of this process, as `serving.load` places them."""
  places = serving.devices(tuple(devices.values()))
  meshes = {
    name: mesh_lib.make(
      place, model, settings.decode_data if name is Role.DECODE else 1
    )
    for name, place in zip(devices, places, strict=True)
  }
  for mesh in meshes.values():
    mesh_lib.local(mesh)  # no KV head in several processes
  for scheme in settings.schemes:
    check_together(model, scheme.codec, _engine(settings))
    for mesh in meshes.values():
      wire_lib.check_mesh(scheme.codec, mesh)
      wire_lib.check_rows(scheme.codec, settings.engine, mesh)
  if len(meshes) == 2:
    mesh_lib.parts(*meshes.values())
  return meshes


def _shown(meshes: dict[Role, jax.sharding.Mesh]) -> str:
  return ', '.join(
    f'{side} on {mesh.size}: KV heads in {mesh.shape[mesh_lib.KV]}'
    + (f', slots in {rows}' if (rows := mesh.shape[mesh_lib.DATA]) > 1 else '')
    for side, mesh in meshes.items()
  )


def _engine(settings: config.Settings):
  """Returns the engine's config with the longest prompt of the run."""
  longest = max(tokens for _, tokens in settings.prompts)
  return dataclasses.replace(settings.engine, prompt_tokens=longest)


def _memory(
  settings: config.Settings,
  model: ModelConfig,
  side: Role,
  mesh: jax.sharding.Mesh,
  devices: int,
) -> Check:
  """Compares the budget of the largest scheme with what a device has.

  Engines of all schemes are open at once on decode's side, and so are the
  sessions of all of them on prefill's.
  """
  of = memory.of_prefill if side is Role.PREFILL else memory.of_decode
  window = settings.transfer.window_bytes or 16 * settings.engine.chunk_bytes
  budgets = [
    of(WireFormat(model, codec, _engine(settings)), mesh, window)
    for codec in dict.fromkeys(s.codec for s in settings.schemes)
  ]
  total = budgets[0].weights_bytes + sum(
    b.kv_bytes + b.window_bytes for b in budgets
  )
  limit = _limit(mesh, devices)
  name = f'memory of {side}'
  found = (
    f'{_gib(total)} a device: {_gib(budgets[0].weights_bytes)} weights and '
    f'KV of {len(budgets)} codecs; limit {_gib(limit)}'
  )
  fault = None
  if total > (1 - HEADROOM) * limit:
    fault = (
      f'{HEADROOM:.0%} of it must stay free: fewer engine.slots, '
      f'prompt_tokens or schemes, or a larger {side}_mesh'
    )
  return Check(name, found, fault)


def _limit(mesh: jax.sharding.Mesh, devices: int) -> float:
  """Returns the memory of a device, or its part of the machine's."""
  device = mesh_lib.local(mesh).devices.flat[0]
  stats = device.memory_stats() if device.platform != 'cpu' else None
  if stats and 'bytes_limit' in stats:
    return stats['bytes_limit']
  text = pathlib.Path('/proc/meminfo').read_text('utf-8')
  free = re.search(r'^MemAvailable:\s+(\d+) kB', text, re.M)
  assert free is not None
  return (int(free[1]) << 10) / devices


def _text(settings: config.Settings, model: ModelConfig | None) -> Check:
  """Encodes the prompts, and compares their ids with the model's table."""
  path, found = settings.model_path, []
  try:
    tokenizer: serving.Text = serving.Bytes()
    if path != serving.TINY:
      tokenizer = serving.text(serving.locate(path), settings.model_tokenizer)
    for file, tokens in settings.prompts:
      ids = tokenizer.encode(prompts.read(file))
      keeps_end = prompts.KEEPS_END.get(file, False)
      ids = prompts.cut(ids, tokens, keeps_end=keeps_end)
      require(
        model is None or max(ids) < model.vocab,
        f'prompt {file} has token id {max(ids)}, the model '
        f'{model and model.vocab} ids: model.tokenizer must name the '
        "directory of the model's own tokenizer.json",
      )
      found.append(len(ids))
  except (ConfigError, ImportError, OSError, UnicodeError) as error:
    return Check('text', '', _line(error))
  return Check('text', f'prompts of {", ".join(map(str, found))} tokens')


def _files(workdir: str | None) -> Check:
  """Looks for a place for records, and for room for compiled programs."""
  if workdir is not None and not _takes_files(_existing(workdir)):
    return Check('files', '', f'--workdir={workdir} cannot be written')
  chosen: Any = jax.config  # its options are unknown to the type checker
  place = chosen.jax_compilation_cache_dir
  if place is None or '://' in place:
    return Check('files', f'programs are kept in {place or "no place"}')
  place = _existing(place)
  free, fault = shutil.disk_usage(place).free, None
  if free < _FREE_BYTES or not _takes_files(place):
    fault = (
      f'{_gib(_FREE_BYTES)} to write are needed; JAX_COMPILATION_CACHE_DIR '
      'moves it'
    )
  return Check('files', f'{_gib(free)} free for programs in {place}', fault)


def _existing(path: str) -> pathlib.Path:
  """Returns a path, or the nearest one above it that is there."""
  whole = pathlib.Path(path).absolute()
  return next(each for each in (whole, *whole.parents) if each.exists())


def _takes_files(path: pathlib.Path) -> bool:
  return path.is_dir() and os.access(path, os.W_OK)


def _port(side: sides.Side | None) -> Check:
  """Binds the port that prefill listens on, or reaches the one of decode."""
  if side is None or side.options.role is Role.LOCAL:
    return Check('port', 'none is needed')
  role = side.options
  address = role.listen or role.connect
  assert address is not None
  try:
    host, port = sides.numeric(address)
    if role.listen:
      family = socket.AF_INET6 if ':' in host else socket.AF_INET
      with socket.socket(family) as server:
        server.bind((host, port))
      return Check('port', f'{address} can be bound')
    with socket.create_connection((host, port), timeout=5.0):
      return Check('port', f'{address} answers')
  except (OSError, ConfigError) as error:
    return Check(
      'port',
      address,
      f'{_line(error)}: name an address of this machine that is free'
      if role.listen
      else f'{_line(error)}: start --role=prefill there, and open the port',
    )


def _small(settings: config.Settings, model: ModelConfig) -> config.Settings:
  """Returns settings of the smoke transfer: a short prompt, a slot a row."""
  scheme = next(
    (s for s in settings.schemes if s.is_speculative), settings.schemes[0]
  )
  codec = dataclasses.replace(scheme.codec, layers=())
  scheme = dataclasses.replace(scheme, codec=codec)
  tokens = settings.engine.token_chunk + codec.group + codec.recent_tokens
  engine = dataclasses.replace(
    settings.engine,
    slots=settings.decode_data,
    output_tokens=_OUTPUT_TOKENS,
    layer_groups=1,
    # Fewer programs to compile: drafts before the Residual are shown anyway.
    draft_tokens=0,
    sharpen=False,
  )
  file, _ = settings.prompts[0]
  tokens = min(tokens, model.context_tokens - _OUTPUT_TOKENS)
  return dataclasses.replace(
    settings,
    schemes=(scheme,),
    engine=engine,
    prompts=((file, tokens),),
    faults=FaultPlan(),
  )


def _smoke_model(
  settings: config.Settings, model: ModelConfig, devices: dict[Role, int]
) -> serving.Model:
  """Returns one narrow layer with the model's heads, on the run's meshes."""
  small = dataclasses.replace(
    model,
    layers=1,
    model_dim=128,
    ff_dim=model.heads,  # whatever divides those divides it
    vocab=256,
    local=None,
    dtype=settings.model_dtype,
  )
  drawn = Transformer(small, rngs=nnx.Rngs(params=0))
  return serving.on_sides(
    drawn,
    serving.Bytes(),
    tuple(devices.values()),
    settings.decode_data if Role.DECODE in devices else 1,
  )


def _smoke(
  settings: config.Settings,
  model: serving.Model,
  side: sides.Side | None,
  argv: Sequence[str],
  screen: display.Screen,
) -> Check:
  """Sends a prompt's KV, and compares the output with its reference.

  Raises:
    TransferError, ConfigError: it fails, and other processes may not know.
  """
  (scheme,), ((_, tokens),) = settings.schemes, settings.prompts
  engine = dataclasses.replace(settings.engine, prompt_tokens=tokens)
  ask = Request(
    prompt=[i % 251 for i in range(tokens)], output_tokens=_OUTPUT_TOKENS
  )
  try:
    with contextlib.ExitStack() as stack:
      remote = None
      if side is not None:
        remote = stack.enter_context(roles.remote(settings, side, argv, screen))
      line = stack.enter_context(
        serving.connect(
          model, scheme, scheme.engine(engine), remote=remote, emulated=False
        )
      )
      outputs = []
      for _ in range(2):  # the first compiles, and tries all kinds of chunks
        line.engine.spoil_cache()  # the first would leave all to the second
        start_s = time.monotonic()
        result = line.engine.generate(ask)
        seconds = time.monotonic() - start_s
        outputs.append(result.tokens)
      expected = line.engine.reference(ask.prompt, _OUTPUT_TOKENS)
  except (TransferError, ConfigError) as error:
    if side is not None and side.processes > 1:
      raise
    return Check('transfer', '', _line(error))
  sent = result.anchor_bytes + result.residual_bytes + result.exact_bytes
  found = (
    f'{sent / 1e6:.2f} MB of {tokens} tokens, request in {seconds:.3f} s'
    f' (scheme {scheme.name})'
  )
  wrong = [tokens for tokens in outputs if tokens != expected]
  fault = None
  if wrong:
    fault = f'{wrong[0]} is not the reference {expected}: please report it'
  return Check('transfer', found, fault)


def _gib(size_bytes: float) -> str:
  return f'{size_bytes / 2**30:.2f} GiB'


def _line(error: Exception) -> str:
  text = error.line() if isinstance(error, WeightsError) else ''
  return text or ' '.join(str(error).split())
