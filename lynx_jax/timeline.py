# SPDX-License-Identifier: Apache-2.0
"""What happened to a request and when, and what could have been reached.

It knows no engine, no link and no file: seconds and bytes in, seconds out.
"""

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any


class Phase(enum.StrEnum):
  """Names of events."""

  ARRIVAL = 'arrival'
  PREFILL = 'prefill'  # one a token chunk
  SPLIT = 'split'
  ANCHOR = 'anchor'  # a chunk: from its first bit on the link to its arrival
  RESIDUAL = 'residual'
  ENCODE = 'encode'  # an exact string, at the sender
  EXACT = 'exact'  # a chunk, as for the Anchor
  CONTINUE = 'continue'  # a step of decoding at the prefill side
  DRAFT = 'draft'
  VERIFY = 'verify'
  COMMIT = 'commit'
  DONE = 'done'


@dataclasses.dataclass(frozen=True)
class Event:
  """A span, or an instant where both times are equal.

  Times are seconds since the request's arrival.
  """

  name: Phase
  start_s: float
  end_s: float
  detail: dict[str, Any]


class Timeline:
  """The events of one request, in the order in which they were added.

  All times are of one monotonic clock; `add` takes its absolute readings.
  """

  def __init__(self, arrival_s: float):
    self.arrival_s = arrival_s
    self._events: list[Event] = []
    self.add(Phase.ARRIVAL, arrival_s)

  def add(
    self,
    name: Phase,
    start_s: float,
    end_s: float | None = None,
    **detail: Any,
  ) -> None:
    """Appends an event, an instant if `end_s` is None.

    Args:
      name: what happened.
      start_s: absolute reading of the clock.
      end_s: likewise; not before `start_s`.
      **detail: anything that JSON can hold, for example `token_chunk=3`.
    """
    end_s = start_s if end_s is None else end_s
    if end_s < start_s:
      raise ValueError(f'{name} ends at {end_s}, before its start {start_s}')
    self._events.append(
      Event(name, start_s - self.arrival_s, end_s - self.arrival_s, detail)
    )

  def events(self, name: Phase | None = None) -> tuple[Event, ...]:
    """Returns the events of one name, or all."""
    return tuple(e for e in self._events if name in (None, e.name))

  def first_s(self, name: Phase) -> float | None:
    """Returns the earliest start of such an event; None without any."""
    return min((e.start_s for e in self.events(name)), default=None)

  def last_s(self, name: Phase) -> float | None:
    """Returns the latest end of such an event; None without any."""
    return max((e.end_s for e in self.events(name)), default=None)

  def seconds(self, name: Phase) -> float:
    """Returns the sum of the durations of such events."""
    return sum(e.end_s - e.start_s for e in self.events(name))


def bound(
  critical: Iterable[tuple[float, int]],
  *,
  rate_gbps: float,
  rtt_ms: float,
  step_s: float,
) -> float:
  """Returns the earliest possible first token of decode.

      t_i = max(t_{i-1}, c_i) + a_i / rate,    t_0 = -inf
      bound = t_n + RTT / 2 + d

  The link carries one chunk at a time at no more than its rate. Chunk i can
  start neither before it exists, at c_i, nor before chunk i-1 has left the
  link, and takes a_i / rate; so it leaves the link at t_i or later. The last
  bit is seen RTT / 2 after t_n, and decode needs one step, d, on complete
  bytes. Nothing else is assumed, so no schedule of these chunks in this order
  is faster. Ascending c_i is the best order: by exchanging neighbours, t_n
  never falls. In serial mode all c_i are T_p and the sum telescopes:
  bound = T_p + X / rate + RTT / 2 + d.

  | chunks (c_i s, a_i bytes) at 8e-9 Gbit/s (1 byte/s) | t_i |
  |---|---|
  | (1, 2), (1, 3) | 3, 6 |
  | (1, 2), (5, 3) | 3, 8 |
  | (1, 9), (5, 3) | 10, 13 |

  Args:
    critical: (c_i, a_i) of the chunks that the first token needs, in the
      order in which they are sent: c_i, the measured time at which chunk i
      left split, in seconds since the request's arrival; a_i in bytes.
    rate_gbps: of the link; 1 is 10**9 bits a second.
    rtt_ms: of the link.
    step_s: d, one decode step alone.
  """
  t_s = float('-inf')
  for ready_s, size_bytes in critical:
    t_s = max(t_s, ready_s) + _transfer_s(size_bytes, rate_gbps)
  if t_s == float('-inf'):
    raise ValueError('bound needs at least one critical chunk')
  return t_s + rtt_ms / 2e3 + step_s


def share(
  int8_bytes: int, *, rate_gbps: float, prefill_s: float, step_s: float
) -> float:
  """Returns X8 / (T_p + X8 + d), the transfer's part of a serial INT8 run.

  Args:
    int8_bytes: of INT8 with metadata, sinks and recent tokens.
    rate_gbps: of the link.
    prefill_s: T_p, prefill and split.
    step_s: d, one decode step alone.
  """
  transfer_s = _transfer_s(int8_bytes, rate_gbps)
  return transfer_s / (prefill_s + transfer_s + step_s)


def rate_for_share(
  wanted: float, int8_bytes: int, *, prefill_s: float, step_s: float
) -> float:
  """Returns the rate in Gbit/s at which `share` is `wanted`, in (0, 1)."""
  if not 0 < wanted < 1:
    raise ValueError(f'share={wanted} must be between 0 and 1')
  transfer_s = wanted / (1 - wanted) * (prefill_s + step_s)
  return int8_bytes * 8 / transfer_s / 1e9


def _transfer_s(size_bytes: int, rate_gbps: float) -> float:
  return size_bytes * 8 / (rate_gbps * 1e9)
