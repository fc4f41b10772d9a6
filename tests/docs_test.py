# SPDX-License-Identifier: Apache-2.0
"""README and docs hold what is true: numbers, figures, code and names."""

import json
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

from experiments import (
  cells,
  cli,
  defaults,
  options,
  pages,
  reference,
  report,
  results,
  selection,
)
from experiments.figures import steps

ROOT = pages.ROOT
PAGES = pages.pages()


def test_numbers_and_generated_text_are_those_of_records_and_sources():
  assert not pages.check()


@pytest.mark.parametrize(
  'study', [name for name, study in pages.STUDIES.items() if study.figures]
)
def test_figures_are_drawn_from_the_records(study):
  for file, png in pages.draw(study).items():
    assert png == (pages.FIGURES / file).read_bytes(), f'{file}: make figures'


@pytest.mark.parametrize(
  'text, fault',
  [
    ('98.7 % of 141', None),
    ('98.6 % of 141', '98.6% should be acceptance_gamma8'),
    ('98.7 % of 142', 'no number is acceptance_gamma8_rounds'),
    ('98.7 % of 141 and 0.5', '0.5 should be tied'),
    ('of 141', 'no number is acceptance_gamma8,'),
  ],
)
def test_a_number_that_differs_is_told(text, fault, monkeypatch):
  monkeypatch.setattr(pages, 'records_of', lambda _: _SUMMARIES)
  names = 'acceptance_gamma8 acceptance_gamma8_rounds'
  found = pages.compare(f'<!-- figures latency: {names} -->\n{text}\n\n', 'p')
  names = names.replace(' ', '\n  ')
  apart = f'<!-- figures latency:\n  {names} -->\n\n{text}\n\n'
  assert pages.compare(apart, 'p') == found
  if fault is None:
    assert not found
  else:
    assert fault in found[0]
    assert found[0].startswith('p:1: ')


@pytest.mark.parametrize(
  'text, fault',
  [
    ('<!-- figures latency: a -->\n1.5 s\n', None),
    ('<!-- generated: studies -->\n\n<!-- end -->\n', None),
    ('<!-- figures latency a -->\n1.5 s\n', "'<!-- figures'"),
    ('<!-- figures: a -->\n1.5 s\n', "'<!-- figures'"),
    ('<!-- generated: studies -->\n', "'<!-- generated'"),
    (2 * '<!-- generated: studies -->\n' + '<!-- end -->', "'<!-- generated'"),
    ('<!-- end -->\n', "'<!-- end'"),
  ],
)
def test_a_comment_that_would_do_nothing_is_told(text, fault):
  found = pages.malformed(text, 'p')
  assert bool(found) == bool(fault)
  assert fault is None or fault in found[0]


_SUMMARIES = [
  {'kind': 'summary', 'name': name, 'value': value, 'low': 0.25, 'n': 5}
  for name, value in (
    ('acceptance_gamma8', 0.98685),
    ('acceptance_gamma8_rounds', 141),
    ('at_temperature0.5', 0.97),
  )
] + [
  {'kind': 'request', 'link_gbps': 0.034},
  {'kind': 'request', 'link_gbps': 0.036},
]


@pytest.mark.parametrize(
  'name, value',
  [
    ('acceptance_gamma8.low', 0.25),
    ('acceptance_gamma8.n', 5),
    ('at_temperature0.5', 0.97),
    ('link_gbps.median', 0.035),
    ('other/link_gbps.max', 0.036),
  ],
)
def test_names_of_figures(name, value, monkeypatch):
  monkeypatch.setattr(pages, 'records_of', lambda _: _SUMMARIES)
  assert pages.lookup(name, 'latency') == pytest.approx(value)


def test_a_figure_that_no_record_has_is_an_error():
  with pytest.raises(pages.PageError, match='no figure'):
    pages.lookup('acceptance_gamma9', 'latency')


def test_a_table_is_that_of_a_figure_or_of_a_report(monkeypatch):
  first, line, *rows = _made('numbers equivalence upgrade')
  assert first.startswith('| ')
  assert {row.count('|') for row in (line, *rows)} == {first.count('|')}
  with pytest.raises(pages.PageError, match='the figure nothing'):
    _made('numbers equivalence nothing')
  found = [('Some', ('a',), []), ('Other ones', ('a', 'b'), [('x|y', 'z')])]
  monkeypatch.setattr(report, 'tables', lambda _: found)
  assert _made('report plan Other') == [
    '| a | b |',
    '| --- | --- |',
    r'| x\|y | z |',
  ]
  with pytest.raises(pages.PageError, match='generates'):
    _made('report plan None')


def _made(words: str) -> list[str]:
  text = pages.generate(f'<!-- generated: {words} -->\n<!-- end -->')
  return text.split('\n')[2:-2]


