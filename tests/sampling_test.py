# SPDX-License-Identifier: Apache-2.0
"""Sampling keeps the target's distribution, whatever was drafted from."""

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from lynx_jax import sampling
from lynx_jax.sampling import Purpose, Sampling

VOCAB, MOST = 8, 8
DRAWS = 20_480
FILTERS = {
  'plain': {},
  'cold': {'temperature': 0.5},
  'top-k': {'top_k': 3},
  'top-p': {'top_p': 0.7},
  'min-p': {'min_p': 0.2},
  'all': {'temperature': 1.3, 'top_k': 5, 'top_p': 0.9, 'min_p': 0.1},
}


def _sampling(
  batch, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None
) -> Sampling:
  seed = np.arange(batch) if seed is None else seed
  full = functools.partial(np.full, batch)
  return Sampling(
    jnp.asarray(full(temperature, np.float32)),
    jnp.asarray(full(top_k, np.int32)),
    jnp.asarray(full(top_p, np.float32)),
    jnp.asarray(full(min_p, np.float32)),
    jnp.asarray(np.asarray(seed, np.int32)),
  )


def _expected(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  """The filters one by one, in float64, on one row."""
  order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
  if temperature == 0:
    return np.eye(len(logits))[order[0]]
  weights = np.exp((np.asarray(logits, np.float64) - max(logits)) / temperature)
  p = weights / weights.sum()
  if top_k:
    order = order[:top_k]
  total, kept, reached = sum(p[i] for i in order), [], 0.0
  for i in order:
    if kept and reached >= top_p and top_p < 1:
      break
    kept.append(i)
    reached += p[i] / total
  kept = [i for i in kept if p[i] >= min_p * p[order[0]]] or order[:1]
  found = np.zeros(len(logits))
  found[kept] = p[kept]
  return found / found.sum()


@hypothesis.given(
  logits=st.lists(
    st.integers(-200, 200).map(lambda n: n / 16),
    min_size=VOCAB,
    max_size=VOCAB,
  ),
  temperature=st.sampled_from([0.0, 0.25, 1.0, 3.0]),
  top_k=st.integers(0, VOCAB + 1),
  top_p=st.sampled_from([0.0, 0.37, 0.83, 1.0]),
  min_p=st.sampled_from([0.0, 0.11, 1.0]),
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_probabilities_are_those_of_the_filters_one_by_one(logits, **how):
  row = jnp.asarray(logits, jnp.float32)[None, None]
  found = np.asarray(_probabilities(row, _sampling(1, **how)))[0, 0]
  np.testing.assert_allclose(found, _expected(logits, **how), atol=2e-6)


_probabilities = jax.jit(sampling.probabilities)


def test_huge_logits_and_a_tiny_temperature_give_no_nan():
  logits = jnp.asarray([[[3e38, -3e38, 1.0, 3e38]]], jnp.float32)
  found = _probabilities(logits, _sampling(1, temperature=1e-30))
  np.testing.assert_array_equal(found, [[[0.5, 0.0, 0.0, 0.5]]])


@functools.cache
def _tables(drafts: int, how: str):
  """A target and a draft model: logits after each context of one token."""
  draws = np.random.default_rng(drafts)
  target = draws.normal(size=(VOCAB, VOCAB)).astype(np.float32) * 1.5
  draft = target + draws.normal(size=target.shape).astype(np.float32)
  many = _sampling(VOCAB, **FILTERS[how])
  return tuple(
    np.asarray(_probabilities(x[:, None], many))[:, 0] for x in (target, draft)
  )


@jax.jit
def _round(p, q, seed, first, drafts):
  """Drafts and verifies once from the token `first`; a slot a seed.

  The buffers hold MOST drafts, of which `drafts` are verified.
  """
  tokens, position = [first], jnp.full(seed.shape, 7, jnp.int32)
  for i in range(MOST):
    tokens.append(
      sampling.draw(q[tokens[-1]], seed, position + i, Purpose.DRAFT)
    )
  context = jnp.stack(tokens, axis=1)
  accepted, token = sampling.accept(
    p[context],
    q[context[:, :-1]],
    context[:, 1:],
    jnp.full(seed.shape, drafts, jnp.int32),
    seed,
    position,
  )
  index = jnp.arange(MOST + 1, dtype=jnp.int32)[None]
  drafted = jnp.pad(context[:, 1:], ((0, 0), (0, 1)))
  out = jnp.where(index < accepted[:, None], drafted, token[:, None])
  return accepted, out


def _check_distribution(tokens, p, tests):
  """Chi-square at 1e-6 over all tests, and total variation."""
  seen = np.bincount(tokens, minlength=VOCAB)
  assert (seen[p == 0] == 0).all()
  wanted = len(tokens) * p[p > 0]
  freedom = len(wanted) - 1
  if freedom:
    statistic = ((seen[p > 0] - wanted) ** 2 / wanted).sum()
    # Wilson and Hilferty's approximation of the chi-square quantile.
    z = 5.0 + math.log10(tests) / 4
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + z * math.sqrt(spread)) ** 3
  distance = np.abs(seen / len(tokens) - p).sum() / 2
  assert distance < 1.5 * math.sqrt(VOCAB / len(tokens))


@pytest.mark.parametrize(
  'drafts, how',
  [(drafts, 'all') for drafts in range(MOST + 1)]
  + [(2, how) for how in FILTERS if how != 'all'],
)
def test_committed_tokens_follow_the_target(drafts, how):
  """Every committed token, given the one before it and how many there are."""
  p, q = _tables(drafts, how)
  seed = jnp.arange(DRAWS, dtype=jnp.int32)
  first = jnp.full(DRAWS, 2, jnp.int32)
  accepted, out = map(np.asarray, _round(p, q, seed, first, drafts))
  assert accepted.max() <= drafts
  _check_distribution(out[:, 0], p[2], tests=200)
  # Whether a position is committed depends on the tokens before it alone, so
  # the next one follows p of its context too.
  if drafts:
    for context in range(VOCAB):
      here = (accepted >= 1) & (out[:, 0] == context)
      if here.sum() > 500:
        _check_distribution(out[here, 1], p[context], tests=200)


@pytest.mark.parametrize('drafts', [1, 4])
def test_a_wrong_draft_distribution_is_seen(drafts):
  """The check above can fail: here drafts are taken without a test."""
  p, q = _tables(drafts, 'plain')
  seed = jnp.arange(DRAWS, dtype=jnp.int32)
  first = jnp.full(DRAWS, 2, jnp.int32)
  _, out = map(np.asarray, _round(q, q, seed, first, drafts))
  with pytest.raises(AssertionError):
    _check_distribution(out[:, 0], p[2], tests=1)


def test_acceptance_is_the_overlap_of_the_distributions():
  p, q = _tables(1, 'plain')
  seed = jnp.arange(DRAWS, dtype=jnp.int32)
  first = jnp.full(DRAWS, 2, jnp.int32)
  accepted, _ = _round(p, q, seed, first, 1)
  overlap = np.minimum(p[2], q[2]).sum()
  assert abs(np.mean(accepted) - overlap) < 4 * math.sqrt(0.25 / DRAWS)


def test_results_do_not_depend_on_slot_or_company():
  p, q = _tables(2, 'plain')
  seed = np.arange(40, dtype=np.int32)
  order = np.random.default_rng(0).permutation(40)
  one = _round(p, q, seed, jnp.full(40, 2, jnp.int32), 2)
  other = _round(p, q, seed[order], jnp.full(40, 2, jnp.int32), 2)
  for x, y in zip(one, other, strict=True):
    np.testing.assert_array_equal(np.asarray(x)[order], y)


def test_seed_position_and_purpose_all_matter():
  flat = jnp.ones((512, VOCAB), jnp.float32) / VOCAB
  same = jnp.zeros(512, jnp.int32)
  row = jnp.arange(512, dtype=jnp.int32)
  by_seed = sampling.draw(flat, row, same, Purpose.DRAFT)
  by_position = sampling.draw(flat, same, row, Purpose.DRAFT)
  by_purpose = sampling.draw(flat, same, row, Purpose.RESAMPLE)
  again = sampling.draw(flat, same, row, Purpose.DRAFT)
  np.testing.assert_array_equal(by_position, again)
  for tokens in (by_seed, by_position, by_purpose):
    _check_distribution(np.asarray(tokens), np.full(VOCAB, 1 / VOCAB), tests=3)
  matches = np.mean(np.asarray(by_position) == np.asarray(by_purpose))
  assert abs(matches - 1 / VOCAB) < 0.08


@hypothesis.given(
  drafts=st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=3),
  targets=st.lists(st.integers(0, VOCAB - 1), min_size=4, max_size=4),
  count=st.integers(0, 3),
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_greedy_is_the_comparison_of_tokens(drafts, targets, count):
  p, q = (np.eye(VOCAB, dtype=np.float32)[x][None] for x in (targets, drafts))
  one = functools.partial(np.full, 1, dtype=np.int32)
  accepted, token = _accept(
    p, q, np.array([drafts], np.int32), one(count), one(5), one(9)
  )
  agree = [d == t for d, t in zip(drafts[:count], targets, strict=False)]
  wanted = agree.index(False) if False in agree else count
  assert accepted.tolist() == [wanted]
  assert token.tolist() == [targets[wanted]]


_accept = jax.jit(sampling.accept)
