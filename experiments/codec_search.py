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
from experiments.study_settings import Candidate, Search
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
_RANKED = ('kl', 'bits')


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

  KL is measured for every candidate, or after `search.compared_prompts` for
  those that summaries can be of. Acceptance takes longer: it is measured for
  those that have the least KL on the first prompts among the ones within
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
  now = missing[: search.at_once or len(missing)]
  for start in range(0, len(now), search.slots):
    some = now[start : start + search.slots]
    found = _measure(
      settings,
      model,
      screen,
      some,
      candidates=_candidates(search, known),
      chosen=_drafted(known),
      layers=len(known) < search.layer_prompts,
    )
    for (file, _), details in zip(some, found, strict=True):
      writer.write(results.codec_record(file, **details))
    known += found
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
  files: Sequence[tuple[str, int]],
  *,
  candidates: Sequence[Candidate],
  chosen: Sequence[str] | None,
  layers: bool,
) -> list[dict[str, Any]]:
  """Returns the details of every prompt's record.

  Args:
    settings: of the run.
    model: where it runs.
    screen: for progress.
    files: prompts, with their tokens, that are measured side by side.
    candidates: what is compared.
    chosen: names of those with acceptance; None chooses by KL.
    layers: whether KL is measured layer by layer.
  """
  search = settings.search
  texts = _prefill(settings, model, screen, files)
  oracle = forcing.Oracle(
    model.decode,
    texts,
    tokens=settings.acceptance_tokens,
    drafts=settings.acceptance_drafts,
    ends=model.tokenizer.ends,
  )
  with screen.step('continuing with bfloat16 KV'):
    oracle.continue_exactly()
  found = {}
  for candidate in candidates:
    with screen.step(candidate.name):
      found[candidate.name] = _divergences(settings, texts, oracle, candidate)
  if chosen is None:
    means = {
      name: [statistics.fmean(x[figure] for x in of) for figure in _RANKED]
      for name, of in found.items()
    }
    within = [n for n, (_, bits) in means.items() if bits <= search.most_bits]
    chosen = sorted(within, key=means.__getitem__)[: search.drafted]
  for candidate in candidates:
    if candidate.name in chosen:
      with screen.step(f'drafting with {candidate.name}'):
        drafted = oracle.accept(*forcing.read_both(texts, candidate))
      for one, rounds, ids in zip(found[candidate.name], *drafted, strict=True):
        one |= {'rounds': rounds, 'token_ids': ids}
  details: list[dict[str, Any]] = [
    {
      'version': _version(settings),
      'prompt_tokens': int(length),
      'candidates': {name: of[i] for name, of in found.items()},
    }
    for i, length in enumerate(texts.lengths)
  ]
  if layers:
    with screen.step('layer by layer'):
      costs = sensitivity(texts, oracle, search.candidates[0])
    for one, of_layers in zip(details, costs, strict=True):
      one['layers'] = of_layers
  return details


def _candidates(search: Search, known: Sequence[Found]) -> list[Candidate]:
  """Returns what is measured on the next prompts."""
  compared = search.compared_prompts
  if not known or not compared or len(known) < compared:
    return [*search.candidates]
  kept = {search.candidates[0].name, *(_drafted(known) or ()), *_exact(known)}
  return [c for c in search.candidates if c.name in kept]


def _exact(known: Sequence[Found]) -> list[str]:
  """Returns the candidate nearest to bfloat16 that allows an exact plane.

  It is chosen by the prompts on which all candidates were measured.
  """
  full = [f for f in known if len(f['candidates']) == _most(known)]
  means = {
    name: statistics.fmean(found)
    for name in full[0]['candidates']
    if (found := values(full, name, 'kl_exact'))
  }
  return [min(means, key=means.__getitem__)] if means else []


def _most(known: Sequence[Found]) -> int:
  return max(len(found['candidates']) for found in known)


def _divergences(settings, texts, oracle, candidate) -> list[dict[str, Any]]:
  """Returns bits, KL and agreement of every prompt.

  Where the codec allows an exact plane, KL from bfloat16 too.
  """
  codec = candidate.codec
  wire = WireFormat(texts.model, codec, settings.engine)
  later = [sum(t.planes[1 : candidate.anchor]) for t in (codec.k, codec.v)]
  target, draft = forcing.read_both(texts, candidate)
  found = [
    {
      'bits': wire.bits_a_value(length).anchor
      + statistics.mean(later) * codec.prefix_end(length) / length,
      'kl': kl,
      'agreement': agreement,
    }
    for length, kl, agreement in zip(
      texts.lengths.tolist(), *oracle.compare(target, draft), strict=True
    )
  ]
  if all(t.planes and t.rotation is Rotation.NONE for t in (codec.k, codec.v)):
    dense, _ = forcing.read_both(texts, forcing.DENSE)
    from_exact, _ = oracle.compare(dense, draft)
    for one, kl in zip(found, from_exact, strict=True):
      one['kl_exact'] = kl
  return found


def sensitivity(
  texts: forcing.Texts,
  oracle: forcing.Oracle,
  candidate: Candidate,
) -> list[list[dict[str, float]]]:
  """Returns what a layer costs whose K, or V, alone is read from the Anchor.

  All else is read as the target reads it. A short text is enough: the first
  block of the continuation.

  Returns:
    KL in nats of `k` and `v`, by prompt and layer.
  """
  target, anchor = forcing.read_both(texts, candidate)
  wanted = oracle.first_block(target)

  def kl(layer: int, kv: Any) -> list[float]:
    mixed = (*target[:layer], kv, *target[layer + 1 :])
    found, _ = oracle.divergence([(wanted, oracle.first_block(mixed))])
    return found

  by_layer = [
    (kl(layer, (low[0], full[1])), kl(layer, (full[0], low[1])))
    for layer, (full, low) in enumerate(zip(target, anchor, strict=True))
  ]
  return [
    [{'k': k[i], 'v': v[i]} for k, v in by_layer]
    for i in range(len(texts.lengths))
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
  for name in _exact(known):
    kl, bits = (values(known, name, figure) for figure in ('kl_exact', 'bits'))
    yield summaries.mean('kl_anchor_exact', kl, 'nats')
    yield summaries.mean('bits_anchor_exact', bits, 'bits')


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
      f'{name} on {len(kl)}: {statistics.fmean(bits):.2f} bits (worst '
      f'{max(bits):.2f}), '
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
  files: Sequence[tuple[str, int]],
) -> forcing.Texts:
  """Prefills prompts, cut to whole groups of the run's codec."""
  longest = max(count for _, count in settings.prompts)
  engine = dataclasses.replace(settings.engine, prompt_tokens=longest)
  codec = settings.search.candidates[0].codec
  prefill = Prefill(model.prefill, CodecConfig(), engine)
  states = []
  for file, most in files:
    text = model.tokenizer.encode(prompts.read(file))
    tokens = min(most, len(text))
    tokens = codec.prefix_end(tokens) + min(codec.recent_tokens, tokens)
    keeps_end = prompts.KEEPS_END.get(file, False)
    ids = prompts.cut(text, tokens, keeps_end=keeps_end)
    with screen.step(f'prefilling {file}, {len(ids)} tokens'):
      *_, state = prefill.chunks(np.asarray(ids, np.int32))
    states.append(state)
  names = [file for file, _ in files]
  return forcing.Texts.gather(model.config, names, states)
