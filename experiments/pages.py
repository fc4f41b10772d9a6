# SPDX-License-Identifier: Apache-2.0
"""Keeps README and docs equal to the records that are checked in.

    python -m experiments.pages                      # redraws and compares
    python -m experiments.pages --workdir=runs/figures  # and reports on it
    python -m experiments.pages --write              # writes what is generated
    python -m experiments.pages --take=runs/latency  # takes over a study first

`docs/records/STUDY.jsonl` holds what figures and numbers need of one run of a
study; the figures in `docs/figures` are drawn from it and from nothing else. In
a page,

    <!-- figures latency: acceptance_gamma8 prefill_s.max - -->

ties the paragraph or table below it to records: every number in it that has a
decimal point or a percent sign must be that of the next name, at the precision
with which it is written. A name is that of a summary, with `.low`, `.high` or
`.n` for its interval and count; a field of the requests with `.min`, `.max` or
`.median`; or `-` for a number of other origin. `demo/share` is of another
study. A whole number is passed over unless it is that of the next name.

    <!-- generated: table demo serial -->
    <!-- end -->

holds text that `--write` makes anew: the `table` that a study's run ends with,
the `numbers` of one of its figures, or the `report` table whose caption begins
with the words given. The rest of a page is written by hand.
"""

import argparse
import dataclasses
import functools
import io
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments import report, results

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / 'docs'
RECORDS, FIGURES = DOCS / 'records', DOCS / 'figures'

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
  """A study whose records are checked in.

  Attributes:
    command: makes them.
    minutes: what that takes on 2 CPU cores, after set-up; None was not timed.
    figures: file in docs/figures → name of the drawing.
    requests: whether its requests are kept.
  """

  command: str
  minutes: int | None
  figures: Mapping[str, str] = dataclasses.field(default_factory=dict)
  requests: bool = True


STUDIES = {
  'demo': Study(
    command='make demo',
    minutes=8,
    figures={
      'timeline.png': 'timeline_serial',
      'timeline_overlapped.png': 'timeline_overlapped',
    },
  ),
  'latency': Study(
    command='make latency',
    minutes=72,
    figures={'ttft.png': 'ttft', 'acceptance.png': 'acceptance'},
  ),
  'rates': Study(
    command='make rates',
    minutes=32,
    figures={'rates.png': 'ttft_over_rate'},
  ),
  'ablation': Study(
    command='make ablation',
    minutes=24,
    figures={'bits_and_kl.png': 'bits_and_kl'},
    requests=False,
  ),
  'fidelity': Study(
    command='make fidelity',
    minutes=31,
    figures={
      'fidelity.png': 'fidelity_forced',
      'fidelity_tasks.png': 'fidelity_tasks',
    },
  ),
  'peers': Study(command='make peers', minutes=None),
  'plan': Study(
    command='make plan',
    minutes=21,
    figures={
      'predicted.png': 'predicted',
      'advice_serial.png': 'advice_serial',
      'advice_overlapped.png': 'advice_overlapped',
    },
    requests=False,
  ),
  'notebook': Study(
    command='make notebook',
    minutes=3,
    figures={'split.png': 'split', 'steps.png': 'steps'},
  ),
  'sampling': Study(
    command='.venv/bin/python -m experiments.sampling_study '
    '--workdir=runs/sampling',
    minutes=None,
  ),
  'transport': Study(command='make transport-study', minutes=20),
  'equivalence': Study(
    command='make equivalence-study',
    minutes=74,
    figures={'upgrade.png': 'upgrade'},
  ),
  'codec_search': Study(
    command='.venv/bin/python -m experiments.main '
    '--config=configs/codec_search.py --workdir=runs/codec_search',
    minutes=57,
    figures={'codecs.png': 'codecs', 'layers.png': 'layers'},
  ),
}


# Events that figures and tables are made from, beside those of requests.
_KEPT = (
  'run',
  'acceptance',
  'compared',
  results.CODEC,
  results.EQUIVALENCE,
  results.FIDELITY,
  results.PEERS,
  results.ROWS,
)


class PageError(Exception):
  """A page, or the records for it, cannot be used; the message says why."""


def pages() -> list[pathlib.Path]:
  """Returns README and the pages of docs."""
  return [ROOT / 'README.md', *sorted(DOCS.glob('*.md'))]


# --- Records ------------------------------------------------------------------


