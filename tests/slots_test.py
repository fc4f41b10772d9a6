# SPDX-License-Identifier: Apache-2.0
"""The commit rule: tables of draft, target and what must follow from them.

Tokens are letters; `E` and `F` end a text. The verification has 4 rows, so it
looks at 3 drafts, and a slot holds up to 8.
"""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from lynx_jax import sampling
from lynx_jax.speculative import slots as slots_lib

ROWS, DRAFTS, OUTPUTS = 4, 8, 16
HOW = sampling.Sampling(temperature=0.7, top_k=5, top_p=0.9, seed=2**32 - 1)
ENDS = np.asarray([ord('E'), ord('F')], np.int32)
place = jax.jit(slots_lib.place)
stop = jax.jit(slots_lib.stop)
next_draft = jax.jit(slots_lib.next_draft)
append_draft = jax.jit(slots_lib.append_draft)
accept = jax.jit(slots_lib.accept)
propose = jax.jit(slots_lib.propose)


@dataclasses.dataclass
class Slot:
  """One slot on the host; `length` starts at 100."""

  drafts: str = ''
  out: str = '1'
  remaining: int = 10


def _slots(*slots: Slot) -> slots_lib.Slots:
  state = jax.tree.map(
    lambda x: np.zeros(x.shape, x.dtype),
    slots_lib.empty(len(slots), drafts=DRAFTS, output_tokens=OUTPUTS),
  )
  for i, slot in enumerate(slots):
    state.prefix_tokens[i] = 64
    state.length[i] = 99 + len(slot.out)
    state.last_token[i] = ord(slot.out[-1])
    state.remaining[i] = slot.remaining
    state.drafts[i] = _row(slot.drafts, DRAFTS)
    state.n_drafts[i] = len(slot.drafts)
    state.out[i] = _row(slot.out, OUTPUTS)
    state.n_out[i] = len(slot.out)
  return jax.tree.map(jnp.asarray, state)


def _row(text: str, width: int) -> np.ndarray:
  return np.asarray([*map(ord, text), *[ord('?')] * (width - len(text))])


def _targets(*texts: str) -> np.ndarray:
  return np.asarray([_row(text, ROWS) for text in texts], np.int32)


def _host(state: slots_lib.Slots, i: int = 0) -> Slot:
  state = jax.tree.map(np.asarray, state)
  out = ''.join(map(chr, state.out[i, : state.n_out[i]]))
  drafts = ''.join(map(chr, state.drafts[i, : state.n_drafts[i]]))
  assert state.length[i] == 99 + len(out)
  assert chr(state.last_token[i]) == out[-1]
  return Slot(drafts, out, int(state.remaining[i]))


def _rounds(state: slots_lib.Slots, i: int = 0) -> list[tuple[int, int]]:
  drafted, accepted, count = jax.tree.map(
    np.asarray, (state.round_drafts, state.round_accepted, state.n_rounds)
  )
  return [*zip(drafted[i, : count[i]], accepted[i, : count[i]], strict=True)]


@pytest.mark.parametrize(
  'drafts, targets, committed, left, counted',
  [
    # The docstring's table.
    ('abc', 'abcd', 'abcd', '', (3, 3)),
    ('abc', 'ax..', 'ax', '', (3, 1)),
    ('abcde', 'abcd', 'abcd', 'e', (3, 3)),
    # No drafts: plain decoding.
    ('', 'x...', 'x', '', (0, 0)),
    # Fewer drafts than rows; what the rows above hold does not matter.
    ('a', 'ab..', 'ab', '', (1, 1)),
    ('ab', 'abc.', 'abc', '', (2, 2)),
    ('a', 'x...', 'x', '', (1, 0)),
    ('a', '?b..', '?', '', (1, 0)),  # what lies behind the drafts is none
    ('a', 'a?..', 'a?', '', (1, 1)),
    # A disagreement at each place.
    ('abc', 'xbcd', 'x', '', (3, 0)),
    ('abc', 'abx.', 'abx', '', (3, 2)),
    # Agreement after a disagreement counts for nothing.
    ('abc', 'xbcE', 'x', '', (3, 0)),
    ('aaa', 'aaaa', 'aaaa', '', (3, 3)),
    # A backlog survives only if its next token is the one committed.
    ('abcdefgh', 'abcd', 'abcd', 'efgh', (3, 3)),
    ('abcdefgh', 'abcx', 'abcx', '', (3, 3)),
    ('abcdefgh', 'abxd', 'abx', '', (3, 2)),
    ('abcd', 'abcd', 'abcd', '', (3, 3)),
  ],
)
def test_accept(drafts, targets, committed, left, counted):
  state = accept(
    _slots(Slot(drafts)), _targets(targets), np.ones(1, bool), ENDS
  )
  assert _host(state) == Slot(left, '1' + committed, 10 - len(committed))
  assert _rounds(state) == [counted]


