# SPDX-License-Identifier: Apache-2.0
"""The equivalence study: many varied prompts, and what must hold on each.

It forms a figure from one number a prompt and knows no plot. Every prompt is
written when it is done: a run that was ended goes on where it stopped.
"""

import dataclasses
import hashlib
import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax

from experiments import (
  config,
  display,
  forcing,
  lossless,
  prompts,
  results,
  sampling_study,
  schemes,
  serving,
  summaries,
)
from lynx_jax.engine import Engine, Request, Result, Sampling
from lynx_jax.models import cached
from lynx_jax.prefill import Prompt
from lynx_jax.timeline import Phase

RESUMES = True
_SCHEMES = ('bf16', 'lynx', 'lynx_exact')
_DRAFTS = (4, 8, 16)
_SHARPENED = 15  # drafts of a whole verification


@dataclasses.dataclass(frozen=True)
class Piece:
  """A part of a text, as a prompt; `number` counts them."""

  number: int
  name: str
  tokens: tuple[int, ...]


class Bench:
  """An engine for each scheme over one link, and one prompt at a time.

  What a measurement has computed of the prompt is kept for the others.

  Args:
    settings: of the run.
    model: where it runs.
    stack: closes the engines.

  Attributes:
    rounds: of this prompt, details as an `acceptance` event has them.
  """

  def __init__(
    self, settings: config.Settings, model: serving.Model, stack: ExitStack
  ):
    self.settings, self.model = settings, model
    ground = settings.schemes[0].codec
    self.schemes = {name: schemes.scheme(name, ground) for name in _SCHEMES}
    self.engines: dict[str, Engine] = {}
    for name, scheme in self.schemes.items():
      line = stack.enter_context(
        serving.connect(
          model,
          scheme,
          scheme.engine(settings.engine),
          rate_gbps=settings.link.rate_gbps,
          rtt_ms=settings.link.rtt_ms,
        )
      )
      if scheme.is_speculative:
        line.engine.warm_up()  # bf16 makes references only
      self.engines[name] = line.engine
    self.rounds: list[dict[str, Any]] = []
    self._computed: dict[Piece, Prompt] = {}
    self._texts: forcing.Texts | None = None
    self._results: dict[Any, Result] = {}

  def take(self, piece: Piece) -> None:
    """Turns to another prompt."""
    computed: Any = self.engines['bf16'].compute(piece.tokens)
    self._computed, self._results = {piece: computed}, {}
    self.rounds, self._texts = [], None

  def computed(self, piece: Piece) -> Prompt:
    """Returns what prefill has computed."""
    return self._computed[piece]

  def texts(self, piece: Piece) -> forcing.Texts:
    """Returns the same, as the codec search has it."""
    if self._texts is None:
      self._texts = forcing.Texts.gather(
        self.model.config, [piece.name], [self.computed(piece)]
      )
    return self._texts

  def oracle(self, piece: Piece, drafts: int) -> forcing.Oracle:
    """Returns what decodes without an engine, in rounds of `drafts`."""
    return forcing.Oracle(
      self.model.decode,
      self.texts(piece),
      tokens=self.settings.acceptance_tokens,
      drafts=drafts,
      ends=self.model.tokenizer.ends,
    )

  def accept(
    self,
    piece: Piece,
    label: str,
    drafts: int,
    target: forcing.Layers,
    *anchors: forcing.Layers,
  ) -> float | None:
    """Returns accepted / drafted of such rounds, which are kept under a label.

    Args:
      piece: the prompt.
      label: of a line in the figures.
      drafts: γ.
      target, *anchors: see `forcing.Oracle.accept`.
    """
    oracle = self.oracle(piece, drafts)
    (rounds,), (tokens,) = oracle.accept(target, *anchors)
    self.rounds.append(
      {
        'prompt': piece.name,
        'label': label,
        'draft_tokens': drafts,
        'rounds': rounds,
        'token_ids': tokens,
      }
    )
    return summaries.accepted_share(rounds) if rounds else None

  def reference(self, piece: Piece, scheme: str) -> list[int]:
    """Returns what a scheme has to emit."""
    return self.engines[scheme].reference(
      piece.tokens, self.settings.output_tokens, self.computed(piece)
    )

  def run(self, piece: Piece, scheme: str, **policy: Any) -> Result:
    """Runs the prompt over the link, with changes of the engine's policy."""
    engine = self.engines[scheme]
    kept = engine.config
    key = scheme, dataclasses.replace(kept, **policy)
    if key not in self._results:
      engine.config = key[1]  # no policy is compiled in
      engine.spoil_cache()  # it may hold all of this prompt
      self._results[key] = engine.generate(
        Request(
          prompt=piece.tokens,
          output_tokens=self.settings.output_tokens,
          mode=self.settings.modes[0],
        )
      )
      engine.config = kept
    return self._results[key]


