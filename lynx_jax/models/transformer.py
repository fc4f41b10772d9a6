# SPDX-License-Identifier: Apache-2.0
"""Decoder-only transformer of the Llama family: parameters and their use.

It knows no cache and no sampling: the caller supplies attention.

The module holds parameters only and nothing changes it after construction. In
a hot path pass `nnx.split` state and call `nnx.merge` inside `jax.jit`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lynx_jax import config as config_lib
from lynx_jax.attention import Rule
from lynx_jax.config import Activation, RopeScaling, Scaling
from lynx_jax.shapes import Array, Float, Float32, Int32

# attend(q, k, v) -> (out, state): q and out are [B,T,N,H], k and v [B,T,K,H].
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]

_ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
  Activation.SILU: jax.nn.silu,
  Activation.GELU_TANH: functools.partial(jax.nn.gelu, approximate=True),
}
_NO_WINDOW = np.iinfo(np.int32).max


class Constant(nnx.Variable):
  """What sets one layer apart and is no weight: it follows from the config.

  A variable and not a Python value, so that one program serves all layers.
  """


class Transformer(nnx.Module):
  """Embedding, layers and unembedding.

  Weights stand as `[in, out]`, so that a `[T, D] x [D, F]` product reads them
  in memory order. Embedding and unembedding are both `[V, D]`: one row per
  token is what a lookup wants, and at one token the product with a `[V, D]`
  matrix is a dot product per row, the faster of the two orientations on CPU
  (17 against 13 GB/s for 49,152 x 576, and 13 against 6 for `[in, out]`
  against `[out, in]` in the layers).

  Parameters carry the letters of their axes as `out_sharding`, which `mesh`
  turns into places.
  """

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs | None):
    """Draws random weights that keep activations near unit variance.

    Args:
      config: dimensions; weights are made in `config.dtype`.
      rngs: source of the stream `params`; None puts shapes in place of weights.
    """
    self.config = config
    table = (config.vocab, config.model_dim)
    make = functools.partial(_normal, rngs, dtype=config.dtype)
    self.embedding = make(table, config.model_dim, 'V D')
    self.layers = nnx.List(
      [Layer(config, layer, rngs=rngs) for layer in range(config.layers)]
    )
    self.final_norm = _ones(rngs, config.model_dim)
    if not config.tied_embeddings:
      self.unembedding = make(table, config.model_dim, 'V D')

  def embed(self, tokens: Int32[Array, 'B T']) -> Float[Array, 'B T D']:
    """Looks up token embeddings; an id outside the vocabulary gives NaN."""
    h = jnp.take(self.embedding[...], tokens, axis=0, mode='fill')
    if self.config.embedding_scale == 1:
      return h
    scale = np.float32(self.config.embedding_scale)
    return (h.astype(jnp.float32) * scale).astype(h.dtype)

  def head(self, h: Float[Array, 'B T D']) -> Float32[Array, 'B T V']:
    """Returns logits: the final norm, then the unembedding."""
    c = self.config
    table = self.embedding if c.tied_embeddings else self.unembedding
    h = rms_norm(h, self.final_norm[...], c.rms_eps)
    logits = _dot('btd,vd->btv', h, table[...])
    if c.final_soft_cap is not None:
      cap = np.float32(c.final_soft_cap)
      logits = cap * jnp.tanh(logits / cap)
    return logits


class Layer(nnx.Module):
  """One pre-norm block: grouped-query attention, then a gated feed-forward.

  Query head n reads key/value head n // G, with G = N / K. Parameters that
  only some families have exist where the config says so; so do the constants
  `window` and `rope_frequency`, which a config that has them equal in all
  layers says by itself.
  """

  def __init__(
    self, config: config_lib.ModelConfig, layer: int, *, rngs: nnx.Rngs | None
  ):
    self.config = c = config
    d, h = c.model_dim, c.head_dim
    make = functools.partial(_normal, rngs, dtype=c.dtype)
    ones = functools.partial(_ones, rngs)
    self.attention_norm = ones(d)
    self.q = make((d, c.heads, h), d, 'D N H')
    self.k = make((d, c.kv_heads, h), d, 'D K H')
    self.v = make((d, c.kv_heads, h), d, 'D K H')
    self.o = make((c.heads, h, d), c.heads * h, 'N H D')
    if c.qkv_bias:
      self.q_bias = make((c.heads, h), d, 'N H')
      self.k_bias = make((c.kv_heads, h), d, 'K H')
      self.v_bias = make((c.kv_heads, h), d, 'K H')
    if c.qk_norm:
      self.q_norm, self.k_norm = ones(h), ones(h)
    if c.post_norms:
      self.attention_post_norm, self.mlp_post_norm = ones(d), ones(d)
    self.mlp_norm = ones(d)
    self.gate = make((d, c.ff_dim), d, 'D F')
    self.up = make((d, c.ff_dim), d, 'D F')
    self.down = make((c.ff_dim, d), c.ff_dim, 'F D')
    constants = layer_constants(c, layer)
    if constants:
      values = {
        name: _make(
          rngs, value.shape, value.dtype, functools.partial(np.asarray, value)
        )
        for name, value in constants.items()
      }
      self.window = Constant(values['window'])
      self.rope_frequency = Constant(values['rope_frequency'])

  @property
  def rule(self) -> Rule:
    """What `attend` is to do with the logits."""
    c = self.config
    return Rule(
      logits_scale=c.attention_scale,
      soft_cap=c.attention_soft_cap,
      window=c.window(0) if c.layers_are_alike else self.window[...],
    )

  def __call__(
    self,
    h: Float[Array, 'B T D'],
    positions: Int32[Array, 'B T'],
    attend: Attend,
  ) -> tuple[Float[Array, 'B T D'], Any]:
    """Runs the block.

    Args:
      h: residual stream, in the model's dtype.
      positions: absolute position of every row, from 0.
      attend: `(q, k, v) -> (out, state)`; q and k have RoPE applied and all
        are in the model's dtype. Logits and masks are its own, by `rule`.

    Returns:
      The new residual stream, and `state` as `attend` returned it (a cache).
    """
    c = self.config
    x = rms_norm(h, self.attention_norm[...], c.rms_eps)
    q = _dot('btd,dnh->btnh', x, self.q[...])
    k = _dot('btd,dkh->btkh', x, self.k[...])
    v = _dot('btd,dkh->btkh', x, self.v[...])
    if c.qkv_bias:
      q, k, v = (
        y + bias[...].astype(jnp.float32)[None, None]
        for y, bias in ((q, self.q_bias), (k, self.k_bias), (v, self.v_bias))
      )
    q, k, v = (y.astype(h.dtype) for y in (q, k, v))
    if c.qk_norm:
      q = rms_norm(q, self.q_norm[...], c.rms_eps)
      k = rms_norm(k, self.k_norm[...], c.rms_eps)
    if c.layers_are_alike:
      frequency = jnp.asarray(rope_frequencies(c.head_dim, *c.rope(0)))
    else:
      frequency = self.rope_frequency[...]
    q, k = (rope(y, positions, frequency) for y in (q, k))
    out, state = attend(q, k, v)
    # As one contracted dimension: over two, XLA's CPU backend copies the
    # weight transposed at every call (jax 0.10.2, 40 MB a step of SmolLM2).
    out = out.reshape(*h.shape[:2], -1)
    o = self.o[...].reshape(-1, c.model_dim)
    out = _dot('btn,nd->btd', out, o).astype(h.dtype)
    if c.post_norms:
      out = rms_norm(out, self.attention_post_norm[...], c.rms_eps)
    h = h + out

    x = rms_norm(h, self.mlp_norm[...], c.rms_eps)
    gate = _dot('btd,df->btf', x, self.gate[...])
    up = _dot('btd,df->btf', x, self.up[...])
    x = (_ACTIVATIONS[c.activation](gate) * up).astype(h.dtype)
    out = _dot('btf,fd->btd', x, self.down[...]).astype(h.dtype)
    if c.post_norms:
      out = rms_norm(out, self.mlp_post_norm[...], c.rms_eps)
    return h + out, state


def layer_constants(
  config: config_lib.ModelConfig, layer: int
) -> dict[str, np.ndarray | np.int32]:
  """Returns the values of a layer's constants; none where layers are alike."""
  if config.layers_are_alike:
    return {}
  window = config.window(layer) or _NO_WINDOW
  return {
    'window': np.int32(window),
    'rope_frequency': rope_frequencies(config.head_dim, *config.rope(layer)),
  }


