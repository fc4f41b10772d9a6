# SPDX-License-Identifier: Apache-2.0
"""The latency study: what the records of its requests add up to.

The figures are a pure function of records and measured constants, so that they
can be formed again from any `results.jsonl`.
"""

import collections
import contextlib
import dataclasses
import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments import config, display, prompts, results, serving
from lynx_jax import programs, timeline
from lynx_jax.config import EngineConfig, Mode, check_together
from lynx_jax.engine import Form, Request, Step
from lynx_jax.timeline import Phase

_STEPS = 20  # pairs of steps that a ratio of step times is the median of

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
  """What a study measures besides its requests; None is not measured.

  Attributes:
    anchor_step_over_bf16_step: a decode step that reads Anchors alone over
      one on a dense prefix, the median over interleaved pairs.
    steps: how many pairs.
    bits_anchor_worst_length: bits a value of the Anchor at the prompt length
      with the longest ragged group.
    recompiles_after_warmup: compilations while requests ran.
    fetches_per_draft_round: host reads in one draft round.
    draft_rounds: how many rounds that is the mean of.
  """

  anchor_step_over_bf16_step: float | None = None
  steps: int = 0
  bits_anchor_worst_length: float | None = None
  recompiles_after_warmup: int | None = None
  fetches_per_draft_round: float | None = None
  draft_rounds: int = 0


