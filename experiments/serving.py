# SPDX-License-Identifier: Apache-2.0
"""Puts a run together: model, prompt, engines, and a record a request.

It chooses no order of runs and forms no figure over several of them.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
from etils import epath
from flax import nnx

from experiments import display, results
from experiments import sides as sides_lib
from experiments.schemes import Scheme
from lynx_jax import mesh, timeline, wire
from lynx_jax.config import EngineConfig, ModelConfig, Order, require
from lynx_jax.engine import Engine, Form, Request, Result
from lynx_jax.models import paths, presets, weights
from lynx_jax.models.tokenizer import Tokenizer
from lynx_jax.models.transformer import Transformer
from lynx_jax.sender import PrefillSide
from lynx_jax.timeline import Phase
from lynx_jax.transport.courier import Courier
from lynx_jax.transport.links import DeviceLink, EmulatedLink, Link
from lynx_jax.transport.receiver import Pace
from lynx_jax.transport.scheduler import Scheduler

# One Residual chunk may be outstanding: the courier has one on the link, and
# the scheduler always lets one go.
_RESIDUAL_WINDOW_BYTES = 0


TINY = 'tiny'  # as a model's path: random weights


class Text(Protocol):
  """What a study needs of a tokenizer."""

  @property
  def ends(self) -> frozenset[int]: ...

  def encode(self, text: str) -> list[int]: ...

  def decode(self, ids: Iterable[int]) -> str: ...


class Bytes:
  """The tokenizer of random models: a token is a byte, and none ends a text."""

  ends: frozenset[int] = frozenset()

  def encode(self, text: str) -> list[int]:
    return list(text.encode('utf-8'))

  def decode(self, ids: Iterable[int]) -> str:
    return bytes(ids).decode('utf-8', errors='replace')


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
  """A model with a copy on the mesh of either side.

  In a process that runs one side, and on a single device, both are the same.
  """

  config: ModelConfig
  prefill: Transformer
  decode: Transformer
  tokenizer: Text


class Remote(Protocol):
  """Prefill in another process; see `roles.Remote`."""

  @property
  def side(self) -> sides_lib.Side:
    """The processes of decode."""

  def prefill(
    self,
    model: Model,
    scheme: Scheme,
    engine: EngineConfig,
    pace: Pace | None,
  ) -> PrefillSide:
    """Opens a session for one engine."""


def load(
  path: str,
  dtype: str,
  sides: tuple[int, ...] = (1, 1),
  tokenizer_path: str = '',
  rows: int = 1,
) -> Model:
  """Loads a model onto the devices of the sides that this process runs.

  Args:
    path: `smollm2`, `tiny`, or what `weights.load` takes.
    dtype: of weights and activations.
    sides: how many devices prefill has, from the first on, and how many decode
      has after them; or those of the one side that this process runs. A
      process with a single device puts both sides there.
    tokenizer_path: a directory with `tokenizer.json`; '' is the model's own.
    rows: that the devices of decode, the last side, make; see `mesh.make`.

  Raises:
    ConfigError: there are fewer devices, or they cannot divide the heads.
    WeightsError: the model is not whole, or of another architecture.
    MissingPackageError: the extra `weights` is not installed.
  """
  first, *_ = devices(sides)
  tokenizer: Text = Bytes()
  if path == TINY:
    rngs = nnx.Rngs(params=0)
    model = Transformer(presets.tiny(dtype=dtype), rngs=rngs)
  else:
    file = locate(path)
    # Before the weights, which take longer.
    tokenizer = text(file, tokenizer_path)
    count = len(first) if len(sides) > 1 else len(first) // rows
    own = tuple(
      first[start : start + count] for start in range(0, len(first), count)
    )
    _, model = weights.load(file, dtype=dtype, placement=own)
  return on_sides(model, tokenizer, sides, rows)


def locate(path: str) -> epath.Path:
  """Returns where the files of a model other than `tiny` are; see `load`."""
  if path == 'smollm2':
    path = str(weights.find_packaged_gguf())
  return paths.locate(path)


def text(file: epath.Path, tokenizer_path: str) -> Text:
  """Returns a model's tokenizer, or the one of another directory."""
  return Tokenizer.read(
    paths.locate(tokenizer_path) if tokenizer_path else file
  )


