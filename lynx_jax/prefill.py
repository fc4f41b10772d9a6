# SPDX-License-Identifier: Apache-2.0
"""Chunked prefill of one prompt, and the split of what it computes.

It knows no link and no decode: it yields token chunks, and splits them.

One program serves every chunk of every prompt: the offset is traced, and a
chunk attends to whole blocks of C earlier tokens, as many as there are.
"""

from collections.abc import Iterator
import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from lynx_jax import codec as codec_lib
from lynx_jax.codec import PackedTensor
from lynx_jax.config import (
  CodecConfig,
  ConfigError,
  EngineConfig,
  ModelConfig,
  TensorCodec,
  layer_ranges,
)
from lynx_jax.models import cached
from lynx_jax.models.transformer import Transformer
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


def prefill_chunk(
  model: Transformer,
  kv: tuple[DenseKV, ...],
  tokens: Int32[Array, '1 C'],
  offset: Int32[Array, ''],
  count: Int32[Array, ''],
) -> tuple[tuple[DenseKV, ...], Int32[Array, ''], Bool[Array, 'L 2']]:
  """Computes the KV of one token chunk and the token after it.

  Args:
    model: parameters.
    kv: of the tokens before the chunk; returned with the chunk's written.
    tokens: ids; those from `count` on are padding.
    offset: position of the first one, a multiple of C.
    count: valid tokens, 1..C.

  Returns:
    The KV; the most likely token after the last valid one; and whether K and V
    of each layer are finite.
  """
  size = tokens.shape[1]
  positions = offset + jnp.arange(size, dtype=jnp.int32)[None]
  h = model.embed(tokens)
  valid = jnp.arange(size, dtype=jnp.int32) < count
  written, finite, first = [], [], 0
  for part in kv:
    for layer in range(part.k.shape[0]):

      def attend(q, k, v, layer=layer, part=part):
        at = (layer, offset, 0, 0)
        new = DenseKV(
          jax.lax.dynamic_update_slice(part.k, k.astype(part.k.dtype), at),
          jax.lax.dynamic_update_slice(part.v, v.astype(part.v.dtype), at),
        )
        finite.append(jnp.stack([_finite(x, valid) for x in (k, v)]))
        out = chunk_attention(q, new.k, new.v, layer=layer, offset=offset)
        return out.astype(q.dtype), new

      h, part = model.layers[first + layer](h, positions, attend)
    first += part.k.shape[0]
    written.append(part)
  last = jax.lax.dynamic_slice_in_dim(h, count - 1, 1, axis=1)
  token = cached.greedy(model.head(last))[0, 0]
  return tuple(written), token, jnp.stack(finite)


def chunk_attention(
  q: Float[Array, '1 C N H'],
  k: BFloat16[Array, 'L S K H'],
  v: BFloat16[Array, 'L S K H'],
  *,
  layer: int,
  offset: Int32[Array, ''],
) -> Float32[Array, '1 C N H']:
  """Attends causally to all tokens up to each row's own position.

  Keys are taken in blocks of C from 0 to the chunk itself, with a running
  maximum and sum (arXiv:2112.05682, algorithm in §2).

  Args:
    q: queries of the chunk, RoPE applied.
    k, v: of the layer group, the chunk's own tokens included.
    layer: which layer of the group.
    offset: position of the chunk's first token, a multiple of C.
  """
  _, size, heads, head_dim = q.shape
  kv_heads = k.shape[2]
  q = q[0].astype(jnp.float32) * np.float32(head_dim**-0.5)
  q = q.reshape(size, kv_heads, -1, head_dim)
  row = offset + jnp.arange(size, dtype=jnp.int32)

  def block(j, carry):
    top, total, out = carry
    at = (layer, j * size, 0, 0)
    shape = (1, size, kv_heads, head_dim)
    keys = jax.lax.dynamic_slice(k, at, shape)[0].astype(jnp.float32)
    values = jax.lax.dynamic_slice(v, at, shape)[0].astype(jnp.float32)
    scores = jnp.einsum('ckgh,skh->kgcs', q, keys)
    column = j * size + jnp.arange(size, dtype=jnp.int32)
    seen = column[None] <= row[:, None]
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
    # Block 0 holds a seen column for every row, so `top` is finite.
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new_top[..., None])
    shrink = jnp.exp(top - new_top)
    total = total * shrink + jnp.sum(weights, axis=-1)
    out = out * shrink[..., None] + jnp.einsum('kgcs,skh->kgch', weights, values)
    return new_top, total, out

  shape = (kv_heads, heads // kv_heads, size)
  start = (
    jnp.full(shape, -jnp.inf, jnp.float32),
    jnp.zeros(shape, jnp.float32),
    jnp.zeros((*shape, head_dim), jnp.float32),
  )
  _, total, out = jax.lax.fori_loop(0, offset // size + 1, block, start)
  out = jnp.moveaxis(out / total[..., None], 2, 0)  # C K G H
  return out.reshape(1, size, heads, head_dim)


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
    graph, self._params = nnx.split(model)
    self._ranges = layer_ranges(model.config, engine)
    self._prefill = program(
      lambda params, kv, *rest: prefill_chunk(
        nnx.merge(graph, params), kv, *rest
      ),
      name='prefill',
      donate=(1,),
    )
    codecs = {codec.of_layer(start) for start, _ in self._ranges}
    self._split = {
      (k, v): program(
        functools.partial(
          split_chunk,
          k=k,
          v=v,
          group=codec.group,
          sinks=codec.sinks,
          size=engine.token_chunk,
        ),
        name='split',
      )
      for k, v in codecs
    }

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
      state.kv, token, finite = self._prefill(
        self._params, state.kv, padded, np.int32(offset), np.int32(len(part))
      )
      token, finite = fetch((token, finite))
      if not finite.all():
        raise NonFiniteError(_explain(finite, offset, offset + len(part)))
      state.token = int(token)
      yield state

  def split(self, prompt: Prompt, token_chunk: int) -> None:
    """Splits one computed token chunk; waits for the device."""
    offset = np.int32(token_chunk * self._engine.token_chunk)
    parts = [
      self._split[self._codec.of_layer(start)](kv, offset)
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


def _explain(finite: np.ndarray, start: int, stop: int) -> str:
  places = [
    f'{"kv"[tensor]} of layer {layer}' for layer, tensor in np.argwhere(~finite)
  ]
  return (
    f'tokens {start}..{stop - 1}: NaN or infinite values in '
    f'{", ".join(places)}; check the checkpoint, or raise model.dtype'
  )


def _finite(x, valid):
  return jnp.all(jnp.isfinite(x) | ~valid[None, :, None, None])
