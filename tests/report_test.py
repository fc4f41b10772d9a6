# SPDX-License-Identifier: Apache-2.0
"""The report: whole on any records, and its numbers are those of the records.

Requests are simulated on a clock of whole eighths of a second, so that every
time in them is known; nothing runs.
"""

import errno
import html.parser
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import types

import pytest
from matplotlib.figure import Figure

from experiments import (
  drawing,
  figures,
  report,
  results,
  selection,
  studies,
  summaries,
)
from experiments.figures import timeline

ROOT = pathlib.Path(__file__).parents[1]
PNG = b'\x89PNG\r\n\x1a\n'

# (MB of the Anchor, MB of the Residual) of one prompt.
SIZES = {
  'bf16': (16.0, 0.0),
  'int8': (8.0, 0.0),
  'int4': (4.0, 0.0),
  'interleaved': (8.0, 0.0),
  'lynx': (4.0, 4.0),
}
CHUNKS, CHUNK_S = 4, 1.0
DRAFT_S, STEP_S, VERIFY_S = 0.125, 0.125, 0.25
TOKENS = 17


def simulate(
  scheme='lynx',
  mode='serial',
  *,
  rate=1.0,
  repeat=0,
  prompt='book',
  slow=1.0,
  form='verify',
  **more,
):
  """Returns the records of one request: 4 chunks of prefill, 17 tokens.

  Args:
    scheme: one of SIZES.
    mode: serial or overlapped.
    rate: of the link, MB a second.
    repeat: which.
    prompt: its name.
    slow: factor on the time of prefill.
    form: of decoding.
    **more: further fields.
  """
  name = f'{prompt}/{rate}/{repeat}/{scheme}/{mode}/{form}'
  events = [('arrival', 0.0, 0.0, {})]

  def add(phase, start, end, **detail):
    events.append((phase, start, end, detail))

  for i in range(CHUNKS):
    start = i * CHUNK_S * slow
    add('prefill', start, start + CHUNK_S * slow, token_chunk=i)
  end = CHUNKS * CHUNK_S * slow
  ready = [end] * CHUNKS
  if mode == 'overlapped':
    ready = [(i + 1) * CHUNK_S * slow for i in range(CHUNKS)]
  anchor, residual = SIZES.get(scheme, (4.0, 0.0))
  at, arrivals = 0.0, {}
  for phase, size in (('anchor', anchor), ('residual', residual)):
    for i in range(CHUNKS) if size else ():
      start = max(at, ready[i])
      at = start + size / CHUNKS / rate
      add(phase, start, at, token_chunk=i, layer_group=i % 2, bytes=1)
      arrivals[phase] = at
  add('commit', end, end, upto=1)
  commits, rounds, shown, now = [end], [], 1, arrivals['anchor']
  first = None
  while scheme == 'lynx' and now < arrivals['residual'] and shown < TOKENS:
    shown += 1
    add('draft', now, now + DRAFT_S, backlog=shown - 1, committed=0)
    now += DRAFT_S
    first = first or now
  now = max(now, arrivals.get('residual', 0.0))
  while len(commits) < TOKENS:
    fresh = 1 if scheme != 'lynx' else min(5, TOKENS - len(commits))
    step = VERIFY_S if form == 'verify' else STEP_S
    tokens = len(commits) + fresh
    add('verify', now, now + step, backlog=max(shown - tokens, 0))
    now += step
    commits += [now] * fresh
    add('commit', now, now, upto=tokens)
    rounds.append([fresh + 1, fresh - 1] if scheme == 'lynx' else [0, 0])
  add('done', now, now)
  record = results.request_record(
    **{
      'study': 'demo',
      'scheme': scheme,
      'mode': mode,
      'model': 'tiny',
      'prompt_tokens': 512,
      'output_tokens': TOKENS,
      'link_gbps': rate * 8e-3,
      'rtt_ms': 0.0,
      'bits_anchor': anchor,
      'bits_total': anchor + residual,
      'bytes_anchor': int(anchor * 1e6),
      'bytes_residual': int(residual * 1e6),
      'prefill_s': end,
      'split_s': 0.0,
      'ttft_prefill_token_s': end,
      'ttft_provisional_s': first or commits[1],
      'ttft_committed_s': commits[1],
      'done_s': now,
      'exposed_s': (first or commits[1]) - end,
      'bound_ttft_s': arrivals['anchor'] + STEP_S,
      'share': 0.6,
      'drafted': sum(r[0] for r in rounds),
      'accepted': sum(r[1] for r in rounds),
      'retracted': 0,
      'equal_to_reference': True,
      'commit_times_s': commits,
      'device': 'a test',
      'versions': {'jax': '1.2.3'},
      'seed': 0,
      'request': name,
      'repeat': repeat,
      'prompt': prompt,
      'form': form,
      'rounds': rounds,
    }
    | more
  )
  return [record] + [
    {
      'kind': 'event',
      'request': name,
      'name': phase,
      'start_s': start,
      'end_s': stop,
      'detail': detail,
    }
    for phase, start, stop, detail in events
  ]


