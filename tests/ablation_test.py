# SPDX-License-Identifier: Apache-2.0
"""An ablation runs every cell once, whatever ends it, and merges its parts."""

import functools
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from configs import ablation as configured
from configs import ablation_tiny
from experiments import (
  ablation,
  cell_rows,
  cells,
  cli,
  defaults,
  figures,
  main,
  report,
  results,
)
from lynx_jax.config import ConfigError, Order
from lynx_jax.models import presets

ROOT = pathlib.Path(__file__).parents[1]
# One run serves all tests of records here.
pytestmark = pytest.mark.usefixtures('unoptimised')


def _ablation(**fields):
  values = ablation_tiny.get_config()
  values.ablation.update({'axes': '', 'cells': ''} | fields)
  return cells.settings(values).ablation


def _changes(study):
  return [cell.name for cell in study.cells]


def test_the_ready_configs_have_24_cells():
  for file in (configured, ablation_tiny):
    study = cells.settings(file.get_config()).ablation
    assert len(study.cells) == len({cell.key for cell in study.cells}) == 24
    for word in ('Cost:', 'Expected:', 'python -m experiments.main --config='):
      assert word in file.__doc__


def test_a_list_goes_through_the_grid():
  study = _ablation(
    cells='scheme=int8; scheme=lynx codec.k=2,2,4',
    axes="link.rtt_ms=1|50; codec.layers=''|'0:1 k=8; 1:2 v=4'",
  )
  assert len(study.cells) == 8
  # INT8 has its own planes in every layer: two and two of its four are alike.
  assert len({cell.key for cell in study.cells}) == 6
  values = dict(study.cells[-1].values)
  assert values['codec.layers'] == '0:1 k=8; 1:2 v=4'
  assert values['link.rtt_ms'] == 50.0
  scheme = study.cells[-1].settings.schemes[0]
  assert scheme.codec.k.planes == (2, 2, 4)
  assert len(scheme.codec.layers) == 2
  # What a cell does not change, it has from the config.
  assert dict(study.cells[0].values)['codec.k'] == '4,4'


def test_fields_that_are_named_together_take_the_same_value():
  study = _ablation(axes='codec.k,codec.v=8|4,4')
  planes = [c.settings.schemes[0].codec for c in study.cells]
  assert [(p.k.planes, p.v.planes) for p in planes[:1]] == [((), ())]  # bf16
  assert [dict(c.values) for c in study.cells] == [
    {'codec.k': '8', 'codec.v': '8'},
    {'codec.k': '4,4', 'codec.v': '4,4'},
  ]


def test_every_axis_of_an_ablation_is_a_field():
  (cell,) = _ablation(
    cells='scheme=lynx codec.k,codec.v=4,4 codec.group=64 codec.sinks=2 '
    'codec.recent_tokens=32 codec.k_rotation=hadamard codec.exact=False '
    'engine.chunk_bytes=4096 engine.draft_tokens=3 engine.backlog_tokens=8 '
    'engine.order=interleaved engine.layer_ready=false engine.sharpen=False '
    'mode=overlapped link.rate_gbps=0.5 link.rtt_ms=7 prompt_tokens=192'
  ).cells
  (scheme,) = cell.settings.schemes
  assert scheme.engine(cell.settings.engine).order is Order.INTERLEAVED
  assert cell.settings.engine.draft_tokens == 3
  assert not cell.settings.engine.layer_ready
  assert cell.settings.link.rate_gbps == 0.5
  assert cell.settings.prompts == (('book', 192),)


def test_a_cell_that_is_named_twice_is_one():
  assert _changes(_ablation(axes='codec.k=4,4|8|4,4')) == [
    'codec.k=4,4',
    'codec.k=8',
  ]


