# SPDX-License-Identifier: Apache-2.0
"""What is looked up is what followed in the text before."""

import hypothesis
import pytest
from hypothesis import strategies as st

from lynx_jax.speculative import prompt_lookup


def _propose(prompt: str, committed: str, most: int) -> str:
  ids = prompt_lookup.propose([*map(ord, prompt)], [*map(ord, committed)], most)
  return ''.join(map(chr, ids))


@pytest.mark.parametrize(
  'prompt, committed, most, proposed',
  [
    ('abcxyab', 'c', 3, 'xya'),
    ('ab', 'ab', 3, 'ab'),
    ('ab', 'c', 3, ''),
    ('', 'a', 3, ''),
    ('a', 'a', 3, 'a'),
    # The longest n-gram counts, of alike ones the last.
    ('bcd1cd2', 'bcd', 1, '1'),
    ('cd1cd2', 'cd', 1, '2'),
    ('abcab', 'c', 0, ''),
  ],
)
def test_proposals(prompt, committed, most, proposed):
  assert _propose(prompt, committed, most) == proposed


@hypothesis.settings(deadline=None)
@hypothesis.given(
  st.text('abc', max_size=40), st.text('abc', min_size=1), st.integers(0, 5)
)
def test_a_proposal_stands_in_the_text_behind_its_end(prompt, committed, most):
  text = prompt + committed
  proposed = _propose(prompt, committed, most)
  assert len(proposed) <= most
  assert not proposed or text[-1] + proposed in text
  if most and text[-1] in text[:-1]:
    assert proposed
