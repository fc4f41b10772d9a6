# SPDX-License-Identifier: Apache-2.0
"""The latency study: every scheme over the same link, request by request.

It forms no figure: `summaries` makes those of the records written here.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import (
  config,
  display,
  lossless,
  planner,
  profiling,
  prompts,
  results,
  schemes,
  serving,
  summaries,
)
from lynx_jax import programs, timeline
from lynx_jax.config import EngineConfig, check_together, require
from lynx_jax.engine import Costs, Engine, Form, Mode, Request, Step
from lynx_jax.prefill import Prompt
from lynx_jax.timeline import Phase
from lynx_jax.transport.streams import WireFormat

_STEPS = 20  # pairs of steps that a ratio of step times is the median of
_PREFILLS = 3  # one alone was 20 % off the run's median (measured)
_LONGEST_TRANSFER_S = 3600.0  # nobody wants to wait longer in silence
_CHUNK_SHARE = 0.01  # of the bound: the longest that a chunk may take


def run(
  settings: config.Settings,
  writer: results.Writer,
  screen: display.Screen,
  remote: serving.Remote | None = None,
  model: serving.Model | None = None,
  profile: str | os.PathLike[str] | None = None,
  plan: 'Plan | None' = None,
) -> 'Plan':
  """Runs the study and writes its records; prefill may run elsewhere.

  Into `profile` goes a trace of the first repeat of the first prompt and link.

  For every prompt and link, each repeat runs all schemes in random order.
  Baselines run in plain form, which shows their TTFT at its best. In the last
  repeat INT8 runs in the verify program as well, since its commits are what
  Lynx competes with; the last of all repeats runs the other baselines in the
  verify program instead, for their output.

  Args:
    settings: of the run.
    writer: takes the records.
    screen: shows what happens.
    remote: where prefill runs; None is this process.
    model: that of the settings, where it is loaded already.
    plan: what another run returned, for the same prompts and engine over the
      same links; this one measures none of it again.

  Raises:
    ConfigError: prompts, model, schemes or engine do not fit together, or the
      plan is of others.
  """
  if model is None:
    with screen.step(f'loading {settings.model_path}'):
      model = serving.load(
        settings.model_path,
        settings.model_dtype,
        settings.sides if remote is None else settings.sides[1:],
        settings.model_tokenizer,
        rows=settings.decode_data,
      )
  texts = {
    file: prompts.cut(
      model.tokenizer.encode(prompts.read(file)),
      tokens,
      keeps_end=prompts.KEEPS_END.get(file, False),
    )
    for file, tokens in settings.prompts
  }
  connect = functools.partial(
    serving.connect,
    model,
    remote=remote,
    emulated=settings.link.emulated,
    jitter_ms=settings.link.jitter_ms,
  )
  agreed: Callable[[Any], Any] = _own
  if remote is not None:
    remote.side.require_same(settings, texts)
    agreed = remote.side.agreed
  require(
    settings.acceptance_tokens != 1,
    'acceptance.output_tokens=1 leaves nothing to accept: take 2 or more, or 0 '
    'to measure none',
  )
  int8, base = _int8(settings, texts)
  for scheme in (int8, *settings.schemes):
    check_together(model.config, scheme.codec, base)
  if plan is None:
    plan = make_plan(settings, model, texts, screen, connect, agreed)
  require(
    plan.of == _of(settings, model, texts),
    'the plan is of other prompts, links, INT8 codec, engine or model than the '
    'run; run without a plan',
  )
  if settings.auto:
    chosen = _advised(settings, model, texts, plan, screen)
    settings = dataclasses.replace(settings, schemes=(chosen,))
  study = _Study(settings, model, texts, plan, writer, screen, connect)
  study.prefill_is_here = remote is None
  with contextlib.ExitStack() as stack:
    study.start(stack)
    references = {file: study.references(file) for file in texts}
    with programs.counting() as counts:
      for case in plan.cases:
        for repeat in range(settings.repeats):
          with profiling.trace(profile):
            study.pair(case, repeat, references[case.prompt])
          profile = None
      study.count(counts)
    study.accept()
    constants = study.constants()
  records = study.records
  screen.table(records)
  for mode in settings.modes:
    suffix = '' if mode is Mode.SERIAL else f'_{mode.value}'
    for record in summaries.summaries(
      records, constants, mode=mode.value, suffix=suffix
    ):
      writer.write(record)
  for record in summaries.acceptance(study.acceptances):
    writer.write(record)
  screen.note(f'records: {writer.path}')
  return plan


def _own(measured: Any) -> Any:
  return measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One prompt over one link; `seen_gbps` is the rate that INT8 met on it."""

  prompt: str
  rate_gbps: float
  rtt_ms: float
  int8_bytes: int
  prefill_s: float
  seen_gbps: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What was decided after measuring prefill and a decode step of INT8."""

  cases: tuple[Case, ...]
  engine: EngineConfig
  int8_step_s: float
  of: tuple[Any, ...]  # what all of it follows from


def _int8(
  settings: config.Settings, texts: Mapping[str, Sequence[int]]
) -> tuple[schemes.Scheme, EngineConfig]:
  """Returns the scheme that a plan is made with, and its engine."""
  return schemes.scheme('int8', settings.codec), dataclasses.replace(
    settings.engine, prompt_tokens=max(map(len, texts.values()))
  )


def _of(settings: config.Settings, model: serving.Model, texts) -> tuple:
  """Returns what all of a plan follows from."""
  int8, base = _int8(settings, texts)
  links = settings.link, settings.sweep_gbps, settings.sweep_rtt_ms
  return settings.prompts, links, int8.codec, base, model.config


def make_plan(
  settings: config.Settings,
  model: serving.Model,
  texts: Mapping[str, list[int]],
  screen: display.Screen,
  connect: Callable[..., Any] | None = None,
  agreed: Callable[[Any], Any] = _own,
) -> Plan:
  """Measures every prompt's prefill and an INT8 step, and sets the rates.

  Chunks and programs follow from what is measured, so processes agree on it.

  Args:
    settings: of the run.
    model: where it is measured.
    texts: the prompts, by name.
    screen: shows what happens.
    connect: see `serving.connect`; None is this process.
    agreed: what all processes of a side take for what one has measured.
  """
  int8, base = _int8(settings, texts)
  connect = connect or functools.partial(serving.connect, model)
  cases, longest_chunks = [], []
  with (
    screen.step('measuring prefill and a decode step'),
    connect(int8, int8.engine(base)) as line,
  ):
    step_s = line.engine.warm_up().plain_s
    for file, prompt in texts.items():
      ask = Request(prompt=prompt, output_tokens=1, mode=Mode.SERIAL)
      tries = [line.engine.generate(ask) for _ in range(_PREFILLS)]
      prefill_s = agreed(
        statistics.median(t.prefill_end_s or 0.0 for t in tries)
      )
      size = line.engine.wire.stream_bytes(len(prompt)).total
      measured = {'prefill_s': prefill_s, 'step_s': step_s}
      rates = settings.sweep_gbps or (settings.link.rate_gbps,)
      delays = settings.sweep_rtt_ms or (settings.link.rtt_ms,)
      for rate_gbps, rtt_ms in itertools.product(rates, delays):
        if rate_gbps is None:
          rate_gbps = timeline.rate_for_share(
            settings.link.share, size, **measured
          )
        share = timeline.share(size, rate_gbps=rate_gbps, **measured)
        screen.note(
          f'{file}, {len(prompt)} tokens: prefill and split {prefill_s:.2f} s,'
          f' decode step {step_s:.3f} s, INT8 {size / 1e6:.1f} MB; at '
          f'{rate_gbps * 1e3:.4g} Mbit/s and RTT {rtt_ms:g} ms '
          f'the share is {share:.1%}'
        )
        check_wait(file, size, rate_gbps, rtt_ms)
        seen_gbps = rate_gbps
        if settings.auto and not settings.link.emulated:
          seen_gbps = agreed(_seen_gbps(line.engine, prompt, rtt_ms))
        cases.append(
          Case(
            prompt=file,
            rate_gbps=rate_gbps,
            rtt_ms=rtt_ms,
            int8_bytes=size,
            prefill_s=prefill_s,
            seen_gbps=seen_gbps,
          )
        )
        least_s = prefill_s + step_s  # no bound is shorter
        longest_chunks.append(_CHUNK_SHARE * least_s * rate_gbps * 1e9 / 8)
  chunk_bytes = max(1, min(base.chunk_bytes, int(min(longest_chunks))))
  return Plan(
    cases=tuple(cases),
    engine=dataclasses.replace(base, chunk_bytes=chunk_bytes),
    int8_step_s=step_s,
    of=_of(settings, model, texts),
  )


def _seen_gbps(engine: Engine, prompt: list[int], rtt_ms: float) -> float:
  """Returns the rate that a serial request meets on a real link."""
  result = engine.generate(
    Request(prompt=prompt, output_tokens=2, form=Form.PLAIN, mode=Mode.SERIAL)
  )
  assert result.anchor_s is not None
  assert result.prefill_end_s is not None
  seconds = result.anchor_s - result.prefill_end_s - rtt_ms / 2e3
  return result.anchor_bytes * 8 / 1e9 / max(seconds, 1e-6)


def _advised(settings, model, texts, plan: Plan, screen) -> schemes.Scheme:
  """Returns the scheme whose first tokens stay soonest, by the planner.

  Costs are those of INT8 just measured; an Anchor-only step is taken to cost as
  much. Of several prompts, links and modes the sum decides.
  """
  stays_s = {}
  for scheme in settings.schemes:
    wire = WireFormat(model.config, scheme.codec, scheme.engine(plan.engine))
    stays_s[scheme.name] = sum(
      planner.simulate(
        [
          planner.Ask(
            arrival_s=0.0,
            prompt_tokens=len(texts[case.prompt]),
            output_tokens=settings.output_tokens,
          )
        ],
        wire,
        planner.steady(
          case.prefill_s / (wire.token_chunks(len(texts[case.prompt])) - 1),
          plan.int8_step_s,
          planner.acceptance(scheme),
        ),
        mode=mode,
        rate_gbps=case.seen_gbps,
        rtt_ms=case.rtt_ms,
      )
      .outcomes[0]
      .stays_s
      for case in plan.cases
      for mode in settings.modes
    )
  chosen = planner.best(stays_s)
  runs = len(plan.cases) * len(settings.modes)
  screen.note(
    f'scheme=auto takes {chosen}; predicted time to tokens that stay: '
    + ', '.join(f'{name} {s / runs:.3g} s' for name, s in stays_s.items())
  )
  return next(s for s in settings.schemes if s.name == chosen)


def check_wait(
  prompt: str, size_bytes: int, rate_gbps: float, rtt_ms: float
) -> None:
  """Raises `ConfigError` if a transfer takes hours of silence."""
  transfer_s = size_bytes * 8e-9 / rate_gbps + rtt_ms / 1e3
  require(
    transfer_s <= _LONGEST_TRANSFER_S,
    f'{prompt}: INT8 takes {transfer_s / 3600:.3g} hours at '
    f'link.rate_gbps={rate_gbps:.4g}, link.rtt_ms={rtt_ms:g}; take a faster '
    'link or fewer prompt_tokens',
  )


class _Study:
  """The engines of a run, and what they have yielded."""

  def __init__(
    self, settings, model, texts, plan: Plan, writer, screen, connect
  ):
    self._settings, self._model, self._texts = settings, model, texts
    self._plan, self._writer, self._screen = plan, writer, screen
    self._connect = connect
    self.prefill_is_here = True
    self._lines: dict[str, serving.Line] = {}
    self._order = random.Random(settings.seed)
    self._environment = results.environment()
    self._calls: collections.Counter[str] = collections.Counter()
    self._compiles = self._fetches = 0
    self._codebook_bits: dict[str, float] = {}  # by prompt
    self.records: list[dict[str, Any]] = []
    self.acceptances: list[dict[str, Any]] = []

  def start(self, stack: contextlib.ExitStack) -> None:
    """Makes and warms up an engine for every scheme."""
    for scheme in self._settings.schemes:
      with self._screen.step(f'warming up {scheme.name}'):
        line = stack.enter_context(
          self._connect(
            scheme,
            scheme.engine(self._plan.engine),
            rate_gbps=self._plan.cases[0].rate_gbps,
            rtt_ms=self._plan.cases[0].rtt_ms,
          )
        )
        line.engine.warm_up()
      self._lines[scheme.name] = line

  def references(self, file: str) -> dict[str, list[int]]:
    """Returns the reference output of every scheme, by name."""
    prompt, known = self._texts[file], None
    by_codec: dict[Any, list[int]] = {}
    with self._screen.step(f'decoding the references of {file}'):
      for scheme in self._settings.schemes:
        if scheme.codec in by_codec:
          continue
        engine = self._lines[scheme.name].engine
        if known is None:
          known = engine.compute(prompt, self._settings.sampling)
          if isinstance(known, Prompt):  # not that of another process
            self._codebook_bits[file] = lossless.bits_of(known)
        by_codec[scheme.codec] = engine.reference(
          prompt,
          self._settings.output_tokens,
          known,
          sampling=self._settings.sampling,
        )
    return {s.name: by_codec[s.codec] for s in self._settings.schemes}

  def pair(
    self, case: Case, repeat: int, references: Mapping[str, list[int]]
  ) -> None:
    """Runs all schemes, modes and forms once, in random order."""
    runs = [
      (scheme, mode, form)
      for scheme, mode in itertools.product(
        self._settings.schemes, self._settings.modes
      )
      for form in self._forms(scheme, case, repeat)
    ]
    self._order.shuffle(runs)
    for scheme, mode, form in runs:
      self._request(case, repeat, scheme, mode, form, references)

  def _forms(
    self, scheme: schemes.Scheme, case: Case, repeat: int
  ) -> tuple[Form, ...]:
    """Returns the forms in which a scheme runs this time; see `run`."""
    if scheme.is_speculative:
      return (Form.VERIFY,)
    last = repeat == self._settings.repeats - 1
    if scheme.name == 'int8':
      return (Form.PLAIN, Form.VERIFY) if last else (Form.PLAIN,)
    if not last or case is not self._plan.cases[-1]:
      return (Form.PLAIN,)
    return (Form.VERIFY,) if repeat else (Form.PLAIN, Form.VERIFY)

  def _request(self, case, repeat, scheme, mode, form, references) -> None:
    line, tokenizer = self._lines[scheme.name], self._model.tokenizer
    line.tune(case.rate_gbps, case.rtt_ms)
    line.engine.spoil_cache()  # it may hold all of this prompt
    title = f'{case.prompt}, {scheme.name}, {mode.value}'
    if form is Form.PLAIN:
      title += ', one-row decode'
    with self._screen.stream(title, tokenizer.decode) as shown:
      result = serving.run_request(
        line.engine,
        Request(
          prompt=self._texts[case.prompt],
          output_tokens=self._settings.output_tokens,
          form=form,
          mode=mode,
          sampling=self._settings.sampling,
        ),
        shown,
      )
    assert result.prefill_end_s is not None
    self._calls.update(event.name for event in result.timeline.events())
    over = f'{case.rate_gbps:.4g}Gbps,{case.rtt_ms:g}ms'
    how = f'{scheme.name}/{mode.value}/{form.value}'
    name = f'{case.prompt}/{over}/{repeat}/{how}'
    record = serving.record(
      line.engine,
      result,
      form=form,
      text=tokenizer.decode(result.tokens),
      reference=references[scheme.name],
      bf16=references.get('bf16'),
      share=timeline.share(
        case.int8_bytes,
        rate_gbps=case.rate_gbps,
        prefill_s=result.prefill_end_s,
        step_s=self._plan.int8_step_s,
      ),
      request=name,
      repeat=repeat,
      prompt=case.prompt,
      study=self._settings.study,
      scheme=scheme.name,
      target=scheme.target,
      mode=mode.value,
      link_gbps=case.rate_gbps,
      rtt_ms=case.rtt_ms,
      seed=self._settings.seed,
      sampling=dataclasses.asdict(self._settings.sampling),
      **self._environment,
    )
    if scheme.name == 'bf16' and case.prompt in self._codebook_bits:
      record['bound_codebook_s'] = serving.bound_s(
        line.engine,
        lossless.coded(result, self._codebook_bits[case.prompt]),
        case.rate_gbps,
        case.rtt_ms,
      )
    self._writer.write(record)
    for event in result.timeline.events():
      self._writer.write(results.event_record(name, event))
    self.records.append(record)

  def accept(self) -> None:
    """Measures acceptance at a fixed draft length, over a link without limit.

    Drafts are made after arrival; the text's own repetition is given beside.
    """
    tokens = self._settings.acceptance_tokens
    scheme = next((s for s in self._settings.schemes if s.name == 'lynx'), None)
    if not tokens or scheme is None:
      return
    engine_config = dataclasses.replace(
      scheme.engine(self._plan.engine),
      output_tokens=tokens,
      draft_tokens=self._settings.acceptance_drafts,
    )
    with self._connect(scheme, engine_config) as line:
      with self._screen.step('warming up the acceptance run'):
        line.engine.warm_up()
      for file, prompt in self._texts.items():
        with self._screen.step(f'acceptance on {file}'):
          result = line.engine.generate(
            Request(
              prompt=prompt,
              output_tokens=tokens,
              streamed=False,
              sampling=self._settings.sampling,
            )
          )
        record = results.acceptance_record(
          f'{file}/acceptance',
          prompt=file,
          prompt_tokens=len(prompt),
          draft_tokens=self._settings.acceptance_drafts,
          rounds=result.rounds,
          token_ids=result.tokens,
        )
        self._writer.write(record)
        self.acceptances.append(record['detail'])

  def count(self, counts: programs.Counts) -> None:
    """Keeps what was counted while requests ran."""
    self._compiles, self._fetches = counts.compiles, counts.fetches

  def constants(self) -> summaries.Constants:
    """Returns what was measured besides the requests."""
    # Prefill, if it is in this process, reads once a token chunk, once a token
    # that it goes on with and once an exact string, and decode once a
    # verification: what is left of all fetches belongs to the drafts.
    drafts = self._calls[Phase.DRAFT]
    left = self._fetches - self._calls[Phase.VERIFY]
    if self.prefill_is_here:
      for phase in (Phase.PREFILL, Phase.CONTINUE, Phase.ENCODE):
        left -= self._calls[phase]
    lynx, bf16 = self._engine('lynx'), self._engine('bf16')
    int8 = self._engine('int8')
    ratio, worst = None, None
    if lynx and bf16:
      ratio = statistics.median(
        lynx.time_step(Step.DRAFT) / bf16.time_step(Step.PLAIN)
        for _ in range(_STEPS)
      )
    if lynx:
      group, longest = lynx.codec.group, lynx.config.prompt_tokens
      worst = lynx.wire.bits_range(
        max(1, longest - group + 1), longest + group - 1
      ).worst.anchor
    costs: Costs | None = int8.costs if int8 else None
    return summaries.Constants(
      bits_bf16_codebook=tuple(self._codebook_bits.values()),
      anchor_step_over_bf16_step=ratio,
      steps=_STEPS,
      bits_anchor_worst_length=worst,
      recompiles_after_warmup=self._compiles,
      fetches_per_draft_round=left / drafts if drafts else None,
      draft_rounds=drafts,
      verify_s=costs.verify_s if costs else None,
    )

  def _engine(self, scheme: str) -> Engine | None:
    line = self._lines.get(scheme)
    return line.engine if line else None