@pytest.mark.parametrize(
  'drafts, targets, committed, counted',
  [
    # The end at every place of an accepted draft, and as the bonus token.
    ('Eb', 'E...', 'E', (2, 1)),
    ('aEc', 'aEcd', 'aE', (3, 2)),
    ('abE', 'abEd', 'abE', (3, 3)),
    ('abc', 'abcE', 'abcE', (3, 3)),
    ('abcEe', 'abcE', 'abcE', (3, 3)),
    # As the target's own token.
    ('', 'E...', 'E', (0, 0)),
    ('abc', 'aE..', 'aE', (3, 1)),
    ('abc', 'F...', 'F', (3, 0)),
    # The first of several.
    ('FEE', 'FEEE', 'F', (3, 1)),
    ('aFE', 'aFEE', 'aF', (3, 2)),
  ],
)
def test_nothing_follows_an_end(drafts, targets, committed, counted):
  state = accept(
    _slots(Slot(drafts)), _targets(targets), np.ones(1, bool), ENDS
  )
  assert _host(state) == Slot('', '1' + committed, 0)
  assert _rounds(state) == [counted]


def test_a_drafted_end_that_the_target_rejects_ends_nothing():
  state = accept(_slots(Slot('aE')), _targets('axE.'), np.ones(1, bool), ENDS)
  assert _host(state) == Slot('', '1ax', 8)


@pytest.mark.parametrize(
  'remaining, committed, counted',
  [
    (1, 'a', (3, 1)),
    (2, 'ab', (3, 2)),
    (3, 'abc', (3, 3)),
    (4, 'abcd', (3, 3)),
    (5, 'abcd', (3, 3)),
  ],
)
def test_no_more_than_asked_for(remaining, committed, counted):
  slots = _slots(Slot('abc', remaining=remaining))
  state = accept(slots, _targets('abcd'), np.ones(1, bool), ENDS)
  expected = Slot('', '1' + committed, max(0, remaining - 4))
  assert _host(state) == expected
  assert _rounds(state) == [counted]


def test_an_end_beyond_what_remains_is_not_committed():
  slots = _slots(Slot('aE', remaining=1))
  state = accept(slots, _targets('aE..'), np.ones(1, bool), ENDS)
  assert _host(state) == Slot('', '1a', 0)


def test_other_slots_are_left_as_they_are():
  before = _slots(Slot('abc'), Slot('abc'), Slot('abc', remaining=0))
  wanted = np.asarray([True, False, True])
  after = accept(before, _targets('abcd', 'abcd', 'abcd'), wanted, ENDS)
  assert _host(after).out == '1abcd'
  for i in (1, 2):  # not wanted; ended
    for a, b in zip(
      jax.tree.leaves(before), jax.tree.leaves(after), strict=True
    ):
      np.testing.assert_array_equal(a[i], b[i])


@pytest.mark.parametrize('rows', [1, 2, 12])
def test_other_numbers_of_rows(rows):
  """1 is plain decoding; 12 is more than a slot holds drafts."""
  drafts, targets = 'abcdefgh', 'abcdefghijkl'[:rows]
  state = accept(
    _slots(Slot(drafts, remaining=12)),
    np.asarray([_row(targets, rows)], np.int32),
    np.ones(1, bool),
    ENDS,
  )
  committed = targets[: min(rows, len(drafts) + 1)]
  left = drafts[len(committed) :]
  assert _host(state) == Slot(left, '1' + committed, 12 - len(committed))
  looked_at = min(len(drafts), rows - 1)
  assert _rounds(state) == [(looked_at, looked_at)]


