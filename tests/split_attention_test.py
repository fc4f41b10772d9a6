# SPDX-License-Identifier: Apache-2.0
"""The public op means one thing: XLA, the interpreted kernel, and float64."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from lynx_jax import codec as codec_lib
from lynx_jax import pallas_kernels
from lynx_jax.config import TensorCodec
from lynx_jax.pallas_kernels import dispatch
from tests.kernels_test import (
  BUDGET,
  GROUP,
  attention64,
  poison_like,
  random,
  relative,
  run,
  split,
  with_layers,
)

pytestmark = pytest.mark.usefixtures('unoptimised')

SLOTS, ROWS, HEADS, KV_HEADS, DIM, GROUPS, SINKS = 2, 2, 4, 2, 64, 3, 4
CAPACITY = GROUPS * GROUP
SCALE = 0.5  # logits of a few units: a cap and a window matter

# Float32 products and sums of a few hundred terms.
XLA_BUDGET = 1e-5


@functools.cache
def cache():
  return tuple(
    split(random((SLOTS, CAPACITY, KV_HEADS, DIM), n), sinks=SINKS)
    for n in range(2)
  )


@functools.cache
def compiled(implementation, soft_cap):
  def call(q, k, v, prefix_tokens, options):
    return pallas_kernels.split_attention(
      q,
      k,
      v,
      layer=1,
      prefix_tokens=prefix_tokens,
      sinks=SINKS,
      logits_scale=SCALE,
      soft_cap=soft_cap,
      implementation=implementation,
      **options,
    )

  return jax.jit(call)


def in_order(packed, table):
  """Returns every slot's groups as the table lists them."""

  def gather(x):
    x = np.asarray(x).reshape(SLOTS, KV_HEADS, GROUPS, -1, x.shape[-1])
    x = np.moveaxis(x, 2, 1).reshape(-1, KV_HEADS, *x.shape[3:])
    x = np.moveaxis(x[table], 1, 2)
    return jnp.asarray(x.reshape(SLOTS, KV_HEADS, -1, x.shape[-1]))

  return jax.tree.map(gather, packed)


def poisoned(packed, pages):
  """Overwrites every group that is not among `pages`."""
  keep = np.isin(np.arange(SLOTS * GROUPS), pages).reshape(SLOTS, GROUPS)

  def poison(x):
    held = np.repeat(keep, x.shape[2] // GROUPS, 1)[:, None, :, None]
    x = np.asarray(x)
    return jnp.asarray(np.where(held, x, poison_like(x)))

  return jax.tree.map(poison, packed)


@st.composite
def cases(draw, option=st.booleans()):  # noqa: B008, it is immutable
  def per_slot(strategy):
    return draw(st.lists(strategy, min_size=SLOTS, max_size=SLOTS))

  prefix = np.array(per_slot(st.integers(0, GROUPS))) * GROUP
  table = np.arange(SLOTS * GROUPS).reshape(SLOTS, GROUPS)
  options = {}
  if draw(option):
    page = st.integers(0, SLOTS * GROUPS - 1)
    row = st.lists(page, min_size=GROUPS, max_size=GROUPS)
    table = np.array(per_slot(row))
    unread = np.arange(GROUPS) * GROUP >= prefix[:, None]
    wild = draw(st.sampled_from((-1, SLOTS * GROUPS, 2**31 - 1)))
    options['block_table'] = np.where(unread, wild, table)
  if draw(option):
    first = st.lists(st.integers(0, CAPACITY + 1), min_size=ROWS, max_size=ROWS)
    options['first_tokens'] = np.array(per_slot(first))
  if draw(option):
    options['residual_tokens'] = np.array(per_slot(st.integers(0, CAPACITY)))
  return prefix, table, options


def check(case, implementation, soft_cap, budget):
  prefix, table, options = case
  k, v = cache()
  q = random((SLOTS, ROWS, HEADS, DIM), 2).astype(jnp.float32)
  held = table[np.arange(GROUPS) * GROUP < prefix[:, None]]
  out, lse = compiled(implementation, soft_cap)(
    q,
    with_layers(poisoned(k, held)),
    with_layers(poisoned(v, held)),
    *jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), (prefix, options)),
  )
  expected, expected_lse = attention64(
    q,
    in_order(k, table),
    in_order(v, table),
    prefix,
    sinks=SINKS,
    residual=options.get('residual_tokens'),
    first=options.get('first_tokens'),
    soft_cap=soft_cap,
    scale=SCALE,
  )
  some = np.isfinite(expected_lse)
  np.testing.assert_array_equal(np.isfinite(lse), some)
  np.testing.assert_array_equal(np.asarray(out)[~some], 0)
  if some.any():
    assert relative(out, expected) < budget
    np.testing.assert_allclose(
      np.asarray(lse)[some], expected_lse[some], atol=2e-3, rtol=1e-4
    )


