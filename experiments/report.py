# SPDX-License-Identifier: Apache-2.0
"""Makes `report.html` and its PNGs from the records of a work directory.

    python -m experiments.report --workdir=runs/demo

It runs nothing and measures nothing: the same records give the same report.
The page holds its figures, so that it can be sent as one file and opens
without a network.
"""

import base64
import collections
import contextlib
import html
import io
import json
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import flags

from experiments import results

FILE = 'report.html'

USER_MISTAKE = 2
INTERRUPTED = 130

Record = Mapping[str, Any]


_EARLIER = (
  '<p>{runs} earlier run(s) in the same records are not shown; give each run '
  'a --workdir of its own to keep their reports.</p>'
)


class ReportError(Exception):
  """There is nothing to report; the message says what to do."""


def write(workdir: str | os.PathLike[str]) -> pathlib.Path:
  """Writes the report of a work directory next to its records.

  Args:
    workdir: where `results.jsonl` is.

  Returns:
    The path of `report.html`.

  Raises:
    ReportError: the records show nothing, or a line of them is broken.
    OSError: a file cannot be read or written.
  """
  folder = pathlib.Path(workdir)
  page, images = render(read(folder / results.FILE))
  for name, data in images.items():
    _replace(folder / name, data)
  path = folder / FILE
  _replace(path, page.encode('utf-8'))
  return path


def render(records: Iterable[Record]) -> tuple[str, dict[str, bytes]]:
  """Forms the page and its images; a pure function of the records.

  A study of `studies.MODULES` draws its own figures, by `draw(records)` of its
  module; it may have none. All others are of requests with their events.

  Args:
    records: as `results.read` yields them. A run begins with the event `run`
      (`results.run_record`); of several runs the last is shown.

  Returns:
    The text of the page, and PNGs by file name.

  Raises:
    ReportError: there is nothing to show among them.
  """
  from experiments import figures, studies

  whole = list(records)
  records, earlier = last_run(whole)
  note = [_EARLIER.format(runs=earlier)] if earlier else []
  study = _study(records)
  if resumes(records):
    return _study_page(study, records, (), whole)
  if study in studies.MODULES:
    return _study_page(study, records, note, records)
  groups = grouped(records)
  runs = acceptance_runs(records)
  if not groups:
    raise ReportError('there is no request in the records; run a study first')
  images: dict[str, bytes] = {}
  parts = []
  for (study, model), group in groups.items():
    prefix = f'{_slug(study)}-{_slug(model)}-' if len(groups) > 1 else ''
    parts.append(f'<h2>{_text(study or "study")}: {_text(model or "")}</h2>')
    parts.append(_comparison(group))
    for drawn in figures.draw(group, runs.get((study, model), ())):
      parts.append(_drawn(drawn, f'{prefix}{drawn.name}.png', images))
    parts.append(_requests(group))
  everything = [trace for group in groups.values() for trace in group]
  body = [
    _head(everything),
    *_summaries(records),
    *note,
    *parts,
    *_origin(records, everything),
  ]
  title = ', '.join(dict.fromkeys(str(study) for study, _ in groups))
  return _PAGE.format(title=_text(title), body='\n'.join(body)), images


def gather(
  workdir: str | os.PathLike[str],
  studies: Mapping[str, tuple[str, Sequence[Record], Sequence[Any]]],
) -> pathlib.Path:
  """Writes one report of several studies, and their records beside it.

  Args:
    workdir: is made where it does not exist; what it holds is replaced.
    studies: by name a title, the records, and the figures to show.

  Returns:
    The path of `report.html`. In `results.jsonl` are the requests and the
    summaries, whose names begin with that of their study and a slash.

  Raises:
    OSError: a file cannot be written.
  """
  folder, images = pathlib.Path(workdir), dict[str, bytes]()
  body, lines = ['<h1>Figures</h1>'], []
  for study, (title, records, figures) in studies.items():
    body.append(f'<h2>{_text(study)}: {_text(title)}</h2>')
    body += [_drawn(drawn, f'{drawn.name}.png', images) for drawn in figures]
    body += _summaries(records)
    for record in records:
      if record['kind'] == 'summary':
        record = {**record, 'name': f'{study}/{record["name"]}'}
      if record['kind'] in ('summary', 'request'):
        lines.append(json.dumps(record) + '\n')
  folder.mkdir(parents=True, exist_ok=True)
  for name, data in images.items():
    _replace(folder / name, data)
  _replace(folder / results.FILE, ''.join(lines).encode('ascii'))
  page = _PAGE.format(title='figures', body='\n'.join(body))
  _replace(folder / FILE, page.encode('utf-8'))
  return folder / FILE


