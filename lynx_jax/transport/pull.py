# SPDX-License-Identifier: Apache-2.0
"""Pulls arrays from another process, device to device.

It knows no chunk and no policy, and is the only module that calls the private
methods of `jax.experimental.transfer`:

- `_reset_rendevous_table`, since a published array cannot be taken back;
- `_poison_connection`, since a pull cannot be given up.

A pull of what was never published, or from a peer that has stopped, hangs for
ever: whoever holds a `Pull` keeps a deadline. Dtypes are not checked, nothing
is authenticated, and four zero bytes on the port abort the process, so the
server binds one private interface.
"""

import ipaddress
import secrets
from typing import Any, Protocol

import jax

from lynx_jax import config
from lynx_jax.transport.links import Payload
from lynx_jax.transport.streams import TransferError

_TRANSFER_BYTES = 4 * 2**20  # the defaults reserve 6 GiB of address space
_COPIES = 8


class Pull(Protocol):
  """Arrays on their way."""

  def ready(self) -> bool:
    """Whether `take` will not block."""

  def take(self) -> Payload:
    """Returns the arrays, once they are ready.

    Raises:
      TransferError: they will never come.
    """


class Source(Protocol):
  """The sender's end of a link to one peer."""

  def publish(self, payload: Payload) -> int:
    """Lets the peer fetch a payload once; returns the uuid to ask for."""

  def forget(self, uuid: int) -> None:
    """The peer has fetched it, or never will."""

  def reset(self) -> None:
    """Forgets everything that is published."""


class Link(Protocol):
  """The receiver's end of a link to one peer."""

  def pull(self, uuid: int, specs: Any) -> Pull:
    """Starts to fetch what was published; returns at once."""

  def discard(self, uuid: int, specs: Any) -> Pull | None:
    """Frees what was published; None if the sender can do so alone."""

  def reset(self) -> None:
    """Gives up all pulls and connects anew."""

  def close(self) -> None:
    """Gives up all pulls."""


def start_server(host: str) -> Any:
  """Starts a `TransferServer` for the default backend.

  Args:
    host: the numeric address of one private interface.

  Raises:
    ConfigError: it is a name, or every interface.
    Exception: what the runtime says where it has no transfer server.
  """
  try:
    address = ipaddress.ip_address(host)
  except ValueError as error:
    raise config.ConfigError(
      f'the transfer server needs a numeric address, not {host!r}'
    ) from error
  address = getattr(address, 'ipv4_mapped', None) or address
  config.require(
    not address.is_unspecified,
    f'{host} is every interface; the transfer server needs one of them',
  )
  from jax.experimental import transfer  # not on every platform

  place = f'[{host}]:0' if address.version == 6 else f'{host}:0'
  return transfer.start_transfer_server(
    jax.local_devices()[0].client, place, [place], _COPIES, _TRANSFER_BYTES
  )


class PullSource:
  """Publishes arrays on a transfer server that serves this peer alone."""

  def __init__(self, server: Any):
    self._server = server

  @property
  def address(self) -> str:
    return self._server.address()

  def publish(self, payload: Payload) -> int:
    uuid = secrets.randbits(62)
    self._server.await_pull(uuid, payload)
    return uuid

  def forget(self, uuid: int) -> None:
    del uuid  # the server let go of it when it was pulled

  def reset(self) -> None:
    self._server._reset_rendevous_table()


class PullLink:
  """Pulls from a peer's transfer server over one connection."""

  def __init__(self, server: Any, address: str):
    self._server, self._address = server, address
    self._connection = server.connect(address)

  def pull(self, uuid: int, specs: Any) -> Pull:
    return _Pulled(self._connection.pull(uuid, specs))

  def discard(self, uuid: int, specs: Any) -> Pull:
    return self.pull(uuid, specs)

  def reset(self) -> None:
    self.close()
    self._connection = self._server.connect(self._address)

  def close(self) -> None:
    self._connection._poison_connection()


class _Pulled:
  """Arrays of which some may be errors; these count as ready."""

  def __init__(self, arrays: Payload):
    self._arrays, self._waiting = arrays, jax.tree.leaves(arrays)

  def ready(self) -> bool:
    while self._waiting and self._waiting[-1].is_ready():
      self._waiting.pop()
    return not self._waiting

  def take(self) -> Payload:
    try:
      return jax.block_until_ready(self._arrays)
    except jax.errors.JaxRuntimeError as error:
      raise TransferError(f'a pull failed: {error}') from error