def study(modes=('serial',), schemes=('int8', 'lynx'), repeats=1, **more):
  """Returns the records of a whole study."""
  return [
    record
    for repeat in range(repeats)
    for mode in modes
    for scheme in schemes
    for record in simulate(
      scheme, mode, repeat=repeat, slow=1.0 + 0.1 * repeat, **more
    )
  ]


def write(folder, records):
  with results.Writer(folder) as writer:
    for record in records:
      writer.write(record)
  return report.write(folder)


@pytest.fixture
def quick(monkeypatch):
  """Draws, but encodes no image, which takes nine tenths of the time."""
  monkeypatch.setattr(drawing, 'save', lambda *_: None)


class Page(html.parser.HTMLParser):
  """Checks that tags nest, and collects texts, images and tables."""

  EMPTY = ('meta', 'img', 'br')

  def __init__(self, text):
    super().__init__()
    self.open, self.images, self.text, self.rows = [], [], [], []
    self.feed(text)
    self.close()
    assert not self.open

  def handle_starttag(self, tag, attributes):
    if tag == 'img':
      self.images.append(dict(attributes))
    if tag == 'tr':
      self.rows.append([])
    if tag in ('td', 'th'):
      self.rows[-1].append('')
    if tag not in self.EMPTY:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text.append(data)
    if self.open and self.open[-1] in ('td', 'th'):
      self.rows[-1][-1] += data

  def row(self, *start):
    """Returns the only row that starts with these cells."""
    (found,) = (r for r in self.rows if r[: len(start)] == list(start))
    return found


def drawn(records, *more):
  traces = report.traces(records)
  return {d.name: d for d in figures.draw(traces, *more)}


def test_a_study_gives_a_page_and_images(tmp_path):
  path = write(tmp_path, study(('serial', 'overlapped')))
  page = Page(path.read_text(encoding='utf-8'))
  names = {file.name for file in tmp_path.glob('*.png')}
  assert names == {
    'timeline_serial.png',
    'timeline_overlapped.png',
    'ttft.png',
    'tokens.png',
    'acceptance.png',
  }
  for name in names:
    assert (tmp_path / name).read_bytes().startswith(PNG)
  assert len(page.images) == len(names)
  for image in page.images:
    assert image['src'].startswith('data:image/svg+xml;base64,')
    assert len(image['alt']) > 40
  assert not list(tmp_path.glob('*.part'))


def test_the_page_needs_no_network(tmp_path):
  text = write(tmp_path, simulate('int8')).read_text(encoding='utf-8')
  assert not re.search(r'(src|href)="(https?:)?//', text)
  assert '<script' not in text


def test_the_same_records_give_the_same_bytes(tmp_path):
  records = simulate('lynx')
  one, other = tmp_path / 'a', tmp_path / 'b'
  assert write(one, records).read_bytes() == write(other, records).read_bytes()
  for file in one.glob('*.png'):
    assert file.read_bytes() == (other / file.name).read_bytes()


def test_bars_level_prefill_and_keep_exposed_times():
  """T_p is 4 and 8 s, the median 6; lynx exposes 4 1/8 s, int8 8 1/4 s."""
  records = [
    r
    for repeat, slow in ((0, 1.0), (1, 2.0))
    for scheme in ('int8', 'lynx')
    for r in simulate(scheme, repeat=repeat, slow=slow)
  ]
  rows = {row[1:3]: row for row in drawn(records)['ttft'].table.rows}
  assert rows['lynx', 'provisional'][3] == '10.125'
  assert rows['lynx', 'committed'][3] == '14.250'
  assert rows['int8', 'provisional = committed'][3] == '14.250'
  assert rows['lynx', 'provisional'][5:8] == ('10.125', '1.000', '2')


