# SPDX-License-Identifier: Apache-2.0
"""The latency study: what the records of its requests add up to.

The figures are a pure function of records and measured constants, so that they
can be formed again from any `results.jsonl`.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments import config, display, results

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
  """What a study measures besides its requests; None is not measured.

  Attributes:
    anchor_step_s: one decode step that reads Anchors alone.
    bf16_step_s: one decode step of the same engine on a dense prefix.
    steps: how many steps of each the two medians are of.
    bits_anchor_worst_length: bits a value of the Anchor at the prompt length
      with the longest ragged group.
    recompiles_after_warmup: compilations while requests ran.
    fetches_per_draft_round: host reads in one draft round.
    draft_rounds: how many rounds that is the mean of.
  """

  anchor_step_s: float | None = None
  bf16_step_s: float | None = None
  steps: int = 0
  bits_anchor_worst_length: float | None = None
  recompiles_after_warmup: int | None = None
  fetches_per_draft_round: float | None = None
  draft_rounds: int = 0


def run(
  settings: config.Settings, writer: results.Writer, screen: display.Screen
) -> None:
  """Runs the study and writes its records."""
  raise NotImplementedError


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
  step_ratio = _ratio(constants.anchor_step_s, constants.bf16_step_s)
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
    ('anchor_step_over_bf16_step', step_ratio, '', constants.steps),
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
