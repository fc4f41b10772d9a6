# SPDX-License-Identifier: Apache-2.0
"""What the records of an ablation say: its cells as rows of figures.

It runs nothing and draws nothing: rows are a pure function of records, so that
they can be formed again from any `results.jsonl`, a merged one too.
"""

import collections
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments import results
from experiments import summaries as summaries_lib
from experiments.config import Cell

Record = Mapping[str, Any]
Row = dict[str, Any]

# Figures of a row, in the order of tables: their titles, and the digits shown.
FIGURES = {
  'ttft_provisional_s': ('TTFT, s', 3),
  'bound_ttft_s': ('bound, s', 3),
  'ttft_over_bound': ('TTFT / bound', 3),
  'ttft_committed_s': ('committed, s', 3),
  'done_s': ('last token, s', 3),
  'acceptance': ('acceptance', 3),
  'retracted': ('retracted', 1),
  'bits_anchor': ('Anchor, bits', 2),
  'bits_total': ('all, bits', 2),
  'kl_anchor': ('KL(target ‖ Anchor), nats', 5),
  'kl_anchor_from_bf16': ('KL(bf16 ‖ Anchor), nats', 5),
  'kl_target_from_bf16': ('KL(bf16 ‖ target), nats', 5),
}
# As many as a terminal has room for.
BRIEF = (
  'ttft_provisional_s', 'ttft_over_bound', 'acceptance', 'bits_anchor',
  'kl_anchor_from_bf16',
)  # fmt: skip
_MEDIANS = (
  'ttft_provisional_s', 'bound_ttft_s', 'ttft_committed_s', 'done_s',
  'prefill_s', 'split_s', 'retracted', 'bits_anchor', 'bits_total',
)  # fmt: skip
# What tells apart rows of one cell, by the field that lists them.
_OWN = {'scheme': 'scheme', 'mode': 'mode', 'prompt_file': 'prompt'}
_ALIKE = (*_OWN.values(), 'model', 'prompt_tokens', 'link_gbps', 'rtt_ms')


