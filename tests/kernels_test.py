# SPDX-License-Identifier: Apache-2.0
"""TPU kernels in interpret mode: integers exactly, floats within a budget."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from experiments import bf16_attention_tpu
from lynx_jax import codec as codec_lib
from lynx_jax import pallas_kernels
from lynx_jax.config import Axis, Rotation, TensorCodec
from lynx_jax.pallas_kernels import (
  dispatch,
  merge_tpu,
  split_attention_tpu,
  split_kv_tpu,
)

GROUP = 128
INTERPRET = dispatch.PALLAS_TPU_INTERPRET
# An interpreted kernel is thousands of small operations: compiling them well
# would take longer than all of the tests.
pytestmark = pytest.mark.usefixtures('unoptimised')
# 16-bit queries and weights leave 1e-4; float32 sums and exp2 the rest.
BUDGET = 5e-4
# More than 8 query rows: bfloat16 weights.
BUDGET_MANY = 3e-3

CHANNEL, TOKEN = TensorCodec(), TensorCodec(axis=Axis.TOKEN)
ROTATED = TensorCodec(rotation=Rotation.HADAMARD)
ROTATED_TOKEN = TensorCodec(axis=Axis.TOKEN, rotation=Rotation.HADAMARD)
THREE = TensorCodec(planes=(2, 2, 4))
INT8 = TensorCodec(planes=(8,))


def random(shape, seed=0):
  noise = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(noise.astype(jnp.bfloat16))


def spread(shape, seed=0):
  """Values of very different size and mean in different channels."""
  rng = np.random.default_rng(seed)
  size = np.exp(3 * rng.standard_normal(shape[-2:]))
  x = (rng.standard_normal(shape) + 5 * rng.standard_normal(shape[-2:])) * size
  return jnp.asarray(x.astype(jnp.bfloat16))


@functools.partial(jax.jit, static_argnames='codec')
def split(x, codec=CHANNEL, sinks=0):
  """The reference, as one program; it is many operations."""
  return codec_lib.split(x, codec, group=GROUP, sinks=sinks)


def run(op, *arrays, **options):
  """Runs an op, its kernel and all around it, as one program."""
  return jax.jit(functools.partial(op, **options))(*arrays)


def with_layers(packed, layers=2):
  """Puts `packed` at layer 1 of a stack whose layer 0 is poison."""

  def stack(x):
    x = np.asarray(x)
    return jnp.asarray(np.stack([poison_like(x)] * (layers - 1) + [x]))

  return jax.tree.map(stack, packed)


def poison_like(x):
  return np.full_like(x, 0xFF if x.dtype == np.uint8 else np.nan)


def poisoned(packed, tokens):
  """Overwrites every group at or above `tokens` of each slot."""
  held = np.arange(packed.groups)[None] * GROUP < np.asarray(tokens)[:, None]

  def poison(x):
    keep = np.repeat(held, x.shape[2] // packed.groups, 1)[:, None, :, None]
    x = np.asarray(x)
    return jnp.asarray(np.where(keep, x, poison_like(x)))

  return jax.tree.map(poison, packed)


_centred = jax.jit(codec_lib.centred, static_argnums=1)


def values64(packed, residual_tokens=None):
  """Reads planes in float64: [B, K, S, H], in the codec's own basis."""

  def read(depth):
    u = np.asarray(_centred(packed, depth), np.float64)
    u = u + 2 ** (packed.codec.bits - 1)
    over = -1 if packed.codec.axis is Axis.CHANNEL else -2
    scale = np.expand_dims(np.asarray(packed.scale, np.float64), over)
    offset = np.expand_dims(np.asarray(packed.offset, np.float64), over)
    return offset + scale * u

  x = read(packed.depth)
  if residual_tokens is not None:
    end = (np.arange(packed.groups) + 1) * GROUP
    full = end[None] <= np.asarray(residual_tokens)[:, None]
    x = np.where(full[:, None, :, None, None], x, read(1))
  x = np.moveaxis(x, -1, -2)
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def attention64(
  q,
  k,
  v,
  tokens,
  *,
  sinks=0,
  residual=None,
  first=None,
  soft_cap=None,
  scale=None,
):
  """Attention in float64 over the kernel's own packed data."""
  q = np.asarray(q, np.float64)
  batch, rows, heads, head_dim = q.shape
  hadamard = np.asarray(codec_lib.rotate(jnp.eye(head_dim)), np.float64)
  keys, values = values64(k, residual), values64(v, residual)
  if k.codec.rotation is Rotation.HADAMARD:
    keys = keys @ hadamard
  if v.codec.rotation is Rotation.HADAMARD:
    values = values @ hadamard
  q = q.reshape(batch, rows, keys.shape[1], -1, head_dim)
  scale = head_dim**-0.5 if scale is None else scale
  logits = np.einsum('btkgh,bksh->btkgs', q, keys) * scale
  if soft_cap is not None:
    logits = soft_cap * np.tanh(logits / soft_cap)
  at = np.arange(keys.shape[2])
  seen = (at >= sinks) & (at < np.asarray(tokens)[:, None])  # B S
  seen = np.broadcast_to(seen[:, None], (batch, rows, len(at)))
  if first is not None:
    seen = seen & (at >= np.asarray(first)[:, :, None])
  logits = np.where(seen[:, :, None, None], logits, -np.inf)
  top = np.max(logits, -1, keepdims=True)
  top = np.where(np.isinf(top), 0, top)
  weights = np.exp(logits - top)
  mass = weights.sum(-1, keepdims=True)
  out = np.einsum('btkgs,bksh->btkgh', weights, values)
  out = out / np.where(mass > 0, mass, 1)
  with np.errstate(divide='ignore'):
    lse = (np.log(mass) + top)[..., 0]
  return out.reshape(batch, rows, heads, -1), lse.reshape(batch, rows, heads)