def test_cells_that_measure_the_same_share_a_result():
  study = _ablation(axes='scheme=int8|lynx; codec.k,codec.v=4,4|2,2,4')
  keys = [cell.key for cell in study.cells]
  assert len(keys) == 4
  assert keys[0] == keys[1]
  assert len({*keys}) == 3


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'axes': 'codec.grop=32|64'}, 'did you mean config.codec.group'),
    ({'cells': 'scheme=lynx codec.kk=4'}, 'did you mean config.codec.k'),
    ({'axes': 'codec=4'}, 'config.codec does not exist'),
    ({'axes': 'codec.group=31'}, 'cell codec.group=31: codec.group=31 must be'),
    ({'axes': 'codec.group=many'}, 'codec.group=many must be of type int'),
    ({'axes': 'engine.sharpen=1'}, 'must be True or False'),
    ({'axes': 'scheme=lnyx'}, "did you mean 'lynx'"),
    ({'axes': 'codec.group'}, 'must be FIELD=VALUE'),
    ({'axes': 'codec.group='}, 'must be FIELD=VALUE'),
    ({'axes': 'transfer.lease_s=3'}, 'transfer.lease_s changes nothing'),
    ({'axes': 'link.rate_gbps=0'}, 'link.rate_gbps=0.0 must be positive'),
    ({'axes': 'link.rate_gbps=None'}, 'link.rate_gbps must be set'),
    ({'axes': 'decode_mesh=2'}, 'decode_mesh=2 and decode_data=1 must be 1'),
    ({'axes': 'seed=1', 'shard': '3/2'}, "shard='3/2' must be I/N"),
    ({'axes': 'seed=1', 'heatmaps': 'ttft'}, "heatmaps='ttft' must be of"),
    ({}, "ablation.axes='' must name what is varied"),
    ({'axes': ';'}, "ablation.axes=';' must name what is varied"),
    ({'axes': 'codec.k=8|'}, "no text is ''"),
    ({'axes': "codec.layers='0:1 k=8"}, 'must have another quote'),
    ({'axes': 'priority=1|0'}, 'config.priority is no axis; vary engine.order'),
    ({'axes': 'acceptance.draft_tokens=4|8'}, 'vary engine.draft_tokens'),
    ({'axes': 'seed=1', 'shard': '1/2', 'merge': 'a'}, 'leave one of them out'),
  ],
)
def test_a_mistake_is_named(fields, message):
  with pytest.raises(ConfigError, match=message.replace('.', r'\.')):
    _ablation(**fields)


@pytest.mark.parametrize(
  'fields',
  [
    {'cells': 'link.rtt_ms=50; seed=1', 'axes': 'link.rtt_ms=1'},
    {'axes': 'link.rtt_ms=50; link.rtt_ms=1'},
    {'cells': 'link.rtt_ms=50 link.rtt_ms=1'},
  ],
)
def test_no_value_of_a_cell_is_lost_to_another_one(fields):
  with pytest.raises(ConfigError, match=r'link.rtt_ms to 50.0 and 1.0; name'):
    _ablation(**fields)


def test_every_word_for_an_axis_leads_to_fields():
  known = {*defaults.field_names(defaults.base())}
  for fields in cells._WORDS.values():
    assert {*fields.replace(' or ', ',').split(',')} <= known