def causal_forward(
  model: Transformer, tokens: Int32[Array, 'B T']
) -> Float32[Array, 'B T V']:
  """Returns the logits of every position by plain causal attention.

  The form to compare everything else with: no cache, quadratic memory.
  """
  positions = jnp.broadcast_to(
    jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape
  )
  h = model.embed(tokens)
  for layer in model.layers:

    def attend(q, k, v, rule=layer.rule):
      return causal_attention(q, k, v, rule), None

    h, _ = layer(h, positions, attend)
  return model.head(h)


def abstract_model(config: config_lib.ModelConfig) -> Transformer:
  """Returns the model with shapes in place of weights, for placing real ones.

  Nothing is drawn, allocated or traced; tracing 30 layers took 1.6 s on CPU.
  """
  return Transformer(config, rngs=None)


def causal_attention(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B T K H'],
  v: Float[Array, 'B T K H'],
  rule: Rule | None = None,
) -> Float[Array, 'B T N H']:
  """Softmax(q k^T · scale) v over positions up to the row's own, by a rule.

  Without one the scale is 1 / sqrt(H), and all of them are seen.
  """
  b, t, n, h = q.shape
  if rule is None:
    rule = Rule(logits_scale=h**-0.5)
  groups = q.reshape(b, t, k.shape[2], n // k.shape[2], h)
  logits = _dot('btkgh,bskh->bkgts', groups, k) * rule.logits_scale
  if rule.soft_cap is not None:
    logits = rule.soft_cap * jnp.tanh(logits / rule.soft_cap)
  seen = jnp.tril(jnp.ones((t, t), bool))
  position = jnp.arange(t, dtype=jnp.int32)
  first = rule.first_tokens(position[None])
  if first is not None:
    seen = seen & (position[None] >= first[0, :, None])
  seen = seen[None, None, None]
  weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
  out = _dot('bkgts,bskh->btkgh', weights.astype(q.dtype), v)
  return out.reshape(q.shape).astype(q.dtype)


def rms_norm(
  h: Float[Array, '*any D'], weight: Float[Array, 'D'], eps: float
) -> Float[Array, '*any D']:
  """Returns h / sqrt(mean(h²) + eps) · weight, in h's dtype.

  Statistics and product are float32: rounding the normalised value to
  bfloat16 before the product would round twice.
  """
  x = h.astype(jnp.float32)
  x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
  weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
  return (x * weight).astype(h.dtype)


def rope_frequencies(
  head_dim: int, theta: float, scaling: RopeScaling | None
) -> np.ndarray:
  """Returns f32[H/2]: theta^(-2i/H), scaled, rounded once from float64.

  With f a frequency, n = f · original_context_tokens / 2π its turns in the
  original context, and s between 0 for `low` turns and 1 for `high`:

      LINEAR  f / factor
      LLAMA3  (1 - s) · f / factor + s · f, s linear in n
      YARN    the same, s linear in i between whole channels

  LINEAR: arXiv:2306.15595 §2.3. LLAMA3: the reference code of Llama 3.1,
  https://github.com/meta-llama/llama-models (models/llama3/model.py). YARN:
  arXiv:2309.00071 §3.2, with the ends at whole channels of its reference code,
  https://github.com/jquesnelle/yarn.
  """
  half = head_dim // 2
  channels = np.arange(half)
  frequency = theta ** (-channels / half)
  if scaling is not None:
    kept = np.zeros(half)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = frequency * scaling.original_context_tokens / (2 * np.pi)
    if scaling.kind is Scaling.LLAMA3:
      kept = np.clip((turns - low) / (high - low), 0, 1)
    elif scaling.kind is Scaling.YARN:
      # The first frequency, 1, has turns[0] turns; each channel divides them.
      fast, slow = (
        half * np.log(turns[0] / n) / np.log(theta) for n in (high, low)
      )
      first = max(np.floor(fast), 0)
      last = min(np.ceil(slow), head_dim - 1)
      kept = 1 - np.clip((channels - first) / max(last - first, 1e-3), 0, 1)
    frequency = (1 - kept) * frequency / scaling.factor + kept * frequency
  return frequency.astype(np.float32)


def rope(
  x: Float[Array, 'B T K H'],
  positions: Int32[Array, 'B T'],
  frequency: Float32[Array, 'h'],
) -> Float[Array, 'B T K H']:
  """Rotates channel pairs (i, i + H/2) by position · frequency_i, in float32.

  arXiv:2104.09864 §3.2.2, with the pairing of the Hugging Face checkpoints.
  """
  angle = positions.astype(jnp.float32)[..., None] * frequency[None, None]
  # Fused into the product, XLA's CPU backend takes sine and cosine once a head
  # and not once a position (jax 0.10.2: 0.67 instead of 0.10 ms at 256 rows).
  angle = jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))
  cos, sin = (x[:, :, None] for x in angle)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)


