# SPDX-License-Identifier: Apache-2.0
"""Sends as many bytes as a cache takes over the emulated link.

It knows no cache and no format: what is sent of a size are zeros, in chunks, by
the courier that carries our own. Every transfer has a link to itself, so that
many run side by side, each in real time.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from lynx_jax.config import require
from lynx_jax.transport.courier import Courier
from lynx_jax.transport.links import EmulatedLink
from lynx_jax.transport.scheduler import Scheduler
from lynx_jax.transport.streams import Chunk, ChunkKey, Stream

_WAIT_S = 1.0  # an error of a courier shows after so long


def seconds(
  sizes: Mapping[str, int],
  *,
  rate_gbps: float,
  rtt_ms: float,
  chunk_bytes: int,
) -> dict[str, float]:
  """Returns how long each transfer took, until its last byte was seen.

  Args:
    sizes: bytes of each, by name.
    rate_gbps, rtt_ms: of every link.
    chunk_bytes: of a chunk at most.

  Raises:
    ConfigError: a size is not positive.
    TransferError: a transfer failed.
  """
  device = jax.devices()[0]
  with contextlib.ExitStack() as stack:
    start_s = time.monotonic()
    couriers, left = {}, {}
    for name, size in sizes.items():
      require(size > 0, f'{name}: {size} bytes cannot be sent; take 1 or more')
      link = EmulatedLink(device, rate_gbps=rate_gbps, rtt_ms=rtt_ms)
      couriers[name] = stack.enter_context(Courier(Scheduler(0), link, _zeros))
      chunks = [*_chunks(size, chunk_bytes)]
      couriers[name].offer(chunks, arrival_s=start_s, ready_s=start_s)
      left[name] = len(chunks)
    seen_s = {}
    for name, courier in couriers.items():
      while left[name]:
        courier.wait(_WAIT_S)
        for arrival in courier.arrived():
          left[name] -= 1
          seen_s[name] = arrival.arrived_s - start_s
  return seen_s


def _chunks(size: int, most: int) -> Iterator[Chunk]:
  for sequence, start in enumerate(range(0, size, most)):
    yield Chunk(
      key=ChunkKey(request=0, generation=0, token_chunk=0, sequence=sequence),
      stream=Stream.ANCHOR,
      layer_group=0,
      slices=(),
      anchor_bytes=min(most, size - start),
      residual_bytes=0,
    )


def _zeros(chunk: Chunk) -> np.ndarray:
  return np.zeros(chunk.bytes, np.uint8)
