# SPDX-License-Identifier: Apache-2.0
"""Reads prompts' KV through a codec, and forces texts on the model over it.

It knows no study, no link, no engine and no packed cache: what planes read back
as is put into a dense float32 cache, so that one program serves all codecs.

A round is what the engine does after arrival: γ greedy drafts on the Anchor,
one pass of the target over them, and the longest agreeing prefix committed
together with the token that follows it.
"""

import dataclasses
import functools
from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Sequence,
)

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.study_settings import Candidate, Code
from lynx_jax import codec as codec_lib
from lynx_jax import sampling
from lynx_jax.config import (
  CodecConfig,
  ModelConfig,
  Rotation,
  TensorCodec,
)
from lynx_jax.models import cached
from lynx_jax.models.transformer import Transformer
from lynx_jax.prefill import Prompt
from lynx_jax.programs import fetch, program
from lynx_jax.shapes import Array, BFloat16, Bool, Float32, Int32

_BLOCK = 64  # rows of a teacher-forced pass

# Keys and values of a layer: of the prompts, and of what was generated.
Layers = tuple[tuple[Float32[Array, 'B K S H'], Float32[Array, 'B K S H']], ...]

# Logits of the target and of drafts.
Both = tuple[Float32[Array, 'B T V'], Float32[Array, 'B T V']]


@dataclasses.dataclass(frozen=True)
class Texts:
  """The prompts, prefilled.

  Attributes:
    model: dimensions.
    names: of the prompts.
    lengths: P of each.
    token: token 1 of each.
    k, v: of every layer, on the device; zeros from P on.
  """

  model: ModelConfig
  names: tuple[str, ...]
  lengths: np.ndarray
  token: np.ndarray
  k: list[BFloat16[Array, 'B S K H']]
  v: list[BFloat16[Array, 'B S K H']]

  @classmethod
  def gather(
    cls,
    model: ModelConfig,
    names: Sequence[str],
    states: Sequence[Prompt],
  ) -> 'Texts':
    """Puts what prefill has computed of each prompt side by side."""
    computed = fetch([state.kv for state in states])
    both = []
    for tensor in 'kv':
      by_prompt = []
      for state, groups in zip(states, computed, strict=True):
        x = np.concatenate([getattr(group, tensor) for group in groups])
        x[:, state.tokens :] = 0  # padding
        by_prompt.append(x)
      layers = zip(*by_prompt, strict=True)
      both.append([jnp.asarray(np.stack(layer)) for layer in layers])
    return cls(
      model,
      tuple(names),
      np.array([state.tokens for state in states], np.int32),
      np.array([state.token for state in states], np.int32),
      *both,
    )


def read_both(
  texts: Texts, candidate: Candidate | CodecConfig
) -> tuple[Layers, Layers]:
  """Returns the prompts' KV as the target and as drafts read it."""
  if isinstance(candidate, CodecConfig):
    candidate = Candidate(name='', codec=candidate)
  codec = candidate.codec
  return read(texts, codec), read(
    texts, codec, candidate.anchor, candidate.code
  )


def read(
  texts: Texts,
  codec: CodecConfig,
  depth: int | None = None,
  code: Code = Code.LINEAR,
) -> Layers:
  """Returns the prompts' KV as read with `depth` planes; None is all."""
  packed = packed_tokens(texts, codec)
  layers = []
  for layer, kv in enumerate(zip(texts.k, texts.v, strict=True)):
    layers.append(
      tuple(
        _read_program(tensor, codec.group, codec.sinks, depth, code)(x, packed)
        for tensor, x in zip(codec.of_layer(layer), kv, strict=True)
      )
    )
  return tuple(layers)


def packed_tokens(texts: Texts, codec: CodecConfig) -> np.ndarray:
  """Returns which tokens are in planes, bool[B, S]."""
  ends = np.array([codec.prefix_end(int(n)) for n in texts.lengths])
  token = np.arange(texts.k[0].shape[1])
  return (token >= codec.sinks) & (token < ends[:, None])


