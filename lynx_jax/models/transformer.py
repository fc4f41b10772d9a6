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
from lynx_jax.shapes import Array, Float, Float32, Int32

# attend(q, k, v) -> (out, state): q and out are [B,T,N,H], k and v [B,T,K,H].
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]


class Transformer(nnx.Module):
  """Embedding, layers and unembedding.

  Weights stand as `[in, out]`, so that a `[T, D] x [D, F]` product reads them
  in memory order. Embedding and unembedding are both `[V, D]`: one row per
  token is what a lookup wants, and at one token the product with a `[V, D]`
  matrix is a dot product per row, the faster of the two orientations on CPU
  (17 against 13 GB/s for 49,152 x 576, and 13 against 6 for `[in, out]`
  against `[out, in]` in the layers).
  """

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    """Draws random weights that keep activations near unit variance.

    Args:
      config: dimensions; weights are made in `config.dtype`.
      rngs: source of the stream `params`.
    """
    self.config = config
    table = (config.vocab, config.model_dim)
    self.embedding = _normal(rngs, table, config.model_dim, config.dtype)
    self.layers = nnx.List(
      [Layer(config, rngs=rngs) for _ in range(config.layers)]
    )
    self.final_norm = nnx.Param(jnp.ones(config.model_dim, config.dtype))
    if not config.tied_embeddings:
      self.unembedding = _normal(rngs, table, config.model_dim, config.dtype)

  def embed(self, tokens: Int32[Array, 'B T']) -> Float[Array, 'B T D']:
    """Looks up token embeddings; an id outside the vocabulary gives NaN."""
    return jnp.take(self.embedding[...], tokens, axis=0, mode='fill')

  def head(self, h: Float[Array, 'B T D']) -> Float32[Array, 'B T V']:
    """Returns logits: the final norm, then the unembedding."""
    c = self.config
    table = self.embedding if c.tied_embeddings else self.unembedding
    h = rms_norm(h, self.final_norm[...], c.rms_eps)
    return _dot('btd,vd->btv', h, table[...])


class Layer(nnx.Module):
  """One pre-norm block: grouped-query attention, then SwiGLU.

  Query head n reads key/value head n // G, with G = N / K.
  """

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    self.config = c = config
    d, h = c.model_dim, c.head_dim
    make = functools.partial(_normal, rngs, dtype=c.dtype)
    self.attention_norm = nnx.Param(jnp.ones(d, c.dtype))
    self.q = make((d, c.heads, h), d)
    self.k = make((d, c.kv_heads, h), d)
    self.v = make((d, c.kv_heads, h), d)
    self.o = make((c.heads, h, d), c.heads * h)
    self.mlp_norm = nnx.Param(jnp.ones(d, c.dtype))
    self.gate = make((d, c.ff_dim), d)
    self.up = make((d, c.ff_dim), d)
    self.down = make((c.ff_dim, d), c.ff_dim)

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
        are in the model's dtype. Scaling of the logits and masks are its own.

    Returns:
      The new residual stream, and `state` as `attend` returned it (a cache).
    """
    c = self.config
    x = rms_norm(h, self.attention_norm[...], c.rms_eps)
    q = _dot('btd,dnh->btnh', x, self.q[...]).astype(h.dtype)
    k = _dot('btd,dkh->btkh', x, self.k[...]).astype(h.dtype)
    v = _dot('btd,dkh->btkh', x, self.v[...]).astype(h.dtype)
    q = rope(q, positions, c.rope_theta)
    k = rope(k, positions, c.rope_theta)
    out, state = attend(q, k, v)
    # As one contracted dimension: over two, XLA's CPU backend copies the
    # weight transposed at every call (jax 0.10.2, 40 MB a step of SmolLM2).
    out = out.reshape(*h.shape[:2], -1)
    o = self.o[...].reshape(-1, c.model_dim)
    h = h + _dot('btn,nd->btd', out, o).astype(h.dtype)

    x = rms_norm(h, self.mlp_norm[...], c.rms_eps)
    gate = _dot('btd,df->btf', x, self.gate[...])
    up = _dot('btd,df->btf', x, self.up[...])
    x = (jax.nn.silu(gate) * up).astype(h.dtype)
    return h + _dot('btf,fd->btd', x, self.down[...]).astype(h.dtype), state


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
    h, _ = layer(h, positions, lambda *qkv: (causal_attention(*qkv), None))
  return model.head(h)


def abstract_model(config: config_lib.ModelConfig) -> Transformer:
  """Returns the model with shapes in place of weights, for placing real ones.

  Nothing is drawn or allocated.
  """
  return nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(params=0)))


def causal_attention(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B T K H'],
  v: Float[Array, 'B T K H'],
) -> Float[Array, 'B T N H']:
  """Softmax(q k^T / sqrt(H)) v over positions up to the row's own."""
  b, t, n, h = q.shape
  groups = q.reshape(b, t, k.shape[2], n // k.shape[2], h)
  logits = _dot('btkgh,bskh->bkgts', groups, k) * h**-0.5
  seen = jnp.tril(jnp.ones((t, t), bool))[None, None, None]
  weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
  out = _dot('bkgts,bskh->btkgh', weights.astype(q.dtype), v)
  return out.reshape(q.shape).astype(q.dtype)


def rms_norm(
  h: Float[Array, 'B T D'], weight: Float[Array, 'D'], eps: float
) -> Float[Array, 'B T D']:
  """Returns h / sqrt(mean(h²) + eps) · weight, in h's dtype.

  Statistics and product are float32: rounding the normalised value to
  bfloat16 before the product would round twice.
  """
  x = h.astype(jnp.float32)
  x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
  return (x * weight.astype(jnp.float32)[None, None]).astype(h.dtype)


def rope(
  x: Float[Array, 'B T K H'], positions: Int32[Array, 'B T'], theta: float
) -> Float[Array, 'B T K H']:
  """Rotates channel pairs (i, i + H/2) by position · theta^(-2i/H).

  arXiv:2104.09864 §3.2.2, with the pairing of the Hugging Face checkpoints.
  Angles are float32; the frequencies are constants rounded once from float64.
  """
  half = x.shape[-1] // 2
  frequency = (theta ** (-np.arange(half) / half)).astype(np.float32)
  angle = positions.astype(jnp.float32)[..., None] * frequency[None, None]
  # Fused into the product, XLA's CPU backend takes sine and cosine once a head
  # and not once a position (jax 0.10.2: 0.67 instead of 0.10 ms at 256 rows).
  angle = jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))
  cos, sin = (x[:, :, None] for x in angle)
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)


def _dot(spec: str, x: Array, w: Array) -> Float32[Array, '...']:
  """Contracts with float32 sums; float32 operands are not rounded first."""
  # TPUs and GPUs otherwise multiply float32 operands in fewer bits.
  exact = x.dtype == jnp.float32
  return jnp.einsum(
    spec,
    x,
    w,
    preferred_element_type=jnp.float32,
    precision=jax.lax.Precision.HIGHEST if exact else None,
  )


def _normal(
  rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: str
) -> nnx.Param:
  init = jax.nn.initializers.normal(fan_in**-0.5)
  return nnx.Param(init(rngs.params(), shape, jnp.dtype(dtype)))
