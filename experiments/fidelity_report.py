# SPDX-License-Identifier: Apache-2.0
"""What the records of a fidelity study say: summaries, tables and notes.

It measures nothing: all of it is a pure function of records.
"""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments import results, summaries
from experiments.peers import comparison

Record = dict[str, Any]

BENCHMARKS = ('longbench', 'ruler')  # which publish percentages
_UNITS = {
  'kl': 'nats',
  'nll': 'nats',
  'nll_over_bf16': 'nats',
  'bits': 'bits',
  'exact_match_tokens': 'tokens',
}


def figures_of(
  records: Iterable[Mapping[str, Any]], drafts: int
) -> Iterator[Record]:
  """Yields a summary of every figure, over prompts, with a 90 % interval.

  Args:
    records: of requests.
    drafts: γ.
  """
  # By the name of a summary, the figure, and whether it is a percentage.
  groups: dict[tuple[str, str, bool], list[float]] = {}
  rounds: dict[str, list[Mapping[str, Any]]] = {}
  for record in records:
    found, reading = record['fidelity'], record['scheme']
    if found['part'] == 'acceptance':
      rounds.setdefault(reading, []).append(record)
      continue
    percent = found['part'] in BENCHMARKS
    figures = dict(found['figures'])
    if found['part'] == 'forced':
      figures['bits'] = found['bits']
    for figure, value in figures.items():
      names = [f'{figure}_{reading}']
      if found['task']:
        names = [f'{figure}_{found["part"]}_{reading}']
        if figure != 'match_over_bf16':
          part = f'{found["part"]}_' if percent else ''
          names.append(f'{figure}_{part}{found["task"]}_{reading}')
      for name in names:
        groups.setdefault((name, figure, percent), []).append(value)
  for (name, figure, percent), values in groups.items():
    numbers: Iterable[Any] = summaries.over_prompts(figure, values)
    if percent:
      numbers = (None if x is None else 100 * x for x in numbers)
    middle, low, high = numbers
    yield results.summary_record(
      name,
      middle,
      '%' if percent else _UNITS.get(figure, ''),
      len(values),
      low,
      high,
    )
  for reading, runs in rounds.items():
    yield from _acceptance(reading, runs, drafts)


def _acceptance(
  reading: str, runs: Sequence[Mapping[str, Any]], drafts: int
) -> Iterator[Record]:
  """Yields acceptance, and how much of it is left at each position.

  At position i are accepted those rounds that accept i drafts or more.
  """
  details = [dict(run) | {'draft_tokens': drafts} for run in runs]
  for record in summaries.acceptance(details):
    yield record | {'name': f'{record["name"]}_{reading}'}
  for position in range(1, drafts + 1):
    shares = [
      statistics.fmean(done >= position for _, done in run['rounds'])
      for run in runs
      if run['rounds']
    ]
    if shares:
      yield summaries.mean(
        f'acceptance_gamma{drafts}_position{position}_{reading}', shares
      )


def draw(records: Sequence[Mapping[str, Any]]) -> list[Any]:
  """Draws the parts for which there are records."""
  from experiments import drawing, selection
  from experiments.figures import fidelity

  traces = [selection.Trace(r) for r in records if r.get('fidelity')]
  with drawing.look():
    return fidelity.draw(traces, drawing.styles_of(traces))


# Title, figure and form of the columns in a table of readings.
_COLUMNS = (
  ('bits', 'bits', '.2f'),
  ('KL, nats', 'kl', '.2g'),
  ('agreement', 'agreement', '.3f'),
  ('NLL over bf16, nats', 'nll_over_bf16', '.4f'),
  ('exact match, tokens', 'exact_match_tokens', '.0f'),
  ('task score', 'match_tasks', '.2f'),
  ('same answer as bf16', 'same_answer_tasks', '.2f'),
)


def tables(records: Sequence[Mapping[str, Any]]) -> list[Any]:
  """Returns a table of all readings, and of peers if there were any."""
  known = {r['name']: r for r in records if r['kind'] == 'summary'}
  readings_of = [
    name.removeprefix('kl_') for name in known if name.startswith('kl_')
  ]
  rows = [
    (
      name,
      *(
        _cell(known.get(f'{figure}_{name}'), form)
        for _, figure, form in _COLUMNS
      ),
    )
    for name in readings_of
  ]
  if not rows:
    return comparison.tables(records)
  header = ('reading', *(title for title, _, _ in _COLUMNS))
  caption = 'Readings: means over prompts, of lengths medians; 90 % intervals'
  return [(caption, header, rows), *comparison.tables(records)]


def _cell(summary: Mapping[str, Any] | None, form: str) -> str:
  """Returns a figure with its interval; one that does not vary has none."""
  if summary is None:
    return '–'
  middle, low, high = (
    None if summary[part] is None else format(summary[part], form)
    for part in ('value', 'low', 'high')
  )
  if low is None or high is None or low == middle == high:
    return str(middle)
  return f'{middle} ({low} – {high})'


def notes(records: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns what readings are, and what the figures can and cannot show."""
  limits = dict.fromkeys(
    record['detail']['limits']
    for record in records
    if record.get('name') == results.FIDELITY and record['kind'] == 'event'
  )
  return [
    'A reading is what the decode side reads of a prompt: lynx_anchor is the '
    'Anchor alone, lynx all planes. Where a reading equals another one bit by '
    'bit, so does its output, and it was not run again.',
    *limits,
    *comparison.notes(records),
  ]
