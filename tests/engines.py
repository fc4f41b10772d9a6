# SPDX-License-Identifier: Apache-2.0
"""Small engines over a scripted transport, and a consumer that checks events.

The model has random weights, so a coarse Anchor really disagrees with the
target. Engines are kept: a test takes one, runs requests, and leaves it idle.
"""

import dataclasses
import functools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lynx_jax import codec as codec_lib
from lynx_jax import engine as engine_lib
from lynx_jax import kv_cache
from lynx_jax.config import (
  Axis,
  CodecConfig,
  Drafter,
  EngineConfig,
  LayerCodec,
  ModelConfig,
  Order,
  Rotation,
  Target,
  TensorCodec,
)
from lynx_jax.engine import Engine, Event, Request, State
from lynx_jax.kv_cache import Cache
from lynx_jax.models import presets, transformer
from lynx_jax.models.transformer import Transformer
from lynx_jax.sampling import GREEDY, Sampling, Samplings
from lynx_jax.transport import courier, links
from lynx_jax.transport.streams import Stream

OUTPUT_TOKENS = 24
MODEL = presets.tiny(layers=2, head_dim=16, vocab=64, tied_embeddings=False)
DECODE_DEVICE = jax.devices()[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """An engine's static side."""

  codec: CodecConfig
  config: EngineConfig

  @property
  def drafters(self) -> list[Drafter]:
    """What can propose in its engine; the last one is what it has."""
    if self.config.drafter is Drafter.PREFILL:
      return [Drafter.PREFILL]  # built in
    return [Drafter.PROMPT_LOOKUP, Drafter.ANCHOR]

  @property
  def lengths(self) -> list[int]:
    """Prompt lengths around every boundary, and the longest."""
    codec, config = self.codec, self.config
    group, recent, chunk = codec.group, codec.recent_tokens, config.token_chunk
    edges = [codec.sinks, group, 2 * group, chunk, 2 * chunk, 16]
    edges += [recent, group + recent, 2 * group + recent, chunk + recent]
    around = {edge + step for edge in edges for step in (-1, 0, 1)}
    around |= {1, 2, config.prompt_tokens}
    return sorted(n for n in around if 1 <= n <= config.prompt_tokens)


def setup(
  planes: tuple[int, ...],
  v: tuple[int, ...] | None = None,
  *,
  axis: Axis = Axis.CHANNEL,
  rotation: Rotation = Rotation.NONE,
  sinks: int = 4,
  recent_tokens: int = 16,
  group: int = 32,
  exact: bool = False,
  generated: bool = False,
  layers: tuple[LayerCodec, ...] = (),
  **config,
) -> Setup:
  """Returns a setup; `planes` are those of K, and of V if it has no `v`."""
  tensors = [
    TensorCodec(planes=p, axis=axis, rotation=rotation)
    for p in (planes, planes if v is None else v)
  ]
  defaults = {
    'slots': 3,
    'prompt_tokens': 200,
    'output_tokens': OUTPUT_TOKENS,
    'token_chunk': 64,
    'layer_groups': 2,
    'verify_rows': 6,
    'backlog_tokens': 12,
    'chunk_bytes': 3000,
  }
  return Setup(
    codec=CodecConfig(
      k=tensors[0],
      v=tensors[1],
      group=group,
      sinks=sinks,
      recent_tokens=recent_tokens,
      exact=exact,
      generated=generated,
      layers=layers,
    ),
    config=EngineConfig(**(defaults | config)),
  )


SETUPS = {
  'lynx': setup((4, 4)),
  'coarse': setup((2, 2, 4), layer_groups=1),
  'interleaved': setup((4, 4), order=Order.INTERLEAVED),
  'int8': setup((8,)),
  'layers': setup((8,), order=Order.LAYERS),
  # One slot, whose prompts have one group at most; a unit a chunk.
  'int4': setup(
    (4,),
    group=64,
    sinks=63,
    recent_tokens=1,
    prompt_tokens=65,
    slots=1,
    layer_groups=1,
    chunk_bytes=1,
  ),
  'dense': setup(()),
  # Prefill decodes on until decode takes over.
  'continues': setup((), drafter=Drafter.PREFILL),
  # Strings of several pages; some blocks of V are sent as they are.
  'exact': setup((4, 4), (4, 2), exact=True),
  # K and V with unlike planes in one layer group, the other one dense; no
  # sinks and no recent tokens.
  'mixed': setup(
    (1, 2),
    (4, 4),
    axis=Axis.TOKEN,
    rotation=Rotation.HADAMARD,
    sinks=0,
    recent_tokens=0,
    layers=(
      LayerCodec(
        start=1, stop=2, k=TensorCodec(planes=()), v=TensorCodec(planes=())
      ),
    ),
  ),
  # No prompt has a prefix; one row a verification, fewer than the backlog.
  'short': setup(
    (4, 4),
    sinks=0,
    recent_tokens=0,
    prompt_tokens=20,
    verify_rows=1,
    backlog_tokens=3,
    layer_groups=1,
  ),
}


# Ways to sample that really differ from each other over random weights.
SAMPLINGS = (
  GREEDY,
  Sampling(temperature=0.8, seed=1),
  Sampling(temperature=2.0, top_k=20, top_p=0.9, min_p=0.01, seed=2**32 - 1),
)


def side_by_side(*samplings: Sampling) -> Samplings:
  """Returns the rows of requests that sample so, a slot each."""
  rows = [each.row() for each in samplings]
  return jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *rows)