def _dot(spec: str, x: Array, w: Array) -> Float32[Array, '...']:
  """Contracts `x` [1 or B, T, …] with float32 sums.

  Float32 operands are not rounded first. One row of bfloat16 is computed
  twice: for two rows and more XLA's CPU backend has a fast product, for one it
  converts all of `w` (jax 0.10.2: 190 against 31 ms for the layers of
  SmolLM2). To a TPU's vector registers it is the same.
  """
  # TPUs and GPUs otherwise multiply float32 operands in fewer bits.
  exact = x.dtype == jnp.float32
  single = not exact and x.shape[:2] == (1, 1)
  if single:
    x = jax.lax.optimization_barrier(jnp.repeat(x, 2, axis=1))
  out = jnp.einsum(
    spec,
    x,
    w,
    preferred_element_type=jnp.float32,
    precision=jax.lax.Precision.HIGHEST if exact else None,
  )
  return out[:, :1] if single else out


def _make(rngs, shape, dtype, draw: Callable[[], Any]) -> Any:
  """Returns what `draw` gives, or its shape where nothing shall be drawn."""
  if rngs is None:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
  return jnp.asarray(draw(), dtype)


def _ones(rngs: nnx.Rngs | None, size: int) -> nnx.Param:
  return nnx.Param(_make(rngs, (size,), 'float32', lambda: np.ones(size)))


def _normal(
  rngs: nnx.Rngs | None,
  shape: tuple[int, ...],
  fan_in: int,
  axes: str,
  *,
  dtype: str,
) -> nnx.Param:
  def draw():
    assert rngs is not None
    init = jax.nn.initializers.normal(fan_in**-0.5)
    return init(rngs.params(), shape, jnp.dtype(dtype))

  # Whoever has a mesh places the parameter; here there is none.
  return nnx.Param(
    _make(rngs, shape, dtype, draw),
    out_sharding=tuple(axes.split()),
    eager_sharding=False,
  )
