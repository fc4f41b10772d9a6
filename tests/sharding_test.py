# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on meshes: same outputs, and no hidden communication.

Each engine has another number of devices on each side. Either both sides have
devices of their own, or one is a single device that the other one has too.
"""

import functools

import hypothesis
import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from experiments import tpu_compiler
from lynx_jax import mesh as mesh_lib
from lynx_jax import sampling, wire
from lynx_jax.engine import Request
from lynx_jax.models import cached, presets, transformer
from lynx_jax.programs import fetch
from lynx_jax.transport import courier, links
from tests import engines, wire_test

# All engines in one worker: they share programs where they share a mesh.
pytestmark = pytest.mark.xdist_group('meshes')

MODEL = presets.tiny(
  layers=1,
  heads=8,
  kv_heads=4,
  head_dim=16,
  vocab=64,
  tied_embeddings=False,
)
SETUP = engines.setup(
  (4, 4), slots=2, prompt_tokens=120, layer_groups=1, chunk_bytes=1
)
# Devices of prefill and of decode: fewer, as many and more than KV heads.
SIDES = [(2, 4), (4, 2), (1, 8), (8, 1)]
MARGIN = 0.02  # between the two best logits: the reference is sure


@functools.cache
def model() -> transformer.Transformer:
  return engines.draw_model(MODEL)


def placed(devices) -> transformer.Transformer:
  graph, params = nnx.split(model())
  where = mesh_lib.places(mesh_lib.make(devices, MODEL), params)
  return nnx.merge(graph, jax.device_put(params, where))


@functools.cache
def bench(sides: tuple[int, int]) -> engines.Bench:
  first, second = sides
  devices = jax.devices()
  decode_model = placed(devices[-second:])
  to = wire.destination(mesh_lib.of(nnx.state(decode_model)))

  def connect(cut):
    link = links.DeviceLink(to)
    return engines.Patient(link, cut, lambda chunks: made.script(chunks))

  made = engines.Bench(
    SETUP,
    placed(devices[:first]),
    decode_model=decode_model,
    connect=connect,
  )
  return made


# The other two decode the reference alone, below, to save compilations.
@pytest.mark.parametrize('sides', [(2, 4), (1, 8)])
@hypothesis.given(
  length=st.sampled_from(SETUP.lengths),
  seed=st.integers(0, 99),
  drafts=st.integers(0, SETUP.config.verify_rows - 1),
  streamed=st.booleans(),
)
@hypothesis.settings(max_examples=5, deadline=None)
def test_committed_tokens_equal_the_reference(
  sides, length, seed, drafts, streamed
):
  made = bench(sides)
  prompt = engines.prompt(length)
  expected = made.reference(prompt)
  rounds = sides == (2, 4)  # in one program, which takes longest
  made.configure(draft_tokens=drafts if rounds else 0, sharpen=rounds)
  made.script = courier.shuffle(seed)
  request = Request(
    prompt=prompt.tolist(),
    output_tokens=engines.OUTPUT_TOKENS,
    streamed=streamed,
  )
  engines.run(made, [(0, request)], [expected])


def reference_logits(made: engines.Bench, prompt: np.ndarray) -> np.ndarray:
  """Returns the logits of each token after token 1 of the reference."""
  engine = made.engine
  tokens = made.reference(prompt)
  # Slot 0 decodes once more, step by step.
  engine.reference(prompt, 1)
  engine._start(
    0, len(prompt), token=tokens[0], output_tokens=engines.OUTPUT_TOKENS
  )
  params, wanted = engine._params, np.arange(SETUP.config.slots) == 0
  graph, _ = nnx.split(model())
  head = jax.jit(lambda params, h: nnx.merge(graph, params).head(h))
  found = []
  for token in tokens[1:]:
    running = engine._decoder.open_verify(params, engine._slots, wanted)
    engine._cache, running = engine._decoder.resume(
      params, engine._cache, running, len(engine.wire.layer_counts)
    )
    found.append(fetch(head(params, running.h))[0, 0])
    assert found[-1].argmax() == token
    engine._slots = engine._decoder.close_verify(params, engine._slots, running)
  return np.stack(found)


def test_meshes_agree_where_the_reference_is_sure():
  prompt = engines.prompt(100)
  single = reference_logits(bench((8, 1)), prompt)
  second, best = np.sort(single)[:, -2:].T
  unsure = np.flatnonzero(best - second <= MARGIN)
  sure = unsure[0] if len(unsure) else len(single)  # tokens before the first
  assert sure > len(single) // 2  # else another prompt shows more
  for sides in SIDES[:-1]:
    found = reference_logits(bench(sides), prompt)
    moved = np.abs(found - single)[:sure].max()
    assert moved < MARGIN / 2  # so no surer token can become another
    assert [*found.argmax(1)[:sure]] == [*single.argmax(1)[:sure]]


LAYERS = {'all-reduce': 2}  # after attention, and after the feed-forward
EMBEDDING = {'all-reduce': 1}  # each device looks up its own tokens
HEAD = {'all-gather': 2}  # the best logit of each device, and whose it is


@pytest.mark.parametrize('sides', [(2, 4), (1, 8)])
def test_a_round_communicates_as_little_as_it_can(sides):
  engine = bench(sides).engine
  run, params, cache = engine._decoder._programs, engine._params, engine._cache
  wanted, ends = np.ones(SETUP.config.slots, bool), engine._decoder.end_tokens
  graph, _ = nnx.split(model())
  h, where = run.open_verify[engine._decoder.rows](
    params, engine._slots, wanted
  )
  layers = cached.layer_params(params, 0, 1)
  modules = {
    'open': run.open_draft.lower(
      params, engine._slots, wanted, np.int32(1), ends
    ),
    'layers': run.verify_layers.lower(
      layers, h, cache.prefix[0], cache.tail[0], where, None
    ),
    'greedy': jax.jit(
      lambda params, h: sampling.greedy(nnx.merge(graph, params).head(h))
    ).lower(params, h),
  }
  texts = {name: m.compile().as_text() for name, m in modules.items()}
  found = {name: tpu_compiler.collectives(text) for name, text in texts.items()}
  assert found == {'open': EMBEDDING, 'layers': LAYERS, 'greedy': HEAD}
  # The tail is written in place: its shape is that of no copy.
  tail = cache.tail[0].k
  shard = tail.sharding.shard_shape(tail.shape)
  made = [x for x in tpu_compiler.made(texts['layers']) if x.shape == shard]
  assert not [str(x) for x in made if x.opcode == 'copy']


@pytest.mark.parametrize('sides', SIDES)
def test_a_transfer_communicates_nothing(sides):
  """Each part goes from one device to one, and lands where it belongs."""
  engine = bench(sides).engine
  prompt = engines.prompt(100)
  bench(sides).reference(prompt)
  wire_test.check_slot(engine, 0, prompt, tail=True)
  computed = engine.compute(prompt)
  chunk, payload = next(iter(engine._sender.payloads(computed)))
  part, parts = chunk.slices[0], payload[0]
  assert len(parts) == 4
  for arrays in parts:
    assert {len(x.devices()) for x in jax.tree.leaves(arrays)} == {1}
  where = wire.places(engine._mesh, len(parts))
  moved = jax.device_put(parts, where)
  buffers, rows, axis = wire._destination(engine.wire, engine._cache, part)
  numbers = np.asarray(part.layers, np.int32)
  insert = wire._insert_program(rows, axis, mesh_lib.if_several(engine._mesh))
  text = insert.lower(
    buffers,
    wire._joined(engine._mesh, moved, 1 if axis == 3 else 2),
    np.int32(0),
    numbers,
    numbers,
  )
  assert not tpu_compiler.collectives(text.compile().as_text())
