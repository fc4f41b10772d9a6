# SPDX-License-Identifier: Apache-2.0
"""Compares codecs offline: bits a value, KL divergence, and acceptance.

It knows no link, no engine and no packed cache. Every prompt is prefilled once.
What a candidate's planes read back as is put into a dense float32 cache, so
that one program serves all candidates. A record is written for every prompt: a
run that was ended goes on where it stopped.

A round is what the engine does after arrival: γ greedy drafts on the Anchor,
one pass of the target over them, and the longest agreeing prefix committed
together with the target's own next token. KL is that of the draft's from the
target's distribution, teacher-forced on the model's bfloat16 continuation.
"""

import dataclasses
import functools
import hashlib
import statistics
from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import config, display, prompts, results, serving, summaries
from lynx_jax import codec as codec_lib
from lynx_jax import sampling
from lynx_jax.config import (
  CodecConfig,
  ModelConfig,
  Rotation,
  TensorCodec,
  check_together,
  require,
)
from lynx_jax.models import cached
from lynx_jax.models.transformer import Transformer
from lynx_jax.prefill import Prefill, Prompt
from lynx_jax.programs import fetch, program
from lynx_jax.shapes import Array, BFloat16, Bool, Float32, Int32
from lynx_jax.transport.streams import WireFormat

RESUMES = True
_BLOCK = 64  # rows of a teacher-forced pass

# Keys and values of a layer: of the prompts, and of what was generated.
Layers = tuple[tuple[Float32[Array, 'B K S H'], Float32[Array, 'B K S H']], ...]

# Logits of the target and of drafts.
Both = tuple[Float32[Array, 'B T V'], Float32[Array, 'B T V']]

# What is known of a prompt: the details of its record.
Found = Mapping[str, Any]


def draw(records: Sequence[Mapping[str, Any]]) -> list[Any]:
  """Returns the drawings of the report; see `figures.codecs`."""
  from experiments import drawing
  from experiments.figures import codecs

  with drawing.look():
    return [*codecs.draw(records)]


def run(
  settings: config.Settings, writer: results.Writer, screen: display.Screen
) -> None:
  """Measures every prompt without a record, and writes summaries of all.

  KL is measured for every candidate. Acceptance takes longer: it is measured
  for those that have the least KL on the first prompt among the ones within
  `search.most_bits`. Summaries are those of the one with the highest
  acceptance, or without any, of the run's own codec.

  Raises:
    ConfigError: prompts, model and codecs do not fit together.
  """
  search = settings.search
  require(
    settings.acceptance_tokens > 0,
    'acceptance.output_tokens=0 must be positive: so many are generated and '
    'compared a prompt, for example 256',
  )
  require(
    settings.prefill_mesh == settings.decode_mesh == 1,
    f'prefill_mesh={settings.prefill_mesh} and '
    f'decode_mesh={settings.decode_mesh} must be 1 in a codec search',
  )
  with screen.step(f'loading {settings.model_path}'):
    model = serving.load(
      settings.model_path,
      settings.model_dtype,
      tokenizer_path=settings.model_tokenizer,
    )
  for candidate in search.candidates:
    check_together(model.config, candidate.codec, settings.engine)
  known_by_prompt = dict(_known(writer, _version(settings)))
  known = [*known_by_prompt.values()]
  missing = [
    pair for pair in settings.prompts if pair[0] not in known_by_prompt
  ]
  for file, tokens in missing[: search.at_once or len(missing)]:
    found = _measure(
      settings,
      model,
      screen,
      file,
      tokens,
      chosen=_drafted(known),
      layers=len(known) < search.layer_prompts,
    )
    writer.write(results.codec_record(file, **found))
    known.append(found)
  for record in summaries_of(known, settings.acceptance_drafts):
    writer.write(record)
  for line in lines(known):
    screen.note(line)
  if left := len(settings.prompts) - len(known):
    screen.note(f'{left} prompts are left: run the same command again')


