# SPDX-License-Identifier: Apache-2.0
"""Draft, verify and decode rounds over a batch of slots, as jitted programs.

It knows no arrival and no transfer: the engine says which slots take part.

The **verify program** runs `verify_rows` tokens a slot over the target cache:
the last committed token, then drafts. Its shape never changes, so a token's
logits do not depend on how many drafts share the pass, and committed tokens
equal those of `reference_decode`, which calls the same program without drafts.
"""

from collections.abc import Callable
import dataclasses

from flax import nnx
import jax
import jax.numpy as jnp

from lynx_jax import kv_cache
from lynx_jax.kv_cache import Cache, Prefix, Rows, Tail
from lynx_jax.models import cached
from lynx_jax.models.transformer import Transformer
from lynx_jax.programs import fetch, program
from lynx_jax.shapes import Array, Bool, Int32
from lynx_jax.speculative import slots as slots_lib
from lynx_jax.speculative.slots import Slots

Prefixes = tuple[Prefix, ...]
Tails = tuple[Tail, ...]


def draft(
  model: Transformer,
  prefix: Prefixes,
  tail: Tails,
  slots: Slots,
  wanted: Bool[Array, 'B'],
  steps: Int32[Array, ''],
  limit: Int32[Array, ''],
  *,
  end_tokens: Int32[Array, 'e'],
  residual_tokens: Int32[Array, 'g B'] | None = None,
  implementation: str | None = None,
) -> tuple[Tails, Slots]:
  """Drafts up to `steps` tokens a slot, each from the one before.

  Args:
    model: parameters.
    prefix, tail: the cache; planes that drafts do not read are `None`.
    slots: where each slot stands.
    wanted: slots that draft.
    steps: most tokens to draft in this call.
    limit: most drafts a slot may hold.
    end_tokens: ids that end a text.
    residual_tokens: see `cached.forward`.
    implementation: of the kernels.
  """

  def more(carry):
    step, _, slots = carry
    drafting, _ = slots_lib.next_draft(slots, wanted, limit, end_tokens)
    return (step < steps) & jnp.any(drafting)

  def one(carry):
    step, tail, slots = carry
    drafting, token = slots_lib.next_draft(slots, wanted, limit, end_tokens)
    rows = Rows(slots.length + slots.n_drafts, slots.prefix_tokens, drafting)
    logits, tail = cached.forward(
      model,
      token[:, None],
      prefix,
      tail,
      rows=rows,
      residual_tokens=residual_tokens,
      implementation=implementation,
    )
    token = cached.greedy(logits)[:, 0]
    return step + 1, tail, slots_lib.append_draft(slots, drafting, token)

  start = (jnp.zeros((), jnp.int32), tail, slots)
  _, tail, slots = jax.lax.while_loop(more, one, start)
  return tail, slots


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
    model, tokens, prefix, tail, rows=where, implementation=implementation
  )
  targets = cached.greedy(logits)
  return tail, slots_lib.accept(slots, targets, wanted, end_tokens)


def verify_rows(
  slots: Slots, wanted: Bool[Array, 'B'], rows: int
) -> tuple[Int32[Array, 'B T'], Rows]:
  """Returns the tokens of a verification, and where they stand."""
  drafts = slots.drafts[:, : rows - 1]
  tokens = jnp.concatenate([slots.last_token[:, None], drafts], axis=1)
  return tokens, Rows(
    slots.length, slots.prefix_tokens, wanted & (slots.remaining > 0)
  )


def rounds(
  model: Transformer,
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

  Drafts read the Anchor only. With `draft_tokens` = 0 a round is plain
  decoding in the verify program; with `rows` = 1 nothing is ever drafted.

  Args:
    model: parameters.
    prefix, tail: the cache with all planes of the target.
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
    return (done < max_rounds) & jnp.any(wanted & (slots.remaining > 0))

  def one(carry):
    done, tail, slots = carry
    if rows > 1:
      tail, slots = draft(
        model,
        kv_cache.anchor_only(prefix),
        tail,
        slots,
        wanted,
        draft_tokens,
        draft_tokens,
        end_tokens=end_tokens,
        implementation=implementation,
      )
    tail, slots = verify(
      model,
      prefix,
      tail,
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


@dataclasses.dataclass(frozen=True)
class DecodePrograms:
  """The compiled forms; tail and slots are donated to each of them.

  Attributes:
    draft: `(params, prefix, tail, slots, wanted, steps, limit)`; give it
      `kv_cache.anchor_only(prefix)`.
    verify: `(params, prefix, tail, slots, wanted)`.
    rounds: `(params, prefix, tail, slots, wanted, draft_tokens, max_rounds)`.
    plain: the same arguments as `rounds`, with one row and no drafts.
  """

  draft: Callable[..., tuple[Tails, Slots]]
  verify: Callable[..., tuple[Tails, Slots]]
  rounds: Callable[..., tuple[Tails, Slots]]
  plain: Callable[..., tuple[Tails, Slots]]


def build(
  graph: nnx.GraphDef,
  *,
  rows: int,
  end_tokens: tuple[int, ...],
  implementation: str | None = None,
) -> DecodePrograms:
  """Builds the programs of a model split by `nnx.split`.

  Args:
    graph: the model's graph definition.
    rows: T of the verify program.
    end_tokens: ids that end a text.
    implementation: of the kernels.
  """
  ends = jnp.asarray(end_tokens or (-1,), jnp.int32)

  def compiled(name, function, **fixed):
    def call(params, prefix, tail, slots, wanted, *traced):
      return function(
        nnx.merge(graph, params),
        prefix,
        tail,
        slots,
        wanted,
        *traced,
        end_tokens=ends,
        implementation=implementation,
        **fixed,
      )

    return program(call, name=name, donate=(2, 3))

  return DecodePrograms(
    draft=compiled('draft', draft),
    verify=compiled('verify', verify, rows=rows),
    rounds=compiled('rounds', rounds, rows=rows),
    plain=compiled('plain', rounds, rows=1),
  )


def reference_decode(
  programs: DecodePrograms, params: nnx.State, cache: Cache, slots: Slots
) -> tuple[list[list[int]], Cache]:
  """Decodes every slot to its end with the verify program and no drafts.

  This *defines* the output of a scheme. Tail and slots are donated.

  Args:
    programs: of the model and the configuration in question.
    params: the model's parameters.
    cache: complete for the target.
    slots: started, without drafts.

  Returns:
    The tokens of each slot, token 1 first, and the cache.
  """
  tail = cache.tail
  wanted = jnp.ones(slots.length.shape, bool)
  while fetch(slots.remaining).any():
    tail, slots = programs.verify(params, cache.prefix, tail, slots, wanted)
  out, count = fetch((slots.out, slots.n_out))
  tokens = [row[:n].tolist() for row, n in zip(out, count, strict=True)]
  return tokens, dataclasses.replace(cache, tail=tail)
