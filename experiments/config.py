# SPDX-License-Identifier: Apache-2.0
"""A whole run: the fields of `defaults`, checked, in the library's types.

It starts nothing and reads no prompt. What a study measures beyond the fields
that all share is in `study_settings`.
"""

import dataclasses
import hashlib
import math
import re
from typing import Any

import ml_collections

from experiments import defaults, parsing
from experiments.schemes import FAITHFUL, SCHEMES, Scheme, scheme
from experiments.study_settings import Equivalence, Fidelity, Plan, Search
from lynx_jax.config import (
  CodecConfig,
  Drafter,
  EngineConfig,
  Order,
  require,
)
from lynx_jax.engine import Mode, Sampling
from lynx_jax.patience import LONGEST_S, Patience, Policy
from lynx_jax.transport.fault_plan import (
  Fault,
  FaultPlan,
  Peer,
  PeerFault,
  Step,
)

_AUTO = 'auto'  # in place of schemes: what the planner advises


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
  """The link; `rate_gbps` None means: find it from `share`, and emulate it."""

  rate_gbps: float | None
  rtt_ms: float
  share: float
  jitter_ms: float
  emulated: bool

  def __post_init__(self):
    require(
      self.rate_gbps is None
      or (self.rate_gbps > 0 and math.isfinite(self.rate_gbps)),
      f'link.rate_gbps={self.rate_gbps} must be positive; leave it out to '
      'find it from link.share',
    )
    for name in ('rtt_ms', 'jitter_ms'):
      value = getattr(self, name)
      require(
        0 <= value <= LONGEST_S * 1e3,
        f'link.{name}={value} must be in 0..{LONGEST_S * 1000}',
      )
    require(
      self.emulated or not self.jitter_ms,
      f'link.jitter_ms={self.jitter_ms} needs link.emulated=True',
    )
    require(
      self.emulated or self.rate_gbps is not None,
      'link.emulated=False needs link.rate_gbps, the rate of the real link',
    )
    require(
      0 < self.share < 1,
      f'link.share={self.share} must be between 0 and 1, for example 0.60',
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
  """Limits between a prefill process and its peers.

  Attributes:
    lease_s: longest silence of a peer.
    window_bytes: most bytes published and not landed; None is chosen.
    prefill_bytes: most bytes that all peers' prompts may take; None is any.
  """

  lease_s: float
  window_bytes: int | None
  prefill_bytes: int | None

  def __post_init__(self):
    for name in ('lease_s', 'window_bytes', 'prefill_bytes'):
      value = getattr(self, name)
      require(
        value is None or 0 < value < math.inf,
        f'transfer.{name}={value} must be positive',
      )
    require(
      self.lease_s <= LONGEST_S,
      f'transfer.lease_s={self.lease_s} must be at most {LONGEST_S}',
    )


# Settings on which the requests of a cell depend.
_MEASURED = (
  'schemes', 'modes', 'repeats', 'seed', 'prompts', 'output_tokens',
  'cpu_devices', 'prefill_mesh', 'decode_mesh', 'decode_data',
  'model_path', 'model_tokenizer', 'model_dtype', 'engine', 'sampling',
  'link', 'acceptance_drafts', 'acceptance_tokens',
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """A cell of an ablation.

  Attributes:
    name: the fields that it changes, with their values.
    values: of every field that some cell changes, by full name.
    settings: of a run with them, without an ablation.
    apart: its sides are two processes.
  """

  name: str
  values: tuple[tuple[str, Any], ...]
  settings: 'Settings'
  apart: bool = False

  @property
  def key(self) -> str:
    """A hash of what it measures, the same in every process.

    Cells that differ in nothing that is measured, such as INT8 with other
    planes for Lynx, share it and one result.
    """
    names = (*_MEASURED, 'transfer') if self.apart else _MEASURED
    same = [(name, getattr(self.settings, name)) for name in names]
    return hashlib.sha256(repr(same).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation:
  """What an ablation goes through.

  Attributes:
    cells: all of them, in the order of the config.
    shard: (i, n), the i-th of n parts runs here.
    merge: folders of finished shards.
    heatmaps: figures that are drawn over every two axes.
  """

  cells: tuple[Cell, ...]
  shard: tuple[int, int]
  merge: tuple[str, ...]
  heatmaps: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """A whole run, checked: what `defaults.base` holds, in the library's types.

  Where `auto` is set, `schemes` are those of which one is chosen.
  """

  study: str
  auto: bool
  schemes: tuple[Scheme, ...]
  modes: tuple[Mode, ...]
  repeats: int
  seed: int
  codec: CodecConfig
  prompts: tuple[tuple[str, int], ...]
  output_tokens: int
  cpu_devices: int
  prefill_mesh: int
  decode_mesh: int
  decode_data: int
  model_path: str
  model_tokenizer: str
  model_dtype: str
  engine: EngineConfig
  sampling: Sampling
  link: Link
  patience: Patience
  transfer: Transfer
  faults: FaultPlan
  sweep_gbps: tuple[float, ...]
  sweep_rtt_ms: tuple[float, ...]
  acceptance_drafts: int
  acceptance_tokens: int
  search: Search
  equivalence: Equivalence
  plan: Plan
  fidelity: Fidelity
  ablation: Ablation | None = None  # of `cells.settings`

  def __post_init__(self):
    for name in (
      'repeats',
      'output_tokens',
      'cpu_devices',
      'prefill_mesh',
      'decode_mesh',
      'decode_data',
    ):
      value = getattr(self, name)
      require(value > 0, f'{name}={value} must be positive')
    require(
      0 <= self.seed < 1 << 32,
      f'seed={self.seed} must be in 0..{(1 << 32) - 1}',
    )
    require(bool(self.prompts), "prompt_file='' must name a text file")
    require(
      self.acceptance_tokens >= 0,
      f'acceptance.output_tokens={self.acceptance_tokens} must be 0 or more',
    )
    most = self.engine.verify_rows - 1
    require(
      1 <= self.acceptance_drafts <= most,
      f'acceptance.draft_tokens={self.acceptance_drafts} must be in 1..{most}',
    )
    require(
      self.engine.slots % self.decode_data == 0,
      f'engine.slots={self.engine.slots} must be a multiple of '
      f'decode_data={self.decode_data}: every row has as many slots',
    )
    exact = [scheme.name for scheme in self.schemes if scheme.codec.exact]
    require(
      not exact or max(self.sides) == 1,
      f'scheme={",".join(exact)} needs one device a side, not {self.sides}: a '
      'string of the exact plane holds all KV heads',
    )
    require(bool(self.model_path), "model.path='' must name a model")
    require(
      self.model_dtype in ('float32', 'bfloat16'),
      f'model.dtype={self.model_dtype!r} must be float32 or bfloat16'
      + parsing.hint(self.model_dtype, ('float32', 'bfloat16')),
    )

  @property
  def sides(self) -> tuple[int, int]:
    """How many devices prefill has, and how many decode has after them."""
    return self.prefill_mesh, self.decode_mesh * self.decode_data


def settings(values: ml_collections.ConfigDict) -> Settings:
  """Turns the fields of `defaults.base` into checked settings.

  Raises:
    ConfigError: naming the value and what would work.
  """
  defaults.check_fields(values, defaults.base())
  engine = EngineConfig(
    prompt_tokens=parsing.positive('prompt_tokens', values.prompt_tokens),
    output_tokens=parsing.positive('output_tokens', values.output_tokens),
    **values.engine.to_dict()
    | {
      'order': parsing.member('engine.order', Order, values.engine.order),
      'drafter': parsing.member(
        'engine.drafter', Drafter, values.engine.drafter
      ),
    },
  )
  codec = parsing.codec(values.codec)
  require(
    engine.token_chunk % codec.group == 0,
    f'engine.token_chunk={engine.token_chunk} must be a multiple of '
    f'codec.group={codec.group}',
  )
  modes = [mode.value for mode in Mode]
  names = parsing.names('scheme', values.scheme, (*SCHEMES, _AUTO))
  require(
    _AUTO not in names or len(names) == 1,
    f'scheme={values.scheme!r}: auto chooses one scheme; name no other beside',
  )
  return Settings(
    study=values.study,
    auto=names == (_AUTO,),
    schemes=tuple(
      scheme(name, codec, engine)
      for name in (FAITHFUL if names == (_AUTO,) else names)
    ),
    modes=tuple(
      Mode(name) for name in parsing.names('mode', values.mode, modes)
    ),
    repeats=values.repeats,
    seed=values.seed,
    codec=codec,
    prompts=_prompts(values),
    output_tokens=values.output_tokens,
    cpu_devices=values.cpu_devices,
    prefill_mesh=values.prefill_mesh,
    decode_mesh=values.decode_mesh,
    decode_data=values.decode_data,
    model_path=str(values.model.path),
    model_tokenizer=str(values.model.tokenizer),
    model_dtype=values.model.dtype,
    engine=engine,
    sampling=Sampling(**values.sampling.to_dict()),
    link=Link(**values.link.to_dict()),
    patience=Patience(
      **values.patience.to_dict()
      | {
        'residual': parsing.member(
          'patience.residual', Policy, values.patience.residual
        )
      }
    ),
    transfer=Transfer(**values.transfer.to_dict()),
    faults=_faults(values.faults),
    sweep_gbps=parsing.numbers('sweep.link_gbps', values.sweep.link_gbps),
    sweep_rtt_ms=parsing.numbers(
      'sweep.rtt_ms', values.sweep.rtt_ms, least=0.0
    ),
    acceptance_drafts=values.acceptance.draft_tokens,
    acceptance_tokens=values.acceptance.output_tokens,
    search=Search.parse(values),
    equivalence=Equivalence(**values.equivalence.to_dict()),
    plan=Plan.parse(values.plan),
    fidelity=Fidelity.parse(values.fidelity),
  )


def _prompts(values: Any) -> tuple[tuple[str, int], ...]:
  """Returns every prompt's file with the length that it is cut to."""
  files = [f.strip() for f in str(values.prompt_file).split(',') if f.strip()]
  lengths = [
    int(n)
    for n in parsing.numbers('prompt_lengths', values.prompt_lengths, least=1)
  ]
  twice = sorted({file for file in files if files.count(file) > 1})
  require(
    not twice,
    f'prompt_file names {", ".join(twice)} more than once; a run cuts a text '
    'to one length, and an ablation goes through several: '
    "--config.ablation.axes='prompt_tokens=192|193'",
  )
  lengths = lengths or [values.prompt_tokens] * len(files)
  require(
    len(lengths) == len(files),
    f'prompt_lengths={values.prompt_lengths!r} has {len(lengths)} values for '
    f'{len(files)} prompts; give one each, or none',
  )
  return tuple(zip(files, lengths, strict=True))


def _faults(values: ml_collections.ConfigDict) -> FaultPlan:
  peer = None
  if values.peer:
    parts = re.fullmatch(r'(\w+)@(\w+):(\d+)', values.peer)
    require(
      parts is not None,
      f'faults.peer={values.peer!r} must be WHAT@STEP:COUNT, for example '
      'kill@pull:3',
    )
    assert parts is not None
    peer = PeerFault(
      what=parsing.member('faults.peer', Peer, parts[1]),
      step=parsing.member('faults.peer', Step, parts[2]),
      count=int(parts[3]),
      back_s=values.back_s,
    )
  return FaultPlan(
    seed=values.seed,
    chances={fault: values[fault.value] for fault in Fault},
    most=values.most,
    late_s=values.late_s,
    stall_s=values.stall_s,
    peer=peer,
  )