def take(workdir: pathlib.Path) -> pathlib.Path:
  """Takes over the records of a finished run; its folder names the study.

  Kept are requests, summaries, what was measured besides, of a prompt or of a
  codec, and of the events those of requests that a timeline shows, and those
  that the planner takes its costs from. Times are rounded to microseconds.

  Returns:
    The file in docs/records; it is replaced only by records that hold what the
    study's figures show.

  Raises:
    PageError: no study of that name, or it cannot be drawn.
  """
  name = workdir.absolute().name
  if name not in STUDIES:
    raise PageError(
      f'--take={workdir}: the folder must be named {" or ".join(STUDIES)}, '
      'the study that it holds'
    )
  records = report.read(workdir / results.FILE)
  if not report.resumes(records):
    records, _ = report.last_run(records)
  study, shown = STUDIES[name], _in_timelines(records, STUDIES[name])
  costs = _costs(records) if name in ('latency', 'rates') else ()
  lines = [
    json.dumps(_rounded(_at_home(record, name)), separators=(',', ':'))
    for i, record in enumerate(records)
    if record['kind'] == 'summary'
    or (record['kind'] == 'request' and study.requests)
    or record.get('name') in _KEPT
    or (record['kind'] == 'event' and record['request'] in shown)
    or i in costs
  ]
  path = RECORDS / f'{name}.jsonl'
  _drawn(name, [json.loads(line) for line in lines], *study.figures.values())
  path.parent.mkdir(exist_ok=True)
  path.write_text('\n'.join(lines) + '\n', encoding='ascii')
  return path


def _at_home(record: Record, study: str) -> Record:
  """Returns the record of a run as if its folder were that of the Makefile."""
  if record.get('name') != 'run':
    return record
  command = [
    f'--workdir=runs/{study}' if word.startswith('--workdir=') else word
    for word in record['detail']['command']
  ]
  return {**record, 'detail': {**record['detail'], 'command': command}}


def _in_timelines(records: Sequence[Record], study: Study) -> set[Any]:
  from experiments import selection

  names, found = study.figures.values(), set()
  for group in report.grouped(records).values():
    alike = selection.setting(group)
    for mode in selection.modes(alike):
      if f'timeline_{mode}' in names or 'steps' in names:
        mine = [trace for trace in alike if trace['mode'] == mode]
        found |= {t['request'] for t in selection.one_request_each(mine)}
  return found


def _costs(records: Sequence[Record]) -> set[int]:
  """Returns which records the planner fits costs to; see `plan.compare`."""
  found, decoded = set(), set()
  largest, most = None, 0
  for i, record in enumerate(records):
    request = record.get('request')
    if record['kind'] != 'event' or '/int8/' not in str(request):
      continue
    match record['name']:
      case 'prefill' | 'split':
        found.add(i)
      case 'verify' if request not in decoded:
        decoded.add(request)
        found.add(i)
      case 'anchor' if record['detail']['bytes'] > most:
        largest, most = i, record['detail']['bytes']
  return found if largest is None else found | {largest}


def _rounded(value: Any) -> Any:
  match value:
    case float():
      return round(value, 6)
    case dict():
      return {key: _rounded(each) for key, each in value.items()}
    case list():
      return [_rounded(each) for each in value]
  return value


@functools.cache
def records_of(study: str) -> list[Record]:
  """Returns the checked-in records of a study.

  Raises:
    PageError: there are none.
  """
  path = RECORDS / f'{study}.jsonl'
  if not path.exists():
    raise PageError(
      f'{_short(path)} does not exist; take it over by '
      f'python -m experiments.pages --take=runs/{study}'
    )
  return report.read(path)


# --- Figures ------------------------------------------------------------------


def report_on(workdir: pathlib.Path) -> pathlib.Path:
  """Writes every figure, with the requests and summaries it is from."""
  return report.gather(
    workdir,
    {
      name: (
        f'{study.command}, {study.minutes} minutes',
        records_of(name),
        _drawn(name, records_of(name), *study.figures.values()),
      )
      for name, study in STUDIES.items()
      if study.figures
    },
  )


def draw(study: str) -> dict[str, bytes]:
  """Returns the PNGs of a study's figures by file; nothing is written.

  Raises:
    PageError: the records do not hold what a figure needs.
  """
  from experiments import drawing

  figures = STUDIES[study].figures
  drawn = _drawn(study, records_of(study), *figures.values())
  return dict(zip(figures, map(drawing.png, drawn), strict=True))


def _drawn(study: str, records: Sequence[Record], *names: str) -> list[Any]:
  found = {one.name: one for one in report.drawings(records)}
  for name in names:
    if name not in found:
      raise PageError(f'the records of {study} do not hold the figure {name}')
  return [found[name] for name in names]


# --- Numbers ------------------------------------------------------------------