def test_a_mistake_is_told_before_anything_runs(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(ROOT)
  argv = [
    'main',
    '--config=configs/ablation_tiny.py',
    f'--workdir={tmp_path / "w"}',
    '--config.ablation.axes=codec.grop=32',
  ]
  assert main.main(argv) == 2
  assert capsys.readouterr().err.count('\n') == 1
  assert not (tmp_path / 'w').exists()


def test_shards_are_a_partition_and_keep_engines_together():
  study = _ablation(
    axes='link.rate_gbps=0.1|0.2; codec.group=32|64|128; '
    'engine.draft_tokens=0|3; engine.chunk_bytes=2048|8192'
  )
  ordered = cells.ordered(study.cells)
  assert sorted(c.key for c in ordered) == sorted(c.key for c in study.cells)
  # Rates and draft lengths need no engine, and none is needed twice.
  assert sum(cells.needs_engine(ordered)) == 6
  engines = [cells.engine_keys(cell.settings) for cell in ordered]
  changes = sum(a != b for a, b in zip(engines, engines[1:], strict=False))
  assert changes == 5
  for count in (1, 2, 5, 24, 40):
    parts = [cells.part(ordered, (i, count)) for i in range(1, count + 1)]
    assert [cell for part in parts for cell in part] == [*ordered]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_time_left_knows_that_engines_cost_more():
  assert ablation.left_s([], [True]) is None
  assert ablation.left_s([(True, 9.0)], [False, True]) == 18.0
  spent = [(True, 9.0), (False, 1.0), (False, 2.0)]
  assert ablation.left_s(spent, [True, False, False]) == 12.0


def _row(values, ttft):
  return {'values': values, 'ttft_provisional_s': ttft}


def test_compared_rows_differ_in_nothing_else():
  rows = [
    _row({'scheme': s, 'k': k, 'rate': r}, t)
    for s, k, r, t in [
      ('int8', '4', 1, 8.0),
      ('int8', '4', 2, 4.0),
      ('lynx', '4', 1, 4.0),
      ('lynx', '4', 2, 2.0),
      ('lynx', '2', 1, 2.0),
    ]
  ]
  (schemes, ks, rates) = cell_rows.axes(rows)
  by_scheme = cell_rows.matched(rows, [schemes])
  assert by_scheme == {('int8',): rows[:2], ('lynx',): rows[2:4]}
  assert cell_rows.matched(rows, [ks]) == {('4',): [rows[2]], ('2',): [rows[4]]}
  assert {*cell_rows.matched(rows, [schemes, rates])} == {
    ('int8', '1'),
    ('int8', '2'),
    ('lynx', '1'),
    ('lynx', '2'),
  }
  usual = cell_rows.usual(rows)
  assert usual == {'scheme': 'lynx', 'k': '4', 'rate': 1}
  assert cell_rows.name(rows[2], usual) == 'base'
  assert cell_rows.name(rows[1], usual) == 'int8, rate=2'


def test_a_row_without_a_token_of_decode_is_drawn_nowhere():
  request = results.request_record(
    request='key/book', prompt='book', scheme='lynx', mode='serial', drafted=0
  )  # output_tokens=1
  rows = cell_rows.measured([request], {})
  for row in rows:
    row |= {'name': 'base', 'values': {}}
  assert not figures.draw_rows(rows, ['ttft_provisional_s'])


def _argv(workdir, *flags):
  file = '--config=configs/ablation_tiny.py'
  return ['main', file, f'--workdir={workdir}', *flags]


def _records(workdir):
  file = workdir / results.FILE
  return [*results.read(file)] if file.exists() else []


def _is_cell(record):
  return record['kind'] == 'event' and record['name'] == results.CELL


def _summaries(records):
  return {r['name']: r['value'] for r in records if r['kind'] == 'summary'}


GRID = (
  '--config.ablation.cells=scheme=int8; seed=13; scheme=lynx',
  '--config.ablation.axes=link.rate_gbps=0.05|0.1',
)
DONE, FAILED = 4, 2


def measure(bench, cell, remote=None):
  """Takes the place of engines, for tests of everything around them."""
  del bench
  time.sleep(0.1)
  settings = cell.settings
  if settings.seed == 13:
    raise MemoryError('13 are\ntoo many')
  record = results.request_record(
    request=f'{cell.key}/book/0',
    prompt='book',
    scheme=settings.schemes[0].name,
    mode='serial',
    model='tiny',
    prompt_tokens=448,
    link_gbps=settings.link.rate_gbps,
    rtt_ms=1.0,
    prefill_s=1.0,
    split_s=0.0,
    ttft_provisional_s=1 + 0.1 / settings.link.rate_gbps,
    ttft_committed_s=1 + 0.2 / settings.link.rate_gbps,
    bound_ttft_s=1 + 0.09 / settings.link.rate_gbps,
    token_ids=[*cell.key.encode()],
    drafted=4,
    accepted=3,
    equal_to_reference=True,
  )
  rows = cell_rows.measured([record], {})
  return [record], {'rows': rows, 'recompiles': 0, 'engines': 1}


_CODE = """
import sys
from experiments import ablation, main
from tests import ablation_test
ablation._Bench.measure = ablation_test.measure
sys.exit(main.main({argv!r}))
"""


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A process that was killed after its first cell, and the same command."""
  workdir = tmp_path_factory.mktemp('whole')
  argv = _argv(workdir, *GRID)
  process = subprocess.Popen(
    [sys.executable, '-c', _CODE.format(argv=argv)],
    cwd=ROOT,
    stdout=subprocess.DEVNULL,
  )
  until_s = time.monotonic() + 120
  while not cell_rows.finished(_records(workdir)):
    assert process.poll() is None
    assert time.monotonic() < until_s
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  process.wait()
  before = _records(workdir)
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(ROOT)
    patch.setattr(ablation._Bench, 'measure', measure)
    code = main.main(argv)
  return before, _records(workdir), code, workdir


def test_a_killed_run_goes_on_without_repeating(whole):
  before, records, *_ = whole
  done = {*cell_rows.finished(before)}
  assert 1 <= len(done) < DONE
  assert records[: len(before)] == before
  again = [r['request'] for r in records[len(before) :] if _is_cell(r)]
  assert len(again) == len({*again}) >= DONE - len(done)
  assert not done & {*again}
  assert len(cell_rows.finished(records)) == DONE


def test_a_failed_cell_is_recorded_and_does_not_stop_the_rest(whole, capsys):
  _, records, code, workdir = whole
  assert code == cli.CELLS_MISSING
  failed = [d for d in cell_rows.last(records).values() if 'error' in d]
  assert [d['error'] for d in failed] == ['MemoryError: 13 are too many'] * 2
  assert _summaries(records)['cells_failed'] == FAILED
  page = (workdir / 'report.html').read_text(encoding='utf-8')
  for word in ('Cells without a result', '13 are too many', 'TTFT / bound'):
    assert word in page


def test_merged_shards_are_the_whole(whole, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(ablation._Bench, 'measure', measure)
  monkeypatch.setattr(report, 'write', lambda _: None)
  parts = [tmp_path / 'a', tmp_path / 'b']
  for i, part in enumerate(parts, 1):
    main.main(_argv(part, *GRID, f'--config.ablation.shard={i}/2'))
    assert len(cell_rows.last(_records(part))) == (DONE + FAILED) // 2
  merged = tmp_path / 'merged'
  flag = f'--config.ablation.merge={parts[0]},{parts[1]}'
  capsys.readouterr()
  code = main.main(_argv(merged, *GRID, flag))
  assert code == cli.CELLS_MISSING  # those that fail
  assert '2 of 6 cells have no result' in capsys.readouterr().err
  rows = cell_rows.written(_records(merged))['rows']
  assert rows == cell_rows.written(whole[1])['rows']
  assert len(rows) == DONE
  assert cell_rows.requests(_records(merged)) == {
    key: found
    for key, found in cell_rows.requests(whole[1]).items()
    if key in cell_rows.finished(whole[1])
  }
  size = len(_records(merged))
  main.main(_argv(merged, *GRID, flag))  # nothing is taken twice
  assert not [*filter(_is_cell, _records(merged)[size:])]


def test_a_folder_without_records_cannot_be_merged(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.chdir(ROOT)
  first, second = tmp_path / 'none', tmp_path / 'neither'
  flag = f'--config.ablation.merge={first},{second}'
  assert main.main(_argv(tmp_path, *GRID, flag)) == cli.USER_MISTAKE
  assert (
    f'{first / results.FILE}, {second / results.FILE} not found'
    in capsys.readouterr().err
  )


def test_cells_measure_what_they_say(tmp_path, monkeypatch):
  """Two rates on one engine; a prompt beyond the context of the model."""
  monkeypatch.chdir(ROOT)
  small = functools.partial(presets.tiny, layers=2, head_dim=16)
  monkeypatch.setattr(presets, 'tiny', small)
  argv = _argv(
    tmp_path,
    '--config.scheme=lynx',
    '--config.engine.layer_groups=2',
    '--config.prompt_tokens=192',
    '--config.output_tokens=6',
    '--config.engine.verify_rows=4',
    '--config.acceptance.output_tokens=1',
    '--config.acceptance.draft_tokens=2',
    '--config.ablation.cells=link.rate_gbps=0.001; link.rate_gbps=0.1; '
    'prompt_tokens=9000',
    '--config.ablation.axes=',
  )
  assert main.main(argv) == cli.CELLS_MISSING
  records = _records(tmp_path)
  (failed,) = [d for d in cell_rows.last(records).values() if 'error' in d]
  assert failed['error'].startswith('ConfigError: prompt_tokens=9000')
  slow, fast = cell_rows.written(records)['rows']
  for row in (slow, fast):
    assert row['ttft_over_bound'] >= 1
    assert row['equal_to_reference'] is True
    assert row['bits_anchor'] < row['bits_total']
    # The text is that of bfloat16; all planes are nearer to it.
    assert 0 < 4 * row['kl_target_from_bf16'] < row['kl_anchor_from_bf16']
  assert slow['kl_anchor'] == fast['kl_anchor'] > 0
  assert slow['bound_ttft_s'] - slow['prefill_s'] > 1.5 * (
    fast['bound_ttft_s'] - fast['prefill_s']
  )
  found = _summaries(records)
  assert found['engines_made'] == 1
  assert found['recompiles_after_warmup'] == 0
  assert found['equal_to_reference'] is True


@pytest.mark.parametrize(
  'flags, message',
  [
    (('--role=local',), 'KL is measured with both sides in one process'),
    (
      ('--role=local', '--config.ablation.cells=scheme=prefill_continues'),
      'prefill_continues needs both sides in one process',
    ),
    (
      ('--role=decode', '--connect=127.0.0.1:1'),
      'take --role=local',
    ),
  ],
)
def test_what_needs_one_process_is_refused(
  tmp_path, monkeypatch, capsys, flags, message
):
  monkeypatch.chdir(ROOT)
  none = '--config.acceptance.output_tokens=0'
  more = () if 'KL' in message else (none,)
  assert main.main([*_argv(tmp_path), *more, *flags]) == 2
  assert message in capsys.readouterr().err
