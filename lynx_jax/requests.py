# SPDX-License-Identifier: Apache-2.0
"""What a user hands to the engine and gets back: requests, events, results.

It knows no device, no slot and no program.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence
from numbers import Integral, Real

from lynx_jax.config import Target, require
from lynx_jax.sampling import GREEDY, Sampling
from lynx_jax.timeline import Phase, Timeline


class State(enum.Enum):
  """Where a request is; `engine` has the order."""

  QUEUED = 'queued'
  RECEIVING = 'receiving'
  DRAFTING = 'drafting'
  DECODING = 'decoding'
  DONE = 'done'
  CANCELLED = 'cancelled'
  FAILED = 'failed'


ENDED = (State.DONE, State.CANCELLED, State.FAILED)


class Form(enum.Enum):
  """How a request decodes when its target cache is complete."""

  VERIFY = 'verify'  # in the verify program: output equals the reference
  PLAIN = 'plain'  # one row a step: fastest without drafts, own rounding


class Mode(enum.Enum):
  """When the transfer of a request may start."""

  SERIAL = 'serial'  # when prefill has ended
  OVERLAPPED = 'overlapped'  # as soon as a token chunk has been split


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
  """What a user asks for.

  Attributes:
    prompt: token ids, at least one.
    output_tokens: most tokens to generate, token 1 included.
    form: how to decode.
    mode: when its transfer may start.
    streamed: somebody watches: results come after every round.
    deadline_s: seconds after submission by which it matters; orders transfers.
    sampling: how tokens are chosen; the reference chooses them in the same way.
    target: what its output equals; None is the codec's highest.

  Raises:
    ConfigError: a value is of another type.
  """

  prompt: Sequence[int]
  output_tokens: int
  form: Form = Form.VERIFY
  mode: Mode = Mode.OVERLAPPED
  streamed: bool = True
  deadline_s: float = math.inf
  sampling: Sampling = GREEDY
  target: Target | None = None

  def __post_init__(self):
    kinds: tuple[tuple[str, type], ...] = (
      ('output_tokens', Integral),
      ('form', Form),
      ('mode', Mode),
      ('deadline_s', Real),
      ('sampling', Sampling),
    )
    if self.target is not None:
      kinds += (('target', Target),)
    for name, kind in kinds:
      value = getattr(self, name)
      require(
        isinstance(value, kind),
        f'{name}={value!r} of a request must be of type {kind.__name__}',
      )
    require(
      self.deadline_s == self.deadline_s,
      'deadline_s=nan of a request must be a number of seconds; inf is none',
    )


@dataclasses.dataclass(frozen=True)
class Provisional:
  """A token that verification may still take back."""

  request: int
  position: int
  token: int
  at_s: float


@dataclasses.dataclass(frozen=True)
class Committed:
  """Tokens at positions below `upto` are final; `tokens` are the last of them.

  All `tokens` that a request's events have brought are a prefix of its output.
  """

  request: int
  upto: int
  at_s: float
  tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Retracted:
  """Provisional tokens at `start` and above are taken back."""

  request: int
  start: int
  at_s: float


@dataclasses.dataclass(frozen=True)
class Finished:
  """The request has ended; `Engine.result` has everything about it."""

  request: int
  state: State
  at_s: float


Event = Provisional | Committed | Retracted | Finished


@dataclasses.dataclass
class Result:
  """What is known of a request; final once its state is.

  Positions count generated tokens: token 1 is at 0. Times are seconds since
  submission; `None` is not known (yet).

  Attributes:
    request: its id.
    state: where the request is.
    prompt_tokens: P.
    tokens: committed ones.
    shown: committed and provisional ones.
    timeline: events, `commit` with one instant a token.
    prefill_end_s: T_p, prefill and (in serial mode) split.
    token_1_s: decode holds token 1.
    provisional_s: the first token emitted by decode.
    commit_times_s: of every committed token.
    drafted, accepted: by verifications, bonus tokens excluded.
    rounds: (drafted, accepted) of every verification.
    retracted: provisional tokens that were shown and taken back.
    anchor_bytes, residual_bytes, exact_bytes: arrived.
    critical: (ready_s, bytes) of chunks that the first token waits for.
    anchor_s, residual_s, exact_s: when the last byte of each stream was there.
    done_s: the end.
    unverified: a part of the Residual never came and was made up, as the
      transfer's policy allows: tokens need not be those of the reference.
    error: why it failed.
  """

  request: int
  state: State
  prompt_tokens: int
  timeline: Timeline
  tokens: list[int] = dataclasses.field(default_factory=list)
  shown: list[int] = dataclasses.field(default_factory=list)
  prefill_end_s: float | None = None
  token_1_s: float | None = None
  provisional_s: float | None = None
  commit_times_s: list[float] = dataclasses.field(default_factory=list)
  drafted: int = 0
  accepted: int = 0
  rounds: list[tuple[int, int]] = dataclasses.field(default_factory=list)
  retracted: int = 0
  anchor_bytes: int = 0
  residual_bytes: int = 0
  exact_bytes: int = 0
  critical: list[tuple[float, int]] = dataclasses.field(default_factory=list)
  anchor_s: float | None = None
  residual_s: float | None = None
  exact_s: float | None = None
  done_s: float | None = None
  unverified: bool = False
  error: Exception | None = None

  @property
  def committed_s(self) -> float | None:
    """When the first verified decode token was committed."""
    return self.commit_times_s[1] if len(self.commit_times_s) > 1 else None

  def show(
    self, committed: list[int], drafts: list[int], now_s: float
  ) -> list[Event]:
    """Takes over what is committed and drafted now; returns what changed.

    Args:
      committed: all committed tokens; they begin with the ones before.
      drafts: provisional tokens after them.
      now_s: reading of the timeline's clock.
    """
    at_s = now_s - self.timeline.arrival_s
    shown = committed + drafts
    same = 0
    for old, new in zip(self.shown, shown, strict=False):
      if old != new:
        break
      same += 1
    events: list[Event] = []
    if same < len(self.shown):
      self.retracted += len(self.shown) - same
      events.append(Retracted(self.request, same, at_s))
    for position in range(same, len(shown)):
      events.append(Provisional(self.request, position, shown[position], at_s))
    if self.provisional_s is None and len(shown) > 1:
      self.provisional_s = at_s
    fresh = tuple(committed[len(self.tokens) :])
    if fresh:
      events.append(Committed(self.request, len(committed), at_s, fresh))
      self.commit_times_s += [at_s] * len(fresh)
      self.timeline.add(Phase.COMMIT, now_s, upto=len(committed))
    self.tokens, self.shown = committed, shown
    return events