_TIED = re.compile(
  r'<!-- figures (?P<study>\w+):\s(?P<names>[^>]*?) -->\n+'
  r'(?P<text>(?:(?!\n\n).)+)',
  re.DOTALL,
)
_NUMBER = re.compile(
  r'(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?:\s*(%|Mbit/s|MB)(?!\w))?'
)
_OF_REQUESTS: dict[str, Callable[[list[float]], float]] = {
  'min': min,
  'max': max,
  'median': statistics.median,
}
_PARTS = ('low', 'high', 'n', *_OF_REQUESTS)
_FACTORS = {'%': 100.0, 'Mbit/s': 1e3, 'MB': 1e-6}  # of gbps, and of bytes


def malformed(text: str, page: str) -> list[str]:
  """Returns which comments of a page look like ours and would do nothing."""
  faults = []
  for line, form in (
    ('<!-- figures', _TIED),
    ('<!-- generated', _BLOCK),
    ('<!-- end', _BLOCK),
  ):
    begun = len(re.findall(f'^{line}', text, re.MULTILINE))
    whole = len(form.findall(text))
    if begun != whole:
      faults.append(
        f'{page}: {begun} lines begin with {line!r}, but {whole} comments are '
        f'of the form that {pathlib.Path(__file__).name} knows'
      )
  return faults


def compare(text: str, page: str) -> list[str]:
  """Returns what in a page differs from the records that it is tied to."""
  faults = []
  for tied in _TIED.finditer(text):
    line = text.count('\n', 0, tied.start()) + 1
    names = tied['names'].split()
    for number, unit in _NUMBER.findall(tied['text']):
      wanted = names[0] if names else None
      fits = wanted is not None and _fits(number, unit, wanted, tied['study'])
      if fits or (wanted == '-' and _is_figure(number, unit)):
        names.pop(0)
      elif _is_figure(number, unit):
        faults.append(
          f'{page}:{line}: {number}{unit} should be '
          + _told(wanted, tied['study'])
        )
        names = names[1:]
    faults += [
      f'{page}:{line}: no number is {_told(name, tied["study"])}'
      for name in names
    ]
  return faults


def _is_figure(number: str, unit: str) -> bool:
  return '.' in number or unit == '%'


def _fits(number: str, unit: str, name: str, study: str) -> bool:
  if name == '-':
    return False
  value = lookup(name, study)
  if value is None:
    return False
  value *= _FACTORS.get(unit, 1.0)
  digits = len(number.partition('.')[2])
  # A whole number must not be taken for what is merely near it.
  if not digits and unit != '%' and abs(value) < 10 and value % 1:
    return False
  written = float(number.replace(',', ''))
  return abs(value - written) <= 0.5 * 10.0**-digits + 1e-9


def _told(name: str | None, study: str) -> str:
  if name is None:
    return 'tied to a name of the records, or to -'
  return f'{name}, which is {None if name == "-" else lookup(name, study)}'


def lookup(name: str, study: str) -> float | None:
  """Returns a figure of a study's records; see the module docstring.

  Raises:
    PageError: the records have no such figure.
  """
  other, slash, rest = name.rpartition('/')
  if slash:
    study, name = other, rest
  records = records_of(study)
  part = name.rpartition('.')[2]
  if part in _PARTS:
    name = name.removesuffix(f'.{part}')
  if part in _OF_REQUESTS:
    known = [
      record[name]
      for record in records
      if record['kind'] == 'request' and record.get(name) is not None
    ]
    if known:
      return float(_OF_REQUESTS[part](known))
  for record in reversed(records):
    if record['kind'] == 'summary' and record['name'] == name:
      value = record[part if part in _PARTS else 'value']
      return None if value is None else float(value)
  raise PageError(f'the records of {study} have no figure {name!r}')


# --- What is generated --------------------------------------------------------

_BLOCK = re.compile(
  r'(<!-- generated: (?P<words>[^>]*?) -->\n).*?(<!-- end -->)', re.DOTALL
)


_IMAGE = re.compile(
  r'^(!\[[^\]]*\]\((?:docs/)?figures/(?P<file>[^)]*)\)\n)'
  r'(?:\n\*From [^*]*\*\n)?',
  re.MULTILINE,
)


def generate(text: str) -> str:
  """Returns the text of a page with its generated parts made anew.

  These are blocks that are marked, and below each figure where it is from.
  """

  def block(match: re.Match[str]) -> str:
    return f'{match[1]}\n{_generated(match["words"].split())}\n\n{match[3]}'

  def source(match: re.Match[str]) -> str:
    return f'{match[1]}\n*From {_source(match["file"])}.*\n'

  return _IMAGE.sub(source, _BLOCK.sub(block, text))


