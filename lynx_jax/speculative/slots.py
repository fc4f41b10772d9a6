# SPDX-License-Identifier: Apache-2.0
"""What the device knows of every batch slot, and the rule that commits tokens.

It knows no model and no cache: pure functions of token ids.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from lynx_jax import sampling
from lynx_jax.config import EngineConfig
from lynx_jax.shapes import Array, Bool, Int32


@dataclasses.dataclass(frozen=True)
class Growth:
  """How generated tokens move into the prefix; see `CodecConfig.prefix_end`.

  Attributes:
    group: Q.
    recent_tokens: W.
  """

  group: int
  recent_tokens: int

  def prefix_end(self, position: Int32[Array, '*b']) -> Int32[Array, '*b']:
    """Returns the prefix tokens that the token at a position reads."""
    groups = (position - self.recent_tokens) // self.group
    return jnp.maximum(groups, 0) * self.group

  def missing(self, held_tokens: int, position: int) -> int:
    """Returns how many groups more than are held the token reads."""
    groups = (position - self.recent_tokens) // self.group
    return max(0, groups - held_tokens // self.group)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
  """State of B slots; D is the draft capacity, O the output capacity.

  The last committed token stands at position `length` and has no KV in the
  cache yet; `drafts[i]` is provisional and would stand at `length + 1 + i`.

  Attributes:
    prefix_tokens: E, where the tail starts.
    grown_tokens: tokens that are in the prefix: E, and generated groups.
    length: tokens with committed KV; the only commit mark.
    last_token: the last committed token.
    remaining: tokens that may still be committed; 0 ends the slot.
    drafts, n_drafts: provisional tokens.
    out, n_out: committed tokens from token 1 on.
    round_drafts, round_accepted, n_rounds: drafts that each verification
      looked at, and how many of them it accepted.
    samplings: how tokens are chosen.
    growth: of the prefix; None where generated tokens stay dense.
  """

  prefix_tokens: Int32[Array, 'B']
  grown_tokens: Int32[Array, 'B']
  length: Int32[Array, 'B']
  last_token: Int32[Array, 'B']
  remaining: Int32[Array, 'B']
  drafts: Int32[Array, 'B D']
  n_drafts: Int32[Array, 'B']
  out: Int32[Array, 'B O']
  n_out: Int32[Array, 'B']
  round_drafts: Int32[Array, 'B O']
  round_accepted: Int32[Array, 'B O']
  n_rounds: Int32[Array, 'B']
  samplings: sampling.Samplings
  growth: Growth | None = dataclasses.field(
    default=None, metadata={'static': True}
  )

  def prefix_ends(
    self, first: Int32[Array, 'B'], rows: int
  ) -> Int32[Array, 'B T'] | None:
    """Returns what each row of a pass reads from the prefix; None is E.

    Args:
      first: position of row 0.
      rows: T.
    """
    if self.growth is None:
      return None
    ends = self.growth.prefix_end(first[:, None] + _index(rows))
    # Drafts may be ahead of what is packed; verifications never are.
    held = self.grown_tokens[:, None]
    return jnp.clip(ends, self.prefix_tokens[:, None], held)

  def due(self, rows: int) -> Bool[Array, 'B']:
    """Returns the slots that need another group before a pass of `rows`."""
    if self.growth is None:
      return jnp.zeros(self.length.shape, bool)
    needed = self.growth.prefix_end(self.length + rows - 1)
    return (self.remaining > 0) & (needed > self.grown_tokens)

  def positions(self, rows: int) -> Int32[Array, 'B T']:
    """Returns where the tokens after the last committed one would stand."""
    return self.length[:, None] + 1 + _index(rows)


def empty(
  slots: int, *, drafts: int, output_tokens: int, growth: Growth | None = None
) -> Slots:
  """Returns slots that all have ended.

  Args:
    slots: B.
    drafts: D, most provisional tokens of a slot.
    output_tokens: O, most committed tokens of a slot, token 1 included.
    growth: of the prefix.
  """

  def column():  # a buffer each: a donated argument may not occur twice
    return jnp.zeros((slots,), jnp.int32)

  def table(width):
    return jnp.zeros((slots, width), jnp.int32)

  return Slots(
    prefix_tokens=column(),
    grown_tokens=column(),
    length=column(),
    last_token=column(),
    remaining=column(),
    drafts=table(drafts),
    n_drafts=column(),
    out=table(output_tokens),
    n_out=column(),
    round_drafts=table(output_tokens),
    round_accepted=table(output_tokens),
    n_rounds=column(),
    samplings=jax.tree.map(
      lambda x: jnp.zeros((slots,), x.dtype), sampling.GREEDY.row()
    ),
    growth=growth,
  )


def of(engine: EngineConfig, growth: Growth | None = None) -> Slots:
  """Returns `empty` slots of the sizes that an engine needs."""
  return empty(
    engine.slots,
    drafts=max(engine.backlog_tokens, engine.verify_rows),
    output_tokens=engine.output_tokens,
    growth=growth,
  )


def place(
  slots: Slots,
  slot: Int32[Array, ''],
  prefix_tokens: Int32[Array, ''],
  prompt_tokens: Int32[Array, ''],
  token: Int32[Array, ''],
  output_tokens: Int32[Array, ''],
  end_tokens: Int32[Array, 'e'],
  samplings: sampling.Samplings,
) -> Slots:
  """Starts a request in `slot`, with token 1 committed.

  Args:
    slots: all of them.
    slot: which one.
    prefix_tokens: E.
    prompt_tokens: P.
    token: token 1; an end token ends the slot at once.
    output_tokens: most tokens of the request, token 1 included.
    end_tokens: ids that end a text.
    samplings: of the request.
  """
  left = jnp.where(jnp.any(token == end_tokens), 0, output_tokens - 1)
  put = functools.partial(_set, slot)
  fresh = jax.tree.map(lambda x: put(x, 0), slots)
  first = _index(slots.out.shape[1]) == 0
  return dataclasses.replace(
    fresh,
    prefix_tokens=put(fresh.prefix_tokens, prefix_tokens),
    grown_tokens=put(fresh.grown_tokens, prefix_tokens),
    length=put(fresh.length, prompt_tokens),
    last_token=put(fresh.last_token, token),
    remaining=put(fresh.remaining, left),
    out=put(fresh.out, jnp.where(first, token, 0)),
    n_out=put(fresh.n_out, 1),
    samplings=jax.tree.map(put, fresh.samplings, samplings),
  )


def stop(slots: Slots, slot: Int32[Array, '']) -> Slots:
  """Ends `slot`: it commits and drafts nothing more."""
  return dataclasses.replace(
    slots,
    remaining=_set(slot, slots.remaining, 0),
    n_drafts=_set(slot, slots.n_drafts, 0),
  )


def grow(slots: Slots, slot: Int32[Array, '']) -> Slots:
  """Counts one more group of `slot` as packed."""
  assert slots.growth is not None
  return dataclasses.replace(
    slots, grown_tokens=slots.grown_tokens.at[slot].add(slots.growth.group)
  )


def next_draft(
  slots: Slots,
  wanted: Bool[Array, 'B'],
  limit: Int32[Array, ''],
  end_tokens: Int32[Array, 'e'],
) -> tuple[Bool[Array, 'B'], Int32[Array, 'B']]:
  """Returns which slots draft one more token, and the token to draft from.

  A slot drafts while it holds fewer than `limit` drafts and fewer than it may
  still commit, and not beyond a drafted end token.
  """
  at = jnp.maximum(slots.n_drafts - 1, 0)[:, None]
  newest = jnp.take_along_axis(slots.drafts, at, axis=1)[:, 0]
  token = jnp.where(slots.n_drafts > 0, newest, slots.last_token)
  most = jnp.minimum(jnp.minimum(limit, slots.drafts.shape[1]), slots.remaining)
  ended = jnp.any(token[:, None] == end_tokens[None], axis=1)
  return wanted & (slots.n_drafts < most) & ~ended, token


def append_draft(
  slots: Slots, drafting: Bool[Array, 'B'], token: Int32[Array, 'B']
) -> Slots:
  """Returns the slots with `token` as one more draft where `drafting`."""
  index = _index(slots.drafts.shape[1])
  here = drafting[:, None] & (index == slots.n_drafts[:, None])
  return dataclasses.replace(
    slots,
    drafts=jnp.where(here, token[:, None], slots.drafts),
    n_drafts=slots.n_drafts + drafting.astype(jnp.int32),
  )


def propose(
  slots: Slots, tokens: Int32[Array, 'B T'], counts: Int32[Array, 'B']
) -> Slots:
  """Returns the slots with the first `counts` of `tokens` as their drafts.

  Slots with a count of 0 are left as they are.

  Args:
    slots: without drafts where `counts` is positive.
    tokens: proposals, at most D a slot.
    counts: how many of them hold.
  """
  here = _index(tokens.shape[1]) < counts[:, None]
  drafts = slots.drafts.at[:, : tokens.shape[1]].set(
    jnp.where(here, tokens, slots.drafts[:, : tokens.shape[1]])
  )
  return dataclasses.replace(
    slots, drafts=drafts, n_drafts=jnp.where(counts > 0, counts, slots.n_drafts)
  )


def accept(
  slots: Slots,
  targets: Int32[Array, 'B T'],
  wanted: Bool[Array, 'B'],
  end_tokens: Int32[Array, 'e'],
) -> Slots:
  """Commits the longest prefix of drafts that the target agrees with.

  `targets[i]` is the target's token after the last committed one and drafts
  0..i-1. The first disagreement yields the target's own token, so that every
  verification commits at least one. Where requests sample, the target's
  token is drawn with the noise that its draft was drawn with (`sampling`).
  With T = 4 and drafts a b c:

  | targets | committed | drafts left |
  |---|---|---|
  | a b c d | a b c d | |
  | a x . . | a x | |
  | a b c d, and drafts go on with d e | a b c d | e |

  Nothing is committed beyond an end token or beyond `remaining`.

  Args:
    slots: drafts included; those above T - 1 are not looked at, except that
      they survive if the token committed after all others is the next one.
    targets: what the target chooses in every row of the verification.
    wanted: other slots are left as they are.
    end_tokens: ids that end a text.
  """
  rows = targets.shape[1]
  row = _index(rows)
  wanted = wanted & (slots.remaining > 0)
  looked_at = jnp.minimum(slots.n_drafts, rows - 1)
  drafts = _pad(slots.drafts, rows)
  agree = (drafts[:, :rows] == targets) & (row < looked_at[:, None])
  agreed = jnp.sum(jnp.cumprod(agree.astype(jnp.int32), axis=1), axis=1)

  ends = jnp.any(targets[:, :, None] == end_tokens[None, None], axis=2)
  first_end = jnp.min(jnp.where(ends, row, rows), axis=1)
  count = jnp.minimum(agreed + 1, first_end + 1)
  count = jnp.minimum(count, slots.remaining)
  ended = first_end < count
  count = jnp.where(wanted, count, 0)

  at = _index(slots.out.shape[1]) - slots.n_out[:, None]
  fresh = jnp.take_along_axis(targets, jnp.clip(at, 0, rows - 1), axis=1)
  out = jnp.where((at >= 0) & (at < count[:, None]), fresh, slots.out)
  newest = jnp.take_along_axis(
    targets, jnp.maximum(count - 1, 0)[:, None], axis=1
  )[:, 0]

  # The token after all drafts looked at may be the next draft.
  following = jnp.take_along_axis(drafts, looked_at[:, None], axis=1)[:, 0]
  survive = (
    (slots.n_drafts > looked_at)
    & (count == looked_at + 1)
    & (newest == following)
    & ~ended
  )
  left = jnp.where(survive, slots.n_drafts - count, 0)
  shifted = _index(slots.drafts.shape[1]) + count[:, None]
  moved = jnp.take_along_axis(
    slots.drafts, jnp.minimum(shifted, slots.drafts.shape[1] - 1), axis=1
  )

  here = wanted[:, None] & (
    _index(slots.round_drafts.shape[1]) == slots.n_rounds[:, None]
  )
  remaining = jnp.where(ended, 0, slots.remaining - count)
  return dataclasses.replace(
    slots,
    length=slots.length + count,
    last_token=jnp.where(wanted, newest, slots.last_token),
    remaining=jnp.where(wanted, remaining, slots.remaining),
    drafts=jnp.where(wanted[:, None], moved, slots.drafts),
    n_drafts=jnp.where(wanted, left, slots.n_drafts),
    out=out,
    n_out=slots.n_out + count,
    round_drafts=jnp.where(here, looked_at[:, None], slots.round_drafts),
    round_accepted=jnp.where(
      here, jnp.minimum(agreed, count)[:, None], slots.round_accepted
    ),
    n_rounds=slots.n_rounds + wanted.astype(jnp.int32),
  )


def _set(slot, all, one):
  """Returns `all` with `one` in a slot.

  A choice, slot by slot, needs no word between devices with other slots; an
  indexed update would.
  """
  index = jnp.arange(len(all), dtype=jnp.int32)
  here = (index == slot).reshape(-1, *[1] * (all.ndim - 1))
  return jnp.where(here, one, all)


def _index(width):
  return jnp.arange(width, dtype=jnp.int32)[None]


def _pad(drafts, rows):
  missing = max(0, rows - drafts.shape[1])
  return jnp.pad(drafts, ((0, 0), (0, missing)))
