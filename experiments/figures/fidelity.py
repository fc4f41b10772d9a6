# SPDX-License-Identifier: Apache-2.0
"""Draws the fidelity study: how far each reading of the cache is from bf16.

A row is a reading, in the order of the records. Small circles are prompts, a
large mark is their mean or median, and its whisker a 90 % interval.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import drawing, summaries
from experiments.drawing import Drawing, Style, Table
from experiments.figures import acceptance
from experiments.selection import Trace

_HEADER = ('what', 'reading', 'value', '90 % interval', 'prompts, n')
_WHISKERS = (
  'Whiskers are 90 % intervals over prompts: Wilson’s where an answer is right '
  'or wrong, else by bootstrap.'
)
_SHORT = 'marks are means or medians, whiskers their 90 % intervals'


def draw(traces: Sequence[Trace], styles: Mapping[str, Style]) -> list[Drawing]:
  """Draws every figure for which there are records.

  Args:
    traces: of the study.
    styles: by reading.
  """
  parts: dict[str, list[Trace]] = {}
  for trace in traces:
    parts.setdefault(trace['fidelity']['part'], []).append(trace)
  found: list[Drawing | None] = []
  if 'forced' in parts:
    found.append(_forced(parts['forced'], styles))
  if 'free' in parts:
    found.append(_free(parts['free'], styles))
  if 'acceptance' in parts:
    found.append(acceptance.draw(parts['acceptance'], (), styles))
  for part in ('tasks', 'longbench', 'ruler'):
    if part in parts:
      found.append(_tasks(part, parts[part], styles))
  if 'tasks' in parts:
    found.append(_grid(parts['tasks']))
  return [one for one in found if one is not None]


@dataclasses.dataclass(frozen=True)
class _Row:
  """Values of one reading, a prompt each."""

  reading: str
  values: list[float]
  middle: float
  ends: tuple[float | None, float | None]

  def cells(self, what: str, digits: int) -> tuple[str, ...]:
    low, high = self.ends
    between = '–'
    if low is not None and high is not None:
      between = ' – '.join(drawing.number(x, digits) for x in (low, high))
    return (
      what,
      self.reading,
      drawing.number(self.middle, digits),
      between,
      str(len(self.values)),
    )


def _rows(traces: Sequence[Trace], figure: str) -> list[_Row]:
  groups: dict[str, list[float]] = {}
  for trace in traces:
    groups.setdefault(trace['scheme'], []).append(
      trace['fidelity']['figures'][figure]
    )
  rows = []
  for name, values in groups.items():
    middle, *ends = summaries.over_prompts(figure, values)
    rows.append(_Row(name, values, middle, (ends[0], ends[1])))
  return rows


def _draw_rows(
  axes: Axes, rows: Sequence[_Row], styles: Mapping[str, Style]
) -> None:
  """Draws a row a reading; on a log axis only what is above 0."""
  log = axes.get_xscale() == 'log'
  for i, row in enumerate(rows):
    style = styles[row.reading]
    values = [v for v in row.values if v > 0 or not log]
    ys = i + np.linspace(-0.2, 0.2, len(values))
    axes.plot(values, ys, 'o', ms=2.4, mfc='white', mec='#9a9a9a', mew=0.6)
    if log and row.middle <= 0:
      axes.annotate(
        '0',
        (0.0, i),
        (4, 0),
        xycoords=('axes fraction', 'data'),
        textcoords='offset points',
        va='center',
        fontsize=6.5,
      )
      continue
    low, high = row.ends
    if low is not None and high is not None:
      axes.plot([low, high], [i, i], color=style.color, lw=1.4, zorder=3)
    axes.plot(
      row.middle,
      i,
      style.marker,
      color=style.color,
      mec=drawing.INK,
      mew=0.5,
      ms=5.2,
      zorder=4,
    )
  axes.set_ylim(len(rows) - 0.5, -0.5)
  axes.tick_params(axis='y', length=0)


def _forced(traces: Sequence[Trace], styles: Mapping[str, Style]) -> Drawing:
  count = len({trace['scheme'] for trace in traces})
  height = max(2.3, 0.7 + 0.13 * count)
  figure = Figure((drawing.WIDTH_IN, height), layout='constrained')
  grid = figure.subplots(1, 3, sharey=True)
  table: list[tuple[str, ...]] = []
  for axes, name, title, digits in zip(
    grid,
    ('kl', 'agreement', 'nll_over_bf16'),
    (
      'KL from bf16, nats',
      'most likely token is that of bf16',
      'NLL over that of bf16, nats',
    ),
    (6, 4, 5),
    strict=True,
  ):
    rows = _rows(traces, name)
    if name == 'kl' and any(row.middle > 0 for row in rows):
      axes.set_xscale('log')
    if name == 'nll_over_bf16':
      axes.axvline(0.0, color=drawing.FAINT, lw=0.8, zorder=0)
    _draw_rows(axes, rows, styles)
    axes.set_xlabel(title)
    table += [row.cells(title, digits) for row in rows]
  grid[0].set_yticks(range(len(rows)), [row.reading for row in rows])
  count = len({trace['prompt'] for trace in traces})
  drawing.foot(figure, traces, f'n = {count} prompts, circles; {_SHORT}')
  return Drawing(
    'fidelity_forced',
    'On the text’s own next tokens',
    figure,
    'Every scheme is forced on the same tokens of real text and reads the '
    f'prompt as it has arrived. Circles are prompts, marks their means. '
    f'{_WHISKERS}',
    _words(table),
    Table(_HEADER, tuple(table)),
  )


def _free(traces: Sequence[Trace], styles: Mapping[str, Style]) -> Drawing:
  rows = _rows(traces, 'exact_match_tokens')
  most = max(trace['output_tokens'] for trace in traces) - 1
  whole = {
    name: sum(t['equal_to_bf16'] for t in traces if t['scheme'] == name)
    for name in (row.reading for row in rows)
  }
  figure = Figure((drawing.WIDTH_IN, 2.1), layout='constrained')
  axes = figure.subplots()
  _draw_rows(axes, rows, styles)
  axes.set_yticks(range(len(rows)), [row.reading for row in rows])
  axes.set_xlim(-0.02 * most, 1.02 * most)
  axes.set_xlabel('tokens after the first one that are those of bf16')
  for i, row in enumerate(rows):
    axes.annotate(
      f'{whole[row.reading]} of {len(row.values)} equal to the end',
      (1.0, i),
      (6, 0),
      xycoords=('axes fraction', 'data'),
      textcoords='offset points',
      va='center',
      fontsize=6.5,
    )
  table = tuple(
    (*row.cells('exact match, tokens', 0), str(whole[row.reading]))
    for row in rows
  )
  drawing.foot(figure, traces, f'{most} tokens after the first one; {_SHORT}')
  return Drawing(
    'fidelity_free',
    'Running free: tokens before the first that differs',
    figure,
    'Each scheme generates for itself, greedily. Circles are prompts, marks '
    'their medians with 90 % bootstrap intervals; a text that stays equal '
    'counts with its whole length, so a median there is a lower bound.',
    _words(table),
    Table((*_HEADER, 'equal to the end'), table),
  )


def _tasks(
  part: str, traces: Sequence[Trace], styles: Mapping[str, Style]
) -> Drawing:
  """Draws two panels, a band a task with a mark a reading in it."""
  tasks = list(dict.fromkeys(t['fidelity']['task'] for t in traces))
  names = list(dict.fromkeys(t['scheme'] for t in traces))
  height = 0.5 + len(tasks) * (0.14 * len(names) + 0.12)
  figure = Figure((drawing.WIDTH_IN, height), layout='constrained')
  grid = figure.subplots(1, 2, sharey=True)
  table: list[tuple[str, ...]] = []
  for axes, name, title in zip(
    grid,
    ('match', 'same_answer'),
    ('score, 1 is right', 'same answer as bf16'),
    strict=True,
  ):
    for i, task in enumerate(tasks):
      if i % 2:
        axes.axhspan(i - 0.5, i + 0.5, color='#f2f2f2', lw=0, zorder=0)
      mine = [t for t in traces if t['fidelity']['task'] == task]
      for j, row in enumerate(_rows(mine, name)):
        style = styles[row.reading]
        y = i + ((j + 0.5) / len(names) - 0.5) * 0.84
        low, high = row.ends
        if low is not None and high is not None:
          axes.plot([low, high], [y, y], color=style.color, lw=1.0)
        axes.plot(
          row.middle,
          y,
          style.marker,
          color=style.color,
          mec=drawing.INK,
          mew=0.4,
          ms=3.8,
          zorder=3,
          clip_on=False,
          label=row.reading if not i else None,
        )
        table.append(row.cells(f'{task}: {title}', 3))
    axes.set(xlim=(-0.02, 1.02), ylim=(len(tasks) - 0.5, -0.5))
    axes.set_xlabel(title)
    axes.tick_params(axis='y', length=0)
  grid[0].set_yticks(range(len(tasks)), tasks)
  figure.legend(
    *grid[0].get_legend_handles_labels(),
    loc='outside upper left',
    ncols=6,
    frameon=False,
    handletextpad=0.2,
    columnspacing=1.0,
  )
  counts = sorted(
    {sum(t['fidelity']['task'] == task for t in traces) for task in tasks}
  )
  each = drawing.span([count // len(names) for count in counts])
  drawing.foot(figure, traces, f'n = {each} prompts a task; {_SHORT}')
  what = {'tasks': 'Synthetic tasks', 'longbench': 'LongBench'}
  return Drawing(
    f'fidelity_{part}',
    f'{what.get(part, "RULER")}: scores, and answers that are those of bf16',
    figure,
    'Left the score of the answers, right how many are, word for word, those '
    f'that bf16 gives. Marks are means over prompts. {_WHISKERS}',
    _words(table),
    Table(_HEADER, tuple(table)),
  )


def _grid(traces: Sequence[Trace]) -> Drawing | None:
  """Draws the score over length and depth, a panel a reading."""
  traces = [t for t in traces if t['fidelity']['depth'] is not None]
  if not traces:
    return None
  names = list(dict.fromkeys(t['scheme'] for t in traces))
  lengths = sorted({t['fidelity']['length'] for t in traces})
  depths = sorted({t['fidelity']['depth'] for t in traces})
  figure = Figure((drawing.WIDTH_IN, 1.9), layout='constrained')
  grid = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
  table: list[tuple[str, ...]] = []
  for axes, name in zip(grid, names, strict=True):
    cells = np.full((len(depths), len(lengths)), np.nan)
    for i, depth in enumerate(depths):
      for j, length in enumerate(lengths):
        values = [
          t['fidelity']['figures']['match']
          for t in traces
          if t['scheme'] == name
          and (t['fidelity']['depth'], t['fidelity']['length'])
          == (depth, length)
        ]
        if not values:
          continue
        cells[i, j] = statistics.fmean(values)
        axes.text(
          j,
          i,
          f'{cells[i, j]:.2f}',
          ha='center',
          va='center',
          fontsize=5.6,
          color='white' if cells[i, j] < 0.5 else drawing.INK,
        )
        table.append(
          (
            name,
            f'{length:,}',
            f'{depth:.0%}',
            drawing.number(cells[i, j]),
            str(len(values)),
          )
        )
    axes.imshow(cells, cmap='gray', vmin=-0.2, vmax=1.1, aspect='auto')
    axes.set_title(name, loc='left')
    axes.set_xticks(range(len(lengths)), [str(n) for n in lengths])
    axes.tick_params(length=0)
  grid[0].set_yticks(range(len(depths)), [f'{d:.0%}' for d in depths])
  grid[0].set_ylabel('depth of the answer')
  figure.supxlabel('tokens of the prompt', fontsize=7.0)
  tasks = list(dict.fromkeys(t['fidelity']['task'] for t in traces))
  drawing.foot(figure, traces, f'mean score of {", ".join(tasks)}')
  return Drawing(
    'fidelity_grid',
    'Where in the text the answer stands',
    figure,
    'Mean score of the tasks whose answer has one place; few prompts a cell, '
    'so single cells mean little.',
    'Mean score by reading, length and depth. '
    + '; '.join(f'{r[0]}, {r[1]} tokens, {r[2]}: {r[3]}' for r in table)
    + '.',
    Table(('reading', 'tokens', 'depth', 'score', 'prompts, n'), tuple(table)),
  )


def _words(table: Sequence[tuple[str, ...]]) -> str:
  return '; '.join(f'{r[0]}, {r[1]}: {r[2]} ({r[3]})' for r in table) + '.'
