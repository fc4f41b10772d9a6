# SPDX-License-Identifier: Apache-2.0
"""Draws the codec search: what bits buy, and which layers need them."""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import drawing, results, summaries
from experiments.drawing import Drawing, Table

Record = Mapping[str, Any]

# (value, low, high); None where there are too few prompts for an interval.
_Point = tuple[float, float | None, float | None]


def draw(records: Sequence[Record]) -> Iterator[Drawing]:
  """Draws bits against KL and acceptance, and KL by layer.

  Args:
    records: of any study; those of the last settings are taken.
  """
  details = [
    record['detail']
    for record in records
    if record.get('name') == results.CODEC and 'version' in record['detail']
  ]
  details = [d for d in details if d['version'] == details[-1]['version']]
  if details:
    yield _pareto(details)
  if layers := [d['layers'] for d in details if d.get('layers')]:
    yield _layers(layers)


def _pareto(details: Sequence[Record]) -> Drawing:
  names = [*details[0]['candidates']]
  found: dict[str, dict[str, _Point]] = {}
  counts: dict[str, int] = {}
  for name in names:
    # Not every candidate is measured on all prompts.
    mine = [d['candidates'][name] for d in details if name in d['candidates']]
    counts[name] = len(mine)
    rounds = [one['rounds'] for one in mine if one.get('rounds')]
    found[name] = {
      'bits': _point([one['bits'] for one in mine]),
      'kl': _point([one['kl'] for one in mine]),
      'agreement': _point([one['agreement'] for one in mine]),
    }
    if rounds:
      found[name]['acceptance'] = _point(
        [summaries.accepted_share(one) for one in rounds]
      )
  figure = Figure((drawing.WIDTH_IN, 3.0), layout='constrained')
  drafted = sum('acceptance' in points for points in found.values())
  left, *right = figure.subplots(1, 2 if drafted > 1 else 1, squeeze=False)[0]
  left.set(yscale='log', ylabel='KL(target ‖ draft), nats')
  places = [(left, _scatter(left, found, 'kl', better=-1))]
  for axes in right:
    axes.set(ylabel='accepted / drafted')
    places.append((axes, _scatter(axes, found, 'acceptance', better=1)))
  for axes, _ in places:
    axes.set_xlabel('Anchor, bits a value')
  figure.draw_without_rendering()  # labels depend on where things are
  for axes, points in places:
    _number(axes, points)
  lengths = sorted(d['prompt_tokens'] for d in details)
  keys = [f'{i}  {name}' for i, name in enumerate(names, 1)]
  words = (
    f'measured · n = {drawing.span(sorted(counts.values()), str)} prompts of '
    f'{drawing.span(lengths, "{:,}".format)} tokens; dots are means, whiskers '
    'their 90 % intervals'
  )
  figure.text(
    0.0,
    -0.02,
    '\n'.join([*keys, words]),
    fontsize=6.0,
    color=drawing.QUIET,
    va='top',
    linespacing=1.4,
  )
  rows = tuple(
    (
      f'{i} {name}',
      str(counts[name]),
      drawing.number(points['bits'][0]),
      drawing.number(points['kl'][0], 5),
      _between(points['kl']),
      drawing.number(points['agreement'][0], 4),
      *(
        (
          drawing.number(points['acceptance'][0], 4),
          _between(points['acceptance']),
        )
        if 'acceptance' in points
        else ('–', '–')
      ),
    )
    for i, (name, points) in enumerate(found.items(), 1)
  )
  return Drawing(
    'codecs',
    'What bits buy',
    figure,
    'Means over prompts with bootstrap 90 % intervals, the codecs numbered. '
    'KL is that of a draft from the target of its own codec, teacher-forced; '
    'acceptance is that of rounds, measured for the best by KL. The line joins '
    'codecs that no other beats in both.',
    'Codecs: '
    + '; '.join(f'{row[0]}: {row[2]} bits, KL {row[3]}' for row in rows)
    + '.',
    Table(
      (
        'codec',
        'prompts',
        'bits a value',
        'KL, nats',
        '90 % interval',
        'agreement',
        'acceptance',
        '90 % interval',
      ),
      rows,
    ),
  )