def tables(records: Sequence[Record]) -> list[Any]:
  """Returns (caption, header, rows) of every table of a run's study."""
  from experiments import studies

  study = _study(records)
  if study not in studies.MODULES:
    return []
  module = studies.load(study)
  return module.tables(records) if hasattr(module, 'tables') else []


def drawings(records: Sequence[Record]) -> list[Any]:
  """Returns every figure of one run, whichever study it is of."""
  from experiments import figures, studies

  study = _study(records)
  if study in studies.MODULES:
    module = studies.load(study)
    return module.draw(records) if hasattr(module, 'draw') else []
  runs = acceptance_runs(records)
  return [
    drawn
    for key, group in grouped(records).items()
    for drawn in figures.draw(group, runs.get(key, ()))
  ]


def grouped(records: Iterable[Record]) -> dict[Any, list[Any]]:
  """Returns the traces of every (study, model)."""
  groups: dict[Any, list[Any]] = {}
  for trace in traces(records):
    groups.setdefault((trace['study'], trace['model']), []).append(trace)
  return groups


def resumes(records: Iterable[Record]) -> bool:
  """Whether a run's study goes on where it stopped, so that all runs count."""
  from experiments import studies

  study = _study(records)
  return study in studies.MODULES and getattr(
    studies.load(study), 'RESUMES', False
  )


def _study(records: Iterable[Record]) -> Any:
  """Returns the study that a run's config names; None without a run."""
  for record in records:
    if _is_event(record, 'run'):
      return (record['detail'].get('config') or {}).get('study')
  return None


def _study_page(
  study: str,
  records: Sequence[Record],
  note: Sequence[str],
  shown: Sequence[Record],
) -> tuple[str, dict[str, bytes]]:
  """Returns page and images of a study that draws its own figures.

  Args:
    study: its name.
    records: of the last run.
    note: what to say of those before.
    shown: records that figures show.
  """
  from experiments import studies

  summaries = _summaries(records)
  if not summaries:
    raise ReportError('there is no summary in the records; run a study first')
  images: dict[str, bytes] = {}
  figures = drawings(shown)
  module = studies.load(study)
  notes = module.notes(records) if hasattr(module, 'notes') else []
  body = [
    f'<h1>{_text(study.replace("_", " ").capitalize())}</h1>',
    f'<p>{_text(studies.subject(module))}</p>',
    *(f'<p class="note">{_text(words)}</p>' for words in notes),
    *note,
    *(_drawn(drawn, f'{drawn.name}.png', images) for drawn in figures),
    *(_table(*table) for table in tables(shown)),
    *summaries,
    *_origin(records, ()),
  ]
  return _PAGE.format(title=_text(study), body='\n'.join(body)), images


def _drawn(drawn: Any, name: str, images: dict[str, bytes]) -> str:
  """Returns the section of a figure, and adds its PNG to `images`."""
  from experiments import drawing

  svg = io.BytesIO()
  images[name] = drawing.png(drawn)
  drawing.save(drawn, svg, 'svg')
  return _figure(drawn, name, svg.getvalue())


def traces(records: Iterable[Record]) -> list[Any]:
  """Puts requests together with their events.

  A file may hold several runs, whose requests have the same names: an event
  belongs to the last request of its name, or to the next if there is none.
  """
  from experiments import selection

  found: list[tuple[dict[str, Any], list[Record]]] = []
  last: dict[str, list[Record]] = {}
  for record in records:
    name = json.dumps(record.get('request'), sort_keys=True)
    if record.get('kind') == 'event':
      last.setdefault(name, []).append(record)
    elif record.get('kind') == 'request':
      early = last.get(name)
      taken = early is None or any(early is events for _, events in found)
      events: list[Record] = [] if early is None or taken else early
      last[name] = events
      # Records of other versions may lack fields: they are not known.
      fields = dict.fromkeys(results.REQUEST_FIELDS) | dict(record)
      found.append((fields, events))
  return [selection.Trace(record, tuple(events)) for record, events in found]


