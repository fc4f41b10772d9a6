# SPDX-License-Identifier: Apache-2.0
"""What a prefill server grants, without any prompt."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest

from lynx_jax import handshake, sender
from lynx_jax.prefill_server import PrefillServer
from lynx_jax.transport import control, messages
from tests import transfers

WIRE = transfers.FORMATS[0]
WAIT_S = 10.0


@contextlib.contextmanager
def _session(server: PrefillServer, fingerprint: str, **differs: Any):
  """Yields the channel of a new peer, and the server's answer."""
  channel = control.ClientChannel(f'127.0.0.1:{server.port}')
  hello = messages.Hello(
    version=messages.VERSION,
    facts=handshake.facts(WIRE, fingerprint),
    choices=handshake.choices(WIRE.engine),
    window_bytes=transfers.WINDOW_BYTES,
    pulls=False,
  )
  channel.send(dataclasses.replace(hello, **differs))
  yield channel, channel.receive(WAIT_S)
  channel.close()


def test_peers_share_the_memory():
  model = transfers.model()
  fingerprint = handshake.fingerprint(model)
  needed = handshake.sender_bytes(WIRE, transfers.WINDOW_BYTES)
  with contextlib.closing(
    PrefillServer(
      model, transfers.FORMATS, pull_host=None, memory_bytes=2 * needed - 1
    )
  ) as server:
    with _session(server, fingerprint) as (_, first):
      assert isinstance(first, messages.Welcome)
      with _session(server, fingerprint) as (_, second):
        assert second == messages.Refused(
          field=messages.MEMORY,
          sender=f'{needed - 1} bytes',
          receiver=f'{needed} bytes',
        )
    _until(lambda: not server.peers)
    with _session(server, fingerprint) as (_, third):
      assert isinstance(third, messages.Welcome)


@pytest.mark.parametrize(
  ('differs', 'field', 'receiver'),
  [
    (
      {'mesh': (3, 1, 1)},
      messages.MESH,
      'KV heads in 3 parts, each on 1 devices, in 1 processes',
    ),
    (
      {'mesh': (2, 2, 2)},
      messages.MESH,
      'KV heads in 2 parts, each on 2 devices, in 2 processes',
    ),
    ({'process': 1}, messages.PROCESS, 1),
  ],
)
def test_a_mesh_that_does_not_fit_is_refused_by_name(differs, field, receiver):
  model = transfers.model()
  server = PrefillServer(model, transfers.FORMATS, pull_host=None)
  fingerprint = handshake.fingerprint(model)
  with (
    contextlib.closing(server),
    _session(server, fingerprint, **differs) as (_, answer),
  ):
    assert isinstance(answer, messages.Refused)
    assert (answer.field, answer.receiver) == (field, receiver)
    error = control.HandshakeError(field, answer.sender, receiver)
  assert str(answer.sender) in str(error)
  assert str(receiver) in str(error)
  assert 'process' in str(error).rpartition(';')[-1]  # the remedy


def _until(condition: Callable[[], bool]) -> None:
  until_s = time.monotonic() + WAIT_S
  while not condition():
    assert time.monotonic() < until_s
    time.sleep(0.01)


def test_a_lack_of_memory_names_both_values_and_a_remedy():
  error = control.HandshakeError(messages.MEMORY, '5 bytes', '7 bytes')
  for part in ('5 bytes', '7 bytes', 'engine.slots', 'transfer.prefill_bytes'):
    assert part in str(error)


def test_a_transfer_server_serves_one_peer_after_the_other():
  model = transfers.model()
  fingerprint = handshake.fingerprint(model)
  server = PrefillServer(model, transfers.FORMATS)
  addresses = []
  with contextlib.closing(server):
    for _ in range(3):
      with _session(server, fingerprint, pulls=True) as (_, answer):
        assert isinstance(answer, messages.Welcome)
        addresses.append(answer.address)
      _until(lambda: bool(server._idle_servers))
  assert None not in addresses
  assert len({*addresses}) == 1


def test_a_warm_up_that_fails_ends_the_session(monkeypatch):
  """The peer, which waits for its end, must not wait for ever."""

  def fail(sender):
    raise MemoryError('no room')

  monkeypatch.setattr(sender.Sender, 'warm_up', fail)
  model = transfers.model()
  server = PrefillServer(model, transfers.FORMATS, pull_host=None)
  fingerprint = handshake.fingerprint(model)
  with (
    contextlib.closing(server),
    _session(server, fingerprint) as (channel, answer),
  ):
    assert isinstance(answer, messages.Welcome)
    channel.send(messages.WarmUp())
    with pytest.raises(control.PeerLost):
      channel.receive(WAIT_S)