def measured(
  requests: Iterable[Record],
  divergences: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> list[Row]:
  """Forms the rows of one cell, one for each scheme, mode and prompt.

  Args:
    requests: of the cell.
    divergences: figures of KL by scheme and prompt; empty if not measured.
  """
  groups: dict[Any, list[Record]] = {}
  for record in requests:
    key = tuple(record[name] for name in _ALIKE)
    groups.setdefault(key, []).append(record)
  return [
    dict(zip(_ALIKE, key, strict=True))
    | {name: _median(group, name) for name in _MEDIANS}
    | {
      'n': len(group),
      'device': group[0]['device'],
      'ttft_over_bound': summaries_lib.ttft_over_bound(group),
      'acceptance': _acceptance(group),
      'equal_to_reference': _all_equal(group),
      **divergences.get(group[0]['scheme'], {}).get(group[0]['prompt'], {}),
    }
    for key, group in groups.items()
  ]


def _median(group: Sequence[Record], name: str) -> float | None:
  known = [r[name] for r in group if r[name] is not None]
  return statistics.median(known) if known else None


def _acceptance(group: Sequence[Record]) -> float | None:
  drafted = sum(r['drafted'] for r in group)
  return sum(r['accepted'] for r in group) / drafted if drafted else None


def _all_equal(group: Iterable[Record]) -> bool | None:
  known = [
    r['equal_to_reference']
    for r in group
    if r['equal_to_reference'] is not None
  ]
  return all(known) if known else None


def written(records: Iterable[Record]) -> Mapping[str, Any]:
  """Returns what the last run to its end has said of all cells."""
  found = [r['detail'] for r in records if r.get('name') == results.ROWS]
  return found[-1] if found else {'rows': [], 'unfinished': [], 'heatmaps': []}


def last(records: Iterable[Record]) -> dict[str, Mapping[str, Any]]:
  """Returns how every cell ended the last time that it was run, by key."""
  return {
    r['request']: r['detail']
    for r in records
    if r.get('kind') == 'event' and r.get('name') == results.CELL
  }


def finished(records: Iterable[Record]) -> dict[str, Mapping[str, Any]]:
  """Returns the cells that need not be run again, by key."""
  return {
    key: detail
    for key, detail in last(records).items()
    if 'error' not in detail
  }


def unfinished(
  records: Sequence[Record], cells: Sequence[Cell]
) -> list[list[str]]:
  """Returns name and reason of the cells without a result."""
  ended = last(records)
  found = []
  for cell in cells:
    how = ended.get(cell.key, {'error': 'not run yet'})
    if 'error' in how:
      found.append([cell.name, how['error']])
  return found


def requests(records: Iterable[Record]) -> dict[str, list[Record]]:
  """Returns the requests of every cell by key: the last ones of each name.

  A run that was killed while it wrote may have left some of an earlier try.
  """
  found: dict[str, dict[str, Record]] = collections.defaultdict(dict)
  for record in records:
    if record.get('kind') == 'request':
      found[record['request'].partition('/')[0]][record['request']] = record
  return {key: [*by_name.values()] for key, by_name in found.items()}


def form(records: Sequence[Record], cells: Sequence[Cell]) -> list[Row]:
  """Returns the rows of all finished cells, in the order of the cells.

  Each has `values`, what the fields are that differ between rows, and a `name`.
  """
  known = finished(records)
  found: list[Row] = []
  for cell in cells:
    for row in known.get(cell.key, {}).get('rows', ()):
      own = {field: row[name] for field, name in _OWN.items()}
      found.append({**row, 'cell': cell.key, 'values': dict(cell.values) | own})
  fields = [
    field
    for field in (found[0]['values'] if found else ())
    if len({str(row['values'][field]) for row in found}) > 1
  ]
  for row in found:
    row['values'] = {field: row['values'][field] for field in fields}
  for row in found:
    row['name'] = name(row, usual(found))
  return found


def usual(found: Sequence[Row]) -> dict[str, Any]:
  """Returns the fields that have one value in more than half of the rows."""
  common = {}
  for field in found[0]['values'] if found else ():
    values = [row['values'][field] for row in found]
    value = max(values, key=values.count)
    if 2 * values.count(value) > len(values):
      common[field] = value
  return common


def name(
  row: Row, known: Mapping[str, Any], without: Sequence[str] = ()
) -> str:
  """Returns what makes a row unlike the usual one, `base`.

  Args:
    row: with `values`.
    known: what `usual` says of all rows.
    without: fields that need no mention.
  """
  told = {
    field: value
    for field, value in row['values'].items()
    if field not in without and not (field in known and known[field] == value)
  }
  return label(told) or 'base'


def label(values: Mapping[str, Any]) -> str:
  """Returns values for people; fields of one value share it.

  `{'codec.k': '4,4', 'codec.v': '4,4', 'scheme': 'lynx'}` is `lynx, k=v=4,4`.
  """
  by_value: dict[str, list[str]] = {}
  for field, value in values.items():
    name = '' if field in _OWN else field.rpartition('.')[2]
    by_value.setdefault(str(value), []).append(name)
  return ', '.join(
    '='.join([*filter(None, dict.fromkeys(names)), value])
    for value, names in by_value.items()
  )


def shown(row: Row, figure: str) -> str:
  """Returns a figure as tables have it."""
  value = row.get(figure)
  return '–' if value is None else f'{value:,.{FIGURES[figure][1]}f}'


def table(
  found: Sequence[Row], figures: Iterable[str] = FIGURES
) -> tuple[list[str], list[list[str]]]:
  """Returns header and lines of a table of all rows, known figures only."""
  figures = [name for name in known_figures(found) if name in figures]
  header = [
    'cell',
    *(FIGURES[figure][0] for figure in figures),
    'n',
    'equals reference',
  ]
  words = {True: 'yes', False: 'NO', None: '–'}
  return header, [
    [
      row['name'],
      *(shown(row, figure) for figure in figures),
      str(row['n']),
      words[row['equal_to_reference']],
    ]
    for row in found
  ]


def effects(found: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
  """Returns header and lines of a table of all fields: medians a value.

  They are over rows that differ from those of another value in the one field
  alone; see `matched`.
  """
  figures = known_figures(found)
  lines = []
  for fields in axes(found):
    for (value,), group in matched(found, [fields]).items():
      medians = {
        figure: statistics.median(known)
        for figure in figures
        if (known := [r[figure] for r in group if r.get(figure) is not None])
      }
      lines.append(
        [
          f'{", ".join(fields)} = {value}',
          *(shown(medians, figure) for figure in figures),
          str(len(group)),
        ]
      )
  return ['', *(FIGURES[figure][0] for figure in figures), 'rows'], lines


def axes(found: Sequence[Row]) -> list[tuple[str, ...]]:
  """Returns the fields that differ; those that are equal throughout are one."""
  by_values: dict[Any, list[str]] = {}
  for field in found[0]['values'] if found else ():
    values = tuple(str(row['values'][field]) for row in found)
    by_values.setdefault(values, []).append(field)
  return [tuple(fields) for fields in by_values.values()]


def matched(
  found: Sequence[Row], along: Sequence[Sequence[str]]
) -> dict[tuple[str, ...], list[Row]]:
  """Groups rows by the values on some axes, so that nothing else differs.

  Of every group it keeps the rows whose other values occur in all groups; so
  groups can be compared. If there are none, it returns {}.

  Args:
    found: rows.
    along: of `axes`.
  """
  free = {field for fields in along for field in fields}
  groups: dict[tuple[str, ...], dict[Any, list[Row]]] = {}
  for row in found:
    key = tuple(str(row['values'][fields[0]]) for fields in along)
    rest = tuple(
      str(value) for field, value in row['values'].items() if field not in free
    )
    groups.setdefault(key, {}).setdefault(rest, []).append(row)
  common = set.intersection(*map(set, groups.values())) if groups else set()
  if not common:
    return {}
  return {
    key: [row for rest, part in rows.items() if rest in common for row in part]
    for key, rows in groups.items()
  }


def known_figures(found: Sequence[Row]) -> list[str]:
  """Returns the figures that some row has."""
  return [
    name for name in FIGURES if any(row.get(name) is not None for row in found)
  ]


def summaries(
  records: Sequence[Record], cells: Sequence[Cell]
) -> list[dict[str, Any]]:
  """Forms the `summary` records: what must hold in every cell."""
  found, ended = form(records, cells), last(records)
  keys = dict.fromkeys(cell.key for cell in cells)
  mine = [ended[key] for key in keys if key in ended]
  done = [detail for detail in mine if 'error' not in detail]
  ratios = [
    row['ttft_over_bound']
    for row in found
    if row['ttft_over_bound'] is not None
  ]
  equal = _all_equal(found)
  summary = results.summary_record
  return [
    summary('cells', len(keys), '', len(keys)),
    summary('cells_finished', len(done), '', len(keys)),
    summary('cells_failed', len(mine) - len(done), '', len(keys)),
    summary('cells_s', sum(d['seconds'] for d in done), 's', len(done)),
    summary('engines_made', sum(d['engines'] for d in done), '', len(done)),
    summary(
      'recompiles_after_warmup',
      sum(d['recompiles'] for d in done) if done else None,
      '',
      len(done),
    ),
    summary(
      'ttft_over_bound_median',
      statistics.median(ratios) if ratios else None,
      '',
      len(ratios),
      *summaries_lib.interval(ratios),
    ),
    summary('ttft_over_bound_max', max(ratios, default=None), '', len(ratios)),
    summary(
      'equal_to_reference',
      equal,
      '',
      sum(row['equal_to_reference'] is not None for row in found),
    ),
  ]
