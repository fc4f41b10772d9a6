# SPDX-License-Identifier: Apache-2.0
"""The fidelity study: how far each scheme's output is from that of bf16.

It knows no link and no engine, and no plot. Prompts are prefilled once, side by
side; then every reading of them (see `readings`) goes through the same program.
Every prompt is written when it is done: a run that was ended goes on where it
stopped.

| part | what is measured of each prompt and reading |
|---|---|
| `forced` | on the prompt's own next tokens: KL from bf16, agreement, NLL |
| `free` | generated tokens before the first that differs from bf16's |
| `acceptance` | drafts on the Anchor that the target accepts, by position |
| `tasks` | synthetic tasks: is the answer right, and is it that of bf16 |
| `longbench`, `ruler` | the published metrics on the published files |
"""

import dataclasses
import hashlib
import itertools
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments import (
  config,
  display,
  fidelity_report,
  forcing,
  latency,
  prompts,
  questions,
  readings,
  results,
  serving,
  summaries,
  synthetic,
)
from experiments.peers import comparison, exchange, over_link, processes
from experiments.questions import Question
from experiments.readings import ANCHOR, REFERENCE, Reading
from experiments.study_settings import Fidelity
from lynx_jax import sampling
from lynx_jax.config import CodecConfig, check_together, require
from lynx_jax.models import weights
from lynx_jax.prefill import Prefill
from lynx_jax.programs import fetch, program
from lynx_jax.shapes import Array, Bool, Float32, Int32

Record = dict[str, Any]

_OF_TEXTS = ('forced', 'free', 'acceptance')  # parts on the shipped prompts
_SMALL = 1e9  # parameters
_ROOM = 64  # tokens

# What a report asks of a study; see `studies`.
draw, tables = fidelity_report.draw, fidelity_report.tables
notes = fidelity_report.notes


def run(
  settings: config.Settings, writer: results.Writer, screen: display.Screen
) -> None:
  """Measures what has no record yet, and writes summaries.

  Raises:
    ConfigError: prompts, model, schemes and files do not fit together.
  """
  study = settings.fidelity
  require(
    settings.sides == (1, 1),
    f'prefill_mesh={settings.prefill_mesh}, '
    f'decode_mesh={settings.decode_mesh} and '
    f'decode_data={settings.decode_data} must be 1 in a fidelity study',
  )
  require(
    settings.acceptance_tokens > 1 or 'acceptance' not in study.parts,
    f'acceptance.output_tokens={settings.acceptance_tokens} must be 2 or more',
  )
  require(
    'forced' in study.parts or not study.caches,
    f'fidelity.peers has {", ".join(study.caches)}: fidelity.parts must have '
    "'forced'",
  )
  readings.names(settings.schemes)  # a mistake shows before anything runs
  gguf = _gguf(settings) if study.caches else ''
  asked = {
    part: [*source(study)]
    for part, source in _FILES.items()
    if part in study.parts
  }
  with screen.step(f'loading {settings.model_path}'):
    model = serving.load(
      settings.model_path,
      settings.model_dtype,
      tokenizer_path=settings.model_tokenizer,
    )
  for scheme in settings.schemes:
    check_together(model.config, scheme.codec, settings.engine)
  if 'tasks' in study.parts:
    asked['tasks'] = [
      *synthetic.grid(
        study.tasks,
        study.lengths,
        study.depths,
        study.samples,
        encode=model.tokenizer.encode,
        seed=settings.seed,
      )
    ]
  bench = _Bench(settings, model, writer, screen)
  if chosen := set(_OF_TEXTS) & set(study.parts):
    _measure_texts(bench, chosen)
  if study.caches:
    caches = _measure_caches(bench, gguf)
  for part in ('tasks', *fidelity_report.BENCHMARKS):
    if part in asked:
      _ask(bench, part, asked[part])
  records = list(bench.records.values())
  for record in fidelity_report.figures_of(records, settings.acceptance_drafts):
    writer.write(record)
  if study.peers:
    said = [*comparison.ttft(records, _send(bench, records))]
    if study.caches:
      versions = bench.peer_versions | caches.versions
      said.append(results.peers_record(caches.not_run, versions))
    for line in said:
      writer.write(line)
    for title, header, rows in comparison.tables([*records, *said]):
      # Who is beaten by whom is told in lines below.
      screen.grid(title, header[:-1], [row[:-1] for row in rows])
    for words in (*comparison.verdicts(records), *comparison.notes(said)):
      screen.note(words)
  screen.note(bench.limits)
  screen.note(f'records: {writer.path}')


