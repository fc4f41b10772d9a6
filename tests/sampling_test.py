# SPDX-License-Identifier: Apache-2.0
"""Tokens follow the target's filtered distribution, whatever was drafted.

First the pure functions against oracles in NumPy; then committed tokens out of
the programs that an engine runs.
"""

import dataclasses
import functools
import math
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from lynx_jax import config, kv_cache, sampling
from lynx_jax.config import ConfigError
from lynx_jax.models import cached
from lynx_jax.sampling import GREEDY, Sampling
from lynx_jax.speculative import decode
from lynx_jax.speculative import slots as slots_lib
from tests import engines

VOCAB = 8
DRAWS = 20_480
FILTERS = {
  'plain': {},
  'cold': {'temperature': 0.5},
  'top-k': {'top_k': 3},
  'top-p': {'top_p': 0.7},
  'min-p': {'min_p': 0.2},
  'all': {'temperature': 1.3, 'top_k': 5, 'top_p': 0.9, 'min_p': 0.1},
}


def _seeds(seeds, **how) -> sampling.Samplings:
  """Returns one way to sample with many seeds."""
  seeds = jnp.asarray(np.asarray(seeds, np.uint32))
  one = Sampling(**{'temperature': 1.0} | how).row()
  many = jax.tree.map(lambda x: jnp.full(seeds.shape, x), one)
  return dataclasses.replace(many, seed=seeds)


_filtered = jax.jit(sampling.filtered)
_choose = jax.jit(sampling.choose)
_noise = jax.jit(sampling.noise, static_argnums=2)


def _positions(batch: int, rows: int = 1, first: int = 7) -> np.ndarray:
  return np.tile(np.arange(first, first + rows, dtype=np.int32), (batch, 1))


def _probabilities(logits, **how) -> np.ndarray:
  found = _filtered(jnp.asarray(logits)[None, None], _seeds([0], **how))
  return np.asarray(jax.nn.softmax(found))[0, 0]