def test_the_report_of_all_figures_has_their_records(tmp_path, monkeypatch):
  latency = {'latency': pages.STUDIES['latency']}
  monkeypatch.setattr(pages, 'STUDIES', latency)
  page = pages.report_on(tmp_path / 'figures').read_text(encoding='utf-8')
  assert 'latency: make latency, ' in page
  assert page.count('<figure>') == len(latency['latency'].figures)
  records = [*results.read(tmp_path / 'figures' / results.FILE)]
  assert {r['kind'] for r in records} == {'request', 'summary'}
  assert 'latency/share' in {r.get('name') for r in records}
  assert (tmp_path / 'figures' / 'ttft.png').exists()
  tmp_path.joinpath('file').write_text('')
  with pytest.raises(OSError, match='file'):
    pages.report_on(tmp_path / 'file')


def test_a_figure_says_which_study_it_is_from():
  image = '![Words](docs/figures/ttft.png)\n'
  minutes = pages.STUDIES['latency'].minutes
  said = f'{image}\n*From `make latency`, {minutes} minutes.*\n'
  assert pages.generate(image) == said
  assert pages.generate(said) == said
  assert pages.generate(said.replace(str(minutes), '1')) == said
  with pytest.raises(pages.PageError, match=r'figures/no\.png is of no study'):
    pages.generate('![Words](figures/no.png)\n')


def test_what_is_taken_over_is_taken_whole(tmp_path, monkeypatch):
  """Records that were taken over once give themselves."""
  source = pages.RECORDS / 'notebook.jsonl'
  (tmp_path / 'notebook').mkdir()
  shutil.copy(source, tmp_path / 'notebook' / 'results.jsonl')
  monkeypatch.setattr(pages, 'RECORDS', tmp_path / 'records')
  taken = pages.take(tmp_path / 'notebook')
  assert taken.read_bytes() == source.read_bytes()
  with pytest.raises(pages.PageError, match='must be named'):
    pages.take(tmp_path)


def test_what_cannot_be_drawn_is_not_taken_over(tmp_path, monkeypatch):
  monkeypatch.setattr(pages, 'RECORDS', tmp_path / 'records')
  (tmp_path / 'plan').mkdir()
  (tmp_path / 'plan' / 'results.jsonl').write_text(
    json.dumps(results.rows_record(rows=[])) + '\n', encoding='ascii'
  )
  with pytest.raises(pages.PageError, match='do not hold the figure predicted'):
    pages.take(tmp_path / 'plan')
  assert not (tmp_path / 'records').exists()


def test_every_field_says_what_it_means():
  assert not reference.undocumented()


@pytest.mark.usefixtures('unoptimised')
def test_the_examples_of_extending_run():
  text = (pages.DOCS / 'extending.md').read_text(encoding='utf-8')
  names: dict = {}
  for code in re.findall(r'```python\n(.*?)```', text, re.DOTALL):
    exec(compile(code, 'extending.md', 'exec'), names)


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
  text = page.read_text(encoding='utf-8')
  missing = [
    path
    for path in re.findall(r'\]\(([^)#:]+)(?:#[\w-]*)?\)', text)
    if not (page.parent / path).exists()
  ]
  folders = r'(?:docs|configs|experiments|lynx_jax|tests)/'
  for path in re.findall(rf'(?<![\w/]){folders}[\w./*-]*[\w*/]', text):
    if not any(ROOT.glob(path)) and not _is_place_for_a_name(path):
      missing.append(path)
  for name in re.findall(r'python -m experiments\.(\w+)', text):
    file = ROOT / 'experiments' / f'{name}.py'
    if not file.exists() and not name.isupper():
      missing.append(f'experiments.{name}')
  targets = set(re.findall(r'^([\w-]+):', _makefiles(), re.MULTILINE))
  for code in re.findall(r'`make ([a-z-]+)', text):
    if code not in targets:
      missing.append(f'make {code}')
  fields = set(defaults.field_names(defaults.base()))
  for name in re.findall(r'--config\.([a-z][\w.]*\w)=', text):
    if name not in fields and not _is_place_for_a_name(name):
      missing.append(f'--config.{name}')
  assert not missing


CONFIGS = sorted((ROOT / 'configs').glob('*.py'))
_COMMAND = re.compile(
  r'-m experiments\.main ((?:[^\n\\`]|\\\n)*--config=(?:[^\n\\`]|\\\n)*)'
)
_PLACES = {'RATE': '1.0', 'ADDRESS:PORT': '127.0.0.1:1'}


@pytest.mark.parametrize('page', PAGES + CONFIGS, ids=lambda page: page.name)
def test_commands_of_a_page_are_accepted(page, monkeypatch):
  """All that is checked before anything runs; files need not be there."""
  monkeypatch.chdir(ROOT)
  for command in _COMMAND.findall(page.read_text(encoding='utf-8')):
    text = command.replace('\\\n', ' ')
    for place, value in _PLACES.items():
      text = text.replace(place, value)
    values, own = cli._parse(['main', *shlex.split(text)])
    options.read(own)
    cells.settings(values)


