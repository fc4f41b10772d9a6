# SPDX-License-Identifier: Apache-2.0
"""The engine's rounds compile for a TPU, kernels included, with no cache copy.

A copy of the cache in a round would cost more than the round reads.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from experiments import tpu_compiler
from lynx_jax import kv_cache
from lynx_jax.config import CodecConfig, EngineConfig
from lynx_jax.models import presets
from lynx_jax.models.transformer import Transformer
from lynx_jax.pallas_kernels import dispatch
from lynx_jax.speculative import decode
from lynx_jax.speculative import slots as slots_lib

pytestmark = pytest.mark.xdist_group('libtpu')

CODEC = CodecConfig()
ENGINE = EngineConfig(slots=2, prompt_tokens=4160, layer_groups=2)
MODEL = presets.tiny(
  heads=32, kv_heads=8, head_dim=128, context_tokens=8192, dtype='bfloat16'
)


@pytest.fixture(scope='module')
def arguments():
  model = nnx.eval_shape(lambda: Transformer(MODEL, rngs=nnx.Rngs(0)))
  graph, params = nnx.split(model)
  cache = jax.eval_shape(lambda: kv_cache.empty(MODEL, CODEC, ENGINE))
  slots = jax.eval_shape(
    lambda: slots_lib.empty(ENGINE.slots, drafts=48, output_tokens=64)
  )
  return graph, (params, cache.prefix, cache.tail, slots)


def compiled(fn, shapes):
  report = tpu_compiler.compile_for('v5e', fn, *shapes, donate_argnums=(2, 3))
  kernels = [k for k in report.kernels if 'split_attention' in k.name]
  return kernels, report.copies


def test_a_draft_round(arguments):
  graph, shapes = arguments

  def draft(params, prefix, tail, slots):
    return decode.draft(
      nnx.merge(graph, params),
      kv_cache.anchor_only(prefix),
      tail,
      slots,
      jnp.ones(ENGINE.slots, bool),
      jnp.int32(4),
      end_tokens=jnp.zeros(1, jnp.int32),
      implementation=dispatch.PALLAS_TPU,
    )

  kernels, copies = compiled(draft, shapes)
  assert len(kernels) == MODEL.layers
  assert not copies


def test_a_verify_round(arguments):
  graph, shapes = arguments

  def verify(params, prefix, tail, slots):
    return decode.verify(
      nnx.merge(graph, params),
      prefix,
      tail,
      slots,
      jnp.ones(ENGINE.slots, bool),
      rows=ENGINE.verify_rows,
      end_tokens=jnp.zeros(1, jnp.int32),
      implementation=dispatch.PALLAS_TPU,
    )

  kernels, copies = compiled(verify, shapes)
  assert len(kernels) == MODEL.layers
  assert not copies