class Bench:
  """An engine whose transport follows `script`.

  Attributes:
    engine: it.
    script: says what arrives; `tests` put `courier.shuffle(seed)` here.
  """

  def __init__(
    self,
    setup: Setup,
    model: Transformer,
    *,
    prefill_model: Transformer | None = None,
    decode_model: Transformer | None = None,
    connect: Callable[[courier.Cut], courier.Transport] | None = None,
  ):
    self.script: courier.Script = courier.shuffle(0)
    if decode_model is None:
      graph, params = nnx.split(model)
      decode_model = nnx.merge(graph, jax.device_put(params, DECODE_DEVICE))
    self.engine = Engine(
      model if prefill_model is None else prefill_model,
      decode_model,
      setup.codec,
      setup.config,
      connect=self._connect if connect is None else connect,
    )
    self._references: dict[Any, list[int]] = {}

  def _connect(self, cut: courier.Cut) -> courier.Transport:
    link = links.DeviceLink(DECODE_DEVICE)
    return Patient(link, cut, lambda chunks: self.script(chunks))

  def configure(
    self,
    *,
    ends: Sequence[int] = (),
    costs: engine_lib.Costs | None = None,
    **changes,
  ) -> None:
    """Changes policies of the idle engine; none of them is compiled in."""
    assert set(changes) <= {
      'draft_tokens',
      'backlog_tokens',
      'drafter',
      'fused_rounds',
      'layer_ready',
      'sharpen',
    }
    self.engine.config = dataclasses.replace(self.engine.config, **changes)
    self.engine.costs = costs
    # One id, as at the start: the number of ids is compiled in.
    (end,) = ends or (-1,)
    self.engine._decoder.end_tokens = np.asarray([end], np.int32)

  def reference(
    self,
    prompt: np.ndarray,
    sampling: Sampling = GREEDY,
    target: Target | None = None,
  ) -> list[int]:
    """Returns the longest reference output, without an end token."""
    key = prompt.tobytes(), sampling, target
    if key not in self._references:
      self.configure()
      self._references[key] = self.engine.reference(
        prompt, OUTPUT_TOKENS, sampling=sampling, target=target
      )
    return self._references[key]


class Patient(courier.ScriptedCourier):
  """Lets the prefill thread work while nothing is under way."""

  def wait(self, timeout_s: float) -> bool:
    time.sleep(0.0003)
    return super().wait(timeout_s)


def trickle(seed: int) -> courier.Script:
  """Returns a script that keeps the scheduler's order, a few chunks a call."""
  rng = random.Random(seed)

  def order(chunk):
    anchor = chunk.stream is Stream.ANCHOR
    place = chunk.token_chunk if anchor else chunk.layer_group
    return chunk.stream, place, chunk.key

  def script(chunks):
    return sorted(chunks, key=order)[: rng.randint(1, 4)]

  return script


@functools.cache
def model(dtype: str = 'float32', layers: int = MODEL.layers) -> Transformer:
  """Returns random weights; drawn by NumPy, since JAX would compile for it."""
  return draw_model(dataclasses.replace(MODEL, dtype=dtype, layers=layers))


def draw_model(config: ModelConfig) -> Transformer:
  """Returns random weights; see `model`."""
  graph, state = nnx.split(transformer.abstract_model(config))
  rng = np.random.default_rng(0)

  def draw(x):
    values = np.ones(x.shape)
    if x.ndim > 1:
      values = rng.normal(size=x.shape) * 2 * config.model_dim**-0.5
    return jnp.asarray(values.astype(x.dtype))

  return nnx.merge(graph, jax.tree.map(draw, state))