def acceptance_runs(records: Iterable[Record]) -> dict[Any, list[Record]]:
  """Returns acceptance runs by the study and model that they belong to."""
  found: dict[Any, list[Record]] = {}
  key: Any = None
  for record in records:
    if record.get('kind') == 'request':
      key = record.get('study'), record.get('model')
    elif _is_event(record, 'acceptance'):
      found.setdefault(key, []).append(record['detail'])
  return found


def last_run(records: list[Record]) -> tuple[list[Record], int]:
  """Returns the records of the last run, and how many runs come before it."""
  starts = [i for i, r in enumerate(records) if _is_event(r, 'run')]
  if not starts:
    return records, 0
  last, before = records[starts[-1] :], records[: starts[-1]]
  versions = {
    r['detail']['version'] for r in last if _is_event(r, results.FIDELITY)
  }
  if not versions:
    return last, len(starts) - 1 + (starts[0] > 0)
  # A fidelity study goes on where it stopped: what it has is what counts.
  again = {r.get('request') for r in last}
  kept = {
    r['request']: r
    for r in before
    if (r.get('fidelity') or {}).get('version') in versions
    and r['request'] not in again
  }
  return [*last[:1], *kept.values(), *last[1:]], 0


def _is_event(record: Record, name: str) -> bool:
  return record.get('kind') == 'event' and record.get('name') == name


def read(path: pathlib.Path) -> list[Record]:
  """Returns the records of a file; a line that is being written is left out.

  Raises:
    ReportError: a line is no JSON.
    OSError: the file cannot be read.
  """
  records: list[Record] = []
  try:
    for record in results.read(path):
      records.append(record)
  except ValueError as error:
    with path.open('rb') as file:
      file.seek(0, os.SEEK_END)
      size = file.tell()
      file.seek(max(0, size - 1))
      whole = file.read() == b'\n'
    if whole or not records:
      raise ReportError(str(error)) from error
  return records


def _replace(path: pathlib.Path, data: bytes) -> None:
  """Writes a file so that nobody ever sees half of it."""
  part = path.with_name(path.name + '.part')
  try:
    part.write_bytes(data)
    part.replace(path)
  except BaseException as error:
    with contextlib.suppress(OSError):
      part.unlink()
    if isinstance(error, OSError) and not error.filename:
      raise OSError(error.errno, error.strerror, str(path)) from error
    raise


# --- The page -----------------------------------------------------------------

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Lynx report: {title}</title>
<style>
body {{ margin: 0 auto; padding: 1rem 1.5rem 4rem; max-width: 62rem;
  font: 1rem/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }}
h1, h2, h3 {{ line-height: 1.2; margin: 2.2rem 0 .6rem; }}
figure {{ margin: 0; }}
figure img {{ width: 100%; height: auto; }}
figcaption, .note {{ color: #444; font-size: .92rem; max-width: 46rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .88rem; margin: .6rem 0;
  font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; font-weight: 600; padding-bottom: .3rem; }}
