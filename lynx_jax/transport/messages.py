# SPDX-License-Identifier: Apache-2.0
"""What the two sides tell each other on the control channel, and its bytes.

It knows no channel and no meaning. A message is a msgpack list: its name, then
its fields. Whatever does not fit is a `ProtocolError`, never a guess.

Times are seconds on the clock of the side that sends them, but for `…in_s`,
which count from now.
"""

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

import msgpack

from lynx_jax.transport.streams import TransferError

VERSION = 3
MAX_BYTES = 4 * 2**20  # a prompt of 128k tokens takes an eighth

# What `Refused.field` says beside the names of facts: a budget too small, a
# mesh that does not fit, another process of it.
MEMORY, MESH, PROCESS = 'free memory', 'mesh', 'process'

Scalar = int | float | str | bool | None
# KV heads are split in so many; each part lies on so many devices; processes.
Mesh = tuple[int, int, int]


class ProtocolError(TransferError):
  """Bytes that are no message, or a message at the wrong time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
  """The receiver's first message.

  Attributes:
    version: of the protocol.
    facts: name → value of everything that must be equal on both sides.
    choices: name → value of what the receiver decides about the transfers.
    window_bytes: most bytes that the sender may hold published for it.
    pulls: it has a transfer server and can pull device to device.
    mesh: how its devices divide the heads.
    process: which of the mesh's processes it is; it is served by the sender's
      process of this number, which holds the same heads.
  """

  version: int
  facts: dict[str, Scalar]
  choices: dict[str, Scalar]
  window_bytes: int
  pulls: bool
  mesh: Mesh = (1, 1, 1)
  process: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Welcome:
  """The sender agrees.

  Attributes:
    session: names this peer on the byte stream.
    lease_s: a peer that is silent for so long is gone.
    window_bytes: what the sender will hold at most.
    address: of its transfer server; None where bytes go over the fallback.
    probe: uuid of one array that can be pulled to try the link.
    mesh: how the sender's devices divide the heads.
  """

  session: str
  lease_s: float
  window_bytes: int
  address: str | None
  probe: int
  mesh: Mesh = (1, 1, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refused:
  """The sides do not fit: the sender's value of `field` and the receiver's."""

  field: str
  sender: Scalar
  receiver: Scalar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fallback:
  """The probe did not come: chunks shall go over the byte stream."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submit:
  """Prefill this prompt and publish its chunks.

  Attributes:
    request: id at the receiver.
    generation: raised with every new try of the request.
    prompt: token ids, i32 little-endian.
    manifest: hash of the manifest that the receiver expects.
    mode: when the transfer may start, a value of `requests.Mode`.
    deadline_in_s: orders requests; None is never.
    landed: (token chunk, sequence) of what an earlier generation brought.
    target: whether an exact plane shall follow, a value of `config.Target`.
    sampling: temperature, top-k, top-p, min-p and seed that token 1 is chosen
      with; greedy if left out.
  """

  request: int
  generation: int
  prompt: bytes
  manifest: str
  mode: str
  deadline_in_s: float | None
  landed: tuple[tuple[int, int], ...]
  target: str = 'planes'
  sampling: tuple[float, int, float, float, int] = (0.0, 0, 1.0, 0.0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drop:
  """The receiver needs nothing more of the request."""

  request: int
  generation: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
  """Chunks can be fetched.

  Attributes:
    request, generation: whose.
    prompt_tokens: P; with it the receiver can tell what a chunk looks like
      even if it has forgotten the request.
    epoch: counts resets; what was published before one is void.
    chunks: (token chunk, sequence, uuid, bytes, digest) of each.
    strings: (layer group, pages) of the exact string that each is a part of,
      no pages for any other chunk; or nothing at all.
  """

  request: int
  generation: int
  prompt_tokens: int
  epoch: int
  chunks: tuple[tuple[int, int, int, int, bytes], ...]
  strings: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Landed:
  """The receiver has these, or wants them no more: credit for others."""

  uuids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Again:
  """These came damaged: publish them anew, under other uuids."""

  uuids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reset:
  """The data connection was dropped: publish anew whatever has not landed."""

  epoch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
  """Closes a request's manifest (`prefill_done`).

  Attributes:
    request, generation: which.
    token: token 1.
    critical: (ready_s, bytes) of the chunks that the first token waits for.
    end_s: when prefill, and in serial mode split, had ended.
    spans: (phase, start_s, end_s, token chunk) of prefill and split.
  """

  request: int
  generation: int
  token: int
  critical: tuple[tuple[float, int], ...]
  end_s: float
  spans: tuple[tuple[str, float, float, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoded:
  """Closes the manifest of a request's exact plane.

  Attributes:
    request, generation: which.
    strings: (layer group, token chunk, pages) of each.
  """

  request: int
  generation: int
  strings: tuple[tuple[int, int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failed:
  """Nothing more of the request will come; `kind` names the exception."""

  request: int
  generation: int
  kind: str
  text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmUp:
  """Compile everything that transfers need; the answer is the same message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beat:
  """Renews the lease; the answer adds the sender's clock."""

  sent_s: float
  sender_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draining:
  """The sender ends after what it has; look for another one."""


Message = (
  Hello
  | Welcome
  | Refused
  | Fallback
  | Submit
  | Drop
  | Published
  | Landed
  | Again
  | Reset
  | Done
  | Encoded
  | Failed
  | WarmUp
  | Beat
  | Draining
)


def _checker(hint: Any) -> Callable[[Any], bool]:
  """Returns what tells whether a value out of msgpack is of a type."""
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    checks = tuple(map(_checker, inner))
    return lambda value: any(check(value) for check in checks)
  if origin is dict:
    key, item = map(_checker, inner)
    return lambda value: (
      isinstance(value, dict)
      and all(key(k) and item(v) for k, v in value.items())
    )
  if origin is tuple and inner[-1] is Ellipsis:
    each = _checker(inner[0])
    return lambda value: isinstance(value, tuple) and all(map(each, value))
  if origin is tuple:
    checks = tuple(map(_checker, inner))
    return lambda value: (
      isinstance(value, tuple)
      and len(value) == len(checks)
      and all(check(v) for check, v in zip(checks, value, strict=True))
    )
  if hint is types.NoneType:
    return lambda value: value is None
  exact = (int, float) if hint is float else (hint,)  # True is no int here
  return lambda value: type(value) in exact


_KINDS: dict[str, type[Message]] = {
  kind.__name__: kind for kind in typing.get_args(Message)
}
_CHECKS = {
  kind: {
    name: (hint, _checker(hint))
    for name, hint in typing.get_type_hints(kind).items()
  }
  for kind in _KINDS.values()
}


def encode(message: Message) -> bytes:
  """Returns the bytes of a message.

  Raises:
    ProtocolError: it is too large to be sent.
  """
  fields = [getattr(message, name) for name in _CHECKS[type(message)]]
  data = msgpack.packb([type(message).__name__, *fields])
  if len(data) > MAX_BYTES:
    raise ProtocolError(
      f'{type(message).__name__} of {len(data)} bytes; at most {MAX_BYTES}'
    )
  return data


def decode(data: bytes) -> Message:
  """Returns the message that `encode` made into `data`.

  Raises:
    ProtocolError: the bytes are something else.
  """
  if len(data) > MAX_BYTES:
    raise ProtocolError(f'{len(data)} bytes are no message: over {MAX_BYTES}')
  try:
    name, *values = msgpack.unpackb(data, use_list=False)
    kind = _KINDS[name]
  except Exception as error:  # whatever msgpack makes of junk
    raise ProtocolError(f'no message: {data[:16]!r}…') from error
  checks = _CHECKS[kind]
  if len(values) != len(checks):
    raise ProtocolError(f'{name} has {len(checks)} fields, not {len(values)}')
  for (field, (hint, fits)), value in zip(checks.items(), values, strict=True):
    if not fits(value):
      raise ProtocolError(f'{name}.{field}={str(value)[:80]} is no {hint}')
  return kind(**dict(zip(checks, values, strict=True)))