def relative(actual, expected):
  error = np.asarray(actual, np.float64) - expected
  return np.sqrt(np.mean(error**2) / np.mean(expected**2))


class SplitTest(parameterized.TestCase):
  @parameterized.parameters(
    (128, 2, 256, CHANNEL, 4),
    (64, 3, 384, CHANNEL, 0),
    (64, 2, 256, TOKEN, 4),
    (256, 1, 256, THREE, 127),
    (128, 2, 128, ROTATED, 4),
    (128, 1, 256, ROTATED_TOKEN, 4),
    (64, 2, 128, INT8, 1),
    # Two steps over tokens and two over heads: sinks are in the first alone.
    (128, 2, 2048, TensorCodec(planes=(4,)), 4),
  )
  def test_bits_are_those_of_the_codec(self, dim, heads, tokens, codec, sinks):
    x = spread((2, tokens, heads, dim))
    x = x.at[:, :, :, 3].set(1.5)  # a constant channel has scale 0
    x = x.at[1, 5, 0, 7].set(3e38)  # nearly the largest: its sums overflow
    blocks = split_kv_tpu.BlockSizes(
      tokens=1024, heads=1 if tokens > 1024 else 4
    )
    actual = jax.jit(
      lambda x, sinks: split_kv_tpu.split_tpu(
        x,
        codec,
        group=GROUP,
        sinks=sinks,
        block_sizes=blocks,
        interpret=True,
      )
    )(x, jnp.int32(sinks))
    expected = split(x, codec, sinks)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)

  def test_ties_round_to_even(self):
    # scale 1, so that every x.5 is a tie; an anchor digit hangs on some.
    column = np.concatenate([np.arange(64) + 0.5, np.arange(62), [0, 255]])
    x = np.broadcast_to(column[:, None, None], (128, 1, 64))
    x = jnp.asarray(x, jnp.bfloat16)
    actual = run(
      split_kv_tpu.split_tpu,
      x[None],
      codec=CHANNEL,
      group=GROUP,
      interpret=True,
    )
    expected = split(x[None])
    jax.tree.map(np.testing.assert_array_equal, actual, expected)

  def test_public_op_splits_both(self):
    k, v = random((1, 128, 1, 64)), random((1, 128, 1, 64), 1)
    results = [
      run(
        pallas_kernels.split_kv,
        k,
        v,
        k_codec=CHANNEL,
        v_codec=TOKEN,
        group=GROUP,
        sinks=4,
        implementation=implementation,
      )
      for implementation in (dispatch.XLA, INTERPRET)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)