Figures = dict[str, float | None]


def outputs(bench: Bench, piece: Piece) -> Figures:
  """Compares committed tokens; sizes and costs of the exact plane."""
  lynx, exact = bench.run(piece, 'lynx'), bench.run(piece, 'lynx_exact')
  wire = bench.engines['lynx_exact'].wire
  size = wire.stream_bytes(exact.prompt_tokens).total
  bits = wire.bits_a_value(exact.prompt_tokens).total
  times = exact.timeline
  return {
    'equal_to_reference_int8': lynx.tokens == bench.reference(piece, 'lynx'),
    'equal_to_bf16_exact': exact.tokens == bench.reference(piece, 'bf16'),
    'bits_total_exact': bits * (1 + exact.exact_bytes / size),
    'bits_bf16_codebook': lossless.bits_of(bench.computed(piece)),
    'encode_exact_over_prefill': (
      times.seconds(Phase.ENCODE) / times.seconds(Phase.PREFILL)
    ),
    'retracted': lynx.retracted,
    'retracted_exact': exact.retracted,
  }


def layer_ready(bench: Bench, piece: Piece) -> Figures:
  """Times last byte to first commit, group by group over wait for all."""
  early, late = (
    bench.run(piece, 'lynx', layer_ready=ready) for ready in (True, False)
  )
  early_s, late_s = _commit_lag_s(early), _commit_lag_s(late)
  ratio = None if early_s is None or not late_s else early_s / late_s
  return {
    'last_byte_to_commit_layer_ready_over_wait_all': ratio,
    'layer_ready_floor': _floor(bench),
  }


def drafts(bench: Bench, piece: Piece) -> Figures:
  """Forms KL of drafts and acceptance at fixed γ, as the codec search does."""
  texts, oracle = bench.texts(piece), bench.oracle(piece, _DRAFTS[0])
  oracle.continue_exactly()
  exact = dataclasses.replace(bench.schemes['lynx_exact'].codec, exact=False)
  bf16, _ = forcing.read_both(texts, forcing.DENSE)
  both = forcing.read_both(texts, bench.schemes['lynx'].codec)
  _, unrotated = forcing.read_both(texts, exact)
  (kl,), _ = oracle.compare(*both)
  (kl_exact,), _ = oracle.compare(bf16, unrotated)
  bits = bench.engines['lynx'].wire.bits_a_value(len(piece.tokens))
  return {
    'kl_anchor': kl,
    'kl_anchor_exact': kl_exact,
    'bits_anchor': bits.anchor,
    **{
      f'acceptance_gamma{count}': bench.accept(
        piece, f'γ = {count}', count, *both
      )
      for count in _DRAFTS
    },
  }


