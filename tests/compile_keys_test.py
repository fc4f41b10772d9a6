# SPDX-License-Identifier: Apache-2.0
"""What warm-up compiles is what docs/compile_keys.md says."""

import collections
import logging
import pathlib
import re

import jax
import numpy as np
import pytest
from flax import nnx

from lynx_jax import programs
from lynx_jax.config import CodecConfig, Drafter, EngineConfig, TensorCodec
from lynx_jax.engine import Engine, Request
from lynx_jax.models import presets
from lynx_jax.transport.courier import Courier
from lynx_jax.transport.links import DeviceLink
from lynx_jax.transport.scheduler import Scheduler
from tests import engines

pytestmark = pytest.mark.usefixtures('unoptimised')
_EAGER = ('broadcast_in_dim', 'convert_element_type')
_DOCS = pathlib.Path(__file__).parents[1] / 'docs' / 'compile_keys.md'


class _Compiled(logging.Handler):
  """Counts compilations by the name of the program."""

  def __init__(self):
    super().__init__()
    self.names: collections.Counter[str] = collections.Counter()

  def emit(self, record):
    found = re.match(
      r'Finished XLA compilation of jit\((\w+)\)', record.getMessage()
    )
    if found:
      self.names[found[1]] += 1


@pytest.fixture
def compiled():
  handler = _Compiled()
  logger = logging.getLogger('jax')
  propagate, logger.propagate = logger.propagate, False
  logger.addHandler(handler)
  with jax.log_compiles():
    yield handler.names
  logger.removeHandler(handler)
  logger.propagate = propagate


@pytest.mark.parametrize(
  'planes, exact, generated, drafter, fused',
  [
    ((4, 4), False, False, Drafter.ANCHOR, True),
    ((4, 4), False, False, Drafter.ANCHOR, False),
    ((4, 4), False, True, Drafter.PROMPT_LOOKUP, True),
    ((8,), True, False, Drafter.ANCHOR, True),
    # Both sides are one device here, and share what they compile.
    ((), False, False, Drafter.PREFILL, True),
  ],
)
def test_warm_up_compiles_the_table_and_requests_nothing(
  planes, exact, generated, drafter, fused, compiled
):
  to = jax.devices()[0]
  model = engines.draw_model(presets.tiny(layers=2, head_dim=16))
  nnx.update(model, jax.device_put(nnx.state(model), to))
  tensor = TensorCodec(planes=planes)
  codec = CodecConfig(
    group=32,
    recent_tokens=16,
    k=tensor,
    v=tensor,
    exact=exact,
    generated=generated,
  )
  config = EngineConfig(
    slots=2,
    prompt_tokens=256,
    output_tokens=8,
    token_chunk=64,
    layer_groups=2,
    verify_rows=4,
    backlog_tokens=8,
    chunk_bytes=4096,
    drafter=drafter,
    fused_rounds=fused,
  )
  jax.clear_caches()
  with Engine(
    model,
    model,
    codec,
    config,
    connect=lambda cut: Courier(Scheduler(1), DeviceLink(to), cut),
  ) as engine:
    compiled.clear()
    engine.warm_up()
    # JAX compiles `jnp.zeros` as a program of its own.
    found = {n: count for n, count in compiled.items() if n not in _EAGER}
    # Both layer groups have one layer, one codec: g = c = 1. They share
    # programs, so kinds count once, not once a group.
    kinds = {key[:2]: n for key, n in engine.wire.slice_counts().items()}
    slices = sum(map(len, kinds.values()))
    residual = len(planes) > 1
    expected = {
      'prefill': 3,
      'split': 1,
      'cut': slices,
      'insert': slices,
      'place': 1,
      'stop': 1,
      'verify': 6,
    }
    if residual or exact:
      # Drafts on one plane of 8 bits are not sharpened.
      expected |= {'draft': 4 if residual else 3}
      if fused and drafter is Drafter.ANCHOR:
        expected['rounds'] = 1
    if exact:
      expected['exact'] = 14
    if drafter is not Drafter.ANCHOR:
      expected['propose'] = 1
    if generated:
      expected['grow'] = 2
    assert found == expected
    table = _DOCS.read_text(encoding='utf-8')
    assert all(f'`{name}`' in table for name in found)

    rng = np.random.default_rng(0)
    with programs.counting() as counts:
      for length in (1, 48, 65, 76, 256):
        prompt = rng.integers(0, 256, length).tolist()
        engine.generate(Request(prompt=prompt, output_tokens=6))
    assert counts.compiles == 0