class MergeTest(parameterized.TestCase):
  @parameterized.parameters(
    (128, 2, CHANNEL, 2),
    (128, 2, CHANNEL, 1),
    (64, 3, TOKEN, 1),
    (256, 1, THREE, 2),
    (128, 1, ROTATED, 2),
    (64, 1, INT8, 1),
  )
  def test_bits_are_those_of_the_codec(self, dim, heads, codec, depth):
    x = spread((2, 256, heads, dim))
    packed = split(x, codec, 4).keep(depth)
    np.testing.assert_array_equal(
      run(pallas_kernels.merge, packed, implementation=INTERPRET),
      run(pallas_kernels.merge, packed, implementation=dispatch.XLA),
    )

  def test_steps_over_tokens_and_heads_meet(self):
    packed = split(spread((2, 2048, 2, 128)))
    blocks = split_kv_tpu.BlockSizes(tokens=1024, heads=1)
    np.testing.assert_array_equal(
      run(merge_tpu.merge_tpu, packed, block_sizes=blocks, interpret=True),
      run(pallas_kernels.merge, packed, implementation=dispatch.XLA),
    )


@functools.cache
def attention(sinks, scale, soft_cap, blocks):
  """Returns the program of what is static; lengths are arguments."""

  def call(q, k, v, prefix_tokens, options):
    return split_attention_tpu.split_attention_tpu(
      q,
      k,
      v,
      layer=1,
      prefix_tokens=prefix_tokens,
      sinks=sinks,
      logits_scale=scale,
      soft_cap=soft_cap,
      block_sizes=blocks,
      interpret=True,
      **options,
    )

  return jax.jit(call)