def sharpened(bench: Bench, piece: Piece) -> Figures:
  """Forms what rounds of 15 drafts gain if the Residual lands meanwhile.

  It lands layer by layer: draft i reads i of 15 parts of it. The same Anchor,
  target and text as without it, and no clock. Then again with an Anchor of 2
  bits, which errs often enough for the difference to show.
  """
  codec = bench.schemes['lynx'].codec
  found: Figures = {}
  for suffix, planes in (('', codec.k.planes), ('_2bit', (2, 2, 4))):
    target, anchor = forcing.read_both(
      bench.texts(piece), schemes.with_planes(codec, planes)
    )
    landing = forcing.landing(target, anchor, drafts=_SHARPENED)
    name = f'{planes[0]} bits'
    alone, sharp = (
      bench.accept(piece, f'{name}, {reads}', _SHARPENED, target, *anchors)
      for reads, anchors in (
        ('Anchor alone', [anchor]),
        ('Residual landing', landing),
      )
    )
    gain = None if alone is None or sharp is None else sharp - alone
    found[f'acceptance_gain_from_upgrade{suffix}'] = gain
  return found


def after_arrival(bench: Bench, piece: Piece) -> Figures:
  """Times decoding with and without drafts, both in the verify program."""
  drafts_s, plain_s = (
    sampling_study.after_first_s(bench.run(piece, 'lynx', draft_tokens=count))
    for count in (None, 0)
  )
  speedup = plain_s / drafts_s if drafts_s and plain_s else None
  return {'self_speculation_speedup': speedup}


def sampled(bench: Bench, piece: Piece) -> Figures:
  """Compares the committed tokens of a request that samples."""
  engine, tokens = bench.engines['lynx'], bench.settings.output_tokens
  how = Sampling(temperature=1.0, seed=zlib.crc32(piece.name.encode()))
  engine.spoil_cache()  # as above
  result = engine.generate(
    Request(prompt=piece.tokens, output_tokens=tokens, sampling=how)
  )
  wanted = engine.reference(piece.tokens, tokens, sampling=how)
  return {'equal_to_reference_sampled': result.tokens == wanted}


def drawn(bench: Bench, piece: Piece) -> Figures:
  """Draws from what follows the first prompt; see `sampling_study`."""
  if piece.number:
    return {}
  texts = bench.texts(piece)
  kv = forcing.read_both(texts, bench.schemes['lynx'].codec)
  oracle = bench.oracle(piece, _DRAFTS[0])
  ((logits, _),) = oracle.logits(texts.token[:, None], *kv)
  return {
    record['name']: record['value']
    for record in sampling_study.total_variation(logits[0, 0])
  }


# What is measured of each prompt; every name becomes a summary, a mean.
MEASUREMENTS: tuple[Callable[[Bench, Piece], Figures], ...] = (
  outputs,
  after_arrival,
  sampled,
  layer_ready,
  drafts,
  sharpened,
  drawn,
)
_UNITS = {
  'bits_total_exact': 'bits',
  'bits_bf16_codebook': 'bits',
  'bits_anchor': 'bits',
  'kl_anchor': 'nats',
  'kl_anchor_exact': 'nats',
}


def draw(records: Sequence[Mapping[str, Any]]) -> list[Any]:
  """Returns the drawings of the report; see `figures.equivalence`."""
  from experiments import drawing
  from experiments.figures import equivalence

  with drawing.look():
    return [*equivalence.draw(records)]


