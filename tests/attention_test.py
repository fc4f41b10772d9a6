# SPDX-License-Identifier: Apache-2.0
"""Attention over a whole cache against a dense softmax in float64.

The oracle dequantises the cache, puts a slot's segments side by side by
position, and shares no code with what it checks. What no row may see is
poisoned with NaN and 0xFF, and must change no bit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lynx_jax import attention, kv_cache, programs
from lynx_jax import codec as codec_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.config import (
  Axis,
  CodecConfig,
  EngineConfig,
  LayerCodec,
  Rotation,
  TensorCodec,
)
from lynx_jax.kv_cache import Prefix, Rows, Tail
from lynx_jax.models import presets

pytestmark = pytest.mark.usefixtures('unoptimised')
LAYERS, HEAD_DIM, TAIL = 2, 16, 32
CHANNEL = TensorCodec()
ROTATED_TOKEN = TensorCodec(axis=Axis.TOKEN, rotation=Rotation.HADAMARD)
INT8 = TensorCodec(planes=(8,))
DENSE = TensorCodec(planes=())
nan = np.float32('nan')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A cache of three slots, and the rows of a pass over it.

  Slot 0 has two groups of prefix, slot 1 three, slot 2 none.
  """

  k: TensorCodec = CHANNEL
  v: TensorCodec = CHANNEL
  group: int = 32
  sinks: int = 4
  heads: int = 4
  kv_heads: int = 2
  rows: int = 3
  window: int | None = None
  soft_cap: float | None = None

  @property
  def prefix_tokens(self) -> np.ndarray:
    return np.asarray([2, 3, 0], np.int32) * self.group

  @property
  def first(self) -> np.ndarray:  # 11, 5 and 1 rows of the tail are held
    return self.prefix_tokens + np.asarray([11, 5, 1], np.int32)


CASES = {
  'lynx': Case(),
  'int8': Case(k=INT8, v=INT8, group=64, heads=2),  # MHA
  'dense': Case(k=DENSE, v=DENSE, kv_heads=1),  # MQA
  'rotated-token': Case(k=ROTATED_TOKEN, v=ROTATED_TOKEN, group=128),
  'unlike': Case(k=TensorCodec(planes=(2, 2, 4)), v=ROTATED_TOKEN, sinks=0),
  'k-deeper': Case(v=TensorCodec(planes=(4,)), rows=1),
  # Rows see the tail and the end of a group that some rows do not see; the
  # sinks and whole groups before are out of reach.
  'window': Case(window=40, soft_cap=2.0),
  'dense-window': Case(k=DENSE, v=DENSE, window=40, soft_cap=2.0),
  # Of slot 0 the first row sees three sinks, the second two, the third one.
  'window-in-sinks': Case(window=75),
}


@functools.cache
def _cache(case: Case) -> tuple[Prefix, Tail]:
  """Returns a filled cache: every row of it holds something finite."""
  rng = np.random.default_rng(0)
  groups = int(max(case.prefix_tokens)) // case.group
  heads = (case.kv_heads, HEAD_DIM)

  def dense(tokens):
    x = rng.normal(size=(LAYERS, 3, tokens, *heads))
    return jnp.asarray(x.astype(ml_dtypes.bfloat16))

  def prefix(codec):
    x = dense(groups * case.group)
    if not codec.planes:
      return x
    split = functools.partial(
      codec_lib.split, codec=codec, group=case.group, sinks=case.sinks
    )
    return jax.jit(split)(x)

  return (
    Prefix(
      prefix(case.k), prefix(case.v), dense(case.sinks), dense(case.sinks)
    ),
    Tail(dense(TAIL), dense(TAIL)),
  )


def _qkv(case: Case):
  rng = np.random.default_rng(1)
  return tuple(
    jnp.asarray(rng.normal(size=(3, case.rows, n, HEAD_DIM)), jnp.float32)
    for n in (case.heads, case.kv_heads, case.kv_heads)
  )