def landing(target: Layers, anchor: Layers, *, drafts: int) -> list[Layers]:
  """Returns what each draft of a round reads while the Residual lands.

  Before draft i, the target's KV has landed of i of `drafts` parts of the
  layers, from the first layer on.
  """
  cuts = [i * len(anchor) // drafts for i in range(drafts)]
  return [target[:cut] + anchor[cut:] for cut in cuts]


DENSE = CodecConfig(k=TensorCodec(planes=()), v=TensorCodec(planes=()))


@functools.cache
def _read_program(
  codec: TensorCodec,
  group: int,
  sinks: int,
  depth: int | None,
  code: Code,
):
  """Compiles: what packed tokens read back as with `depth` planes."""

  def read(x: BFloat16[Array, 'B S K H'], packed: Bool[Array, 'B S']):
    values = x.astype(jnp.float32)
    if code is Code.LOG:
      read_back = log_code(values, codec, group=group, sinks=sinks)
      values = jnp.where(packed[:, :, None, None], read_back, values)
    elif codec.planes:
      split = codec_lib.split(x, codec, group=group, sinks=sinks)
      read_back = codec_lib.dequantise(split, depth)
      values = jnp.where(packed[:, :, None, None], read_back, values)
    return jnp.swapaxes(values, 1, 2)

  return program(read, name='read')


def log_code(
  x: Float32[Array, 'B S K H'], codec: TensorCodec, *, group: int, sinks: int
) -> Float32[Array, 'B S K H']:
  """Returns what an Anchor reads back as whose levels are powers of two.

  Around the middle of a channel's range in its group, with the range's half a:
  a sign and an exponent e of w - 1 bits stand for ±a · 2^(-e/2). Small values
  are near to a level, large ones farther than with a linear code. Bits and
  metadata are those of a linear Anchor of w bits.
  """
  values = codec_lib.rotate(x) if codec.rotation is not Rotation.NONE else x
  batch, tokens, heads, head_dim = x.shape
  kept = (jnp.arange(tokens, dtype=jnp.int32) >= sinks).reshape(-1, group, 1, 1)
  grouped = values.reshape(batch, -1, group, heads, head_dim)
  low, high = (
    reduce(jnp.where(kept[None], grouped, fill), axis=2, keepdims=True)
    for reduce, fill in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf))
  )
  middle, half = (low + high) / 2, jnp.maximum((high - low) / 2, 1e-30)
  away = jnp.abs(grouped - middle) / half
  most = 2.0 ** (codec.planes[0] - 1) - 1
  exponent = jnp.round(-2 * jnp.log2(jnp.maximum(away, 1e-30)))
  level = half * jnp.exp2(-jnp.clip(exponent, 0.0, most) / 2)
  read = middle + jnp.where(grouped < middle, -level, level)
  read = read.reshape(x.shape)
  return codec_lib.rotate(read) if codec.rotation is not Rotation.NONE else read


