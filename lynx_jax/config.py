# SPDX-License-Identifier: Apache-2.0
"""Frozen, hashable configuration of the model, the codec and the engine.

It knows no files, no flags and no arrays: experiments build these values.
"""

import dataclasses
import enum
import math

# A group of 128 tokens fills the 128 lanes of a TPU vector register. Other
# sizes exist for ablations, in the XLA implementation only.
GROUPS = (32, 64, 128)
WIDTHS = (1, 2, 4, 8)
IMPLEMENTATIONS = ('xla', 'pallas_tpu', 'pallas_tpu_interpret')
MAX_BITS = 8  # of all planes together: a code is the nested prefix of an int8


class ConfigError(ValueError):
  """A value that cannot work. The message names it and what would work."""


def require(condition: bool, message: str) -> None:
  """Raises `ConfigError(message)` unless `condition` holds."""
  if not condition:
    raise ConfigError(message)


class Axis(enum.Enum):
  """Which values share one scale and offset inside a group of tokens."""

  CHANNEL = 'channel'  # one a channel, over the Q tokens of the group
  TOKEN = 'token'  # one a token, over the H channels of the head


class Rotation(enum.Enum):
  """What is applied to the head dim before quantisation."""

  NONE = 'none'
  HADAMARD = 'hadamard'  # orthonormal; head dim must be a power of two


class Target(enum.Enum):
  """What committed output equals: decoding over which complete cache."""

  PLANES = 'planes'  # all planes; bfloat16 where the codec has none
  EXACT = 'exact'  # bfloat16, bit by bit, merged from planes and exact plane


