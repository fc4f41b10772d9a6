# SPDX-License-Identifier: Apache-2.0
"""The test environment is what conftest promises."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from lynx_jax import codec
from lynx_jax.config import TensorCodec


def test_eight_cpu_devices():
  assert jax.default_backend() == 'cpu'
  assert len(jax.devices()) == 8


def test_strict_dtype_promotion():
  with pytest.raises(ValueError, match='promotion'):
    jnp.zeros(2, jnp.float32) + jnp.zeros(2, jnp.bfloat16)


def test_rank_promotion_raises():
  with pytest.raises(ValueError, match='rank_promotion'):
    jnp.zeros((2, 2)) + jnp.zeros(2)


def test_warnings_are_errors():
  with pytest.raises(UserWarning, match='planted'):
    warnings.warn('planted', stacklevel=1)


def test_shapes_of_the_library_are_checked():
  too_few_axes = jnp.zeros((4, 4), jnp.bfloat16)
  with pytest.raises(jaxtyping.TypeCheckError):
    codec.split(too_few_axes, TensorCodec(), group=128)


def _packed() -> codec.PackedTensor:
  return codec.PackedTensor(
    planes=(jnp.zeros((1, 16, 32), jnp.uint8),) * 2,
    scale=jnp.zeros((1, 1, 32), jnp.bfloat16),
    offset=jnp.zeros((1, 1, 32), jnp.bfloat16),
    codec=TensorCodec(),
  )


def test_fields_of_a_dataclass_are_checked():
  packed = _packed()
  with pytest.raises(jaxtyping.TypeCheckError):
    dataclasses.replace(packed, scale=jnp.zeros((1, 1, 32), jnp.float32))


def test_a_pytree_may_hold_what_tree_map_returns():
  packed = _packed()
  shapes = jax.tree.map(lambda x: x.shape, packed)
  assert shapes.scale == packed.scale.shape
  assert jax.tree.map(lambda _: None, packed).scale is None


@pytest.mark.xdist_group('here')
def test_workers_see_groups_of_tests(request):
  """A pair of pytest and xdist that do not fit scatters them silently."""
  if hasattr(request.config, 'workerinput'):
    assert request.node.nodeid.endswith('@here')


@pytest.mark.usefixtures('unoptimised')
def test_a_module_with_a_compiler_of_its_own_has_one_worker(request):
  mark = request.node.get_closest_marker('xdist_group')
  assert mark.args == ('conftest_test',)
