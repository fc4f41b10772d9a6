# SPDX-License-Identifier: Apache-2.0
"""Draws the rows of an ablation: over the rate, bits against KL, heatmaps."""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib import patheffects, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import cell_rows, drawing
from experiments.drawing import Drawing, Table
from experiments.selection import Trace

Row = cell_rows.Row

_ROWS = 48
_LINES = 8  # in a figure; more cannot be told apart
_PANELS = 6  # of heatmaps in a figure
# Requests of one facet have the same prefill to do.
_FACET = ('model', 'prompt', 'prompt_tokens', 'mode', 'rtt_ms')
_OF_FACET = (
  'model.path', 'prompt_file', 'prompt_tokens', 'prompt_lengths', 'mode',
  'link.rtt_ms',
)  # fmt: skip


def draw_rows(
  rows: Sequence[Row], traces: Sequence[Trace]
) -> Iterator[Drawing]:
  """Draws a line a row: first token, its bound, and first commit."""
  rows = _timed(rows)
  if not rows or len(rows) > _ROWS:
    return  # the table has them
  alike: dict[Any, list[float]] = {}
  for row in rows:
    alike.setdefault(_work(row), []).append(_prefill_s(row))
  height = 0.19 * len(rows) + 0.8
  figure = Figure((drawing.WIDTH_IN, height), layout='constrained')
  axes = figure.subplots()
  table = []
  for y, row in enumerate(rows):
    prefill_s = statistics.median(alike[_work(row)])
    first, bound, commit = (
      row[field] - _prefill_s(row) + prefill_s
      for field in ('ttft_provisional_s', 'bound_ttft_s', 'ttft_committed_s')
    )
    axes.plot([0, prefill_s], [y, y], color='#d9d9d9', lw=6, zorder=1)
    axes.plot([prefill_s, first], [y, y], color='#d55e00', lw=1.2, zorder=2)
    axes.plot(
      [first, commit], [y, y], color=drawing.QUIET, lw=0.8, ls=(0, (1, 1))
    )
    axes.plot(bound, y, '|', color=drawing.INK, ms=9, mew=1.4, zorder=5)
    axes.plot(first, y, 'o', ms=4.5, mfc='white', mec='#d55e00', zorder=4)
    axes.plot(commit, y, 'D', ms=3.4, color=drawing.INK, zorder=3)
    table.append(
      (
        row['name'],
        drawing.number(first),
        drawing.number(bound),
        drawing.number(commit),
        str(row['n']),
      )
    )
  axes.set_yticks(range(len(rows)), [row['name'] for row in rows])
  axes.tick_params(axis='y', length=0)
  axes.set_ylim(len(rows) - 0.5, -0.7)
  axes.set_xlim(0, None)
  axes.set_xlabel(
    'time, s  (grey: prefill and split; |: bound; open circle: first token; '
    'diamond: first commit)'
  )
  counts = sorted({row['n'] for row in rows})
  drawing.foot(figure, traces, f'n = {drawing.span(counts)} requests a line')
  usual = cell_rows.label(cell_rows.usual(rows))
  yield Drawing(
    'cells',
    'Time to first token in every cell',
    figure,
    'Medians. Prefill, the same work for all cells of a prompt and mode, is '
    'levelled: every request keeps its own exposed time.'
    + (f' Where nothing else is said: {usual}.' if usual else ''),
    'Time to first token of cells. '
    + '; '.join(f'{row[0]}: {row[1]} s' for row in table)
    + '.',
    Table(
      ('cell', 'first token, s', 'bound, s', 'first commit, s', 'n'),
      tuple(table),
    ),
  )


def draw_rates(
  rows: Sequence[Row], traces: Sequence[Trace]
) -> Iterator[Drawing]:
  """Draws TTFT over the rate of the link with bounds, a figure a facet."""
  facets: dict[Any, dict[str, list[Row]]] = {}
  usual = cell_rows.usual(rows)
  for row in _timed(rows):
    key = tuple(row[name] for name in _FACET)
    name = cell_rows.name(row, usual, ('link.rate_gbps', *_OF_FACET))
    facets.setdefault(key, {}).setdefault(name, []).append(row)
  drawn = []
  for key, lines in facets.items():
    sweeps = [
      (name, sorted(found, key=lambda row: row['link_gbps']))
      for name, found in lines.items()
      if len({row['link_gbps'] for row in found}) > 1
    ]
    drawn += [
      (dict(zip(_FACET, key, strict=True)), dict(sweeps[i : i + _LINES]))
      for i in range(0, len(sweeps), _LINES)
    ]
  for number, (facet, lines) in enumerate(drawn, 1):
    name = 'ttft_over_rate' + (f'_{number}' if len(drawn) > 1 else '')
    yield _draw_rate(name, facet, lines, traces)


