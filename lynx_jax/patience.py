# SPDX-License-Identifier: Apache-2.0
"""How long a decode process waits for its prefill process, and what then.

It knows no channel and no clock: `remote_prefill` acts on these values.
"""

import dataclasses
import enum

from lynx_jax.config import require

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
