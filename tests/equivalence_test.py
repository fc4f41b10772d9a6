# SPDX-License-Identifier: Apache-2.0
"""Committed tokens equal the reference output, whatever happens on the way.

First the ground on which that stands: the verify pass gives the same bits in
every form and whatever else shares the pass. Then engines under random
arrivals, draft lengths, batches, prompt lengths and ends.
"""

import collections
import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from lynx_jax import config as config_lib
from lynx_jax import kv_cache, programs
from lynx_jax.config import Drafter
from lynx_jax.engine import Costs, Form, Mode, Request, Target
from lynx_jax.models import cached
from lynx_jax.speculative import decode
from lynx_jax.speculative import slots as slots_lib
from lynx_jax.timeline import Phase
from lynx_jax.transport import courier
from tests import engines

SETUPS = {
  Target.PLANES: engines.SETUPS['coarse'],
  Target.EXACT: engines.SETUPS['exact'],
}
SETUP = SETUPS[Target.PLANES]
# The plain form rounds in its own way, but must not disturb the others; it has
# programs of its own, so not every engine is asked for it.
FORMS = [
  pytest.param(
    dtype, target, marks=pytest.mark.xdist_group(group), id=f'{dtype}-{group}'
  )
  for dtype, target, group in (
    ('float32', Target.PLANES, 'coarse'),
    ('bfloat16', Target.PLANES, 'bfloat16'),
    # Two layer groups, and the dense prefix, that of the bf16 scheme.
    ('float32', Target.EXACT, 'exact'),
    ('bfloat16', Target.EXACT, 'bfloat16'),
  )
]
PLAIN = ('lynx', 'dense', 'layers', 'continues')
ROWS, SLOTS = SETUP.config.verify_rows, SETUP.config.slots


class _Pass:
  """The verify pass of one model over a filled cache, in its three forms."""

  def __init__(self, dtype: str, target: Target):
    model, setup = engines.model(dtype), SETUPS[target]
    self.target = target
    graphs, params = cached.split(model)
    # Where the engines decode: so they and float32 share programs.
    self.params = jax.device_put(params, engines.DECODE_DEVICE)
    self.decoder = decode.Decoder(
      graphs, config_lib.layer_ranges(model.config, setup.config), rows=ROWS
    )
    cache = kv_cache.empty(model.config, setup.codec, setup.config)
    self.cache = jax.device_put(engines.filled(cache), engines.DECODE_DEVICE)

    def whole(params, tokens, prefix, tail, rows):
      model = nnx.merge(graphs.model, params)
      return cached.forward(model, tokens, prefix, tail, rows)

    self.whole = programs.program(whole, name='whole')

  def logits(self, slots, wanted, cache=None):
    """Returns logits and tail of the pass as one program."""
    cache = self.cache if cache is None else cache
    tokens, rows = _verify_rows(slots, jnp.asarray(wanted), ROWS)
    prefix = cache.target(self.target)
    return self.whole(self.params, tokens, prefix, cache.tail, rows)


# Alone they are dozens of small programs.
_verify_rows = jax.jit(decode.verify_rows, static_argnums=2)
_accept = programs.program(decode.accept, name='accept')


@functools.cache
def _pass(dtype: str, target: Target) -> _Pass:
  return _Pass(dtype, target)


def _slots(lengths=(150, 97, 20), drafts=(5, 3, 0), seed=0) -> slots_lib.Slots:
  """Returns slots with random tokens; their prefixes have 128, 64, 0 tokens."""
  rng = np.random.default_rng(seed)
  state = slots_lib.empty(SLOTS, drafts=12, output_tokens=engines.OUTPUT_TOKENS)
  tokens = rng.integers(0, engines.MODEL.vocab, (SLOTS, 13)).astype(np.int32)
  state = dataclasses.replace(
    state,
    prefix_tokens=jnp.asarray([128, 64, 0], jnp.int32),
    length=jnp.asarray(lengths, jnp.int32),
    last_token=jnp.asarray(tokens[:, 0]),
    remaining=jnp.full((SLOTS,), 20, jnp.int32),
    drafts=jnp.asarray(tokens[:, 1:]),
    n_drafts=jnp.asarray(drafts, jnp.int32),
    n_out=jnp.ones((SLOTS,), jnp.int32),
    samplings=engines.side_by_side(*engines.SAMPLINGS),
  )
  return jax.device_put(state, engines.DECODE_DEVICE)


