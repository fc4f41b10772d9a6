# SPDX-License-Identifier: Apache-2.0
"""Makes links and channels fail on purpose, by a seeded plan.

It knows no policy: `RemotePrefill` has to cope, with these faults as with real
ones. Peers that die, stop or restart are somebody else's: a process is needed
for that.
"""

import collections
import enum
import random
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lynx_jax.config import require
from lynx_jax.transport import messages
from lynx_jax.transport.control import Channel
from lynx_jax.transport.links import Payload
from lynx_jax.transport.pull import Link, Pull
from lynx_jax.transport.streams import TransferError


class Fault(enum.Enum):
  """What can go wrong with one chunk or one announcement."""

  CORRUPT = 'corrupt'  # one bit of the payload flips
  LATE = 'late'  # the payload takes `late_s` longer
  LOST = 'lost'  # the payload never comes, as from a stopped peer
  BROKEN = 'broken'  # the pull ends in an error, as from a dead peer
  UNANNOUNCED = 'unannounced'  # the announcement never comes
  DUPLICATE = 'duplicate'  # the announcement comes twice
  REORDERED = 'reordered'  # the announcement comes after the next message
  STALE = 'stale'  # the announcement comes once more, of an older generation


_OF_PULLS = (Fault.CORRUPT, Fault.LATE, Fault.LOST, Fault.BROKEN)
_OF_MESSAGES = (
  Fault.UNANNOUNCED,
  Fault.DUPLICATE,
  Fault.REORDERED,
  Fault.STALE,
)


class Faults:
  """A plan: how likely each fault is, and how many there are at most.

  Args:
    seed: of the draws. They are made in the order of pulls and messages, which
      the threads' timing may change.
    chances: fault → probability, for every pull or announcement.
    most: faults in all; then everything goes well.
    late_s: how much later a late payload is.
  """

  def __init__(
    self,
    seed: int,
    chances: Mapping[Fault, float],
    *,
    most: int,
    late_s: float = 0.05,
  ):
    for fault, chance in chances.items():
      require(
        0 <= chance <= 1, f'chance of {fault.value}={chance} must be in 0..1'
      )
    self._random, self._chances = random.Random(seed), dict(chances)
    self._left, self.late_s = most, late_s
    self._lock = threading.Lock()
    self.made: collections.Counter[Fault] = collections.Counter()

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
        if self._random.random() < self._chances.get(fault, 0.0) and self._left:
          self._left -= 1
          self.made[fault] += 1
          return fault
    return None


class _FaultyLink:
  def __init__(self, link: Link, faults: Faults):
    self._link, self._faults = link, faults

  def pull(self, uuid: int, specs: Any) -> Pull:
    fault = self._faults.draw(_OF_PULLS)
    pulled = self._link.pull(uuid, specs)
    ready_s = time.monotonic()
    if fault is Fault.LATE:
      ready_s += self._faults.late_s
    return pulled if fault is None else _FaultyPull(pulled, fault, ready_s)

  def discard(self, uuid: int, specs: Any) -> Pull | None:
    return self._link.discard(uuid, specs)

  def reset(self) -> None:
    self._link.reset()

  def close(self) -> None:
    self._link.close()


class _FaultyPull:
  def __init__(self, pulled: Pull, fault: Fault, ready_s: float):
    self._pulled, self._fault, self._ready_s = pulled, fault, ready_s

  def ready(self) -> bool:
    if self._fault is Fault.LOST or time.monotonic() < self._ready_s:
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

  def receive(self, timeout_s: float) -> messages.Message | None:
    if self._ahead:
      return self._ahead.pop(0)
    message = self._channel.receive(timeout_s)
    if message is not None:
      self._ahead, self._behind = self._behind, []
    if not isinstance(message, messages.Published):
      return message
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
  width = jnp.uint8 if array.dtype.itemsize == 1 else jnp.uint16
  words = jax.lax.bitcast_convert_type(array, width).reshape(-1)
  words = words.at[words.size // 2].set(
    words[words.size // 2] ^ np.array(1, width)
  )
  return jax.lax.bitcast_convert_type(words.reshape(array.shape), array.dtype)
