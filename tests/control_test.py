# SPDX-License-Identifier: Apache-2.0
"""The control channel itself: who gets in, order, and how it ends."""

import contextlib
import pathlib
import socket
import subprocess
from collections.abc import Iterator

import pytest

from lynx_jax.config import ConfigError
from lynx_jax.transport import control, messages

ROOT = pathlib.Path(__file__).parents[1]
WAIT_S = 10.0
BEATS = [messages.Beat(sent_s=float(i)) for i in range(50)]


def _answer(channel: control.ServerChannel) -> None:
  with contextlib.suppress(control.PeerLost):
    while (message := channel.receive(WAIT_S)) is not None:
      channel.send(message)


def _echo(session: str, requests, cancel) -> Iterator[bytes]:
  del cancel
  for request in requests:
    yield session.encode() + request


@contextlib.contextmanager
def _served(
  theirs: control.Security | None = None, ours: control.Security | None = None
) -> Iterator[control.ClientChannel]:
  server, port = control.serve(_answer, _echo, 'localhost:0', theirs)
  channel = control.ClientChannel(f'localhost:{port}', ours)
  try:
    yield channel
  finally:
    channel.close()
    server.stop(grace=None).wait()


def _works(channel: control.ClientChannel) -> None:
  for beat in BEATS:
    channel.send(beat)
  assert [channel.receive(WAIT_S) for _ in BEATS] == BEATS
  assert list(channel.fetch('name', [b'1', b'2'])) == [b'name1', b'name2']


def _is_refused(channel: control.ClientChannel, why: str) -> None:
  channel.send(BEATS[0])
  with pytest.raises(control.PeerLost, match=why):
    channel.receive(WAIT_S)
  with pytest.raises(control.PeerLost, match=why):  # and stays so
    channel.receive(WAIT_S)
  with pytest.raises(control.PeerLost, match=why):
    list(channel.fetch('name', [b'1']))


def test_messages_come_in_order():
  with _served() as channel:
    _works(channel)
    assert channel.receive(0.01) is None


def test_a_server_that_ends_is_a_lost_peer():
  server, port = control.serve(_answer, _echo, '127.0.0.1:0')
  channel = control.ClientChannel(f'127.0.0.1:{port}')
  _works(channel)
  server.stop(grace=None).wait()
  with pytest.raises(control.PeerLost):
    channel.receive(WAIT_S)
  channel.close()


def test_where_nobody_listens_the_remedy_is_named():
  with socket.create_server(('127.0.0.1', 0)) as free:
    port = free.getsockname()[1]
  channel = control.ClientChannel(f'127.0.0.1:{port}')
  _is_refused(channel, f'{port}.*start prefill, or check the address')
  channel.close()


def test_a_port_serves_once():
  server, port = control.serve(_answer, _echo, '127.0.0.1:0')
  with pytest.raises(ConfigError, match='cannot be bound'):
    control.serve(_answer, _echo, f'127.0.0.1:{port}')
  server.stop(grace=None).wait()


def test_a_token_must_be_known():
  secret = control.Security(token='secret')
  with _served(secret, secret) as channel:
    _works(channel)
  for other in (None, control.Security(token='guess')):
    with _served(secret, other) as channel:
      _is_refused(channel, 'UNAUTHENTICATED')


@pytest.fixture(scope='module')
def signed(tmp_path_factory) -> control.Security:
  """A certificate of localhost that has signed itself."""
  folder = tmp_path_factory.mktemp('tls')
  subprocess.run(
    [
      *('openssl', 'req', '-x509', '-newkey', 'rsa:2048', '-nodes'),
      *('-keyout', folder / 'key', '-out', folder / 'certificate'),
      *('-subj', '/CN=localhost', '-addext', 'subjectAltName=DNS:localhost'),
    ],
    check=True,
    capture_output=True,
  )
  certificate = (folder / 'certificate').read_bytes()
  return control.Security(
    certificate=certificate,
    key=(folder / 'key').read_bytes(),
    authority=certificate,
  )


def test_tls_demands_certificates_of_both(signed):
  with _served(signed, signed) as channel:
    _works(channel)
  client = control.Security(authority=signed.authority)
  with _served(signed, client) as channel:
    _is_refused(channel, 'UNAVAILABLE')
  with _served(signed, None) as channel:
    _is_refused(channel, 'UNAVAILABLE')
  open_to_all = control.Security(certificate=signed.certificate, key=signed.key)
  with _served(open_to_all, client) as channel:
    _works(channel)


def test_half_a_certificate_is_refused(signed):
  with pytest.raises(ConfigError, match='one of them is missing'):
    control.Security(certificate=signed.certificate)


def test_an_authority_alone_is_no_open_door(signed):
  """Nobody can be asked for a certificate where nothing is encrypted."""
  alone = control.Security(authority=signed.authority)
  with pytest.raises(ConfigError, match='needs a certificate and its key'):
    control.serve(_answer, _echo, '127.0.0.1:0', alone)


def test_files_that_are_no_certificate_are_named():
  junk = control.Security(certificate=b'junk', key=b'junk')
  with pytest.raises(ConfigError, match='look at the PEM files'):
    control.serve(_answer, _echo, '127.0.0.1:0', junk)
