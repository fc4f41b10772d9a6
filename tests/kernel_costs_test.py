# SPDX-License-Identifier: Apache-2.0
"""Kernels really compile for every TPU generation, and cost what they did."""

import itertools

import pytest

from experiments import kernel_costs, tpu_compiler
from tests.kernel_matrix import CI_CELLS

pytestmark = pytest.mark.xdist_group('libtpu')

ROOM = dict.fromkeys(tpu_compiler.CHIPS, 64 << 20)  # VMEM there is at least


def name(cell):
  return '-'.join(map(str, cell.key))


@pytest.fixture(scope='module')
def checked_in():
  return kernel_costs.load()


@pytest.mark.parametrize('cell', CI_CELLS, ids=name)
def test_cost_is_not_worse_than_checked_in(cell, checked_in):
  old, new = checked_in[cell.key], kernel_costs.measure(cell)
  assert not list(kernel_costs.regressions(new, old))
  assert new['vmem_bytes'] <= ROOM[cell.generation]
  if cell.kernel != 'attention_bf16':  # head dim 64 costs bfloat16 a copy
    assert new['cache_copies'] == 0


def test_every_form_generation_and_head_dim_is_compiled():
  cells = {(c.kernel, c.generation) for c in CI_CELLS} | {
    (c.generation, c.head_dim) for c in CI_CELLS
  }
  generations = ('v5e', 'v5p', 'v6e', 'tpu7x')
  kernels = (*kernel_costs.ATTENTION, 'attention_bf16', 'split', 'merge')
  assert set(itertools.product(kernels, generations)) <= cells
  assert set(itertools.product(generations, (64, 128, 256))) <= cells
  assert len(CI_CELLS) <= 45


def test_a_regression_is_seen():
  old = dict.fromkeys(kernel_costs.COMPARED, 100)
  assert not list(kernel_costs.regressions(old | {'bundles': 103}, old))
  worse = list(kernel_costs.regressions(old | {'spills': 104}, old))
  assert worse == ['spills 100 -> 104']


def test_the_reader_counts_what_a_listing_holds():
  listing = (
    '    0   :  { %a }\n'
    '  0x1 LH: > { %b = scalar }\n'
    '  0x2   :  {}\n'
    '  0x3   : >> { %c }\n'
    '  0x4   :  { %d }\n'
  )
  assert tpu_compiler.bundles_by_depth(listing) == (2, 2, 1)


def test_large_copies_are_found():
  hlo = (
    '%a = bf16[2,1024,1024]{2,1,0} copy(%b)\n%c = bf16[8,128]{1,0} copy(%d)\n'
  )
  assert tpu_compiler.large_copies(hlo) == ['bf16[2,1024,1024] copy(%b)']