th, td {{ padding: .2rem .7rem .2rem 0; text-align: right;
  border-bottom: 1px solid #ddd; white-space: nowrap; }}
thead th {{ border-bottom: 1px solid #1a1a1a; }}
th:first-child, td:first-child {{ text-align: left; }}
tbody th {{ font-weight: 400; }}
pre {{ background: #f5f5f5; padding: .6rem .8rem; overflow-x: auto; }}
summary {{ cursor: pointer; margin: .4rem 0; }}
@media print {{ body {{ max-width: none; }} figure {{ break-inside: avoid; }} }}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _text(value: Any) -> str:
  return html.escape(str(value))


def _slug(value: Any) -> str:
  return re.sub(r'[^A-Za-z0-9]+', '_', str(value)).strip('_').lower() or 'none'


def _table(
  caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]
) -> str:
  head = ''.join(f'<th scope="col">{_text(name)}</th>' for name in header)
  lines = []
  for first, *rest in rows:
    cells = ''.join(f'<td>{_text(cell)}</td>' for cell in rest)
    lines.append(f'<tr><th scope="row">{_text(first)}</th>{cells}</tr>')
  return (
    f'<div class="scroll"><table><caption>{_text(caption)}</caption>\n'
    f'<thead><tr>{head}</tr></thead>\n<tbody>\n'
    + '\n'.join(lines)
    + '\n</tbody></table></div>'
  )


def _head(everything: Sequence[Any]) -> str:
  done = sum(trace.is_done for trace in everything)
  devices = dict.fromkeys(t['device'] for t in everything if t['device'])
  labels = dict.fromkeys(t['label'] or 'measured' for t in everything)
  words = f'{len(everything)} requests'
  if done < len(everything):
    words += f', of which {len(everything) - done} failed or were not finished'
  where = ', '.join(devices) or 'an unknown device'
  return (
    '<h1>What happened to the requests</h1>\n'
    f'<p>{_text(" and ".join(labels).capitalize())} on {_text(where)}: '
    f'{words}. Times are seconds since the arrival of a request unless a '
    'figure says otherwise; a dash is a value that is not known.</p>'
  )


def _summaries(records: Sequence[Record]) -> list[str]:
  from experiments import drawing

  found: dict[str, Record] = {}
  times: collections.Counter[str] = collections.Counter()
  for record in records:
    if record.get('kind') == 'summary':
      found[str(record.get('name'))] = record
      times[str(record.get('name'))] += 1
  if not found:
    return []
  rows = [
    (
      name,
      _value(record.get('value')),
      drawing.between(record.get('low'), record.get('high')),
      str(record.get('unit') or ''),
      str(record.get('n', '')),
      str(record.get('label') or ''),
    )
    for name, record in found.items()
  ]
  parts = [
    '<h2>Summaries</h2>',
    _table(
      'What the requests add up to',
      ('name', 'value', '90 % interval', 'unit', 'n', 'label'),
      rows,
    ),
  ]
  if max(times.values()) > 1:
    parts.append(
      f'<p class="note">The records hold {max(times.values())} runs. The '
      'summaries are those of the last; the figures below take the requests '
      'of all.</p>'
    )
  return parts


def _value(value: Any) -> str:
  if value is None:
    return '–'
  if isinstance(value, bool):
    return 'yes' if value else 'NO'
  if isinstance(value, float):
    return f'{value:.4g}'
  return str(value)


def _comparison(group: Sequence[Any]) -> str:
  """Returns the tables that the terminal shows, one a mode."""
  from experiments import display, selection
  from experiments.schemes import SCHEMES

  parts = []
  for mode in selection.modes(group):
    chosen = [
      t.record
      for t in selection.setting(group)
      if t['mode'] == mode and t['scheme'] in SCHEMES
    ]
    if not chosen:
      continue
    counts = collections.Counter(r['scheme'] for r in chosen)
    columns = display.columns_of(chosen)
    header = ['', *(f'{name} (n = {counts[name]})' for name in columns)]
    rows = [
      [row.title, *(cells[i] for cells in columns.values())]
      for i, row in enumerate(display.ROWS)
    ]
    words = f'{mode}, medians; n counts requests of all forms of decoding'
    parts.append(_table(words, header, rows))
  return '\n'.join(parts)


def _figure(drawn: Any, name: str, svg: bytes) -> str:
  data = base64.b64encode(svg).decode('ascii')
  table = ''
  if drawn.table is not None:
    table = (
      '<details><summary>The numbers of this figure</summary>\n'
      + _table(drawn.title, drawn.table.header, drawn.table.rows)
      + '\n</details>'
    )
  return (
    f'<section><h3>{_text(drawn.title)}</h3>\n<figure>\n'
    f'<img src="data:image/svg+xml;base64,{data}" alt="{_text(drawn.alt)}">'
    f'\n<figcaption>{_text(drawn.caption)} '
    f'<a href="{_text(name)}">{_text(name)}</a></figcaption>\n</figure>\n'
    f'{table}</section>'
  )


_REQUEST_COLUMNS = (
  ('TTFT provisional, s', 'ttft_provisional_s'),
  ('TTFT committed, s', 'ttft_committed_s'),
  ('bound, s', 'bound_ttft_s'),
  ('exposed, s', 'exposed_s'),
  ('done, s', 'done_s'),
)


def _requests(group: Sequence[Any]) -> str:
  from experiments import drawing

  header = (
    'request', 'scheme', 'mode', 'form', 'prompt', 'Mbit/s',
    *(title for title, _ in _REQUEST_COLUMNS), 'tokens', 'equals reference',
    'state',
  )  # fmt: skip
  rows = []
  for trace in group:
    rate = trace['link_gbps']
    state = 'done' if trace.is_done else 'not finished'
    if trace['error']:
      state = f'failed: {trace["error"]}'
    rows.append((
      *(
        '–' if trace[field] is None else str(trace[field])
        for field in ('request', 'scheme', 'mode', 'form', 'prompt')
      ),
      drawing.number(None if rate is None else rate * 1e3, 2),
      *(drawing.number(trace[field]) for _, field in _REQUEST_COLUMNS),
      drawing.number(trace['output_tokens'], 0),
      _value(trace['equal_to_reference']),
      state,
    ))  # fmt: skip
  return (
    f'<details><summary>All {len(group)} requests</summary>\n'
    + _table('Requests', header, rows)
    + '\n</details>'
  )


def _origin(records: Sequence[Record], everything: Sequence[Any]) -> list[str]:
  parts = ['<h2>How it was made</h2>']
  for record in records:
    if not _is_event(record, 'run'):
      continue
    detail = record['detail']
    command = detail.get('command')
    if isinstance(command, list):
      command = shlex.join(str(word) for word in command)
    if command:
      parts.append(f'<pre><code>{_text(command)}</code></pre>')
    if detail.get('config'):
      config = json.dumps(detail['config'], indent=2, ensure_ascii=False)
      parts.append(
        '<details><summary>Config</summary>\n'
        f'<pre><code>{_text(config)}</code></pre></details>'
      )
  versions: dict[str, list[str]] = {}
  for trace in everything:
    for package, version in (trace['versions'] or {}).items():
      seen = versions.setdefault(str(package), [])
      if str(version) not in seen:
        seen.append(str(version))
  if versions:
    rows = [(name, ', '.join(seen)) for name, seen in versions.items()]
    parts.append(_table('Versions', ('package', 'version'), rows))
  seeds = dict.fromkeys(
    str(t['seed']) for t in everything if t['seed'] is not None
  )
  if seeds:
    parts.append(f'<p>Seed: {_text(", ".join(seeds))}</p>')
  parts.append(
    '<p>To make this page again from its records: '
    '<code>python -m experiments.report --workdir=DIR</code></p>'
  )
  return parts


# --- The command line ---------------------------------------------------------


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` and returns the exit code."""
  if {'-h', '-?', '--help', '--helpfull', '--helpshort'} & set(argv[1:]):
    print(__doc__)
    return 0
  try:
    print(write(_workdir(argv)))
    return 0
  except KeyboardInterrupt:
    _say('interrupted')
    return INTERRUPTED
  except (ReportError, flags.Error) as error:
    _say(f'error: {" ".join(str(error).split())}')
  except ImportError as error:
    if error.name and error.name.split('.')[0] in ('lynx_jax', 'experiments'):
      raise
    _say(f"error: {error}; pip install 'lynx-jax[experiments]'")
  except OSError as error:
    where = f'{error.filename!r}: ' if error.filename else ''
    _say(
      f'error: {where}{error.strerror or error}; --workdir must be the '
      'folder of a finished run'
    )
  return USER_MISTAKE


def _workdir(argv: Sequence[str]) -> str:
  values = flags.FlagValues()
  flags.DEFINE_string('workdir', None, 'Where results are.', flag_values=values)
  rest = values(list(argv))
  if len(rest) > 1:
    raise ReportError(
      f'{rest[1]!r} is no flag (see --help); write --flag=value'
    )
  if not values['workdir'].value:
    raise ReportError('--workdir is missing; for example --workdir=runs/demo')
  return values['workdir'].value


def _say(message: str) -> None:
  with contextlib.suppress(OSError):
    print(message, file=sys.stderr, flush=True)


if __name__ == '__main__':
  sys.exit(main(sys.argv))