def run(
  settings: config.Settings, writer: results.Writer, screen: display.Screen
) -> None:
  """Runs the study and writes its records.

  Every repeat runs all schemes in random order: baselines in plain form, which
  shows their TTFT at its best, and in the first repeat in the verify program
  too, whose output and commit times are compared.

  Raises:
    ConfigError: prompt, model, schemes or engine do not fit together.
  """
  with screen.step(f'loading {settings.model_path}'):
    model = serving.load(settings.model_path, settings.model_dtype)
  prompt = prompts.cut(
    model.tokenizer.encode(prompts.read(settings.prompt_file)),
    settings.prompt_tokens,
    keeps_end=prompts.KEEPS_END.get(settings.prompt_file, False),
  )
  setting = _calibrate(settings, model, prompt, screen)
  with contextlib.ExitStack() as stack:
    engines = {}
    for scheme, mode in itertools.product(settings.schemes, settings.modes):
      with screen.step(f'warming up {scheme.name}, {mode.value}'):
        engine = stack.enter_context(
          serving.connect_engine(
            model,
            scheme,
            scheme.engine(setting.engine, mode),
            rate_gbps=setting.rate_gbps,
            rtt_ms=settings.link.rtt_ms,
          )
        )
        engine.warm_up()
      engines[scheme.name, mode] = engine
    references = _references(settings, engines, prompt, screen)
    with programs.counting() as counts:
      done = list(
        _requests(
          settings, setting, model, prompt, engines, references, writer, screen
        )
      )
    events = [event for _, timeline in done for event in timeline.events()]
    constants = _constants(settings, engines, len(prompt), events, counts)
  records = [record for record, _ in done]
  screen.table(records)
  for mode in settings.modes:
    suffix = '' if mode is Mode.SERIAL else f'_{mode.value}'
    for record in summaries(records, constants, mode=mode.value, suffix=suffix):
      writer.write(record)
  screen.note(f'records: {writer.path}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Setting:
  """What calibration found: the link's rate, and what the share is of."""

  engine: EngineConfig
  rate_gbps: float
  int8_bytes: int
  int8_step_s: float


def _calibrate(settings, model, prompt, screen) -> _Setting:
  """Measures prefill and a decode step of INT8, and sets the link's rate."""
  int8 = config.scheme('int8', settings.schemes[0].codec)
  base = dataclasses.replace(settings.engine, prompt_tokens=len(prompt))
  for scheme in (int8, *settings.schemes):
    check_together(model.config, scheme.codec, base)
  engine_config = int8.engine(base, Mode.SERIAL)
  with (
    screen.step('measuring prefill and a decode step'),
    serving.connect_engine(model, int8, engine_config) as engine,
  ):
    step_s = engine.warm_up().plain_s
    ask = Request(prompt=prompt, output_tokens=1)
    times = [engine.generate(ask).prefill_end_s for _ in range(2)]
    size = engine.wire.stream_bytes(len(prompt)).total
  prefill_s = statistics.median(_known(times))
  rate_gbps = settings.link.rate_gbps
  if rate_gbps is None:
    rate_gbps = timeline.rate_for_share(
      settings.link.share, size, prefill_s=prefill_s, step_s=step_s
    )
  share = timeline.share(
    size, rate_gbps=rate_gbps, prefill_s=prefill_s, step_s=step_s
  )
  # A chunk shall last at most 1 % of the shortest bound there can be.
  least_s = prefill_s + step_s
  chunk_bytes = max(1, int(0.01 * least_s * rate_gbps * 1e9 / 8))
  screen.note(
    f'{len(prompt)} prompt tokens: prefill and split {prefill_s:.2f} s, '
    f'decode step {step_s:.3f} s, INT8 {size / 1e6:.1f} MB; at '
    f'{rate_gbps * 1e3:.4g} Mbit/s the share is {share:.1%}'
  )
  return _Setting(
    engine=dataclasses.replace(
      base, chunk_bytes=min(base.chunk_bytes, chunk_bytes)
    ),
    rate_gbps=rate_gbps,
    int8_bytes=size,
    int8_step_s=step_s,
  )


def _references(settings, engines, prompt, screen) -> dict[str, list[int]]:
  """Returns every scheme's reference output, by name, and that of bf16."""
  found: dict[Any, list[int]] = {}
  by_name = {}
  computed = None
  for scheme in settings.schemes:
    if scheme.codec not in found:
      with screen.step(f'decoding the reference of {scheme.name}'):
        engine = engines[scheme.name, settings.modes[0]]
        computed = computed or engine.compute(prompt)
        found[scheme.codec] = engine.reference(
          prompt, settings.output_tokens, computed
        )
    by_name[scheme.name] = found[scheme.codec]
  return by_name


def _requests(
  settings, setting, model, prompt, engines, references, writer, screen
):
  """Runs all requests; writes their records, yields them with timelines."""
  environment = results.environment()
  order = random.Random(settings.seed)
  for repeat in range(settings.repeats):
    runs = [
      (scheme, mode, form)
      for scheme, mode in itertools.product(settings.schemes, settings.modes)
      for form in _forms(scheme, repeat)
    ]
    order.shuffle(runs)
    for scheme, mode, form in runs:
      engine = engines[scheme.name, mode]
      title = f'{scheme.name}, {mode.value}'
      if form is Form.PLAIN:
        title += ', one-row decode'
      with screen.stream(title, model.tokenizer.decode) as shown:
        result = serving.run_request(
          engine,
          Request(
            prompt=prompt, output_tokens=settings.output_tokens, form=form
          ),
          shown,
        )
      assert result.prefill_end_s is not None
      name = f'{repeat}/{scheme.name}/{mode.value}/{form.value}'
      record = serving.record(
        engine,
        result,
        form=form,
        text=model.tokenizer.decode(result.tokens),
        reference=references[scheme.name],
        bf16=references.get('bf16'),
        share=timeline.share(
          setting.int8_bytes,
          rate_gbps=setting.rate_gbps,
          prefill_s=result.prefill_end_s,
          step_s=setting.int8_step_s,
        ),
        request=name,
        repeat=repeat,
        prompt=settings.prompt_file,
        study=settings.study,
        scheme=scheme.name,
        target=scheme.target,
        mode=mode.value,
        link_gbps=setting.rate_gbps,
        rtt_ms=settings.link.rtt_ms,
        seed=settings.seed,
        **environment,
      )
      writer.write(record)
      for event in result.timeline.events():
        writer.write(results.event_record(name, event))
      yield record, result.timeline


def _forms(scheme: config.Scheme, repeat: int) -> tuple[Form, ...]:
  planes = max(len(scheme.codec.k.planes), len(scheme.codec.v.planes))
  if planes > 1:
    return (Form.VERIFY,)
  return (Form.PLAIN, Form.VERIFY) if repeat == 0 else (Form.PLAIN,)


def _constants(settings, engines, prompt_tokens, events, counts) -> Constants:
  mode = settings.modes[0]
  lynx, bf16 = engines.get(('lynx', mode)), engines.get(('bf16', mode))
  # Prefill reads once a token chunk and decode once a verification: what is
  # left of all fetches belongs to the draft rounds.
  calls = collections.Counter(event.name for event in events)
  drafts = calls[Phase.DRAFT]
  left = counts.fetches - calls[Phase.PREFILL] - calls[Phase.VERIFY]
  constants = Constants(
    recompiles_after_warmup=counts.compiles,
    fetches_per_draft_round=left / drafts if drafts else None,
    draft_rounds=drafts,
  )
  if lynx is None:
    return constants
  group = lynx.codec.group
  worst = lynx.wire.bits_range(
    max(1, prompt_tokens - group + 1), prompt_tokens + group - 1
  ).worst
  constants = dataclasses.replace(
    constants, bits_anchor_worst_length=worst.anchor
  )
  if bf16 is None:
    return constants
  pairs = [
    (lynx.time_step(Step.DRAFT), bf16.time_step(Step.PLAIN))
    for _ in range(_STEPS)
  ]
  return dataclasses.replace(
    constants,
    anchor_step_over_bf16_step=statistics.median(a / b for a, b in pairs),
    steps=_STEPS,
  )


def summaries(
  records: Iterable[Record],
  constants: Constants,
  *,
  mode: str = 'serial',
  suffix: str = '',
) -> list[dict[str, Any]]:
  """Forms the `summary` records of a latency study.

  Ratios of several requests are medians of

      (exposed + T) / (bound - own T_p + T),    T = the run's median T_p

  so that the noise of prefill, equal in both, does not drown the transfer;
  ratios between schemes are medians over pairs, requests of one repeat and
  prompt. `ttft_over_bound_min` alone is of raw times: a request under its own
  bound would be a fault of the bound.

  Args:
    records: of one run; kinds other than `request` are passed over.
    constants: what else the run measured.
    mode: which requests to take.
    suffix: of the names, for example `_overlapped`.
  """
  chosen = [
    r for r in records if r.get('kind') == 'request' and r['mode'] == mode
  ]
  by = {name: fastest_form(chosen, name) for name in config.SCHEMES}
  prefill_s = median_prefill_s(chosen)
  verified = [r for r in chosen if _form(r) == 'verify']

  def ttft(record: Record) -> float | None:
    return _levelled(record, 'ttft_provisional_s', prefill_s)

  def bound(record: Record) -> float | None:
    return _levelled(record, 'bound_ttft_s', prefill_s)

  def pairs(one: str, other: str, value: Callable[[Record], float | None]):
    return _paired_ratios(by[one], by[other], value)

  own = [_ratio(r['ttft_provisional_s'], r['bound_ttft_s']) for r in chosen]
  figures: list[tuple[str, float | bool | None, str, int]] = [
    _median('ttft_lynx_over_int4', pairs('lynx', 'int4', ttft)),
    _median('ttft_lynx_over_bound', _bound_ratios(by['lynx'], prefill_s)),
    ('ttft_over_bound_min', min(_known(own), default=None), '', _n(own)),
    _median('ttft_int8_over_lynx', pairs('int8', 'lynx', ttft)),
    _median('bound_int8_over_lynx', pairs('int8', 'lynx', bound)),
    _median('share', [r['share'] for r in chosen]),
    _median('bits_anchor', [r['bits_anchor'] for r in by['lynx']], 'bit'),
    (
      'bits_anchor_worst_length',
      constants.bits_anchor_worst_length,
      'bit',
      int(constants.bits_anchor_worst_length is not None),
    ),
    _all('equal_to_reference', [r['equal_to_reference'] for r in verified]),
    *(
      _all(
        f'equal_to_bf16_{name}',
        [r['equal_to_bf16'] for r in verified if r['scheme'] == name],
      )
      for name in ('bf16', 'int8', 'int4', 'lynx')
    ),
    (
      'anchor_step_over_bf16_step',
      constants.anchor_step_over_bf16_step,
      '',
      constants.steps,
    ),
    (
      'recompiles_after_warmup',
      constants.recompiles_after_warmup,
      '',
      len(chosen),
    ),
    (
      'fetches_per_draft_round',
      constants.fetches_per_draft_round,
      '',
      constants.draft_rounds,
    ),
  ]
  return [
    results.summary_record(name + suffix, value, unit, n)
    for name, value, unit, n in figures
  ]


def ttft_over_bound(
  records: Sequence[Record], prefill_s: float | None = None
) -> float | None:
  """Returns the median of TTFT over bound, formed as `summaries` says.

  Args:
    records: requests of one scheme and mode.
    prefill_s: the run's median; that of `records` by default.
  """
  if prefill_s is None:
    prefill_s = median_prefill_s(records)
  known = _known(_bound_ratios(records, prefill_s))
  return statistics.median(known) if known else None


def ttft_over(
  records: Sequence[Record], others: Sequence[Record]
) -> float | None:
  """Returns the median TTFT of `records` over `others`, pair by pair.

  Ratios are formed as `summaries` says, with the prefill median of both.
  """
  prefill_s = median_prefill_s([*records, *others])
  ratios = _known(
    _paired_ratios(
      records,
      others,
      lambda r: _levelled(r, 'ttft_provisional_s', prefill_s),
    )
  )
  return statistics.median(ratios) if ratios else None


def median_prefill_s(records: Iterable[Record]) -> float | None:
  """Returns the median of T_p, prefill and split."""
  known = _known(_prefill_s(r) for r in records)
  return statistics.median(known) if known else None


def fastest_form(records: Iterable[Record], scheme: str) -> list[Record]:
  """Returns a scheme's requests in its faster form of decoding.

  The forms are the verify program and plain one-row decode; a speculative
  scheme has the first alone.
  """
  forms: dict[str, list[Record]] = {}
  for record in records:
    if record['scheme'] == scheme:
      forms.setdefault(_form(record), []).append(record)

  def exposed_s(form: str) -> float:
    known = _known(_levelled(r, 'ttft_provisional_s', 0.0) for r in forms[form])
    return statistics.median(known) if known else float('inf')

  return forms[min(forms, key=exposed_s)] if forms else []


def _form(record: Record) -> str:
  return record.get('form') or 'verify'


def _prefill_s(record: Record) -> float | None:
  if record['prefill_s'] is None:
    return None
  # Overlapped, split runs while prefill does and has no time of its own.
  return record['prefill_s'] + (record['split_s'] or 0.0)


def _levelled(
  record: Record, name: str, prefill_s: float | None
) -> float | None:
  """Returns a time with the request's own T_p replaced by the run's."""
  own = _prefill_s(record)
  if record[name] is None or own is None or prefill_s is None:
    return None
  return record[name] - own + prefill_s


def _bound_ratios(
  records: Iterable[Record], prefill_s: float | None
) -> list[float | None]:
  return [
    _ratio(
      _levelled(r, 'ttft_provisional_s', prefill_s),
      _levelled(r, 'bound_ttft_s', prefill_s),
    )
    for r in records
  ]


def _paired_ratios(
  one: Iterable[Record],
  other: Iterable[Record],
  value: Callable[[Record], float | None],
) -> list[float | None]:
  def pair(record: Record):
    return record.get('prompt'), record.get('repeat')

  partners = {pair(record): record for record in other}
  return [
    _ratio(value(record), value(partners[pair(record)]))
    for record in one
    if pair(record) in partners
  ]


def _ratio(value: float | None, other: float | None) -> float | None:
  return None if value is None or not other else value / other


def _known(values: Iterable[float | None]) -> list[float]:
  return [value for value in values if value is not None]


def _n(values: Iterable[Any]) -> int:
  return sum(value is not None for value in values)


def _median(name: str, values: Sequence[float | None], unit: str = ''):
  known = _known(values)
  return name, statistics.median(known) if known else None, unit, len(known)


def _all(name: str, values: Sequence[bool | None]):
  known = [value for value in values if value is not None]
  return name, all(known) if known else None, '', len(known)
