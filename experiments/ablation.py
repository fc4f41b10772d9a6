# SPDX-License-Identifier: Apache-2.0
"""The ablation: runs the cells that have no result yet, one after the other.

It knows no plot and decides no order. A cell is written when it is done: a run
that was ended goes on where it stopped.
"""

import collections
import contextlib
import dataclasses
import itertools
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments import (
  cell_rows,
  cells,
  display,
  forcing,
  prompts,
  results,
  serving,
)
from experiments.config import Cell, Settings
from experiments.schemes import Scheme
from lynx_jax import programs, timeline
from lynx_jax.config import (
  CodecConfig,
  EngineConfig,
  Order,
  require,
)
from lynx_jax.engine import Form, Request

# Starts the prefill process of a cell.
Start = Callable[[Cell], contextlib.AbstractContextManager[serving.Remote]]


def run(
  settings: Settings,
  writer: results.Writer,
  screen: display.Screen,
  start: Start | None = None,
) -> None:
  """Runs what is missing of this shard, and writes summaries of what there is.

  A cell that fails is recorded with its error, and the others go on; another
  run tries it again.

  Args:
    settings: with the cells.
    writer: of the records.
    screen: for what is worth telling.
    start: None measures all cells in this process.

  Raises:
    ConfigError: a prompt is no text.
    OSError: a prompt, or the records of a shard, cannot be read.
    CellsMissing: after all others were run.
  """
  study = settings.ablation
  require(
    study is not None, 'study=ablation has cells on the command line only'
  )
  assert study is not None
  study = (cells.between_processes if start else cells.in_one_process)(study)
  everything = cells.ordered(study.cells)
  for file, _ in {p for cell in everything for p in cell.settings.prompts}:
    prompts.read(file)
  mine = cells.part(everything, study.shard)
  known = cell_rows.finished(results.read(writer.path))
  if study.merge:
    mine = everything
    _merge(study.merge, {c.key for c in mine} - {*known}, writer, screen)
  else:
    ahead = {cell.key: cell for cell in mine if cell.key not in known}
    screen.note(f'{len(mine)} cells, of which {len(ahead)} are to be run')
    if not mine:
      i, n = study.shard
      screen.note(f'part {i} of {n} has none: there are {len(everything)}')
    _run([*ahead.values()], writer, screen, start)
  records = [*results.read(writer.path)]
  known, rows = (
    cell_rows.finished(records),
    cell_rows.form(records, everything),
  )
  missing = [cell for cell in mine if cell.key not in known]
  writer.write(
    results.rows_record(
      rows=rows,
      unfinished=cell_rows.unfinished(records, everything),
      heatmaps=study.heatmaps,
    )
  )
  for record in cell_rows.summaries(records, everything):
    writer.write(record)
  screen.grid('medians', *cell_rows.table(rows, cell_rows.BRIEF))
  if missing:
    raise cells.CellsMissing(
      f'{len(missing)} of {len(mine)} cells have no result, the first is '
      f'{missing[0].name}: '
      + (
        'run its shard, and merge again'
        if study.merge
        else f'{writer.path} says why; the same command tries again'
      )
    )


def draw(records: Sequence[Mapping[str, Any]]) -> list[Any]:
  """Returns the figures of a report; see `figures.draw_rows`."""
  from experiments import figures

  found = cell_rows.written(records)
  return figures.draw_rows(found['rows'], found['heatmaps'])


def tables(records: Sequence[Mapping[str, Any]]) -> list[Any]:
  """Returns caption, header and lines of every table of a report."""
  found = cell_rows.written(records)
  rows, unfinished = found['rows'], found['unfinished']
  shown: list[Any] = [
    ('Medians of every cell', *cell_rows.table(rows)),
    (
      'Every field that varies: medians over cells that differ in it alone',
      *cell_rows.effects(rows),
    ),
  ]
  if unfinished:
    shown.append(('Cells without a result', ('cell', 'why'), unfinished))
  return shown


