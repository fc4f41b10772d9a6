# SPDX-License-Identifier: Apache-2.0
"""Slots split over rows of devices: same outputs, and hardly a word between.

Prefill has one device; decode has two rows or four, on up to eight devices.
"""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from experiments import tpu_compiler
from lynx_jax import handshake, kv_cache, memory, wire
from lynx_jax import mesh as mesh_lib
from lynx_jax.config import ConfigError
from lynx_jax.engine import Engine, Request, State
from lynx_jax.models import cached, presets, transformer
from lynx_jax.prefill_server import PrefillServer
from lynx_jax.remote_prefill import RemotePrefill
from lynx_jax.transport import control, courier, links
from lynx_jax.transport.streams import WireFormat
from tests import engines

# All engines in one worker: they share programs where they share a mesh.
pytestmark = pytest.mark.xdist_group('data')

MODEL = presets.tiny(
  layers=1, kv_heads=2, head_dim=16, vocab=64, tied_embeddings=False
)
SETUP = engines.setup(
  (4, 4), slots=4, prompt_tokens=120, layer_groups=1, chunk_bytes=1
)
# Rows, and devices of each.
SIDES = [(2, 1), (2, 2), (4, 2)]
NARROW, FOUR, WIDE = SIDES
LENGTHS = (100, 17, 120, 33, 80, 1)
LONG = engines.prompt(100)


@functools.cache
def model() -> transformer.Transformer:
  return engines.draw_model(MODEL)


def placed(devices, rows: int = 1) -> transformer.Transformer:
  graph, params = nnx.split(model())
  where = mesh_lib.places(mesh_lib.make(devices, MODEL, rows), params)
  return nnx.merge(graph, jax.device_put(params, where))


@functools.cache
def bench(rows: int, size: int, setup: engines.Setup = SETUP) -> engines.Bench:
  devices = jax.devices()
  decode_model = placed(devices[-rows * size :], rows)
  to = wire.destination(mesh_lib.of(nnx.state(decode_model)))

  def connect(cut):
    link = links.DeviceLink(to)
    return engines.Patient(link, cut, lambda chunks: made.script(chunks))

  made = engines.Bench(
    setup, placed(devices[:1]), decode_model=decode_model, connect=connect
  )
  return made


def with_slots(setup: engines.Setup, slots: int) -> engines.Setup:
  config = dataclasses.replace(setup.config, slots=slots)
  return dataclasses.replace(setup, config=config)


def test_committed_tokens_equal_the_reference_in_every_row():
  """A ragged batch in all slots, which were left half full by others."""
  made, rows = bench(*WIDE), WIDE[0]
  engine = made.engine
  prompts = [engines.prompt(n) for n in LENGTHS]
  expected = [made.reference(prompt) for prompt in prompts]
  requests = [
    (step, Request(prompt=prompt.tolist(), output_tokens=engines.OUTPUT_TOKENS))
    for step, prompt in enumerate(prompts)
  ]
  made.configure(draft_tokens=0, sharpen=False)  # fewer programs to compile
  made.script = courier.shuffle(0)
  used = []
  for _ in range(rows):
    cancelled = engine.submit(requests[0][1])
    engine.step()
    used.append(engine.config.place(engine._entries[cancelled].slot, rows)[0])
    engine.cancel(cancelled)
    assert engine.forget(cancelled).state is State.CANCELLED
  assert used == [*range(rows)]  # requests take turns
  engines.run(made, requests, expected)


