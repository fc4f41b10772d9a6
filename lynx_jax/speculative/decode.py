# SPDX-License-Identifier: Apache-2.0
"""Draft, verify and decode rounds over a batch of slots, as jitted programs.

It knows no arrival and no transfer: the engine says which slots take part.

The **verify program** runs `verify_rows` tokens a slot over the target cache:
the last committed token, then drafts. Its shape never changes, so a token's
logits do not depend on how many drafts share the pass, and committed tokens
equal those of `reference_decode`, which calls the same program without drafts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from lynx_jax import kv_cache, sampling
from lynx_jax import mesh as mesh_lib
from lynx_jax.config import Target
from lynx_jax.kv_cache import Cache, Prefix, Rows, Tail
from lynx_jax.models import cached
from lynx_jax.models.transformer import Transformer
from lynx_jax.programs import fetch, program
from lynx_jax.shapes import Array, Bool, Float, Float32, Int32
from lynx_jax.speculative import slots as slots_lib
from lynx_jax.speculative.slots import Slots
from lynx_jax.timeline import Phase

Prefixes = tuple[Prefix, ...]
Tails = tuple[Tail, ...]


@jax.named_scope(Phase.DRAFT)
def draft(
  model: Transformer,
  prefix: Prefixes,
  tail: Tails,
  slots: Slots,
  wanted: Bool[Array, 'B'],
  limit: Int32[Array, ''],
  *,
  end_tokens: Int32[Array, 'e'],
  implementation: str | None = None,
) -> tuple[Tails, Slots]:
  """Drafts until every wanted slot holds `limit` drafts or can draft no more.

  Args:
    model: parameters.
    prefix, tail: the cache; planes that drafts do not read are `None`.
    slots: where each slot stands.
    wanted: slots that draft.
    limit: most drafts a slot may hold.
    end_tokens: ids that end a text.
    implementation: of the kernels.
  """

  def more(carry):
    _, slots = carry
    drafting, _ = slots_lib.next_draft(slots, wanted, limit, end_tokens)
    return jnp.any(drafting)

  def one(carry):
    tail, slots = carry
    tail = kv_cache.as_stored(tail)
    tokens, rows = draft_rows(slots, wanted, limit, end_tokens)
    logits, tail = cached.forward(
      model, tokens, prefix, tail, rows, implementation=implementation
    )
    return tail, append_draft(slots, logits, rows.active)

  return jax.lax.while_loop(more, one, (tail, slots))


@jax.named_scope(Phase.VERIFY)
def verify(
  model: Transformer,
  prefix: Prefixes,
  tail: Tails,
  slots: Slots,
  wanted: Bool[Array, 'B'],
  *,
  rows: int,
  end_tokens: Int32[Array, 'e'],
  implementation: str | None = None,
) -> tuple[Tails, Slots]:
  """Verifies up to `rows - 1` drafts a slot and commits; see `slots.accept`.

  Args:
    model: parameters.
    prefix, tail: the cache with all planes of the target.
    slots: where each slot stands.
    wanted: slots whose target cache is complete.
    rows: static; 1 is plain decoding of one token.
    end_tokens: ids that end a text.
    implementation: of the kernels.
  """
  tokens, where = verify_rows(slots, wanted, rows)
  logits, tail = cached.forward(
    model, tokens, prefix, tail, where, implementation=implementation
  )
  return tail, accept(slots, logits, wanted, end_tokens)


def rounds(
  model: Transformer,
  draft_prefix: Prefixes,
  prefix: Prefixes,
  tail: Tails,
  slots: Slots,
  wanted: Bool[Array, 'B'],
  draft_tokens: Int32[Array, ''],
  max_rounds: Int32[Array, ''],
  *,
  rows: int,
  end_tokens: Int32[Array, 'e'],
  implementation: str | None = None,
) -> tuple[Tails, Slots]:
  """Repeats draft → verify → commit until all wanted slots have ended.

  It stops before a verification that needs another group of generated tokens
  in the prefix, which only the host can put there.

  With `draft_tokens` = 0 a round is plain decoding in the verify program.

  Args:
    model: parameters.
    draft_prefix: what drafts read: the Anchor only.
    prefix, tail: the cache of the target.
    slots: where each slot stands.
    wanted: slots whose target cache is complete.
    draft_tokens: γ, at most `rows - 1`.
    max_rounds: most rounds of this call.
    rows: of the verify program; static.
    end_tokens: ids that end a text.
    implementation: of the kernels.
  """

  def more(carry):
    done, _, slots = carry
    return (
      (done < max_rounds)
      & jnp.any(wanted & (slots.remaining > 0))
      & ~jnp.any(wanted & slots.due(rows))
    )

  def one(carry):
    done, tail, slots = carry
    tail, slots = draft(
      model,
      draft_prefix,
      tail,
      slots,
      wanted,
      draft_tokens,
      end_tokens=end_tokens,
      implementation=implementation,
    )
    tail, slots = verify(
      model,
      prefix,
      kv_cache.as_stored(tail),
      slots,
      wanted,
      rows=rows,
      end_tokens=end_tokens,
      implementation=implementation,
    )
    return done + 1, tail, slots

  start = (jnp.zeros((), jnp.int32), tail, slots)
  _, tail, slots = jax.lax.while_loop(more, one, start)
  return tail, slots


def draft_rows(
  slots: Slots,
  wanted: Bool[Array, 'B'],
  limit: Int32[Array, ''],
  end_tokens: Int32[Array, 'e'],
) -> tuple[Int32[Array, 'B 1'], Rows]:
  """Returns the tokens to draft from, and where they stand."""
  drafting, token = slots_lib.next_draft(slots, wanted, limit, end_tokens)
  first = slots.length + slots.n_drafts
  ends = slots.prefix_ends(first, 1)
  return token[:, None], Rows(first, slots.prefix_tokens, drafting, ends)


def verify_rows(
  slots: Slots, wanted: Bool[Array, 'B'], rows: int
) -> tuple[Int32[Array, 'B T'], Rows]:
  """Returns the tokens of a verification, and where they stand."""
  drafts = slots.drafts[:, : rows - 1]
  tokens = jnp.concatenate([slots.last_token[:, None], drafts], axis=1)
  return tokens, Rows(
    slots.length,
    slots.prefix_tokens,
    wanted & (slots.remaining > 0),
    slots.prefix_ends(slots.length, rows),
  )


def append_draft(
  slots: Slots, logits: Float32[Array, 'B 1 V'], drafting: Bool[Array, 'B']
) -> Slots:
  """Returns the slots with one more draft where `drafting`."""
  positions = slots.positions(1) + slots.n_drafts[:, None]
  token = sampling.choose(logits, slots.samplings, positions, drafting)
  return slots_lib.append_draft(slots, drafting, token[:, 0])


@jax.named_scope(Phase.COMMIT)
def accept(
  slots: Slots,
  logits: Float32[Array, 'B T V'],
  wanted: Bool[Array, 'B'],
  end_tokens: Int32[Array, 'e'],
) -> Slots:
  """Commits what the logits of a verification confirm."""
  positions = slots.positions(logits.shape[1])
  targets = sampling.choose(logits, slots.samplings, positions, wanted)
  return slots_lib.accept(slots, targets, wanted, end_tokens)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pass:
  """A verification on its way through the layers; it can be resumed.

  Attributes:
    h: residual stream behind the layer groups that have run.
    rows: where the tokens stand.
    wanted: slots that are verified.
    target: the cache that is read.
    groups: how many layer groups have run.
  """

  h: Float[Array, 'B T D']
  rows: Rows
  wanted: np.ndarray
  target: Target = dataclasses.field(metadata={'static': True})
  groups: int = dataclasses.field(default=0, metadata={'static': True})


class Decoder:
  """The compiled programs of one model and configuration.

  A single draft step and a single verification are composed of three kinds of
  programs: one that opens the pass (rows and embedding), one that runs a layer
  group, and one that closes it (head, and what follows from the tokens). They
  compile in a fraction of the time of a whole pass, since equal layer groups
  share a program, and a pass can stop between groups. `rounds` is one program.
  Both forms give the same bits.

  Tail and slots are donated to every call. `wanted` is the host's bool[B].
  `place`, `stop` and `propose` are those of `slots`, and donate them too.

  Args:
    graphs: of the model.
    ranges: [start, stop) of every layer group.
    rows: T of the verify program.
    end_tokens: ids that end a text.
    implementation: of the kernels.
    mesh: of parameters and cache; see `mesh.if_several`.
  """

  def __init__(
    self,
    graphs: cached.Graphs,
    ranges: Sequence[tuple[int, int]],
    *,
    rows: int,
    end_tokens: Sequence[int] = (),
    implementation: str | None = None,
    mesh: Mesh | None = None,
  ):
    self.rows = rows
    self._ranges = tuple(ranges)
    # -1 is no token: an array of ends may not be empty.
    self.end_tokens = np.asarray(tuple(end_tokens) or (-1,), np.int32)
    self._programs = _programs(graphs, rows, implementation, mesh)
    self.place, self.stop, self.propose = _slot_programs(mesh)

  def draft(
    self,
    params: nnx.State,
    cache: Cache,
    slots: Slots,
    wanted: np.ndarray,
    limit: int,
    residual_tokens: np.ndarray | None = None,
  ) -> tuple[Cache, Slots]:
    """Drafts one token in every wanted slot with room; see `draft`.

    Args:
      params, cache, slots, wanted, limit: as for `draft`.
      residual_tokens: i32[g, B], prefix tokens that are read with all planes,
        by layer group and slot; None reads the Anchor alone.
    """
    run = self._programs
    h, where = run.open_draft(
      params, slots, wanted, np.int32(limit), self.end_tokens
    )
    prefix = cache.prefix
    if residual_tokens is None:
      prefix = kv_cache.anchor_only(prefix)
    h, tail = self._layers(
      run.draft_layers,
      params,
      h,
      prefix,
      cache.tail,
      where,
      range(len(self._ranges)),
      residual_tokens,
    )
    slots = run.close_draft(params, h, slots, where.active)
    return dataclasses.replace(cache, tail=tail), slots

  def verify(
    self,
    params: nnx.State,
    cache: Cache,
    slots: Slots,
    wanted: np.ndarray,
    rows: int | None = None,
    target: Target = Target.PLANES,
  ) -> tuple[Cache, Slots]:
    """Verifies once; `rows` = 1 is plain decoding; see `verify`."""
    running = self.open_verify(params, slots, wanted, rows, target)
    cache, running = self.resume(params, cache, running, len(self._ranges))
    return cache, self.close_verify(params, slots, running)

  def open_verify(
    self,
    params: nnx.State,
    slots: Slots,
    wanted: np.ndarray,
    rows: int | None = None,
    target: Target = Target.PLANES,
  ) -> Pass:
    """Begins a verification, which no layer group has to be there for.

    Until it is closed, the wanted slots must neither draft nor be verified.
    """
    opened = self._programs.open_verify[rows or self.rows]
    h, where = opened(params, slots, wanted)
    return Pass(h, where, wanted, target)

  def resume(
    self, params: nnx.State, cache: Cache, running: Pass, upto: int
  ) -> tuple[Cache, Pass]:
    """Runs the next layer groups, those below `upto`; donates their tails."""
    h, tail = self._layers(
      self._programs.verify_layers,
      params,
      running.h,
      cache.target(running.target),
      cache.tail,
      running.rows,
      range(running.groups, upto),
    )
    running = dataclasses.replace(running, h=h, groups=upto)
    return dataclasses.replace(cache, tail=tail), running

  def close_verify(
    self, params: nnx.State, slots: Slots, running: Pass
  ) -> Slots:
    """Commits what a pass through all layer groups has found."""
    assert running.groups == len(self._ranges)
    return self._programs.close_verify(
      params, running.h, slots, running.wanted, self.end_tokens
    )

  def rounds(
    self,
    params: nnx.State,
    cache: Cache,
    slots: Slots,
    wanted: np.ndarray,
    draft_tokens: int,
    max_rounds: int,
    target: Target = Target.PLANES,
  ) -> tuple[Cache, Slots]:
    """Repeats draft → verify → commit; see `rounds`."""
    tail, slots = self._programs.rounds(
      params,
      kv_cache.anchor_only(cache.prefix),
      cache.target(target),
      cache.tail,
      slots,
      wanted,
      np.int32(draft_tokens),
      np.int32(max_rounds),
      self.end_tokens,
    )
    return dataclasses.replace(cache, tail=tail), slots

  def one_round(
    self,
    params: nnx.State,
    cache: Cache,
    slots: Slots,
    wanted: np.ndarray,
    draft_tokens: int,
    target: Target = Target.PLANES,
  ) -> tuple[Cache, Slots]:
    """Does what one of the `rounds` does, with the programs of single steps."""
    for _ in range(draft_tokens):
      cache, slots = self.draft(params, cache, slots, wanted, draft_tokens)
    return self.verify(params, cache, slots, wanted, target=target)

  def grow(
    self, cache: Cache, slots: Slots, state: Slots
  ) -> tuple[Cache, Slots]:
    """Packs the groups that the next verification needs; donates the prefix.

    Args:
      cache: of all slots.
      slots: of all; they must not be in an open verification.
      state: the same, fetched.
    """
    for slot, left in enumerate(state.remaining):
      if left:
        length, grown = state.length[slot], state.grown_tokens[slot]
        cache, slots = self.pack(cache, slots, slot, int(length), int(grown))
    return cache, slots

  def pack(
    self, cache: Cache, slots: Slots, slot: int, length: int, grown_tokens: int
  ) -> tuple[Cache, Slots]:
    """Does the same for one slot; see `grow`.

    Args:
      cache, slots: as there.
      slot: which.
      length, grown_tokens: of the slot.
    """
    growth = slots.growth
    missing = (
      growth.missing(grown_tokens, length + self.rows - 1) if growth else 0
    )
    for _ in range(missing):
      prefix = tuple(
        self._programs.pack(*held, slots, np.int32(slot))
        for held in zip(cache.prefix, cache.tail, strict=True)
      )
      cache = dataclasses.replace(cache, prefix=prefix)
      slots = self._programs.grow(slots, np.int32(slot))
    return cache, slots

  def _layers(
    self, run, params, h, prefix, tail, where, groups, residual_tokens=None
  ):
    tail = list(tail)
    for group in groups:
      layers = cached.layer_params(params, *self._ranges[group])
      h, tail[group] = run(
        layers,
        h,
        prefix[group],
        tail[group],
        where,
        None if residual_tokens is None else residual_tokens[group],
      )
    return h, tuple(tail)


@dataclasses.dataclass(frozen=True)
class _Programs:
  grow: Callable
  pack: Callable
  open_draft: Callable
  open_verify: dict[int, Callable]
  draft_layers: Callable
  verify_layers: Callable
  close_draft: Callable
  close_verify: Callable
  rounds: Callable


@functools.cache
def _programs(
  graphs: cached.Graphs,
  rows: int,
  implementation: str | None,
  mesh: Mesh | None = None,
) -> _Programs:
  """Makes the jitted functions; engines of one model share them."""

  def open_draft(params, slots, wanted, limit, end_tokens):
    tokens, where = draft_rows(slots, wanted, limit, end_tokens)
    return nnx.merge(graphs.model, params).embed(tokens), where

  def open_verify(params, slots, wanted, *, rows):
    tokens, where = verify_rows(slots, wanted, rows)
    return nnx.merge(graphs.model, params).embed(tokens), where

  def layers(params, h, prefix, tail, where, residual_tokens):
    return cached.run_layers(
      graphs.layers(params),
      h,
      prefix,
      tail,
      where,
      residual_tokens=residual_tokens,
      implementation=implementation,
    )

  def close_draft(params, h: Float[Array, 'B 1 D'], slots, drafting):
    logits = nnx.merge(graphs.model, params).head(h)
    return append_draft(slots, logits, drafting)

  def close_verify(params, h, slots, wanted, end_tokens):
    logits = nnx.merge(graphs.model, params).head(h)
    return accept(slots, logits, wanted, end_tokens)

  def all_rounds(
    params,
    draft_prefix,
    prefix,
    tail,
    slots,
    wanted,
    draft_tokens,
    max_rounds,
    end_tokens,
  ):
    return rounds(
      nnx.merge(graphs.model, params),
      draft_prefix,
      prefix,
      tail,
      slots,
      wanted,
      draft_tokens,
      max_rounds,
      rows=rows,
      end_tokens=end_tokens,
      implementation=implementation,
    )

  def pack(prefix, tail, slots, slot):
    return kv_cache.pack_group(
      prefix,
      tail,
      slot,
      slots.prefix_tokens[slot],
      slots.grown_tokens[slot],
      group=slots.growth.group,
      implementation=implementation,
    )

  of_slots = mesh_lib.spec('B')
  tails = mesh_lib.spec('L B S K H')
  planes: Any = mesh_lib.spec('L B K R Q')
  sinks: Any = tails
  make = functools.partial(
    program, out_shardings=mesh_lib.outputs(mesh, of_slots)
  )
  make_layers = functools.partial(
    program,
    layers,
    donate=(3,),
    out_shardings=mesh_lib.outputs(mesh, (of_slots, tails)),
  )
  return _Programs(
    grow=make(slots_lib.grow, name='grow', donate=(0,)),
    pack=program(
      pack,
      name='grow',
      donate=(0,),
      out_shardings=mesh_lib.outputs(
        mesh, Prefix(planes, planes, sinks, sinks)
      ),
    ),
    open_draft=make(open_draft, name=Phase.DRAFT),
    open_verify={
      count: make(functools.partial(open_verify, rows=count), name=Phase.VERIFY)
      for count in {1, rows}
    },
    draft_layers=make_layers(name=Phase.DRAFT),
    verify_layers=make_layers(name=Phase.VERIFY),
    close_draft=make(close_draft, name=Phase.DRAFT, donate=(2,)),
    close_verify=make(close_verify, name=Phase.VERIFY, donate=(2,)),
    rounds=program(
      all_rounds,
      name='rounds',
      donate=(3, 4),
      out_shardings=mesh_lib.outputs(mesh, (tails, of_slots)),
    ),
  )


@functools.cache
def _slot_programs(mesh: Mesh | None) -> tuple[Callable, Callable, Callable]:
  """Makes the programs that touch no cache; all models share them."""
  where = mesh_lib.outputs(mesh, mesh_lib.spec('B'))
  place, stop, propose = (
    program(f, name=f.__name__, donate=(0,), out_shardings=where)
    for f in (slots_lib.place, slots_lib.stop, slots_lib.propose)
  )
  return place, stop, propose


def reference_decode(
  decoder: Decoder,
  params: nnx.State,
  cache: Cache,
  slots: Slots,
  target: Target = Target.PLANES,
) -> tuple[list[list[int]], Cache, Slots]:
  """Decodes every slot to its end with the verify program and no drafts.

  This *defines* the output of a scheme. Tail and slots are donated.

  Args:
    decoder: of the model and the configuration in question.
    params: the model's parameters.
    cache: complete for the target.
    slots: started, without drafts.
    target: the cache to decode over.

  Returns:
    The tokens of each slot, token 1 first; the cache; and the slots.
  """
  wanted = np.ones(slots.length.shape, bool)
  while (state := fetch(slots)).remaining.any():
    cache, slots = decoder.grow(cache, slots, state)
    cache, slots = decoder.verify(params, cache, slots, wanted, target=target)
  out, count = fetch((slots.out, slots.n_out))
  tokens = [row[:n].tolist() for row, n in zip(out, count, strict=True)]
  return tokens, cache, slots