_FILES: dict[str, Callable[[Fidelity], Iterator[Question]]] = {
  'longbench': lambda study: questions.longbench(
    study.longbench, study.longbench_config, study.most_lines
  ),
  'ruler': lambda study: questions.ruler(study.ruler, study.most_lines),
}


@dataclasses.dataclass(frozen=True)
class _Prompt:
  """Token ids under a name, with what only one part knows of them."""

  name: str
  ids: tuple[int, ...]
  question: Question | None = None
  following: tuple[int, ...] = ()  # the text's own next tokens

  @property
  def digest(self) -> str:
    """Names the contents: a file may change between two runs."""
    ids = np.asarray(self.ids + self.following, '<i4')
    return hashlib.sha256(ids.tobytes()).hexdigest()[:16]


class _Bench:
  """The model, prefill, and the records of a run.

  Attributes:
    names: of all readings.
    records: those that count, by request and prompt; of parts that were not
      chosen all that earlier runs have made.
    limits: what the figures can and cannot show.
    peer_versions: of packages that ran, by name.
  """

  def __init__(self, settings, model, writer, screen):
    self.settings, self.model = settings, model
    self.screen, self._writer = screen, writer
    self.names = readings.names(settings.schemes, settings.fidelity.formulas)
    self.limits = _limits(model, settings)
    dims = model.config
    self._values_a_token = 2 * dims.layers * dims.kv_heads * dims.head_dim
    self._version = _version(settings)
    self._environment = results.environment()
    earlier = [*results.read(writer.path)]
    self._known = {
      (r['request'], r['fidelity']['digest']): r
      for r in earlier
      if (r.get('fidelity') or {}).get('version') == self._version
    }
    self.peer_versions: dict[str, str] = {}
    for record in earlier:
      if record.get('name') == results.PEERS:
        self.peer_versions |= record['detail']['versions']
    self.records = {
      key: record
      for key, record in self._known.items()
      if record['fidelity']['part'] not in settings.fidelity.parts
    }
    writer.write(results.fidelity_record(self._version, self.limits))

  def missing(
    self, part: str, found: Sequence[_Prompt], names: Iterable[str]
  ) -> list[_Prompt]:
    """Returns prompts that lack a record; takes the records of the others."""
    missing = []
    for prompt in found:
      keys = [(f'{part}/{prompt.name}/{n}', prompt.digest) for n in names]
      if all(key in self._known for key in keys):
        self.records |= {key: self._known[key] for key in keys}
      else:
        missing.append(prompt)
    return missing

  def keeps(self, part: str, batch: Sequence[_Prompt], reading: str) -> bool:
    """Takes the records of a batch if all are there, and says so.

    Those of bf16 are measured again: the others are compared with it.
    """
    keys = [(f'{part}/{p.name}/{reading}', p.digest) for p in batch]
    if reading == REFERENCE or not all(key in self._known for key in keys):
      return False
    self.records |= {key: self._known[key] for key in keys}
    return True

  def prefill(self, batch: Sequence[_Prompt]) -> forcing.Texts:
    """Prefills prompts that shall lie side by side.

    The last one stands in for those that a full batch has more, so that all
    batches of one length share their programs.
    """
    engine = dataclasses.replace(
      self.settings.engine, prompt_tokens=self.capacity(batch[0])
    )
    prefill = Prefill(self.model.prefill, CodecConfig(), engine)
    states = []
    for prompt in batch:
      *_, state = prefill.chunks(np.asarray(prompt.ids, np.int32))
      states.append(state)
    states += states[-1:] * (self.settings.fidelity.slots - len(batch))
    return forcing.Texts.gather(
      self.model.config, [p.name for p in batch], states
    )

  def capacity(self, prompt: _Prompt) -> int:
    """Returns the tokens of a prompt in whole token chunks."""
    chunk = self.settings.engine.token_chunk
    return math.ceil(len(prompt.ids) / chunk) * chunk

  def batches(self, found: Sequence[_Prompt]) -> Iterator[list[_Prompt]]:
    """Yields prompts of one capacity, and of similar answers, together."""

    def order(prompt: _Prompt) -> tuple[int, int]:
      asked = prompt.question
      return self.capacity(prompt), asked.most_tokens if asked else 0

    slots = self.settings.fidelity.slots
    ordered = sorted(found, key=order)
    for _, alike in itertools.groupby(ordered, self.capacity):
      rest = list(alike)
      while rest:
        yield rest[:slots]
        del rest[:slots]

  def oracle(self, texts: forcing.Texts, tokens: int, drafts: int = 1):
    """Returns what decodes up to so many tokens.

    There is room for some more, so that few programs are compiled.
    """
    return forcing.Oracle(
      self.model.decode,
      texts,
      tokens=math.ceil(tokens / _ROOM) * _ROOM,
      drafts=drafts,
      ends=self.model.tokenizer.ends,
    )

  def readings(self, texts: forcing.Texts) -> Iterator[Reading]:
    """Yields every reading of the prompts."""
    for reading in readings.readings(
      texts,
      self.settings.schemes,
      self.settings.engine,
      self.settings.fidelity.formulas,
    ):
      with self.screen.step(f'  {reading.name}'):
        yield reading

  def cut(self, row: np.ndarray, most: int) -> list[int]:
    """Returns tokens up to the end token, with it."""
    ids = row[:most].tolist()
    ends = (i for i, id_ in enumerate(ids, 1) if id_ in self._ends)
    return ids[: next(ends, len(ids))]

  @property
  def _ends(self) -> frozenset[int]:
    return self.model.tokenizer.ends

  def write(
    self,
    part: str,
    prompt: _Prompt,
    reading: Reading,
    slot: int,
    figures: Mapping[str, float | None],
    *,
    tokens: Sequence[int] | None = None,
    **more: Any,
  ) -> None:
    """Writes what was found of a prompt and a reading."""
    asked, bits = prompt.question, reading.bits[slot]
    anchor = reading.name.endswith(ANCHOR)
    record = results.request_record(
      study=self.settings.study,
      request=f'{part}/{prompt.name}/{reading.name}',
      prompt=prompt.name,
      scheme=reading.name,
      target=reading.target,
      model=self.model.config.name,
      prompt_tokens=len(prompt.ids),
      output_tokens=None if tokens is None else len(tokens),
      token_ids=tokens,
      text=None if tokens is None else self.model.tokenizer.decode(tokens),
      bits_anchor=bits if anchor else None,
      bits_total=None if anchor else bits,
      seed=self.settings.seed,
      fidelity={
        'part': part,
        'version': self._version,
        'digest': prompt.digest,
        'task': asked.task if asked else None,
        'length': asked.length if asked else None,
        'depth': asked.depth if asked else None,
        'bits': bits,
        'wire_bytes': bits * len(prompt.ids) * self._values_a_token / 8,
        'cache_equal_to': reading.same_as,
        'figures': figures,
      },
      **self._environment,
      **more,
    )
    self._writer.write(record)
    self.records[record['request'], prompt.digest] = record


