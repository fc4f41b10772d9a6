# SPDX-License-Identifier: Apache-2.0
"""Makes links, channels and peers fail on purpose, by a seeded plan.

It knows no policy: `RemotePrefill` has to cope, with these faults as with real
ones. It owns no process: whoever does says how a peer dies or stops.
"""

import collections
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lynx_jax.transport import messages
from lynx_jax.transport.control import Channel
from lynx_jax.transport.fault_plan import Fault, FaultPlan, PeerFault, Step
from lynx_jax.transport.links import Payload
from lynx_jax.transport.pull import Link, Pull
from lynx_jax.transport.streams import TransferError

_OF_PULLS = (
  Fault.CORRUPT,
  Fault.LATE,
  Fault.LOST,
  Fault.BROKEN,
  Fault.STALLED,
)
_OF_MESSAGES = (
  Fault.UNANNOUNCED,
  Fault.DUPLICATE,
  Fault.REORDERED,
  Fault.STALE,
)


class Faults:
  """A plan under way; thread-safe.

  Args:
    plan: what shall go wrong.
    peer: makes the plan's fault of the peer; called once, from any thread, and
      must not block.

  Attributes:
    made: how often each fault has happened; the peer's is under `Step`.
  """

  def __init__(
    self, plan: FaultPlan, peer: Callable[[PeerFault], None] | None = None
  ):
    self.plan, self._peer = plan, peer
    self._random, self._left = random.Random(plan.seed), plan.most
    self._lock = threading.Lock()
    self._reached: collections.Counter[Step] = collections.Counter()
    self.made: collections.Counter[Fault | Step] = collections.Counter()

  def link(self, link: Link) -> Link:
    """Returns the link with the plan's faults."""
    return _FaultyLink(link, self)

  def channel(self, channel: Channel) -> Channel:
    """Returns the channel with the plan's faults in what it receives."""
    return _FaultyChannel(channel, self)

  def draw(self, kinds: tuple[Fault, ...]) -> Fault | None:
    """Returns the fault that happens now, if any."""
    with self._lock:
      for fault in kinds:
        chance = self.plan.chances.get(fault, 0.0)
        if self._random.random() < chance and self._left:
          self._left -= 1
          self.made[fault] += 1
          return fault
    return None

  def reach(self, step: Step) -> None:
    """Counts a step, and lets the peer's fault happen if it is due."""
    planned = self.plan.peer
    with self._lock:
      self._reached[step] += 1
      if planned is None or self._peer is None:
        return
      if (step, self._reached[step]) != (planned.step, planned.count):
        return
      self.made[step] += 1
    self._peer(planned)


class _FaultyLink:
  def __init__(self, link: Link, faults: Faults):
    self._link, self._faults = link, faults
    self.open_s = -float('inf')  # until then it stands still

  def pull(self, uuid: int, specs: Any) -> Pull:
    fault = self._faults.draw(_OF_PULLS)
    pulled = self._link.pull(uuid, specs)
    now_s = time.monotonic()
    plan, ready_s = self._faults.plan, now_s
    if fault is Fault.LATE:
      ready_s += plan.late_s
    if fault is Fault.STALLED:
      self.open_s = now_s + plan.stall_s
    self._faults.reach(Step.PULL)
    return _FaultyPull(self, pulled, fault, ready_s)

  def discard(self, uuid: int, specs: Any) -> Pull | None:
    return self._link.discard(uuid, specs)

  def reset(self) -> None:
    self._link.reset()

  def close(self) -> None:
    self._link.close()


class _FaultyPull:
  def __init__(
    self, link: _FaultyLink, pulled: Pull, fault: Fault | None, ready_s: float
  ):
    self._link, self._pulled = link, pulled
    self._fault, self._ready_s = fault, ready_s

  def ready(self) -> bool:
    not_before_s = max(self._ready_s, self._link.open_s)
    if self._fault is Fault.LOST or time.monotonic() < not_before_s:
      return False
    return self._pulled.ready()

  def take(self) -> Payload:
    payload = self._pulled.take()
    if self._fault is Fault.BROKEN:
      raise TransferError('a pull failed: broken on purpose')
    if self._fault is Fault.CORRUPT:
      leaves, structure = jax.tree.flatten(payload)
      return jax.tree.unflatten(structure, [_flip(leaves[0]), *leaves[1:]])
    return payload


class _FaultyChannel:
  def __init__(self, channel: Channel, faults: Faults):
    self._channel, self._faults = channel, faults
    # What comes next out of turn, and what comes after the next message.
    self._ahead: list[messages.Message] = []
    self._behind: list[messages.Message] = []

  def send(self, message: messages.Message) -> None:
    self._channel.send(message)
    if isinstance(message, messages.Submit):
      self._faults.reach(Step.SUBMIT)

  def receive(self, timeout_s: float) -> messages.Message | None:
    if self._ahead:
      return self._ahead.pop(0)
    message = self._channel.receive(timeout_s)
    if message is not None:
      self._ahead, self._behind = self._behind, []
    if isinstance(message, messages.Done):
      self._faults.reach(Step.DONE)
    if not isinstance(message, messages.Published):
      return message
    self._faults.reach(Step.PUBLISHED)
    match self._faults.draw(_OF_MESSAGES):
      case Fault.UNANNOUNCED:
        return None
      case Fault.DUPLICATE:
        self._ahead.append(message)
      case Fault.REORDERED:
        self._behind.append(message)
        return None
      case Fault.STALE:
        self._ahead.append(
          messages.Published(
            **vars(message) | {'generation': message.generation - 1}
          )
        )
    return message

  def fetch(self, session, requests):
    return self._channel.fetch(session, requests)

  def close(self) -> None:
    self._channel.close()


def _flip(array: jax.Array) -> jax.Array:
  """Returns the array with one bit flipped, where it lies."""
  width = jnp.dtype(f'uint{8 * array.dtype.itemsize}')
  words = jax.lax.bitcast_convert_type(array, width).reshape(-1)
  words = words.at[words.size // 2].set(
    words[words.size // 2] ^ np.array(1, width)
  )
  return jax.lax.bitcast_convert_type(words.reshape(array.shape), array.dtype)