def _draw_rate(
  name: str,
  facet: Row,
  lines: Mapping[str, Sequence[Row]],
  traces: Sequence[Trace],
) -> Drawing:
  everything = [row for line in lines.values() for row in line]
  prefill_s = statistics.median(map(_prefill_s, everything))

  def levelled(row: Row, field: str) -> float:
    return row[field] - _prefill_s(row) + prefill_s

  unit, factor = drawing.unit_of(max(row['link_gbps'] for row in everything))
  figure = Figure((drawing.WIDTH_IN, 3.1), layout='constrained')
  axes = figure.subplots()
  table = []
  styles = drawing.styles_for([*lines])
  for i, (label, line) in enumerate(lines.items()):
    style = styles[label]
    x = [row['link_gbps'] * factor for row in line]
    bounds = [levelled(row, 'bound_ttft_s') for row in line]
    medians = [levelled(row, 'ttft_provisional_s') for row in line]
    axes.plot(x, bounds, color=style.color, ls=style.line, lw=style.width)
    axes.plot(
      x,
      medians,
      style.marker,
      ms=7.0 - 0.5 * i,  # marks at one place lie in each other
      mfc='white',
      mec=drawing.shade(style.color),
      mew=1.0,
      zorder=4 + i,
      clip_on=False,
    )
    # For the legend, a line with its mark.
    axes.plot(
      [],
      [],
      color=style.color,
      ls=style.line,
      marker=style.marker,
      mfc='white',
      mec=drawing.shade(style.color),
      label=label,
    )
    table += [
      (
        label,
        drawing.rate(row['link_gbps']),
        drawing.number(median),
        drawing.number(bound),
        str(row['n']),
      )
      for row, median, bound in zip(line, medians, bounds, strict=True)
    ]
  drawing.prefill_line(axes, prefill_s)
  axes.set_xscale('log')
  rates = sorted({row['link_gbps'] * factor for row in everything})
  if len(rates) <= 8:
    axes.set_xticks(rates, [f'{rate:.3g}' for rate in rates])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
  axes.set_xlabel(f'rate of the link, {unit}')
  axes.set_ylabel('time to first token, s')
  axes.set_ylim(0, None)
  axes.legend(
    loc='center left',
    bbox_to_anchor=(1.0, 0.5),
    frameon=False,
    handlelength=3.4,
  )
  axes.set_title(
    f'{facet["mode"]}, {facet["prompt"]}, {facet["prompt_tokens"]:,} tokens, '
    f'RTT {facet["rtt_ms"]:g} ms',
    loc='left',
    weight='bold',
  )
  counts = sorted({row['n'] for row in everything})
  drawing.foot(
    figure,
    _of_facet(traces, facet),
    f'n = {drawing.span(counts)} requests a mark, their median; lines are '
    'bounds',
    rates=False,
  )
  return Drawing(
    name,
    f'Time to first token over the rate of the link, {facet["mode"]}',
    figure,
    'Marks are medians of the first provisional token, lines are bounds. '
    'Prefill, the same work for all, is levelled: every request keeps its own '
    'exposed time.',
    'Time to first token over rate. '
    + '; '.join(f'{row[0]} at {row[1]}: {row[2]} s' for row in table)
    + '.',
    Table(
      ('cells', 'rate', 'median TTFT, s', 'median bound, s', 'n'),
      tuple(table),
    ),
  )


