# SPDX-License-Identifier: Apache-2.0
"""What the request records of a latency study add up to.

It runs nothing: figures are a pure function of records and measured constants,
so that they can be formed again from any `results.jsonl`.
"""

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments import results
from experiments.schemes import SCHEMES

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
    verify_s: one verification pass of INT8.
    bits_bf16_codebook: bits a value of lossless bfloat16, a prompt each; see
      `lossless`.
  """

  anchor_step_over_bf16_step: float | None = None
  steps: int = 0
  bits_anchor_worst_length: float | None = None
  recompiles_after_warmup: int | None = None
  fetches_per_draft_round: float | None = None
  draft_rounds: int = 0
  verify_s: float | None = None
  bits_bf16_codebook: tuple[float, ...] = ()


def summaries(
  records: Iterable[Record],
  constants: Constants,
  *,
  mode: str = 'serial',
  suffix: str = '',
) -> list[dict[str, Any]]:
  """Forms the `summary` records of a latency study.

  Ratios of several requests are medians of

      (exposed + T) / (bound - own T_p + T),    T = the prompt's median T_p

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
  by = {name: fastest_form(chosen, name) for name in SCHEMES}
  prefill_s = prefill_medians(chosen)
  verified = [r for r in chosen if _form(r) == 'verify']

  def ttft(record: Record) -> float | None:
    return levelled(record, 'ttft_provisional_s', prefill_s)

  def bound(record: Record) -> float | None:
    return levelled(record, 'bound_ttft_s', prefill_s)

  def pairs(one: str, other: str, value: Callable[[Record], float | None]):
    return _paired_ratios(by[one], by[other], value)

  own = [_ratio(r['ttft_provisional_s'], r['bound_ttft_s']) for r in chosen]
  int8 = {
    form: [r for r in chosen if r['scheme'] == 'int8' and _form(r) == form]
    for form in ('verify', 'plain')
  }
  verified_pairs = _pairs(by['lynx'], int8['verify'])
  plain_pairs = _pairs(by['lynx'], int8['plain'])
  lags, plain_lags = commit_lags(verified_pairs), commit_lags(plain_pairs)
  lag = _ratio(max(lags, default=None), constants.verify_s)

  def done(pairs: Sequence[tuple[Record, Record]]) -> list[float | None]:
    return [
      _ratio(levelled(a, 'done_s', prefill_s), levelled(b, 'done_s', prefill_s))
      for a, b in pairs
    ]

  figures: list[_Figure] = [
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
    _median('bits_bf16_codebook', constants.bits_bf16_codebook, 'bit'),
    _all('equal_to_reference', [r['equal_to_reference'] for r in verified]),
    *(
      _all(
        f'equal_to_bf16_{name}',
        [r['equal_to_bf16'] for r in verified if r['scheme'] == name],
      )
      for name in ('bf16', 'int8', 'int4', 'lynx', 'lynx_exact')
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
    ('commit_lag_verify_passes', lag, 'passes', len(verified_pairs)),
    _median('done_lynx_over_int8', done(verified_pairs)),
    ('commit_lag_plain', max(plain_lags, default=None), 's', len(plain_pairs)),
    _median('done_lynx_over_int8_plain', done(plain_pairs)),
    (
      'lead_used_up_at_token',
      next((n for n, s in enumerate(plain_lags, 2) if s > 0), None),
      'token',
      len(plain_pairs),
    ),
  ]
  return [
    results.summary_record(name + suffix, *figure) for name, *figure in figures
  ]


# Name, value, unit, n, and the 90 % interval where there is one.
_Figure = tuple[Any, ...]


def commit_lags(pairs: Sequence[tuple[Record, Record]]) -> list[float]:
  """Returns by how much the first of a pair commits later, token by token.

  Times are counted from each request's own end of prefill. The list starts
  with token 2, the first of decode, and ends with the shortest output.

  Args:
    pairs: (request, the one that it is compared with).

  Returns:
    For every token the median over pairs, in seconds; negative is earlier.
  """
  rows = []
  for one, other in pairs:
    times = [
      [at - (_prefill_s(r) or 0.0) for at in (r['commit_times_s'] or ())[1:]]
      for r in (one, other)
    ]
    rows.append([a - b for a, b in zip(*times, strict=False)])
  return [statistics.median(lags) for lags in zip(*rows, strict=False)]


def acceptance(records: Iterable[Record]) -> list[dict[str, Any]]:
  """Forms the summaries of acceptance runs.

  acceptance(γ) is accepted / drafted over all full rounds of γ drafts, without
  the bonus token, as a mean over prompts.

  Args:
    records: details of `acceptance` events.
  """
  by_length: dict[int, list[Record]] = {}
  for record in records:
    by_length.setdefault(record['draft_tokens'], []).append(record)
  found = []
  for drafts, runs in by_length.items():
    rates, rounds = [], 0
    for run in runs:
      full = [pair for pair in run['rounds'] if pair[0] == drafts]
      rounds += len(full)
      if full:
        rates.append(accepted_share(full))
    name = f'acceptance_gamma{drafts}'
    mean = statistics.mean(rates) if rates else None
    found += [
      results.summary_record(name, mean, '', len(rates), *interval(rates)),
      results.summary_record(
        f'{name}_worst', min(rates, default=None), '', len(rates)
      ),
      results.summary_record(f'{name}_rounds', rounds, '', len(rates)),
      results.summary_record(
        f'{name}_distinct_4grams',
        statistics.mean(distinct_4grams(run['token_ids']) for run in runs),
        '',
        len(runs),
      ),
    ]
  return found


def accepted_share(rounds: Sequence[Sequence[int]]) -> float:
  """Returns accepted / drafted of (drafted, accepted) rounds."""
  return sum(done for _, done in rounds) / sum(tried for tried, _ in rounds)


def distinct_4grams(tokens: Sequence[int]) -> float:
  """Returns the share of 4-grams that differ: a looping text has few."""
  grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
  return len(set(grams)) / len(grams) if grams else 1.0


def interval(
  values: Sequence[float],
  share: float = 0.9,
  draws: int = 2000,
  of: Callable[[Sequence[float]], float] = statistics.median,
) -> tuple[float | None, float | None]:
  """Returns a bootstrap interval of `of`; (None, None) below 3 values.

  Efron's percentile method, with a fixed seed.
  """
  if len(values) < 3:
    return None, None
  rng = random.Random(0)
  drawn = sorted(of(rng.choices(values, k=len(values))) for _ in range(draws))
  cut = int((1 - share) / 2 * draws)
  return drawn[cut], drawn[-1 - cut]


def mean(
  name: str,
  values: Sequence[float],
  unit: str = '',
  *,
  label: str = 'measured',
) -> dict[str, Any]:
  """Returns a summary of the mean of values; of none it is of no value."""
  return results.summary_record(
    name,
    statistics.fmean(values) if values else None,
    unit,
    len(values),
    *interval(values, of=statistics.fmean),
    label=label,
  )


def over_prompts(
  figure: str, values: Sequence[float]
) -> tuple[float, float | None, float | None]:
  """Returns a figure of the fidelity study over prompts, and a 90 % interval.

  It is the mean; of `exact_match_tokens`, which ends where a text does, it is
  the median. The interval is Wilson's where every answer is right or wrong: if
  they are all the same, a bootstrap knows no error. Else it is `interval`.
  """
  if figure == 'exact_match_tokens':
    return statistics.median(values), *interval(values)
  middle = statistics.fmean(values)
  if figure in ('match', 'same_answer') and set(values) <= {0.0, 1.0}:
    return middle, *wilson(int(sum(values)), len(values))
  return middle, *interval(values, of=statistics.fmean)


def wilson(hits: int, n: int) -> tuple[float, float]:
  """Returns Wilson's 90 % interval of a proportion (JASA 22, 1927, 209)."""
  z = statistics.NormalDist().inv_cdf((1 + 0.9) / 2)
  rate, grown = hits / n, 1 + z * z / n
  middle = (rate + z * z / (2 * n)) / grown
  half = z / grown * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
  return max(0.0, middle - half), min(1.0, middle + half)


def ttft_over_bound(
  records: Sequence[Record], prefill_s: Mapping[Any, float] | None = None
) -> float | None:
  """Returns the median of TTFT over bound, formed as `summaries` says.

  Args:
    records: requests of one scheme and mode.
    prefill_s: `prefill_medians` of the run; those of `records` by default.
  """
  if prefill_s is None:
    prefill_s = prefill_medians(records)
  known = _known(_bound_ratios(records, prefill_s))
  return statistics.median(known) if known else None


def ttft_over(
  records: Sequence[Record], others: Sequence[Record]
) -> float | None:
  """Returns the median TTFT of `records` over `others`, pair by pair.

  Ratios are formed as `summaries` says, with the prefill medians of both.
  """
  prefill_s = prefill_medians([*records, *others])
  ratios = _known(
    _paired_ratios(
      records,
      others,
      lambda r: levelled(r, 'ttft_provisional_s', prefill_s),
    )
  )
  return statistics.median(ratios) if ratios else None


def prefill_medians(records: Iterable[Record]) -> dict[Any, float]:
  """Returns the median of T_p, prefill and split, by prompt."""
  found: dict[Any, list[float]] = {}
  for record in records:
    own = _prefill_s(record)
    if own is not None:
      found.setdefault(record.get('prompt'), []).append(own)
  return {prompt: statistics.median(known) for prompt, known in found.items()}


def fastest_form(records: Iterable[Record], scheme: str) -> list[Record]:
  """Returns a scheme's requests in its faster form of decoding.

  The forms are the verify program and plain one-row decode; a speculative
  scheme has the first alone. Only those count in which it ran most often: the
  median of fewer requests would be of other prompts.
  """
  forms: dict[str, list[Record]] = {}
  for record in records:
    if record['scheme'] == scheme:
      forms.setdefault(_form(record), []).append(record)

  exposed_s = {
    form: _known(
      levelled(r, 'ttft_provisional_s', {r.get('prompt'): 0.0}) for r in found
    )
    for form, found in forms.items()
  }
  most = max(map(len, exposed_s.values()), default=0)
  often = [form for form, known in exposed_s.items() if len(known) == most]
  if not often:
    return []
  return forms[min(often, key=lambda f: statistics.median(exposed_s[f] or [0]))]


def _form(record: Record) -> str:
  return record.get('form') or 'verify'


def _prefill_s(record: Record) -> float | None:
  if record['prefill_s'] is None:
    return None
  # Overlapped, split runs while prefill does and has no time of its own.
  return record['prefill_s'] + (record['split_s'] or 0.0)


def levelled(
  record: Record, name: str, prefill_s: Mapping[Any, float]
) -> float | None:
  """Returns a time with the request's own T_p replaced by its prompt's."""
  own, level = _prefill_s(record), prefill_s.get(record.get('prompt'))
  if record[name] is None or own is None or level is None:
    return None
  return record[name] - own + level


def _bound_ratios(
  records: Iterable[Record], prefill_s: Mapping[Any, float]
) -> list[float | None]:
  return [
    _ratio(
      levelled(r, 'ttft_provisional_s', prefill_s),
      levelled(r, 'bound_ttft_s', prefill_s),
    )
    for r in records
  ]


def _paired_ratios(
  one: Iterable[Record],
  other: Iterable[Record],
  value: Callable[[Record], float | None],
) -> list[float | None]:
  return [_ratio(value(a), value(b)) for a, b in _pairs(one, other)]


def _pairs(
  one: Iterable[Record], other: Iterable[Record]
) -> list[tuple[Record, Record]]:
  """Pairs requests of one prompt, link and repeat."""

  def key(record: Record):
    names = ('prompt', 'link_gbps', 'rtt_ms', 'repeat')
    return tuple(record.get(name) for name in names)

  partners = {key(record): record for record in other}
  return [(r, partners[key(r)]) for r in one if key(r) in partners]


def _ratio(value: float | None, other: float | None) -> float | None:
  return None if value is None or not other else value / other


def _known(values: Iterable[float | None]) -> list[float]:
  return [value for value in values if value is not None]


def _n(values: Iterable[Any]) -> int:
  return sum(value is not None for value in values)


def _median(
  name: str, values: Sequence[float | None], unit: str = ''
) -> _Figure:
  known = _known(values)
  median = statistics.median(known) if known else None
  return name, median, unit, len(known), *interval(known)


def _all(name: str, values: Sequence[bool | None]):
  known = [value for value in values if value is not None]
  return name, all(known) if known else None, '', len(known)
