# SPDX-License-Identifier: Apache-2.0
"""What shall go wrong on purpose: values that a config can hold.

It makes nothing happen: `faults` does, and whoever owns the prefill process.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping

from lynx_jax.config import require


class Fault(enum.Enum):
  """What can go wrong with one chunk or one announcement."""

  CORRUPT = 'corrupt'  # one bit of the payload flips
  LATE = 'late'  # the payload takes `late_s` longer
  LOST = 'lost'  # the payload never comes, as from a stopped peer
  BROKEN = 'broken'  # the pull ends in an error, as from a dead peer
  STALLED = 'stalled'  # nothing at all comes for `stall_s`
  UNANNOUNCED = 'unannounced'  # the announcement never comes
  DUPLICATE = 'duplicate'  # the announcement comes twice
  REORDERED = 'reordered'  # the announcement comes after the next message
  STALE = 'stale'  # the announcement comes once more, of an older generation


class Step(enum.Enum):
  """A point of the protocol, as the decode side sees it."""

  SUBMIT = 'submit'  # a prompt was sent
  PUBLISHED = 'published'  # chunks were announced
  PULL = 'pull'  # a chunk is being fetched
  DONE = 'done'  # token 1 has come


class Peer(enum.Enum):
  """What happens to the prefill process."""

  KILL = 'kill'  # and it is started anew, on another port
  STOP = 'stop'  # and it goes on


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerFault:
  """The prefill process dies or stops at a point of the protocol.

  Attributes:
    what: happens to it.
    step, count: after the `count`-th time that this step is reached.
    back_s: later by so much it is back; inf is never.
  """

  what: Peer
  step: Step
  count: int
  back_s: float

  def __post_init__(self):
    require(self.count > 0, f'faults.peer count={self.count} must be 1 or more')
    require(self.back_s >= 0, f'faults.back_s={self.back_s} must be 0 or more')


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultPlan:
  """How likely each fault is, and how many there are at most.

  Attributes:
    seed: of the draws. They are made in the order of pulls and messages, which
      the threads' timing may change.
    chances: fault → probability, for every pull or announcement.
    most: faults in all; then everything goes well.
    late_s: how much later a late payload is.
    stall_s: how long nothing comes over a stalled link.
    peer: what happens to the prefill process, if anything.
  """

  seed: int = 0
  chances: Mapping[Fault, float] = dataclasses.field(default_factory=dict)
  most: int = 0
  late_s: float = 0.05
  stall_s: float = 1.0
  peer: PeerFault | None = None

  def __post_init__(self):
    for fault, chance in self.chances.items():
      require(
        0 <= chance <= 1, f'faults.{fault.value}={chance} must be in 0..1'
      )
    for name in ('most', 'late_s', 'stall_s'):
      value = getattr(self, name)
      require(0 <= value < math.inf, f'faults.{name}={value} must be 0 or more')
    for fault, chance in self.chances.items():
      require(
        not chance or self.most > 0,
        f'faults.{fault.value}={chance} makes nothing go wrong with '
        f'faults.most={self.most}; set how many faults there may be',
      )

  @property
  def nothing(self) -> bool:
    """Whether nothing can go wrong."""
    drawn = self.most > 0 and any(self.chances.values())
    return not drawn and self.peer is None
