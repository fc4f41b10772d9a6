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

from lynx_jax import codec as codec_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.config import (
  CodecConfig,
  ConfigError,
  EngineConfig,
  TensorCodec,
  layer_ranges,
)
from lynx_jax.models import cached
from lynx_jax.models.transformer import Layer, Transformer
from lynx_jax.programs import fetch, program
from lynx_jax.shapes import Array, BFloat16, Bool, Float, Float32, Int32


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
) -> tuple[Float[Array, '1 C D'], DenseKV, Bool[Array, 'L 2']]:
  """Runs one layer group over a token chunk.

  Args:
    layers: of the group.
    h: residual stream; rows from `count` on are padding.
    kv: of the tokens before the chunk.
    offset: position of the chunk's first token, a multiple of C.
    count: valid tokens, 1..C.

  Returns:
    The residual stream; the KV with the chunk's in it; and whether K and V of
    each layer are finite.
  """
  row = jnp.arange(h.shape[1], dtype=jnp.int32)
  finite = []
  for index, layer in enumerate(layers):

    def attend(q, k, v, index=index, kv=kv):
      at = (index, offset, 0, 0)
      kv = DenseKV(
        jax.lax.dynamic_update_slice(kv.k, k.astype(kv.k.dtype), at),
        jax.lax.dynamic_update_slice(kv.v, v.astype(kv.v.dtype), at),
      )
      padding = (row >= count)[None, :, None, None]
      finite.append(
        jnp.stack([jnp.all(jnp.isfinite(x) | padding) for x in (k, v)])
      )
      out = chunk_attention(q, kv.k, kv.v, layer=index, offset=offset)
      return out.astype(q.dtype), kv

    h, kv = layer(h, offset + row[None], attend)
  return h, kv, jnp.stack(finite)