def _is_place_for_a_name(text: str) -> bool:
  return re.search(r'[/.][A-Z]{3,}', text) is not None


def _makefiles() -> str:
  files = (ROOT / 'Makefile', ROOT / 'experiments' / 'kernels.mk')
  return '\n'.join(file.read_text(encoding='utf-8') for file in files)


def test_make_lists_all_that_it_makes():
  """As README promises of `make` alone."""
  done = subprocess.run(
    ['make', '--no-print-directory', 'help'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  listed = set(re.findall(r'^ +make ([\w-]+) ', done.stdout, re.MULTILINE))
  phony = re.findall(r'^\.PHONY: (.*)', _makefiles(), re.MULTILINE)
  assert {*listed, 'help', '$(STAMPS)/venv'} == {*' '.join(phony).split()}


GENERATIONS = ('v5e', 'v5p', 'v6e', 'tpu7x')
_COSTS = json.loads((ROOT / 'experiments' / 'kernel_costs.json').read_bytes())


def _kernel(generation, kernel, head_dim, query_rows=4):
  """Returns the record of a kernel at its own best block."""
  return min(
    (
      r
      for r in _COSTS
      if (r['generation'], r['kernel'], r['head_dim'], r['query_rows'])
      == (generation, kernel, head_dim, query_rows)
    ),
    key=lambda r: r['cost_cycles'],
  )


def _speedup(generation, kernel, head_dim=128):
  return _kernel(generation, kernel, head_dim)['speedup_over_bf16_pallas']


def _many_rows(generation):
  few, many = (
    _kernel(generation, 'attention_anchor_residual', 128, rows)['cost_cycles']
    for rows in (4, 64)
  )
  return many / few


@pytest.mark.parametrize(
  'row, figure',
  [
    ('Anchor, head dim 128', lambda g: _speedup(g, 'attention_anchor')),
    ('Anchor, head dim 256', lambda g: _speedup(g, 'attention_anchor', 256)),
    (
      'Anchor + Residual, head dim 128',
      lambda g: _speedup(g, 'attention_anchor_residual'),
    ),
    ('Anchor + Residual, 64 rows over 4 rows, head dim 128', _many_rows),
  ],
)
def test_the_table_of_kernels_is_that_of_the_compiler(row, figure):
  page = (pages.DOCS / 'kernels.md').read_text(encoding='utf-8')
  (line,) = re.findall(rf'^\| {re.escape(row)} \|(.*)\|$', page, re.MULTILINE)
  written = [float(cell) for cell in line.split('|')]
  assert written == pytest.approx([*map(figure, GENERATIONS)], abs=0.0051)


def test_costs_of_kernels_in_readme_are_those_of_the_compiler():
  text = ' '.join((ROOT / 'README.md').read_text(encoding='utf-8').split())
  v5e, v5p, v6e = (_speedup(g, 'attention_anchor') for g in GENERATIONS[:3])
  assert f'{v5e:.1f}' == f'{v6e:.1f}'
  for words in (
    f'costs {v5e:.1f} times less than bf16 attention on v5e and v6e ({v5p:.1f} '
    'on one core of v5p)',
    f'costs {_many_rows("v5e"):.2f} (v5e) and {_many_rows("v6e"):.2f} (v6e) '
    'times a read of both planes',
  ):
    assert words in text


def test_the_index_has_every_page():
  index = (pages.DOCS / 'README.md').read_text(encoding='utf-8')
  for page in pages.DOCS.glob('*.md'):
    assert page.name == 'README.md' or f']({page.name})' in index


@pytest.fixture(scope='module')
def stepped():
  (group,) = report.grouped(pages.records_of('notebook')).values()
  (trace,) = [t for t in group if t.spans('pieces')]
  return trace


def test_steps_add_up_to_the_output(stepped):
  committed = 1
  for step in steps.steps_of(stepped):
    assert step.committed == committed
    committed += step.accepted + step.own
    assert bool(step.accepted + step.own) == (step.name == 'verify')
  assert committed == stepped['output_tokens']


def test_steps_need_every_round(stepped):
  events = [e for e in stepped.events if e['name'] != 'verify']
  with pytest.raises(ValueError, match='streamed'):
    steps.steps_of(selection.Trace(stepped.record, events))


def test_the_version_is_one():
  project = (ROOT / 'pyproject.toml').read_text(encoding='utf-8')
  (version,) = re.findall(r"^version = '(.*)'$", project, re.MULTILINE)
  citation = (ROOT / 'CITATION.cff').read_text(encoding='utf-8')
  assert f'\nversion: {version}\n' in citation
  assert pathlib.Path(ROOT / 'LICENSE').exists()