def _run(
  missing: Sequence[Cell],
  writer: results.Writer,
  screen: display.Screen,
  start: Start | None,
) -> None:
  """Measures cells and writes each when it is done, or has failed."""
  ahead = [start is not None or new for new in cells.needs_engine(missing)]
  spent: list[tuple[bool, float]] = []
  with contextlib.closing(_Bench(missing, start)) as bench:
    for number, cell in enumerate(missing):
      left = left_s(spent, ahead[number:])
      clock = '' if left is None else f', about {_minutes(left)} left'
      start_s = time.monotonic()
      requests: list[dict[str, Any]] = []
      title = f'cell {number + 1} of {len(missing)}{clock}: {cell.name}'
      with screen.step(title):
        try:
          requests, detail = bench.measure(cell)
        except Exception as error:  # whatever it is, the others can run
          bench.drop()
          why = ' '.join(str(error).split())
          detail = {'rows': [], 'error': f'{type(error).__name__}: {why}'}
          screen.note(f'failed: {detail["error"]}')
      seconds = time.monotonic() - start_s
      spent.append((ahead[number], seconds))
      for record in requests:
        writer.write(record)
      writer.write(results.cell_record(cell.key, **detail, seconds=seconds))


def left_s(
  spent: Sequence[tuple[bool, float]], ahead: Iterable[bool]
) -> float | None:
  """Estimates the seconds of the cells ahead; None before the first is done.

  Args:
    spent: of every cell that is done, whether it made an engine, and seconds.
    ahead: of every other, whether it will.
  """
  if not spent:
    return None
  means = {
    kind: statistics.fmean(
      [s for made, s in spent if made is kind] or [s for _, s in spent]
    )
    for kind in (True, False)
  }
  return sum(means[kind] for kind in ahead)


def _minutes(seconds: float) -> str:
  return f'{seconds / 60:.0f} min' if seconds > 90 else f'{seconds:.0f} s'


def _merge(
  folders: Sequence[str],
  wanted: set[str],
  writer: results.Writer,
  screen: display.Screen,
) -> None:
  """Copies finished cells of other folders, with their requests."""
  paths = [pathlib.Path(folder) / results.FILE for folder in folders]
  absent = [str(path) for path in paths if not path.exists()]
  require(
    not absent, f'ablation.merge: {", ".join(absent)} not found; run its shard'
  )
  for folder, path in zip(folders, paths, strict=True):
    records = [*results.read(path)]
    requests = cell_rows.requests(records)
    found = cell_rows.finished(records)
    taken = [key for key in found if key in wanted]
    for key in taken:
      for record in requests[key]:
        writer.write(dict(record))
      writer.write(results.cell_record(key, **found[key]))
    wanted -= {*taken}
    screen.note(f'{folder}: {len(taken)} cells')


