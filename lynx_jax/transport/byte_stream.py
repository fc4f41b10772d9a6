# SPDX-License-Identifier: Apache-2.0
"""Moves payloads through the host, as bytes on a stream of the control channel.

The way where transfer servers cannot work. It knows no chunk and no policy; a
`Source` and a `Link` like those of `pull`.

The receiver sends uuids of 8 bytes, little-endian. The sender answers each
with frames, in order: the uuid, then at most 1 MiB of the arrays' bytes. A
frame without bytes says that it has no such payload.
"""

import queue
import secrets
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from lynx_jax.programs import Read, fetch
from lynx_jax.transport.control import Channel
from lynx_jax.transport.links import Payload
from lynx_jax.transport.pull import Pull
from lynx_jax.transport.streams import TransferError

_FRAME_BYTES = 2**20
_UUID = struct.Struct('<Q')


class ByteSource:
  """Keeps published payloads until they are fetched; thread-safe."""

  def __init__(self):
    self._payloads: dict[int, Payload] = {}

  def publish(self, payload: Payload) -> int:
    uuid = secrets.randbits(62)
    self._payloads[uuid] = payload
    return uuid

  def forget(self, uuid: int) -> None:
    self._payloads.pop(uuid, None)

  def reset(self) -> None:
    self._payloads.clear()

  def frames(self, requests: Iterable[bytes]) -> Iterator[bytes]:
    """Answers the peer's requests; runs until they end."""
    for request in requests:
      if len(request) != _UUID.size:
        raise TransferError(f'{request[:16]!r} is no uuid')
      payload = self._payloads.pop(_UUID.unpack(request)[0], None)
      if payload is None:
        yield request
        continue
      # Small arrays share a frame: a slice has up to six of them.
      frame = bytearray(request)
      for array in jax.tree.leaves(fetch(payload, Read.TRANSFER)):
        view = _view(array)
        while len(view):
          room = _UUID.size + _FRAME_BYTES - len(frame)
          frame += view[:room]
          view = view[room:]
          if len(frame) == _UUID.size + _FRAME_BYTES:
            yield bytes(frame)
            frame = bytearray(request)
      if len(frame) > _UUID.size:
        yield bytes(frame)


class ByteLink:
  """Fetches payloads over a session's stream of bytes."""

  def __init__(self, channel: Channel, session: str):
    self._channel, self._session = channel, session
    self._lock = threading.Lock()
    self._open()

  def pull(self, uuid: int, specs: Any) -> Pull:
    fetched = _Fetched(specs)
    with self._lock:
      if self._error is None:
        self._fetched[uuid] = fetched
        self._requests.put(_UUID.pack(uuid))
      else:
        fetched.fail(self._error)
    return fetched

  def discard(self, uuid: int, specs: Any) -> None:
    del uuid, specs  # the sender forgets it when told that it has landed

  def reset(self) -> None:
    self.close()
    self._open()

  def close(self) -> None:
    with self._lock:
      lost = [*self._fetched.values()]
      self._fetched.clear()
      self._requests.put(None)
    for fetched in lost:
      fetched.fail(TransferError('the stream of bytes was given up'))

  def _open(self) -> None:
    # A thread of an earlier stream keeps the dictionary that it was given.
    self._fetched: dict[int, _Fetched] = {}
    self._error: Exception | None = None
    self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    frames = self._channel.fetch(self._session, iter(self._requests.get, None))
    threading.Thread(
      target=self._read,
      args=(frames, self._fetched),
      name='lynx-bytes',
      daemon=True,
    ).start()

  def _read(self, frames: Iterator[bytes], fetched: dict) -> None:
    error: Exception = TransferError('the stream of bytes ended')
    try:
      for frame in frames:
        (uuid,) = _UUID.unpack_from(frame)
        with self._lock:
          part = fetched.get(uuid)
        if part is not None and part.add(memoryview(frame)[_UUID.size :]):
          with self._lock:
            fetched.pop(uuid, None)
    except Exception as broken:
      error = broken
    with self._lock:
      if fetched is self._fetched:
        self._error = error
      lost = [*fetched.values()]
      fetched.clear()
    for part in lost:
      part.fail(error)


class _Fetched:
  """A payload that is put together of frames."""

  def __init__(self, specs: Any):
    self._specs = specs
    leaves = jax.tree.leaves(specs)
    self._sizes = [spec.size * spec.dtype.itemsize for spec in leaves]
    self._bytes = bytearray(sum(self._sizes))
    self._filled = 0
    self._error: Exception | None = None
    self._ready = threading.Event()

  def add(self, data: memoryview) -> bool:
    """Takes in a frame; returns whether it was the last."""
    end = self._filled + len(data)
    if not len(data):
      self.fail(TransferError('the sender has no such payload'))
    elif end > len(self._bytes):
      self.fail(TransferError(f'more than {len(self._bytes)} bytes came'))
    else:
      self._bytes[self._filled : end] = data
      self._filled = end
      if end == len(self._bytes):
        self._ready.set()
    return self._ready.is_set()

  def fail(self, error: Exception) -> None:
    if not self._ready.is_set():
      self._error = error
      self._ready.set()

  def ready(self) -> bool:
    return self._ready.is_set()

  def take(self) -> Payload:
    if self._error is not None:
      raise TransferError(f'a fetch failed: {self._error}') from self._error
    leaves, structure = jax.tree.flatten(self._specs)
    arrays, start = [], 0
    for spec, size in zip(leaves, self._sizes, strict=True):
      values = np.frombuffer(self._bytes, spec.dtype, spec.size, start)
      arrays.append(jax.device_put(values.reshape(spec.shape), spec.sharding))
      start += size
    return jax.block_until_ready(jax.tree.unflatten(structure, arrays))


def _view(array: np.ndarray) -> memoryview:
  """Returns the bytes; NumPy gives no memoryview of bfloat16."""
  return np.ravel(array).view(np.uint8).data