class AttentionTest(parameterized.TestCase):
  def check(
    self,
    *,
    dim=128,
    heads=4,
    kv_heads=1,
    rows=1,
    tokens=(384, 128),
    capacity=384,
    k_codec=CHANNEL,
    v_codec=CHANNEL,
    depth=2,
    sinks=4,
    blocks=None,
    k=None,
    v=None,
    q_size=1.0,
    budget=BUDGET,
    **options,
  ):
    batch = len(tokens)
    shape = (batch, capacity, kv_heads, dim)
    k = random(shape) if k is None else k
    v = random(shape, 1) if v is None else v
    q = random((batch, rows, heads, dim), 2).astype(jnp.float32) * q_size

    def pack(x, codec):
      packed = split(x, codec, sinks).keep(depth)
      return packed, with_layers(poisoned(packed, tokens))

    k, k_stack = pack(k, k_codec)
    v, v_stack = pack(v, v_codec)
    lengths = {
      f'{name}_tokens': jnp.asarray(options[name], jnp.int32)
      for name in ('first', 'residual')
      if name in options
    }
    program = attention(
      sinks,
      dim**-0.5,
      options.get('soft_cap'),
      blocks or split_attention_tpu.BlockSizes(tokens=1024),
    )
    out, lse = program(
      q, k_stack, v_stack, jnp.asarray(tokens, jnp.int32), lengths
    )
    expected, expected_lse = attention64(
      q, k, v, tokens, sinks=sinks, **options
    )
    assert relative(out, expected) < budget
    some = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isfinite(lse), some)
    np.testing.assert_allclose(
      np.asarray(lse)[some], expected_lse[some], atol=2e-3, rtol=1e-4
    )
    np.testing.assert_array_equal(np.asarray(out)[~some], 0)

  @parameterized.parameters(
    {'dim': 64, 'heads': 9, 'kv_heads': 3, 'depth': 1},
    {'dim': 64, 'heads': 2, 'kv_heads': 1, 'rows': 4},
    {'dim': 128, 'heads': 8, 'kv_heads': 2, 'depth': 1},
    {'dim': 128, 'heads': 2, 'kv_heads': 2},
    {'dim': 128, 'heads': 4, 'kv_heads': 1, 'rows': 16},
    {'dim': 256, 'heads': 4, 'kv_heads': 1},
    {'dim': 256, 'heads': 2, 'kv_heads': 1, 'rows': 3, 'depth': 1},
  )
  def test_heads_and_rows(self, **case):
    many = case.get('rows', 1) * case['heads'] // case['kv_heads'] > 8
    self.check(**case, budget=BUDGET_MANY if many else BUDGET)

  @parameterized.parameters(
    (TOKEN, CHANNEL, 2),
    (CHANNEL, TOKEN, 1),
    (ROTATED, ROTATED_TOKEN, 2),
    (THREE, CHANNEL, 1),
    (THREE, THREE, 3),
    (INT8, INT8, 1),
    (TensorCodec(planes=(4,)), TensorCodec(planes=(4,)), 1),
  )
  def test_codecs(self, k_codec, v_codec, depth):
    self.check(
      k_codec=k_codec, v_codec=v_codec, depth=depth, tokens=(256,), capacity=256
    )

  @parameterized.parameters(
    {
      'dim': 128,
      'key_dtype': jnp.bfloat16,
      'kv_heads': 4,  # the loop over heads has a turn
      'residual': (640, 0),
    },
    {'dim': 64, 'k_codec': TOKEN, 'v_codec': TOKEN, 'soft_cap': 5.0},
    {'dim': 64, 'key_dtype': jnp.bfloat16, 'k_codec': TOKEN},
    {'dim': 128, 'k_size': 10, 'q_size': 6.0},
  )
  def test_many_rows(self, *, key_dtype=jnp.int8, kv_heads=2, k_size=0, **case):
    """Some heads; two blocks where lengths differ; slots end within one."""
    blocks = split_attention_tpu.BlockSizes(tokens=1024, key_dtype=key_dtype)
    if key_dtype == jnp.bfloat16:  # as on a wide MXU
      blocks = dataclasses.replace(blocks, tiles_per_dot=2, heads_ahead=2)
    long = 'residual' in case or 'soft_cap' in case
    capacity, tokens = (2048, (1280, 384)) if long else (640, (640, 384))
    if case.get('soft_cap'):
      case['first'] = np.array([[0, 300, 1300]] * 2).repeat(3, 1)
    k = random((2, capacity, kv_heads, case['dim'])) + jnp.bfloat16(k_size)
    self.check(
      **case,
      heads=2 * kv_heads,
      kv_heads=kv_heads,
      rows=9,
      k=k,
      tokens=tokens,
      capacity=capacity,
      blocks=blocks,
      budget=BUDGET_MANY,
    )

  @parameterized.parameters(((0, 0),), ((0, 2048),), ((128, 1152),))
  def test_ragged_slots_and_blocks(self, tokens):
    if any(tokens):
      self.check(tokens=tokens, capacity=2048)
    else:
      packed = with_layers(split(random((2, 256, 1, 64))))
      out, lse = run(
        split_attention_tpu.split_attention_tpu,
        random((2, 1, 1, 64)),
        packed,
        packed,
        layer=1,
        prefix_tokens=jnp.zeros(2, jnp.int32),
        logits_scale=1.0,
        interpret=True,
      )
      np.testing.assert_array_equal(out, 0)
      np.testing.assert_array_equal(lse, -np.inf)

  def test_head_blocks(self):
    blocks = split_attention_tpu.BlockSizes(tokens=1024, heads=2)
    self.check(
      heads=4, kv_heads=4, tokens=(1024, 384), capacity=2048, blocks=blocks
    )

  def test_tiles_share_a_product(self):
    blocks = split_attention_tpu.BlockSizes(tokens=1024, tiles_per_dot=2)
    self.check(dim=64, blocks=blocks, tokens=(640,), capacity=768)

  @parameterized.parameters(((0, 384),), ((640, 128),), ((1024, 0),))
  def test_residual_tokens(self, residual):
    self.check(residual=residual, tokens=(1024, 384), capacity=1024)

  def test_window(self):
    first = ((0, 1100), (384, 400), (130, 300))
    self.check(
      rows=2, first=first, tokens=(2048, 384, 384), capacity=2048, heads=2
    )

  def test_soft_cap(self):
    self.check(soft_cap=5.0, q_size=6.0)

  def test_block_table(self):
    k, v = (split(random((2, 512, 2, 64), n)) for n in range(2))
    # Slot 0 reads slot 1's first groups (a shared prefix), then its own.
    table = np.array([[4, 5, 1, 99], [7, 6, 0, 0]])
    tokens = (384, 256)

    def paged(packed):
      def gather(x):
        x = np.asarray(x).reshape(2, 2, packed.groups, -1, x.shape[-1])
        x = np.moveaxis(x, 2, 1).reshape(8, *x.shape[1:2], *x.shape[3:])
        x = np.moveaxis(x[np.minimum(table, 7)], 1, 2)
        return jnp.asarray(x.reshape(2, 2, -1, x.shape[-1]))

      return jax.tree.map(gather, packed)

    q = random((2, 1, 4, 64), 3)
    out, _ = run(
      split_attention_tpu.split_attention_tpu,
      q,
      with_layers(k),
      with_layers(v),
      layer=1,
      prefix_tokens=jnp.asarray(tokens, jnp.int32),
      logits_scale=0.125,
      block_table=jnp.asarray(table, jnp.int32),
      interpret=True,
    )
    expected, _ = attention64(q, paged(k), paged(v), tokens)
    assert relative(out, expected) < BUDGET

  def test_hard_logits(self):
    # K's common mean of 10 sigma costs nothing: it is in the offset.
    self.check(k=random((2, 384, 1, 128)) + 10, q_size=1.0)
    self.check(q_size=6.0)

  @parameterized.parameters(1, 9)
  def test_sink_among_diffuse_tokens(self, rows):
    # One token 12 nats above 8k others, whose weights of 6e-6 have 16 bits
    # wherever the sink is not in their own group.
    tokens = 8192
    k = random((1, tokens, 1, 64)) * jnp.bfloat16(0.3)
    v = random((1, tokens, 1, 64), 1)
    q = random((1, rows, 4, 64), 2)
    push = q[0].mean((0, 1)).astype(jnp.float32)
    push = push * 12 * 8 / (push @ push)
    k = k.at[0, 700, 0].set(push.astype(jnp.bfloat16))
    self.check(
      dim=64,
      rows=rows,
      k=k,
      v=v,
      tokens=(tokens,),
      capacity=tokens,
      budget=0.006,
    )

  def test_agrees_with_xla(self):
    k, v = (split(random((1, 256, 2, 64), n)) for n in range(2))
    results = [
      run(
        pallas_kernels.split_attention,
        random((1, 2, 4, 64), 2).astype(jnp.float32),
        with_layers(k),
        with_layers(v),
        layer=1,
        prefix_tokens=jnp.array([256], jnp.int32),
        sinks=4,
        logits_scale=0.125,
        implementation=implementation,
      )
      for implementation in (dispatch.XLA, INTERPRET)
    ]
    for actual, expected in zip(*results, strict=True):
      assert relative(actual, np.asarray(expected)) < BUDGET

  def test_a_steps_copies_race_with_nothing(self):
    from jax.experimental.pallas import tpu as pltpu

    tokens = (2048, 128)
    packed = split(random((2, 2048, 1, 64)))
    q = random((2, 1, 1, 64), 2)
    out, _ = run(
      split_attention_tpu.split_attention_tpu,
      q,
      with_layers(packed),
      with_layers(packed),
      layer=1,
      prefix_tokens=jnp.asarray(tokens, jnp.int32),
      residual_tokens=jnp.asarray((1024, 0), jnp.int32),
      logits_scale=0.125,
      block_sizes=split_attention_tpu.BlockSizes(tokens=1024),
      interpret=pltpu.InterpretParams(
        detect_races=True, uninitialized_memory='nan'
      ),
    )
    expected, _ = attention64(q, packed, packed, tokens, residual=(1024, 0))
    assert relative(out, expected) < BUDGET
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


