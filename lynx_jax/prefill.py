# SPDX-License-Identifier: Apache-2.0
"""Chunked prefill of one prompt, and the split of what it computes.

It knows no link and no decode: it yields token chunks, and splits them.

One program serves every chunk of every prompt: the offset is traced, and a
chunk attends to whole blocks of C earlier tokens, as many as there are.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from lynx_jax import kv_cache
from lynx_jax import mesh as mesh_lib
from lynx_jax import sampling as sampling_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.config import (
  CodecConfig,
  ConfigError,
  EngineConfig,
  TensorCodec,
  layer_ranges,
  require,
)
from lynx_jax.models import cached
from lynx_jax.models.transformer import Layer, Transformer
from lynx_jax.pallas_kernels import chunk_attention, split_kv
from lynx_jax.programs import fetch, program, spanned
from lynx_jax.sampling import GREEDY, Sampling
from lynx_jax.shapes import Array, BFloat16, Bool, Float, Int32, UInt16
from lynx_jax.timeline import Phase


class NonFiniteError(ConfigError):
  """Prefill computed NaN or infinite keys or values."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseKV:
  """Keys and values of one layer group as prefill computes them."""

  k: BFloat16[Array, 'L S K H']
  v: BFloat16[Array, 'L S K H']


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitKV:
  """One token chunk of a layer group: planes, or dense where there are none.

  `first` are its first tokens, dense: those of chunk 0 are the sinks. They are
  copies, since the next chunk's prefill takes over the buffers of this one.
  """

  k: PackedTensor | BFloat16[Array, 'L C K H']
  v: PackedTensor | BFloat16[Array, 'L C K H']
  first: DenseKV


def prefill_layers(
  layers: Sequence[Layer],
  h: Float[Array, '1 C D'],
  kv: DenseKV,
  offset: Int32[Array, ''],
  count: Int32[Array, ''],
  *,
  implementation: str | None = None,
) -> tuple[Float[Array, '1 C D'], DenseKV, Bool[Array, 'L 2 K']]:
  """Runs one layer group over a token chunk.

  Args:
    layers: of the group.
    h: residual stream; rows from `count` on are padding.
    kv: of the tokens before the chunk.
    offset: position of the chunk's first token, a multiple of C.
    count: valid tokens, 1..C.
    implementation: of `chunk_attention`.

  Returns:
    The residual stream; the KV with the chunk's in it; and whether K and V of
    each layer and head are finite.
  """
  row = jnp.arange(h.shape[1], dtype=jnp.int32)
  finite = []
  heads, caches = mesh_lib.spec('B T K H'), kv_cache.specs(kv, 'L')
  everywhere = PartitionSpec()
  for index, layer in enumerate(layers):

    def attend(q, k, v, index=index, rule=layer.rule, kv=kv):
      out, kv, good = mesh_lib.on_each_shard(
        functools.partial(
          _attend, layer=index, rule=rule, implementation=implementation
        ),
        (
          mesh_lib.spec('B T N H'),
          heads,
          heads,
          caches,
          everywhere,
          everywhere,
          everywhere,
        ),
        (mesh_lib.spec('B T N H'), caches, mesh_lib.spec('kv K')),
        q,
        k,
        v,
        kv,
        offset,
        count,
        rule.window if isinstance(rule.window, jax.Array) else None,
      )
      finite.append(good)
      return out, kv

    h, kv = layer(h, offset + row[None], attend)
  return h, kv, jnp.stack(finite)


def _attend(q, k, v, kv, offset, count, window, *, layer, rule, implementation):
  """Writes a chunk's KV, and attends, with the heads of one device."""
  at = (layer, offset, 0, 0)
  kv = DenseKV(
    jax.lax.dynamic_update_slice(kv.k, k.astype(kv.k.dtype), at),
    jax.lax.dynamic_update_slice(kv.v, v.astype(kv.v.dtype), at),
  )
  row = jnp.arange(q.shape[1], dtype=jnp.int32)
  padding = (row >= count)[None, :, None, None]
  # A head's own, so that devices need not agree.
  finite = jnp.stack(
    [jnp.all(jnp.isfinite(x) | padding, axis=(0, 1, 3)) for x in (k, v)]
  )
  out = chunk_attention(
    q,
    kv.k,
    kv.v,
    layer=layer,
    offset=offset,
    logits_scale=rule.logits_scale,
    soft_cap=rule.soft_cap,
    window=rule.window if window is None else window,
    implementation=implementation,
  )
  return out.astype(q.dtype), kv, finite


