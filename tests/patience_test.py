# SPDX-License-Identifier: Apache-2.0
"""What is decided about what does not come, without a clock or a process."""

import collections
import math

import pytest

from lynx_jax.config import Target
from lynx_jax.patience import Patience, Policy, Tries

Key = collections.namedtuple('Key', 'request part')
RETRIES = 2


@pytest.mark.parametrize(
  'residual, lacks_anchor, target, recomputed, then',
  [
    (Policy.WAIT, False, Target.PLANES, 0, Policy.WAIT),
    (Policy.FAIL, False, Target.PLANES, 0, Policy.FAIL),
    (Policy.ANCHOR_OK, False, Target.PLANES, 0, Policy.ANCHOR_OK),
    (Policy.RECOMPUTE, False, Target.PLANES, 0, Policy.RECOMPUTE),
    # Nothing can go on without an Anchor, nor wait for it in hope.
    (Policy.WAIT, True, Target.PLANES, 0, Policy.RECOMPUTE),
    (Policy.FAIL, True, Target.PLANES, 1, Policy.RECOMPUTE),
    (Policy.ANCHOR_OK, True, Target.EXACT, 1, Policy.RECOMPUTE),
    # Each is tried so often and no more.
    (Policy.RECOMPUTE, False, Target.PLANES, RETRIES, Policy.FAIL),
    (Policy.ANCHOR_OK, True, Target.PLANES, RETRIES, Policy.FAIL),
    # An exact string cannot be made up.
    (Policy.ANCHOR_OK, False, Target.EXACT, 0, Policy.FAIL),
    (Policy.WAIT, False, Target.EXACT, 0, Policy.WAIT),
  ],
)
def test_what_becomes_of_a_request(
  residual, lacks_anchor, target, recomputed, then
):
  patience = Patience(residual=residual, retries=RETRIES)
  assert then is patience.policy(
    lacks_anchor=lacks_anchor, target=target, recomputed=recomputed
  )


@pytest.mark.parametrize(
  'outstanding_bytes, rate_gbps, limit_s',
  [
    (10**9, None, 0.5),  # of a rate that is not known nothing follows
    (0, 1.0, 0.5),
    (10**7, 1.0, 0.5),  # 80 ms
    (10**9, 1.0, 32.0),
    (10**9, math.inf, 0.5),
  ],
)
def test_how_long_nothing_may_come(outstanding_bytes, rate_gbps, limit_s):
  patience = Patience(stall_s=0.5)
  found = patience.stall_limit_s(outstanding_bytes, rate_gbps)
  assert found == pytest.approx(limit_s)


def test_a_link_is_reset_so_often_in_a_session():
  tries = Tries(RETRIES)
  for _ in range(RETRIES):
    assert tries.may_reset
    tries.resets += 1
  assert not tries.may_reset
  tries.connected()
  assert tries.may_reset
  tries.resets = RETRIES
  tries.landed()
  assert tries.may_reset


def test_sessions_in_vain_end_once_something_lands_or_all_is_given_up():
  tries = Tries(RETRIES)
  for note in (tries.landed, tries.gave_up):
    for _ in range(RETRIES):
      assert tries.may_connect()
      tries.connected()  # does not count as a success
    assert not tries.may_connect()
    note()


def test_a_damaged_part_is_asked_for_again_until_its_request_is_forgotten():
  tries = Tries(RETRIES)
  mine, other = Key(1, 'part'), Key(2, 'part')
  for _ in range(RETRIES):
    assert tries.may_ask_again(mine)
  tries.landed()  # other parts say nothing about this one
  assert not tries.may_ask_again(mine)
  assert tries.may_ask_again(other)
  tries.forget(mine.request)
  assert tries.may_ask_again(mine)