class Oracle:
  """Runs the model over dense caches; a batch slot is a prompt.

  Generated tokens count from 0, which is token 1. Their KV lie in a tail of
  their own, rounded to bfloat16: a round drafts into it, the target's pass over
  the same rows overwrites what the drafts have left.

  Args:
    model: parameters.
    texts: the prompts.
    tokens: how many are generated a prompt.
    drafts: γ.
    ends: ids that end a text.

  Attributes:
    forced: what `continue_exactly` has decoded, a row a prompt.
  """

  def __init__(
    self,
    model: Transformer,
    texts: Texts,
    *,
    tokens: int,
    drafts: int,
    ends: Collection[int],
  ):
    graphs, self._params = cached.split(model)
    self._texts, self._tokens, self._drafts = texts, tokens, drafts
    self._ends = sorted(ends)
    self._pass = _pass_program(graphs)
    self._compare = program(_divergence, name='divergence')
    self.forced: np.ndarray | None = None

  def continue_exactly(self) -> None:
    """Decodes the text that `compare` is forced on, with bfloat16 KV."""
    kv, _ = read_both(self._texts, DENSE)
    self.forced = self.decode(kv)

  def decode(
    self,
    kv: Layers,
    tokens: int | None = None,
    is_enough: Callable[[np.ndarray], bool] = lambda text: False,
  ) -> np.ndarray:
    """Decodes greedily, one row a step.

    Args:
      kv: the prompts' KV.
      tokens: most of them; None is as many as there is room for.
      is_enough: is asked after every token, of all that there are.

    Returns:
      i32[B, n], token 1 first; n is `tokens` or, if it was enough, less.
    """
    token, tail = self._texts.token[:, None], self._tail()
    text = token
    most = self._tokens if tokens is None else tokens
    while text.shape[1] < most and not is_enough(text):
      _, token, tail = self._run(kv, tail, token, text.shape[1] - 1)
      text = np.concatenate([text, fetch(token)], axis=1)
    return text

  def force(
    self, text: np.ndarray, kv: Layers
  ) -> Iterator[Float32[Array, 'B T V']]:
    """Yields the logits of a text that is forced, block by block.

    In contrast to `logits`, all that was generated is read as it was written
    with this very KV: nothing of another target's.

    Args:
      text: i32[B, n], n at most `tokens`.
      kv: the prompts' KV.
    """
    tail = self._tail()
    for row in range(0, text.shape[1], _BLOCK):
      logits, _, tail = self._run(kv, tail, text[:, row : row + _BLOCK], row)
      yield logits

  def compare(
    self, target: Layers, draft: Layers
  ) -> tuple[list[float], list[float]]:
    """Returns mean KL(target ‖ draft) and agreement, a value a prompt.

    The text is taken in blocks; in each, drafts see the KV of their own block
    and the target's of those before, as in a long round.
    """
    assert self.forced is not None
    return self.divergence(self.logits(self.forced, target, draft))

  def divergence(
    self, blocks: Iterable[Both]
  ) -> tuple[list[float], list[float]]:
    """Returns the same of logits; see `logits`."""
    parts = [fetch(self._compare(*both)) for both in blocks]
    kl, agree = (np.concatenate(x, axis=1) for x in zip(*parts, strict=True))
    return kl.mean(axis=1).tolist(), agree.mean(axis=1).tolist()

  def first_block(self, kv: Layers) -> Float32[Array, 'B T V']:
    """Returns the logits of the first block of the continuation."""
    assert self.forced is not None
    tokens = self.forced[:, :_BLOCK]
    logits, _, _ = self._run(kv, self._tail(), tokens, 0)
    return logits

  def logits(
    self, text: np.ndarray, target: Layers, draft: Layers
  ) -> Iterator[Both]:
    """Yields the logits of both, block by block of a text they are forced on.

    Args:
      text: i32[B, tokens], a row a prompt.
      target, draft: the prompts' KV as either reads it.
    """
    tail = self._tail()
    for row in range(0, text.shape[1], _BLOCK):
      tokens = text[:, row : row + _BLOCK]
      seen, _, tail = self._run(draft, tail, tokens, row)
      wanted, _, tail = self._run(target, tail, tokens, row)
      yield wanted, seen

  def accept(
    self, target: Layers, *draft: Layers, tokens: int | None = None
  ) -> tuple[list[list[tuple[int, int]]], list[list[int]]]:
    """Decodes by rounds of γ.

    Args:
      target: the prompts' KV as a verification reads it.
      *draft: as drafts read it; or one for each draft of a round.
      tokens: most of them; None is as many as there is room for.

    Returns:
      (drafted, accepted) of each round, and the tokens, a list a prompt.
    """
    slots, drafts = len(self._texts.lengths), self._drafts
    most = self._tokens if tokens is None else tokens
    committed = np.ones(slots, np.int32)
    text = [[int(token)] for token in self._texts.token]
    last, tail = self._texts.token, self._tail()
    left = ~np.isin(last, self._ends)
    rounds: list[list[tuple[int, int]]] = [[] for _ in range(slots)]
    while left.any():
      row = [last]
      for i in range(drafts):
        _, token, tail = self._run(
          draft[i % len(draft)], tail, row[-1][:, None], committed - 1 + i
        )
        row.append(fetch(token)[:, 0])
      drafted = np.stack(row, axis=1)
      _, found, tail = self._run(target, tail, drafted, committed - 1)
      targets = fetch(found)
      agree = np.cumprod(drafted[:, 1:] == targets[:, :-1], axis=1).sum(axis=1)
      for slot in np.flatnonzero(left):
        rounds[slot].append((drafts, int(agree[slot])))
        fresh = targets[slot, : agree[slot] + 1]
        ends = np.flatnonzero(np.isin(fresh, self._ends))
        fresh = fresh[: ends[0] + 1] if len(ends) else fresh
        text[slot] += fresh.tolist()
        left[slot] = len(text[slot]) < most and not len(ends)
      last = np.take_along_axis(targets, agree[:, None], axis=1)[:, 0]
      # A slot that has ended goes on drafting at its last row, unread.
      committed = np.minimum(committed + agree + 1, most)
    return rounds, [found[:most] for found in text]

  def _run(self, kv, tail, tokens, first):
    first = np.broadcast_to(np.asarray(first, np.int32), len(tokens))
    return self._pass(
      self._params, kv, tail, tokens, self._texts.lengths, first
    )

  def _tail(self) -> Layers:
    model = self._texts.model
    rows = self._tokens + max(self._drafts + 1, _BLOCK)
    shape = (len(self._texts.lengths), model.kv_heads, rows, model.head_dim)

    def zeros():  # a buffer each: a donated argument may not occur twice
      return jnp.zeros(shape, jnp.float32)

    return tuple((zeros(), zeros()) for _ in range(model.layers))