# --- Shipped prompts ----------------------------------------------------------


def _measure_texts(bench: _Bench, chosen: set[str]) -> None:
  """Measures the parts on the shipped prompts, on one prefill of each."""
  settings = bench.settings
  found = [*_texts(settings, bench.model.tokenizer)]
  pairs = [n for n in bench.names if n + ANCHOR in bench.names]
  missing = {
    part: bench.missing(
      part, found, pairs if part == 'acceptance' else bench.names
    )
    for part in _OF_TEXTS
    if part in chosen
  }
  needed = [p for p in found if any(p in of for of in missing.values())]
  for batch in bench.batches(needed):
    parts = {
      part
      for part, of in missing.items()
      if any(prompt in of for prompt in batch)
    }
    title = ', '.join(prompt.name for prompt in batch)
    with bench.screen.step(f'prefilling {title}'):
      measured = _Batch(bench, batch)
    for reading in bench.readings(measured.texts):
      for part in _OF_TEXTS:
        if part in parts and not bench.keeps(part, batch, reading.name):
          getattr(measured, part)(reading)


class _Batch:
  """Some prompts side by side, and what the readings so far have yielded."""

  def __init__(self, bench: _Bench, batch: Sequence[_Prompt]):
    self._bench, self._batch = bench, batch
    settings, study = bench.settings, bench.settings.fidelity
    self._settings, self._study = settings, study
    self.texts = bench.prefill(batch)
    self._oracle = bench.oracle(
      self.texts,
      max(study.forced_tokens, study.free_tokens, settings.acceptance_tokens),
      settings.acceptance_drafts,
    )
    following = [prompt.following for prompt in batch]
    following += following[-1:] * (study.slots - len(batch))
    self._following = np.array(following, np.int32)
    self._compare = program(_compare, name='compare')
    self._logits: list[Float32[Array, 'B T V']] = []  # of bf16, by block
    self._found: dict[str, dict[str, np.ndarray]] = {}
    self._text: dict[str, np.ndarray] = {}
    self._anchor: Reading | None = None

  def forced(self, reading: Reading) -> None:
    """Compares distributions on the text's own next tokens."""
    found = self._found.get(reading.same_as or '')
    if found is None:
      found = self._force(reading)
    self._found[reading.name] = found
    reference = self._found[REFERENCE]
    for slot, prompt in enumerate(self._batch):
      figures = {name: float(x[slot].mean()) for name, x in found.items()}
      more = figures['nll'] - float(reference['nll'][slot].mean())
      self._bench.write(
        'forced', prompt, reading, slot, figures | {'nll_over_bf16': more}
      )

  def _force(self, reading: Reading) -> dict[str, np.ndarray]:
    blocks, at = [], 1
    logits = self._oracle.force(self._following[:, :-1], reading.kv)
    for i, own in enumerate(logits):
      if reading.name == REFERENCE:
        self._logits.append(own)
      following = self._following[:, at : at + own.shape[1]]
      at += own.shape[1]
      blocks.append(fetch(self._compare(self._logits[i], own, following)))
    return {
      name: np.concatenate([block[name] for block in blocks], axis=1)
      for name in blocks[0]
    }

  def free(self, reading: Reading) -> None:
    """Decodes until every text has left bf16's, or to the last token."""
    most = self._study.free_tokens
    rows = self._text.get(reading.same_as or '')
    if rows is None and reading.name == REFERENCE:
      rows = self._oracle.decode(reading.kv, most)
    elif rows is None:
      rows = self._oracle.decode(reading.kv, most, self._has_left)
    self._text[reading.name] = rows
    for slot, prompt in enumerate(self._batch):
      own, reference = (
        self._bench.cut(text[slot], most)
        for text in (rows, self._text[REFERENCE])
      )
      self._bench.write(
        'free',
        prompt,
        reading,
        slot,
        # Token 1 comes from prefill and is the same for all.
        {'exact_match_tokens': _agreeing(own, reference) - 1},
        tokens=own,
        equal_to_bf16=own == reference,
      )

  def _has_left(self, rows: np.ndarray) -> bool:
    differ = rows != self._text[REFERENCE][:, : rows.shape[1]]
    return bool(differ[: len(self._batch)].any(axis=1).all())

  def acceptance(self, reading: Reading) -> None:
    """Decodes by rounds, with the Anchor that came before its target."""
    if reading.name.endswith(ANCHOR):
      self._anchor = reading
    elif self._anchor and self._anchor.name == reading.name + ANCHOR:
      rounds, outputs = self._oracle.accept(
        reading.kv,
        self._anchor.kv,
        tokens=self._settings.acceptance_tokens,
      )
      self._anchor = None
      for slot, prompt in enumerate(self._batch):
        own = rounds[slot]
        self._bench.write(
          'acceptance',
          prompt,
          reading,
          slot,
          {'acceptance': summaries.accepted_share(own) if own else None},
          tokens=outputs[slot],
          rounds=own,
          drafted=sum(drafted for drafted, _ in own),
          accepted=sum(accepted for _, accepted in own),
        )