def draw_pareto(
  rows: Sequence[Row], traces: Sequence[Trace]
) -> Iterator[Drawing]:
  """Draws bits a value against KL from bfloat16, of Anchors and targets."""
  groups: dict[Any, list[Row]] = {}
  for row in rows:
    if row.get('kl_anchor_from_bf16') is not None:
      key = tuple(
        round(row[name], 9)
        for name in (
          'bits_anchor', 'bits_total', 'kl_anchor_from_bf16',
          'kl_target_from_bf16',
        )
      )  # fmt: skip
      groups.setdefault(key, []).append(row)
  if len(groups) < 2:
    return
  names = _common_labels([*groups.values()])
  positive = [kl for key in groups for kl in key[2:] if kl > 0]
  zero = min(positive, default=1e-6) / 4  # where bfloat16 itself is drawn
  height = max(3.0, 0.17 * len(groups) + 0.6)
  figure = Figure((drawing.WIDTH_IN, height), layout='constrained')
  axes = figure.subplots()
  styles = drawing.styles_for(names)
  for i, (key, label) in enumerate(zip(groups, names, strict=True)):
    style = styles[label]
    points = [(key[0], max(key[2], zero)), (key[1], max(key[3], zero))]
    axes.plot(
      *zip(*points, strict=True), color=style.color, ls=style.line, lw=0.9
    )
    for (x, y), fill in zip(points, ('white', style.color), strict=True):
      axes.plot(
        x,
        y,
        style.marker,
        ms=6,
        mfc=fill,
        mec=drawing.shade(style.color),
        mew=1.0,
        zorder=4,
        clip_on=False,
      )
    axes.plot(
      [],
      [],
      color=style.color,
      ls=style.line,
      marker=style.marker,
      mfc='white',
      mec=drawing.shade(style.color),
      label=f'{i + 1}  {label}',
    )
  _number(axes, [(key[0], max(key[2], zero)) for key in groups])
  front = _front([(key[0], max(key[2], zero)) for key in groups])
  axes.step(
    *zip(*front, strict=True),
    where='post',
    color=drawing.FAINT,
    lw=2.5,
    zorder=0,
    label='front of what is waited for',
  )
  axes.set_yscale('log')
  if zero > 0 and any(kl == 0 for key in groups for kl in key[2:]):
    axes.axhline(zero, color=drawing.QUIET, lw=0.6, ls=(0, (2, 2)), zorder=0)
    axes.annotate(
      'none (KL = 0)',
      (0.0, zero),
      (2, 2),
      xycoords=('axes fraction', 'data'),
      textcoords='offset points',
      fontsize=6,
      color=drawing.QUIET,
    )
  axes.set_xlabel('bits a value on the wire, with all metadata')
  axes.set_ylabel('KL(bf16 ‖ what is read), nats')
  axes.legend(loc='center left', bbox_to_anchor=(1.0, 0.5), frameon=False)
  drawing.foot(
    figure,
    traces,
    'open: the Anchor, that TTFT waits for; filled: all planes, that the '
    'output equals',
  )
  table = tuple(
    (
      label,
      f'{key[0]:.3f}',
      f'{key[2]:.3g}',
      f'{key[1]:.3f}',
      f'{key[3]:.3g}',
      str(len(found)),
    )
    for (key, found), label in zip(groups.items(), names, strict=True)
  )
  yield Drawing(
    'bits_and_kl',
    'Bits a value and KL divergence',
    figure,
    'Every codec is a line from its Anchor (open), on which decode drafts, to '
    'all its planes (filled), on which it verifies. KL is that of the next '
    'token, teacher-forced on the text that bfloat16 goes on with. The grey '
    'steps join Anchors than which none has both fewer bits and less KL.',
    'Bits and KL. '
    + '; '.join(f'{row[0]}: {row[1]} bits, KL {row[2]}' for row in table)
    + '.',
    Table(
      (
        'cells',
        'Anchor, bits',
        'KL(bf16 ‖ Anchor)',
        'all, bits',
        'KL(bf16 ‖ target)',
        'rows',
      ),
      table,
    ),
  )


def draw_heatmaps(
  rows: Sequence[Row], traces: Sequence[Trace], figures: Sequence[str]
) -> Iterator[Drawing]:
  """Draws figures over every two fields; medians over all others."""
  for figure in figures:
    known = [row for row in rows if row.get(figure) is not None]
    grids = []
    for pair in itertools.combinations(cell_rows.axes(known), 2):
      cells = cell_rows.matched(known, pair)
      sides = [[*dict.fromkeys(key[i] for key in cells)] for i in (0, 1)]
      if cells and len(cells) == len(sides[0]) * len(sides[1]):
        grids.append((pair, sides, cells))
    for start in range(0, len(grids), _PANELS):
      part = grids[start : start + _PANELS]
      suffix = f'_{start // _PANELS + 1}' if len(grids) > _PANELS else ''
      yield _draw_heatmap(f'heatmap_{figure}{suffix}', figure, part, traces)