def _point(values: Sequence[float]) -> _Point:
  interval = summaries.interval(values, of=statistics.fmean)
  return statistics.fmean(values), *interval


def _between(point: _Point) -> str:
  _, low, high = point
  return '–' if low is None or high is None else f'{low:.5f} – {high:.5f}'


def _scatter(
  axes: Axes,
  found: Mapping[str, Mapping[str, _Point]],
  value: str,
  *,
  better: int,
) -> dict[int, tuple[float, float]]:
  """Draws points and the front; `better` is -1 where less is.

  Returns:
    Points by number.
  """
  points = {}
  for number, named in enumerate(found.values(), 1):
    if value not in named:
      continue
    x, (y, low, high) = named['bits'][0], named[value]
    points[number] = x, y
    if low is not None and high is not None:
      axes.plot([x, x], [low, high], color=drawing.QUIET, lw=0.6, zorder=2)
    axes.plot(x, y, 'o', color=drawing.INK, ms=3.0, zorder=3)
  front: list[tuple[float, float]] = []
  for x, y in sorted(points.values(), key=lambda p: (p[0], -better * p[1])):
    if not front or better * (y - front[-1][1]) > 0:
      front.append((x, y))
  if len(front) > 1:
    axes.plot(
      *zip(*front, strict=True),
      color='#0072b2',
      lw=1.2,
      drawstyle='steps-post',
      zorder=1,
    )
  axes.margins(0.12, 0.14)
  return points


def _number(axes: Axes, points: Mapping[int, tuple[float, float]]) -> None:
  """Writes a number beside every point, at the nearest place that is free."""
  at = {
    number: axes.transData.transform(point) * 72 / axes.figure.dpi
    for number, point in points.items()
  }
  taken = [*at.values()]
  for number, place in at.items():
    for away, turn in itertools.product(range(6, 60, 3), range(8)):
      angle = turn * math.pi / 4
      offset = away * math.cos(angle), away * math.sin(angle)
      label = place + offset
      if all(
        abs(label[0] - x) >= 8.0 or abs(label[1] - y) >= 6.5
        for x, y in taken
        if (x, y) != tuple(place)
      ):
        break
    taken.append(label)
    axes.annotate(
      str(number),
      points[number],
      offset,
      textcoords='offset points',
      ha='center',
      va='center',
      fontsize=6.0,
      arrowprops={
        'arrowstyle': '-', 'color': drawing.QUIET, 'lw': 0.4, 'shrinkB': 0.0
      },
    )  # fmt: skip


def _layers(layers: Sequence[Sequence[Mapping[str, float]]]) -> Drawing:
  figure = Figure((drawing.WIDTH_IN, 2.3), layout='constrained')
  axes = figure.subplots()
  rows = []
  for layer, of_prompts in enumerate(zip(*layers, strict=True)):
    k, v = (statistics.fmean(one[name] for one in of_prompts) for name in 'kv')
    rows.append((layer, k, v))
  for index, (name, style) in enumerate(
    drawing.styles_for(('K', 'V')).items(), 1
  ):
    axes.plot(
      [row[0] for row in rows],
      [max(row[index], 1e-12) for row in rows],
      style.marker,
      ls=style.line,
      color=style.color,
      mec=drawing.INK,
      mew=0.4,
      ms=4.0,
      lw=1.0,
      label=f'{name} alone',
    )
  axes.set(yscale='log', xlabel='layer', ylabel='KL(target ‖ draft), nats')
  axes.legend(
    loc='lower left', bbox_to_anchor=(0.0, 1.0), ncols=2, frameon=False
  )
  return Drawing(
    'layers',
    'Which layers need bits',
    figure,
    'KL if the K, or the V, of one layer is read from the Anchor and all else '
    "as the target reads it; the run's own codec, the first block of the "
    f'continuation, mean over n = {len(layers)} prompts.',
    'KL by layer: '
    + '; '.join(f'{layer}: K {k:.2g}, V {v:.2g}' for layer, k, v in rows)
    + '.',
    Table(
      ('layer', 'K alone, nats', 'V alone, nats'),
      tuple((str(layer), f'{k:.3g}', f'{v:.3g}') for layer, k, v in rows),
    ),
  )