@hypothesis.given(cases())
@hypothesis.settings(max_examples=25, deadline=None)
def test_xla_agrees_with_float64(case):
  check(case, dispatch.XLA, 2.0, XLA_BUDGET)


@hypothesis.given(cases(option=st.just(True)))  # one program: it takes 3 s
@hypothesis.settings(max_examples=25, deadline=None)
def test_interpreted_kernel_agrees_with_float64(case):
  check(case, dispatch.PALLAS_TPU_INTERPRET, 2.0, BUDGET)


def attend(k, *, rows=1, heads=2, **options):
  slots, kv_heads = k.scale.shape[:2]
  head_dim = k.planes[0].shape[2] * 2 // k.groups
  options.setdefault('implementation', dispatch.PALLAS_TPU_INTERPRET)
  return run(
    pallas_kernels.split_attention,
    jnp.zeros((slots, rows, heads * kv_heads, head_dim), jnp.float32),
    with_layers(k),
    with_layers(k),
    layer=1,
    prefix_tokens=jnp.zeros(slots, jnp.int32),
    logits_scale=1.0,
    **options,
  )


def empty(*, groups=2, group=GROUP, head_dim=DIM, planes=(4, 4)):
  return codec_lib.empty(
    (1,),
    kv_heads=1,
    groups=groups,
    group=group,
    head_dim=head_dim,
    codec=TensorCodec(planes=planes),
  )


@pytest.mark.parametrize(
  ('packed', 'options', 'message'),
  [
    ({'head_dim': 96}, {}, 'head_dim=96: must be 64, 128 or 256'),
    ({'group': 32}, {}, 'group=32: must be 128'),
    ({'groups': 33}, {}, 'a capacity of 4224 tokens: .* the next is 5120'),
    ({}, {'rows': 65}, '65 rows of 2 query heads a KV head: at most 64 rows'),
    ({}, {'sinks': 129}, 'sinks=129: at most 128'),
  ],
)
def test_what_the_kernel_cannot_serve_is_refused(packed, options, message):
  with pytest.raises(pallas_kernels.Unsupported, match=message):
    attend(empty(**packed), **options)
  options = options | {'implementation': dispatch.XLA}
  np.testing.assert_array_equal(attend(empty(**packed), **options)[0], 0)


def test_what_nothing_can_serve_is_refused():
  with pytest.raises(ValueError, match=r'soft_cap=0.0 must be positive'):
    attend(empty(), soft_cap=0.0)
  table = jnp.zeros((1, 3), jnp.int32)
  with pytest.raises(ValueError, match='holds 3 groups a slot; must be the 2'):
    attend(empty(), block_table=table)


@pytest.mark.parametrize('implementation', dispatch.IMPLEMENTATIONS[::2])
@pytest.mark.parametrize('head_dim', [64, 128])
def test_an_odd_capacity(implementation, head_dim):
  packed = split(random((1, 3 * GROUP, 1, head_dim)))
  q = random((1, 1, 2, head_dim), 2).astype(jnp.float32)
  call = functools.partial(
    pallas_kernels.split_attention,
    layer=1,
    prefix_tokens=jnp.full(1, 3 * GROUP, jnp.int32),
    logits_scale=SCALE,
    implementation=implementation,
  )
  stack = with_layers(packed)
  out, _ = jax.jit(call)(q, stack, stack)
  expected, _ = attention64(q, packed, packed, (3 * GROUP,), scale=SCALE)
  assert relative(out, expected) < BUDGET