def _rows(case: Case, active=(True, True, True)) -> Rows:
  return Rows(
    jnp.asarray(case.first),
    jnp.asarray(case.prefix_tokens),
    jnp.asarray(active),
  )


@functools.cache
def _program(
  layer: int, by_length: bool, window: int | None, soft_cap: float | None
):
  def run(q, k, v, prefix, tail, rows, residual_tokens):
    return attention.attend(
      q,
      k,
      v,
      prefix=prefix,
      tail=tail,
      layer=layer,
      rows=rows,
      residual_tokens=residual_tokens if by_length else None,
      implementation=None,
      rule=attention.Rule(
        logits_scale=HEAD_DIM**-0.5, soft_cap=soft_cap, window=window
      ),
    )

  return programs.program(run, name='attend')


def _attend(case, prefix, tail, *, layer=1, residual_tokens=None, rows=None):
  """Runs `attend`; returns the output and the tail as NumPy arrays."""
  by_length = residual_tokens is not None
  limits = np.asarray(residual_tokens if by_length else [0] * 3, np.int32)
  rows = _rows(case) if rows is None else rows
  return jax.tree.map(
    np.asarray,
    _program(layer, by_length, case.window, case.soft_cap)(
      *_qkv(case), prefix, tail, rows, limits
    ),
  )


@functools.cache
def _dequantised(case: Case, name: str, depth: int | None) -> np.ndarray:
  """Returns float32 `[L, B, S, K, H]` of the prefix."""
  x = getattr(_cache(case)[0], name)
  if isinstance(x, PackedTensor):
    return np.asarray(jax.jit(lambda x: codec_lib.dequantise(x, depth))(x))
  return np.asarray(x).astype(np.float32)