def _copy(tree):
  return jax.tree.map(jnp.copy, tree)


def _equal(a, b) -> None:
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize('dtype, target', FORMS)
def test_all_forms_of_the_verify_pass_give_the_same_bits(dtype, target):
  run, slots = _pass(dtype, target), _slots()
  wanted = np.ones(SLOTS, bool)
  arguments = wanted, 0, 1, target
  by_group, one = run.decoder.verify(
    run.params, _copy(run.cache), _copy(slots), wanted, target=target
  )
  looped, two = run.decoder.rounds(
    run.params, _copy(run.cache), _copy(slots), *arguments
  )
  logits, tail = run.logits(slots, wanted)
  three = _accept(
    slots, logits, jnp.asarray(wanted), jnp.asarray(run.decoder.end_tokens)
  )
  _equal(by_group.tail, looped.tail)
  _equal(by_group.tail, tail)
  _equal(one, two)
  _equal(one, three)
  assert np.asarray(one.n_out).min() > 1


@pytest.mark.parametrize('dtype, target', FORMS)
def test_a_rounds_program_repeats_verifications_bit_for_bit(dtype, target):
  run, wanted = _pass(dtype, target), np.ones(SLOTS, bool)
  cache, slots = _copy(run.cache), _slots(drafts=(0, 0, 0))
  looped, many = run.decoder.rounds(
    run.params, _copy(cache), _copy(slots), wanted, 0, 5, target
  )
  for _ in range(5):
    cache, slots = run.decoder.verify(
      run.params, cache, slots, wanted, target=target
    )
  _equal(cache.tail, looped.tail)
  _equal(slots, many)


@pytest.mark.parametrize('dtype, target', FORMS)
def test_a_row_does_not_depend_on_its_number(dtype, target):
  """The token in row r, moved to row 0 by r commits, keeps all its bits."""
  run, wanted, slots = _pass(dtype, target), np.ones(SLOTS, bool), _slots()
  logits, tail = run.logits(slots, wanted)
  cache = dataclasses.replace(run.cache, tail=tail)
  logits, tail, was = programs.fetch((logits, tail, slots))
  tokens = np.concatenate([was.last_token[:, None], was.drafts], axis=1)
  for row in range(1, ROWS):
    moved = dataclasses.replace(
      slots,
      length=jnp.asarray(was.length + row),
      last_token=jnp.asarray(tokens[:, row]),
      # What stands in the rows behind is something else now.
      drafts=jnp.asarray(np.roll(was.drafts, 1 - row, axis=1)),
    )
    alone, after = programs.fetch(run.logits(moved, wanted, cache))
    _equal(alone[:, 0], logits[:, row])
    at = was.length - was.prefix_tokens + row
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(tail), strict=True):
      for slot in range(SLOTS):
        _equal(a[:, slot, at[slot]], b[:, slot, at[slot]])


@pytest.mark.parametrize('dtype, target', FORMS)
@pytest.mark.parametrize('slot', range(SLOTS))
def test_a_slot_does_not_depend_on_the_others(dtype, target, slot):
  run, slots = _pass(dtype, target), _slots()
  wanted = np.arange(SLOTS) == slot
  logits, tail = programs.fetch(run.logits(slots, np.ones(SLOTS, bool)))
  others = _slots((40, 70, 3), (1, 5, 2), seed=1)
  mixed = jax.tree.map(
    lambda a, b: np.where(wanted.reshape(-1, *[1] * (a.ndim - 1)), a, b),
    slots,
    others,
  )

  def spoil(x):
    x = np.array(x)
    x[:, ~wanted] = 255 if x.dtype == np.uint8 else np.nan
    return x

  mixed, spoilt = jax.device_put(
    (mixed, jax.tree.map(spoil, run.cache)), engines.DECODE_DEVICE
  )
  alone, after = programs.fetch(run.logits(mixed, wanted, spoilt))
  _equal(alone[slot], logits[slot])
  for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(tail), strict=True):
    _equal(a[:, slot], b[:, slot])


