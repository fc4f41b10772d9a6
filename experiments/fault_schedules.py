# SPDX-License-Identifier: Apache-2.0
"""Random fault schedules between a decode and a prefill process.

It draws a schedule from a seed and runs it; it owns no process. A schedule must
end in bounded time, in the output of a run without faults or in a typed error,
and nothing may be left at the sender.
"""

import collections
import dataclasses
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lynx_jax.engine import Engine, Mode, Request, Result, Sampling, State
from lynx_jax.models.transformer import Transformer
from lynx_jax.patience import Patience, Policy
from lynx_jax.prefill import NonFiniteError
from lynx_jax.remote_prefill import RemotePrefill
from lynx_jax.transport import control
from lynx_jax.transport.fault_plan import (
  Fault,
  FaultPlan,
  Peer,
  PeerFault,
  Step,
)
from lynx_jax.transport.faults import Faults
from lynx_jax.transport.receiver import Pace
from lynx_jax.transport.streams import TransferError, WireFormat

BOUND_S = 30.0  # much more than any recovery takes, much less than for ever
_FREE_S = 2.0  # the sender's bytes are back within 1 s; the machine is busy
_TYPED = (TransferError, NonFiniteError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
  """What happens in one session.

  Attributes:
    plan: the faults.
    pulls: device to device, or as bytes.
    pace: emulated Gbit/s and round-trip ms; None is as fast as it goes.
    patience: of the decode side.
    lengths, mode: of the prompts.
    cancelled: which of them is cancelled after how many steps.
  """

  plan: FaultPlan
  pulls: bool
  pace: tuple[float, float] | None
  patience: Patience
  lengths: tuple[int, ...]
  mode: Mode
  cancelled: tuple[int, int] | None


def draw(seed: int, lengths: Sequence[int], peers: bool = True) -> Schedule:
  """Returns the schedule of a seed.

  Args:
    seed: of all draws.
    lengths: of prompts to choose from, each once: a slot that held the same
      prompt would hide what has not arrived.
    peers: whether the prefill process may be killed or stopped.
  """
  rng = random.Random(seed)
  kinds = rng.sample(list(Fault), rng.randint(1, len(Fault)))
  peer = None
  if peers and rng.random() < 0.2:
    peer = PeerFault(
      what=rng.choice(list(Peer)),
      step=rng.choice(list(Step)),
      count=rng.randint(1, 4),
      back_s=rng.uniform(0.0, 1.5),
    )
  count = rng.randint(1, min(4, len(lengths)))
  return Schedule(
    plan=FaultPlan(
      seed=seed,
      chances={kind: rng.uniform(0.02, 0.3) for kind in kinds},
      most=rng.randint(1, 10),
      late_s=rng.uniform(0.0, 0.2),
      stall_s=rng.uniform(0.1, 1.0),
      peer=peer,
    ),
    pulls=rng.random() < 0.7,
    pace=(10 ** rng.uniform(-3, 0), rng.choice((0.0, 20.0)))
    if rng.random() < 0.6
    else None,
    patience=Patience(
      handshake_s=2.0,
      reconnect_s=6.0,
      stall_s=0.3,
      retries=rng.randint(2, 4),
      residual=rng.choice((Policy.RECOMPUTE, Policy.FAIL, Policy.ANCHOR_OK)),
    ),
    lengths=tuple(rng.sample(list(lengths), count)),
    mode=rng.choice(list(Mode)),
    cancelled=(rng.randrange(count), rng.randint(1, 40))
    if rng.random() < 0.25
    else None,
  )


@dataclasses.dataclass
class Outcome:
  """How a schedule has ended.

  Attributes:
    seconds: it took.
    ends: requests by how they ended: `done`, `unverified`, `cancelled`, or the
      name of an error.
    made: faults that happened.
    hung, wrong_tokens, leaked: what must not be.
  """

  seconds: float = 0.0
  ends: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  made: dict[str, int] = dataclasses.field(default_factory=dict)
  hung: bool = False
  wrong_tokens: bool = False
  leaked: bool = False

  @property
  def good(self) -> bool:
    return not (self.hung or self.wrong_tokens or self.leaked)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
  """Where schedules run.

  Attributes:
    wire, model, fingerprint, sharding, server: of the decode side.
    address: where the prefill process serves now.
    suffer: makes a fault of the prefill process.
    held: returns published bytes, prompts and peers that it holds, once it
      is back.
    prompt, sampling: return token ids and how to draw the next by length.
    references: right output by length.
    output_tokens: how many.
  """

  wire: WireFormat
  model: Transformer
  fingerprint: str
  sharding: Any
  server: Any
  address: Callable[[], str]
  suffer: Callable[[PeerFault], None] | None
  held: Callable[[], tuple[int, int, int]]
  prompt: Callable[[int], Sequence[int]]
  sampling: Callable[[int], Sampling]
  references: Mapping[int, list[int]]
  output_tokens: int

  def run(self, schedule: Schedule) -> Outcome:
    """Runs a schedule in a session of its own."""
    outcome = Outcome()
    start_s = time.monotonic()
    faults = Faults(schedule.plan, self.suffer)
    try:
      self._session(schedule, faults, outcome)
    except _TYPED as error:  # of the session: all requests have failed
      outcome.ends[type(error).__name__] += len(schedule.lengths)
    outcome.made = {fault.value: n for fault, n in faults.made.items()}
    outcome.seconds = time.monotonic() - start_s
    left = self.held()  # waits for a process that is stopped
    until_s = time.monotonic() + _FREE_S
    while left != (0, 0, 0):
      if time.monotonic() > until_s:
        outcome.leaked = True
        break
      time.sleep(0.01)
      left = self.held()
    return outcome

  def _session(
    self, schedule: Schedule, faults: Faults, outcome: Outcome
  ) -> None:
    remote = RemotePrefill(
      self.wire,
      self.fingerprint,
      self.sharding,
      dial=lambda: control.ClientChannel(self.address()),
      server=self.server if schedule.pulls else None,
      pace=Pace(*schedule.pace) if schedule.pace else None,
      patience=schedule.patience,
      faults=faults,
    )
    with Engine(
      remote, self.model, self.wire.codec, self.wire.engine
    ) as engine:
      keys = [
        engine.submit(
          Request(
            prompt=self.prompt(length),
            output_tokens=self.output_tokens,
            mode=schedule.mode,
            sampling=self.sampling(length),
          )
        )
        for length in schedule.lengths
      ]
      until_s = time.monotonic() + BOUND_S
      for step in range(10**9):
        if not engine.busy or time.monotonic() > until_s:
          break
        if schedule.cancelled and schedule.cancelled[1] == step:
          engine.cancel(keys[schedule.cancelled[0]])
        engine.step()
      outcome.hung = engine.busy
      for key in keys:
        self._judge(engine.forget(key), outcome)

  def _judge(self, result: Result, outcome: Outcome) -> None:
    right = self.references[result.prompt_tokens]
    if result.unverified:
      outcome.ends['unverified'] += 1
    elif result.state is State.FAILED:
      outcome.ends[type(result.error).__name__] += 1
      outcome.hung |= not isinstance(result.error, _TYPED)  # no typed error
    else:
      outcome.ends[result.state.value] += 1
      whole = result.state is State.DONE
      known = result.tokens
      outcome.wrong_tokens |= known != (right if whole else right[: len(known)])
