# SPDX-License-Identifier: Apache-2.0
"""What a scheme's decode side reads of a prompt, as a dense float32 cache.

It knows no task and no figure. A scheme has one *reading*, or two if it is
speculative: its Anchor, and all of its planes. One program then decodes over
any of them, and what differs between two outputs is what was read.

A reading is encoded and decoded for real: that of `lynx_exact` goes through
the exact plane. Where two are equal bit by bit (that one and bf16, lynx and
int8 if the codec nests as it should), `same_as` says so, and one need not be
decoded over again.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments import forcing, peer_formulas
from experiments.forcing import Layers, Texts
from experiments.schemes import Scheme
from lynx_jax import codec as codec_lib
from lynx_jax import exact
from lynx_jax.config import EngineConfig, TensorCodec, require
from lynx_jax.programs import fetch, program
from lynx_jax.shapes import Array, BFloat16, Bool
from lynx_jax.transport.streams import DENSE_BYTES, PAGE_BYTES, WireFormat

REFERENCE = 'bf16'
PEER = 'peer'  # target of a reading that is a formula of others
ANCHOR = '_anchor'  # ends the name of an Anchor's reading


@dataclasses.dataclass(frozen=True)
class Reading:
  """One way to read the prompts.

  Attributes:
    name: `bf16`, `lynx_anchor`, `lynx`, …
    target: as in records, `dense`, `planes:k` or `exact`; or PEER.
    kv: keys and values of every layer.
    bits: a value of what must have arrived for it, a prompt.
    same_as: an earlier reading that is equal bit by bit, or None.
  """

  name: str
  target: str
  kv: Layers = dataclasses.field(repr=False)
  bits: tuple[float, ...]
  same_as: str | None


def names(schemes: Sequence[Scheme], peers: Sequence[str] = ()) -> list[str]:
  """Returns the names of the readings, bf16 first.

  Raises:
    ConfigError: bf16 is not among the schemes.
  """
  return [*(name for name, _, _ in _views(schemes)), *peers]


def readings(
  texts: Texts,
  schemes: Sequence[Scheme],
  engine: EngineConfig,
  peers: Sequence[str] = (),
) -> Iterator[Reading]:
  """Yields all readings, one at a time: each takes as much as a cache.

  Args:
    texts: the prompts.
    schemes: bf16 among them.
    engine: how layers and tokens are grouped on the wire.
    peers: of `peer_formulas.FORMULAS`.
  """
  seen: dict[bytes, str] = {}
  for name, scheme, depth in _views(schemes):
    codec = scheme.codec
    wire = WireFormat(texts.model, codec, engine)
    sizes = [wire.bits_a_value(int(n)) for n in texts.lengths]
    target = scheme.target
    if depth == 1:
      bits = [size.anchor for size in sizes]
      target = 'planes:1'
    else:
      bits = [size.total for size in sizes]
    if codec.exact:
      kv, exact_bytes = _read_exact(texts, wire)
      bits = [
        total * (1 + extra / wire.stream_bytes(int(n)).total)
        for total, extra, n in zip(
          bits, exact_bytes, texts.lengths, strict=True
        )
      ]
    else:
      kv = forcing.read(texts, codec, depth)
    first = seen.setdefault(_digest(kv), name)
    yield Reading(
      name, target, kv, tuple(bits), None if first == name else first
    )

  for name in peers:
    yield Reading(
      name, PEER, *_read_peer(texts, peer_formulas.FORMULAS[name]), None
    )


def _read_peer(
  texts: Texts, formula: peer_formulas.Formula
) -> tuple[Layers, tuple[float, ...]]:
  """Returns the prompts' KV through a published formula, and bits a value."""
  layers, sizes = [], np.zeros(len(texts.lengths))
  for layer, kv in enumerate(zip(texts.k, texts.v, strict=True)):
    both = []
    for x, is_k in zip(kv, (True, False), strict=True):
      values = fetch(x).astype(np.float32)
      for slot, tokens in enumerate(texts.lengths):
        coded = formula(values[slot, :tokens], is_k, layer, len(texts.k))
        values[slot, :tokens] = coded.values
        sizes[slot] += coded.bits
      both.append(jnp.asarray(np.swapaxes(values, 1, 2)))
    k, v = both
    layers.append((k, v))
  model = texts.model
  values_a_token = 2 * model.layers * model.kv_heads * model.head_dim
  bits = sizes / (texts.lengths * values_a_token)
  return tuple(layers), tuple(bits.tolist())


