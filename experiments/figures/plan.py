# SPDX-License-Identifier: Apache-2.0
"""Draws a plan: how far predictions are off, and which scheme to send where."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import patches
from matplotlib.figure import Figure

from experiments import drawing, plan, selection
from experiments.drawing import Drawing, Table

Record = Mapping[str, Any]
_ADVISED = {
  'bf16': 'white',
  'int8': '#d9e6ef',
  'lynx': '#f5c9a8',
  'lynx_2bit': '#e89a62',
}
_MARKS = 'o^sDvP'


def draw(records: Sequence[Record]) -> list[Drawing]:
  """Draws the comparison with a measured study, and a map a mode."""
  compared = [
    {'request': r['request'], **r['detail']}
    for r in records
    if r.get('name') == 'compared'
  ]
  cells = plan.advice_of(records)
  found = [_scatter(compared)] if compared else []
  for mode in selection.MODES:
    mine = [r for r in cells if r['mode'] == mode]
    found += [_map(mine, mode)] if mine else []
  return found


def _scatter(compared: Sequence[Record]) -> Drawing:
  """Draws predicted over measured TTFT: a row a scheme, a panel a mode."""
  names = selection.ordered({c['scheme'] for c in compared}, selection.SCHEMES)
  modes = selection.ordered({c['mode'] for c in compared}, selection.MODES)
  groups: dict[Any, list[plan.Cell]] = {}
  for cell in plan.cells_of(compared):
    groups.setdefault((cell.study, cell.rates_gbps), []).append(cell)
  with drawing.look():
    figure = Figure(
      (drawing.WIDTH_IN, 0.8 + 0.24 * len(names)), layout='constrained'
    )
    grid = figure.subplots(
      1, len(modes), sharex=True, sharey=True, squeeze=False
    )[0]
    for mode, axes in zip(modes, grid, strict=True):
      axes.axvspan(0.9, 1.1, color='#e4e4e4', lw=0, zorder=0)
      axes.axvline(1.0, color=drawing.QUIET, lw=0.6, zorder=1)
      for i, ((study, rates), cells) in enumerate(groups.items()):
        # Those of a group have a line of their own within each row.
        below = 0.6 * ((i + 0.5) / len(groups) - 0.5)
        mine = [cell for cell in cells if cell.mode == mode]
        axes.plot(
          [ratio for cell in mine for ratio in cell.ratios],
          [
            names.index(cell.scheme) + below
            for cell in mine
            for _ in cell.ratios
          ],
          _MARKS[i % len(_MARKS)],
          ms=3.2,
          mew=0.7,
          mec=drawing.INK,
          mfc='white' if i % 2 else drawing.QUIET,
          label=f'{study}, {drawing.span(rates, drawing.rate)}',
        )
      axes.set_yticks(range(len(names)), names)
      axes.set_ylim(len(names) - 0.5, -0.5)
      axes.tick_params(axis='y', length=0)
      axes.locator_params(axis='x', nbins=5)
      axes.set_xlabel('predicted / measured time to first token')
      axes.set_title(mode, loc='left', weight='bold')
    figure.legend(
      *grid[0].get_legend_handles_labels(),
      loc='outside upper center',
      ncols=len(groups),
      frameon=False,
    )
    drawing.foot(
      figure,
      [selection.Trace(c) for c in compared],
      f'n = {len(compared)} requests, a mark each, with the median prefill of '
      'its prompt; grey is within 10 %',
      rates=False,
    )
  rows = tuple(
    (
      c['request'],
      drawing.number(c['predicted_s']),
      drawing.number(c['levelled_s']),
      f'{c["predicted_s"] / c["levelled_s"] - 1:+.1%}',
      drawing.number(c['measured_s']),
    )
    for c in compared
  )
  return Drawing(
    'predicted',
    'Predicted and measured time to first token',
    figure,
    'A mark is a request, with the prefill that is the median of its prompt: '
    'prefill of one request varies from call to call. Costs were fitted to the '
    'requests of INT8 alone. Grey is ±10 %.',
    f'{len(compared)} requests, predicted over measured.',
    Table(
      ('request', 'predicted, s', 'measured, s', 'off by', 'as measured, s'),
      rows,
    ),
  )


def _map(cells: Sequence[Record], mode: str) -> Drawing:
  """Draws which scheme is best, over length and rate, a panel a load."""
  sides = list(dict.fromkeys((c['model'], c['slice']) for c in cells))
  loads = sorted({c['in_flight'] for c in cells})
  lengths = sorted({c['prompt_tokens'] for c in cells})
  rates = sorted({c['link_gbps'] for c in cells})
  place = 'model', 'slice', 'in_flight', 'prompt_tokens', 'link_gbps'
  advised = {tuple(c[name] for name in place): c for c in cells}
  rows = []
  with drawing.look():
    figure = Figure(
      (drawing.WIDTH_IN, 0.4 + len(sides) * (0.34 + 0.26 * len(lengths))),
      layout='constrained',
    )
    grid = figure.subplots(len(sides), len(loads), squeeze=False)
    for side, line in zip(sides, grid, strict=True):
      for load, axes in zip(loads, line, strict=True):
        for y, length in enumerate(lengths):
          for x, rate in enumerate(rates):
            words, color = _advice(advised[*side, load, length, rate])
            axes.add_patch(
              patches.Rectangle(
                (x, y), 1, 1, facecolor=color, edgecolor=drawing.QUIET, lw=0.4
              )
            )
            axes.text(
              x + 0.5,
              y + 0.5,
              words.replace(' ', '\n'),
              ha='center',
              va='center',
              fontsize=5.6,
            )
            rows.append(
              (*side, str(load), f'{length:,}', drawing.rate(rate), words)
            )
        axes.set(xlim=(0, len(rates)), ylim=(len(lengths), 0))
        axes.set_xticks(
          [x + 0.5 for x in range(len(rates))], [f'{r:g}' for r in rates]
        )
        axes.set_yticks(
          [y + 0.5 for y in range(len(lengths))],
          [f'{n / 1024:.0f}k' for n in lengths],
        )
        axes.tick_params(length=0)
        for spine in axes.spines.values():
          spine.set_visible(False)
        many = f'{load:,} at once' if load > 1 else 'one request'
        axes.set_title(f'{side[0]} on {side[1]}, {many}', loc='left')
    for axes in grid[-1]:
      axes.set_xlabel('rate of the link, Gbit/s')
    for axes in grid[:, 0]:
      axes.set_ylabel('prompt tokens')
    drawing.foot(
      figure,
      [selection.Trace({**c, 'label': 'projected'}) for c in cells],
      f'{mode}; the scheme that is advised, and the time of INT8 over its own',
    )
  return Drawing(
    f'advice_{mode}',
    f'Which scheme to send, {mode}',
    figure,
    'Projected. In each cell the scheme that is advised, and how much sooner '
    'its first eight tokens of decode are there to stay than those of INT8; '
    'rows are prompt lengths. bf16 is advised where it is within 3 % of the '
    'fastest, then int8. A dash: no request fits into the memory of the slice.',
    '; '.join(' '.join(row) for row in rows),
    Table(
      ('model', 'slice', 'requests', 'prompt', 'link', 'advice'), tuple(rows)
    ),
  )


def _advice(cell: Record) -> tuple[str, str]:
  """Returns the words of a cell, and its colour."""
  name, gain = cell['scheme'], cell['int8_over_it']
  if name is None:
    return '–', drawing.FAINT
  alone = gain is None or name == 'int8'
  return name if alone else f'{name} {gain:.2f}', _ADVISED[name]