def test_prefill_is_levelled_prompt_by_prompt():
  """What longer prompts take is no noise: 4 and 8 s stay what they are."""
  records = [
    r
    for prompt, slow in (('book', 1.0), ('code', 2.0))
    for scheme in ('int8', 'lynx')
    for r in simulate(scheme, prompt=prompt, slow=slow)
  ]
  rows = {row[1:3]: row for row in drawn(records)['ttft'].table.rows}
  row = rows['lynx', 'provisional']
  assert row[3] == row[8] == '10.125'  # the median of 8.125 and 12.125
  requests = [r for r in records if r['kind'] == 'request']
  lynx, int8 = (
    [r for r in requests if r['scheme'] == name] for name in ('lynx', 'int8')
  )
  # 12.25 / 8.125 and 16.25 / 12.125; one T for both would give 14.25 / 10.125.
  assert summaries.ttft_over(int8, lynx) == pytest.approx(
    statistics.median([12.25 / 8.125, 16.25 / 12.125])
  )


def test_an_interval_comes_with_three_measurements():
  bars = drawn(study(schemes=('lynx',), repeats=2))['ttft'].table.rows
  assert bars[0][4] == '–'
  bars = drawn(study(schemes=('lynx',), repeats=3))['ttft'].table.rows
  low, high = map(float, bars[0][4].split(' – '))
  assert low <= float(bars[0][3]) <= high


def test_tables_hold_the_numbers_of_the_records():
  records = simulate('lynx')
  record, page = records[0], drawn(records)
  (row,) = page['timeline_serial'].table.rows
  assert row == (
    'lynx',
    '4.000',
    '4.000',
    *(
      drawing.number(record[name])
      for name in ('ttft_provisional_s', 'ttft_committed_s', 'done_s')
    ),
    *(str(record[name]) for name in ('drafted', 'accepted', 'retracted')),
  )
  (row,) = page['tokens'].table.rows
  assert row[3] == str(TOKENS)
  assert row[4] == drawing.number(record['done_s'] - 4.0)


def test_steps_count_committed_and_provisional_tokens():
  (trace,) = report.traces(simulate('lynx', rate=8.0))
  times, committed, shown = selection.counts(trace)
  # Anchor at 4.5 s, Residual at 5 s: four drafts, then verifications.
  at = {t: (c, s) for t, c, s in zip(times, committed, shown, strict=True)}
  assert at[4.0] == (1, 1)
  assert at[4.625] == (1, 2)
  assert at[5.0] == (1, 5)
  assert at[5.25] == (6, 6)
  assert (committed[-1], shown[-1]) == (TOKENS, TOKENS)


def test_what_is_taken_back_is_no_longer_shown():
  events = [
    {'name': 'draft', 'start_s': 1, 'end_s': 2, 'detail': {'backlog': 8}},
    {'name': 'verify', 'start_s': 2, 'end_s': 3, 'detail': {'backlog': 0}},
  ]
  trace = selection.Trace({'commit_times_s': [1, 3, 3, 3]}, events)
  times, committed, shown = selection.counts(trace)
  assert (times[-1], committed[-1], shown[-1]) == (3, 4, 4)
  assert max(shown) == 9


def test_acceptance_is_by_position():
  """Positions 1 to 3 of (3, 3), (3, 1) and (2, 2): 3/3, 2/3 and 1/2."""
  records = simulate('lynx', rounds=[[3, 3], [3, 1], [2, 2]])
  rows = drawn(records)['acceptance'].table.rows
  assert [row[2] for row in rows] == ['1.000', '0.667', '0.500']
  assert [row[4] for row in rows] == ['3', '3', '2']


def test_a_repeated_greedy_request_counts_once():
  records = study(schemes=('lynx',), repeats=3)
  rows = drawn(records)['acceptance'].table.rows
  assert rows[0][4] == str(len(records[0]['rounds']))


