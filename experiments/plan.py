# SPDX-License-Identifier: Apache-2.0
"""The plan: what each scheme would do, for slices and links not at hand.

It holds the planner against a measured latency study first, then predicts; it
runs no model. `planner` simulates, and this module says what computing costs.
"""

import collections
import dataclasses
import functools
import itertools
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from experiments import (
  calibrate,
  config,
  defaults,
  display,
  drawing,
  planner,
  results,
  selection,
  summaries,
)
from experiments.schemes import FAITHFUL, Scheme
from lynx_jax.config import ConfigError, ModelConfig, require
from lynx_jax.engine import Form, Mode
from lynx_jax.models import presets
from lynx_jax.transport.streams import WireFormat

Record = Mapping[str, Any]

# Assumed where no calibration record says better.
_COMPUTE_SHARE = 0.5  # of the peak, in prefill and verification
_MEMORY_SHARE = 0.8  # of the HBM rate, in a decode step
_COLLECTIVE_S = 10e-6  # two a layer, on a slice of several chips
_FREE_MEMORY = 0.1  # stays free
_OUTPUT_TOKENS = 64
# Of a prompt, and of at least 1,024 tokens each. Fewer in large loads, as are
# chunks, which keeps a simulation near a second: their grain is soon too fine
# to matter.
_TOKEN_CHUNKS, _ALL_TOKEN_CHUNKS = 16, 4096
_LEAST_CHUNK_BYTES, _ALL_CHUNKS = 4 << 20, 8192
_GIB = 1 << 30

