# SPDX-License-Identifier: Apache-2.0
"""Chooses the draft length γ from measured costs and acceptance.

It knows no model: seconds and counts in, a number out.
"""

from collections.abc import Sequence

# Acceptance is first assumed as if 8 of 10 drafts had been accepted before; a
# 4-bit Anchor reaches .83 to .95, and ten drafts are soon outweighed.
_PRIOR_ACCEPTED = 8
_PRIOR_DRAFTED = 10


def best(
  rounds: Sequence[tuple[int, int]],
  *,
  draft_s: float,
  verify_s: float,
  most: int,
) -> int:
  """Returns the γ in 0..most with the least time a committed token.

  With a chance α that a draft is accepted given that those before it were, a
  round of γ drafts commits (1 - α^(γ+1)) / (1 - α) tokens on average
  (arXiv:2211.17192 eq. 1) and takes γ · draft_s + verify_s.

  Args:
    rounds: (drafted, accepted) of recent verifications.
    draft_s: one draft step.
    verify_s: one verification, whatever γ.
    most: largest γ.
  """
  chance = acceptance(rounds)
  return min(
    range(most + 1),
    key=lambda drafts: (
      (drafts * draft_s + verify_s) / sum(chance**i for i in range(drafts + 1))
    ),
  )


def acceptance(rounds: Sequence[tuple[int, int]]) -> float:
  """Returns the estimated α: a draft after a rejected one was never tried."""
  accepted = sum(done for _, done in rounds)
  rejected = sum(done < drafted for drafted, done in rounds)
  return (accepted + _PRIOR_ACCEPTED) / (accepted + rejected + _PRIOR_DRAFTED)
