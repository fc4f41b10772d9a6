# SPDX-License-Identifier: Apache-2.0
"""The engine's programs compile for a TPU, kernels included, without copies.

A copy of the cache in a round would cost more than the round reads. Checked
are the programs themselves, over layers of real heads and a narrow model: the
cache's shape does not depend on the model dim, the time to compile does.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from experiments import tpu_compiler
from lynx_jax import kv_cache, prefill
from lynx_jax import mesh as mesh_lib
from lynx_jax.config import CodecConfig, EngineConfig, Target
from lynx_jax.models import cached, presets
from lynx_jax.models.transformer import Transformer
from lynx_jax.pallas_kernels import dispatch
from lynx_jax.speculative import decode
from lynx_jax.speculative import slots as slots_lib

pytestmark = pytest.mark.xdist_group('libtpu')

LAYERS = 2  # of one group: indexing a layer must copy nothing
ENGINE = EngineConfig(
  slots=2,
  prompt_tokens=32 * 1024 + 64,
  output_tokens=1024,
  layer_groups=1,
  implementation=dispatch.PALLAS_TPU,
)
# 248 groups, which blocks of 8 divide but no larger ones: the kernel's body is
# a quarter of that of its largest block, and so is the time to compile it.
SMALL_BLOCKS = dataclasses.replace(ENGINE, prompt_tokens=31 * 1024 + 64)
MODELS = {
  name: dataclasses.replace(
    presets.tiny(
      layers=LAYERS, heads=heads, kv_heads=kv_heads, head_dim=head_dim
    ),
    model_dim=512,
    ff_dim=512,
    context_tokens=1 << 20,
    dtype='bfloat16',
  )
  for name, heads, kv_heads, head_dim in (
    ('SmolLM2-135M', 9, 3, 64),
    ('Llama-3.1-8B', 32, 8, 128),
  )
}


def split(model):
  graphs, params = cached.split(
    nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0)))
  )
  return graphs, cached.layer_params(params, 0, LAYERS)


def activations(rows, slots, model):
  return jax.ShapeDtypeStruct((slots, rows, model.model_dim), jnp.bfloat16)


def n_bytes(tree):
  return min(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


# Rows are written in place, by fusions that update a slice.
IN_PLACE = ('fusion', 'dynamic-update-slice')
# What XLA makes to read ahead into VMEM, where a small tail may even stay.
AHEAD = ('copy-start', 'copy-done', 'slice-start', 'slice-done', 'custom-call')


def copies(report, cache):
  """Returns what the module makes in the shape of an array of the cache."""
  shapes = {tuple(x.shape) for x in jax.tree.leaves(cache)}
  return [
    str(x)
    for x in tpu_compiler.made(report.hlo)
    if x.shape in shapes and x.opcode not in (*IN_PLACE, *AHEAD)
  ]


@pytest.mark.parametrize(
  ('name', 'form'),
  [
    ('SmolLM2-135M', 'draft'),
    ('SmolLM2-135M', 'sharpened'),
    ('SmolLM2-135M', 'verify'),
    ('Llama-3.1-8B', 'sharpened'),  # the others are in `rounds`, below
  ],
)
def test_a_round_copies_no_cache(name, form):
  # One form of few rows has the largest block, that with most planes;
  # kernel_costs_test compiles that of many rows.
  engine = ENGINE if form == 'sharpened' else SMALL_BLOCKS
  model = MODELS[name]
  graphs, params = split(model)
  cache = jax.eval_shape(lambda: kv_cache.empty(model, CodecConfig(), engine))
  prefix, (tail,) = cache.prefix, cache.tail
  if form == 'draft':
    prefix = kv_cache.anchor_only(prefix)
  rows = ENGINE.verify_rows if form == 'verify' else 1
  programs = decode._programs(graphs, ENGINE.verify_rows, dispatch.PALLAS_TPU)
  slots = jax.ShapeDtypeStruct((ENGINE.slots,), jnp.int32)
  where = kv_cache.Rows(slots, slots, slots.update(dtype=jnp.bool_))
  report = tpu_compiler.compile_for(
    'v5e',
    programs.verify_layers if form == 'verify' else programs.draft_layers,
    params,
    activations(rows, ENGINE.slots, model),
    prefix[0],
    tail,
    where,
    slots if form == 'sharpened' else None,  # residual_tokens
  )
  kernels = [name for name in report.calls if 'split_attention' in name]
  assert len(kernels) == LAYERS
  # Planes are the only bytes there are: none are made, prefetched or moved.
  assert not [str(x) for x in tpu_compiler.made(report.hlo) if x.dtype == 'u8']
  assert not copies(report, tail)
  assert report.temp_bytes < n_bytes(prefix[0].k.planes)


def test_repeated_rounds_copy_no_cache():
  """Drafts, verifications and their sampling are loops of one program."""
  model = dataclasses.replace(MODELS['Llama-3.1-8B'], layers=1)
  graphs, params = cached.split(
    nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0)))
  )
  # The test above compiles the largest block.
  cache = jax.eval_shape(
    lambda: kv_cache.empty(model, CodecConfig(), SMALL_BLOCKS)
  )
  slots = jax.eval_shape(
    lambda: slots_lib.empty(
      ENGINE.slots,
      drafts=ENGINE.verify_rows - 1,
      output_tokens=ENGINE.output_tokens,
    )
  )
  programs = decode._programs(graphs, ENGINE.verify_rows, dispatch.PALLAS_TPU)
  number = jax.ShapeDtypeStruct((), jnp.int32)
  report = tpu_compiler.compile_for(
    'v5e',
    programs.rounds,
    params,
    kv_cache.anchor_only(cache.prefix),
    cache.prefix,
    cache.tail,
    slots,
    jax.ShapeDtypeStruct((ENGINE.slots,), jnp.bool_),
    number,  # draft_tokens
    number,  # max_rounds
    jax.ShapeDtypeStruct((1,), jnp.int32),  # end_tokens
  )
  kernels = [name for name in report.calls if 'split_attention' in name]
  assert len(kernels) == 2  # drafts read fewer planes
  assert not [str(x) for x in tpu_compiler.made(report.hlo) if x.dtype == 'u8']
  assert not copies(report, cache.tail)
  assert report.temp_bytes < n_bytes(cache.prefix[0].k.planes)


# Rows of a verification: a prime that divides no other dimension.
ROWS = 23


def _sums_over_rows(hlo):
  sums = [*tpu_compiler.summed(hlo)]
  assert len(sums) > 4, 'no sums were found'
  assert any(ROWS in x.shape for x in tpu_compiler.made(hlo))
  return [s for s in sums if any(size % ROWS == 0 for size in s[1])]


@pytest.mark.parametrize('target', ['planes', 'exact'])
def test_no_sum_of_a_verification_runs_over_its_rows(target):
  """So what a row computes does not depend on which row it is.

  A logical or does: keys that no row sees are read as 0, and weigh 0 anyway.
  """
  model = MODELS['SmolLM2-135M']
  graphs, params = split(model)
  engine = dataclasses.replace(
    ENGINE, slots=1, verify_rows=ROWS, prompt_tokens=2048
  )
  codec = CodecConfig(exact=True)
  cache = jax.eval_shape(lambda: kv_cache.empty(model, codec, engine))
  programs = decode._programs(graphs, ROWS, dispatch.PALLAS_TPU)
  scalar = jax.ShapeDtypeStruct((1,), jnp.int32)
  report = tpu_compiler.compile_for(
    'v5e',
    programs.verify_layers,
    params,
    activations(ROWS, 1, model),
    cache.target(Target(target))[0],
    cache.tail[0],
    kv_cache.Rows(scalar, scalar, scalar.update(dtype=jnp.bool_)),
    None,
  )
  assert not _sums_over_rows(report.hlo)


def test_a_planted_sum_over_rows_is_seen():
  def planted(h, w):
    h = jax.nn.relu(h @ w) @ w
    h = h / jnp.sum(h**2, axis=2, keepdims=True)
    h = h @ w - jnp.max(h, axis=2, keepdims=True)
    return jax.nn.softmax(h) - jnp.mean(h, axis=1, keepdims=True)

  h = jax.ShapeDtypeStruct((1, ROWS, 512), jnp.float32)
  w = jax.ShapeDtypeStruct((512, 512), jnp.float32)
  report = tpu_compiler.compile_for('v5e', planted, h, w)
  ((opcode, sizes),) = _sums_over_rows(report.hlo)
  assert (opcode, sizes) == ('reduce', (ROWS,))


def on_mesh(tree, places):
  """Returns the tree with shardings; `places` has one for whole subtrees."""
  return jax.tree.map(
    lambda place, part: jax.tree.map(lambda x: x.update(sharding=place), part),
    places,
    tree,
    is_leaf=lambda x: isinstance(x, jax.sharding.Sharding),
  )


def test_a_round_on_four_chips_reduces_twice_a_layer():
  """Each chip runs the kernel on its own heads, and copies no cache."""
  model = MODELS['Llama-3.1-8B']
  made = mesh_lib.make(tpu_compiler.devices('v5e:2x2'), model)
  assert made.size == 4
  graphs, params = split(model)
  params = tuple(on_mesh(p, mesh_lib.places(made, p)) for p in params)
  cache = jax.eval_shape(
    lambda: kv_cache.empty(model, CodecConfig(), SMALL_BLOCKS)
  )
  places = jax.tree.map(
    functools.partial(mesh_lib.place, made), kv_cache.specs(cache)
  )
  cache = on_mesh(cache, places)
  everywhere = mesh_lib.place(made, jax.sharding.PartitionSpec())
  slots = jax.ShapeDtypeStruct((ENGINE.slots,), jnp.int32, sharding=everywhere)
  programs = decode._programs(
    graphs, ENGINE.verify_rows, dispatch.PALLAS_TPU, made
  )
  report = tpu_compiler.compile_for(
    'v5e',
    programs.verify_layers,
    params,
    activations(ENGINE.verify_rows, ENGINE.slots, model).update(
      sharding=everywhere
    ),
    cache.prefix[0],
    cache.tail[0],
    kv_cache.Rows(slots, slots, slots.update(dtype=jnp.bool_)),
    None,
  )
  kernels = [name for name in report.calls if 'split_attention' in name]
  assert len(kernels) == LAYERS
  assert tpu_compiler.collectives(report.hlo) == {'all-reduce': 2 * LAYERS}
  assert not [str(x) for x in tpu_compiler.made(report.hlo) if x.dtype == 'u8']
  shard = jax.tree.map(
    lambda x: x.update(shape=x.sharding.shard_shape(x.shape)), cache.tail[0]
  )
  assert not copies(report, shard)


def test_prefill_of_128k_tokens_is_one_program_without_copies():
  model = MODELS['Llama-3.1-8B']
  graphs, params = split(model)
  tokens = 128 * 1024
  engine = dataclasses.replace(ENGINE, prompt_tokens=tokens)
  dense = jax.ShapeDtypeStruct(
    (LAYERS, tokens, model.kv_heads, model.head_dim), jnp.bfloat16
  )
  kv = prefill.DenseKV(dense, dense)
  scalar = jax.ShapeDtypeStruct((), jnp.int32)
  _, layers, _ = prefill._programs(graphs, dispatch.PALLAS_TPU)
  report = tpu_compiler.compile_for(
    'v5e',
    layers,
    params,
    activations(engine.token_chunk, 1, model),
    kv,
    scalar,  # the offset
    scalar,
  )
  kernels = [name for name in report.calls if 'splash' in name]
  assert len(kernels) == 2 * LAYERS  # a chunk's own block, and earlier ones
  assert not copies(report, kv)
  assert report.temp_bytes < n_bytes(kv)