def _texts(settings: config.Settings, tokenizer: serving.Text):
  """Yields every prompt, and the tokens that follow it in its own text.

  Raises:
    ConfigError: a text is too short.
  """
  forced = settings.fidelity.forced_tokens + 1
  for file, tokens in settings.prompts:
    ids = prompts.cut(
      tokenizer.encode(prompts.read(file)),
      tokens + forced,
      keeps_end=prompts.KEEPS_END.get(file, False),
    )
    require(
      len(ids) > forced,
      f'prompt_file={file!r} has {len(ids)} tokens; fidelity.forced_tokens='
      f'{forced - 1} must be at most {len(ids) - 2}',
    )
    yield _Prompt(file, tuple(ids[:-forced]), following=tuple(ids[-forced:]))


def _compare(
  target: Float32[Array, 'B T V'],
  own: Float32[Array, 'B T V'],
  following: Int32[Array, 'B T'],
) -> dict[str, Float32[Array, 'B T'] | Bool[Array, 'B T']]:
  """Returns KL(target ‖ own), agreement of the first, and NLL, by position."""
  p, q = jax.nn.log_softmax(target), jax.nn.log_softmax(own)
  picked = jnp.take_along_axis(q, following[..., None], axis=-1)[..., 0]
  return {
    'kl': jnp.sum(jnp.exp(p) * (p - q), axis=-1),
    'agreement': sampling.greedy(target) == sampling.greedy(own),
    'nll': -picked,
  }


