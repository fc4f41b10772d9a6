# SPDX-License-Identifier: Apache-2.0
"""The prefill side goes on decoding over its own KV until decode takes over.

A baseline with `Drafter.PREFILL`: while a prompt's KV is on its way, the side
that has it decodes, and sends token by token. Its programs, their shapes and
the KV are those of decode, so that its tokens are what decode would commit.
Decode confirms them in verifications once it has the KV, and has taken over
with the first token that it commits ahead of them.
"""

from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from lynx_jax import kv_cache
from lynx_jax import mesh as mesh_lib
from lynx_jax import wire as wire_lib
from lynx_jax.config import CodecConfig, layer_ranges, require
from lynx_jax.models import cached
from lynx_jax.models.transformer import Transformer
from lynx_jax.prefill import Prompt
from lynx_jax.programs import fetch
from lynx_jax.requests import Request
from lynx_jax.speculative import decode
from lynx_jax.speculative import slots as slots_lib
from lynx_jax.transport.streams import Chunk, Slice, WireFormat

_SLOT = 0  # the others give the programs the shapes that decode's have


def check(codec: CodecConfig, prefill: Mesh, decode: Mesh) -> None:
  """Raises `ConfigError` unless prefill decodes what decode would, bit by bit.

  Args:
    codec: of the transfers.
    prefill, decode: meshes of the sides.
  """
  require(
    not codec.is_progressive,
    'engine.drafter=prefill needs a codec of one plane or none: what the '
    'prefill side decodes is final, and must not wait for a verification',
  )
  require(
    not codec.generated,
    'engine.drafter=prefill needs codec.generated=False',
  )
  shapes = dict(prefill.shape), dict(decode.shape)
  require(
    shapes[0] == shapes[1] and shapes[1][mesh_lib.DATA] == 1,
    'engine.drafter=prefill needs sides of equal meshes, one row of data each, '
    f'not {shapes[0]} and {shapes[1]}: sums over other devices round in '
    'another way',
  )


class Continuation:
  """Decodes one request at a time with the devices of prefill.

  It holds a cache of the size of decode's.

  Args:
    model: placed where prefill runs.
    wire: format of the transfers.
    end_tokens: ids after which nothing follows.
  """

  def __init__(
    self, model: Transformer, wire: WireFormat, end_tokens: Sequence[int]
  ):
    engine = wire.engine
    graphs, self._params = cached.split(model)
    mesh = mesh_lib.of(self._params)
    self._wire, self._to = wire, wire_lib.destination(mesh)
    self._decoder = decode.Decoder(
      graphs,
      layer_ranges(model.config, engine),
      rows=engine.verify_rows,
      end_tokens=end_tokens,
      implementation=engine.implementation,
      mesh=mesh_lib.if_several(mesh),
    )
    self._cache = kv_cache.allocate(model.config, wire.codec, engine, mesh)
    self._slots = jax.device_put(
      slots_lib.of(engine), mesh_lib.place(mesh, mesh_lib.spec('B'))
    )
    self._wanted = np.arange(engine.slots) == _SLOT

  def warm_up(self, parts: Iterable[tuple[Slice, wire_lib.Parts]]) -> None:
    """Compiles what requests need, given a payload of every kind."""
    for part, arrays in parts:
      self._insert(part, arrays)
    zeros = Prompt(tokens=1, prefix_tokens=0, kv=(), token=0)
    request = Request(prompt=(0,), output_tokens=2)
    next(self.tokens(request, zeros, ()), None)

  def _insert(self, part: Slice, arrays: wire_lib.Parts) -> None:
    (arrays,) = jax.device_put((arrays,), self._to((arrays,)))
    self._cache = wire_lib.insert(self._wire, self._cache, _SLOT, part, arrays)

  def tokens(
    self,
    request: Request,
    computed: Prompt,
    payloads: Iterable[tuple[Chunk, Sequence[wire_lib.Parts]]],
  ) -> Iterator[list[int]]:
    """Yields the tokens that follow token 1, those of a step at a time.

    Only the iterator that was started last may be used.

    Args:
      request: what to decode, and how long.
      computed: its prompt.
      payloads: every chunk of it.
    """
    for chunk, payload in payloads:
      for part, arrays in zip(chunk.slices, payload, strict=True):
        self._insert(part, arrays)
    self._slots = self._decoder.place(
      self._slots,
      np.int32(_SLOT),
      np.int32(computed.prefix_tokens),
      np.int32(computed.tokens),
      np.int32(computed.token),
      np.int32(request.output_tokens),
      self._decoder.end_tokens,
      request.sampling.row(),
    )
    known, left = 1, request.output_tokens - 1
    while left:
      self._cache, self._slots = self._decoder.verify(
        self._params, self._cache, self._slots, self._wanted
      )
      state = fetch(self._slots)
      count, left = int(state.n_out[_SLOT]), state.remaining[_SLOT]
      yield state.out[_SLOT, known:count].tolist()
      known = count