@st.composite
def _cases(draw):
  token = st.sampled_from('abE')  # few, so that they often agree
  remaining = draw(st.integers(0, 9))
  longest = min(DRAFTS, remaining)
  drafts = draw(st.text(token, max_size=longest))
  targets = draw(st.text(token, min_size=ROWS, max_size=ROWS))
  if draw(st.booleans()):  # a long agreement is rare by chance
    targets = (drafts + targets)[:ROWS]
  return Slot(drafts, '1', remaining), targets, draw(st.booleans())


@hypothesis.settings(deadline=None, max_examples=300)
@hypothesis.given(cases=st.lists(_cases(), min_size=3, max_size=3))
def test_accept_follows_the_rule(cases):
  slots, targets, wanted = zip(*cases, strict=True)
  state = accept(_slots(*slots), _targets(*targets), np.asarray(wanted), ENDS)
  for i, (slot, target, asked) in enumerate(cases):
    assert _host(state, i) == (_rule(slot, target) if asked else slot)


def _rule(slot: Slot, targets: str) -> Slot:
  """The commit rule, token by token."""
  drafts, out, remaining = slot.drafts, slot.out, slot.remaining
  if not remaining:
    return slot
  for row, token in enumerate(targets):
    out, remaining = out + token, remaining - 1
    if token in 'EF':
      return Slot('', out, 0)
    agrees = drafts[:1] == token
    drafts = drafts[1:] if agrees else ''
    if not remaining or not agrees or row == len(targets) - 1:
      break
  return Slot(drafts, out, remaining)


@pytest.mark.parametrize(
  'drafts, remaining, limit, drafting, token',
  [
    ('', 10, 4, True, '1'),
    ('abc', 10, 4, True, 'c'),
    ('abcd', 10, 4, False, 'd'),
    ('abcdefgh', 10, 99, False, 'h'),  # the buffer is full
    ('ab', 2, 9, False, 'b'),  # no more may be committed
    ('', 0, 9, False, '1'),
    ('aE', 10, 9, False, 'E'),
    ('', 10, 0, False, '1'),
  ],
)
def test_next_draft(drafts, remaining, limit, drafting, token):
  slots = _slots(Slot(drafts, remaining=remaining))
  got, newest = next_draft(slots, np.ones(1, bool), np.int32(limit), ENDS)
  assert bool(got[0]) == drafting
  assert chr(int(newest[0])) == token
  got, _ = next_draft(slots, np.zeros(1, bool), np.int32(limit), ENDS)
  assert not bool(got[0])


def test_append_draft():
  slots = _slots(Slot('a'), Slot('b'))
  tokens = np.asarray([ord('x'), ord('y')], np.int32)
  state = append_draft(slots, np.asarray([True, False]), tokens)
  assert _host(state, 0).drafts == 'ax'
  assert _host(state, 1).drafts == 'b'


@pytest.mark.parametrize(
  'token, output_tokens, remaining', [('a', 5, 4), ('a', 1, 0), ('E', 5, 0)]
)
def test_place(token, output_tokens, remaining):
  before = _slots(Slot('abc'), Slot('abc'))
  state = place(before, 1, 64, 100, ord(token), output_tokens, ENDS, HOW.row())
  assert _host(state, 0) == Slot('abc')
  assert _host(state, 1) == Slot('', token, remaining)
  assert _rounds(state, 1) == []


def test_stop():
  state = stop(_slots(Slot('abc'), Slot('abc')), 1)
  assert _host(state, 0) == Slot('abc')
  assert _host(state, 1) == Slot('', '1', 0)


def test_slots_start_ended():
  state = slots_lib.empty(3, drafts=DRAFTS, output_tokens=OUTPUTS)
  assert not np.asarray(state.remaining).any()
  # A donated argument may not occur twice.
  pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
  assert len(set(pointers)) == len(pointers)


def test_proposals_become_drafts_and_leave_other_slots_alone():
  slots = _slots(Slot(), Slot(drafts='xy'), Slot())
  tokens = _targets('abc', '???', 'de')
  slots = propose(slots, tokens, np.asarray([3, 0, 1], np.int32))
  assert [_host(slots, i).drafts for i in range(3)] == ['abc', 'xy', 'd']
  slots = accept(slots, _targets('abz', 'xyw', 'pq'), np.ones(3, bool), ENDS)
  assert [_host(slots, i).out for i in range(3)] == ['1abz', '1xyw', '1p']
  assert [_rounds(slots, i) for i in range(3)] == [[(3, 2)], [(2, 2)], [(1, 0)]]
