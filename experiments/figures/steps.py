# SPDX-License-Identifier: Apache-2.0
"""Draws a request step by step: which tokens each draft and verification met.

Everything follows from the events of drafting and verifying and from the
request's `rounds`, (drafted, accepted) of every verification.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from experiments import drawing
from experiments.drawing import Drawing, Table
from experiments.selection import Trace

_MOST_STEPS, _MOST_TOKENS = 32, 48
_ROW_IN = 0.165


@dataclasses.dataclass(frozen=True)
class Step:
  """What one step did to the tokens of a request; positions from 0 on.

  Attributes:
    name: draft, or verify.
    at_s: its end, since the request's arrival.
    committed: tokens that were committed before it.
    provisional: drafts that are unverified after it.
    accepted, rejected: drafts that it verified.
    own: tokens of the target itself: the one after the last accepted draft.
  """

  name: str
  at_s: float
  committed: int
  provisional: int = 0
  accepted: int = 0
  rejected: int = 0
  own: int = 0


def steps_of(trace: Trace) -> list[Step]:
  """Returns the steps of a request whose rounds are all in its events.

  Raises:
    ValueError: rounds were not looked at one by one; see `Request.streamed`.
  """
  verified, rounds = trace.spans('verify'), list(trace['rounds'] or ())
  if len(verified) != len(rounds):
    raise ValueError(
      f'{len(rounds)} rounds in {len(verified)} events; a stepped view needs a '
      'request that was streamed'
    )
  found, committed = [], 1
  for event in sorted(
    trace.spans('draft') + verified, key=lambda e: e['end_s']
  ):
    detail = event['detail']
    step = Step(event['name'], event['end_s'], committed, detail['backlog'])
    if step.name == 'verify':
      drafted, accepted = rounds.pop(0)
      taken = min(accepted, detail['committed'])
      step = dataclasses.replace(
        step,
        accepted=taken,
        rejected=drafted - accepted,
        own=detail['committed'] - taken,
      )
      committed += detail['committed']
    found.append(step)
  return found


def draw(traces: Sequence[Trace]) -> Drawing | None:
  """Draws the first request with a `pieces` event.

  Args:
    traces: requests; see `results.pieces_record`.
  """
  for trace in traces:
    for event in trace.spans('pieces'):
      return _draw(trace, event['detail']['pieces'])
  return None


def _draw(trace: Trace, pieces: Sequence[str]) -> Drawing:
  everything = steps_of(trace)
  steps, pieces = everything[:_MOST_STEPS], pieces[:_MOST_TOKENS]
  top_in, bottom_in, left_in = 0.85, 0.3, 1.8
  height_in = top_in + bottom_in + _ROW_IN * len(steps)
  figure = Figure((drawing.WIDTH_IN, height_in))
  axes = figure.add_axes(
    (
      left_in / drawing.WIDTH_IN,
      bottom_in / height_in,
      1 - (left_in + 0.1) / drawing.WIDTH_IN,
      _ROW_IN * len(steps) / height_in,
    )
  )
  axes.set(xlim=(0, len(pieces)), ylim=(len(steps), 0))
  axes.set_axis_off()
  for i, piece in enumerate(pieces):
    axes.annotate(
      _shown(piece),
      (i + 0.5, 0),
      (0, 3),
      textcoords='offset points',
      rotation=90,
      ha='center',
      va='bottom',
      fontsize=6.2,
      annotation_clip=False,
    )
  start = trace.prefill_end_s or 0.0
  for row, step in enumerate(steps):
    _draw_step(axes, step, row, len(pieces))
    for x, text, weight in (
      (-1.46, f'{step.at_s - start:.2f} s', 'normal'),
      (-1.4, _words(step), 'bold' if step.name == 'verify' else 'normal'),
    ):
      axes.annotate(
        text,
        (0, row + 0.5),
        (72 * x, 0),
        textcoords='offset points',
        ha='right' if x < -1.45 else 'left',
        va='center',
        fontsize=6.0,
        weight=weight,
        annotation_clip=False,
      )
  _mark_key(axes, len(steps), len(pieces))
  drawing.foot(
    figure,
    [trace],
    f'{trace["scheme"]}, {trace["mode"]}; times are from the end of prefill to '
    'that of the step; token 1 is of prefill',
  )
  left_out = len(everything) - len(steps)
  return Drawing(
    'steps',
    f'Draft, verify, commit: {trace["scheme"]} step by step',
    figure,
    'A column is a generated token, a row a step with the time of its end '
    'after prefill. Drafts read the Anchor and are provisional; a verification '
    'reads the complete cache, accepts the longest run of drafts that it would '
    'have chosen itself, and adds one token of its own.'
    + (f' {left_out} further steps are not shown.' if left_out else ''),
    '; '.join(f'{_words(s)} at {s.at_s - start:.2f} s' for s in steps) + '.',
    Table(
      (
        'step',
        'seconds after prefill',
        'committed before',
        'accepted',
        'rejected',
        'of the target',
        'unverified after',
      ),
      tuple(
        (
          step.name,
          drawing.number(step.at_s - start),
          *(
            str(n)
            for n in (
              step.committed,
              step.accepted,
              step.rejected,
              step.own,
              step.provisional,
            )
          ),
        )
        for step in everything
      ),
    ),
  )


# How a token looks: face, edge, dashes, and a sign, so that colour only
# repeats what can be read without it.
_LOOKS: dict[str, tuple[str, str, str, str]] = {
  'committed': ('#d0d0d0', '#d0d0d0', '-', ''),
  'provisional': ('#fff3d6', '#b97a00', '-', '?'),
  'accepted': ('#0b5c94', '#0b5c94', '-', '✓'),
  'of the target': ('#1a1a1a', '#1a1a1a', '-', '+'),
  'rejected': ('white', '#a63c06', '--', '✗'),
}


def _draw_step(axes: Axes, step: Step, row: int, tokens: int) -> None:
  end = step.committed + step.accepted
  kinds = ['committed'] * step.committed + ['accepted'] * step.accepted
  kinds += ['of the target'] * step.own
  kinds += ['provisional'] * step.provisional
  for x, kind in enumerate(kinds[:tokens]):
    _draw_token(axes, kind, x, row)
  # Below the target's token, which takes the place of the first of them.
  for x in range(end + step.own, min(end + step.rejected, tokens)):
    _draw_token(axes, 'rejected', x, row)


def _draw_token(axes: Axes, kind: str, x: float, row: float) -> None:
  face, edge, dashes, sign = _LOOKS[kind]
  axes.add_patch(
    Rectangle(
      (x + 0.06, row + 0.09),
      0.88,
      0.82,
      facecolor=face,
      edgecolor=edge,
      linestyle=dashes,
      linewidth=0.6,
      clip_on=False,
    )
  )
  dark = face in ('#0b5c94', '#1a1a1a')
  axes.text(
    x + 0.5,
    row + 0.52,
    sign,
    ha='center',
    va='center',
    fontsize=5.8,
    color='white' if dark else drawing.INK,
  )


def _mark_key(axes: Axes, rows: int, tokens: int) -> None:
  words = {
    'committed': 'committed before',
    'provisional': 'draft, provisional',
    'accepted': 'draft, accepted',
    'of the target': "the target's own",
    'rejected': 'draft, rejected',
  }
  for i, (kind, text) in enumerate(words.items()):
    x = i * tokens / len(words)
    _draw_token(axes, kind, x, rows + 0.7)
    axes.text(x + 1.15, rows + 1.2, text, va='center', fontsize=6.2)


def _words(step: Step) -> str:
  if step.name == 'draft':
    return 'draft one token'
  drafted = step.accepted + step.rejected
  if not drafted:
    return 'verify: 1 token of its own'
  return f'verify: {step.accepted} of {drafted} accepted, +{step.own}'


def _shown(piece: str) -> Any:
  """Returns a token's text so that it can be seen and stays short."""
  text = piece.replace('\n', '⏎').replace(' ', '␣').replace('$', r'\$')
  return text if len(text) <= 11 else f'{text[:10]}…'