def test_a_row_gives_the_bits_of_a_mesh_of_its_own():
  """Its programs have the shapes of an engine with the row's slots alone."""
  rows, size = NARROW
  several = bench(rows, size)
  single = bench(1, size, with_slots(SETUP, SETUP.config.slots // rows))
  assert single.reference(LONG) == several.reference(LONG)
  found = []
  for made, slots in ((single, (0,)), (several, (1, 2))):
    engine = made.engine
    token = engine.compute(LONG).token
    for slot in slots:
      fill(engine, slot, LONG)
      engine._start(slot, len(LONG), token=token, output_tokens=4)
    wanted = np.isin(np.arange(engine.config.slots), slots)
    engine._cache, engine._slots = engine._decoder.verify(
      engine._params, engine._cache, engine._slots, wanted
    )
    tails = [*map(np.asarray, jax.tree.leaves(engine._cache.tail))]
    found += [[tail[:, slot] for tail in tails] for slot in slots]
    for slot in slots:
      engine._slots = engine._decoder.stop(engine._slots, np.int32(slot))
  expected, *others = found
  end = len(LONG) - SETUP.codec.prefix_end(len(LONG)) + 1  # rows that count
  for other in others:
    for one, two in zip(expected, other, strict=True):
      np.testing.assert_array_equal(one[:, :end], two[:, :end])


def fill(engine, slot: int, prompt: np.ndarray) -> None:
  """Puts a whole prompt into a slot."""
  row, _ = engine.config.place(slot, engine._rows)
  to = wire.destination(mesh_lib.row(engine._mesh, row))
  for chunk, payload in engine._sender.payloads(engine.compute(prompt)):
    engine._put(slot, chunk, jax.device_put(payload, to(payload)), {})


@pytest.mark.parametrize('side', SIDES)
def test_only_the_row_of_a_slot_receives(side):
  """No byte goes to other rows, and their buffers stay where they are."""
  engine = bench(*side).engine
  computed = engine.compute(LONG)
  chunk, payload = next(iter(engine._sender.payloads(computed)))
  row, slot = side[0] - 1, engine.config.slots - 1
  sent = wire.for_row(payload, row, side[0])
  moved = jax.device_put(sent, wire.destination(engine._mesh)(sent))
  own = {*engine._mesh.devices[row].flat}
  devices = {d for x in jax.tree.leaves(moved) for d in x.devices()}
  assert devices == own

  def places(cache):
    return [
      [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]
      for x in jax.tree.leaves(cache)
    ]

  before = places(engine._cache)
  engine._put(slot, chunk, moved, {})
  assert places(engine._cache) == before  # in place where it was changed, too


def test_chunks_of_another_side_are_fetched_to_the_row_of_their_slot():
  """One that came to another row could not be inserted."""
  made = bench(*NARROW)
  decode_model = placed(jax.devices()[-2:], 2)
  prompts = [engines.prompt(n) for n in LENGTHS[:3]]
  expected = [made.reference(prompt) for prompt in prompts]
  prefill_model = placed(jax.devices()[:1])
  server = PrefillServer(prefill_model, [made.engine.wire], pull_host=None)
  with contextlib.closing(server):
    remote = RemotePrefill(
      made.engine.wire,
      handshake.fingerprint(prefill_model),
      jax.tree.leaves(nnx.state(decode_model))[0].sharding,
      dial=lambda: control.ClientChannel(f'127.0.0.1:{server.port}'),
    )
    config = dataclasses.replace(SETUP.config, draft_tokens=0, sharpen=False)
    with Engine(remote, decode_model, SETUP.codec, config) as engine:
      keys = [
        engine.submit(
          Request(prompt=p.tolist(), output_tokens=engines.OUTPUT_TOKENS)
        )
        for p in prompts
      ]
      while engine.busy:
        engine.step()
      results = [engine.forget(key) for key in keys]
  assert [result.error for result in results] == [None] * 3
  assert [result.tokens for result in results] == expected


def crossing(hlo: str, size: int) -> list[str]:
  """Returns the results of collectives between rows of so many devices."""
  return [
    result.split('{')[0]
    for result, groups in tpu_compiler.collective_groups(hlo)
    if (groups // size != groups[:, :1] // size).any()
  ]


# Whether any request samples; if so, whether by top-k or by top-p.
CHOOSE = ['(pred[], pred[])', 'pred[]']


def test_layers_say_nothing_to_other_rows():
  rows, size = WIDE
  engine = bench(rows, size).engine
  run, params = engine._decoder._programs, engine._params
  cache, slots = engine._cache, engine._slots
  wanted, ends = np.ones(len(slots.length), bool), engine._decoder.end_tokens
  h, where = run.open_verify[engine._decoder.rows](params, slots, wanted)
  layers = cached.layer_params(params, 0, 1)
  lowered = {
    'open': run.open_verify[engine._decoder.rows].lower(params, slots, wanted),
    'layers': run.verify_layers.lower(
      layers, h, cache.prefix[0], cache.tail[0], where, None
    ),
    'close': run.close_verify.lower(params, h, slots, wanted, ends),
    'stop': engine._decoder.stop.lower(slots, np.int32(1)),
  }
  texts = {name: each.compile().as_text() for name, each in lowered.items()}
  assert tpu_compiler.collectives(texts['layers']) == {'all-reduce': 2}
  found = {name: crossing(text, size) for name, text in texts.items()}
  assert found == {'open': [], 'layers': [], 'close': CHOOSE, 'stop': []}


def test_rounds_ask_other_rows_only_whether_to_go_on():
  engine = bench(*NARROW).engine
  cache, slots, one = engine._cache, engine._slots, np.int32(1)
  lowered = engine._decoder._programs.rounds.lower(
    engine._params,
    kv_cache.anchor_only(cache.prefix),
    cache.prefix,
    cache.tail,
    slots,
    np.ones(len(slots.length), bool),
    one,
    one,
    engine._decoder.end_tokens,
  )
  assert {*crossing(lowered.compile().as_text(), 1)} == {*CHOOSE}


def test_collectives_between_rows_are_seen():
  made = mesh_lib.make(jax.devices()[:4], MODEL, 2)
  place = mesh_lib.place(made, mesh_lib.spec('B K'))
  x = jax.ShapeDtypeStruct((2, 2), np.float32, sharding=place)

  def text(axis):
    summed = jax.jit(lambda x: x.sum(axis))
    return summed.lower(x).compile().as_text()

  assert crossing(text(0), 2)
  assert not crossing(text(1), 2)


def test_a_device_holds_the_slots_of_its_row():
  wire_format = WireFormat(MODEL, SETUP.codec, SETUP.config)
  devices = jax.devices()[:2]
  one, two = (
    memory.of_decode(wire_format, mesh_lib.make(devices[:n], MODEL, n), 1000)
    for n in (1, 2)
  )
  assert one.kv_bytes == 2 * two.kv_bytes
  assert one.weights_bytes == two.weights_bytes
  assert one.window_bytes == two.window_bytes


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'slots': 3}, r'engine\.slots=3 .* decode_data=2'),
    ({'generated': True}, 'decode_data=1, not 2'),
    ({'exact': True}, 'codec.exact=True needs one'),
  ],
)
def test_what_cannot_be_split_over_rows_is_refused(changes, message):
  wanted = {'slots': 2, 'layer_groups': 1} | changes
  with pytest.raises(ConfigError, match=message):
    bench(2, 1, engines.setup((4, 4), **wanted))


def test_prefill_has_one_row():
  with pytest.raises(ConfigError, match='prefill on 2 rows of data'):
    engines.Bench(
      SETUP,
      placed(jax.devices()[:2], 2),
      decode_model=placed(jax.devices()[2:3]),
    )
