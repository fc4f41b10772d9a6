# SPDX-License-Identifier: Apache-2.0
"""Compares codecs offline: bits a value, KL divergence, and acceptance.

Every prompt is prefilled once; `forcing` reads it as each candidate would, and
decodes by rounds. KL is that of the draft's from the target's distribution,
teacher-forced on the model's bfloat16 continuation. A record is written for
every prompt: a run that was ended goes on where it stopped.
"""

import dataclasses
import hashlib
import statistics
from collections.abc import (
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any

import numpy as np

from experiments import (
  config,
  display,
  forcing,
  prompts,
  results,
  serving,
  summaries,
)
from lynx_jax.config import (
  CodecConfig,
  Rotation,
  check_together,
  require,
)
from lynx_jax.prefill import Prefill
from lynx_jax.transport.streams import WireFormat

RESUMES = True

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
    settings.sides == (1, 1),
    f'prefill_mesh={settings.prefill_mesh}, '
    f'decode_mesh={settings.decode_mesh} and '
    f'decode_data={settings.decode_data} must be 1 in a codec search',
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
  oracle = forcing.Oracle(
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
        (rounds,), (ids,) = oracle.accept(*forcing.read_both(texts, candidate))
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
  target, draft = forcing.read_both(texts, candidate)
  (kl,), (agreement,) = oracle.compare(target, draft)
  found = {
    'bits': bits.anchor
    + statistics.mean(later) * codec.prefix_end(length) / length,
    'kl': kl,
    'agreement': agreement,
  }
  if all(t.planes and t.rotation is Rotation.NONE for t in (codec.k, codec.v)):
    dense, _ = forcing.read_both(texts, forcing.DENSE)
    (found['kl_exact'],), _ = oracle.compare(dense, draft)
  return found


def sensitivity(
  texts: forcing.Texts, oracle: forcing.Oracle, candidate: config.Candidate
) -> list[dict[str, float]]:
  """Returns what a layer costs whose K, or V, alone is read from the Anchor.

  All else is read as the target reads it. A short text is enough: the first
  block of the continuation.

  Returns:
    KL in nats of `k` and `v`, by layer.
  """
  target, anchor = forcing.read_both(texts, candidate)
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
    yield summaries.mean(f'{figure}_anchor', values(known, best, figure), unit)
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
    yield summaries.mean('kl_anchor_exact', least, 'nats')


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


def _prefill(
  settings: config.Settings,
  model: serving.Model,
  screen: display.Screen,
  file: str,
  tokens: int,
) -> forcing.Texts:
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
  return forcing.Texts.gather(model.config, [file], [state])