def _measure(
  settings: config.Settings,
  model: serving.Model,
  screen: display.Screen,
  file: str,
  tokens: int,
  *,
  chosen: Sequence[str] | None,
  layers: bool,
) -> dict[str, Any]:
  """Returns the details of a prompt's record."""
  search = settings.search
  texts = _prefill(settings, model, screen, file, tokens)
  oracle = Oracle(
    model.decode,
    texts,
    tokens=settings.acceptance_tokens,
    drafts=settings.acceptance_drafts,
    ends=model.tokenizer.ends,
  )
  with screen.step('continuing it with bfloat16 KV'):
    oracle.continue_exactly()
  found = {}
  for candidate in search.candidates:
    with screen.step(candidate.name):
      found[candidate.name] = _divergences(settings, texts, oracle, candidate)
  if chosen is None:
    within = [n for n, x in found.items() if x['bits'] <= search.most_bits]
    within.sort(key=lambda name: found[name]['kl'])
    chosen = within[: search.drafted]
  for candidate in search.candidates:
    if candidate.name in chosen:
      with screen.step(f'drafting with {candidate.name}'):
        (rounds,), (ids,) = oracle.accept(*read_both(texts, candidate))
      found[candidate.name] |= {'rounds': rounds, 'token_ids': ids}
  details: dict[str, Any] = {
    'version': _version(settings),
    'prompt_tokens': int(texts.lengths[0]),
    'candidates': found,
  }
  if layers:
    with screen.step('layer by layer'):
      details['layers'] = sensitivity(texts, oracle, search.candidates[0])
  return details


def _divergences(settings, texts, oracle, candidate) -> dict[str, Any]:
  """Returns bits, KL and agreement of a prompt.

  Where the codec allows an exact plane, KL from bfloat16 too.
  """
  codec = candidate.codec
  length = int(texts.lengths[0])
  bits = WireFormat(texts.model, codec, settings.engine).bits_a_value(length)
  later = [sum(t.planes[1 : candidate.anchor]) for t in (codec.k, codec.v)]
  target, draft = read_both(texts, candidate)
  (kl,), (agreement,) = oracle.compare(target, draft)
  found = {
    'bits': bits.anchor
    + statistics.mean(later) * codec.prefix_end(length) / length,
    'kl': kl,
    'agreement': agreement,
  }
  if all(t.planes and t.rotation is Rotation.NONE for t in (codec.k, codec.v)):
    dense, _ = read_both(texts, _DENSE)
    (found['kl_exact'],), _ = oracle.compare(dense, draft)
  return found


def sensitivity(
  texts: 'Texts', oracle: 'Oracle', candidate: config.Candidate
) -> list[dict[str, float]]:
  """Returns what a layer costs whose K, or V, alone is read from the Anchor.

  All else is read as the target reads it. A short text is enough: the first
  block of the continuation.

  Returns:
    KL in nats of `k` and `v`, by layer.
  """
  target, anchor = read_both(texts, candidate)
  wanted = oracle.first_block(target)

  def kl(layer: int, kv: Any) -> float:
    mixed = (*target[:layer], kv, *target[layer + 1 :])
    (found,), _ = oracle.divergence([(wanted, oracle.first_block(mixed))])
    return found

  return [
    {'k': kl(layer, (low[0], full[1])), 'v': kl(layer, (full[0], low[1]))}
    for layer, (full, low) in enumerate(zip(target, anchor, strict=True))
  ]


def _drafted(known: Sequence[Found]) -> list[str] | None:
  """Returns the candidates with acceptance; None before the first prompt."""
  if not known:
    return None
  candidates = known[0]['candidates']
  return [name for name, found in candidates.items() if 'rounds' in found]


def _known(writer: results.Writer, version: str) -> Iterator[tuple[str, Found]]:
  for record in results.read(writer.path):
    detail = record.get('detail', {})
    if record.get('name') == results.CODEC and detail['version'] == version:
      yield record['request'], detail


def _version(settings: config.Settings) -> str:
  """Returns a hash of all settings that a figure may depend on."""
  search = dataclasses.replace(settings.search, at_once=0)
  same = dataclasses.replace(settings, search=search)
  return hashlib.sha256(repr(same).encode()).hexdigest()[:16]