def _agreeing(one: Sequence[int], other: Sequence[int]) -> int:
  """Returns how many tokens two outputs have in common from the start."""
  both = zip(one, other, strict=False)
  return next(
    (i for i, (a, b) in enumerate(both) if a != b), min(len(one), len(other))
  )


# --- Caches of others ---------------------------------------------------------


def _gguf(settings: config.Settings) -> str:
  """Returns the file that others can load as well.

  Raises:
    ConfigError: the model is none.
    WeightsError: the package with its file is not installed.
  """
  if settings.model_path == 'smollm2':
    return str(weights.find_packaged_gguf())
  file = pathlib.Path(settings.model_path)
  require(
    file.suffix == '.gguf' and file.is_file(),
    f'model.path={settings.model_path!r} must be a GGUF on this machine for '
    f'{", ".join(settings.fidelity.caches)}; or leave them out of '
    'fidelity.peers',
  )
  return str(file.absolute())


def _send(
  bench: _Bench, records: Sequence[Record]
) -> dict[str, comparison.Transfers]:
  """Sends the bytes of every reading over the link of a latency study.

  Without INT8, which sets its rate, nothing is sent.
  """
  found = _texts(bench.settings, bench.model.tokenizer)
  texts = {p.name: [*p.ids] for p in found}
  sizes = {prompt: comparison.wire_bytes(records, prompt) for prompt in texts}
  if not all('int8' in of for of in sizes.values()):
    return {}
  plan = latency.make_plan(bench.settings, bench.model, texts, bench.screen)
  measured = {}
  for case in plan.cases:
    with bench.screen.step(
      f'sending the bytes of every cache of {case.prompt}'
    ):
      measured[case.prompt] = comparison.Transfers(
        prefill_s=case.prefill_s,
        step_s=plan.int8_step_s,
        seconds=over_link.seconds(
          sizes[case.prompt],
          rate_gbps=case.rate_gbps,
          rtt_ms=case.rtt_ms,
          chunk_bytes=plan.engine.chunk_bytes,
        ),
      )
  return measured


def _measure_caches(bench: _Bench, gguf: str) -> exchange.Findings:
  """Lets others read the shipped prompts by their own code."""
  study = bench.settings.fidelity
  found = [*_texts(bench.settings, bench.model.tokenizer)]
  names = [n for n in study.caches if bench.missing('forced', found, [n])]
  title = ', '.join(names) or 'no peer anew'
  with bench.screen.step(f'running {title}'):
    findings = processes.run(
      study.peers_python,
      gguf,
      names,
      [exchange.Prompt(ids=[*p.ids], following=[*p.following]) for p in found],
    )
  for name, of in findings.found.items():
    for prompt, finding in zip(found, of, strict=True):
      figures = dict(finding.figures)
      if finding.coding_s is not None:
        figures[comparison.CODING] = finding.coding_s / finding.prefill_s
      reading = Reading(name, readings.PEER, (), (finding.bits,), None)
      bench.write(
        'forced',
        prompt,
        reading,
        0,
        figures,
        prefill_s=finding.prefill_s,
        split_s=finding.coding_s,
      )
  return findings


# --- Questions ----------------------------------------------------------------


def _ask(bench: _Bench, part: str, asked: Sequence[Question]) -> None:
  """Lets every reading answer questions."""
  limit = sys.maxsize  # synthetic prompts have the length that was asked for
  if part in fidelity_report.BENCHMARKS:
    limit = bench.settings.engine.prompt_tokens
  found = [_encoded(bench, question, limit) for question in asked]
  missing = bench.missing(part, found, bench.names)
  done = len(found) - len(missing)
  room = max(question.most_tokens for question in asked)
  for batch in bench.batches(missing):
    done += len(batch)
    length = max(len(prompt.ids) for prompt in batch)
    title = f'{part}, {done} of {len(found)}: {batch[0].name}, {length} tokens'
    with bench.screen.step(title):
      texts = bench.prefill(batch)
    _answer(bench, part, batch, texts, room)