def split_chunk(
  kv: DenseKV,
  offset: Int32[Array, ''],
  *,
  k: TensorCodec,
  v: TensorCodec,
  group: int,
  sinks: int,
  size: int,
  implementation: str | None = None,
) -> SplitKV:
  """Splits the tokens [offset, offset + size) of a layer group."""
  split = functools.partial(
    _split_chunk,
    k=k,
    v=v,
    group=group,
    sinks=sinks,
    size=size,
    implementation=implementation,
  )
  return mesh_lib.on_each_shard(
    split,
    (kv_cache.specs(kv, 'L'), PartitionSpec()),
    kv_cache.specs(jax.eval_shape(split, kv, offset), 'L'),
    kv,
    offset,
  )


def _split_chunk(kv, offset, *, k, v, group, sinks, size, implementation):
  def part(x, count):
    return jax.lax.dynamic_slice_in_dim(x, offset, count, axis=1)

  first = DenseKV(part(kv.k, sinks), part(kv.v, sinks))
  dense = part(kv.k, size), part(kv.v, size)
  if not k.planes:  # nor has v
    return SplitKV(*dense, first)
  packed = split_kv(
    *dense,
    k_codec=k,
    v_codec=v,
    group=group,
    sinks=jnp.where(offset == 0, sinks, 0).astype(jnp.int32),
    implementation=implementation,
  )
  return SplitKV(*packed, first)


@dataclasses.dataclass(eq=False)
class Prompt:
  """What prefill has computed of one prompt: the source of its chunks.

  Attributes:
    tokens: P.
    prefix_tokens: E.
    kv: dense keys and values of all layer groups.
    token: what follows those computed.
    split: token chunk → layer groups, for those that were split.
    exact: (layer group, token chunk) → string, for those that were encoded.
  """

  tokens: int
  prefix_tokens: int
  kv: tuple[DenseKV, ...]
  token: int = -1
  split: dict[int, tuple[SplitKV, ...]] = dataclasses.field(
    default_factory=dict
  )
  exact: dict[tuple[int, int], UInt16[Array, '1 pages page']] = (
    dataclasses.field(default_factory=dict)
  )