class DispatchTest(parameterized.TestCase):
  def split(self, implementation, group=GROUP, dim=64):
    x = random((1, 128, 1, dim))
    return run(
      pallas_kernels.split_kv,
      x,
      x,
      k_codec=CHANNEL,
      v_codec=CHANNEL,
      group=group,
      implementation=implementation,
    )

  def test_none_says_why(self):
    with dispatch.record() as choices:
      self.split(None)
    assert str(choices[0]) == 'split_kv runs as xla: the backend is cpu'

  def test_a_named_kernel_never_falls_back(self):
    with pytest.raises(pallas_kernels.Unsupported, match=r'group=32.*128'):
      self.split(INTERPRET, group=32)
    with pytest.raises(pallas_kernels.Unsupported, match=r'head_dim=32.*64'):
      self.split(INTERPRET, dim=32)

  def test_narrow_planes_name_the_nearest(self):
    x = random((1, 128, 1, 64))
    with pytest.raises(pallas_kernels.Unsupported, match='4 bits or more'):
      split_kv_tpu.split_tpu(
        x, TensorCodec(planes=(2,)), group=GROUP, interpret=True
      )

  def test_an_unknown_name_is_refused(self):
    with pytest.raises(ValueError, match="'cuda' must be None or one of"):
      self.split('cuda')