def chunk_attention(
  q: Float[Array, '1 C N H'],
  k: BFloat16[Array, 'L S K H'],
  v: BFloat16[Array, 'L S K H'],
  *,
  layer: int,
  offset: Int32[Array, ''],
) -> Float32[Array, '1 C N H']:
  """Attends causally to all tokens up to each row's own position.

  Keys are taken in blocks of C, with a running maximum and sum
  (arXiv:2112.05682, algorithm in §2).

  Args:
    q: queries of the chunk, RoPE applied.
    k, v: of the layer group, the chunk's own tokens included.
    layer: which layer of the group.
    offset: position of the chunk's first token, a multiple of C.
  """
  _, size, heads, head_dim = q.shape
  kv_heads = k.shape[2]
  # One product a KV head: its G · C query rows against a block of keys.
  q = q[0].astype(jnp.float32) * np.float32(head_dim**-0.5)
  q = jnp.moveaxis(q.reshape(size, kv_heads, -1, head_dim), 0, 2)
  q = q.reshape(kv_heads, -1, head_dim)  # K GC H

  def load(x, j):
    at = (layer, j * size, 0, 0)
    block = jax.lax.dynamic_slice(x, at, (1, size, kv_heads, head_dim))[0]
    return jnp.swapaxes(block.astype(jnp.float32), 0, 1)  # K S H

  def step(j, carry, mask=None):
    top, total, out = carry
    scores = jnp.einsum('krh,ksh->krs', q, load(k, j))
    if mask is not None:
      scores = jnp.where(mask, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new_top[..., None])
    shrink = jnp.exp(top - new_top)
    total = total * shrink + jnp.sum(weights, axis=-1)
    fresh = jnp.einsum('krs,ksh->krh', weights, load(v, j))
    return new_top, total, out * shrink[..., None] + fresh

  # The chunk's own block comes first: it alone is masked, and it leaves a
  # finite maximum in every row. All earlier blocks are seen whole.
  own = offset // size
  causal = jnp.tril(jnp.ones((size, size), bool))
  causal = jnp.tile(causal, (heads // kv_heads, 1))[None]
  nothing = (
    jnp.full(q.shape[:2], -jnp.inf, jnp.float32),
    jnp.zeros(q.shape[:2], jnp.float32),
    jnp.zeros(q.shape, jnp.float32),
  )
  carry = step(own, nothing, causal)
  _, total, out = jax.lax.fori_loop(0, own, step, carry)
  out = (out / total[..., None]).reshape(kv_heads, -1, size, head_dim)
  return jnp.moveaxis(out, 2, 0).reshape(1, size, heads, head_dim)


def split_chunk(
  kv: DenseKV,
  offset: Int32[Array, ''],
  *,
  k: TensorCodec,
  v: TensorCodec,
  group: int,
  sinks: int,
  size: int,
) -> SplitKV:
  """Splits the tokens [offset, offset + size) of a layer group."""

  def one(x, codec):
    x = jax.lax.dynamic_slice_in_dim(x, offset, size, axis=1)
    if not codec.planes:
      return x
    left = jnp.where(offset == 0, sinks, 0).astype(jnp.int32)
    return codec_lib.split(x, codec, group=group, sinks=left)

  def first(x):
    return jax.lax.dynamic_slice_in_dim(x, offset, sinks, axis=1)

  return SplitKV(one(kv.k, k), one(kv.v, v), DenseKV(first(kv.k), first(kv.v)))


@dataclasses.dataclass(eq=False)
class Prompt:
  """What prefill has computed of one prompt: the source of its chunks.

  Attributes:
    tokens: P.
    prefix_tokens: E.
    kv: dense keys and values of all layer groups.
    token: the most likely token after those computed.
    split: token chunk → layer groups, for those that were split.
  """

  tokens: int
  prefix_tokens: int
  kv: tuple[DenseKV, ...]
  token: int = -1
  split: dict[int, tuple[SplitKV, ...]] = dataclasses.field(
    default_factory=dict
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
    self._embed, self._layers, self._head = _programs(graphs)

  def chunks(self, prompt: np.ndarray) -> Iterator[Prompt]:
    """Yields the growing `Prompt` each time a token chunk was computed.

    The device has finished the chunk when it is yielded.

    Args:
      prompt: i32[P] token ids, 1 <= P <= engine.prompt_tokens.

    Raises:
      NonFiniteError: naming layers and tensors.
    """
    size = self._engine.token_chunk
    end = self._codec.prefix_end(len(prompt))
    state = Prompt(len(prompt), end, self._empty())
    for offset in range(0, len(prompt), size):
      part = prompt[offset : offset + size]
      padded = np.zeros((1, size), np.int32)
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
      last = self._head(self._params, h, np.int32(len(part) - 1))
      token, good = fetch((last, finite))
      good = np.concatenate(good)
      if not good.all():
        raise NonFiniteError(_explain(good, offset, offset + len(part)))
      state.token = int(token)
      yield state

  def split(self, prompt: Prompt, token_chunk: int) -> None:
    """Splits one computed token chunk; waits for the device."""
    offset = np.int32(token_chunk * self._engine.token_chunk)
    parts = [
      _split_program(
        *self._codec.of_layer(start),
        self._codec.group,
        self._codec.sinks,
        self._engine.token_chunk,
      )(kv, offset)
      for (start, _), kv in zip(self._ranges, prompt.kv, strict=True)
    ]
    prompt.split[token_chunk] = jax.block_until_ready(tuple(parts))

  def _empty(self) -> tuple[DenseKV, ...]:
    size = self._engine.token_chunk
    tokens = -(-self._engine.prompt_tokens // size) * size
    heads = (self._model.kv_heads, self._model.head_dim)
    place = jax.tree.leaves(self._params)[0].sharding

    def dense(layers):
      shape = (layers, tokens, *heads)
      return jnp.zeros(shape, jnp.bfloat16, device=place)

    return tuple(
      DenseKV(dense(stop - start), dense(stop - start))
      for start, stop in self._ranges
    )


@functools.cache
def _programs(graphs: cached.Graphs):
  """Makes the jitted functions; engines of one model share them."""

  def embed(params, tokens):
    return nnx.merge(graphs.model, params).embed(tokens)

  def layers(params, h, kv, offset, count):
    return prefill_layers(graphs.layers(params), h, kv, offset, count)

  def head(params, h, row):
    last = jax.lax.dynamic_slice_in_dim(h, row, 1, axis=1)
    return cached.greedy(nnx.merge(graphs.model, params).head(last))[0, 0]

  return (
    program(embed, name='prefill'),
    program(layers, name='prefill', donate=(1, 2)),
    program(head, name='prefill'),
  )


@functools.cache
def _split_program(
  k: TensorCodec, v: TensorCodec, group: int, sinks: int, size: int
):
  return program(
    functools.partial(
      split_chunk, k=k, v=v, group=group, sinks=sinks, size=size
    ),
    name='split',
  )


def _explain(finite: np.ndarray, start: int, stop: int) -> str:
  places = [
    f'{"kv"[tensor]} of layer {layer}' for layer, tensor in np.argwhere(~finite)
  ]
  return (
    f'tokens {start}..{stop - 1}: NaN or infinite values in '
    f'{", ".join(places)}; check the checkpoint, or raise model.dtype'
  )