def _oracle(case, *, layer=1, depth=None, residual_tokens=None):
  """Returns `[B, T, N, H]`: softmax in float64 over what each row may see."""
  prefix, tail = _cache(case)
  q, k, v = (np.asarray(x).astype(np.float64) for x in _qkv(case))

  def held(name, fresh, slot):
    """Returns float64 `[S, N, H]`: a slot's keys or values by position."""
    start, at = case.prefix_tokens[slot], case.first[slot]
    full = _dequantised(case, name, depth)[layer, slot]
    if residual_tokens is not None:
      anchor = _dequantised(case, name, 1)[layer, slot]
      limit = residual_tokens[slot]
      full = np.concatenate([full[:limit], anchor[limit:]])
    rest = np.asarray(getattr(tail, name)[layer, slot]).astype(np.float32)
    tokens = np.concatenate([full[:start], rest]).astype(np.float64)
    if start:
      sinks = np.asarray(getattr(prefix, f'sinks_{name}')[layer, slot])
      tokens[: case.sinks] = sinks.astype(np.float64)
    rounded = fresh[slot].astype(ml_dtypes.bfloat16).astype(np.float64)
    tokens[at : at + case.rows] = rounded
    return np.repeat(tokens, case.heads // case.kv_heads, axis=1)

  out = np.zeros(q.shape)
  for slot in range(3):
    keys, values = held('k', k, slot), held('v', v, slot)
    for row in range(case.rows):
      seen = case.first[slot] + row + 1
      lost = max(0, seen - case.window) if case.window else 0
      scores = np.einsum('nh,snh->ns', q[slot, row], keys[lost:seen])
      scores /= np.sqrt(HEAD_DIM)
      if case.soft_cap:
        scores = case.soft_cap * np.tanh(scores / case.soft_cap)
      weights = np.exp(scores - scores.max(axis=1, keepdims=True))
      weights /= weights.sum(axis=1, keepdims=True)
      out[slot, row] = np.einsum('ns,snh->nh', weights, values[lost:seen])
  return out


@pytest.mark.parametrize(
  'name, layer', [*((name, 1) for name in CASES), ('lynx', 0), ('dense', 0)]
)
def test_attend_is_a_softmax_over_all_segments(name, layer):
  case = CASES[name]
  got, tail = _attend(case, *_cache(case), layer=layer)
  # Sums of a hundred float32 products of size 1.
  np.testing.assert_allclose(got, _oracle(case, layer=layer), atol=1e-5)

  before = _cache(case)[1]
  _, k, v = _qkv(case)
  for name, fresh in (('k', k), ('v', v)):
    expected = np.asarray(getattr(before, name)).copy()
    for slot, at in enumerate(case.first - case.prefix_tokens):
      expected[layer, slot, at : at + case.rows] = np.asarray(fresh)[slot]
    np.testing.assert_array_equal(getattr(tail, name), expected)


@pytest.mark.parametrize('name', ['lynx', 'unlike', 'k-deeper'])
def test_the_anchor_alone_is_read_at_midpoints(name):
  case = CASES[name]
  prefix, tail = _cache(case)
  (anchor,) = kv_cache.anchor_only((prefix,))
  got, _ = _attend(case, anchor, tail)
  np.testing.assert_allclose(got, _oracle(case, depth=1), atol=1e-5)
  # It is another result: the test could fail.
  assert np.abs(got - _oracle(case)).max() > 1e-3


@pytest.mark.parametrize('name', ['lynx', 'unlike', 'k-deeper'])
def test_residual_tokens_choose_the_depth_by_slot(name):
  case = CASES[name]
  limits = np.asarray([1, 2, 0]) * case.group
  got, _ = _attend(case, *_cache(case), residual_tokens=limits)
  expected = _oracle(case, residual_tokens=limits)
  np.testing.assert_allclose(got, expected, atol=1e-5)
  # A group counts once it has ended.
  ragged, _ = _attend(
    case, *_cache(case), residual_tokens=limits + case.group - 1
  )
  np.testing.assert_array_equal(ragged, got)


@pytest.mark.parametrize('name', ['lynx', 'int8'])
@pytest.mark.parametrize('limit', [0, 96])
def test_residual_tokens_at_the_ends(name, limit):
  case = CASES[name]
  got, _ = _attend(case, *_cache(case), residual_tokens=[limit] * 3)
  depth = 1 if limit == 0 else None
  np.testing.assert_allclose(got, _oracle(case, depth=depth), atol=1e-5)


def _poison(case: Case, prefix: Prefix, tail: Tail) -> tuple[Prefix, Tail]:
  """Spoils all that no row may see, and the other layer."""
  first, start = case.first, case.prefix_tokens
  lost = np.zeros(3, int)  # tokens that even the first row does not see
  if case.window:
    lost = np.maximum(0, first + 1 - case.window)

  def spoil(x, valid, lost=(0, 0, 0)):
    """Keeps x[1, slot, lost[slot] : valid[slot]]."""
    x = np.array(x)
    bad = np.uint8(0xFF) if x.dtype == np.uint8 else nan.astype(x.dtype)
    x[0] = bad
    for slot, (gone, count) in enumerate(zip(lost, valid, strict=True)):
      x[1, slot, count:] = bad
      x[1, slot, :gone] = bad
    return jnp.asarray(x)

  def by_group(x, valid, rows=1):  # L B K n·rows …: groups behind the heads
    x = np.swapaxes(np.asarray(x), 2, 3)
    gone = lost // case.group * rows
    return jnp.swapaxes(spoil(x, valid * rows, gone), 2, 3)

  def spoil_prefix(x):
    if not isinstance(x, PackedTensor):
      return spoil(x, start, lost)
    groups = start // case.group
    rows = [p.shape[-2] // x.groups for p in x.planes]
    return dataclasses.replace(
      x,
      planes=tuple(
        by_group(p, groups, r) for p, r in zip(x.planes, rows, strict=True)
      ),
      scale=by_group(x.scale, groups),
      offset=by_group(x.offset, groups),
    )

  sinks = np.where(start > 0, case.sinks, 0)
  return (
    Prefix(
      spoil_prefix(prefix.k),
      spoil_prefix(prefix.v),
      spoil(prefix.sinks_k, sinks, lost),
      spoil(prefix.sinks_v, sinks, lost),
    ),
    Tail(*(spoil(x, first - start) for x in (tail.k, tail.v))),
  )


@pytest.mark.parametrize(
  'name, by_length', [*((name, False) for name in CASES), ('unlike', True)]
)
def test_what_no_row_sees_changes_no_bit(name, by_length):
  case = CASES[name]
  limits = np.asarray([1, 3, 0]) * case.group if by_length else None
  clean = _cache(case)
  got, _ = _attend(case, *clean, residual_tokens=limits)
  spoilt, _ = _attend(case, *_poison(case, *clean), residual_tokens=limits)
  np.testing.assert_array_equal(got, spoilt)


def test_poison_in_view_is_seen():
  """The poison works: it must show where a row looks at it."""
  case = CASES['lynx']
  prefix, tail = _cache(case)
  _, spoilt = _poison(case, prefix, tail)
  rows = dataclasses.replace(_rows(case), first=jnp.asarray(case.first + 1))
  got, _ = _attend(case, prefix, spoilt, rows=rows)
  assert np.isnan(got).all()


@pytest.mark.parametrize('slot', range(3))
@pytest.mark.parametrize('name', ['lynx', 'dense', 'rotated-token'])
def test_other_slots_change_no_bit(name, slot):
  case = CASES[name]
  clean = _cache(case)
  got, _ = _attend(case, *clean)

  def spoil(x):
    x = np.array(x)
    bad = np.uint8(0xFF) if x.dtype == np.uint8 else nan.astype(x.dtype)
    x[:, [i for i in range(3) if i != slot]] = bad
    return jnp.asarray(x)

  spoilt, _ = _attend(case, *jax.tree.map(spoil, clean))
  np.testing.assert_array_equal(got[slot], spoilt[slot])


def test_a_slot_that_is_not_active_keeps_its_tail():
  """It may be receiving; only its last rows change, and they hold nothing."""
  case = CASES['lynx']
  prefix, tail = _cache(case)
  # What `first` and `prefix_tokens` say of it may be left from another request.
  rows = _rows(case, active=(True, False, True))
  got, after = _attend(case, prefix, tail, rows=rows)
  for name in 'kv':
    kept = TAIL - case.rows
    before = np.asarray(getattr(tail, name))[:, 1, :kept]
    np.testing.assert_array_equal(getattr(after, name)[:, 1, :kept], before)
  expected = _oracle(case)
  np.testing.assert_allclose(got[[0, 2]], expected[[0, 2]], atol=1e-5)


def test_dense_attention_to_nothing():
  q = jnp.ones((1, 2, 2, 4), jnp.float32)
  kv = jnp.full((1, 3, 1, 4), nan)
  out, lse = attention.dense_attention(
    q, kv, kv, mask=jnp.zeros((1, 2, 3), bool), logits_scale=1.0
  )
  assert not np.asarray(out).any()
  assert (np.asarray(lse) == -np.inf).all()


def test_empty_cache_fits_the_codec_of_each_layer_group():
  codec = CodecConfig(
    group=32, layers=(LayerCodec(start=2, stop=4, k=DENSE, v=DENSE),)
  )
  engine = EngineConfig(
    slots=3, prompt_tokens=100, layer_groups=2, token_chunk=32
  )
  cache = kv_cache.empty(presets.tiny(), codec, engine)
  first, second = cache.prefix
  assert isinstance(first.k, PackedTensor)
  assert first.k.groups * 32 == engine.prefix_capacity(codec) == 32
  assert second.k.shape == (2, 3, 32, 2, 64)
  assert second.sinks_k.shape == (2, 3, 4, 2, 64)
  tail = engine.tail_capacity(codec)
  assert tail >= 64 + 31 + 64 + 48
  assert all(t.k.shape == (2, 3, tail, 2, 64) for t in cache.tail)
