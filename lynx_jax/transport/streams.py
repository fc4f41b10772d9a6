# SPDX-License-Identifier: Apache-2.0
"""The wire's vocabulary: units, slices, chunks and the manifest.

It knows no arrays, no clock, no order between requests and no link.

The cache of a request travels as segments, layer by layer:

| segment | positions | contents of one unit |
|---|---|---|
| sinks | [0, s), only if E > 0 | all s tokens, dense |
| prefix | [0, E) | one group of Q tokens: one packed plane, or dense |
| tail | [E, P) | a block of 16 rows from E, dense; the last one padded |
| exact | [0, E) | a page of a string |

Layers with a sliding window send neither sinks nor groups that no generated
token will see.

A *unit* is the smallest thing moved: all KV heads, K and V. Plane 0 of a group
carries the scales and offsets as well. Plane 0 and everything dense is the
Anchor, planes 1 and up are the Residual.

The exact plane comes last. Of every layer group and token chunk with prefix it
is one *string* (`exact.join`), whose length depends on the data: it is known
after split, so these chunks extend the manifest, and each says of how many
pages its string is.
"""

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lynx_jax import config

TAIL_BLOCK = 16  # rows: small enough that padding costs < 1 % at 2k tokens
DENSE_BYTES = 2  # bfloat16
METADATA_BYTES = 2  # bfloat16
# Of an exact string; half a page is lost at its end: 0.04 bits a value where
# 256 tokens of 3 layers with 3 heads of 64 channels make a string.
PAGE_BYTES = 2048


class TransferError(RuntimeError):
  """A transfer that did not go as its manifest says."""


class StaleChunk(TransferError):
  """The chunk belongs to another request, or to an older try of this one."""


class DuplicateChunk(TransferError):
  """The chunk has landed before."""


class UnexpectedChunk(TransferError):
  """The chunk carries units that the request does not (or no longer) miss."""


def raise_failed(error: BaseException | None) -> None:
  """Raises a `TransferError` for what ended a transfer's thread, if any."""
  if error is not None:
    raise TransferError(f'the transfer failed: {error}') from error


class Stream(enum.IntEnum):
  """Classes of priority; a lower value goes first."""

  ANCHOR = 0
  RESIDUAL = 1
  EXACT = 2


_NESTED = Stream.ANCHOR, Stream.RESIDUAL


class Segment(enum.Enum):
  SINKS = 'sinks'
  PREFIX = 'prefix'
  TAIL = 'tail'
  EXACT = 'exact'


class Unit(NamedTuple):
  """The smallest thing moved.

  `layer` counts inside the layer group. `index` is 0 for sinks, the absolute
  group number for the prefix, the row block from E for the tail, and the page
  of the string, which holds all layers (`layer` is 0), for the exact plane.
  """

  segment: Segment
  plane: int
  layer_group: int
  layer: int
  index: int  # type: ignore[assignment]  # hides tuple.index, not needed here

  @property
  def stream(self) -> Stream:
    if self.segment is Segment.EXACT:
      return Stream.EXACT
    return Stream.RESIDUAL if self.plane else Stream.ANCHOR


@dataclasses.dataclass(frozen=True)
class Slice:
  """Units of one segment, plane and layer group; their number is 2**n.

  Unit i lies at (`layers[i]`, `indices[i]`). Counts are powers of two so that
  the programs which cut and insert slices have few shapes.
  """

  segment: Segment
  plane: int
  layer_group: int
  layers: tuple[int, ...]
  indices: tuple[int, ...]

  def units(self) -> Iterator[Unit]:
    for layer, index in zip(self.layers, self.indices, strict=True):
      yield Unit(self.segment, self.plane, self.layer_group, layer, index)

  def moved(self, groups: int) -> 'Slice':
    """Returns the same slice so many groups further on."""
    if not groups:
      return self
    return Slice(
      self.segment,
      self.plane,
      self.layer_group,
      layers=self.layers,
      indices=tuple([index + groups for index in self.indices]),
    )


class _Pattern(NamedTuple):
  """What a token chunk holds of every layer: all that its cutting depends on.

  Attributes:
    sinks: whether they are in it, layer by layer; () is in none.
    groups: of the prefix.
    skipped: of those, how many the layer's window leaves out at the start; ()
      is none anywhere.
    blocks: of the tail.
  """

  sinks: tuple[bool, ...]
  groups: int
  skipped: tuple[int, ...]
  blocks: int