def test_a_run_of_chunks_ends_where_the_next_is_drawn_over_it():
  spans = [
    {'name': 'anchor', 'start_s': a, 'end_s': b, 'detail': {'token_chunk': n}}
    for n, a, b in ((0, 0.0, 1.0), (0, 0.5, 3.0), (1, 1.0, 3.5))
  ]
  runs = timeline._runs(selection.Trace({}, spans), spans, [0, 0, 1], 'anchor')
  assert [run[:2] for run in runs] == [(0.0, 1.0), (1.0, 3.5)]


def test_acceptance_runs_count_full_rounds_only(tmp_path, quick):
  runs = [
    results.acceptance_record(
      f'{prompt}/acceptance',
      prompt=prompt,
      draft_tokens=2,
      rounds=[[2, 2], [2, accepted], [1, 1]],
    )
    for prompt, accepted in (('book', 0), ('code', 1))
  ]
  page = Page(write(tmp_path, [*study(), *runs]).read_text(encoding='utf-8'))
  assert page.row('lynx, γ = 2', '1')[2] == '0.750'
  assert page.row('lynx, γ = 2', '2')[2:] == ['0.500', '0.182 – 0.818', '4']


def test_wilson_interval():
  """By the quadratic that defines it: |p - rate|² n = z² p (1 - p)."""
  for hits, n in ((0, 7), (3, 9), (85, 100), (4, 4)):
    for p in summaries.wilson(hits, n):
      z = statistics.NormalDist().inv_cdf(0.95)
      assert (p - hits / n) ** 2 * n == pytest.approx(z * z * p * (1 - p))


def test_a_sweep_gives_ttft_over_rate():
  rates = (0.5, 1.0, 4.0)
  records = [r for rate in rates for r in study(rate=rate)]
  page = drawn(records)
  table = page['ttft_over_rate'].table
  assert table.header[2:] == tuple(
    f'median at {rate} Mbit/s, s' for rate in (4, 8, 32)
  )
  int8, lynx = table.rows
  assert (int8[:2], lynx[:2]) == (('serial', 'int8'), ('serial', 'lynx'))
  assert [cell.split(',')[0] for cell in int8[3:]] == ['12.250', '6.250']
  # The other figures take one rate.
  assert page['ttft'].table.rows[0][3] == '12.250'
  assert {row[7] for row in page['ttft'].table.rows} == {'1'}


def test_a_codebook_is_a_bound_beside_bf16():
  """It has a bar and a line, and no time to the first token."""
  records = [
    record
    for rate in (0.5, 1.0, 4.0)
    for record in simulate('bf16', rate=rate, bound_codebook_s=9.0 / rate)
  ]
  page = drawn(records)
  ((*_, own), (_, scheme, what, ttft, _, bound, *_)) = page['ttft'].table.rows
  assert (scheme, ttft) == ('bf16', '–')
  assert what.startswith('codebook')
  _, (_, name, *coded) = page['ttft_over_rate'].table.rows
  assert 'codebook' in name
  assert coded == ['bound 18.000', 'bound 9.000', 'bound 2.250']
  assert bound == '9.000'
  assert own == page['ttft'].table.rows[0][-1] != '–'


def test_rates_of_prompts_of_their_own_are_no_sweep():
  records = study(prompt='book', rate=1.0) + study(prompt='code', rate=3.0)
  page = drawn(records)
  assert 'ttft_over_rate' not in page
  assert {row[7] for row in page['ttft'].table.rows} == {'2'}


def test_baselines_are_shown_in_their_faster_form():
  records = simulate('int8') + simulate('int8', form='plain')
  page = drawn(records)
  (bar,) = page['ttft'].table.rows
  assert bar[3] == '12.125'
  assert [row[2] for row in page['tokens'].table.rows] == [
    'verify program',
    'one-row decode',
  ]


def test_runs_in_one_file_keep_their_events_apart():
  one, other = simulate('lynx'), simulate('lynx', rate=2.0)
  for record in other:
    record['request'] = one[0]['request']
  traces = report.traces([*one, *other])
  assert [len(t.events) for t in traces] == [len(one) - 1, len(other) - 1]
  # Events that come before their request are its own, too.
  (early,) = report.traces([*one[1:], one[0]])
  assert len(early.events) == len(one) - 1


