# SPDX-License-Identifier: Apache-2.0
"""Holds peers against our readings: sizes, divergence, time, and who wins.

It runs nothing: pure functions of the records of a fidelity study. All of them
were forced on the same tokens of the same prompts with the same weights. KL of
our readings and of formulas is from bf16 KV, in our program; that of a peer's
own code from its KV in float32, in its own program.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments import peer_formulas, readings, results, summaries

Record = Mapping[str, Any]

CODING = 'coding_over_prefill'  # a figure of those who run their own code
_TTFT = 'ttft_over_int8_'  # begins the name of a summary
ALIKE = 'alike in KL'  # the interval of the difference holds 0
_HEADER = (
  'cache', 'run by', 'bits', 'MB', 'KL', 'agreement', 'coding', 'TTFT',
  'beaten by',
)  # fmt: skip
_CAPTION = (
  'Peers beside our readings, means over prompts: bits a value, MB a prompt, '
  'KL in nats, coding over prefill, TTFT over INT8'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfers:
  """What was measured of one prompt, in seconds.

  Attributes:
    prefill_s: T_p, by our own program.
    step_s: d, a decode step of INT8.
    seconds: of the transfer of each reading.
  """

  prefill_s: float
  step_s: float
  seconds: Mapping[str, float]


def wire_bytes(records: Sequence[Record], prompt: str) -> dict[str, int]:
  """Returns the bytes of every reading of a prompt."""
  return {
    record['scheme']: round(record['fidelity']['wire_bytes'])
    for record in _forced(records)
    if record['prompt'] == prompt
  }


def ttft(
  records: Sequence[Record], measured: Mapping[str, Transfers]
) -> Iterator[dict[str, Any]]:
  """Yields TTFT of a serial transfer over that of INT8.

  It is T_p + c T_p + transfer + d, each part of it measured: c is what a peer's
  own code took to quantise over its own prefill. Other codes take no time
  beside INT8's.

  Args:
    records: of requests.
    measured: by prompt.
  """
  coding = {
    (record['scheme'], record['prompt']): record['fidelity']['figures'].get(
      CODING, 0.0
    )
    for record in _forced(records)
  }
  ratios: dict[str, list[float]] = {}
  for prompt, of in measured.items():
    rest_s = of.prefill_s + of.step_s
    for reading, seconds in of.seconds.items():
      ttft_s = rest_s + coding[reading, prompt] * of.prefill_s + seconds
      ratios.setdefault(reading, []).append(
        ttft_s / (rest_s + of.seconds['int8'])
      )
  for reading, each in ratios.items():
    yield summaries.mean(f'{_TTFT}{reading}', each)


def verdicts(records: Sequence[Record]) -> Iterator[str]:
  """Yields a line a peer: which of our readings beat it, if any does."""
  means = _means(records)

  def words(name: str, alike: bool = False) -> str:
    bits, kl = means[name]
    return f'{name} ({bits:.2f} bits, KL {kl:.2g}{f", {ALIKE}" * alike})'

  for name, better in _better(records).items():
    if better:
      others = ', '.join(words(other, alike) for other, alike in better.items())
      yield f'{words(name)} is beaten by {others}'
    else:
      yield f'{words(name)} WINS: none of ours has no more bits and no more KL'


def tables(
  records: Sequence[Record],
) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
  """Returns (caption, header, rows) of the comparison; empty without peers.

  Args:
    records: of requests, with the summaries of `ttft` and the events that
      tell which peers did not run.
  """
  better = _better(records)
  not_run = _not_run(records)
  ttft = {
    record['name'].removeprefix(_TTFT): record['value']
    for record in records
    if (record.get('name') or '').startswith(_TTFT)
  }
  if not better and not not_run:
    return []
  rows: list[tuple[str, ...]] = []
  for name, (bits, kl) in _means(records).items():
    own = [r for r in _forced(records) if r['scheme'] == name]
    found = [r['fidelity'] for r in own]
    beaten = ''
    if name in better:
      others = [
        f'{other} ({ALIKE})' if alike else other
        for other, alike in better[name].items()
      ]
      beaten = ', '.join(others) or 'none: it wins'
    rows.append(
      (
        name,
        _run_by(name, own[0]),
        f'{bits:.2f}',
        _mean([f.get('wire_bytes') for f in found], '.2f', 1e-6),
        f'{kl:.2g}',
        _mean([f['figures']['agreement'] for f in found], '.3f'),
        _mean([f['figures'].get(CODING) for f in found], '.3f'),
        _mean([ttft.get(name)], '.3f'),
        beaten,
      )
    )
  rows += [
    (name, 'not run', *('–',) * (len(_HEADER) - 3), '') for name in not_run
  ]
  return [(_CAPTION, _HEADER, rows)]


def notes(records: Sequence[Record]) -> Iterator[str]:
  """Yields what a reader must know of peers, and which did not run."""
  ran: dict[str, str] = {}
  for record in records:
    if record.get('name') == results.PEERS:
      ran |= record['detail']['versions']
  if ran:
    packages = ', '.join(f'{name} {version}' for name, version in ran.items())
    yield (
      'Peers that ran their own code are held against themselves with KV in '
      f'float32, on the same weights and token ids ({packages}).'
    )
  for name, why in _not_run(records).items():
    yield f'{name} did not run: {why}'


def _not_run(records: Iterable[Record]) -> dict[str, str]:
  """Returns why peers did not run, by name, as the last run has it."""
  found: dict[str, str] = {}
  for record in records:
    if record.get('name') == results.PEERS:
      found = record['detail']['not_run']
  return found


def _run_by(name: str, record: Record) -> str:
  if record['target'] != readings.PEER:
    return 'us'
  return 'formula' if name in peer_formulas.FORMULAS else 'own code'


def _mean(values: Sequence[float | None], form: str, unit: float = 1.0) -> str:
  """Returns a mean as tables have it; what is not known is a dash."""
  known = [value for value in values if value is not None]
  if len(known) < len(values):
    return '–'
  return format(statistics.fmean(known) * unit, form)


def _forced(records: Iterable[Record]) -> Iterator[Record]:
  for record in records:
    if (record.get('fidelity') or {}).get('part') == 'forced':
      yield record


def _means(records: Iterable[Record]) -> dict[str, tuple[float, float]]:
  """Returns bits and KL of every reading, as means over prompts."""
  found: dict[str, list[tuple[float, float]]] = {}
  for record in _forced(records):
    own = record['fidelity']
    found.setdefault(record['scheme'], []).append(
      (own['bits'], own['figures']['kl'])
    )
  return {
    name: (
      statistics.fmean(bits for bits, _ in values),
      statistics.fmean(kl for _, kl in values),
    )
    for name, values in found.items()
  }


def _better(records: Sequence[Record]) -> dict[str, dict[str, bool]]:
  """Returns our readings with no more bits and no more KL than each peer.

  Returns:
    By peer and reading whether their KL is alike: the 90 % interval of the mean
    difference over the prompts of both holds 0, so that the bits decide. Below
    3 prompts there is no interval, and the means alone are compared.
  """
  means, kl = _means(records), dict[str, dict[str, float]]()
  for record in _forced(records):
    of = kl.setdefault(record['scheme'], {})
    of[record['prompt']] = record['fidelity']['figures']['kl']
  peers = {
    r['scheme'] for r in _forced(records) if r['target'] == readings.PEER
  }
  found: dict[str, dict[str, bool]] = {name: {} for name in kl if name in peers}
  for name, better in found.items():
    for other in kl:
      if other in peers or means[other][0] > means[name][0]:
        continue
      low, high = summaries.interval(
        [kl[name][p] - kl[other][p] for p in kl[name] if p in kl[other]],
        of=statistics.fmean,
      )
      alike = low is not None and high is not None and low <= 0 <= high
      if alike or means[other][1] <= means[name][1]:
        better[other] = alike
  return found