class ChunkKey(NamedTuple):
  """What tells a chunk from every other; `sequence` counts per token chunk."""

  request: int
  generation: int
  token_chunk: int
  sequence: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
  """One transfer: the grain of priority.

  Attributes:
    key: its identity. A retry of the same chunk has the same key; a new try of
      the whole request has a higher `generation`.
    stream: its class of priority. With `Order.INTERLEAVED` it is ANCHOR even
      where Residual units travel along, and with `Order.LAYERS` it is RESIDUAL
      where Anchor units do; the two byte counts stay true.
    layer_group: that of its first unit.
    slices: its contents, in manifest order of their first units.
    anchor_bytes, residual_bytes, exact_bytes: payload by the stream of its
      units.
    pages: of the whole string, where it carries some of them.
  """

  key: ChunkKey
  stream: Stream
  layer_group: int
  slices: tuple[Slice, ...]
  anchor_bytes: int
  residual_bytes: int
  exact_bytes: int = 0
  pages: int = 0

  @property
  def request(self) -> int:
    return self.key.request

  @property
  def token_chunk(self) -> int:
    return self.key.token_chunk

  @property
  def bytes(self) -> int:
    return self.anchor_bytes + self.residual_bytes + self.exact_bytes

  def units(self) -> Iterator[Unit]:
    for part in self.slices:
      yield from part.units()


class StreamBytes(NamedTuple):
  """Bytes on the wire, headers excluded."""

  anchor: int
  residual: int

  @property
  def total(self) -> int:
    return self.anchor + self.residual


class Bits(NamedTuple):
  """Bits a value: bytes on the wire * 8 / (P * 2 * L * K * H)."""

  prompt_tokens: int
  anchor: float
  total: float


class BitsRange(NamedTuple):
  """The prompt lengths at which the Anchor is cheapest and dearest."""

  best: Bits
  worst: Bits