@pytest.mark.parametrize('scheme', list(SIZES))
def test_one_scheme_and_one_repeat(scheme, tmp_path, quick):
  page = Page(write(tmp_path, simulate(scheme)).read_text(encoding='utf-8'))
  assert page.row('TTFT provisional, s')


@pytest.mark.parametrize('field', results.REQUEST_FIELDS)
def test_any_field_may_be_null_or_absent(field, quick):
  records = simulate('int8') + simulate('lynx')
  for change in (lambda r: r.update({field: None}), lambda r: r.pop(field)):
    changed = json.loads(json.dumps(records))
    for record in changed:
      if record['kind'] == 'request':
        change(record)
    page, _ = report.render(changed)
    Page(page)


def test_a_request_of_nothing_but_its_kind():
  page, images = report.render([{'kind': 'request'}])
  assert 'not finished' in page
  assert images == {}


def test_a_failed_request_is_named_and_does_not_count(tmp_path, quick):
  bad = simulate('int8', repeat=1)[:4]
  bad[0] = {'kind': 'request'} | {
    key: bad[0][key]
    for key in ('study', 'scheme', 'mode', 'model', 'request', 'prompt')
  }
  bad[0]['error'] = 'LinkError: <gone> & lost'
  records = [*study(), *bad]
  page = Page(write(tmp_path, records).read_text(encoding='utf-8'))
  assert page.row(bad[0]['request'])[-1] == 'failed: LinkError: <gone> & lost'
  assert any('1 failed or were not finished' in text for text in page.text)
  assert drawn(records)['ttft'].table.rows[1][7] == '1'


def test_no_decode_token_and_no_events(quick):
  record = simulate('lynx')[0]
  record.update(
    dict.fromkeys(('ttft_provisional_s', 'ttft_committed_s', 'exposed_s'))
  )
  record.update(commit_times_s=[4.0], output_tokens=1, rounds=[])
  page, _ = report.render([record])
  Page(page)


def test_texts_are_escaped(tmp_path, quick):
  records = study(study='<b>&', model='"m"', prompt='<i>')
  page = Page(write(tmp_path, records).read_text(encoding='utf-8'))
  assert 'b' not in page.open
  assert any('<b>&' in text for text in page.text)


def test_two_studies_have_files_of_their_own(tmp_path, quick):
  write(tmp_path, study(study='a') + study(study='b'))
  assert (tmp_path / 'a-tiny-ttft.png').exists()
  assert (tmp_path / 'b-tiny-ttft.png').exists()


def test_summaries_have_units_n_and_intervals(tmp_path, quick):
  summary = results.summary_record('ratio', 1.2345678, 'bit', 7, 1.1, 1.4)
  first = results.summary_record('ratio', 9.0, 'bit', 1)
  path = write(tmp_path, [first, *study(), summary])
  page = Page(path.read_text(encoding='utf-8'))
  assert page.row('ratio')[1:] == [
    '1.235',
    '1.100 – 1.400',
    'bit',
    '7',
    'measured',
  ]
  assert any('hold 2 runs' in text for text in page.text)


def test_command_and_config_are_shown_if_recorded(tmp_path, quick):
  run = results.run_record(['main', '--a=b c'], {'x': 3})
  text = write(tmp_path, [run, *study()]).read_text(encoding='utf-8')
  assert 'main &#x27;--a=b c&#x27;' in text
  assert '&quot;x&quot;: 3' in text
  assert '1.2.3' in text


def test_only_the_last_run_is_shown(tmp_path, quick):
  run = results.run_record(['main'], {})
  records = [*study(schemes=('bf16',)), run, *study(schemes=('lynx',))]
  page = Page(write(tmp_path, records).read_text(encoding='utf-8'))
  assert any('1 earlier run' in text for text in page.text)
  assert not any('bf16' in text for text in page.text)