class BlockSizesTest(parameterized.TestCase):
  @parameterized.parameters(
    split_attention_tpu.BlockSizes, split_kv_tpu.BlockSizes
  )
  def test_are_validated(self, kind):
    with pytest.raises(ValueError, match='tokens=1000 must be a multiple'):
      kind(tokens=1000)
    with pytest.raises(ValueError, match='heads=0 must be positive'):
      kind(heads=0)


class YardstickTest(absltest.TestCase):
  def test_bf16_attention(self):
    k, v = (random((1, 2, 2, 256, 64), n) for n in range(2))
    q = random((2, 2, 4, 64), 2)
    tokens = np.array([256, 100], np.int32)
    out, lse = run(
      bf16_attention_tpu.bf16_attention_tpu,
      q,
      k,
      v,
      layer=0,
      prefix_tokens=jnp.asarray(tokens),
      logits_scale=0.125,
      block_tokens=128,
      block_heads=2,
      interpret=True,
    )
    keys, values = (np.asarray(x[0], np.float64) for x in (k, v))
    rows = np.asarray(q, np.float64).reshape(2, 2, 2, 2, 64)
    logits = np.einsum('btkgh,bksh->btkgs', rows, keys) / 8
    seen = np.arange(256) < tokens[:, None]
    weights = np.where(seen[:, None, None, None], np.exp(logits), 0)
    mass = weights.sum(-1)
    expected = np.einsum('btkgs,bksh->btkgh', weights, values) / mass[..., None]
    assert relative(out, expected.reshape(2, 2, 4, 64)) < 0.01
    np.testing.assert_allclose(lse, np.log(mass).reshape(2, 2, 4), atol=0.01)