def _targets(codec):
  return [None, *Target] if codec.exact else [None]


@st.composite
def _batches(draw, name):
  """Draws requests, the steps at which they come, and the engine's policy."""
  setup = engines.SETUPS[name]
  rows = setup.config.verify_rows
  forms = [Form.VERIFY]
  if name in PLAIN:
    forms = [Form.VERIFY, Form.VERIFY, Form.PLAIN]
  requests = []
  for _ in range(draw(st.integers(1, 4))):
    request = Request(
      prompt=engines.prompt(draw(st.sampled_from(setup.lengths))).tolist(),
      output_tokens=draw(
        st.sampled_from([1, 2, 3, rows, rows + 1, engines.OUTPUT_TOKENS])
      ),
      form=draw(st.sampled_from(forms)),
      mode=draw(st.sampled_from(Mode)),
      streamed=draw(st.booleans()),
      deadline_s=draw(st.sampled_from([0.1, 10.0])),
      sampling=draw(st.sampled_from(engines.SAMPLINGS)),
      target=draw(st.sampled_from(_targets(setup.codec))),
    )
    requests.append((draw(st.integers(0, 12)), request))
  return (
    requests,
    {
      'draft_tokens': draw(st.sampled_from([*range(rows), None])),
      'backlog_tokens': draw(st.integers(1, setup.config.backlog_tokens)),
      'layer_ready': draw(st.booleans()),
      'sharpen': draw(st.booleans()),
      'fused_rounds': draw(st.booleans()),
      'drafter': draw(st.sampled_from(setup.drafters)),
      # As if verification took for ever: it begins with the first layer group.
      'costs': draw(st.sampled_from([None, Costs(1.0, 1e9, 1.0)])),
    },
    draw(st.sampled_from([courier.shuffle, engines.trickle])),
    draw(st.none() | st.integers(0, engines.OUTPUT_TOKENS - 1)),
    draw(st.integers(0, 2**16)),
  )


def _all_samplings(name, drafter):
  """Returns a batch of long outputs, as `_batches` draws them."""
  setup = engines.SETUPS[name]
  requests = [
    (
      0,
      Request(
        prompt=engines.prompt(length).tolist(),
        output_tokens=engines.OUTPUT_TOKENS,
        sampling=sampling,
      ),
    )
    for length in setup.lengths[-2:]
    for sampling in engines.SAMPLINGS
  ]
  policy = {
    'draft_tokens': setup.config.verify_rows - 1,
    'backlog_tokens': setup.config.backlog_tokens,
    'layer_ready': True,
    'sharpen': False,
    'fused_rounds': True,
    'drafter': drafter,
    'costs': None,
  }
  return requests, policy, courier.shuffle, None, 0


