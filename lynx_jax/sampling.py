# SPDX-License-Identifier: Apache-2.0
"""Sampling and speculative rejection sampling: pure functions of logits.

It knows no model, no cache and no slot state.

A committed token follows the target's distribution p, whatever distribution q
it was drafted from (arXiv:2211.17192 §2.3, appendix A.1): a draft x ~ q is
accepted with probability min(1, p(x) / q(x)); the first rejected one is
replaced by a token drawn from max(0, p - q), normalised; if none is rejected, a
token drawn from p follows the last one.

Random numbers are functions of (seed of the request, position, purpose) alone:
neither the slot nor what shares the batch changes them. A position drafted
again after a rejection before it draws the same numbers again, which is sound:
nothing committed so far depends on them.

Temperature 0 is greedy: p and q are one-hot, and the rule above is the
comparison of tokens.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp

from lynx_jax.shapes import Array, Float32, Int32


class Purpose(enum.IntEnum):
  """What a random number decides; each has a key of its own."""

  DRAFT = 0
  ACCEPT = 1
  RESAMPLE = 2  # after the first rejection, or after the last draft


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
  """How each of B requests samples.

  Attributes:
    temperature: divides the logits; 0 takes the most likely token.
    top_k: keeps the k most likely tokens; 0 keeps all.
    top_p: keeps the most likely of those whose probabilities reach p; 1 keeps
      all.
    min_p: keeps tokens at least so likely as a share of the most likely one's
      probability; 0 keeps all.
    seed: of the request.
  """

  temperature: Float32[Array, 'B']
  top_k: Int32[Array, 'B']
  top_p: Float32[Array, 'B']
  min_p: Float32[Array, 'B']
  seed: Int32[Array, 'B']


def probabilities(
  logits: Float32[Array, 'B T V'], sampling: Sampling
) -> Float32[Array, 'B T V']:
  """Returns the distribution that tokens are drawn from.

  Temperature comes first. Then top-k, top-p and min-p each take away from what
  the one before has left; the most likely token always stays. Of equally likely
  tokens the lowest id comes first, as in greedy decoding.
  """
  rank = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]
  temperature, top_k, top_p, min_p = (
    x[:, None, None]
    for x in (
      sampling.temperature,
      sampling.top_k,
      sampling.top_p,
      sampling.min_p,
    )
  )
  greedy = temperature == 0
  # Relative to the largest: a low temperature must not make inf - inf.
  logits = logits - jnp.max(logits, axis=-1, keepdims=True)
  logits = logits / jnp.where(greedy, 1.0, temperature)
  order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
  likely = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)

  kept = (rank < top_k) | (top_k <= 0)
  likely = jnp.where(kept, likely, 0.0)
  share = likely / jnp.sum(likely, axis=-1, keepdims=True)
  before = jnp.cumsum(share, axis=-1) - share
  kept = (before < top_p) | (top_p >= 1)
  kept = kept & (likely >= min_p * likely[..., :1])
  kept = jnp.where(greedy, rank == 0, kept | (rank == 0))
  likely = jnp.where(kept, likely, 0.0)
  likely = likely / jnp.sum(likely, axis=-1, keepdims=True)
  back = jnp.argsort(order, axis=-1)
  return jnp.take_along_axis(likely, back, axis=-1)


def draw(
  p: Float32[Array, 'B V'],
  seed: Int32[Array, 'B'],
  position: Int32[Array, 'B'],
  purpose: Purpose,
) -> Int32[Array, 'B']:
  """Draws a token from p, which need not be normalised.

  Args:
    p: probabilities; some must be positive.
    seed: of the requests.
    position: where the tokens will stand.
    purpose: DRAFT or RESAMPLE.
  """

  def one(p, seed, position):
    return jax.random.categorical(_key(seed, position, purpose), jnp.log(p))

  return jax.vmap(one)(p, seed, position).astype(jnp.int32)


def accept(
  p: Float32[Array, 'B T V'],
  q: Float32[Array, 'B D V'],
  drafts: Int32[Array, 'B D'],
  n_drafts: Int32[Array, 'B'],
  seed: Int32[Array, 'B'],
  position: Int32[Array, 'B'],
) -> tuple[Int32[Array, 'B'], Int32[Array, 'B']]:
  """Accepts drafts, and draws the token that follows them.

  With D = 3 drafts a b c of which the second is rejected, 1 is accepted and the
  token is drawn from max(0, p[1] - q[1]); with all accepted, from p[3].

  Args:
    p: of the target: p[i] after drafts 0..i-1. T = D + 1.
    q: what each draft was drawn from.
    drafts: tokens; those at `n_drafts` and above are not looked at.
    n_drafts: 0..D.
    seed: of the requests.
    position: where draft 0 stands.

  Returns:
    How many drafts are accepted, and the token after them.
  """
  count = drafts.shape[1]
  index = jnp.arange(count, dtype=jnp.int32)[None]
  at = drafts[..., None]
  chance_p = jnp.take_along_axis(p[:, :count], at, axis=-1)[..., 0]
  chance_q = jnp.take_along_axis(q, at, axis=-1)[..., 0]
  u = _uniform(seed, position[:, None] + index)
  good = (u * chance_q < chance_p) & (index < n_drafts[:, None])
  accepted = jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1)

  rejected = (accepted < n_drafts)[:, None]
  target = _row(p, accepted)
  # One row of zeros: after the last draft nothing is taken from p.
  nothing = jnp.zeros_like(p[:, :1])
  drafted = _row(jnp.concatenate([q, nothing], axis=1), accepted)
  left = jnp.where(rejected, jnp.maximum(target - drafted, 0.0), target)
  # Where p and q are equal but for rounding, p itself is as good.
  left = jnp.where(jnp.sum(left, axis=1, keepdims=True) > 0, left, target)
  token = draw(left, seed, position + accepted, Purpose.RESAMPLE)
  return accepted, token


def _row(x, index):
  return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def _uniform(seed, position):
  def one(seed, position):
    return jax.random.uniform(_key(seed, position, Purpose.ACCEPT))

  return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(seed, position)


def _key(seed, position, purpose):
  key = jax.random.fold_in(jax.random.key(seed), position)
  return jax.random.fold_in(key, purpose.value)