def _draw_heatmap(
  name: str, figure: str, grids: Sequence[Any], traces: Sequence[Trace]
) -> Drawing:
  title, digits = cell_rows.FIGURES[figure]
  columns = min(3, len(grids))
  lines = math.ceil(len(grids) / columns)
  canvas = Figure(
    (drawing.WIDTH_IN * columns / 3 + 0.2, 2.1 * lines), layout='constrained'
  )
  panels = canvas.subplots(lines, columns, squeeze=False).flat
  for axes in panels[len(grids) :]:
    axes.set_axis_off()
  table = []
  for axes, (pair, sides, cells) in zip(panels, grids, strict=False):
    values = {
      key: statistics.median(row[figure] for row in found)
      for key, found in cells.items()
    }
    titles = [', '.join(fields) for fields in pair]
    _draw_panel(axes, titles, sides, values, digits)
    table += [
      (
        f'{titles[0]}={key[0]}',
        f'{titles[1]}={key[1]}',
        drawing.number(value, digits),
        str(len(cells[key])),
      )
      for key, value in values.items()
    ]
  drawing.foot(canvas, traces, f'{title}; the darker, the higher')
  return Drawing(
    name,
    f'{title} over every two fields',
    canvas,
    f'{title}: medians over cells that differ in the two fields alone. Shades '
    'are those of a panel; the numbers count.',
    f'{title}. ' + '; '.join(f'{a}, {b}: {v}' for a, b, v, _ in table) + '.',
    Table(('one', 'other', title, 'rows'), tuple(table)),
  )


def _draw_panel(
  axes: Axes,
  titles: Sequence[str],
  sides: Sequence[Sequence[str]],
  values: Mapping[Any, float],
  digits: int,
) -> None:
  low, high = min(values.values()), max(values.values())
  grid = [[values[one, other] for other in sides[1]] for one in sides[0]]
  # cividis looks alike to colour-blind readers, and is monotone in grey.
  axes.imshow(grid, cmap='cividis_r', aspect='auto', vmin=low, vmax=high or 1.0)
  for (i, one), (j, other) in itertools.product(*map(enumerate, sides)):
    value = values[one, other]
    dark = high > low and (value - low) / (high - low) > 0.5
    axes.text(
      j,
      i,
      drawing.number(value, digits),
      ha='center',
      va='center',
      fontsize=6,
      color='white' if dark else drawing.INK,
    )
  axes.set_xticks(range(len(sides[1])), sides[1])
  axes.set_yticks(range(len(sides[0])), sides[0])
  axes.set_xlabel(titles[1])
  axes.set_ylabel(titles[0])
  axes.tick_params(length=0)
  for side in axes.spines.values():
    side.set_visible(False)


def _common_labels(groups: Sequence[Sequence[Row]]) -> list[str]:
  """Returns, for every group, the values that all its rows have."""
  usual = cell_rows.usual([row for rows in groups for row in rows])
  labels = []
  for rows in groups:
    unlike = [
      field
      for field, value in rows[0]['values'].items()
      if any(row['values'][field] != value for row in rows)
    ]
    labels.append(cell_rows.name(rows[0], usual, unlike))
  return labels


def _number(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
  """Writes a number at every point; those at one place share a note."""
  notes: list[tuple[tuple[float, float], list[str]]] = []
  for number, (x, y) in enumerate(points, 1):
    for place, numbers in notes:
      if abs(x - place[0]) < 0.3 and abs(math.log(y / place[1])) < 0.4:
        numbers.append(str(number))
        break
    else:
      notes.append(((x, y), [str(number)]))
  for place, numbers in notes:
    axes.annotate(
      ', '.join(numbers),
      place,
      (5, 3),
      textcoords='offset points',
      fontsize=6.5,
      path_effects=[patheffects.withStroke(linewidth=2.2, foreground='white')],
      zorder=9,
      color=drawing.INK,
    )


def _front(
  points: Sequence[tuple[float, float]],
) -> list[tuple[float, float]]:
  """Returns the points with less KL than all of fewer bits."""
  front: list[tuple[float, float]] = []
  for point in sorted(points):
    if not front or point[1] < front[-1][1]:
      front.append(point)
  return front


def _timed(rows: Sequence[Row]) -> list[Row]:
  """Returns the rows with a token of decode: token 1 may be all there is."""
  fields = ('ttft_provisional_s', 'bound_ttft_s', 'ttft_committed_s')
  return [row for row in rows if None not in map(row.get, fields)]


def _work(row: Row) -> Any:
  """Returns what rows share that have the same prefill to do."""
  return tuple(
    row[name] for name in ('model', 'prompt', 'prompt_tokens', 'mode')
  )


def _prefill_s(row: Row) -> float:
  return row['prefill_s'] + (row['split_s'] or 0.0)


def _of_facet(traces: Sequence[Trace], facet: Row) -> list[Trace]:
  return [t for t in traces if all(t[f] == v for f, v in facet.items())]
