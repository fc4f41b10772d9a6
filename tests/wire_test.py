# SPDX-License-Identifier: Apache-2.0
"""What lies in a slot after a transfer is what prefill computed and split.

Equivalence cannot show this: the reference goes the same way into the cache.
The oracle here quantises the whole prompt at once and knows no slice.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lynx_jax import codec as codec_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.config import layer_ranges
from lynx_jax.engine import Request
from lynx_jax.models import transformer
from lynx_jax.programs import fetch
from lynx_jax.transport import courier
from tests import engines

# Most that a token's logit may lie below the largest one, in standard
# deviations of all logits. A cache rounded to bfloat16 or to 8 bits costs a
# near tie now and then: 0.012 and 0.048 were seen.
WORST_DENSE, WORST_8 = 0.04, 0.15


@functools.partial(jax.jit, static_argnames=('codec', 'group', 'sinks'))
def _split(x, *, codec, group, sinks):
  return codec_lib.split(x, codec, group=group, sinks=sinks)


def check_slot(engine, slot: int, prompt: np.ndarray, tail: bool) -> None:
  """Compares a slot with the keys and values of its prompt."""
  # NumPy cuts arrays at every length without compiling for it.
  cache, computed = fetch((engine._cache, engine.compute(prompt).kv))
  codec, end = engine.codec, engine.codec.prefix_end(len(prompt))
  ranges = layer_ranges(engine.model_config, engine.config)
  for group, ((start, _), kv, prefix, rest) in enumerate(
    zip(ranges, computed, cache.prefix, cache.tail, strict=True)
  ):
    for name, tensor in zip('kv', codec.of_layer(start), strict=True):
      values = getattr(kv, name)
      held = jax.tree.map(lambda x: x[:, slot], getattr(prefix, name))
      if not end:
        pass
      elif isinstance(held, PackedTensor):
        packed = _split(
          values[:, :end], codec=tensor, group=codec.group, sinks=codec.sinks
        )
        for a, b in zip(
          [*held.planes, held.scale, held.offset],
          [*packed.planes, packed.scale, packed.offset],
          strict=True,
        ):
          np.testing.assert_array_equal(a[:, :, : b.shape[2]], b)
      else:
        np.testing.assert_array_equal(held[:, :end], values[:, :end])
      if end:
        sinks = getattr(prefix, f'sinks_{name}')[:, slot]
        np.testing.assert_array_equal(sinks, values[:, : codec.sinks])
      if end and codec.exact:
        exact = getattr(cache.exact[group], name)[:, slot, :end]
        np.testing.assert_array_equal(
          exact[:, codec.sinks :].view(np.uint16),
          values[:, codec.sinks : end].view(np.uint16),
        )
      if tail:
        got = getattr(rest, name)[:, slot, : len(prompt) - end]
        np.testing.assert_array_equal(got, values[:, end : len(prompt)])


# A request that prefill goes on with may end before its cache is there.
NAMES = [name for name in engines.SETUPS if name != 'continues']


@pytest.mark.parametrize('name', [*map(engines.in_one_worker, NAMES)])
def test_every_slot_holds_its_prompt(name):
  bench = engines.bench(name)
  engine, slots = bench.engine, engines.SETUPS[name].config.slots
  bench.script = courier.shuffle(5)
  bench.configure(draft_tokens=0)
  longest = engine.config.prompt_tokens
  lengths = [longest, longest - 7, longest // 2][:slots]
  keys = {}
  for tokens in lengths:
    prompt = engines.prompt(tokens)
    request = Request(prompt=prompt.tolist(), output_tokens=3)
    keys[engine.submit(request)] = prompt
  engine.step()
  places = {engine._entries[key].slot: p for key, p in keys.items()}
  assert len(places) == slots
  while engine.busy:
    engine.step()
  for slot, prompt in places.items():
    check_slot(engine, slot, prompt, tail=True)


@pytest.mark.parametrize(
  'name', [*map(engines.in_one_worker, ['lynx', 'mixed', 'short', 'int4'])]
)
def test_the_reference_holds_its_prompt(name):
  bench = engines.bench(name)
  bench.configure()
  lengths = engines.SETUPS[name].lengths
  for tokens in lengths[:: max(1, len(lengths) // 6)]:
    prompt = engines.prompt(tokens)
    bench.engine.reference(prompt, 1)
    check_slot(bench.engine, 0, prompt, tail=True)


@functools.cache
def _causal():
  """Returns the jitted oracle over 224 tokens; rows see no later ones."""
  return jax.jit(
    lambda tokens: transformer.causal_forward(engines.model(), tokens)
  )


@pytest.mark.parametrize(
  'name, worst',
  [
    engines.in_one_worker('dense', WORST_DENSE),
    engines.in_one_worker('int8', WORST_8),
    engines.in_one_worker('lynx', WORST_8),
  ],
)
def test_the_reference_is_what_the_model_says(name, worst):
  """Its tokens are the likeliest, or nearly, by plain causal attention."""
  bench = engines.bench(name)
  gaps: list[float] = []
  for length in (200, 150, 97, 64, 33, 5):
    prompt = engines.prompt(length)
    output = bench.reference(prompt)
    text = np.zeros((1, 224), np.int32)
    text[0, : length + len(output)] = [*prompt, *output]
    logits = np.asarray(_causal()(jnp.asarray(text)))[0]
    logits = logits[length - 1 : length + len(output) - 1]
    chosen = np.take_along_axis(logits, np.asarray(output)[:, None], axis=1)
    gaps += [*((logits.max(axis=1) - chosen[:, 0]) / logits.std())]
  assert max(gaps) < worst
