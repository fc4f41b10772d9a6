# SPDX-License-Identifier: Apache-2.0
"""The schemes that are compared: the codec and order that a name stands for.

It knows no field of a run: a scheme stands on the ground of a codec.
"""

import dataclasses
from typing import Any

from lynx_jax.config import (
  Axis,
  CodecConfig,
  Drafter,
  EngineConfig,
  Order,
  Rotation,
  TensorCodec,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchemeKind:
  """What a scheme's name stands for.

  Attributes:
    planes: of K and V; None takes those of the config's codec.
    order: how its streams share the link; None takes that of the config.
    exact: it has an exact plane and, for that, no rotation; else it has what
      the config's codec has.
    drafter: what proposes tokens after arrival; None takes that of the config.
    codec: takes the place of the config's, if it has one.
  """

  planes: tuple[int, ...] | None
  order: Order | None = None
  exact: bool = False
  drafter: Drafter | None = None
  codec: CodecConfig | None = None


# KIVI with 4 bits (arXiv:2402.02750): keys by channel, values by token, with
# offsets, in groups of 32 tokens; 128 recent tokens stay as they are. A token's
# values share their scale within a head, where KIVI has one for 32 channels.
KIVI_4 = CodecConfig(
  k=TensorCodec(planes=(4,)),
  v=TensorCodec(planes=(4,), axis=Axis.TOKEN),
  group=32,
  sinks=0,
  recent_tokens=128,
)


SCHEMES = {
  'bf16': SchemeKind(planes=()),
  'bf16_layers': SchemeKind(planes=(), order=Order.LAYERS),
  'prefill_continues': SchemeKind(planes=(), drafter=Drafter.PREFILL),
  'int8': SchemeKind(planes=(8,)),
  'int8_layers': SchemeKind(planes=(8,), order=Order.LAYERS),
  'int8_lookup': SchemeKind(planes=(8,), drafter=Drafter.PROMPT_LOOKUP),
  'int4': SchemeKind(planes=(4,)),
  'kivi4': SchemeKind(planes=None, codec=KIVI_4),
  'lynx': SchemeKind(planes=None),
  'lynx_2bit': SchemeKind(planes=(2, 2, 4)),
  'lynx_exact': SchemeKind(planes=None, exact=True),
  'interleaved': SchemeKind(planes=None, order=Order.INTERLEAVED),
}


# Those whose output is that of 8 bits or better, the simplest first.
FAITHFUL = ('bf16', 'int8', 'lynx', 'lynx_2bit')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
  """One row of the comparison: a codec and an order, and nothing else.

  Attributes:
    name: in records and tables.
    codec: the nested code that travels.
    order: how its streams share the link.
    drafter: what proposes tokens after arrival.
  """

  name: str
  codec: CodecConfig
  order: Order
  drafter: Drafter

  @property
  def target(self) -> str:
    """What its output must equal: `dense`, `exact`, or `planes:k`, of all."""
    if self.codec.exact:
      return 'exact'
    planes = len(self.codec.k.planes)
    return f'planes:{planes}' if planes else 'dense'

  @property
  def is_speculative(self) -> bool:
    """Whether it needs the verify program: it is given drafts of some kind."""
    return self.drafter is not Drafter.ANCHOR or self.codec.is_progressive

  def engine(self, base_engine: EngineConfig) -> EngineConfig:
    """Returns the engine's config for this scheme."""
    return dataclasses.replace(
      base_engine, order=self.order, drafter=self.drafter
    )


def scheme(
  name: str, codec: CodecConfig, engine: EngineConfig | None = None
) -> Scheme:
  """Returns the scheme `name` on the ground of the run's codec and engine.

  A baseline keeps the codec's axes, rotation, group, sinks and recent tokens,
  and puts its own planes in every layer.
  """
  kind, engine = SCHEMES[name], engine or EngineConfig()
  codec = kind.codec or codec
  if kind.planes is not None:
    codec = with_planes(codec, kind.planes)
  if kind.exact:
    codec = dataclasses.replace(_unrotated(codec), exact=True, generated=False)
  return Scheme(
    name=name,
    codec=codec,
    order=kind.order or engine.order,
    drafter=kind.drafter or engine.drafter,
  )


def with_planes(codec: CodecConfig, planes: tuple[int, ...]) -> CodecConfig:
  """Returns a codec with these planes in every layer, and nothing exact."""
  return dataclasses.replace(
    codec,
    k=dataclasses.replace(codec.k, planes=planes),
    v=dataclasses.replace(codec.v, planes=planes),
    exact=False,
    generated=codec.generated and bool(planes),
    layers=(),
  )


def _unrotated(codec: Any) -> Any:
  """Returns a codec with all tensors, those of `layers` too, unrotated."""
  changed: dict[str, Any] = {
    name: dataclasses.replace(getattr(codec, name), rotation=Rotation.NONE)
    for name in 'kv'
  }
  if isinstance(codec, CodecConfig):
    changed['layers'] = tuple(map(_unrotated, codec.layers))
  return dataclasses.replace(codec, **changed)
