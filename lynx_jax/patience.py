# SPDX-License-Identifier: Apache-2.0
"""How long a decode process waits for its prefill process, and what then.

It knows no channel and no clock: what it decides `remote_prefill` carries out.
"""

import collections
import dataclasses
import enum
from typing import Any

from lynx_jax.config import Target, require

LONGEST_S = 1_000_000  # of any wait: eleven days


class Policy(enum.Enum):
  """What becomes of a request whose Residual does not come."""

  WAIT = 'wait'  # for ever
  RECOMPUTE = 'recompute'  # prefill it again, and fetch what is missing
  FAIL = 'fail'  # end it with TransferStalled
  ANCHOR_OK = 'anchor_ok'  # go on without; the result is marked unverified


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patience:
  """How long to wait for what, and what then.

  Attributes:
    handshake_s: for the answer to a connection.
    reconnect_s: for a lost sender to come back; then its requests fail.
    stall_s: least time without any progress that counts as a stall; it is
      raised to four times what the outstanding bytes take.
    retries: tries to mend the same thing before the next stronger means.
    residual: when nothing else helps and the Anchor is there. A missing Anchor
      is always recomputed.
  """

  handshake_s: float = 5.0
  reconnect_s: float = 10.0
  stall_s: float = 1.0
  retries: int = 3
  residual: Policy = Policy.RECOMPUTE

  def __post_init__(self):
    for name in ('handshake_s', 'reconnect_s', 'stall_s', 'retries'):
      value = getattr(self, name)
      require(
        0 < value <= LONGEST_S,
        f'patience.{name}={value} must be positive, and at most {LONGEST_S}',
      )

  def stall_limit_s(
    self, outstanding_bytes: int, rate_gbps: float | None
  ) -> float:
    """Returns the longest time in which nothing may come.

    Args:
      outstanding_bytes: asked for, and not there.
      rate_gbps: of late; None is not known yet.
    """
    if rate_gbps is None:
      return self.stall_s
    return max(self.stall_s, 4 * outstanding_bytes * 8e-9 / rate_gbps)

  def policy(
    self, *, lacks_anchor: bool, target: Target, recomputed: int
  ) -> Policy:
    """Returns what becomes of a request of which a part never came.

    Args:
      lacks_anchor: some of the Anchor is not there: it cannot go on.
      target: what its output must equal.
      recomputed: how often it was prefilled again.
    """
    policy = Policy.RECOMPUTE if lacks_anchor else self.residual
    if policy is Policy.ANCHOR_OK and target is Target.EXACT:
      return Policy.FAIL  # nothing made up turns planes into bfloat16
    if policy is Policy.RECOMPUTE and recomputed >= self.retries:
      return Policy.FAIL
    return policy


class Tries:
  """What was tried in vain, and whether it may be tried once more.

  A part that came damaged is asked for again; a link on which nothing comes is
  reset; for a lost session another one is opened. Each of these is tried
  `retries` times, and then comes the next stronger means. Of resets and
  sessions those count after which nothing has landed; a new session may reset
  its link as often as the first.
  """

  def __init__(self, retries: int):
    self._retries = retries
    self.resets = 0
    self._sessions = 0
    self._damaged: collections.Counter[Any] = collections.Counter()

  def landed(self) -> None:
    """Notes that something has come."""
    self.resets = self._sessions = 0

  def connected(self) -> None:
    """Notes that there is a session."""
    self.resets = 0

  def gave_up(self) -> None:
    """Notes that all requests have failed: the next one has all tries."""
    self._sessions = 0

  def forget(self, request: int) -> None:
    """Forgets the parts of a request."""
    for key in [key for key in self._damaged if key.request == request]:
      del self._damaged[key]

  def may_ask_again(self, key: Any) -> bool:
    """Counts a part that came damaged; returns whether to ask for it again."""
    self._damaged[key] += 1
    return self._damaged[key] <= self._retries

  def may_connect(self) -> bool:
    """Counts a lost session; returns whether to open another one."""
    self._sessions += 1
    return self._sessions <= self._retries

  @property
  def may_reset(self) -> bool:
    """Whether to reset the link once more."""
    return self.resets < self._retries