def filled(cache: Cache) -> Cache:
  """Returns a cache with 4 sinks, with random contents in every row."""
  rng = np.random.default_rng(0)

  def dense(x):
    return jnp.asarray(rng.normal(size=x.shape).astype(jnp.bfloat16))

  def prefix(x):
    shape = (
      *x.scale.shape[:2],
      x.groups * x.group,
      x.scale.shape[2],
      x.head_dim,
    )
    values = rng.normal(size=shape).astype(jnp.bfloat16)
    split = functools.partial(
      codec_lib.split, codec=x.codec, group=x.group, sinks=4
    )
    return jax.jit(split)(values)

  return Cache(
    tuple(
      kv_cache.Prefix(
        prefix(p.k), prefix(p.v), dense(p.sinks_k), dense(p.sinks_v)
      )
      for p in cache.prefix
    ),
    jax.tree.map(dense, cache.tail),
    jax.tree.map(dense, cache.exact),
  )


@functools.cache
def bench(name: str) -> Bench:
  """Returns the engine of `SETUPS[name]`, always the same one."""
  # `short` is about its rows; `coarse` has several layers in a group.
  drawn = model(layers=1) if name == 'short' else model()
  return Bench(SETUPS[name], drawn)


def lose_arrivals(patch: pytest.MonkeyPatch) -> None:
  """Lets every engine count what it receives, and store nothing of it."""
  land = Engine._land

  def lose(engine, arrival):
    with pytest.MonkeyPatch.context() as lost:
      lost.setattr(engine, '_put', lambda *_: None)
      land(engine, arrival)

  patch.setattr(Engine, '_land', lose)


def in_one_worker(name: str, *more):
  """Returns pytest parameters: tests of one engine share its programs."""
  # The first has the shapes of lynx; a test of exact asks the second.
  group = {
    'interleaved': 'lynx',
    'layers': 'int8',
    'dense': 'exact',
    'continues': 'exact',
  }.get(name, name)
  return pytest.param(name, *more, marks=pytest.mark.xdist_group(group))


def prompt(tokens: int, seed: int = 0) -> np.ndarray:
  """Returns random token ids; no prompt is a prefix of a longer one."""
  rng = np.random.default_rng((tokens, seed))
  return rng.integers(0, MODEL.vocab, tokens).astype(np.int32)


def cut_at_end(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
  """Returns the tokens up to the first end token, that one included."""
  for i, token in enumerate(tokens):
    if token in ends:
      return [*tokens[: i + 1]]
  return [*tokens]


class Reader:
  """Follows the events of one request, as somebody who prints them would.

  Each event is checked as it comes: what was committed never changes, and a
  retraction takes back provisional tokens only.
  """

  def __init__(self, expected: Sequence[int] | None):
    self.expected = expected
    self.shown: list[int] = []
    self.held: list[int] = []  # by one who waits for commits
    self.committed = 0
    self.finished: State | None = None
    self._at_s = 0.0

  def take(self, event: Event) -> None:
    assert self.finished is None, 'an event after the end'
    assert event.at_s >= self._at_s
    self._at_s = event.at_s
    match event:
      case engine_lib.Provisional(position=position, token=token):
        assert position == len(self.shown)
        self.shown.append(token)
      case engine_lib.Retracted(start=start):
        assert self.committed <= start < len(self.shown)
        del self.shown[start:]
      case engine_lib.Committed(upto=upto, tokens=tokens):
        assert self.committed < upto <= len(self.shown)
        self.committed = upto
        self.held += tokens
      case engine_lib.Finished(state=state):
        self.finished = state
        assert len(self.shown) == self.committed
    assert self.held == self.shown[: self.committed]
    if self.expected is not None:
      final = self.shown[: self.committed]
      assert final == self.expected[: self.committed]
      assert self.committed <= len(self.expected)


def run(
  bench: Bench,
  requests: Sequence[tuple[int, Request]],
  expected: Sequence[Sequence[int] | None],
) -> list[engine_lib.Result]:
  """Runs requests to their ends and checks their events and results.

  Args:
    bench: idle.
    requests: each after how many steps it is submitted.
    expected: outputs; None is not checked.
  """
  engine, readers, order = bench.engine, {}, {}
  step, waiting = 0, [*enumerate(requests)]
  try:
    while waiting or engine.busy:
      for entry in [w for w in waiting if w[1][0] <= step or not engine.busy]:
        index, (_, request) = entry
        key = engine.submit(request)
        order[index], readers[key] = key, Reader(expected[index])
        waiting.remove(entry)
      for event in engine.step():
        readers[event.request].take(event)
      step += 1
      assert step < 100_000, 'the engine hangs'
  except BaseException:
    # Else the first failure would be lost among those of all later tests.
    for key in readers:
      engine.forget(key)
    while engine.busy:
      engine.step()
    raise
  results = []
  for index, tokens in enumerate(expected):
    key = order[index]
    result, reader = engine.forget(key), readers[key]
    assert reader.finished is State.DONE
    assert reader.shown == result.tokens == result.shown
    assert len(result.commit_times_s) == len(result.tokens)
    assert result.accepted <= result.drafted
    if tokens is not None:
      assert result.tokens == [*tokens]
    results.append(result)
  return results
