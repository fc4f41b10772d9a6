# SPDX-License-Identifier: Apache-2.0
"""Draws acceptance by position in a round, with its intervals."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import drawing, selection, summaries
from experiments.drawing import Drawing, Style, Table
from experiments.selection import Trace

Record = Mapping[str, Any]

_MOST_PROMPTS = 8  # more are neither drawn one by one nor named


@dataclasses.dataclass(frozen=True)
class _Rounds:
  """(drafted, accepted) of the rounds of one line, by prompt."""

  scheme: str
  label: str
  by_prompt: dict[str, list[tuple[int, int]]]

  def at(self, position: int, prompt: str | None = None) -> tuple[int, int]:
    """Returns how many drafts at a position were accepted, and were made."""
    rounds = [
      r
      for name, mine in self.by_prompt.items()
      if prompt in (None, name)
      for r in mine
    ]
    made = sum(drafted >= position for drafted, _ in rounds)
    return sum(accepted >= position for _, accepted in rounds), made


def _rounds(traces: Sequence[Trace], runs: Sequence[Record]) -> list[_Rounds]:
  """Returns what to draw: runs of a fixed draft length, else all requests."""
  lines: dict[Any, _Rounds] = {}
  for run in runs:
    drafts = run.get('draft_tokens')
    full = [(d, a) for d, a in run.get('rounds') or () if d == drafts]
    if full:
      label = run.get('label') or f'lynx, γ = {drafts}'
      scheme = run.get('label') or 'lynx'
      line = lines.setdefault(label, _Rounds(scheme, label, {}))
      line.by_prompt.setdefault(str(run.get('prompt')), []).extend(full)
  if lines:
    return list(lines.values())
  seen = set()
  for trace in traces:
    name, prompt = trace['scheme'], trace['prompt']
    rounds = [(d, a) for d, a in trace['rounds'] or () if d]
    # A greedy request that is repeated is no second experiment.
    key = name, prompt, tuple(rounds)
    if rounds and key not in seen:
      seen.add(key)
      line = lines.setdefault(name, _Rounds(name, name, {}))
      line.by_prompt.setdefault(str(prompt), []).extend(rounds)
  return [lines[name] for name in selection.ordered(lines, selection.SCHEMES)]


def draw(
  traces: Sequence[Trace],
  runs: Sequence[Record],
  styles: Mapping[str, Style],
) -> Drawing | None:
  """Draws accepted over drafted by the position in the round.

  Args:
    traces: requests, for devices and, without runs, for rounds.
    runs: details of `acceptance` events; one with a `label` is of that line.
    styles: by scheme or label.
  """
  lines = _rounds(traces, runs)
  if not lines:
    return None
  longest = max(d for li in lines for r in li.by_prompt.values() for d, _ in r)
  figure = Figure((drawing.WIDTH_IN, 2.6), layout='constrained')
  axes = figure.subplots()
  table: list[tuple[str, ...]] = []
  lowest = 1.0
  for i, line in enumerate(lines):
    style = styles.get(line.scheme) or drawing.style_of(line.scheme)
    if 1 < len(line.by_prompt) <= _MOST_PROMPTS:
      lowest = min(lowest, _draw_prompts(axes, line, longest))
    shift = (i - (len(lines) - 1) / 2) * min(0.22, 0.8 / len(lines))
    row = 3 + 7 * (len(lines) - 1 - i)
    for position in range(1, longest + 1):
      hits, n = line.at(position)
      if not n:
        continue
      low, high = summaries.wilson(hits, n)
      lowest = min(lowest, low)
      x = position + shift
      axes.plot([x, x], [low, high], color=style.color, lw=1.4, zorder=3)
      axes.plot(
        x,
        hits / n,
        style.marker,
        color=style.color,
        mec=drawing.INK,
        mew=0.5,
        ms=4.8,
        zorder=4,
        label=line.label if position == 1 else None,
      )
      axes.annotate(
        str(n),
        (x, 0),
        (0, row),
        xycoords=('data', 'axes fraction'),
        textcoords='offset points',
        ha='center',
        fontsize=5.6,
        color=drawing.shade(style.color),
      )
      table.append(
        (
          line.label,
          str(position),
          drawing.number(hits / n),
          drawing.between(low, high),
          str(n),
        )
      )
    axes.annotate(
      f'n, {line.label}',
      (1.0, 0),
      (3, row),
      xycoords='axes fraction',
      textcoords='offset points',
      fontsize=5.8,
      color=drawing.shade(style.color),
    )
  step = 0.1 if lowest > 0.45 else 0.2
  bottom = max(0.0, math.floor(lowest / step) * step)
  # Room below for the counts.
  room = (1.0 - bottom) * (0.05 + 0.06 * len(lines))
  axes.set(ylim=(bottom - room, 1.02), xlim=(0.4, longest + 0.6))
  axes.set_yticks(np.arange(round((1.0 - bottom) / step) + 1) * step + bottom)
  axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
  axes.xaxis.set_major_locator(ticker.MaxNLocator(16, integer=True))
  axes.set_xlabel('position of the draft in its round')
  axes.set_ylabel('accepted / drafted')
  axes.legend(
    loc='lower left',
    bbox_to_anchor=(0.0, 1.0),
    ncols=4,
    frameon=False,
    handletextpad=0.2,
    borderaxespad=0.2,
  )
  prompts = sorted({prompt for line in lines for prompt in line.by_prompt})
  words = f'{len(prompts)} prompts'
  if len(prompts) <= _MOST_PROMPTS:
    words = f'prompts: {", ".join(prompts)}'
    words += ', a thin line each' if len(prompts) > 1 else ''
  drawing.foot(
    figure,
    traces,
    f'n = rounds, under every mark; whiskers are 90 % intervals; {words}',
    rates=False,
  )
  fixed = ' Only full rounds of γ drafts.' if runs else ''
  return Drawing(
    'acceptance',
    'Acceptance by position in the round',
    figure,
    'How many of the drafts at a position were accepted, which needs all '
    f'before it to be accepted; bonus tokens are not counted.{fixed} n is the '
    'number of rounds that drafted so far. Whiskers are 90 % Wilson intervals '
    'with rounds taken as independent; thin lines are single prompts. '
    'Requests with the same rounds on the same prompt count once.',
    'Acceptance by position. '
    + '; '.join(
      f'{row[0]} at {row[1]}: {row[2]}, n = {row[4]}' for row in table
    )
    + '.',
    Table(
      (
        'scheme',
        'position',
        'accepted / drafted',
        '90 % interval',
        'rounds, n',
      ),
      tuple(table),
    ),
  )


def _draw_prompts(axes: Axes, line: _Rounds, longest: int) -> float:
  """Draws a thin line a prompt, names the worst; returns the lowest value."""
  ends = []
  for prompt in line.by_prompt:
    values = [
      (position, hits / n)
      for position in range(1, longest + 1)
      for hits, n in [line.at(position, prompt)]
      if n
    ]
    axes.plot(*zip(*values, strict=True), color='#9a9a9a', lw=0.6, zorder=1)
    ends.append((min(value for _, value in values), prompt, values[-1]))
  lowest, prompt, (x, y) = min(ends)
  axes.annotate(
    f'worst: {prompt}',
    (x, y),
    (6, 0),
    textcoords='offset points',
    va='center',
    fontsize=5.8,
    color=drawing.QUIET,
    annotation_clip=False,
  )
  return lowest