def run(
  settings: config.Settings, writer: results.Writer, screen: display.Screen
) -> None:
  """Measures every prompt that has no record yet, and writes summaries.

  Raises:
    ConfigError: prompts, model and codec do not fit together.
  """
  with screen.step(f'loading {settings.model_path}'):
    model = serving.load(
      settings.model_path,
      settings.model_dtype,
      settings.sides,
      rows=settings.decode_data,
    )
  study = settings.equivalence
  pieces = [*_pieces(settings, model.tokenizer)]
  version = _version(settings)
  found = {
    name: figures
    for name, figures in _known(writer, version)
    if name in {piece.name for piece in pieces}
  }
  missing = [piece for piece in pieces if piece.name not in found]
  missing = missing[: study.at_once or len(missing)]
  settings = dataclasses.replace(
    settings,
    engine=dataclasses.replace(
      settings.engine, prompt_tokens=max(len(p.tokens) for p in pieces)
    ),
  )
  with ExitStack() as stack:
    if missing:
      with screen.step('warming up'):
        bench = Bench(settings, model, stack)
    for piece in missing:
      with screen.step(f'{piece.name}, {len(piece.tokens)} tokens'):
        found[piece.name] = measure(bench, piece)
      writer.write(
        results.equivalence_record(
          piece.name,
          version=version,
          prompt_tokens=len(piece.tokens),
          figures=found[piece.name],
          rounds=bench.rounds,
        )
      )
  for record in figures_of(list(found.values())):
    writer.write(record)
    screen.note(
      f'{record["name"]}: {record["value"]} '
      f'({record["low"]} to {record["high"]}, {record["n"]} prompts)'
    )
  if left := len(pieces) - len(found):
    screen.note(f'{left} prompts are left: run the same command again')


def measure(bench: Bench, piece: Piece) -> Figures:
  """Returns all figures of a prompt, measured in random order."""
  bench.take(piece)
  order = random.Random(piece.name).sample(MEASUREMENTS, len(MEASUREMENTS))
  found = {part: part(bench, piece) for part in order}
  return dict(itertools.chain(*(found[m].items() for m in MEASUREMENTS)))


def figures_of(found: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
  """Yields the summary of every figure: a mean over prompts, 90 % interval."""
  for name in dict.fromkeys(itertools.chain(*found)):
    values = [figures[name] for figures in found if name in figures]
    values = [float(value) for value in values if value is not None]
    yield summaries.mean(name, values, _UNITS.get(name, ''))


def _pieces(
  settings: config.Settings, tokenizer: serving.Text
) -> Iterator[Piece]:
  """Yields parts of the texts in turn, from random places, of random lengths.

  A place in the middle of a text makes another prompt of it. The draws depend
  on the seed alone.
  """
  rng = random.Random(settings.seed)
  texts = {
    file: tokenizer.encode(prompts.read(file)) for file, _ in settings.prompts
  }
  most = dict(settings.prompts)
  for number in range(settings.equivalence.prompts):
    file = [*texts][number % len(texts)]
    ids = texts[file]
    longest = min(most[file], len(ids))
    count = rng.randint(min(settings.equivalence.shortest, longest), longest)
    start = rng.randint(0, len(ids) - count)
    yield Piece(
      number,
      f'{file}:{start}:{start + count}',
      tuple(ids[start : start + count]),
    )


def _known(
  writer: results.Writer, version: str
) -> Iterator[tuple[str, Figures]]:
  for record in results.read(writer.path):
    if record.get('name') == results.EQUIVALENCE:
      detail = record['detail']
      if detail['version'] == version:
        yield record['request'], detail['figures']


def _version(settings: config.Settings) -> str:
  """Returns a hash of all settings that a figure may depend on."""
  study = dataclasses.replace(settings.equivalence, at_once=0)
  same = dataclasses.replace(settings, equivalence=study)
  return hashlib.sha256(repr(same).encode()).hexdigest()[:16]


def _commit_lag_s(result: Result) -> float | None:
  """Returns from the last byte to the first commit after token 1."""
  if result.committed_s is None or result.residual_s is None:
    return None
  return result.committed_s - result.residual_s


def _floor(bench: Bench) -> float:
  """Returns the share of a pass that is left when the last group has landed.

  By bytes of weights that are read: the last layer group and the head.
  """
  engine = bench.engines['lynx']
  _, params = cached.split(bench.model.decode)
  layers, last = engine.model_config.layers, engine.wire.layer_counts[-1]

  def size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))

  layer = size(cached.layer_params(params, 0, 1))
  head = engine.model_config.vocab * engine.model_config.model_dim
  return (last * layer + head) / (layers * layer + head)
