# SPDX-License-Identifier: Apache-2.0
"""Draws one group of one head's keys or values, as it is cut into planes."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments import drawing
from experiments.drawing import Drawing, Table
from experiments.selection import Trace


def draw(traces: Sequence[Trace]) -> Drawing | None:
  """Draws what the first `split_example` event of the requests holds.

  Args:
    traces: requests; see `results.split_record`.
  """
  for trace in traces:
    for event in trace.spans('split_example'):
      return _draw(trace, event['detail'])
  return None


def _draw(trace: Trace, detail) -> Drawing:
  forms = {
    name: np.array(detail[name], np.float32).T
    for name in ('dense', 'anchor', 'complete')
  }
  errors = {
    name: np.abs(forms[name] - forms['dense'])
    for name in ('anchor', 'complete')
  }
  most = float(np.abs(forms['dense']).max())
  worst = float(errors['anchor'].max())
  bits = detail['planes'][0], sum(detail['planes'])
  times = 2 ** (bits[1] - bits[0])
  what = f'{detail["tensor"].upper()} of layer {detail["layer"]}, '
  what += f'KV head {detail["head"]}'
  figure = Figure((drawing.WIDTH_IN, 4.0), layout='constrained')
  grid = figure.subplots(2, 3, sharex=True, sharey=True)
  values = {'vmin': -most, 'vmax': most, 'cmap': 'cividis'}
  differences = {'vmin': 0.0, 'vmax': worst, 'cmap': 'Greys'}
  first, stop = detail['tokens']
  panels = (
    ('bfloat16, 16 bits', forms['dense'], values),
    (f'Anchor, {bits[0]} bits', forms['anchor'], values),
    (f'Anchor + Residual, {bits[1]} bits', forms['complete'], values),
    ('error of the Anchor', errors['anchor'], differences),
    ('error of Anchor + Residual', errors['complete'], differences),
    (
      f'the same, enlarged {times} times',
      errors['complete'] * times,
      differences,
    ),
  )
  for axes, (title, image, how) in zip(grid.flat, panels, strict=True):
    shown = axes.imshow(
      image,
      aspect='auto',
      interpolation='nearest',
      extent=(first, stop, image.shape[0], 0),
      **how,
    )
    axes.set_title(title, loc='left')
    axes.spines[['top', 'right']].set_visible(True)
    if axes in grid[:, 2]:
      bar = figure.colorbar(shown, ax=axes, fraction=0.06, pad=0.02)
      bar.outline.set_linewidth(0.6)
      bar.set_label('value' if how is values else '|error|')
  for axes in grid[:, 0]:
    axes.set_ylabel('channel')
  for axes in grid[1]:
    axes.set_xlabel('token')
  drawing.foot(figure, [trace], what, rates=False)
  rows = tuple(
    (
      name,
      drawing.number(float(np.sqrt(np.mean(error**2))), 4),
      drawing.number(float(error.max()), 4),
    )
    for name, error in (
      (f'Anchor, {bits[0]} bits', errors['anchor']),
      (f'Anchor + Residual, {bits[1]} bits', errors['complete']),
    )
  )
  return Drawing(
    'split',
    f'What the planes hold: {what}',
    figure,
    f'Channels of a head over tokens {first} to {stop - 1}, as prefill '
    'computes them and as decode reads them back. Every channel of a group of '
    f'{detail["group"]} tokens has a scale and an offset of its own'
    + (
      ', after a rotation of the channels that is undone here'
      if detail['rotation'] != 'none'
      else ''
    )
    + '. The Residual does not replace the Anchor: it adds the lower bits of '
    'the same code.',
    f'{what}: values between {-most:.1f} and {most:.1f}. '
    + '; '.join(
      f'root mean square error of {name}: {rms}' for name, rms, _ in rows
    )
    + '.',
    Table(('read with', 'root mean square error', 'largest error'), rows),
  )