def _expected(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  """The filters one by one, in float64, on one row."""
  logits = np.asarray(logits, np.float64)
  p = np.exp((logits - logits.max()) / temperature)
  p /= p.sum()
  if top_k:
    beaten_by = np.array([(p > x).sum() for x in p])
    p = np.where(beaten_by < top_k, p, 0)
  if top_p < 1:
    p /= p.sum()
    ahead = np.array([p[p > x].sum() for x in p])
    p = np.where(ahead < top_p, p, 0)
  p = np.where(p >= min_p * p.max(), p, 0)
  return p / p.sum()


@hypothesis.given(
  logits=st.lists(
    st.integers(-200, 200).map(lambda n: n / 16),
    min_size=VOCAB,
    max_size=VOCAB,
  ),
  temperature=st.sampled_from([0.25, 1.0, 3.0]),
  top_k=st.integers(0, VOCAB + 1),
  top_p=st.sampled_from([1e-46, 1e-40, 1e-6, 0.37, 0.83, 1 - 2**-24, 1.0]),
  min_p=st.sampled_from([0.0, 0.11, 1.0]),
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_filters_are_those_of_the_oracle(logits, **how):
  found = _probabilities(np.asarray(logits, np.float32), **how)
  np.testing.assert_allclose(found, _expected(logits, **how), atol=2e-6)


def test_huge_logits_and_a_tiny_temperature_give_no_nan():
  logits = np.asarray([3e38, -3e38, 1.0, 3e38], np.float32)
  for how in ({}, {'top_k': 2}, {'top_p': 0.9}):
    found = _probabilities(logits, temperature=1e-30, **how)
    np.testing.assert_array_equal(found, [0.5, 0.0, 0.0, 0.5])


@pytest.mark.parametrize(
  'field, value',
  [
    ('temperature', -0.1),
    ('temperature', math.nan),
    ('temperature', math.inf),
    ('top_k', -1),
    ('temperature', 1e39),
    ('top_k', 2.7),
    ('seed', 1.5),
    ('top_p', 0.0),
    ('top_p', 1.1),
    ('min_p', -0.1),
    ('min_p', math.nan),
    ('seed', -1),
    ('seed', 2**32),
  ],
)
def test_a_value_that_cannot_be_is_named(field, value):
  said = re.escape(f'sampling.{field}={value} must be')
  with pytest.raises(ConfigError, match=said):
    Sampling(**{field: value})


def test_noise_is_gumbel_and_fine_in_its_tail():
  """Also for a real vocabulary, where the largest of 49,152 is drawn."""
  draws = np.asarray(
    _noise(np.arange(4, dtype=np.uint32), _positions(4), 49152)
  )
  for row in draws[:, 0]:
    # Kolmogorov and Smirnov: the largest distance of the distributions; 1e-6.
    wanted = np.exp(-np.exp(-np.sort(row)))
    distance = np.abs(wanted - (np.arange(row.size) + 0.5) / row.size).max()
    assert distance * math.sqrt(row.size) < 2.7
    assert len(set(np.sort(row)[-100:])) == 100
    assert np.isfinite(row).all()


def test_noise_depends_on_seed_position_and_token_alone():
  seeds = np.arange(6, dtype=np.uint32) * np.uint32(2**29 + 1)
  many = np.asarray(_noise(seeds, _positions(6, 5, first=100), VOCAB))
  for slot, row in ((0, 0), (3, 4), (5, 2)):
    one = _noise(seeds[slot : slot + 1], _positions(1, first=100 + row), VOCAB)
    np.testing.assert_array_equal(many[slot, row], np.asarray(one)[0, 0])
  assert len(np.unique(many)) == many.size


def test_greedy_requests_stay_greedy_in_any_company():
  logits = np.random.default_rng(0).normal(size=(3, 4, VOCAB))
  logits = np.round(logits.astype(np.float32), 1)  # equals among them
  hot = Sampling(temperature=5.0, seed=3)
  both = engines.side_by_side(GREEDY, hot, Sampling(seed=8, top_k=3, min_p=0.5))
  found = _choose(logits, both, _positions(3, 4), np.ones(3, bool))
  wanted = logits.argmax(axis=-1)
  for slot in (0, 2):
    np.testing.assert_array_equal(found[slot], wanted[slot])
  assert (np.asarray(found)[1] != wanted[1]).any()
  # Nobody who counts samples: nothing is drawn for anybody.
  found = _choose(logits, both, _positions(3, 4), np.arange(3) != 1)
  np.testing.assert_array_equal(found, wanted)


def test_a_token_does_not_depend_on_slot_row_or_company():
  logits = np.random.default_rng(0).normal(size=(3, 4, VOCAB))
  logits = logits.astype(np.float32)
  ways = [
    Sampling(temperature=2.0, seed=i, **f)
    for i, f in enumerate(({}, {'top_k': 4}, {'top_p': 0.8, 'min_p': 0.05}))
  ]
  active = np.ones(3, bool)
  found = _choose(logits, engines.side_by_side(*ways), _positions(3, 4), active)
  for slot in range(3):
    for row in range(4):
      alone = _choose(
        logits[slot : slot + 1, row : row + 1],
        engines.side_by_side(ways[slot]),
        _positions(1, first=7 + row),
        active[:1],
      )
      assert int(alone[0, 0]) == int(found[slot, row])


def _check_distribution(tokens, p, tests):
  """Chi-square at 1e-6 over all tests, and total variation."""
  seen = np.bincount(tokens, minlength=len(p))
  assert (seen[p == 0] == 0).all()
  # Tokens too rare for a chi-square are counted as one.
  rare = len(tokens) * p < 5
  seen = np.append(seen[~rare], seen[rare].sum())
  p = np.append(p[~rare], p[rare].sum())
  seen, p = seen[p > 0], p[p > 0]
  wanted = len(tokens) * p
  freedom = len(wanted) - 1
  if freedom:
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    # Wilson and Hilferty's approximation of the chi-square quantile.
    z = 5.0 + math.log10(tests) / 4
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + z * math.sqrt(spread)) ** 3
  distance = np.abs(seen / len(tokens) - p).sum() / 2
  assert distance < 1.5 * math.sqrt(len(p) / len(tokens))


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
  """Logits of a target, and of drafts that resemble them."""
  draws = np.random.default_rng(1)
  target = draws.normal(size=VOCAB).astype(np.float32) * 1.5
  return target, target + draws.normal(size=VOCAB).astype(np.float32)


def _draw(logits, **how) -> np.ndarray:
  many = np.broadcast_to(logits, (DRAWS, 1, VOCAB))
  samplings = _seeds(np.arange(DRAWS), **how)
  active = np.ones(DRAWS, bool)
  return np.asarray(_choose(many, samplings, _positions(DRAWS), active))[:, 0]


@pytest.mark.parametrize('how', FILTERS)
def test_tokens_follow_the_filtered_distribution(how):
  target, _ = _tables()
  p = _expected(target, **FILTERS[how])
  _check_distribution(_draw(target, **FILTERS[how]), p, tests=len(FILTERS))


@pytest.mark.parametrize('how', ['plain', 'all'])
def test_drafts_agree_as_often_as_the_coupling_allows(how):
  """One noise for p and q: 1 / sum_j max(p_j / p_i, q_j / q_i), over i.

  (arXiv:2408.07978 §3.) At least (1 - TV) / (1 + TV); 1 - TV is the most that
  any rule of acceptance reaches.
  """
  tables = _tables()
  same = np.equal(*(_draw(x, **FILTERS[how]) for x in tables)).mean()
  p, q = (_expected(x, **FILTERS[how]) for x in tables)
  wanted = sum(
    1 / np.maximum(p / p[i], q / q[i]).sum()
    for i in range(VOCAB)
    if p[i] > 0 and q[i] > 0
  )
  distance = np.abs(p - q).sum() / 2
  assert (1 - distance) / (1 + distance) <= wanted <= 1 - distance
  assert abs(same - wanted) < 5 * math.sqrt(0.25 / DRAWS)


# Committed tokens, out of the programs that close an engine's passes.

# Layers are those of the equivalence test, which has compiled them.
SETUP = engines.SETUPS['coarse']
SLOTS, ROWS = SETUP.config.slots, SETUP.config.verify_rows
DRAFTS = SETUP.config.backlog_tokens
TOKENS, BATCH = engines.MODEL.vocab, 2048


class _Prompt:
  """A prompt whose layers run once, for any number of rounds of one draft.

  What the layers give depends on the prompt and on the draft, not on the seed:
  it is looked up. Choosing, accepting and committing are the engine's programs.

  Attributes:
    first: the target's probabilities of the token after the prompt.
    second: of the one after it, a row for each of those.
  """

  def __init__(self):
    model = engines.model()
    graphs, params = cached.split(model)
    self.params = jax.device_put(params, engines.DECODE_DEVICE)
    ranges = config.layer_ranges(model.config, SETUP.config)
    self._decoder = decode.Decoder(graphs, ranges, rows=ROWS)
    cache = engines.filled(
      kv_cache.empty(model.config, SETUP.codec, SETUP.config)
    )
    # All slots hold what slot 0 holds.
    prefix, tail = jax.tree.map(
      lambda x: jax.device_put(
        jnp.broadcast_to(x[:, :1], x.shape), engines.DECODE_DEVICE
      ),
      (cache.prefix, cache.tail),
    )

    def run(prefix, rows, drafts, residual_tokens=None):
      slots = dataclasses.replace(_slots(SLOTS, 0), drafts=jnp.asarray(drafts))
      opened = self._decoder.open_verify(
        self.params, slots, np.ones(SLOTS, bool), rows
      )
      h, _ = self._decoder._layers(
        self._decoder._programs.verify_layers,
        self.params,
        opened.h,
        prefix,
        jax.tree.map(jnp.copy, tail),
        opened.rows,
        range(1),
        residual_tokens,
      )
      return np.asarray(h)

    none = np.zeros((SLOTS, DRAFTS), np.int32)
    every = np.arange(TOKENS + -TOKENS % SLOTS, dtype=np.int32) % TOKENS
    landed = np.full((1, SLOTS), 32, np.int32)
    self._draft = {
      False: run(kv_cache.anchor_only(prefix), 1, none)[:1],
      True: run(prefix, 1, none, landed)[:1],
    }
    self._verify = np.concatenate(
      [
        run(prefix, ROWS, np.tile(tokens, DRAFTS))
        for tokens in every.reshape(-1, SLOTS, 1)
      ]
    )[:TOKENS]
    p = np.asarray(jax.nn.softmax(jax.jit(model.head)(self._verify)))
    self.first, self.second = p[0, 0], p[:, 1]

  def round(self, seed: int, sharpen: bool) -> tuple[np.ndarray, np.ndarray]:
    """Runs one round for BATCH seeds from `seed` on.

    Returns:
      The drafts; and the committed tokens, -1 where there is no second one.
    """
    programs, active = self._decoder._programs, np.ones(BATCH, bool)
    h = np.repeat(self._draft[sharpen], BATCH, axis=0)
    slots = programs.close_draft(self.params, h, _slots(BATCH, seed), active)
    drafts = np.array(slots.drafts[:, 0])
    slots = programs.close_verify(
      self.params, self._verify[drafts], slots, active, np.int32([-1])
    )
    out, count = np.array(slots.out[:, :2]), np.array(slots.n_out)
    return drafts, np.where(np.arange(2) < count[:, None], out, -1)


def _slots(count: int, seed: int) -> slots_lib.Slots:
  """Returns slots at temperature 1, all after one prompt of 150 tokens."""
  full = functools.partial(jnp.full, count, dtype=jnp.int32)
  slots = dataclasses.replace(
    slots_lib.empty(count, drafts=DRAFTS, output_tokens=engines.OUTPUT_TOKENS),
    prefix_tokens=full(128),
    length=full(150),
    last_token=full(3),
    remaining=full(8),
    samplings=_seeds(seed + np.arange(count)),
  )
  return jax.device_put(slots, engines.DECODE_DEVICE)


@functools.cache
def _prompt() -> _Prompt:
  return _Prompt()


@pytest.mark.parametrize('sharpen', [False, True])
@pytest.mark.xdist_group('coarse')
def test_committed_tokens_follow_the_target(sharpen):
  prompt = _prompt()
  rounds = [prompt.round(n, sharpen) for n in range(0, DRAWS, BATCH)]
  drafts, out = map(np.concatenate, zip(*rounds, strict=True))
  assert len(out) == DRAWS
  assert 0.2 < (drafts == out[:, 0]).mean() < 0.9
  _check_distribution(out[:, 0], prompt.first, tests=50)
  # Whether there is a second token depends on the first one and the drafts.
  tested = 0
  for token in range(TOKENS):
    here = (out[:, 0] == token) & (out[:, 1] >= 0)
    if here.sum() > 400:
      _check_distribution(out[here, 1], prompt.second[token], tests=50)
      tested += 1
  assert tested >= 3
  # The check can fail: drafts are of another distribution.
  with pytest.raises(AssertionError):
    _check_distribution(drafts, prompt.first, tests=50)
