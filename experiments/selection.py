# SPDX-License-Identifier: Apache-2.0
"""Requests with their events, and which of them a report shows.

It draws nothing and reads no file.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments import summaries

Record = Mapping[str, Any]

MODES = ('serial', 'overlapped')
# From the slowest baseline to what is to be shown; others follow.
SCHEMES = (
  'bf16', 'bf16_layers', 'prefill_continues', 'int8', 'int8_layers',
  'int8_lookup', 'int4', 'kivi4', 'interleaved', 'lynx_2bit',
  'lynx_exact', 'lynx',
)  # fmt: skip
# Rates of one prompt farther apart than this are a sweep, not calibration.
SWEEP = 1.5


@dataclasses.dataclass(frozen=True)
class Trace:
  """A request: its record, and the events of its timeline."""

  record: Record
  events: Sequence[Record] = ()

  def __getitem__(self, field: str) -> Any:
    return self.record.get(field)

  def spans(self, phase: str) -> list[Record]:
    """Returns the events of one name, by start."""
    found = [e for e in self.events if e['name'] == phase]
    return sorted(found, key=lambda e: (e['start_s'], e['end_s']))

  @property
  def is_speculative(self) -> bool:
    """Whether it drafts on a part of the cache."""
    return bool(
      self['bytes_residual'] or self.spans('residual') or self.spans('draft')
    )

  @property
  def prefill_end_s(self) -> float | None:
    """T_p; None if prefill did not end."""
    if self['prefill_s'] is not None:
      return self['prefill_s'] + (self['split_s'] or 0.0)
    ends = [
      e['end_s'] for e in self.events if e['name'] in ('prefill', 'split')
    ]
    return max(ends, default=None)

  @property
  def is_done(self) -> bool:
    """Whether it came to a good end."""
    return self['done_s'] is not None and not self['error']


def setting(traces: Sequence[Trace]) -> list[Trace]:
  """Returns the traces of one rate and round trip.

  Where prompts have rates of their own, set for the share, they stay together.
  In a sweep it is the rate whose share is nearest 60 %, the one that the
  latency study sets, or the middle one; the round trip is the most frequent.
  """
  trips = [t['rtt_ms'] for t in traces]
  if not trips:
    return []
  trip = max(dict.fromkeys(trips), key=trips.count)
  traces = [t for t in traces if t['rtt_ms'] == trip]
  if not is_sweep(traces):
    return traces
  rates = sorted({t['link_gbps'] for t in traces if t['link_gbps']})

  def distance(rate: float) -> tuple[float, float]:
    shares = [t['share'] for t in traces if t['link_gbps'] == rate]
    known = [s for s in shares if s is not None]
    middle = abs(math.log(rate / rates[len(rates) // 2]))
    return (abs(statistics.median(known) - 0.6) if known else 1.0), middle

  best = min(rates, key=distance)
  return [
    t
    for t in traces
    if t['link_gbps'] and abs(math.log(t['link_gbps'] / best)) < math.log(1.1)
  ]


def is_sweep(traces: Iterable[Trace]) -> bool:
  """Whether some prompt ran at rates that differ for other than noise."""
  rates: dict[Any, list[float]] = {}
  for trace in traces:
    if trace['link_gbps']:
      rates.setdefault(trace['prompt'], []).append(trace['link_gbps'])
  return any(max(r) > SWEEP * min(r) for r in rates.values())


def one_request_each(traces: Sequence[Trace]) -> list[Trace]:
  """Returns a request a scheme, all of one prompt and repeat.

  It is the pair with the most schemes and, of those, with the least time of
  prefill, which is the same work in all: other programs disturbed it least.
  """
  traces = [t for t in traces if t.prefill_end_s is not None and t.events]
  pairs: dict[Any, dict[str, Trace]] = {}
  for name in ordered({t['scheme'] for t in traces}, SCHEMES):
    for trace in fastest(traces, name):
      pair = trace['prompt'], trace['link_gbps'], trace['repeat']
      pairs.setdefault(pair, {})[name] = trace
  if not pairs:
    return []
  most = max(len(pair) for pair in pairs.values())
  full = [list(pair.values()) for pair in pairs.values() if len(pair) == most]
  return min(full, key=lambda pair: sum(t.prefill_end_s or 0.0 for t in pair))


def ordered(names: Iterable[Any], first: Sequence[str]) -> list[str]:
  """Returns names: those of `first` in its order, then the others by name."""
  names = set(names) - {None}
  return [n for n in first if n in names] + sorted(names - set(first))


def modes(traces: Iterable[Trace]) -> list[str]:
  """Returns the modes that occur, serial first."""
  return ordered({t['mode'] for t in traces}, MODES)


def fastest(traces: Sequence[Trace], scheme: str) -> list[Trace]:
  """Returns a scheme's requests in its faster form; see `summaries`."""
  traces = [t for t in traces if t['scheme'] == scheme]
  by_id = {id(t.record): t for t in traces}
  records = [t.record for t in traces]
  return [by_id[id(r)] for r in summaries.fastest_form(records, scheme)]


def median_prefill_s(traces: Iterable[Trace]) -> float | None:
  """Returns the median of T_p over prompts, each with its own median."""
  known = prefill_medians(traces).values()
  return statistics.median(known) if known else None


def prefill_medians(traces: Iterable[Trace]) -> dict[Any, float]:
  """Returns the median of T_p, by prompt."""
  found = collections.defaultdict(list)
  for trace in traces:
    if trace.prefill_end_s is not None:
      found[trace['prompt']].append(trace.prefill_end_s)
  return {prompt: statistics.median(known) for prompt, known in found.items()}


def levelled(
  traces: Iterable[Trace], field: str, prefill_s: Mapping[Any, float]
) -> list[float]:
  """Returns times with each T_p replaced by its prompt's; see `summaries`.

  Args:
    traces: whose times.
    field: which time.
    prefill_s: `prefill_medians` of all that are compared.
  """
  return [
    t[field] - t.prefill_end_s + prefill_s[t['prompt']]
    for t in traces
    if t[field] is not None and t.prefill_end_s is not None
  ]


def counts(trace: Trace) -> tuple[list[float], list[int], list[int]]:
  """Returns times, and the tokens committed and shown from each on.

  Commits are those of `commit_times_s`; shown are those and the backlog, which
  the events of drafting and verifying count as it was after them.
  """
  moments: list[tuple[float, int, int]] = []
  for count, at_s in enumerate(trace['commit_times_s'] or (), 1):
    moments.append((at_s, 0, count))
  for e in trace.events:
    backlog = (e.get('detail') or {}).get('backlog')
    if e['name'] in ('draft', 'verify') and backlog is not None:
      moments.append((e['end_s'], 1, backlog))
  times, committed, shown = [0.0], [0], [0]
  for at_s, is_shown, count in sorted(moments):
    times.append(at_s)
    if is_shown:
      committed.append(committed[-1])
      shown.append(committed[-1] + count)
    else:
      committed.append(count)
      shown.append(max(shown[-1], count))
  return times, committed, shown
