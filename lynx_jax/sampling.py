# SPDX-License-Identifier: Apache-2.0
"""Sampling as a pure function of logits, seed and position.

It knows no model, no cache and no draft.

A token is the argmax of its logits and Gumbel noise,

  token = argmax_v (logits[v] / temperature + G(seed, position, v)),

over the vocabulary that the filters leave, and so follows
softmax(logits / temperature) exactly (the Gumbel-max trick, arXiv:1611.01144
eq. 1). The noise depends on nothing else: drafts and verifications of one
position draw the same one, whatever slot, batch or round they are in. So a
draft need only be compared with the target's own token, as in greedy decoding,
which is temperature 0; `docs/sampling.md` says what that costs and saves.
"""

import dataclasses
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lynx_jax.config import require
from lynx_jax.shapes import Array, Bool, Float32, Int32, UInt32

MOST_SEED = 2**32 - 1
_MOST_FLOAT = float(np.finfo(np.float32).max)
# Probabilities as whole numbers add up to the same in any order, so that all
# forms of a program keep the same tokens. Those below half a step count as 0.
_ONE = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How a request samples.

  Temperature comes first. Then top-k, top-p and min-p each take away from what
  the one before has left; equally likely tokens stay or go together.

  Attributes:
    temperature: divides the logits; 0 takes the most likely token.
    top_k: keeps tokens that fewer than k others beat; 0 keeps all.
    top_p: keeps tokens that others beat with less than p together; 1 keeps all.
    min_p: keeps tokens at least so likely as a share of the most likely one's
      probability; 0 keeps all.
    seed: requests with one seed draw the same noise at the same position.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0

  def __post_init__(self):
    for name in ('top_k', 'seed'):
      value = getattr(self, name)
      require(
        isinstance(value, Integral),
        f'sampling.{name}={value!r} must be a whole number',
      )
    require(
      0 <= self.temperature <= _MOST_FLOAT,
      f'sampling.temperature={self.temperature} must be 0 (greedy) or more, '
      'and finite in float32',
    )
    require(
      0 <= self.top_k <= np.iinfo(np.int32).max,
      f'sampling.top_k={self.top_k} must be 0 (all tokens) or more',
    )
    require(
      0 < self.top_p <= 1,
      f'sampling.top_p={self.top_p} must be above 0 and at most 1 (all tokens)',
    )
    require(
      0 <= self.min_p <= 1,
      f'sampling.min_p={self.min_p} must be in 0 (all tokens)..1',
    )
    require(
      0 <= self.seed <= MOST_SEED,
      f'sampling.seed={self.seed} must be in 0..{MOST_SEED}',
    )

  def row(self) -> 'Samplings':
    """Returns it as a row of `Samplings`, on the host."""
    values: dict[str, Any] = {
      'temperature': np.float32(self.temperature),
      'top_k': np.int32(self.top_k),
      'top_p': np.float32(self.top_p),
      'min_p': np.float32(self.min_p),
      'seed': np.uint32(self.seed),
    }
    return Samplings(**values)


GREEDY = Sampling()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Samplings:
  """`Sampling` of B requests side by side, or of one as scalars."""

  temperature: Float32[Array, '*B']
  top_k: Int32[Array, '*B']
  top_p: Float32[Array, '*B']
  min_p: Float32[Array, '*B']
  seed: UInt32[Array, '*B']


def choose(
  logits: Float32[Array, 'B T V'],
  samplings: Samplings,
  positions: Int32[Array, 'B T'],
  active: Bool[Array, 'B'],
) -> Int32[Array, 'B T']:
  """Returns the token of every row, the lowest id among equals.

  A batch that is all greedy pays for nothing else.

  Args:
    logits: of the rows.
    samplings: of the requests.
    positions: where the tokens will stand, counted from the prompt's first.
    active: others are not looked at; their tokens mean nothing.
  """
  warm = samplings.temperature > 0

  def sample():
    noisy = filtered(logits, samplings) + noise(
      samplings.seed, positions, logits.shape[-1]
    )
    return greedy(jnp.where(warm[:, None, None], noisy, logits))

  return jax.lax.cond(jnp.any(warm & active), sample, lambda: greedy(logits))


