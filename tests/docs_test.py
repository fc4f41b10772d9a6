# SPDX-License-Identifier: Apache-2.0
"""README and docs hold what is true: numbers, figures, code and names."""

import pathlib
import re
import shutil

import pytest

from experiments import defaults, pages, reference, report, selection
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


def _is_place_for_a_name(text: str) -> bool:
  return re.search(r'[/.][A-Z]{3,}', text) is not None


def _makefiles() -> str:
  files = (ROOT / 'Makefile', ROOT / 'experiments' / 'kernels.mk')
  return '\n'.join(file.read_text(encoding='utf-8') for file in files)


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