class _Bench:
  """The model, engines, references and oracles that cells share.

  Args:
    ahead: the cells that will be measured, in their order; an engine is closed
      after the last that needs it.
    start: gives every cell a prefill process of its own, and so engines.
  """

  def __init__(self, ahead: Sequence[Cell], start: Start | None = None):
    self._start = start
    self._needed = collections.Counter(
      itertools.chain.from_iterable(
        {*cells.engine_keys(cell.settings)} for cell in ahead
      )
    )
    self._environment = results.environment()
    self._loaded: tuple[Any, serving.Model] | None = None
    self._lines: dict[Any, tuple[serving.Line, contextlib.ExitStack]] = {}
    # Of the loaded model alone.
    self._known: dict[Any, Any] = {}

  def close(self) -> None:
    """Closes all engines."""
    for _, stack in self._lines.values():
      stack.close()
    self._lines.clear()

  def drop(self) -> None:
    """Closes all engines, and forgets what was computed, after a failure."""
    self.close()
    self._known.clear()

  def measure(self, cell: Cell) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the requests of a cell, and the detail of its record."""
    if self._start is None:
      return self._measure(cell, None)
    with self._start(cell) as remote:
      try:
        return self._measure(cell, remote)
      finally:
        self.drop()  # what is known was computed over there

  def _measure(
    self, cell: Cell, remote: serving.Remote | None
  ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    settings = cell.settings
    keys = cells.engine_keys(settings)
    self._needed.subtract({*keys})
    made = len({*keys} - {*self._lines})
    sides = settings.sides if remote is None else settings.sides[1:]
    model = self._load(settings, sides)
    work = _Work(cell, model)
    for scheme, key in zip(settings.schemes, keys, strict=True):
      line = self._line(model, scheme, key, work, remote)
      work.lines[scheme.name] = line
      # Only now: no policy is compiled in.
      line.engine.config = dataclasses.replace(
        scheme.engine(settings.engine), prompt_tokens=key[-1].prompt_tokens
      )
      if scheme.is_speculative:
        work.references[scheme.name] = self._references(scheme, key[-1], work)
      if settings.acceptance_tokens:
        oracle = self._oracle(key[-1], work)
        work.divergences[scheme.name] = oracle.measure(scheme.codec)
    with programs.counting() as counts:
      requests = work.run(self._environment)
    for key in [key for key in self._lines if not self._needed[key]]:
      self._lines.pop(key)[1].close()
    return requests, {
      'rows': cell_rows.measured(requests, work.divergences),
      'recompiles': counts.compiles,
      'engines': made,
    }

  def _load(self, settings: Settings, sides: tuple[int, ...]) -> serving.Model:
    key = cells.model_key(settings)
    if self._loaded is None or self._loaded[0] != key:
      self.drop()
      self._loaded = None  # its memory first
      self._loaded = (
        key,
        serving.load(
          settings.model_path,
          settings.model_dtype,
          sides,
          settings.model_tokenizer,
          rows=settings.decode_data,
        ),
      )
    return self._loaded[1]

  def _line(
    self,
    model: serving.Model,
    scheme: Scheme,
    key: Any,
    work: '_Work',
    remote: serving.Remote | None,
  ) -> serving.Line:
    link = work.settings.link
    assert link.rate_gbps is not None
    if key not in self._lines:
      with contextlib.ExitStack() as stack:
        line = stack.enter_context(
          serving.connect(
            model,
            scheme,
            key[-1],
            rate_gbps=link.rate_gbps,
            rtt_ms=link.rtt_ms,
            jitter_ms=link.jitter_ms,
            remote=remote,
            emulated=link.emulated,
          )
        )
        line.engine.warm_up()
        self._lines[key] = line, stack.pop_all()
    line, _ = self._lines[key]
    line.tune(link.rate_gbps, link.rtt_ms)
    return line

  def _computed(self, engine: EngineConfig, work: '_Work', file: str) -> Any:
    """Returns what prefill computes of a prompt, which no codec changes."""
    shapes = engine.token_chunk, engine.prompt_tokens, engine.layer_groups
    sampling = work.settings.sampling
    key = 'computed', shapes, engine.implementation, work.texts[file], sampling
    if key not in self._known:
      line = next(iter(work.lines.values()))
      self._known[key] = line.engine.compute(work.texts[file], sampling)
    return self._known[key]

  def _references(
    self, scheme: Scheme, engine: EngineConfig, work: '_Work'
  ) -> dict[str, list[int]]:
    """Returns the reference output of every prompt."""
    same = dataclasses.replace(
      engine, chunk_bytes=1, order=Order.ANCHOR_FIRST
    )  # neither reaches the cache
    sampling, tokens = work.settings.sampling, work.settings.output_tokens
    found = {}
    for file, text in work.texts.items():
      key = 'reference', scheme.codec, same, text, tokens, sampling
      if key not in self._known:
        self._known[key] = work.lines[scheme.name].engine.reference(
          text, tokens, self._computed(engine, work, file), sampling=sampling
        )
      found[file] = self._known[key]
    return found

  def _oracle(self, engine: EngineConfig, work: '_Work') -> '_Oracle':
    tokens = work.settings.acceptance_tokens
    key = 'oracle', tuple(work.texts.values()), tokens, engine.prompt_tokens
    if key not in self._known:
      texts = forcing.Texts.gather(
        work.model.config,
        [*work.texts],
        [self._computed(engine, work, file) for file in work.texts],
      )
      self._known[key] = _Oracle(work.model, texts, tokens)
    return self._known[key]


class _Oracle:
  """Forms KL by teacher forcing on bfloat16's own text; see `forcing`."""

  def __init__(self, model: serving.Model, texts: forcing.Texts, tokens: int):
    self._texts = texts
    self._oracle = forcing.Oracle(
      model.decode,
      texts,
      tokens=tokens,
      drafts=1,
      ends=model.tokenizer.ends,
    )
    self._oracle.continue_exactly()
    self._bf16, _ = forcing.read_both(texts, forcing.DENSE)
    self._known: dict[CodecConfig, dict[str, dict[str, float]]] = {}

  def measure(self, codec: CodecConfig) -> dict[str, dict[str, float]]:
    """Returns figures of every prompt, by name.

    The target `exact` is bfloat16 itself; so is that of a codec without planes.
    """
    if codec not in self._known:
      target, anchor = forcing.read_both(self._texts, codec)
      if codec.exact:
        target = self._bf16
      pairs = {
        'kl_anchor': (target, anchor),
        'kl_anchor_from_bf16': (self._bf16, anchor),
        'kl_target_from_bf16': (self._bf16, target),
      }
      figures = {
        name: self._oracle.compare(*pair)[0] for name, pair in pairs.items()
      }
      self._known[codec] = {
        prompt: {name: values[i] for name, values in figures.items()}
        for i, prompt in enumerate(self._texts.names)
      }
    return self._known[codec]