def test_a_study_draws_its_own_figures(tmp_path, monkeypatch):
  name = 'tests.study_of_its_own'
  module = types.ModuleType(name, 'What it is about.\n\nAnd more.')
  monkeypatch.setitem(sys.modules, name, module)
  monkeypatch.setitem(studies.MODULES, 'own', name)
  records = [
    results.run_record(['main'], {'study': 'own'}),
    results.summary_record('how_much', 0.5, 'bit', 3),
  ]
  page, images = report.render(records)
  assert 'What it is about.' in page
  assert 'how_much' in page
  assert not images
  assert 'And more.' not in page
  drawn = drawing.Drawing('bars', 'Bars', Figure(), 'Read it.', 'Bars: 0.5')
  module.draw = lambda given: [drawn] if given == records else []
  page, images = report.render(records)
  assert 'Bars: 0.5' in page
  assert images['bars.png'].startswith(PNG)
  with pytest.raises(report.ReportError, match='no summary'):
    report.render(records[:1])


def test_every_figure_says_how_it_came_to_be():
  for figure in drawn(study(('serial', 'overlapped'))).values():
    words = ' '.join(text.get_text() for text in figure.figure.texts)
    assert 'measured · a test · tiny' in words
    assert 'n = ' in words


def test_schemes_differ_without_colour():
  records = study(schemes=(*SIZES, 'kivi4', 'exact'))
  styles = drawing.styles_of(report.traces(records)).values()
  assert len({style.marker for style in styles}) == len(styles)
  assert len({str(style.line) for style in styles}) == len(styles)


def test_matplotlib_is_left_as_it_was():
  import matplotlib as mpl

  before = dict(mpl.rcParams)
  report.render(simulate('lynx'))
  assert dict(mpl.rcParams) == before


def test_a_run_that_is_being_written_is_reported(tmp_path, quick):
  write(tmp_path, study())
  with (tmp_path / results.FILE).open('a') as file:
    file.write('{"kind": "req')
  Page(report.write(tmp_path).read_text(encoding='utf-8'))


def _main(capsys, *flags):
  code = report.main(['report', *flags])
  out, err = capsys.readouterr()
  assert err.count('\n') <= 1
  return code, out, err


def test_the_command_makes_the_report_again(tmp_path, capsys, quick):
  path = write(tmp_path, study(schemes=('lynx',)))
  before = path.read_bytes()
  path.unlink()
  code, out, err = _main(capsys, f'--workdir={tmp_path}')
  assert (code, err) == (0, '')
  assert out.strip() == str(path)
  assert path.read_bytes() == before


@pytest.mark.parametrize(
  'flags, message',
  [
    ([], '--workdir is missing'),
    (['--workdir='], '--workdir is missing'),
    (['--workdri=x'], 'workdri'),
    (['--workdir=a', 'more'], "'more' is no flag"),
    (['--workdir=absent'], 'absent'),
  ],
)
def test_a_mistake_is_one_line(flags, message, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  code, out, err = _main(capsys, *flags)
  assert (code, out) == (2, '')
  assert err.startswith('error: ')
  assert message in err


@pytest.mark.parametrize(
  'text, message',
  [
    ('', 'no request'),
    ('[1]\n"x"\n3\n', ':1: [1] must be an object; remove that line'),
    ('{"kind": "summary", "name": "a", "value": 1}\n', 'no request'),
    ('{"kind": \n{"kind": "request"}\n', ':1: no JSON'),
  ],
)
def test_records_that_hold_nothing(text, message, capsys, tmp_path):
  (tmp_path / results.FILE).write_text(text)
  code, _, err = _main(capsys, f'--workdir={tmp_path}')
  assert code == 2
  assert message in err


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write everywhere')
def test_a_folder_that_cannot_be_written(tmp_path, capsys):
  write(tmp_path, simulate('lynx'))
  tmp_path.chmod(0o500)
  code, _, err = _main(capsys, f'--workdir={tmp_path}')
  tmp_path.chmod(0o700)
  assert code == 2
  assert 'Permission denied' in err


def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch, quick):
  def full(path, data):
    raise OSError(errno.ENOSPC, 'No space left on device')  # names no file

  write(tmp_path, simulate('lynx'))
  monkeypatch.setattr(pathlib.Path, 'write_bytes', full)
  with pytest.raises(OSError, match='No space left') as raised:
    report.write(tmp_path)
  assert str(tmp_path) in raised.value.filename


def test_help_names_the_command():
  done = subprocess.run(
    [sys.executable, '-m', 'experiments.report', '--help'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert '--workdir=' in done.stdout
