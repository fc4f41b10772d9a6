# SPDX-License-Identifier: Apache-2.0
"""Says on one page what of a run would fail, before it loads any weights.

Add `--config.study=preflight` to a command line, on either side; see `main`.
It measures nothing but its own smoke transfer: one layer with the model's heads
and random weights, from prefill to decode over the run's own link.
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

from experiments import config, display, prompts, roles, serving
from experiments.options import Options, Role
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
  role: Options | None,
  argv: Sequence[str],
  screen: display.Screen,
) -> None:
  """Prints the page.

  A prefill process whose checks are good then serves smoke transfers until it
  is told to end, as it would serve prompts.

  Raises:
    ConfigError: something would fail; nothing was changed.
  """
  sides = _sides(settings, role)
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
      meshes = _meshes(settings, model, sides)
      add(Check('mesh', _shown(meshes)))
      for side, mesh in meshes.items():
        add(_memory(settings, model, side, mesh, sum(sides.values())))
    except ConfigError as error:
      add(Check('mesh', '', _line(error)))
  add(_files(settings))
  add(_port(role))
  if not any(check.fault for check in checks):
    assert model is not None
    if role is not None and role.role is Role.PREFILL:
      small = _small(settings, model)
      roles.serve(small, role, screen, model=_smoke_model(small, model, sides))
      return
    with screen.step('smoke transfer'):
      add(_smoke(settings, model, sides, role, argv, screen))
  faults = [check.name for check in checks if check.fault]
  require(
    not faults,
    f'{len(faults)} of {len(checks)} checks failed: {", ".join(faults)}',
  )
  screen.note(f'all {len(checks)} checks passed')


def _sides(settings: config.Settings, role: Options | None) -> dict[Role, int]:
  """Returns how many devices each side has that this process runs."""
  both = dict(zip((Role.PREFILL, Role.DECODE), settings.sides, strict=True))
  if role is None:
    return both
  own = Role.PREFILL if role.role is Role.PREFILL else Role.DECODE
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
  elif jax.process_count() > 1:
    fault = (
      f'{jax.process_count()} processes share this slice; a side is one '
      'process: take slices of one host'
    )
  found = f'{len(jax.devices())} x {device.device_kind} ({device.platform})'
  return Check('devices', found, fault)


def _model_config(settings: config.Settings) -> ModelConfig:
  path = settings.model_path
  if path == 'tiny':
    return presets.tiny(dtype=settings.model_dtype)
  if path == 'smollm2':
    path = str(weights.find_packaged_gguf())
  return weights.read_config(path, dtype=settings.model_dtype)


def _meshes(
  settings: config.Settings, model: ModelConfig, sides: dict[Role, int]
) -> dict[Role, jax.sharding.Mesh]:
  """Returns the meshes of this process, as `serving.load` places them."""
  places = serving.devices(tuple(sides.values()))
  meshes = {
    side: mesh_lib.make(
      devices, model, settings.decode_data if side is Role.DECODE else 1
    )
    for side, devices in zip(sides, places, strict=True)
  }
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
  device = mesh.devices.flat[0]
  stats = device.memory_stats() if device.platform != 'cpu' else None
  if stats and 'bytes_limit' in stats:
    return stats['bytes_limit']
  text = pathlib.Path('/proc/meminfo').read_text('utf-8')
  free = re.search(r'^MemAvailable:\s+(\d+) kB', text, re.M)
  assert free is not None
  return (int(free[1]) << 10) / devices


def _files(settings: config.Settings) -> Check:
  """Reads the prompts, and looks for room for compiled programs."""
  try:
    for file, _ in settings.prompts:
      prompts.read(file)
  except (ConfigError, OSError) as error:
    return Check('files', '', _line(error))
  chosen: Any = jax.config  # its options are unknown to the type checker
  place = chosen.jax_compilation_cache_dir
  if place is None:
    return Check('files', 'prompts can be read; programs are not kept')
  free, fault = shutil.disk_usage(place).free, None
  if free < _FREE_BYTES:
    fault = (
      f'{_gib(_FREE_BYTES)} are needed; JAX_COMPILATION_CACHE_DIR moves it'
    )
  return Check('files', f'prompts can be read; {_gib(free)} free', fault)


def _port(role: Options | None) -> Check:
  """Binds the port that prefill listens on, or reaches the one of decode."""
  if role is None or role.role is Role.LOCAL:
    return Check('port', 'none is needed')
  address = role.listen or role.connect
  assert address is not None
  try:
    host, port = roles.numeric(address)
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
  settings: config.Settings, model: ModelConfig, sides: dict[Role, int]
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
    tuple(sides.values()),
    settings.decode_data if Role.DECODE in sides else 1,
  )


def _smoke(
  settings: config.Settings,
  model_config: ModelConfig,
  sides: dict[Role, int],
  role: Options | None,
  argv: Sequence[str],
  screen: display.Screen,
) -> Check:
  """Sends a prompt's KV, and compares the output with its reference."""
  small = _small(settings, model_config)
  model = _smoke_model(small, model_config, sides)
  (scheme,), ((_, tokens),) = small.schemes, small.prompts
  engine = dataclasses.replace(small.engine, prompt_tokens=tokens)
  ask = Request(
    prompt=[i % 251 for i in range(tokens)], output_tokens=_OUTPUT_TOKENS
  )
  try:
    with contextlib.ExitStack() as stack:
      remote = None
      if role is not None:
        remote = stack.enter_context(roles.remote(small, role, argv, screen))
      line = stack.enter_context(
        serving.connect(
          model, scheme, scheme.engine(engine), remote=remote, emulated=False
        )
      )
      line.engine.generate(ask)  # compiles, and tries all kinds of chunks
      start_s = time.monotonic()
      result = line.engine.generate(ask)
      seconds = time.monotonic() - start_s
      expected = line.engine.reference(ask.prompt, _OUTPUT_TOKENS)
  except (TransferError, ConfigError) as error:
    return Check('transfer', '', _line(error))
  sent = result.anchor_bytes + result.residual_bytes + result.exact_bytes
  found = (
    f'{sent / 1e6:.2f} MB of {tokens} tokens, request in {seconds:.3f} s'
    f' (scheme {scheme.name})'
  )
  fault = None
  if result.tokens != expected:
    fault = f'{result.tokens} is not the reference {expected}: please report it'
  return Check('transfer', found, fault)


def _gib(size_bytes: float) -> str:
  return f'{size_bytes / 2**30:.2f} GiB'


def _line(error: Exception) -> str:
  text = error.line() if isinstance(error, WeightsError) else ''
  return text or ' '.join(str(error).split())