def _views(
  schemes: Sequence[Scheme],
) -> list[tuple[str, Scheme, int | None]]:
  """Returns name, scheme and planes (None is all) of every reading."""
  require(
    any(scheme.name == REFERENCE for scheme in schemes),
    f'scheme={",".join(s.name for s in schemes)!r} must have {REFERENCE} in '
    'it, with which all others are compared',
  )
  found: list[tuple[str, Scheme, int | None]] = []
  for scheme in sorted(schemes, key=lambda s: s.name != REFERENCE):
    if scheme.is_speculative and not scheme.codec.exact:
      found.append((scheme.name + ANCHOR, scheme, 1))
    found.append((scheme.name, scheme, None))
  return found


def _digest(kv: Layers) -> bytes:
  found = hashlib.blake2b()
  for x in jax.tree.leaves(kv):
    found.update(np.ascontiguousarray(fetch(x)).data)
  return found.digest()


def _read_exact(texts: Texts, wire: WireFormat) -> tuple[Layers, list[int]]:
  """Encodes and decodes exact planes.

  Returns:
    The prompts' KV, and the bytes of the exact plane, a prompt.
  """
  codec = wire.codec
  packed_tokens = forcing.packed_tokens(texts, codec)
  layers, classes = [], []
  for layer, kv in enumerate(zip(texts.k, texts.v, strict=True)):
    both = []
    for tensor, x in zip(codec.of_layer(layer), kv, strict=True):
      packed = _split_program(tensor, codec.group, codec.sinks)(x)
      plane = exact.encode(x, packed, sinks=codec.sinks)
      decoded = exact.decode(packed, plane, sinks=codec.sinks)
      both.append(_select_program()(x, decoded, packed_tokens))
      classes.append(fetch(plane.classes))
    k, v = both
    layers.append((k, v))
  counts = np.stack(classes).reshape(len(layers), 2, *classes[0].shape)
  sizes = [
    _exact_bytes(wire, counts[:, :, slot], int(tokens))
    for slot, tokens in enumerate(texts.lengths)
  ]
  return tuple(layers), sizes


def _exact_bytes(wire: WireFormat, classes: np.ndarray, tokens: int) -> int:
  """Returns the bytes of a prompt's strings, in whole pages as they travel.

  Args:
    wire: of the request.
    classes: i32[L, 2, K, n], of all blocks.
    tokens: P.
  """
  codec, total = wire.codec, 0
  values = codec.group * wire.model.head_dim
  starts = np.cumsum([0, *wire.layer_counts])
  chunk = wire.engine.token_chunk // codec.group
  end = codec.prefix_end(tokens) // codec.group
  for layer_group, token_chunk in wire.strings(tokens):
    layers = slice(*starts[layer_group : layer_group + 2])
    groups = slice(token_chunk * chunk, min((token_chunk + 1) * chunk, end))
    units = 2 * math.prod(wire.string_blocks(layer_group))
    for size_class in classes[layers, :, :, groups].flat:
      units += exact.units_of(int(size_class), values)
    total += -(-units * DENSE_BYTES // PAGE_BYTES) * PAGE_BYTES
  return total


@functools.cache
def _split_program(tensor: TensorCodec, group: int, sinks: int):
  def split(x: BFloat16[Array, 'B S K H']):
    return codec_lib.split(x, tensor, group=group, sinks=sinks)

  return program(split, name='split')


@functools.cache
def _select_program():
  def select(
    x: BFloat16[Array, 'B S K H'],
    decoded: BFloat16[Array, 'B S K H'],
    packed: Bool[Array, 'B S'],
  ):
    found = jnp.where(packed[:, :, None, None], decoded, x)
    return jnp.swapaxes(found.astype(jnp.float32), 1, 2)

  return program(select, name='read')