def greedy(logits: Float32[Array, 'B T V']) -> Int32[Array, 'B T']:
  """Returns the most likely token of every row, the lowest id among equals."""
  return jax.lax.argmax(logits, 2, jnp.int32)


def filtered(
  logits: Float32[Array, 'B T V'], samplings: Samplings
) -> Float32[Array, 'B T V']:
  """Returns logits over temperature, -inf where a filter takes a token away.

  Rows of greedy requests mean nothing.
  """
  warm, vocab = samplings.temperature > 0, logits.shape[-1]
  temperature, top_k, top_p, min_p = (
    x[:, None, None]
    for x in (
      jnp.where(warm, samplings.temperature, 1.0),
      jnp.where(
        samplings.top_k > 0, jnp.minimum(samplings.top_k, vocab), vocab
      ),
      samplings.top_p,
      samplings.min_p,
    )
  )
  # Relative to the largest: a low temperature must not make inf - inf.
  logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature

  order = _order(logits)

  def most_likely(kept):
    return kept & (order >= _least(order, jnp.ones_like(order), top_k))

  def nucleus(kept):
    likely = jax.nn.softmax(jnp.where(kept, logits, -jnp.inf), axis=-1)
    parts = jnp.round(likely * _ONE).astype(jnp.int32)
    whole = jnp.sum(parts, axis=-1, keepdims=True)
    limit = jnp.ceil(top_p * whole.astype(jnp.float32)).astype(jnp.int32)
    # A p that is 0 in float32 leaves the most likely one.
    least = _least(order, parts, jnp.clip(limit, 1, whole))
    return kept & ((order >= least) | (top_p >= 1))

  kept = jnp.ones(logits.shape, bool)
  for used, keep in (
    (samplings.top_k > 0, most_likely),
    (samplings.top_p < 1, nucleus),
  ):
    kept = jax.lax.cond(jnp.any(warm & used), keep, lambda kept: kept, kept)
  kept = kept & (logits >= jnp.log(min_p))
  return jnp.where(kept, logits, -jnp.inf)


def noise(
  seed: UInt32[Array, 'B'], positions: Int32[Array, 'B T'], vocab: int
) -> Float32[Array, 'B T V']:
  """Returns standard Gumbel noise, a function of seed, position and token."""

  def row(seed, position):
    key = jax.random.key(seed, impl='threefry2x32')
    return jax.random.bits(
      jax.random.fold_in(key, position), (vocab,), jnp.uint32
    )

  bits = jax.vmap(jax.vmap(row, in_axes=(None, 0)))(seed, positions)
  # The largest of 49,152 has u near 2^-16: as a number near 0, and not as its
  # complement near 1, u keeps its bits there.
  u = (bits.astype(jnp.float32) + 0.5) * np.float32(2.0**-32)
  u = jnp.minimum(u, np.float32(1 - 2.0**-24))
  return -jnp.log(-jnp.log1p(-u))


def _order(x):
  """Returns f32 as i32 in the same order.

  -1.5, -0.0, 0.0 and 1.5 become -0x3fc00001, -1, 0 and 0x3fc00000.
  """
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _least(order, weights, limit):
  """Returns the least number whose larger ones in a row weigh below `limit`.

  It is found bit by bit: sorting a vocabulary takes 20 times as long on a CPU.

  Args:
    order: i32[B, T, V].
    weights: i32[B, T, V], not negative.
    limit: i32[B, 1 or T, 1], positive, at most what a row weighs.
  """

  def step(i, least):
    half = jnp.int32(1) << (31 - i)
    larger = order > least + (half - 1)
    above = jnp.sum(jnp.where(larger, weights, 0), axis=-1, keepdims=True)
    return jnp.where(above < limit, least, least + half)

  lowest = jnp.iinfo(jnp.int32).min
  start = jnp.full((*order.shape[:-1], 1), lowest, jnp.int32)
  return jax.lax.fori_loop(0, 32, step, start)
