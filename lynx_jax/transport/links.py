# SPDX-License-Identifier: Apache-2.0
"""Links move payloads between devices, at once or at an emulated rate.

They know no policy, no chunk and no thread: a payload is a pytree of arrays.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax

from lynx_jax import config

Payload = Any  # a pytree: for a chunk, a tuple of arrays for every slice


@dataclasses.dataclass(frozen=True)
class Flight:
  """A payload on its way.

  Attributes:
    payload: the arrays at the destination; perhaps not ready yet.
    start_s: when its first bit went on the link.
    end_s: when the link is free again, unless the copy takes longer.
    latency_s: from `end_s` to the receiver.
  """

  payload: Payload
  start_s: float
  end_s: float
  latency_s: float


class Link(Protocol):
  """What carries one payload at a time."""

  @property
  def free_s(self) -> float:
    """When it can take the next payload, once the last copy has ended."""

  @property
  def latency_s(self) -> float:
    """One way, from the end of a payload to the receiver."""

  def send(self, payload: Payload, size_bytes: int, ready_s: float) -> Flight:
    """Starts to move the payload, which is ready since `ready_s`."""


class DeviceLink:
  """Copies to a destination inside one runtime, as fast as it goes.

  Args:
    destination: what `jax.device_put` takes beside the payload (a device, a
      sharding, or a pytree of them), or a function of the payload that
      returns it.
  """

  latency_s = 0.0

  def __init__(self, destination: Any | Callable[[Payload], Any]):
    self._destination = destination

  @property
  def free_s(self) -> float:
    return time.monotonic()  # whoever asks has seen the last copy end

  def send(self, payload: Payload, size_bytes: int, ready_s: float) -> Flight:
    del size_bytes
    to = self._destination
    moved = jax.device_put(payload, to(payload) if callable(to) else to)
    return Flight(moved, start_s=ready_s, end_s=ready_s, latency_s=0.0)


class EmulatedLink:
  """Copies with an emulated rate and a round-trip time; needs no root.

  It keeps virtual time, so that a late wake-up is never lost rate:

      start = max(ready, end of the one before)
      end   = start + bytes * 8 / rate
      seen  = end + RTT / 2

  The real copy runs inside [start, end]; whoever waits for a flight must see
  that it has ended, so no payload is seen before it is really there.

  Args:
    destination: as for `DeviceLink`.
    rate_gbps: 1 is 10**9 bits a second.
    rtt_ms: round-trip time.
  """

  def __init__(
    self,
    destination: Any | Callable[[Payload], Any],
    rate_gbps: float,
    rtt_ms: float = 0.0,
  ):
    config.require(
      rate_gbps > 0,
      f'link rate_gbps={rate_gbps} must be positive, for example 0.1',
    )
    config.require(
      0 <= rtt_ms < math.inf, f'link rtt_ms={rtt_ms} must be 0 or more'
    )
    self._copy = DeviceLink(destination)
    self.free_s = -math.inf
    self.rate_gbps = rate_gbps
    self.rtt_ms = rtt_ms

  @property
  def latency_s(self) -> float:
    return self.rtt_ms / 2e3

  def send(self, payload: Payload, size_bytes: int, ready_s: float) -> Flight:
    start_s = max(ready_s, self.free_s)
    self.free_s = start_s + size_bytes * 8 / (self.rate_gbps * 1e9)
    copy = self._copy.send(payload, size_bytes, start_s)
    return dataclasses.replace(
      copy, end_s=self.free_s, latency_s=self.latency_s
    )