def _encoded(bench: _Bench, question: Question, most: int) -> _Prompt:
  """Returns a question's tokens; the middle of a long one is left out.

  The benchmarks' own code cuts the text so, and asks a chat model by message.
  """
  tokenizer: Any = bench.model.tokenizer
  ids = tokenizer.encode(question.prompt)
  if not (question.chat and getattr(tokenizer, 'chat_template', None)):
    kept = itertools.chain(*_halves(ids, most))
    return _Prompt(question.name, tuple(kept), question)
  around = len(tokenizer.encode_chat([{'role': 'user', 'content': ''}]))
  require(
    most >= around + 2,
    f'prompt_tokens={most} must be at least {around + 2}: a message without a '
    f'text takes {around} in the chat template of the model',
  )
  text = ''.join(map(tokenizer.decode, _halves(ids, most - around)))
  ids = tokenizer.encode_chat([{'role': 'user', 'content': text}])
  return _Prompt(question.name, tuple(ids), question)


def _halves(ids: Sequence[int], most: int) -> tuple[Sequence[int], ...]:
  """Returns all, or the first and the last half of `most`."""
  half = most // 2
  return (ids,) if len(ids) <= most else (ids[:half], ids[-half:])


def _answer(bench: _Bench, part: str, batch, texts, room: int) -> None:
  asked = [prompt.question for prompt in batch]
  decode = bench.model.tokenizer.decode
  most = max(question.most_tokens for question in asked)
  oracle = bench.oracle(texts, room)

  def said(rows: np.ndarray) -> list[list[int]]:
    return [
      bench.cut(row, question.most_tokens)
      for row, question in zip(rows, asked, strict=False)
    ]

  def is_enough(rows: np.ndarray) -> bool:
    return all(
      len(ids) < rows.shape[1]
      or ids[-1] in bench.model.tokenizer.ends
      or len(ids) == question.most_tokens
      or question.is_answered(decode(ids))
      for ids, question in zip(said(rows), asked, strict=True)
    )

  outputs: dict[str, list[list[int]]] = {}
  for reading in bench.readings(texts):
    if bench.keeps(part, batch, reading.name):
      continue
    outputs[reading.name] = outputs.get(reading.same_as or '') or said(
      oracle.decode(reading.kv, most, is_enough)
    )
    for slot, prompt in enumerate(batch):
      question = asked[slot]
      own, reference = (
        outputs[name][slot] for name in (reading.name, REFERENCE)
      )
      text, wanted = decode(own), decode(reference)
      score = question.score(text)
      bench.write(
        part,
        prompt,
        reading,
        slot,
        {
          'match': score,
          'match_over_bf16': score - question.score(wanted),
          'same_answer': float(
            question.answer(text).strip() == question.answer(wanted).strip()
          ),
        },
        tokens=own,
      )


def _version(settings: config.Settings) -> str:
  """Returns a hash of what a figure may depend on; prompts have their own."""
  study = dataclasses.replace(
    settings.fidelity,
    parts=(),
    peers=(),
    peers_python='',
    tasks=(),
    lengths=(1,),
    depths=(0.0,),
    samples=1,
    longbench='',
    longbench_config='',
    ruler='',
    most_lines=0,
  )
  same = dataclasses.replace(settings, fidelity=study, prompts=(('', 1),))
  return hashlib.sha256(repr(same).encode()).hexdigest()[:16]


def _limits(model: serving.Model, settings: config.Settings) -> str:
  """Returns what a run on this model can and cannot show."""
  params = sum(x.size for x in jax.tree.leaves(nnx.state(model.decode)))
  size = f'{params / 1e6:,.0f} million parameters'
  can = (
    f'{model.config.name} has {size}. These figures show how far each scheme '
    'moves this model from its own output with bf16 KV, on these prompts; '
    'intervals are over prompts, not over models.'
  )
  if params >= _SMALL:
    return can
  return can + (
    ' A model so small answers few of the tasks whatever its KV cache holds: '
    'where bf16 fails, a scheme cannot lose, and what counts is whether the '
    'answers are those of bf16. Its greedy text repeats itself, which flatters '
    'acceptance and exact-match lengths. Nothing follows for the quality of '
    'larger models or for prompts longer than these.'
  )
