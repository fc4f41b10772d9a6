# SPDX-License-Identifier: Apache-2.0
"""Opens a session with a prefill server: handshake, clocks, a link that works.

It knows no request and keeps nothing: `remote_prefill` holds the session, and
mends what breaks.
"""

import time
from typing import Any

import jax
import numpy as np
from absl import logging

from lynx_jax.prefill_server import PROBE
from lynx_jax.programs import Read, fetch
from lynx_jax.transport import control, messages, pull
from lynx_jax.transport.byte_stream import ByteLink
from lynx_jax.transport.streams import TransferError

_PROBE_S = 5.0  # limit of the pull that tries out a transfer server
_CLOCK_BEATS = 4


def greet(
  channel: control.Channel, hello: messages.Hello, limit_s: float
) -> messages.Welcome:
  """Returns the server's answer.

  Raises:
    HandshakeError: the sides do not fit together.
    PeerLost: it does not answer in time.
    ProtocolError: it answers something else.
  """
  channel.send(hello)
  answer = channel.receive(limit_s)
  match answer:
    case messages.Welcome():
      return answer
    case messages.Refused(field=field, sender=sender, receiver=receiver):
      raise control.HandshakeError(field, sender, receiver)
    case None:
      raise control.PeerLost(f'no answer in {limit_s} s')
    case _:
      raise messages.ProtocolError(f'{type(answer).__name__} is no welcome')


def link(
  channel: control.Channel, welcome: messages.Welcome, server: Any, place: Any
) -> pull.Link:
  """Returns the link that works.

  Args:
    channel: of the session.
    welcome: what the prefill server has said.
    server: the process's transfer server; None fetches bytes.
    place: where a first array shall lie.
  """
  if server is not None and welcome.address is not None:
    try:
      found = pull.PullLink(server, welcome.address)
      _try_out(found, welcome.probe, place)
      return found
    except Exception as error:  # whatever the runtime says
      logging.warning(
        'transfer server %s does not serve (%s); chunks go as bytes',
        welcome.address,
        error,
      )
    channel.send(messages.Fallback())
  else:
    logging.info('chunks go as bytes: a side has no transfer server')
  return ByteLink(channel, welcome.session)


def _try_out(found: pull.PullLink, probe: int, place: Any) -> None:
  """Pulls one small array.

  Raises:
    TransferError: it does not come in time, or is another one.
  """
  specs = (jax.ShapeDtypeStruct(PROBE, np.uint8, sharding=place),)
  pulled = found.pull(probe, specs)
  until_s = time.monotonic() + _PROBE_S
  while not pulled.ready():
    if time.monotonic() > until_s:
      found.close()
      raise TransferError(f'no answer in {_PROBE_S} s')
    time.sleep(0.001)
  (values,) = fetch(pulled.take(), Read.TRANSFER)
  if values.tolist() != [*range(PROBE[0])]:
    raise TransferError(f'it sent {values.tolist()}')


def compare_clocks(
  channel: control.Channel, limit_s: float
) -> tuple[float, float]:
  """Returns the sender's clock less ours, and the round-trip time.

  Of several beats the fastest is used; the error is at most half of it.

  Raises:
    PeerLost: a beat is not answered in time.
  """
  found = []
  for _ in range(_CLOCK_BEATS):
    channel.send(messages.Beat(sent_s=time.monotonic()))
    answer = channel.receive(limit_s)
    now_s = time.monotonic()
    if not isinstance(answer, messages.Beat) or answer.sender_s is None:
      raise control.PeerLost(f'{answer!r} is no answer to a beat')
    rtt_s = now_s - answer.sent_s
    found.append((rtt_s, answer.sender_s - (answer.sent_s + now_s) / 2))
  rtt_s, offset_s = min(found)
  return offset_s, rtt_s
