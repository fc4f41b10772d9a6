# SPDX-License-Identifier: Apache-2.0
"""Drafts that are looked up in the text so far: what followed there before.

It knows no model and no slot: token ids in, token ids out. The method is prompt
lookup, https://github.com/apoorvumang/prompt-lookup-decoding, or LLMA
(arXiv:2304.04487).
"""

from collections.abc import Sequence

import numpy as np

_LONGEST = 3  # tokens that must agree; fewer are tried where so many never did


def propose(
  prompt: Sequence[int] | np.ndarray, committed: Sequence[int], most: int
) -> list[int]:
  """Returns up to `most` tokens that followed the end of the text before.

  The longest n-gram at the end that also stands earlier is looked for, of 3
  tokens or fewer; of several places the last one is taken.

  | text | most | proposed |
  |---|---|---|
  | a b c x y a b c | 3 | x y a |
  | a b a b | 3 | a b |
  | a b c | 3 | |

  Args:
    prompt: token ids.
    committed: those that follow.
    most: how many to propose.
  """
  text = np.concatenate(
    [np.asarray(part, np.int32) for part in (prompt, committed)]
  )
  for count in range(min(_LONGEST, len(text) - 1), 0, -1):
    windows = np.lib.stride_tricks.sliding_window_view(text[:-1], count)
    found = np.flatnonzero((windows == text[-count:]).all(axis=1))
    if len(found):
      start = found[-1] + count
      return text[start : start + most].tolist()
  return []
