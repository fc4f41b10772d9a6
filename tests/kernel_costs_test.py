# SPDX-License-Identifier: Apache-2.0
"""Kernels really compile for every TPU generation, and cost what they did."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from experiments import kernel_costs, tpu_compiler
from lynx_jax import codec as codec_lib
from lynx_jax import pallas_kernels
from lynx_jax.config import Axis, Rotation, TensorCodec
from lynx_jax.pallas_kernels import dispatch
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


def test_the_whole_matrix_is_checked_in(checked_in):
  assert list(checked_in) == [cell.key for cell in kernel_costs.cells()]


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
  cells = [kernel_costs.Cell(kernel='merge', generation=g) for g in 'abc']
  measured = []

  def measure(cell):
    if len(measured) == 2:
      raise KeyboardInterrupt
    measured.append(cell.generation)
    costs = dict.fromkeys(kernel_costs.COMPARED, 1)
    return (
      dataclasses.asdict(cell)
      | costs
      | {
        'cost_cycles': 1,
        'floor_cycles': 1,
        'speedup_over_bf16_pallas': None,
        'speedup_over_xla': None,
      }
    )

  monkeypatch.setattr(kernel_costs, 'FILE', tmp_path / 'costs.json')
  monkeypatch.setattr(kernel_costs, 'FINISHED', tmp_path / 'a' / 'finished')
  monkeypatch.setattr(kernel_costs, 'cells', lambda: cells)
  monkeypatch.setattr(kernel_costs, 'measure', measure)
  with pytest.raises(KeyboardInterrupt):
    kernel_costs.main(['--cells', 'merge'])
  assert not kernel_costs.load()
  measured[:] = ['begun anew']
  kernel_costs.main(['--cells', 'merge', '--resume'])
  assert measured == ['begun anew', 'c']
  assert list(kernel_costs.load()) == [cell.key for cell in cells]
  assert not kernel_costs.FINISHED.exists()


def test_ragged_slots_cost_whole_steps():
  """(1, 2, 5, 16) steps of 2048 tokens, bound by bundles, over those of bf16.

  Of bf16's (1, 1, 3, 8) steps of 4096 each is bound by its bytes.
  """
  bf16, anchor = (
    {
      'kernel': kernel,
      'generation': 'v5e',
      'head_dim': 128,
      'query_rows': 4,
      'kv_heads': 8,
      'block_heads': 8,
      'tokens': 32768,
      'block': block,
      'bundles': bundles,
      'floor_cycles': floor,
    }
    for kernel, block, bundles, floor in (
      ('attention_bf16', 4096, 100, 8 * 300),
      ('attention_anchor', 2048, 100, 16 * 50),
    )
  )
  speedup = kernel_costs.ragged_speedup([bf16, anchor], 'v5e')
  assert speedup == 13 * 300 / (24 * 100)


def test_the_reader_counts_what_a_listing_holds():
  listing = (
    '    0   :  { %a }\n'
    '  0x1 LH: > { %b = scalar }\n'
    '  0x2   :  {}\n'
    '  0x3   : >> { %c }\n'
    '  0x4   :  { %d }\n'
  )
  assert tpu_compiler.bundles_by_depth(listing) == (2, 2, 1)


def test_loops_are_what_branches_backwards_span():
  listing = (
    '    0   :  { %a }\n'
    '  0x1 LB: > { %b }\n'
    '  0x2 LB: >> { %c }\n'
    '  0x3   :  {}\n'
    '  0x4   : >> { %9 = sbr.rel (!%p1) target bundleno = 2 (0x2) }\n'
    '  0x5 LB: >> { %d }\n'
    '  0x6   : >> { %8 = sbr.rel (%p2) target bundleno = 5 (0x5) }\n'
    '  0x7   : > { %7 = sbr.rel (%p3) target bundleno = 9 (0x9) }\n'
    '  0x8   : > { %6 = sbr.rel (!%p4) target bundleno = 1 (0x1) }\n'
  )
  assert tpu_compiler.inner_loops(listing) == (3, 2)


def test_large_copies_are_found():
  hlo = (
    '%fused (p: u8[1048576]) -> u8[1048576] {\n'
    '  ROOT %f = u8[1048576]{0:T(1024)(4,1)} copy(%p)\n'
    '}\n'
    'ENTRY %main (p: u8[1048576]) -> u8[1048576] {\n'
    '  %p = u8[1048576]{0} parameter(0)\n'
    '  %a = bf16[2,1024,1024]{2,1,0:T(8,128)(2,1)S(1)} copy(%b), metadata={}\n'
    '  %c = bf16[8,128]{1,0} copy(%d)\n'
    '  %e = (u8[2097152]{0:T(1024)S(1)}, u8[2097152]{0}) copy-start(%x)\n'
    '  %g = u8[1048576]{0} fusion(%p), kind=kLoop, calls=%fused, metadata={}\n'
    '}\n'
  )
  assert tpu_compiler.large_copies(hlo) == [
    'bf16[2, 1024, 1024] copy',
    'u8[2097152] copy-start',
  ]
  assert [m.opcode for m in tpu_compiler.made(hlo)][-1] == 'fusion'


PLANES, TOKEN = kernel_costs.PLANES, TensorCodec(axis=Axis.TOKEN)
ROTATED = TensorCodec(rotation=Rotation.HADAMARD)
THREE = TensorCodec(planes=(2, 2, 4))
LENGTHS = jax.ShapeDtypeStruct((2,), jnp.int32)


def packed(codec, *, head_dim, groups):
  return jax.eval_shape(
    lambda: codec_lib.empty(
      (2, 2),
      kv_heads=1,
      groups=groups,
      group=kernel_costs.GROUP,
      head_dim=head_dim,
      codec=codec,
    )
  )


@pytest.mark.parametrize(
  ('generation', 'head_dim', 'groups', 'rows', 'k', 'v', 'options'),
  [
    ('v5e', 64, 15, 1, PLANES, PLANES, {'residual_tokens'}),
    ('v6e', 128, 15, 1, PLANES, PLANES, {'residual_tokens', 'block_table'}),
    ('v5p', 128, 8, 32, TOKEN, TOKEN, {'first_tokens', 'block_table'}),
    ('tpu7x', 64, 8, 1, ROTATED, TOKEN, {'first_tokens', 'residual_tokens'}),
    ('v5e', 256, 8, 1, THREE, PLANES, {'first_tokens', 'block_table'}),
  ],
)
def test_every_option_compiles(
  generation, head_dim, groups, rows, k, v, options
):
  """Odd capacities, 128 rows, other codecs, windows, tables, a soft cap."""
  k, v = (packed(codec, head_dim=head_dim, groups=groups) for codec in (k, v))
  arguments = {
    'residual_tokens': LENGTHS,
    'first_tokens': jax.ShapeDtypeStruct((2, rows), jnp.int32),
    'block_table': jax.ShapeDtypeStruct((2, groups), jnp.int32),
  }
  q = jax.ShapeDtypeStruct((2, rows, 4, head_dim), jnp.float32)

  def attention(q, k, v, tokens, options):
    return pallas_kernels.split_attention(
      q,
      k,
      v,
      layer=1,
      prefix_tokens=tokens,
      logits_scale=1.0,
      soft_cap=30.0,
      implementation=dispatch.PALLAS_TPU,
      **options,
    )

  report = tpu_compiler.compile_for(
    generation,
    attention,
    q,
    k,
    v,
    LENGTHS,
    {name: arguments[name] for name in options},
  )
  assert len(report.calls) == 1
  assert not report.copies
