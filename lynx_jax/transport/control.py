# SPDX-License-Identifier: Apache-2.0
"""The control channel over gRPC: messages both ways, and a stream of bytes.

It knows no request: `messages` says what is said, and who uses a channel what
it means. It binds loopback unless an interface is named.
"""

import dataclasses
import hmac
import ipaddress
import queue
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any, Protocol

import grpc

from lynx_jax import config
from lynx_jax.transport import messages
from lynx_jax.transport.streams import TransferError

MAX_PEERS = 32
_SESSION = '/lynx.Prefill/Session'
_FETCH = '/lynx.Prefill/Fetch'
_TOKEN = 'authorization'
_FRAME_SLACK_BYTES = 4096
_PORT_DIGITS, _LAST_PORT = 5, 2**16 - 1
_OPTIONS = (
  ('grpc.max_receive_message_length', messages.MAX_BYTES + _FRAME_SLACK_BYTES),
  ('grpc.max_send_message_length', messages.MAX_BYTES + _FRAME_SLACK_BYTES),
  ('grpc.so_reuseport', 0),  # a second server on the port is a mistake
  ('grpc.enable_http_proxy', 0),
)


_REMEDIES = {
  messages.MEMORY: (
    'use fewer engine.slots or shorter prompts, or give prefill more '
    'transfer.prefill_bytes'
  ),
  messages.MESH: (
    'start prefill and decode with as many processes each, on meshes that '
    'divide the KV heads, and prefill again on the mesh that it had'
  ),
  messages.PROCESS: (
    'let every decode process connect to the prefill process of its number'
  ),
}


class PeerLost(TransferError):
  """The other side has gone, is silent, or cannot be reached."""


class HandshakeError(TransferError):
  """The two sides do not fit together.

  Attributes:
    field: what differs.
    sender, receiver: its value on either side.
  """

  def __init__(self, field: str, sender: Any, receiver: Any):
    remedy = _REMEDIES.get(field, 'start both with one config')
    super().__init__(
      f'prefill and decode differ in {field}: prefill has {sender!r}, decode '
      f'{receiver!r}; {remedy}'
    )
    self.field, self.sender, self.receiver = field, sender, receiver


@dataclasses.dataclass(frozen=True, kw_only=True)
class Security:
  """Who may connect, and whether the channel is encrypted.

  Payloads of the transfer server are neither: it has no authentication.

  Attributes:
    token: both sides must know it; None lets everybody in.
    certificate, key: PEM of this side; None at a server means no TLS.
    authority: PEM of who signed the other side's certificate. A server that
      has it demands client certificates, and needs one of its own.
  """

  token: str | None = None
  certificate: bytes | None = None
  key: bytes | None = None
  authority: bytes | None = None

  def __post_init__(self):
    config.require(
      (self.certificate is None) == (self.key is None),
      'TLS needs a certificate and its key; one of them is missing',
    )


class Channel(Protocol):
  """One peer: messages in order, both ways."""

  def send(self, message: messages.Message) -> None:
    """Queues a message; does nothing once the channel is closed."""

  def receive(self, timeout_s: float) -> messages.Message | None:
    """Returns the next message, or None if the time is over.

    Raises:
      PeerLost: the channel is closed, and everything was received.
    """

  def fetch(self, session: str, requests: Iterable[bytes]) -> Iterator[bytes]:
    """Opens the session's stream of bytes; iterating blocks.

    Raises:
      PeerLost: it broke.
    """

  def close(self) -> None:
    """Ends the channel; may be called twice."""


class _Queues:
  """Messages on their way in and out; the half that both sides share."""

  def __init__(self):
    self.outgoing: queue.SimpleQueue[messages.Message | None] = (
      queue.SimpleQueue()
    )
    self._incoming: queue.SimpleQueue[messages.Message | Exception] = (
      queue.SimpleQueue()
    )

  def send(self, message: messages.Message) -> None:
    self.outgoing.put(message)

  def receive(self, timeout_s: float) -> messages.Message | None:
    try:
      received = self._incoming.get(timeout=timeout_s)
    except queue.Empty:
      return None
    if isinstance(received, Exception):
      self._incoming.put(received)  # for whoever asks next
      raise PeerLost(str(received)) from received
    return received

  def read(self, source: Iterable[messages.Message]) -> None:
    """Takes in all messages of a source; its end is that of the channel."""
    try:
      for message in source:
        self._incoming.put(message)
      end: Exception = PeerLost('the other side closed the channel')
    except grpc.RpcError as error:
      end = _explained(error)
    except Exception as error:  # the server's iterator raises a plain one
      end = PeerLost(f'the channel broke: {error or type(error).__name__}')
    self._incoming.put(end)

  def close(self) -> None:
    self.outgoing.put(None)


class ServerChannel(_Queues):
  """A peer as the server sees it; `fetch` is the client's part."""

  def __init__(self, peer: str):
    super().__init__()
    self.peer = peer