class _Work:
  """One cell on its engines.

  Attributes:
    settings: of the cell.
    model: where it runs.
    texts: token ids of its prompts.
    lines: an engine and its link a scheme, by name.
    references: by speculative scheme and prompt.
    divergences: figures of KL by scheme and prompt, where they are measured.
  """

  def __init__(self, cell: Cell, model: serving.Model):
    self._key, self.settings, self.model = cell.key, cell.settings, model
    self.texts = {
      file: tuple(
        prompts.cut(
          model.tokenizer.encode(prompts.read(file)),
          tokens,
          keeps_end=prompts.KEEPS_END.get(file, False),
        )
      )
      for file, tokens in self.settings.prompts
    }
    self.lines: dict[str, serving.Line] = {}
    self.references: dict[str, dict[str, list[int]]] = {}
    self.divergences: dict[str, dict[str, dict[str, float]]] = {}

  def run(self, environment: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Runs all schemes, modes and repeats in random order; returns records.

    Baselines decode in plain form, which shows their TTFT at its best.
    """
    settings = self.settings
    order = random.Random(settings.seed)
    records = []
    for file, repeat in itertools.product(self.texts, range(settings.repeats)):
      runs = [*itertools.product(settings.schemes, settings.modes)]
      for scheme, mode in order.sample(runs, len(runs)):
        records.append(self._request(file, repeat, scheme, mode, environment))
    return records

  def _request(self, file, repeat, scheme, mode, environment):
    settings, engine = self.settings, self.lines[scheme.name].engine
    form = Form.VERIFY if scheme.is_speculative else Form.PLAIN
    engine.spoil_cache()  # it may hold all of this prompt
    result = engine.generate(
      Request(
        prompt=self.texts[file],
        output_tokens=settings.output_tokens,
        form=form,
        mode=mode,
        sampling=settings.sampling,
      )
    )
    return serving.record(
      engine,
      result,
      form=form,
      text=self.model.tokenizer.decode(result.tokens),
      reference=self.references.get(scheme.name, {}).get(file, []),
      bf16=None,
      share=self._share(result),
      request=f'{self._key}/{file}/{repeat}/{scheme.name}/{mode.value}',
      repeat=repeat,
      prompt=file,
      study=cells.STUDY,
      scheme=scheme.name,
      target=scheme.target,
      mode=mode.value,
      link_gbps=settings.link.rate_gbps,
      rtt_ms=settings.link.rtt_ms,
      seed=settings.seed,
      sampling=dataclasses.asdict(settings.sampling),
      **environment,
    )

  def _share(self, result) -> float | None:
    """Returns the share of INT8; None where its step was not measured."""
    int8 = self.lines.get('int8')
    rate_gbps = self.settings.link.rate_gbps
    if int8 is None or int8.engine.costs is None or rate_gbps is None:
      return None
    return timeline.share(
      int8.engine.wire.stream_bytes(result.prompt_tokens).total,
      rate_gbps=rate_gbps,
      prefill_s=result.prefill_end_s,
      step_s=int8.engine.costs.plain_s,
    )