@functools.cache
def _pass_program(graphs: cached.Graphs):
  def run(params, prompt, tail, tokens, lengths, first):
    model = nnx.merge(graphs.model, params)
    logits, tail = forward(model, prompt, tail, tokens, lengths, first)
    return logits, sampling.greedy(logits), tail

  return program(run, name='pass', donate=(2,))


def forward(
  model: Transformer,
  prompt: Layers,
  tail: Layers,
  tokens: Int32[Array, 'B T'],
  lengths: Int32[Array, 'B'],
  first: Int32[Array, 'B'],
) -> tuple[Float32[Array, 'B T V'], Layers]:
  """Returns the logits of every row, and the tail with the rows' KV in it.

  Args:
    model: parameters.
    prompt: KV of positions [0, P).
    tail: KV from position P on.
    tokens: of the pass.
    lengths: P.
    first: row of the tail at which the first token stands.
  """
  row = first[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
  h, written = model.embed(tokens), []
  for layer, (k, v), rest in zip(model.layers, prompt, tail, strict=True):

    def attend(q, new_k, new_v, k=k, v=v, rest=rest, rule=layer.rule):
      rest = tuple(
        _write(buffer, new, first)
        for buffer, new in zip(rest, (new_k, new_v), strict=True)
      )
      return _attention(q, (k, v), rest, lengths, row, rule), rest

    h, rest = layer(h, lengths[:, None] + row, attend)
    written.append(rest)
  return model.head(h), tuple(written)


def _write(buffer, new, first):
  """Writes rows as the bfloat16 tail of a real cache holds them."""
  new = jnp.swapaxes(new.astype(jnp.bfloat16).astype(jnp.float32), 1, 2)
  for slot in range(buffer.shape[0]):
    buffer = jax.lax.dynamic_update_slice(
      buffer, new[slot : slot + 1], (slot, 0, first[slot], 0)
    )
  return buffer


def _attention(q, prompt, tail, lengths, row, rule):
  """Attends to the prompt, and to the tail up to each row's own, by a rule."""
  batch, rows, heads, head_dim = q.shape
  kv_heads = tail[0].shape[1]
  x = q.astype(jnp.float32).reshape(batch, rows, kv_heads, -1, head_dim)
  x = x.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, head_dim)

  first = rule.first_tokens(lengths[:, None] + row)

  def scores(k, limit, start):  # B K TG S; limit: B T; start: B 1
    token = jnp.arange(k.shape[2], dtype=jnp.int32)[None, None]
    seen = token < limit[:, :, None]
    if first is not None:
      seen = seen & (start[:, :, None] + token >= first[:, :, None])
    seen = jnp.repeat(seen, heads // kv_heads, axis=1)
    found = jnp.einsum('bkrh,bksh->bkrs', x, k) * np.float32(rule.logits_scale)
    if rule.soft_cap is not None:
      cap = np.float32(rule.soft_cap)
      found = cap * jnp.tanh(found / cap)
    return jnp.where(seen[:, None], found, -jnp.inf)

  prefix = jnp.broadcast_to(lengths[:, None], row.shape)
  both = [
    scores(prompt[0], prefix, jnp.zeros_like(lengths)[:, None]),
    scores(tail[0], row + 1, lengths[:, None]),
  ]
  weights = jax.nn.softmax(jnp.concatenate(both, axis=-1), axis=-1)
  cut = prompt[0].shape[2]
  out = jnp.einsum('bkrs,bksh->bkrh', weights[..., :cut], prompt[1])
  out += jnp.einsum('bkrs,bksh->bkrh', weights[..., cut:], tail[1])
  out = out.reshape(batch, kv_heads, rows, -1, head_dim)
  return out.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)


def _divergence(
  target: Float32[Array, 'B T V'], draft: Float32[Array, 'B T V']
) -> tuple[Float32[Array, 'B T'], Bool[Array, 'B T']]:
  """Returns KL(target ‖ draft) and whether the most likely tokens agree."""
  p, q = jax.nn.log_softmax(target), jax.nn.log_softmax(draft)
  kl = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
  return kl, sampling.greedy(target) == sampling.greedy(draft)