@dataclasses.dataclass(frozen=True)
class WireFormat:
  """How caches of one (model, codec, engine) are cut into chunks.

  A pure function of its fields: sender and receiver compute the same.
  """

  model: config.ModelConfig
  codec: config.CodecConfig
  engine: config.EngineConfig

  def __post_init__(self):
    # Within a layer group all units of a plane must have one size.
    config.check_together(self.model, self.codec, self.engine)

  @functools.cached_property
  def layer_counts(self) -> tuple[int, ...]:
    """Number of layers of every layer group."""
    ranges = config.layer_ranges(self.model, self.engine)
    return tuple(stop - start for start, stop in ranges)

  def codecs(
    self, layer_group: int
  ) -> tuple[config.TensorCodec, config.TensorCodec]:
    """Returns the codecs (k, v) of a layer group."""
    ranges = config.layer_ranges(self.model, self.engine)
    return self.codec.of_layer(ranges[layer_group][0])

  def planes(self, layer_group: int) -> int:
    """Returns the number of planes; a dense prefix counts as one."""
    return max(1, *(len(t.planes) for t in self.codecs(layer_group)))

  def unit_bytes(self, segment: Segment, plane: int, layer_group: int) -> int:
    """Returns the size of a unit: both tensors, all heads, with metadata."""
    heads, dim = self.model.kv_heads, self.model.head_dim
    group = self.codec.group
    token = 2 * heads * dim * DENSE_BYTES
    if segment is Segment.EXACT:
      return PAGE_BYTES
    if segment is Segment.SINKS:
      return self.codec.sinks * token
    if segment is Segment.TAIL:
      return TAIL_BLOCK * token
    size = 0
    for tensor in self.codecs(layer_group):
      if not tensor.planes:
        size += group * token // 2
      elif plane < len(tensor.planes):
        size += heads * dim * tensor.planes[plane] // 8 * group
      if tensor.planes and plane == 0:
        along = dim if tensor.axis is config.Axis.CHANNEL else group
        size += 2 * heads * along * METADATA_BYTES  # scale and offset
    return size

  def first_token(
    self, layer_group: int, layer: int, prompt_tokens: int
  ) -> int:
    """Returns the first token of the prompt that a row of decode can see.

    The first row stands at P and sees from P - window + 1 on; no later one sees
    more. What stands before never travels.

    Args:
      layer_group: of the layer.
      layer: inside the group.
      prompt_tokens: P.
    """
    if self.model.local is None:
      return 0
    start, _ = config.layer_ranges(self.model, self.engine)[layer_group]
    window = self.model.window(start + layer)
    return max(0, prompt_tokens - window + 1) if window else 0

  def first_group(
    self, layer_group: int, layer: int, prompt_tokens: int
  ) -> int:
    """Returns the first group of the prefix that travels; see `first_token`."""
    return (
      self.first_token(layer_group, layer, prompt_tokens) // self.codec.group
    )

  def has_sinks(self, layer_group: int, layer: int, prompt_tokens: int) -> bool:
    """Returns whether the sinks of a layer travel."""
    first = self.first_token(layer_group, layer, prompt_tokens)
    return self.codec.prefix_end(prompt_tokens) > 0 and first < self.codec.sinks

  def token_chunks(self, prompt_tokens: int) -> int:
    """Returns ceil(P / C) + 1: the last, pseudo token chunk is the tail.

    With C = 256: P=1 → 2, P=256 → 2, P=257 → 3.
    """
    return math.ceil(prompt_tokens / self.engine.token_chunk) + 1

  def manifest(
    self,
    request: int,
    prompt_tokens: int,
    token_chunk: int,
    generation: int = 0,
  ) -> tuple[Chunk, ...]:
    """Returns the chunks of one token chunk, in manifest order.

    Chunks are filled to `engine.chunk_bytes`; only a single unit can be larger.
    They never cross a token chunk, so an overlapped transfer extends its
    manifest by calling this as prefill goes on; a serial one calls it for
    every token chunk at once.

    Args:
      request: id of the request.
      prompt_tokens: P, at least 1.
      token_chunk: 0 .. token_chunks(P) - 1; the last is the dense tail.
      generation: raised when a request's transfer starts anew.
    """
    count = self.token_chunks(prompt_tokens)
    if prompt_tokens < 1 or not 0 <= token_chunk < count:
      raise ValueError(
        f'token_chunk={token_chunk} must be in 0..{count - 1} and '
        f'prompt_tokens={prompt_tokens} at least 1'
      )
    pattern, first = self._pattern(prompt_tokens, token_chunk)
    if pattern not in self._cut:
      self._cut[pattern] = tuple(self._chunks(pattern))
    if (pattern, first) not in self._moved:
      self._moved[pattern, first] = tuple(
        tuple(part.moved(first) for part in chunk.slices)
        for chunk in self._cut[pattern]
      )
    return tuple(
      Chunk(
        key=ChunkKey(request, generation, token_chunk, chunk.key.sequence),
        stream=chunk.stream,
        layer_group=chunk.layer_group,
        slices=slices,
        anchor_bytes=chunk.anchor_bytes,
        residual_bytes=chunk.residual_bytes,
      )
      for chunk, slices in zip(
        self._cut[pattern], self._moved[pattern, first], strict=True
      )
    )

  def distinct(self, prompt_tokens: int) -> tuple[int, ...]:
    """Returns token chunks of which every other one is a shifted copy."""
    found: dict[_Pattern, int] = {}
    for token_chunk in range(self.token_chunks(prompt_tokens)):
      found.setdefault(
        self._pattern(prompt_tokens, token_chunk)[0], token_chunk
      )
    return tuple(found.values())

  @functools.cached_property
  def _cut(self) -> 'dict[_Pattern, tuple[Chunk, ...]]':
    """Token chunks cut before, as if their first group was group 0.

    A prompt of 131,072 tokens has 65,536 units; 128 token chunks of three
    patterns have them.
    """
    return {}

  @functools.cached_property
  def _moved(
    self,
  ) -> 'dict[tuple[_Pattern, int], tuple[tuple[Slice, ...], ...]]':
    """Slices of their chunks, by number of the first group."""
    return {}

  def _pattern(
    self, prompt_tokens: int, token_chunk: int
  ) -> 'tuple[_Pattern, int]':
    """Returns what a token chunk holds, and the number of its first group."""
    end = self.codec.prefix_end(prompt_tokens)
    if token_chunk == self.token_chunks(prompt_tokens) - 1:
      blocks = math.ceil((prompt_tokens - end) / TAIL_BLOCK)
      return _Pattern(sinks=(), groups=0, skipped=(), blocks=blocks), 0
    # C=256, Q=128, E=640: token chunk 0 → groups 0, 1; 2 → group 4; 3 → none
    size, group = self.engine.token_chunk, self.codec.group
    first = token_chunk * size // group
    groups = max(0, min((token_chunk + 1) * size, end) // group - first)
    places = [
      (layer_group, layer)
      for layer_group, layers in enumerate(self.layer_counts)
      for layer in range(layers)
    ]
    sinks: tuple[bool, ...] = ()
    if token_chunk == 0:
      sinks = tuple(self.has_sinks(*place, prompt_tokens) for place in places)
    skipped: tuple[int, ...] = ()
    if self._has_windows:
      skipped = tuple(
        min(max(0, self.first_group(*place, prompt_tokens) - first), groups)
        for place in places
      )
    return _Pattern(sinks, groups, skipped, blocks=0), first

  @functools.cached_property
  def _has_windows(self) -> bool:
    return any(map(self.model.window, range(self.model.layers)))

  def _units(self, pattern: '_Pattern') -> Iterator[Unit]:
    """Yields units in manifest order.

    The order is layer group, sinks before prefix, layer, index, plane.
    """
    start = 0  # number of the group's first layer
    for layer_group, layers in enumerate(self.layer_counts):
      for layer in range(layers):
        if pattern.sinks and pattern.sinks[start + layer]:
          yield Unit(Segment.SINKS, 0, layer_group, layer, 0)
      planes = range(self.planes(layer_group))
      for layer in range(layers):
        skipped = pattern.skipped[start + layer] if pattern.skipped else 0
        for index in range(skipped, pattern.groups):
          for plane in planes:
            yield Unit(Segment.PREFIX, plane, layer_group, layer, index)
        for index in range(pattern.blocks):
          yield Unit(Segment.TAIL, 0, layer_group, layer, index)
      start += layers

  def _chunks(self, pattern: '_Pattern') -> Iterator[Chunk]:
    """Yields the chunks of a pattern, as if of request 0 and token chunk 0."""
    units = list(self._units(pattern))
    if self.engine.order is config.Order.INTERLEAVED:
      queues = {Stream.ANCHOR: units}
    elif self.engine.order is config.Order.LAYERS:
      queues = {Stream.RESIDUAL: units}  # which goes layer group by layer group
    else:
      queues = {s: [u for u in units if u.stream is s] for s in _NESTED}
    unit_bytes = functools.cache(self.unit_bytes)
    sequence = itertools.count()
    for stream, queue in queues.items():
      for content in _fill(queue, unit_bytes, self.engine.chunk_bytes):
        sizes = [0, 0]
        for unit in content:
          sizes[unit.stream] += unit_bytes(*unit[:3])
        yield Chunk(
          key=ChunkKey(0, 0, 0, next(sequence)),
          stream=stream,
          layer_group=content[0].layer_group,
          slices=_slices(content),
          anchor_bytes=sizes[Stream.ANCHOR],
          residual_bytes=sizes[Stream.RESIDUAL],
        )

  def strings(self, prompt_tokens: int) -> tuple[tuple[int, int], ...]:
    """Returns (layer group, token chunk) of every exact string, in order."""
    if not self.codec.exact:
      return ()
    end = self.codec.prefix_end(prompt_tokens)
    return tuple(
      itertools.product(
        range(len(self.layer_counts)),
        range(math.ceil(end / self.engine.token_chunk)),
      )
    )

  def string_blocks(self, layer_group: int) -> tuple[int, int, int]:
    """Returns layers, KV heads and groups of a string, for K or V."""
    groups = self.engine.token_chunk // self.codec.group
    return self.layer_counts[layer_group], self.model.kv_heads, groups

  def most_pages(self, layer_group: int) -> int:
    """Returns the pages of a string whose blocks are all sent as they are."""
    blocks = 2 * math.prod(self.string_blocks(layer_group))
    units = blocks * (1 + self.codec.group * self.model.head_dim)
    return math.ceil(units * DENSE_BYTES / PAGE_BYTES)

  def exact_manifest(
    self,
    request: int,
    layer_group: int,
    token_chunk: int,
    pages: int,
    generation: int = 0,
  ) -> tuple[Chunk, ...]:
    """Returns the chunks of one exact string, in order of its pages.

    Args:
      request: id of the request.
      layer_group, token_chunk: of the string.
      pages: how many it has.
      generation: as in `manifest`.
    """
    most = self.most_pages(layer_group)
    if not 1 <= pages <= most:
      raise ValueError(f'{pages=} must be in 1..{most}')
    units = [Unit(Segment.EXACT, 0, layer_group, 0, i) for i in range(pages)]
    # Numbers that nothing else of the token chunk has: no string has 2^20
    # pages, which are 2 GB.
    first = (1 + layer_group) << 20
    runs = _fill(units, self.unit_bytes, self.engine.chunk_bytes)
    return tuple(
      Chunk(
        key=ChunkKey(request, generation, token_chunk, first + i),
        stream=Stream.EXACT,
        layer_group=layer_group,
        slices=_slices(content),
        anchor_bytes=0,
        residual_bytes=0,
        exact_bytes=len(content) * PAGE_BYTES,
        pages=pages,
      )
      for i, content in enumerate(runs)
    )

  def slice_counts(self) -> dict[tuple[Segment, int, int], tuple[int, ...]]:
    """Returns every unit count that a slice can have, for warm-up.

    Returns:
      (segment, plane, layer group) → ascending powers of two: at most
      log2(M) + 1 of them, M being the units that fit into one chunk.
    """
    codec, engine = self.codec, self.engine
    longest = min(codec.recent_tokens + codec.group - 1, engine.prompt_tokens)
    has_prefix = codec.prefix_end(engine.prompt_tokens) > 0
    counts = {}
    for layer_group, layers in enumerate(self.layer_counts):
      most = {(Segment.TAIL, 0): layers * math.ceil(longest / TAIL_BLOCK)}
      if has_prefix and codec.sinks:
        most[Segment.SINKS, 0] = layers
      if has_prefix:
        for plane in range(self.planes(layer_group)):
          groups = engine.token_chunk // codec.group
          most[Segment.PREFIX, plane] = layers * groups
      if has_prefix and codec.exact:
        most[Segment.EXACT, 0] = self.most_pages(layer_group)
      for (segment, plane), units in most.items():
        size = self.unit_bytes(segment, plane, layer_group)
        limit = min(units, max(1, engine.chunk_bytes // size))
        counts[segment, plane, layer_group] = tuple(
          2**n for n in range(limit.bit_length())
        )
    return counts

  def slice_kinds(self) -> Iterator[Slice]:
    """Yields a slice of every kind and count, for warm-up."""
    for kind, counts in self.slice_counts().items():
      for count in counts:
        yield Slice(*kind, layers=(0,) * count, indices=(0,) * count)

  def stream_bytes(self, prompt_tokens: int) -> StreamBytes:
    """Returns the bytes of a request, by stream, in closed form.

    Those of the exact plane are not among them: the data decides.
    """
    end = self.codec.prefix_end(prompt_tokens)
    groups = end // self.codec.group
    blocks = math.ceil((prompt_tokens - end) / TAIL_BLOCK)
    anchor = residual = 0
    for layer_group, layers in enumerate(self.layer_counts):
      sizes = [
        self.unit_bytes(Segment.PREFIX, plane, layer_group)
        for plane in range(self.planes(layer_group))
      ]
      anchor += layers * blocks * self.unit_bytes(Segment.TAIL, 0, layer_group)
      for layer in range(layers):
        if self.has_sinks(layer_group, layer, prompt_tokens):
          anchor += self.unit_bytes(Segment.SINKS, 0, layer_group)
        first = self.first_group(layer_group, layer, prompt_tokens)
        sent = max(0, groups - first)
        anchor += sent * sizes[0]
        residual += sent * sum(sizes[1:])
    return StreamBytes(anchor, residual)

  def bits_a_value(self, prompt_tokens: int) -> Bits:
    """Returns bits a value of the Anchor and of both streams."""
    m = self.model
    values = prompt_tokens * 2 * m.layers * m.kv_heads * m.head_dim
    size = self.stream_bytes(prompt_tokens)
    return Bits(
      prompt_tokens, size.anchor * 8 / values, size.total * 8 / values
    )

  def bits_range(self, shortest: int, longest: int) -> BitsRange:
    """Returns the best and worst prompt length in [shortest, longest]."""
    every = [self.bits_a_value(p) for p in range(shortest, longest + 1)]
    return BitsRange(
      min(every, key=lambda b: b.anchor), max(every, key=lambda b: b.anchor)
    )


def _fill(units: Iterable[Unit], unit_bytes, limit: int) -> list[list[Unit]]:
  """Cuts the queue into runs of at most `limit` bytes, or one large unit."""
  runs: list[list[Unit]] = []
  room = 0
  for unit in units:
    size = unit_bytes(*unit[:3])
    if not runs or size > room:
      runs.append([])
      room = limit
    runs[-1].append(unit)
    room -= size
  return runs


def _slices(units: Iterable[Unit]) -> tuple[Slice, ...]:
  """Gathers units by segment, plane, layer group; cuts to powers of two.

  13 units of one kind become slices of 8, 4 and 1.
  """
  kinds: dict[tuple[Segment, int, int], list[Unit]] = {}
  for unit in units:
    kinds.setdefault(unit[:3], []).append(unit)
  slices = []
  for kind, members in kinds.items():
    while members:
      count = 1 << (len(members).bit_length() - 1)
      taken, members = members[:count], members[count:]
      slices.append(
        Slice(
          *kind,
          layers=tuple(u.layer for u in taken),
          indices=tuple(u.index for u in taken),
        )
      )
  return tuple(slices)