def summaries_of(
  known: Sequence[Found], drafts: int
) -> Iterator[dict[str, Any]]:
  """Yields the `summary` records of the best candidate, and that of `exact`.

  Args:
    known: of all prompts.
    drafts: γ.
  """
  drafted = _drafted(known)
  if drafted is None:
    return
  names = [*known[0]['candidates']]

  def rank(name: str) -> float:
    rates = _rates(known, name)
    return statistics.fmean(rates) if rates else 0.0

  best = max(drafted, key=rank) if drafted else names[0]
  for figure, unit in (('bits', 'bits'), ('kl', 'nats')):
    yield _mean(f'{figure}_anchor', unit, values(known, best, figure))
  if drafted:
    yield from summaries.acceptance(
      {'draft_tokens': drafts, 'rounds': rounds, 'token_ids': ids}
      for rounds, ids in zip(
        values(known, best, 'rounds'),
        values(known, best, 'token_ids'),
        strict=True,
      )
    )
  exact = [values(known, name, 'kl_exact') for name in names]
  if any(exact):
    least = min(filter(None, exact), key=statistics.fmean)
    yield _mean('kl_anchor_exact', 'nats', least)


def _mean(name: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
  return results.summary_record(
    name,
    statistics.fmean(values),
    unit,
    len(values),
    *summaries.interval(values, of=statistics.fmean),
  )


def values(known: Sequence[Found], name: str, figure: str) -> list[Any]:
  """Returns a figure of a candidate, a value a prompt that has it."""
  return [
    found['candidates'][name][figure]
    for found in known
    if figure in found['candidates'].get(name, ())
  ]


def lines(known: Sequence[Found]) -> Iterator[str]:
  """Yields a line a candidate: means over prompts, and the worst prompt's."""
  for name in known[0]['candidates'] if known else ():
    bits, kl = (values(known, name, figure) for figure in ('bits', 'kl'))
    text = (
      f'{name}: {statistics.fmean(bits):.2f} bits (worst {max(bits):.2f}), '
      f'KL {statistics.fmean(kl):.5f} ({max(kl):.5f})'
    )
    if rates := _rates(known, name):
      text += f', acceptance {statistics.fmean(rates):.3f} ({min(rates):.3f})'
    yield text


def _rates(known: Sequence[Found], name: str) -> list[float]:
  rounds = values(known, name, 'rounds')
  return [summaries.accepted_share(each) for each in rounds if each]


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


def _prefill(
  settings: config.Settings,
  model: serving.Model,
  screen: display.Screen,
  file: str,
  tokens: int,
) -> Texts:
  """Prefills a prompt, cut to whole groups of the run's codec."""
  longest = max(count for _, count in settings.prompts)
  engine = dataclasses.replace(settings.engine, prompt_tokens=longest)
  codec = settings.search.candidates[0].codec
  text = model.tokenizer.encode(prompts.read(file))
  tokens = min(tokens, len(text))
  tokens = codec.prefix_end(tokens) + min(codec.recent_tokens, tokens)
  ids = prompts.cut(text, tokens, keeps_end=prompts.KEEPS_END.get(file, False))
  with screen.step(f'prefilling {file}, {len(ids)} tokens'):
    prefill = Prefill(model.prefill, CodecConfig(), engine)
    *_, state = prefill.chunks(np.asarray(ids, np.int32))
  return Texts.gather(model.config, [file], [state])


def read_both(
  texts: Texts, candidate: config.Candidate | CodecConfig
) -> tuple[Layers, Layers]:
  """Returns the prompts' KV as the target and as drafts read it."""
  if isinstance(candidate, CodecConfig):
    candidate = config.Candidate(name='', codec=candidate)
  codec = candidate.codec
  return read(texts, codec), read(
    texts, codec, candidate.anchor, candidate.code
  )


def read(
  texts: Texts,
  codec: CodecConfig,
  depth: int | None = None,
  code: config.Code = config.Code.LINEAR,
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


_DENSE = CodecConfig(k=TensorCodec(planes=()), v=TensorCodec(planes=()))


@functools.cache
def _read_program(
  codec: TensorCodec,
  group: int,
  sinks: int,
  depth: int | None,
  code: config.Code,
):
  """Compiles: what packed tokens read back as with `depth` planes."""

  def read(x: BFloat16[Array, 'B S K H'], packed: Bool[Array, 'B S']):
    values = x.astype(jnp.float32)
    if code is config.Code.LOG:
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
    kv, _ = read_both(self._texts, _DENSE)
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