def serve(
  on_peer: Callable[[ServerChannel], None],
  on_fetch: Callable[
    [str, Iterable[bytes], Callable[[], object]], Iterator[bytes]
  ],
  listen: str,
  security: Security | None = None,
) -> tuple[grpc.Server, int]:
  """Starts a server.

  Args:
    on_peer: runs in a thread of its own for every peer; the peer's channel is
      closed when it returns.
    on_fetch: given the session's name, the peer's requests and what breaks
      the stream off, yields bytes. A peer that has fallen silent leaves it
      open for ever.
    listen: ADDRESS:PORT; port 0 takes a free one.
    security: None is no TLS and no token.

  Returns:
    The server and its port.

  Raises:
    ConfigError: the address cannot be bound, or clients could not be asked for
      the certificates that `security` demands.
  """
  security = security or Security()
  config.require(
    security.authority is None or security.certificate is not None,
    'an authority asks peers for certificates, which takes TLS; prefill needs '
    'a certificate and its key as well',
  )
  check_interface(listen)

  def session(requests, context):
    channel = ServerChannel(context.peer())
    threads = [
      threading.Thread(target=channel.read, args=(requests,), daemon=True),
      threading.Thread(target=run, args=(channel,), daemon=True),
    ]
    for thread in threads:
      thread.start()
    try:
      yield from iter(channel.outgoing.get, None)
    finally:
      channel.close()

  def run(channel):
    try:
      on_peer(channel)
    finally:
      channel.close()

  def fetch(requests, context):
    metadata = dict(context.invocation_metadata())
    name = metadata.get('session', '')
    yield from on_fetch(name, requests, context.cancel)

  handlers = {
    'Session': grpc.stream_stream_rpc_method_handler(
      session, messages.decode, messages.encode
    ),
    'Fetch': grpc.stream_stream_rpc_method_handler(fetch),
  }
  server = grpc.server(
    futures.ThreadPoolExecutor(2 * MAX_PEERS, 'lynx-control'),
    handlers=[
      grpc.method_handlers_generic_handler('lynx.Prefill', handlers),
    ],
    interceptors=[_Doorkeeper(security.token)] if security.token else [],
    options=_OPTIONS,
    maximum_concurrent_rpcs=2 * MAX_PEERS,
  )
  try:
    if security.certificate is None:
      port = server.add_insecure_port(listen)
    else:
      port = server.add_secure_port(
        listen,
        grpc.ssl_server_credentials(
          [(security.key, security.certificate)],
          root_certificates=security.authority,
          require_client_auth=security.authority is not None,
        ),
      )
  except RuntimeError as error:
    files = '' if security.certificate is None else ', or look at the PEM files'
    raise config.ConfigError(
      f'--listen={listen} cannot be bound: {error}; choose another address or '
      f'port{files}'
    ) from error
  server.start()
  return server, port


class _Doorkeeper(grpc.ServerInterceptor):
  """Turns away whoever does not know the token."""

  def __init__(self, token: str):
    self._token = f'Bearer {token}'.encode()

  def intercept_service(self, continuation, details):
    given = dict(details.invocation_metadata).get(_TOKEN, '')
    if hmac.compare_digest(given.encode(), self._token):
      return continuation(details)

    def refuse(requests, context):
      del requests
      context.abort(grpc.StatusCode.UNAUTHENTICATED, 'wrong or missing token')

    return grpc.stream_stream_rpc_method_handler(refuse)


class ClientChannel(_Queues):
  """The client's end of a channel.

  Args:
    address: HOST:PORT of the server.
    security: None is no TLS and no token.
  """

  def __init__(self, address: str, security: Security | None = None):
    super().__init__()
    security = security or Security()
    if security.authority is None and security.certificate is None:
      self._grpc = grpc.insecure_channel(address, options=_OPTIONS)
    else:
      self._grpc = grpc.secure_channel(
        address,
        grpc.ssl_channel_credentials(
          security.authority, security.key, security.certificate
        ),
        options=_OPTIONS,
      )
    self._metadata: tuple[tuple[str, str], ...] = ()
    if security.token:
      self._metadata = ((_TOKEN, f'Bearer {security.token}'),)
    call = self._grpc.stream_stream(_SESSION, messages.encode, messages.decode)(
      iter(self.outgoing.get, None), metadata=self._metadata
    )
    threading.Thread(
      target=self.read, args=(call,), name='lynx-control', daemon=True
    ).start()

  def fetch(self, session: str, requests: Iterable[bytes]) -> Iterator[bytes]:
    """Opens the session's stream of bytes; see `Channel.fetch`."""
    call = self._grpc.stream_stream(_FETCH)(
      iter(requests), metadata=(*self._metadata, ('session', session))
    )
    try:
      yield from call
    except grpc.RpcError as error:
      raise _explained(error) from error

  def close(self) -> None:
    super().close()
    self._grpc.close()


def _explained(error: grpc.RpcError) -> PeerLost:
  code = error.code().name if isinstance(error, grpc.Call) else 'UNKNOWN'
  details = error.details() if isinstance(error, grpc.Call) else str(error)
  remedy = ''
  if 'refused' in (details or ''):
    remedy = '; nobody listens there: start prefill, or check the address'
  return PeerLost(f'{code}: {details}{remedy}')


def check_address(flag: str, address: str) -> None:
  """Refuses what is no ADDRESS:PORT; a name is looked up by whoever uses it.

  Raises:
    ConfigError: it names the flag.
  """
  host, colon, port = address.rpartition(':')
  digits = port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS
  config.require(
    bool(colon) and bool(host) and digits and int(port) <= _LAST_PORT,
    f'--{flag}={address!r} must be ADDRESS:PORT, for example 127.0.0.1:7000',
  )


def check_interface(listen: str) -> None:
  """Refuses to listen on every interface: one must be named.

  Raises:
    ConfigError: it does, or is no ADDRESS:PORT.
  """
  check_address('listen', listen)
  host, _, _ = listen.rpartition(':')
  try:
    # The system knows more spellings than `ipaddress`: 0 is one.
    found = socket.getaddrinfo(
      host.strip('[]'), None, flags=socket.AI_NUMERICHOST
    )
  except OSError:
    return  # a name
  address = ipaddress.ip_address(found[0][4][0])
  address = getattr(address, 'ipv4_mapped', None) or address
  config.require(
    not address.is_unspecified,
    f'--listen={listen} is every interface; name one of them, since payloads '
    'are not authenticated',
  )