MODELS = {
  value.name: value
  for value in vars(presets).values()
  if isinstance(value, ModelConfig)
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
  """Chips that compute together.

  Attributes:
    kind: JAX's name of the device, as calibration records have it.
    chips: how many.
    peak_tflops: of a chip, in bfloat16.
    hbm_gbyte_s, hbm_gib: of a chip.
  """

  kind: str
  chips: int
  peak_tflops: float
  hbm_gbyte_s: float
  hbm_gib: int


# The chips' pages at https://cloud.google.com/tpu/docs; a v5p-8 is 4 chips.
_V5E = Slice(
  kind='TPU v5 lite', chips=8, peak_tflops=197, hbm_gbyte_s=819, hbm_gib=16
)
_V5P = Slice(
  kind='TPU v5p', chips=4, peak_tflops=459, hbm_gbyte_s=2765, hbm_gib=95
)
_V6E = Slice(
  kind='TPU v6 lite', chips=8, peak_tflops=918, hbm_gbyte_s=1640, hbm_gib=32
)
SLICES = {
  'v5e-8': _V5E,
  'v5p-8': _V5P,
  'v5p-16': dataclasses.replace(_V5P, chips=8),
  'v6e-8': _V6E,
  'v6e-16': dataclasses.replace(_V6E, chips=16),
}


def run(
  settings: config.Settings, writer: results.Writer, screen: display.Screen
) -> None:
  """Compares with a measured study, then writes the plan.

  Raises:
    ConfigError: a name, or the records, cannot be used.
    OSError: the records cannot be read.
  """
  plan = settings.plan
  for name in plan.slices:
    require(
      name in SLICES,
      f'plan.slices={name!r} must be one of {", ".join(SLICES)}',
    )
  models = [*map(_model, plan.models)]
  require(
    any(scheme.name in FAITHFUL for scheme in settings.schemes),
    f'a plan advises one of {", ".join(FAITHFUL)}, whose output is that of 8 '
    'bits or better: add some to scheme',
  )
  for scheme in settings.schemes:
    require(
      not scheme.codec.exact, f'scheme={scheme.name}: {planner.NOT_EXACT}'
    )
    for tokens, in_flight in itertools.product(
      plan.prompt_tokens, plan.in_flight
    ):
      asks = _asks(settings, tokens, in_flight)
      for model in models:
        _wire(settings, model, scheme, asks)
  said: list[dict[str, Any]] = []
  if plan.records:
    compared = []
    for file in plan.records:
      with screen.step(f'predicting the requests of {file}'):
        compared += compare(_last_run(list(results.read(file))))
    said += [results.compared_record(**one) for one in compared]
    for record in said:
      writer.write(record)
    for summary in errors(compared):
      writer.write(summary)
      screen.note(f'{summary["name"]} {summary["value"]:.3f}')
  cells = list(
    itertools.product(
      models,
      plan.slices,
      plan.prompt_tokens,
      plan.rates_gbps,
      plan.in_flight,
    )
  )
  environment = results.environment() | {'device': None}
  advice: list[dict[str, Any]] = []
  for i, cell in enumerate(cells):
    name = _cell_name(*cell)
    with screen.step(f'{i + 1} of {len(cells)}: {name}'):
      for mode in settings.modes:
        records, stays_s = [], {}
        for fields, each_s in predict(settings, *cell, mode):
          records.append(results.request_record(**fields, **environment))
          writer.write(records[-1])
          if each_s:
            stays_s[fields['scheme']] = each_s
        advice.append(advise(records, stays_s))
  rows = results.rows_record(rows=advice)
  writer.write(rows)
  advised = [one['scheme'] for one in advice if one['scheme'] is not None]
  for table in tables([*said, rows]):
    screen.grid(*table)
  if not advised:
    screen.note('nothing is advised: not even one request fits into a slice')
  for name in FAITHFUL:
    writer.write(
      results.summary_record(
        f'best_{name}',
        advised.count(name) / max(1, len(advised)),
        '',
        len(advised),
        label='projected',
      )
    )


def _cell_name(model, slice_name, prompt_tokens, rate_gbps, in_flight) -> str:
  return (
    f'{model.name}/{slice_name}/{prompt_tokens}/{rate_gbps:g}Gbps/{in_flight}'
  )


def advise(
  records: Sequence[Record], stays_s: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
  """Returns the advice for a load, and for each request of it.

  Args:
    records: of it, one a scheme.
    stays_s: `Outcome.stays_s` of every request, by scheme, if all take it.

  Returns:
    The load, and of the scheme that is advised by how much the first tokens of
    INT8 come later, and its use of the link and of the decode slice's memory;
    `requests` counts those for which each scheme is the one to send. All of
    these are None where no request fits.
  """
  first, plan = records[0], records[0]['plan']
  load = {
    'model': first['model'],
    'slice': plan['slice'],
    'prompt_tokens': first['prompt_tokens'],
    'rtt_ms': first['rtt_ms'],
    'mode': first['mode'],
    'in_flight': plan['in_flight'],
    'link_gbps': first['link_gbps'],
  }
  if not set(FAITHFUL) & set(stays_s):
    return load | dict.fromkeys(
      ('scheme', 'int8_over_it', 'link_use', 'memory_use', 'requests')
    )
  known = {r['scheme']: r['plan'] for r in records if r['scheme'] in stays_s}
  median_s = {name: one['stays_s'] for name, one in known.items()}
  best = planner.best(median_s)
  where = SLICES[plan['slice']]
  each = (
    dict(zip(stays_s, one_s, strict=True))
    for one_s in zip(*stays_s.values(), strict=True)
  )
  return load | {
    'scheme': best,
    'int8_over_it': (
      median_s['int8'] / median_s[best] if 'int8' in median_s else None
    ),
    'requests': collections.Counter(map(planner.best, each)),
    'link_use': known[best]['link_use'],
    'memory_use': known[best]['hbm_bytes']
    / (where.chips * where.hbm_gib * _GIB),
  }


def advice_of(records: Sequence[Record]) -> list[Record]:
  """Returns the rows of `advise` that a plan has left."""
  found = [
    r['detail']['rows'] for r in records if r.get('name') == results.ROWS
  ]
  return found[-1] if found else []


def tables(records: Sequence[Record]) -> list[Any]:
  """Returns (caption, header, rows): what is advised, its gain and its use.

  Advice for a load, all of whose requests take one scheme, is counted by cells;
  that for each request of its own by requests.
  """
  compared = [r['detail'] for r in records if r.get('name') == 'compared']
  found = [_error_table(compared)] if compared else []
  advice = [one for one in advice_of(records) if one['scheme'] is not None]
  if not advice:
    return found
  rates = sorted({one['link_gbps'] for one in advice})
  loads: dict[Any, dict[float, list[Record]]] = {}
  for one in advice:
    at = loads.setdefault((one['in_flight'], one['mode']), {})
    at.setdefault(one['link_gbps'], []).append(one)
  schemes: list[list[str]] = []
  requests: list[list[str]] = []
  gains: list[list[str]] = []
  links: list[list[str]] = []
  memories: list[list[str]] = []
  for (in_flight, mode), by_rate in sorted(
    loads.items(), key=lambda load: (load[0][0], load[0][1] != 'serial')
  ):
    name = f'{in_flight:,} at once' if in_flight > 1 else 'one request'
    cells = [by_rate.get(rate, []) for rate in rates]
    schemes.append([f'{name}, {mode}', *map(_advised, cells)])
    requests.append([f'{name}, {mode}', *map(_shares, cells)])
    for rows, field, form in (
      (gains, 'int8_over_it', '{:.2f}'),
      (links, 'link_use', '{:.0%}'),
      (memories, 'memory_use', '{:.0%}'),
    ):
      spans = [_span([one[field] for one in cell], form) for cell in cells]
      rows.append([f'{name}, {mode}', *spans])
  header = ['load', *map(drawing.rate, rates)]
  return [
    *found,
    ('Advice: schemes, and in how many cells each', header, schemes),
    ('Requests: part of them that is best off with each', header, requests),
    ('Gain: time of INT8 over that of the scheme advised', header, gains),
    ('Link: part of the time that it is busy', header, links),
    ("Memory: part of the decode slice's that is in use", header, memories),
  ]


def _error_table(compared: Sequence[Record]) -> Any:
  rows = []
  for place, mine in itertools.groupby(
    cells_of(compared), lambda cell: (cell.study, cell.rates_gbps)
  ):
    found = [*mine]
    off = [cell.error for cell in found]
    raw = [abs(ratio - 1) for cell in found for ratio in cell.raw_ratios]
    rows.append(
      [
        place[0],
        drawing.span(place[1], drawing.rate),
        str(len(raw)),
        f'{statistics.median(off):.1%}',
        f'{max(off):.1%}',
        f'{max(cell.raw_error for cell in found):.1%}',
        f'{max(raw):.0%}',
        f'{sum(each <= 0.1 for each in raw)}',
      ]
    )
  header = [
    'study', 'link', 'requests', 'median error', 'largest error',
    'largest as measured', 'largest of one request', 'of these within 10 %',
  ]  # fmt: skip
  return 'Errors: of predicted TTFT, by study and rate', header, rows


def _span(values: Iterable[float | None], form: str) -> str:
  known = [value for value in values if value is not None]
  if not known:
    return '–'
  low, high = form.format(min(known)), form.format(max(known))
  return low if low == high else f'{low}–{high}'


def _advised(cell: Sequence[Record]) -> str:
  counts = collections.Counter(one['scheme'] for one in cell)
  return ', '.join(f'{n} {counts[n]}' for n in FAITHFUL if counts[n]) or '–'


def _shares(cell: Sequence[Record]) -> str:
  counts = collections.Counter[str]()
  for one in cell:
    counts.update(one['requests'])
  shares = {n: counts[n] / counts.total() for n in FAITHFUL if counts[n]}
  return (
    ', '.join(
      f'{name} {share:.0%}' if share >= 0.01 else f'{name} <1%'
      for name, share in shares.items()
    )
    or '–'
  )


def draw(records: Sequence[Record]) -> list[drawing.Drawing]:
  """Draws the figures of the report."""
  from experiments.figures import plan

  return plan.draw(records)


# --- What computing costs -----------------------------------------------------


def layer_parameters(model: ModelConfig) -> int:
  """Returns the parameters of all layers, without norms and biases."""
  head = model.model_dim * model.head_dim
  attention = head * (2 * model.heads + 2 * model.kv_heads)
  return model.layers * (attention + 3 * model.model_dim * model.ff_dim)


def weight_bytes(model: ModelConfig) -> int:
  """Returns the bytes of all weights in bfloat16."""
  tables = 1 if model.tied_embeddings else 2
  return 2 * (layer_parameters(model) + tables * model.vocab * model.model_dim)


def roofline(
  model: ModelConfig, where: Slice, wire: WireFormat, acceptance: float
) -> planner.Costs:
  """Returns *projected* costs: operations and bytes over the chips' rates.

  Prefill and verification reach half of the peak; a decode step streams the
  weights and the part of the cache that it reads at 0.8 of the HBM's rate, and
  waits for two collectives a layer where a slice has several chips. A record of
  `calibrate` replaces the rate of the HBM.

  Args:
    model: its dimensions.
    where: the slice; prefill and decode have one each.
    wire: of the scheme; its bytes are what attention reads.
    acceptance: chance that a draft is accepted; see `planner.Costs`.
  """
  record = calibrate.load(where.kind) or {}
  hbm_gbyte_s = record.get('hbm_gbyte_s') or where.hbm_gbyte_s
  flops_s = where.chips * where.peak_tflops * 1e12 * _COMPUTE_SHARE
  bytes_s = where.chips * hbm_gbyte_s * 1e9 * _MEMORY_SHARE
  wait_s = 2 * model.layers * _COLLECTIVE_S * (where.chips > 1)
  weights, parameters = weight_bytes(model), layer_parameters(model)
  rows = wire.engine.verify_rows
  sizes = functools.cache(wire.stream_bytes)

  def chunk_s(start: int) -> float:
    tokens = wire.engine.token_chunk
    pairs = tokens * (start + tokens / 2)  # each row sees those before it
    attention = 4 * model.layers * model.heads * model.head_dim * pairs
    return (2 * parameters * tokens + attention) / flops_s + wait_s

  def step_s(lengths: Sequence[int], *, anchor: bool, rows: int) -> float:
    read = sum(
      sizes(length).anchor if anchor else sizes(length).total
      for length in lengths
    )
    compute_s = (
      2
      * (parameters + model.vocab * model.model_dim)
      * rows
      * len(lengths)
      / flops_s
    )
    return max((weights + read) / bytes_s, compute_s) + wait_s

  return planner.Costs(
    chunk_s=chunk_s,
    draft_s=functools.partial(step_s, anchor=True, rows=1),
    verify_s=functools.partial(step_s, anchor=False, rows=rows),
    plain_s=functools.partial(step_s, anchor=False, rows=1),
    acceptance=acceptance,
  )


def predict(
  settings: config.Settings,
  model: ModelConfig,
  slice_name: str,
  prompt_tokens: int,
  rate_gbps: float,
  in_flight: int,
  mode: Mode,
) -> Iterator[tuple[dict[str, Any], list[float]]]:
  """Yields the fields of a request record a scheme, and what each request met.

  The fields are medians of all requests, and None where not even one fits into
  the decode slice. What each met is its `Outcome.stays_s`.
  """
  where = SLICES[slice_name]
  asks = _asks(settings, prompt_tokens, in_flight)
  for scheme in settings.schemes:
    wire = _wire(settings, model, scheme, asks)
    longest = wire.engine.prompt_tokens
    size = wire.stream_bytes(longest)
    room = where.chips * where.hbm_gib * _GIB * (1 - _FREE_MEMORY)
    slots = min(in_flight, int((room - weight_bytes(model)) // size.total))
    bits = wire.bits_a_value(longest)
    record: dict[str, Any] = {
      'request': (
        f'{_cell_name(model, slice_name, prompt_tokens, rate_gbps, in_flight)}'
        f'/{scheme.name}/{mode.value}'
      ),
      'study': settings.study,
      'scheme': scheme.name,
      'target': scheme.target,
      'mode': mode.value,
      'model': model.name,
      'prompt_tokens': prompt_tokens,
      'output_tokens': _OUTPUT_TOKENS,
      'link_gbps': rate_gbps,
      'rtt_ms': settings.link.rtt_ms,
      'seed': settings.seed,
      'bits_anchor': bits.anchor,
      'bits_total': bits.total,
      'bytes_anchor': size.anchor,
      'bytes_residual': size.residual,
      'label': 'projected',
      'plan': {'slice': slice_name, 'in_flight': in_flight, 'slots': slots},
    }
    each_s: list[float] = []
    if slots > 0:
      prediction = planner.simulate(
        asks,
        dataclasses.replace(
          wire, engine=dataclasses.replace(wire.engine, slots=slots)
        ),
        roofline(model, where, wire, planner.acceptance(scheme)),
        mode=mode,
        rate_gbps=rate_gbps,
        rtt_ms=settings.link.rtt_ms,
        seed=settings.seed,
      )
      median = prediction.median
      record |= {
        'prefill_s': median('prefill_end_s'),
        'split_s': 0.0,  # it is in prefill
        'anchor_arrival_s': median('anchor_s'),
        'ttft_provisional_s': median('provisional_s'),
        'ttft_committed_s': median('committed_s'),
        'exposed_s': median('exposed_s'),
        'done_s': median('done_s'),
        'bound_ttft_s': median('bound_s') if in_flight == 1 else None,
      }
      record['plan'] |= {
        'stays_s': median('stays_s'),
        'link_use': prediction.link_use,
        'prefill_use': prediction.prefill_use,
        'decode_use': prediction.decode_use,
        'requests_per_s': in_flight / prediction.span_s,
        'hbm_bytes': weight_bytes(model) + slots * size.total,
      }
      each_s = [outcome.stays_s for outcome in prediction.outcomes]
    yield record, each_s


def _asks(
  settings: config.Settings, prompt_tokens: int, in_flight: int
) -> list[planner.Ask]:
  plan = settings.plan
  return loads(
    prompt_tokens,
    in_flight,
    spread=plan.spread,
    arrivals_per_s=plan.arrivals_per_s,
    seed=settings.seed,
  )


def _wire(
  settings: config.Settings,
  model: ModelConfig,
  scheme: Scheme,
  asks: Sequence[planner.Ask],
) -> WireFormat:
  """Returns what such requests send; `ConfigError` if one does not fit."""
  longest = max(ask.prompt_tokens for ask in asks)
  parts = max(4, min(_TOKEN_CHUNKS, _ALL_TOKEN_CHUNKS // len(asks)))
  engine = dataclasses.replace(
    settings.engine,
    prompt_tokens=longest,
    output_tokens=_OUTPUT_TOKENS,
    token_chunk=max(1024, _up(longest / parts, 128)),
  )
  wire = WireFormat(model, scheme.codec, scheme.engine(engine))
  wanted = wire.stream_bytes(longest).total * len(asks) // _ALL_CHUNKS
  return dataclasses.replace(
    wire,
    engine=dataclasses.replace(
      wire.engine, chunk_bytes=max(_LEAST_CHUNK_BYTES, wanted)
    ),
  )


def loads(
  prompt_tokens: int,
  in_flight: int,
  *,
  spread: float,
  arrivals_per_s: float,
  seed: int,
) -> list[planner.Ask]:
  """Returns requests to come.

  Args:
    prompt_tokens: the mean length.
    in_flight: how many.
    spread: lengths are uniform within 1 ± spread of it.
    arrivals_per_s: mean rate of a Poisson process; 0 is all at once.
    seed: of both.
  """
  draw, now_s, asks = random.Random(seed), 0.0, []
  for _ in range(in_flight):
    part = draw.uniform(1 - spread, 1 + spread)
    asks.append(
      planner.Ask(
        arrival_s=now_s,
        prompt_tokens=max(1, round(part * prompt_tokens)),
        output_tokens=_OUTPUT_TOKENS,
      )
    )
    if arrivals_per_s:
      now_s += draw.expovariate(arrivals_per_s)
  return asks


def _up(value: float, step: int) -> int:
  return math.ceil(value / step) * step


def _model(name: str) -> ModelConfig:
  require(
    name in MODELS,
    f'plan.models={name!r} must be one of {", ".join(MODELS)}',
  )
  return MODELS[name]


def _preset(name: str) -> ModelConfig:
  """Returns the dimensions of a model whose file may say more than its name.

  SmolLM2-135M-Instruct.Q4_1 is a SmolLM2-135M-Instruct.
  """
  near = [known for known in MODELS if name.startswith(known)]
  require(
    bool(near),
    f'plan.records is of the model {name!r}, whose dimensions the planner does '
    f'not have; it must be one of {", ".join(MODELS)}',
  )
  return MODELS[max(near, key=len)]


def _last_run(records: Sequence[Record]) -> Sequence[Record]:
  starts = [i for i, r in enumerate(records) if r.get('name') == 'run']
  return records[starts[-1] :] if starts else records


# --- Against a measured study -------------------------------------------------


def compare(records: Sequence[Record]) -> list[dict[str, Any]]:
  """Predicts every request of a latency study from what INT8 cost in it.

  Costs are fitted to the requests of INT8 alone: the seconds of a token chunk,
  a line over its first token in each mode, and the medians of its first decode
  step and of its first verification. The size of a chunk, which all schemes
  share, is seen in events too. All else comes from the manifests, the scheduler
  and the link.

  Args:
    records: of a run with requests and events.

  Returns:
    For every request its name, study, scheme, mode and rate, and the seconds
    of its TTFT: `predicted_s`, `measured_s`, and `levelled_s` with the prefill
    that is the median of its prompt and mode; see `summaries`. An exact plane
    is left out: it comes after all planes, and no first token waits for it.

  Raises:
    ConfigError: there is no run, or none that can be predicted: its fields are
      others, or it has no INT8 request with events in it.
  """
  stored = next((r for r in records if r.get('name') == 'run'), None)
  require(
    stored is not None,
    'plan.records holds no run of a latency study; make one by make latency',
  )
  assert stored is not None
  values = defaults.base()
  try:
    values.update(ml_collections.ConfigDict(stored['detail']['config']))
    study = config.settings(values)
  except (ConfigError, TypeError) as error:  # also of a field's type
    raise ConfigError(
      f'plan.records is of a run that this version cannot read: {error}; make '
      'one anew by make latency'
    ) from error
  schemes = {scheme.name: scheme for scheme in study.schemes}
  events = collections.defaultdict(list)
  for record in records:
    if record['kind'] == 'event' and record.get('request'):
      events[record['request']].append(record)
  sizes = [
    e['detail']['bytes']
    for e in records
    if e['kind'] == 'event' and e['name'] in ('anchor', 'residual')
  ]
  requests = [
    r
    for r in records
    if r['kind'] == 'request'
    and r['ttft_provisional_s'] is not None
    and r['prefill_s'] is not None
    and r['scheme'] in schemes
  ]
  require(
    bool(sizes and requests),
    'plan.records is not of a latency study: it has no requests with their '
    'transfers; make one by make latency',
  )
  fits = {
    mode: _fit(
      [r for r in requests if r['mode'] == mode],
      events,
      study.engine.token_chunk,
    )
    for mode in dict.fromkeys(r['mode'] for r in requests)
  }
  prefill_s = {
    mode: summaries.prefill_medians(r for r in requests if r['mode'] == mode)
    for mode in fits
  }
  found = []
  for request in requests:
    scheme = schemes[request['scheme']]
    wire = WireFormat(
      _preset(request['model']),
      dataclasses.replace(scheme.codec, exact=False),
      dataclasses.replace(
        scheme.engine(study.engine),
        prompt_tokens=request['prompt_tokens'],
        chunk_bytes=max(sizes),
      ),
    )
    ask = planner.Ask(
      arrival_s=0.0,
      prompt_tokens=request['prompt_tokens'],
      output_tokens=request['output_tokens'],
    )
    costs = fits[request['mode']]
    if request['form'] == Form.VERIFY.value:
      costs = dataclasses.replace(costs, plain_s=costs.verify_s)
    prediction = planner.simulate(
      [ask],
      wire,
      costs,
      mode=Mode(request['mode']),
      rate_gbps=request['link_gbps'],
      rtt_ms=request['rtt_ms'],
    )
    (outcome,) = prediction.outcomes
    found.append(
      {
        'request': request['request'],
        'study': study.study,
        'scheme': request['scheme'],
        'mode': request['mode'],
        'link_gbps': request['link_gbps'],
        'predicted_s': outcome.provisional_s,
        'measured_s': request['ttft_provisional_s'],
        'levelled_s': summaries.levelled(
          request, 'ttft_provisional_s', prefill_s[request['mode']]
        ),
      }
    )
  return found


def _fit(
  requests: Iterable[Record],
  events: Mapping[str, Sequence[Record]],
  token_chunk: int,
) -> planner.Costs:
  """Returns what the INT8 requests of one mode cost."""
  chunks, steps = collections.defaultdict(list), collections.defaultdict(list)
  for request in requests:
    mine = events[request['request']]
    first = next((e for e in mine if e['name'] == 'verify'), None)
    if request['scheme'] != 'int8' or first is None:
      continue
    seconds: collections.Counter[int] = collections.Counter()
    for event in mine:
      if event['name'] in ('prefill', 'split'):
        start = event['detail']['token_chunk'] * token_chunk
        seconds[start] += event['end_s'] - event['start_s']
    for start, both_s in seconds.items():
      chunks[start].append(both_s)
    steps[request['form']].append(first['end_s'] - first['start_s'])
  require(
    len(chunks) > 1 and bool(steps),
    'plan.records has no INT8 request with its events in each mode; run the '
    'latency study with int8 among its schemes',
  )
  slope, first_s = np.polyfit(
    list(chunks), [statistics.median(s) for s in chunks.values()], 1
  )
  forms = {form: statistics.median(each) for form, each in steps.items()}
  plain_s = forms.get(Form.PLAIN.value, min(forms.values()))
  return dataclasses.replace(
    planner.steady(0.0, plain_s),
    verify_s=lambda lengths: forms.get(Form.VERIFY.value, plain_s),
    chunk_s=lambda start: float(first_s + slope * start),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
  """Requests of one study, scheme and mode, in a sweep of one rate too.

  Attributes:
    rates_gbps: the least and the greatest.
    ratios: predicted over measured TTFT of each, prefill levelled: of one
      request alone it varies by 10 % between two calls on a shared machine.
    raw_ratios: the same of TTFT as it was measured.
  """

  study: str
  scheme: str
  mode: str
  rates_gbps: tuple[float, float]
  ratios: tuple[float, ...]
  raw_ratios: tuple[float, ...]

  @property
  def error(self) -> float:
    """How far the median is from 1."""
    return abs(statistics.median(self.ratios) - 1)

  @property
  def raw_error(self) -> float:
    """The same of TTFT as it was measured."""
    return abs(statistics.median(self.raw_ratios) - 1)


def errors(compared: Sequence[Record]) -> list[dict[str, Any]]:
  """Returns the summaries of a comparison, over its cells."""
  cells = cells_of(compared)
  found = []
  for suffix, off in (
    ('', [cell.error for cell in cells]),
    ('_as_measured', [cell.raw_error for cell in cells]),
  ):
    for name, value in (('max', max(off)), ('median', statistics.median(off))):
      name = f'planner_error_{name}{suffix}'
      found.append(results.summary_record(name, value, '', len(cells)))
  return found


def cells_of(compared: Sequence[Record]) -> list[Cell]:
  """Returns the cells of a comparison."""
  found = []
  for study in dict.fromkeys(one['study'] for one in compared):
    mine = [one for one in compared if one['study'] == study]
    rates = sorted({one['link_gbps'] for one in mine})
    spans = [(rates[0], rates[-1])]
    if rates[-1] > selection.SWEEP * rates[0]:
      spans = [(rate, rate) for rate in rates]
    for span in spans:
      at: dict[tuple[str, str], list[Record]] = {}
      for one in mine:
        if span[0] <= one['link_gbps'] <= span[1]:
          at.setdefault((one['scheme'], one['mode']), []).append(one)
      for (scheme, mode), each in at.items():
        found.append(
          Cell(
            study=study,
            scheme=scheme,
            mode=mode,
            rates_gbps=span,
            ratios=tuple(o['predicted_s'] / o['levelled_s'] for o in each),
            raw_ratios=tuple(o['predicted_s'] / o['measured_s'] for o in each),
          )
        )
  return found