@pytest.mark.parametrize('name', [*map(engines.in_one_worker, engines.SETUPS)])
def test_committed_tokens_are_the_reference(name):
  bench = engines.bench(name)
  drafted, accepted = collections.Counter(), collections.Counter()

  def run(batch):
    requests, policy, script, end_at, seed = batch
    full = [
      bench.reference(
        np.asarray(request.prompt, np.int32), request.sampling, request.target
      )
      for _, request in requests
    ]
    ends = () if end_at is None else (full[0][end_at],)
    expected = [
      engines.cut_at_end(tokens[: request.output_tokens], ends)
      if request.form is Form.VERIFY
      else None
      for tokens, (_, request) in zip(full, requests, strict=True)
    ]
    bench.script = script(seed)
    bench.configure(ends=ends, **policy)
    results = engines.run(bench, requests, expected)
    for result, (_, request) in zip(results, requests, strict=True):
      tokens = result.tokens
      assert 1 <= len(tokens) <= request.output_tokens
      assert not set(ends) & set(tokens[:-1])
      if len(tokens) < request.output_tokens:
        assert tokens[-1] in ends
      drafted[policy['drafter']] += result.drafted
      accepted[policy['drafter']] += result.accepted

  check = hypothesis.given(_batches(name))(run)
  hypothesis.settings(deadline=None, max_examples=12)(check)()
  # What is drawn may never draft. The last one is what other tests expect.
  for drafter in engines.SETUPS[name].drafters:
    run(_all_samplings(name, drafter))
  if name == 'continues':
    # Decode has confirmed what prefill had decoded, all of it.
    assert 0 < accepted[Drafter.PREFILL] == drafted[Drafter.PREFILL]
  elif name in ('int8', 'layers', 'int4', 'dense', 'short'):
    assert drafted[Drafter.ANCHOR] == 0
  else:
    assert accepted[Drafter.ANCHOR] > 0
  if name in ('int8', 'dense'):
    assert 0 < accepted[Drafter.PROMPT_LOOKUP] < drafted[Drafter.PROMPT_LOOKUP]
  if name in ('lynx', 'coarse', 'interleaved', 'mixed', 'exact'):
    # Else the drafts were never wrong, and the test could not fail.
    assert accepted[Drafter.ANCHOR] < drafted[Drafter.ANCHOR]


@pytest.mark.parametrize(
  'name', [*map(engines.in_one_worker, ('lynx', 'coarse', 'mixed', 'exact'))]
)
def test_what_does_not_arrive_is_seen_in_a_spoilt_cache(name, monkeypatch):
  """And what arrives is all that is needed."""
  bench, prompt = engines.bench(name), engines.prompt(200)
  expected = bench.reference(prompt)
  bench.configure(draft_tokens=3)
  bench.script = courier.shuffle(0)
  request = Request(prompt=prompt.tolist(), output_tokens=engines.OUTPUT_TOKENS)

  def outputs():
    found = []
    for _ in range(bench.engine.config.slots):  # each slot in turn
      with programs.counting() as counts:
        bench.engine.spoil_cache()
      assert (counts.compiles, counts.fetches) == (0, 0)
      found.append(bench.engine.generate(request).tokens)
    return found

  assert outputs() == [expected] * bench.engine.config.slots
  engines.lose_arrivals(monkeypatch)
  assert expected not in outputs()


@pytest.mark.xdist_group('exact')
def test_the_exact_reference_is_that_of_bfloat16():
  """And that of the planes is another one: else nothing would be shown."""
  bench, dense = engines.bench('exact'), engines.bench('dense')
  differ = 0
  for tokens in (200, 150, 97, 80, 64, 33):
    prompt = engines.prompt(tokens)
    expected = dense.reference(prompt)
    assert bench.reference(prompt, target=Target.EXACT) == expected
    differ += bench.reference(prompt, target=Target.PLANES) != expected
  assert differ


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize(
  'name', [engines.in_one_worker('lynx'), engines.in_one_worker('layers')]
)
def test_a_verification_that_begins_early_commits_the_reference(name, seed):
  bench = engines.bench(name)
  lengths = [200, 150, 97, 200]
  expected = [bench.reference(engines.prompt(n)) for n in lengths]
  bench.configure(
    draft_tokens=seed,
    backlog_tokens=12,
    layer_ready=True,
    costs=Costs(1.0, 1e9, 1.0),
  )
  bench.script = engines.trickle(seed)
  requests = [
    (
      3 * i,
      Request(
        prompt=engines.prompt(n).tolist(), output_tokens=engines.OUTPUT_TOKENS
      ),
    )
    for i, n in enumerate(lengths)
  ]
  results = engines.run(bench, requests, expected)
  assert any(map(_began_early, results))


def _began_early(result) -> bool:
  """Whether a verification began before the last byte was there."""
  starts = [
    event.start_s
    for event in result.timeline.events()
    if event.name == Phase.VERIFY
  ]
  last_s = result.residual_s or result.anchor_s
  return bool(starts and last_s is not None and starts[0] < last_s)
