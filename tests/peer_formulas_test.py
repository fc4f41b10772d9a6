# SPDX-License-Identifier: Apache-2.0
"""Oracles of published codes: by hand, and what their papers say of them."""

import numpy as np
import pytest

from experiments import peer_formulas
from experiments.peer_formulas import cachegen, kivi, quantspec

TOKENS, HEADS, DIM = 300, 2, 64


@pytest.fixture(scope='module')
def x() -> np.ndarray:
  rng = np.random.default_rng(0)
  drawn = rng.normal(size=(TOKENS, HEADS, DIM))
  return (drawn * rng.uniform(0.1, 4, (HEADS, DIM))).astype(np.float32)


def _scale(x, axis, width):
  return (x.max(axis=axis) - x.min(axis=axis)).max() / (2**width - 1)


@pytest.mark.parametrize('width', [2, 4])
@pytest.mark.parametrize('is_k, end', [(True, 256), (False, 172)])
def test_kivi(x, is_k, end, width):
  found = kivi(x, is_k, width)
  np.testing.assert_array_equal(found.values[end:], x[end:])
  assert (found.values[:end] != x[:end]).mean() > 0.9
  # Half a step, of the widest group.
  groups = (
    x[:end].reshape(-1, 32, HEADS, DIM)
    if is_k
    else (x[:end].reshape(end, HEADS, 2, 32))
  )
  most = 0.51 * _scale(groups, 1 if is_k else -1, width)
  assert 0.3 * most < abs(found.values - x).max() <= most
  # A scale and an offset of 16 bits for every 32 values.
  values = HEADS * DIM
  assert found.bits == values * ((width + 1) * end + 16 * (TOKENS - end))


def test_kivi_of_a_short_prompt_is_dense(x):
  for is_k in (True, False):
    found = kivi(x[:100], is_k, 4)
    np.testing.assert_array_equal(found.values, x[:100])
    assert found.bits == 16 * x[:100].size


def test_kivi_by_hand():
  """A channel 0, 1, …, 31 has 15 steps of 31/15: 31 / 2.0664 = 15."""
  x = np.tile(np.arange(32, dtype=np.float32), 4)[:, None, None]
  found = kivi(np.broadcast_to(x, (128, 1, 32)), True, 4).values[:, 0, 0]
  scale = np.float32(np.float16(31 / 15))
  np.testing.assert_array_equal(found[:4], scale * np.array([0, 0, 1, 1]))
  assert found[31] == 15 * scale


@pytest.mark.parametrize('is_k', [True, False])
def test_quantspec(x, is_k):
  draft, target = (quantspec(x, is_k, planes) for planes in (1, 2))
  np.testing.assert_array_equal(draft.values[128:], x[128:])
  errors = [abs(c.values - x)[:128].max() for c in (draft, target)]
  # 4 signed bits of 1/16 cannot hold +1/2: half a fine step more is left.
  scale = _scale(x[:128], 0 if is_k else -1, 4)
  assert errors[0] <= 0.51 * scale
  assert scale / 32 < errors[1] <= 1.1 * scale / 16
  metadata = 32 / (128 if is_k else DIM)
  coded = 128 * HEADS * DIM
  dense = 16 * (TOKENS - 128) * HEADS * DIM
  assert draft.bits == coded * (4 + metadata) + dense
  assert target.bits == coded * (8 + metadata) + dense


def test_cachegen(x):
  fine, coarse = (cachegen(x, True, layer, 30) for layer in (9, 10))
  error = [abs(c.values - x).max(axis=(1, 2)) for c in (fine, coarse)]
  top = abs(x).max(axis=(1, 2))
  assert (error[0] <= 0.51 * top / 15).all()
  assert (error[1] <= 0.51 * top / 7).all()
  assert (error[1] > error[0]).mean() > 0.9
  # Below the width of a code of 15 values, and above nothing.
  assert 1 < coarse.bits / x.size < np.log2(15)
  assert coarse.bits < fine.bits
  assert cachegen(x, False, 1, 32).bits == cachegen(x, True, 0, 32).bits
  assert cachegen(x, False, 2, 32).bits == cachegen(x, True, 31, 32).bits


def test_entropy_by_hand():
  """A constant channel takes nothing, a fair coin a bit a token."""
  codes = np.zeros((512, 2))
  codes[::2, 1] = 1
  assert peer_formulas._entropy_bits(codes) == 512
  # The distribution of each block of 256 is its own.
  codes = np.repeat([0, 1], 256)[:, None]
  assert peer_formulas._entropy_bits(codes) == 0


@pytest.mark.parametrize('name', peer_formulas.FORMULAS)
@pytest.mark.parametrize('is_k', [True, False])
def test_constants_give_no_nan(name, is_k):
  x = np.full((300, 2, 64), 3.0, np.float32)
  found = peer_formulas.FORMULAS[name](x, is_k, 0, 30)
  np.testing.assert_allclose(found.values, x, rtol=1e-3)
  zeros = peer_formulas.FORMULAS[name](0 * x, is_k, 0, 30)
  np.testing.assert_array_equal(zeros.values, 0 * x)