def devices(sides: tuple[int, ...]) -> tuple[tuple[jax.Device, ...], ...]:
  """Returns the devices of each side; see `load`.

  Raises:
    ConfigError: there are fewer, or a side of several processes has others.
  """
  # Those of a process together: process i of either side has the same heads.
  found = tuple(sorted(jax.devices(), key=lambda d: d.process_index))
  require(
    jax.process_count() == 1 or sides == (len(found),),
    f'a mesh of {sum(sides)} devices (prefill_mesh, decode_mesh) must take all '
    f'{len(found)} of the {jax.process_count()} processes of this side',
  )
  if len(found) == 1 and sides == (1, 1):
    return found, found
  require(
    sum(sides) <= len(found),
    f'{" + ".join(map(str, sides))} devices (prefill_mesh, decode_mesh times '
    f'decode_data) are more than the {len(found)} there are; take fewer, or on '
    'CPU more cpu_devices',
  )
  ends = [*itertools.accumulate(sides)]
  return tuple(
    found[end - count : end] for end, count in zip(ends, sides, strict=True)
  )


def on_sides(
  model: Transformer, tokenizer: Text, sides: tuple[int, ...], rows: int = 1
) -> Model:
  """Places a model on the devices of each side; see `load`."""
  first, *others = devices(sides)
  placed = _placed(model, first, 1 if others else rows)
  other = placed
  if others and others[0] != first:
    other = _placed(placed, others[0], rows)
  return Model(model.config, placed, other, tokenizer)


def _placed(
  model: Transformer, devices: Sequence[jax.Device], rows: int
) -> Transformer:
  """Returns the model on a mesh of these devices."""
  graph, params = nnx.split(model)
  place = mesh.make(devices, model.config, rows)
  where = mesh.places(place, params)
  if not place.is_multi_process:
    return nnx.merge(graph, jax.device_put(params, where))
  if jax.tree.leaves(params)[0].is_fully_addressable:
    # Every process has drawn the same values.
    model = nnx.merge(graph, mesh.put(jax.device_get(params), where))
  return model  # what was read from a file lies there already


@dataclasses.dataclass(frozen=True)
class Line:
  """An engine and the link under it; None is a real one."""

  engine: Engine
  link: Link | Pace | None

  def tune(self, rate_gbps: float, rtt_ms: float) -> None:
    """Changes an emulated link; no request may be under way."""
    if self.link is None:
      return
    assert isinstance(self.link, EmulatedLink | Pace)
    self.link.rate_gbps, self.link.rtt_ms = rate_gbps, rtt_ms


@contextlib.contextmanager
def connect(
  model: Model,
  scheme: Scheme,
  engine: EngineConfig,
  *,
  rate_gbps: float | None = None,
  rtt_ms: float = 0.0,
  jitter_ms: float = 0.0,
  remote: Remote | None = None,
  emulated: bool = True,
) -> Iterator[Line]:
  """Yields an engine for a scheme over a link, and closes it.

  Args:
    model: where it runs.
    scheme: its codec.
    engine: its static sizes and policies.
    rate_gbps: of the emulated link; None copies as fast as it goes.
    rtt_ms: of the emulated link.
    jitter_ms: of the emulated link to another process.
    remote: where prefill runs; None is this process.
    emulated: False takes the real link to another process as it is.
  """
  ends = sorted(model.tokenizer.ends)
  if remote is not None:
    pace = None
    if rate_gbps is not None and emulated:
      pace = Pace(rate_gbps, rtt_ms, jitter_ms)
    with Engine(
      remote.prefill(model, scheme, engine, pace),
      model.decode,
      scheme.codec,
      engine,
      end_tokens=ends,
      exchange=remote.side.exchange,
    ) as running:
      yield Line(running, pace)
    return
  to = wire.destination(mesh.of(nnx.state(model.decode)))
  link: Link = DeviceLink(to)
  if rate_gbps is not None:
    link = EmulatedLink(to, rate_gbps=rate_gbps, rtt_ms=rtt_ms)
  with Engine(
    model.prefill,
    model.decode,
    scheme.codec,
    engine,
    connect=lambda cut: Courier(Scheduler(_RESIDUAL_WINDOW_BYTES), link, cut),
    end_tokens=ends,
  ) as running:
    yield Line(running, link)