class Prefill:
  """Prefills prompts with programs that are compiled once.

  Args:
    model: parameters; they lie where prefill shall run.
    codec, engine: of the whole system.
  """

  def __init__(
    self, model: Transformer, codec: CodecConfig, engine: EngineConfig
  ):
    self._model = model.config
    self._codec, self._engine = codec, engine
    graphs, self._params = cached.split(model)
    self._ranges = layer_ranges(model.config, engine)
    self._mesh = mesh_lib.of(self._params)
    require(
      self._mesh.shape[mesh_lib.DATA] == 1,
      f'prefill on {self._mesh.shape[mesh_lib.DATA]} rows of data: it computes '
      'one prompt at a time, on one row',
    )
    self._embed, self._layers, self._head = _programs(
      graphs, engine.implementation, mesh_lib.if_several(self._mesh)
    )

  def chunks(
    self, prompt: np.ndarray, sampling: Sampling = GREEDY
  ) -> Iterator[Prompt]:
    """Yields the growing `Prompt` each time a token chunk was computed.

    The device has finished the chunk when it is yielded.

    Args:
      prompt: i32[P] token ids, 1 <= P <= engine.prompt_tokens.
      sampling: how token 1 is chosen.

    Raises:
      NonFiniteError: naming layers and tensors.
    """
    size = self._engine.token_chunk
    end = self._codec.prefix_end(len(prompt))
    state = Prompt(len(prompt), end, self._empty())
    for offset in range(0, len(prompt), size):
      self._compute(state, prompt[offset : offset + size], offset, sampling)
      yield state

  @spanned(Phase.PREFILL)
  def _compute(
    self, state: Prompt, part: np.ndarray, offset: int, sampling: Sampling
  ) -> None:
    """Computes one token chunk, and what follows it."""
    padded = np.zeros((1, self._engine.token_chunk), np.int32)
    padded[0, : len(part)] = part
    h = self._embed(self._params, padded)
    kv, finite = [], []
    for (start, stop), dense in zip(self._ranges, state.kv, strict=True):
      layers = cached.layer_params(self._params, start, stop)
      h, dense, good = self._layers(
        layers, h, dense, np.int32(offset), np.int32(len(part))
      )
      kv.append(dense)
      finite.append(good)
    state.kv = tuple(kv)
    last = self._head(
      self._params,
      h,
      np.int32(len(part) - 1),
      np.int32(offset + len(part)),
      sampling.row(),
    )
    token, good = fetch(mesh_lib.everywhere(self._mesh, (last, finite)))
    good = np.all(np.concatenate(good), axis=-1)
    if not good.all():
      raise NonFiniteError(_explain(good, offset, offset + len(part)))
    state.token = int(token)

  @spanned(Phase.SPLIT)
  def split(self, prompt: Prompt, token_chunk: int) -> None:
    """Splits one computed token chunk; waits for the device.

    Each process splits what it has; nothing is said between them.
    """
    offset = np.int32(token_chunk * self._engine.token_chunk)
    parts = [
      _split_program(
        *self._codec.of_layer(start),
        self._codec.group,
        self._codec.sinks,
        self._engine.token_chunk,
        self._engine.implementation,
      )(jax.tree.map(mesh_lib.own, kv), offset)
      for (start, _), kv in zip(self._ranges, prompt.kv, strict=True)
    ]
    prompt.split[token_chunk] = jax.block_until_ready(tuple(parts))

  def _empty(self) -> tuple[DenseKV, ...]:
    size = self._engine.token_chunk
    tokens = -(-self._engine.prompt_tokens // size) * size
    heads = (self._model.kv_heads, self._model.head_dim)
    place = mesh_lib.place(self._mesh, mesh_lib.spec('L S K H'))

    def dense(layers):
      shape = (layers, tokens, *heads)
      return jnp.zeros(shape, jnp.bfloat16, device=place)

    return tuple(
      DenseKV(dense(stop - start), dense(stop - start))
      for start, stop in self._ranges
    )


@functools.cache
def _programs(
  graphs: cached.Graphs, implementation: str | None, mesh: Mesh | None = None
):
  """Makes the jitted functions; engines of one model share them."""

  def embed(params, tokens):
    return nnx.merge(graphs.model, params).embed(tokens)

  def layers(params, h, kv, offset, count):
    return prefill_layers(
      graphs.layers(params),
      h,
      kv,
      offset,
      count,
      implementation=implementation,
    )

  def head(params, h, row, position, samplings):
    last = jax.lax.dynamic_slice_in_dim(h, row, 1, axis=1)
    logits = nnx.merge(graphs.model, params).head(last)
    samplings = jax.tree.map(lambda x: x[None], samplings)
    tokens = sampling_lib.choose(
      logits, samplings, position[None, None], jnp.ones((1,), bool)
    )
    return tokens[0, 0]

  everywhere = PartitionSpec()
  kv = mesh_lib.spec('L S K H'), mesh_lib.spec('L kv K')
  return (
    program(
      embed,
      name=Phase.PREFILL,
      out_shardings=mesh_lib.outputs(mesh, everywhere),
    ),
    program(
      layers,
      name=Phase.PREFILL,
      donate=(1, 2),
      out_shardings=mesh_lib.outputs(mesh, (everywhere, *kv)),
    ),
    program(head, name=Phase.PREFILL),
  )


@functools.cache
def _split_program(
  k: TensorCodec,
  v: TensorCodec,
  group: int,
  sinks: int,
  size: int,
  implementation: str | None,
):
  return program(
    functools.partial(
      split_chunk,
      k=k,
      v=v,
      group=group,
      sinks=sinks,
      size=size,
      implementation=implementation,
    ),
    name=Phase.SPLIT,
  )


def _explain(finite: np.ndarray, start: int, stop: int) -> str:
  places = [
    f'{"kv"[tensor]} of layer {layer}' for layer, tensor in np.argwhere(~finite)
  ]
  return (
    f'tokens {start}..{stop - 1}: NaN or infinite values in '
    f'{", ".join(places)}; check the checkpoint, or raise model.dtype'
  )
