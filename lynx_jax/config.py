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
  LAYERS = 'layers'  # whole layer groups one after the other, all planes


class Drafter(enum.Enum):
  """What proposes tokens once the target cache is complete."""

  ANCHOR = 'anchor'  # the model on the Anchor, where something follows it
  PROMPT_LOOKUP = 'prompt_lookup'  # what followed there in the text so far
  PREFILL = 'prefill'  # the prefill side, which decodes until decode takes over


class Activation(enum.Enum):
  """The gate of the feed-forward."""

  SILU = 'silu'
  GELU_TANH = 'gelu_tanh'  # of Gemma; tanh approximates the error function


class Scaling(enum.Enum):
  """How RoPE frequencies are stretched beyond the context of pre-training."""

  LINEAR = 'linear'  # all alike
  LLAMA3 = 'llama3'  # slow ones, with a smooth transition
  YARN = 'yarn'  # as LLAMA3, by channel, with sharper attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """Stretched frequencies; see `transformer.rope_frequencies`.

  Attributes:
    kind: how.
    factor: by which slow frequencies are divided.
    low_freq_factor, high_freq_factor, original_context_tokens: of LLAMA3 and
      YARN; they divide frequencies of less than `low` turns in the original
      context, and leave those of more than `high` as they are. YaRN calls these
      beta_slow and beta_fast.
  """

  kind: Scaling
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_context_tokens: int = 8192

  def __post_init__(self):
    require(
      self.factor >= 1, f'rope_scaling.factor={self.factor} must be at least 1'
    )
    require(
      0 < self.low_freq_factor < self.high_freq_factor,
      f'rope_scaling.low_freq_factor={self.low_freq_factor} must be positive '
      f'and below high_freq_factor={self.high_freq_factor}',
    )
    require(
      self.original_context_tokens > 0,
      'rope_scaling.original_context_tokens='
      f'{self.original_context_tokens} must be positive',
    )

  @property
  def logits_factor(self) -> float:
    """By which q · k is multiplied beside; arXiv:2309.00071 §3.4."""
    if self.kind is not Scaling.YARN:
      return 1.0
    return (0.1 * math.log(self.factor) + 1.0) ** 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalLayers:
  """Layers whose rows see no more than the last `window` tokens.

  Attributes:
    window: tokens that a row sees, its own included.
    layers: which; ascending.
    rope_theta: their base of RoPE, never scaled; None is as in all layers.
  """

  window: int
  layers: tuple[int, ...]
  rope_theta: float | None = None

  def __post_init__(self):
    require(self.window > 0, f'local.window={self.window} must be positive')
    require(
      list(self.layers) == sorted(set(self.layers)) and bool(self.layers),
      f'local.layers={self.layers} must be some layers in ascending order',
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """Dimensions of a decoder-only transformer of the Llama family.

  Letters are those of `shapes`. What sets families apart are values:

  Attributes:
    name: in records and errors.
    layers: L.
    context_tokens: longest prompt and output together.
    rope_theta, rope_scaling: of all layers that `local` does not say else of.
    local: layers with a sliding window, or None.
    rms_eps: added to the mean square of a norm.
    qkv_bias: whether Q, K and V have a bias (Qwen2).
    qk_norm: whether each head of Q and K is normalised before RoPE (Qwen3).
    post_norms: whether attention and feed-forward are normalised again before
      they join the residual stream (Gemma).
    activation: of the feed-forward.
    embedding_scale: multiplies embeddings (Gemma), not the unembedding.
    logits_scale: multiplies q · k before RoPE's scaling does; None is
      1 / sqrt(H).
    attention_soft_cap, final_soft_cap: bound logits to cap · tanh(logit / cap),
      those of attention and those of tokens (Gemma 2).
    tied_embeddings: whether the unembedding is the embedding.
    dtype: of weights and activations; dense KV is always bfloat16, and norms
      are always float32 (Gemma's 1 + w would lose bits).
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
  rope_scaling: RopeScaling | None = None
  local: LocalLayers | None = None
  rms_eps: float = 1e-5
  qkv_bias: bool = False
  qk_norm: bool = False
  post_norms: bool = False
  activation: Activation = Activation.SILU
  embedding_scale: float = 1.0
  logits_scale: float | None = None
  attention_soft_cap: float | None = None
  final_soft_cap: float | None = None
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
    for name in (
      'rope_theta',
      'embedding_scale',
      'logits_scale',
      'attention_soft_cap',
      'final_soft_cap',
    ):
      value = getattr(self, name)
      require(
        value is None or (value > 0 and math.isfinite(value)),
        f'model.{name}={value} must be positive',
      )
    if self.local is not None:
      require(
        self.local.layers[0] >= 0 and self.local.layers[-1] < self.layers,
        f'model.local.layers={self.local.layers} must be below '
        f'layers={self.layers}',
      )
      require(
        self.local.rope_theta is None
        or self.rope_scaling is None
        or self.rope_scaling.kind is not Scaling.YARN,
        'model.rope_scaling of kind yarn scales the logits of all layers; '
        f'local.rope_theta={self.local.rope_theta} is of layers without it',
      )

  @property
  def layers_are_alike(self) -> bool:
    """Whether all layers have one window and one RoPE."""
    return self.local is None or len(self.local.layers) == self.layers

  def window(self, layer: int) -> int | None:
    """Returns the sliding window of a layer; None sees all tokens."""
    local = self.local
    return local.window if local and layer in local.layers else None

  @property
  def attention_scale(self) -> float:
    """What multiplies q · k in all layers."""
    scale = self.logits_scale or self.head_dim**-0.5
    scaling = self.rope_scaling
    return scale * scaling.logits_factor if scaling else scale

  def rope(self, layer: int) -> tuple[float, RopeScaling | None]:
    """Returns base and scaling of a layer's RoPE."""
    if self.window(layer) and self.local and self.local.rope_theta is not None:
      return self.local.rope_theta, None
    return self.rope_theta, self.rope_scaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorCodec:
  """How one tensor (K or V) becomes a list of bit planes.

  Attributes:
    planes: widths in bits, most significant first: `planes[0]` is the Anchor,
      the rest the Residual. `()` keeps the tensor dense (bfloat16).
    axis: which values share one scale and offset.
    rotation: what is applied to the head dim before.
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
  """Overrides the codec of some layers; see `CodecConfig`.

  Attributes:
    start, stop: layers `start..stop-1`.
    k, v: their codecs.
  """

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
    generated: groups of generated tokens are packed like those of the prompt;
      else they stay dense. The token at position p then reads
      [0, prefix_end(p)) from the prefix, and what follows from the tail. All
      layers must have planes, and bfloat16 must not be the target.
    layers: overrides; their ranges must coincide with layer groups.
  """

  k: TensorCodec = TensorCodec()
  v: TensorCodec = TensorCodec()
  group: int = 128
  sinks: int = 4
  recent_tokens: int = 64
  exact: bool = False
  generated: bool = False
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
    pairs = [
      ('', self.k, self.v),
      *((f'layers {e.start}:{e.stop} ', e.k, e.v) for e in self.layers),
    ]
    for where, k, v in pairs:
      require(
        bool(k.planes) == bool(v.planes),
        f'codec.{where}k={k.planes} and v={v.planes} must both have planes or '
        'both be dense ()',
      )
      if self.exact:
        check_exact(f'{where}k', k)
        check_exact(f'{where}v', v)
      require(
        not self.generated or bool(k.planes),
        'codec.generated=True needs planes in every layer; '
        f'codec.{where}k=() has none',
      )
    require(
      not (self.generated and self.exact),
      'codec.generated=True and codec.exact=True: bfloat16 is the target, so '
      'generated tokens stay dense; leave one of them out',
    )
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

  @property
  def is_progressive(self) -> bool:
    """Whether anything travels after the Anchor."""
    tensors = [self.k, self.v]
    for layers in self.layers:
      tensors += [layers.k, layers.v]
    return self.exact or any(len(t.planes) > 1 for t in tensors)

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
    output_tokens: most tokens one request may ask for, 2 or more.
    token_chunk: C, tokens one prefill step computes; a multiple of the group.
    layer_groups: parts in which layers are sent, and verified when ready.
    verify_rows: rows of the verify program; fixed, whatever the draft length.
    draft_tokens: γ after arrival, 0..verify_rows-1; None lets the engine
      choose it from measured costs.
    backlog_tokens: most unverified draft tokens a slot may hold.
    chunk_bytes: size of a transfer chunk, the grain of priority.
    order: how the streams share the link.
    drafter: what proposes tokens after arrival.
    sharpen: drafts read the groups of tokens whose Residual has landed with all
      planes, before the rest is there; else they read the Anchor alone.
    layer_ready: the first verification runs layer group by layer group as
      their Residual lands; else it waits for all of it.
    fused_rounds: after arrival, rounds of draft → verify → commit run inside
      one program; else each step is a program of its own. That costs a
      dispatch a step, and spares compiling all layers twice in one program.
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
  drafter: Drafter = Drafter.ANCHOR
  sharpen: bool = True
  layer_ready: bool = True
  fused_rounds: bool = True
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
      self.output_tokens > 1,
      f'output_tokens={self.output_tokens} must be 2 or more: prefill chooses '
      'the first token, decode those behind it',
    )
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

  def place(self, slot: int, rows: int) -> tuple[int, int]:
    """Returns the row of a slot, of so many rows, and its number there."""
    return divmod(slot, self.slots // rows)

  def prefix_capacity(self, codec: CodecConfig) -> int:
    """Returns the prefix tokens a slot can hold, a multiple of the group."""
    longest = self.prompt_tokens
    if codec.generated:
      longest += self.output_tokens + self.verify_rows
    return max(codec.group, codec.prefix_end(longest))

  def tail_capacity(self, codec: CodecConfig) -> int:
    """Returns the dense tail tokens a slot can hold.

    Recent and ragged prompt tokens, generated ones that are not packed, and
    scratch rows for a verification that starts at the last of them; a multiple
    of 32.
    """
    # A round number of rows; which one was not measured to matter.
    longest = (
      codec.recent_tokens
      + codec.group
      + (0 if codec.generated else self.output_tokens - 1)
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
  require(
    not codec.generated or codec.recent_tokens >= engine.verify_rows - 1,
    f'codec.recent_tokens={codec.recent_tokens} must be at least '
    f'{engine.verify_rows - 1}, engine.verify_rows less 1, with '
    'codec.generated=True: a group is packed when all its tokens are committed',
  )
  total = engine.prompt_tokens + engine.output_tokens
  require(
    total <= model.context_tokens,
    f'prompt_tokens={engine.prompt_tokens} + '
    f'output_tokens={engine.output_tokens} = {total} exceeds the context of '
    f'{model.name}, {model.context_tokens} tokens; shorten the prompt, or ask '
    'for fewer',
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