class Order(enum.Enum):
  """How the streams of one request share the link."""

  ANCHOR_FIRST = 'anchor_first'  # Lynx: every Anchor outranks every Residual
  INTERLEAVED = 'interleaved'  # one queue: each unit's planes side by side


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Dimensions of a decoder-only transformer of the Llama family.

  Letters are those of `shapes`. `dtype` is that of weights and activations;
  dense KV is always bfloat16.
  """

  name: str
  layers: int
  heads: int  # N
  kv_heads: int  # K
  head_dim: int  # H
  model_dim: int  # D
  ff_dim: int  # F
  vocab: int  # V
  context_tokens: int
  rope_theta: float = 10_000.0
  rms_eps: float = 1e-5
  tied_embeddings: bool = True
  dtype: str = 'float32'

  def __post_init__(self):
    for name in (
      'layers',
      'heads',
      'kv_heads',
      'head_dim',
      'model_dim',
      'ff_dim',
      'vocab',
      'context_tokens',
    ):
      value = getattr(self, name)
      require(value > 0, f'model.{name}={value} must be positive')
    require(
      self.heads % self.kv_heads == 0,
      f'model.heads={self.heads} must be a multiple of '
      f'kv_heads={self.kv_heads}',
    )
    require(
      self.head_dim % 2 == 0, f'model.head_dim={self.head_dim} must be even'
    )
    require(
      self.dtype in ('float32', 'bfloat16'),
      f'model.dtype={self.dtype!r} must be float32 or bfloat16',
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorCodec:
  """How one tensor (K or V) becomes a list of bit planes.

  `planes` are widths in bits, most significant first: `planes[0]` is the
  Anchor, the rest the Residual. `()` keeps the tensor dense (bfloat16).
  """

  planes: tuple[int, ...] = (4, 4)
  axis: Axis = Axis.CHANNEL
  rotation: Rotation = Rotation.NONE

  def __post_init__(self):
    for width in self.planes:
      require(
        width in WIDTHS,
        f'plane width {width} in {self.planes} must be one of {WIDTHS} '
        '(a 3-bit plane is 2,1)',
      )
    require(
      self.bits <= MAX_BITS,
      f'planes={self.planes} add up to {self.bits} bits; '
      f'at most {MAX_BITS} are possible',
    )

  @property
  def bits(self) -> int:
    return sum(self.planes)


def check_exact(name: str, tensor: TensorCodec) -> None:
  """Raises `ConfigError` if the bins of `tensor` do not bound single values.

  Args:
    name: of the tensor, as in `codec.k`.
    tensor: its codec.
  """
  require(
    tensor.rotation is Rotation.NONE,
    f'codec.{name}_rotation={tensor.rotation.value}: an exact target needs a '
    f'codec of single values, {name}_rotation=none',
  )
  require(
    tensor.planes != (),
    f'codec.{name}=(): a dense tensor has no exact plane',
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCodec:
  """Overrides the codec of layers `start..stop-1`; see `CodecConfig`."""

  start: int
  stop: int
  k: TensorCodec
  v: TensorCodec


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodecConfig:
  """The nested code of a KV cache.

  Attributes:
    k, v: codecs of keys (after RoPE) and values.
    group: Q, tokens that share statistics.
    sinks: first tokens kept dense and outside all statistics.
    recent_tokens: W, the last prompt tokens kept dense.
    exact: an exact plane follows the planes: the target can be the bit-exact
      bfloat16 cache. It needs K and V of all layers in planes and unrotated.
    layers: overrides; their ranges must coincide with layer groups.
  """

  k: TensorCodec = TensorCodec()
  v: TensorCodec = TensorCodec()
  group: int = 128
  sinks: int = 4
  recent_tokens: int = 64
  exact: bool = False
  layers: tuple[LayerCodec, ...] = ()

  def __post_init__(self):
    require(
      self.group in GROUPS, f'codec.group={self.group} must be one of {GROUPS}'
    )
    require(
      0 <= self.sinks < self.group,
      f'codec.sinks={self.sinks} must be in 0..{self.group - 1}',
    )
    require(
      self.recent_tokens >= 0,
      f'codec.recent_tokens={self.recent_tokens} must not be negative',
    )
    pairs = [(self.k, self.v), *((entry.k, entry.v) for entry in self.layers)]
    for k, v in pairs:
      require(
        bool(k.planes) == bool(v.planes),
        f'k={k.planes} and v={v.planes} must both have planes or '
        'both be dense ()',
      )
      if self.exact:
        check_exact('k', k)
        check_exact('v', v)
    ends = [(r.start, r.stop) for r in self.layers]
    require(
      all(a < b for a, b in ends)
      and all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False)),
      f'codec.layers ranges {ends} must be non-empty, ascending and disjoint',
    )

  @property
  def target(self) -> Target:
    """The highest target."""
    return Target.EXACT if self.exact else Target.PLANES

  def of_layer(self, layer: int) -> tuple[TensorCodec, TensorCodec]:
    """Returns the codecs (k, v) that hold for `layer`."""
    for entry in self.layers:
      if entry.start <= layer < entry.stop:
        return entry.k, entry.v
    return self.k, self.v

  def prefix_end(self, prompt_tokens: int) -> int:
    """Returns E: the prefix is [0, E), the dense tail starts at E.

    E = max(0, floor((prompt - W) / Q)) * Q, for example with Q=128, W=64:

    | prompt | E | dense tail of the prompt |
    |---|---|---|
    | 191 | 0 | 191 |
    | 192 | 128 | 64 |
    | 1984 | 1920 | 64 |
    """
    return max(0, (prompt_tokens - self.recent_tokens) // self.group) * (
      self.group
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
  """What is static in the engine's programs, and its policies.

  Attributes:
    slots: B, requests decoded together.
    prompt_tokens: longest prompt a slot can hold.
    output_tokens: most tokens one request may ask for.
    token_chunk: C, tokens one prefill step computes; a multiple of the group.
    layer_groups: parts in which layers are sent, and verified when ready.
    verify_rows: rows of the verify program; fixed, whatever the draft length.
    draft_tokens: γ after arrival, 0..verify_rows-1; None lets the engine
      choose it from measured costs.
    backlog_tokens: most unverified draft tokens a slot may hold.
    chunk_bytes: size of a transfer chunk, the grain of priority.
    order: how the streams share the link.
    sharpen: drafts read the groups of tokens whose Residual has landed with all
      planes, before the rest is there; else they read the Anchor alone.
    layer_ready: the first verification runs layer group by layer group as
      their Residual lands; else it waits for all of it.
    implementation: of the kernels; None takes the best that can serve.
  """

  slots: int = 1
  prompt_tokens: int = 2048
  output_tokens: int = 64
  token_chunk: int = 256
  layer_groups: int = 5
  verify_rows: int = 16
  draft_tokens: int | None = None
  backlog_tokens: int = 48
  chunk_bytes: int = 256 * 1024
  order: Order = Order.ANCHOR_FIRST
  sharpen: bool = True
  layer_ready: bool = True
  implementation: str | None = None

  def __post_init__(self):
    for name in (
      'slots',
      'prompt_tokens',
      'output_tokens',
      'token_chunk',
      'layer_groups',
      'verify_rows',
      'backlog_tokens',
      'chunk_bytes',
    ):
      value = getattr(self, name)
      require(value > 0, f'engine.{name}={value} must be positive')
    require(
      self.implementation in (None, *IMPLEMENTATIONS),
      f'engine.implementation={self.implementation!r} must be one of '
      f'{", ".join(IMPLEMENTATIONS)}, or left out for the best that can serve',
    )
    limit = self.verify_rows - 1
    require(
      self.draft_tokens is None or 0 <= self.draft_tokens <= limit,
      f'engine.draft_tokens={self.draft_tokens} must be in 0..{limit} '
      f'(verify_rows={self.verify_rows} holds one committed token)',
    )

  def prefix_capacity(self, codec: CodecConfig) -> int:
    """Returns the prefix tokens a slot can hold, a multiple of the group."""
    return max(codec.group, codec.prefix_end(self.prompt_tokens))

  def tail_capacity(self, codec: CodecConfig) -> int:
    """Returns the dense tail tokens a slot can hold.

    Recent and ragged prompt tokens, generated ones, and scratch rows for a
    verification that starts at the last of them; a multiple of 32.
    """
    # A round number of rows; which one was not measured to matter.
    longest = (
      codec.recent_tokens
      + codec.group
      - 1
      + self.output_tokens
      + max(self.verify_rows, self.backlog_tokens)
    )
    return math.ceil(longest / 32) * 32


def check_together(
  model: ModelConfig, codec: CodecConfig, engine: EngineConfig
) -> None:
  """Checks what involves several configs; raises `ConfigError`."""
  require(
    engine.token_chunk % codec.group == 0,
    f'engine.token_chunk={engine.token_chunk} must be a multiple of '
    f'codec.group={codec.group}',
  )
  require(
    engine.layer_groups <= model.layers,
    f'engine.layer_groups={engine.layer_groups} must not exceed '
    f'model.layers={model.layers}',
  )
  total = engine.prompt_tokens + engine.output_tokens
  require(
    total <= model.context_tokens,
    f'engine.prompt_tokens={engine.prompt_tokens} + '
    f'output_tokens={engine.output_tokens} = {total} exceeds the '
    f'context of {model.name}, {model.context_tokens} tokens',
  )
  starts = {start for start, _ in layer_ranges(model, engine)} | {model.layers}
  for entry in codec.layers:
    require(
      entry.start in starts and entry.stop in starts,
      f'codec.layers range {entry.start}..{entry.stop} must coincide with '
      f'layer groups, which start at {sorted(starts)}',
    )
  for layer in range(model.layers):
    for name, tensor in zip('kv', codec.of_layer(layer), strict=True):
      _check_head_dim(name, tensor, model.head_dim)


def _check_head_dim(name: str, tensor: TensorCodec, head_dim: int) -> None:
  for width in tensor.planes:
    require(
      head_dim * width % 8 == 0,
      f'codec.{name} plane of {width} bits needs head_dim={head_dim} to be a '
      f'multiple of {8 // width}',
    )
  if tensor.rotation is Rotation.HADAMARD:
    require(
      head_dim & (head_dim - 1) == 0,
      f'codec.{name}.rotation=hadamard needs a head dim that is a power of '
      f'two, not {head_dim}',
    )


def layer_ranges(
  model: ModelConfig, engine: EngineConfig
) -> tuple[tuple[int, int], ...]:
  """Returns [start, stop) of every layer group, sizes differing by ≤ 1."""
  n, parts = model.layers, engine.layer_groups
  cuts = [i * n // parts for i in range(parts + 1)]
  return tuple(zip(cuts, cuts[1:], strict=False))