def placement(model: Transformer) -> jax.sharding.Sharding:
  """Returns where a model lies."""
  return jax.tree.leaves(nnx.state(model))[0].sharding


def run_request(
  engine: Engine, request: Request, shown: display.TokenStream
) -> Result:
  """Runs a request to its end and shows its tokens as they come.

  Raises:
    Exception: what made it fail.
  """
  finished = None
  for event in engine.stream(request):
    shown.show(event)
    finished = event.request
  assert finished is not None
  result = engine.forget(finished)
  if result.error is not None:
    raise result.error
  return result


def bound_s(
  engine: Engine, result: Result, rate_gbps: float, rtt_ms: float
) -> float:
  """Returns the request's own bound; see `timeline.bound`.

  d is the least step that was measured, the request's own first one included:
  noise only adds, and a bound must not be built on it.
  """
  assert engine.costs is not None
  if engine.config.order is Order.LAYERS and engine.config.layer_ready:
    # All layer groups but the last may have run before the last byte, and how
    # little that one takes is not measured.
    return timeline.bound(
      result.critical, rate_gbps=rate_gbps, rtt_ms=rtt_ms, step_s=0.0
    )
  speculative = result.residual_bytes > 0 or result.drafted > 0
  step_s = engine.costs.draft_s if speculative else engine.costs.plain_s
  steps = [
    event
    for event in result.timeline.events()
    if event.name in (Phase.DRAFT, Phase.VERIFY)
  ]
  if steps:
    step_s = min(step_s, steps[0].end_s - steps[0].start_s)
  return timeline.bound(
    result.critical, rate_gbps=rate_gbps, rtt_ms=rtt_ms, step_s=step_s
  )


def record(
  engine: Engine,
  result: Result,
  *,
  form: Form,
  text: str,
  reference: list[int],
  bf16: list[int] | None,
  share: float | None,
  **known: Any,
) -> dict[str, Any]:
  """Builds the `request` record of a result.

  Args:
    engine: where it ran.
    result: of the request.
    form: how it decoded; outputs are compared in the verify form only.
    text: of its tokens.
    reference: what the scheme has to emit.
    bf16: what the bf16 scheme has to emit, if known.
    share: of the serial INT8 run.
    **known: further fields; `link_gbps` and `rtt_ms` are needed.
  """
  bits = engine.wire.bits_a_value(result.prompt_tokens)
  # The length of the exact plane depends on the data.
  exact = (
    bits.total
    * result.exact_bytes
    / (engine.wire.stream_bytes(result.prompt_tokens).total)
  )
  split_s = result.timeline.seconds(Phase.SPLIT)
  first_s, end_s = result.provisional_s, result.prefill_end_s
  verified = form is Form.VERIFY
  return results.request_record(
    form=form.value,
    model=engine.model_config.name,
    prompt_tokens=result.prompt_tokens,
    output_tokens=len(result.tokens),
    token_ids=result.tokens,
    text=text,
    bits_anchor=bits.anchor,
    bits_total=bits.total + exact,
    bytes_anchor=result.anchor_bytes,
    bytes_residual=result.residual_bytes,
    bytes_exact=result.exact_bytes,
    prefill_s=None if end_s is None else end_s - split_s,
    split_s=split_s,
    anchor_arrival_s=result.anchor_s,
    residual_arrival_s=result.residual_s,
    exact_arrival_s=result.exact_s,
    ttft_prefill_token_s=result.token_1_s,
    ttft_provisional_s=first_s,
    ttft_committed_s=result.committed_s,
    tbt_first_s=_difference(first_s, result.token_1_s),
    done_s=result.done_s,
    exposed_s=_difference(first_s, end_s),
    bound_ttft_s=bound_s(engine, result, known['link_gbps'], known['rtt_ms']),
    share=share,
    drafted=result.drafted,
    accepted=result.accepted,
    retracted=result.retracted,
    rounds=result.rounds,
    equal_to_reference=result.tokens == reference if verified else None,
    equal_to_bf16=(
      result.tokens == bf16 if verified and bf16 is not None else None
    ),
    commit_times_s=result.commit_times_s,
    **known,
  )


def _difference(one: float | None, other: float | None) -> float | None:
  return None if one is None or other is None else one - other
