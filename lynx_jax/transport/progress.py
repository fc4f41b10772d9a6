# SPDX-License-Identifier: Apache-2.0
"""What has landed of a request, counted against what its wire format says.

It knows no arrays, no clock and no link.
"""

import math

from lynx_jax import config
from lynx_jax.transport.streams import (
  PAGE_BYTES,
  TAIL_BLOCK,
  Chunk,
  ChunkKey,
  DuplicateChunk,
  StaleChunk,
  Stream,
  UnexpectedChunk,
  WireFormat,
)


class Progress:
  """What has landed of one request; chunks may come in any order.

  It counts units against what the wire format says the request has, so it
  needs no manifest and serves one that is still being extended.

  Args:
    wire: format of the transfer.
    request: id of the request.
    prompt_tokens: P.
    generation: of the request's transfer.
    target: PLANES expects no exact plane.
  """

  def __init__(
    self,
    wire: WireFormat,
    request: int,
    prompt_tokens: int,
    generation: int = 0,
    target: config.Target = config.Target.PLANES,
  ):
    self._request, self._generation = request, generation
    self._group = wire.codec.group
    self._landed: set[ChunkKey] = set()
    end = wire.codec.prefix_end(prompt_tokens)
    groups = end // self._group
    blocks = math.ceil((prompt_tokens - end) / TAIL_BLOCK)
    # By layer group: sinks, plane 0 and blocks of the tail still missing.
    self._anchor_left = [layers * blocks for layers in wire.layer_counts]
    # [layer group][group of tokens]: units of planes 1.. still missing
    self._residual_left = []
    for layer_group, layers in enumerate(wire.layer_counts):
      sent = [0] * groups  # layers that send a group
      for layer in range(layers):
        self._anchor_left[layer_group] += wire.has_sinks(
          layer_group, layer, prompt_tokens
        )
        first = wire.first_group(layer_group, layer, prompt_tokens)
        for index in range(first, groups):
          sent[index] += 1
      self._anchor_left[layer_group] += sum(sent)
      planes = wire.planes(layer_group)
      self._residual_left.append([count * (planes - 1) for count in sent])
    self._leading = [0] * len(wire.layer_counts)
    self._end, self._token_chunk = end, wire.engine.token_chunk
    is_exact = target is config.Target.EXACT
    # Pages of every string, and those of them that have landed.
    self._pages: dict[tuple[int, int], int | None] = dict.fromkeys(
      wire.strings(prompt_tokens) if is_exact else ()
    )
    self._pages_landed = dict.fromkeys(self._pages, 0)
    self._advance()

  def land(self, chunk: Chunk) -> None:
    """Counts a chunk as landed; nothing is counted if it raises.

    Raises:
      StaleChunk: of another request or generation.
      DuplicateChunk: it has landed before.
      UnexpectedChunk: it carries units that are not missing.
    """
    key = chunk.key
    if (key.request, key.generation) != (self._request, self._generation):
      raise StaleChunk(
        f'{key} is not of request={self._request} generation={self._generation}'
      )
    if key in self._landed:
      raise DuplicateChunk(f'{key} has landed before')
    exact = 0
    anchor = [0] * len(self._anchor_left)
    residual: dict[tuple[int, int], int] = {}
    for unit in chunk.units():
      if unit.stream is Stream.ANCHOR:
        anchor[unit.layer_group] += 1
      elif unit.stream is Stream.EXACT:
        exact += 1
      else:
        place = unit.layer_group, unit.index
        residual[place] = residual.get(place, 0) + 1
    string = chunk.layer_group, chunk.token_chunk
    if exact:
      self._check_string(key, string, exact, chunk.pages)
    self._check_missing(key, anchor, residual)
    self._landed.add(key)
    if exact:
      self._pages[string] = chunk.pages
      self._pages_landed[string] += exact
    for layer_group, count in enumerate(anchor):
      self._anchor_left[layer_group] -= count
    for (layer_group, index), count in residual.items():
      self._residual_left[layer_group][index] -= count
    self._advance()

  @property
  def anchor_complete(self) -> bool:
    return not any(self._anchor_left)

  @property
  def complete(self) -> bool:
    return self.layer_groups == len(self._leading)

  @property
  def layer_groups(self) -> int:
    """Leading layer groups of which all that the target needs has landed."""
    missing = {group for group, _ in self._missing_strings()}
    count = 0
    for lead, left in zip(self._leading, self._residual_left, strict=True):
      if lead < len(left) or count in missing or self._anchor_left[count]:
        break
      count += 1
    return count

  def mergeable(self, layer_group: int, token_chunk: int) -> bool:
    """Whether an exact string has landed, and what it is merged with too."""
    end = min((token_chunk + 1) * self._token_chunk, self._end)
    return (
      self.anchor_complete
      and self.residual_tokens[layer_group] >= end
      and (layer_group, token_chunk) not in self._missing_strings()
    )

  @property
  def exact_bytes_left(self) -> float:
    """Bytes of exact strings that have not landed.

    Strings of unknown length are taken to be as long as the others on average;
    if all are unknown it is infinite.
    """
    known = [pages for pages in self._pages.values() if pages is not None]
    if not self._pages:
      return 0.0
    if not known:
      return math.inf
    pages = sum(known) * len(self._pages) / len(known)
    return PAGE_BYTES * (pages - sum(self._pages_landed.values()))

  def _missing_strings(self) -> set[tuple[int, int]]:
    return {
      string
      for string, pages in self._pages.items()
      if self._pages_landed[string] != pages
    }

  def _check_string(self, key, string, count: int, pages: int) -> None:
    if string not in self._pages:
      raise UnexpectedChunk(f'{key} carries pages of no string')
    if self._pages[string] not in (None, pages):
      raise UnexpectedChunk(
        f'{key} is of {pages} pages; the string has {self._pages[string]}'
      )
    if self._pages_landed[string] + count > pages:
      raise UnexpectedChunk(f'{key} carries pages that are not missing')

  @property
  def residual_tokens(self) -> tuple[int, ...]:
    """Leading prefix tokens, by layer group, whose Residual is complete.

    It is E where a layer group has no Residual planes. It says nothing about
    the Anchor: read it once `anchor_complete` holds.
    """
    return tuple(lead * self._group for lead in self._leading)

  def _check_missing(self, key, anchor, residual) -> None:
    fits = all(
      count <= left
      for count, left in zip(anchor, self._anchor_left, strict=True)
    )
    for (layer_group, index), count in residual.items():
      left = self._residual_left
      fits = fits and (
        layer_group < len(left)
        and index < len(left[layer_group])
        and count <= left[layer_group][index]
      )
    if not fits:
      raise UnexpectedChunk(f'{key} carries units that are not missing')

  def _advance(self) -> None:
    for layer_group, left in enumerate(self._residual_left):
      lead = self._leading[layer_group]
      while lead < len(left) and left[lead] == 0:
        lead += 1
      self._leading[layer_group] = lead
