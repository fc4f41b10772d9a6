# SPDX-License-Identifier: Apache-2.0
"""The draft length is the one that is really fastest, and follows the text."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lynx_jax.speculative import draft_length

MOST = 15


def _seconds_a_token(drafts, chance, draft_s, verify_s):
  """Simulates rounds in which every draft is accepted by chance."""
  draws, tokens, rounds = random.Random(0), 0, 4000
  for _ in range(rounds):
    accepted = 0
    while accepted < drafts and draws.random() < chance:
      accepted += 1
    tokens += accepted + 1
  return rounds * (drafts * draft_s + verify_s) / tokens


def _rounds(chance: float) -> list[tuple[int, int]]:
  tries = 100_000
  accepted = round(tries * chance)
  return [(accepted, accepted)] + [(1, 0)] * (tries - accepted)


@pytest.mark.parametrize('chance', [0.3, 0.8, 0.95])
@pytest.mark.parametrize('verify_s', [0.5, 1.5, 4.0])
def test_no_other_length_is_faster(chance, verify_s):
  costs = {'draft_s': 1.0, 'verify_s': verify_s}
  best = draft_length.best(_rounds(chance), most=MOST, **costs)
  times = [_seconds_a_token(n, chance, **costs) for n in range(MOST + 1)]
  assert times[best] <= 1.02 * min(times)


def test_plain_decoding_where_drafts_cost_more_than_they_save():
  costs = {'draft_s': 1.0, 'most': MOST}
  assert draft_length.best(_rounds(0.5), verify_s=1.0, **costs) == 0
  assert draft_length.best(_rounds(0.97), verify_s=1.0, **costs) == 0
  assert draft_length.best(_rounds(0.97), verify_s=2.0, **costs) > 2


@given(st.floats(0.05, 0.98), st.floats(0.2, 5.0), st.integers(0, MOST))
def test_more_acceptance_never_means_fewer_drafts(chance, verify_s, most):
  costs = {'draft_s': 1.0, 'verify_s': verify_s, 'most': most}
  low = draft_length.best(_rounds(chance), **costs)
  high = draft_length.best(_rounds(chance + 0.01), **costs)
  assert 0 <= low <= high <= most


def test_acceptance_counts_only_drafts_that_were_tried():
  # Of four drafts, the third is rejected: the fourth says nothing.
  many = [(4, 2)] * 1000
  assert draft_length.acceptance(many) == pytest.approx(2 / 3, abs=0.01)
  assert draft_length.acceptance([]) == 0.8
  assert draft_length.acceptance([(0, 0)] * 100) == 0.8