def _source(file: str) -> str:
  """Returns the study of a figure and its cost."""
  for study in STUDIES.values():
    if file in study.figures:
      return f'`{study.command}`, {study.minutes} minutes'
  raise PageError(f'docs/figures/{file} is of no study')


def _generated(words: Sequence[str]) -> str:
  match words:
    case ['table', study, mode]:
      return _table(study, mode)
    case ['numbers', study, figure]:
      (drawn,) = _drawn(study, records_of(study), figure)
      return _markdown(drawn.table.header, drawn.table.rows)
    case ['report', study, *caption]:
      for title, header, rows in report.tables(records_of(study)):
        if title.startswith(' '.join(caption)):
          return _markdown(header, rows)
    case ['studies']:
      return _studies()
    case ['configuration']:
      from experiments import reference

      return reference.configuration()
    case ['memory']:
      from experiments import memory_pages

      return memory_pages.tables()
  raise PageError(f'nothing generates {" ".join(words)!r}')


def _table(study: str, mode: str) -> str:
  """Returns the table that the terminal shows at the end of a study."""
  from rich import console

  from experiments import display

  shown = console.Console(file=io.StringIO(), width=76, highlight=False)
  display.Screen(shown).table(
    r for r in records_of(study) if r.get('mode') == mode
  )
  assert isinstance(shown.file, io.StringIO)
  lines = [line.rstrip() for line in shown.file.getvalue().split('\n')]
  return '\n'.join(['```', *filter(None, lines), '```'])


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Returns a table; `header` says how many columns it has."""
  lines = [header, ['---'] * len(header), *rows]
  return '\n'.join(
    '| ' + ' | '.join(str(cell).replace('|', r'\|') for cell in line) + ' |'
    for line in lines
  )


def _studies() -> str:
  """Returns the table of docs/reproducing.md."""
  rows = []
  for name, study in STUDIES.items():
    figures = ', '.join(f'`{file}`' for file in study.figures)
    used = [
      path.name
      for path in pages()
      if _cites(path.read_text(encoding='utf-8'), name)
    ]
    minutes = '–' if study.minutes is None else str(study.minutes)
    rows.append(
      (
        f'`{study.command}`',
        minutes,
        figures or '–',
        ', '.join(used) or '–',
        f'`docs/records/{name}.jsonl`',
      )
    )
  return _markdown(
    ('study', 'minutes', 'figures', 'numbers in', 'records'), rows
  )


def _cites(text: str, study: str) -> bool:
  """Whether a page has a number or a table of a study."""
  tied = {match['study'] for match in _TIED.finditer(text)}
  made = {
    match['words'].split()[1:2] == [study] for match in _BLOCK.finditer(text)
  }
  return study in tied or True in made


# --- The command line ---------------------------------------------------------


def check() -> list[str]:
  """Returns what in README and docs differs from records and sources."""
  faults = []
  for path in pages():
    text = path.read_text(encoding='utf-8')
    faults += malformed(text, _short(path))
    faults += compare(text, _short(path))
    if generate(text) != text:
      faults.append(f'{_short(path)}: what is generated is stale; make docs')
  return faults


def _write() -> Iterator[str]:
  for path in pages():
    text = path.read_text(encoding='utf-8')
    new = generate(text)
    if new != text:
      path.write_text(new, encoding='utf-8')
      yield _short(path)


def _short(path: pathlib.Path) -> str:
  return str(path.relative_to(ROOT))


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line and returns the exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--take', type=pathlib.Path, help='the folder of a finished study'
  )
  parser.add_argument(
    '--write', action='store_true', help='write what is generated'
  )
  parser.add_argument(
    '--workdir',
    type=pathlib.Path,
    help='gets a report with all figures, and the records that they are from',
  )
  chosen = parser.parse_args(arguments)
  try:
    if chosen.take is not None:
      print(f'wrote {_short(take(chosen.take))}')
    for study in STUDIES:
      for file, png in draw(study).items() if STUDIES[study].figures else ():
        FIGURES.joinpath(file).write_bytes(png)
        print(f'drew docs/figures/{file}')
    if chosen.workdir is not None:
      print(f'report: {report_on(chosen.workdir)}')
    if chosen.write:
      for name in _write():
        print(f'wrote {name}')
    faults = check()
  except (PageError, report.ReportError, OSError) as error:
    faults = [f'error: {error}']
  for fault in faults:
    print(fault, file=sys.stderr)
  return 1 if faults else 0


if __name__ == '__main__':
  sys.exit(main())
