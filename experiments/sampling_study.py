# SPDX-License-Identifier: Apache-2.0
"""Measures sampling: distribution, acceptance, and what drafts save.

  python -m experiments.sampling_study --workdir=runs/sampling

writes `summary` records: acceptance by shared noise and by rejection sampling
in closed form, on text that follows the shipped prompts; the total variation
between draws and the target's distribution; and tokens a second of decoding
that drafts on the Anchor over decoding that does not. One alone:

  python -m experiments.sampling_study acceptance --workdir=runs/sampling
"""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import latency
from experiments import config, display, forcing, prompts, results, serving
from lynx_jax import sampling
from lynx_jax.config import CodecConfig
from lynx_jax.engine import Engine, Form, Request, Result, Sampling
from lynx_jax.prefill import Prefill
from lynx_jax.programs import fetch, program
from lynx_jax.shapes import Array, Float32

MEASUREMENTS = ('acceptance', 'total_variation', 'self_speculation')
TEMPERATURES = (0.5, 0.7, 1.0)
_DRAWS = 20_480
_SLOTS = 16  # draws of one call: so many seeds at so many positions


def main(arguments: list[str] | None = None) -> None:
  """Runs the measurements that were asked for, or all."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('measurements', nargs='*', default=[*MEASUREMENTS])
  parser.add_argument('--workdir', required=True)
  values = latency.get_config()
  parser.add_argument('--prompt_file', default=values.prompt_file)
  parser.add_argument('--prompt_tokens', type=int, default=1400)
  parser.add_argument('--text_tokens', type=int, default=192)
  parser.add_argument('--model', default='smollm2')
  parser.add_argument('--pairs', type=int, default=3)
  chosen = parser.parse_args(arguments)
  unknown = {*chosen.measurements} - {*MEASUREMENTS}
  if unknown:
    parser.error(f'{min(unknown)!r} must be one of {", ".join(MEASUREMENTS)}')
  values.model.path, values.prompt_file = chosen.model, chosen.prompt_file
  values.prompt_lengths = ''
  values.prompt_tokens = chosen.prompt_tokens + chosen.text_tokens
  values.output_tokens = chosen.text_tokens
  if chosen.model == 'tiny':
    values.engine.layer_groups = 2
  settings = config.settings(values)
  (scheme,) = (s for s in settings.schemes if s.name == 'lynx')
  model = serving.load(settings.model_path, settings.model_dtype)
  wanted = chosen.measurements
  with results.Writer(chosen.workdir) as writer, display.screen() as screen:

    def write(*records):
      for record in records:
        writer.write(record)
        screen.note(f'{record["name"]}: {record["value"]:.4f}')

    if {'acceptance', 'total_variation'} & {*wanted}:
      with screen.step('forcing the prompts on the model'):
        logits = teacher_forced(
          model, settings, scheme.codec, tokens=chosen.text_tokens
        )
      if 'acceptance' in wanted:
        write(*acceptance(logits))
      if 'total_variation' in wanted:
        with screen.step(f'drawing {_DRAWS} tokens'):
          write(*total_variation(logits[0][0][0, 0]))
    if 'self_speculation' in wanted:
      file, _ = settings.prompts[0]
      text = model.tokenizer.encode(prompts.read(file))[: chosen.prompt_tokens]
      with serving.connect(
        model, scheme, scheme.engine(settings.engine)
      ) as line:
        with screen.step('warming up an engine'):
          costs = line.engine.warm_up()
        screen.note(
          f'a draft {costs.draft_s:.3f} s, a verification '
          f'{costs.verify_s:.3f} s, one row alone {costs.plain_s:.3f} s'
        )
        with screen.step('decoding with and without drafts'):
          write(*self_speculation(line.engine, text, pairs=chosen.pairs))


# Blocks of a text: logits of the target and of drafts.
Blocks = list[tuple[Float32[Array, 'B T V'], Float32[Array, 'B T V']]]


def teacher_forced(
  model: serving.Model,
  settings: config.Settings,
  codec: CodecConfig,
  *,
  tokens: int,
) -> Blocks:
  """Returns logits over the last `tokens` of every prompt's text.

  The text itself is forced, and no continuation of a model's own; what comes
  before is the prompt, whose KV both read as the codec gives it back.

  Args:
    model: where it runs.
    settings: whose prompts are taken.
    codec: of the scheme.
    tokens: of every text.
  """
  longest = max(count for _, count in settings.prompts)
  engine = dataclasses.replace(settings.engine, prompt_tokens=longest)
  prefill = Prefill(model.prefill, CodecConfig(), engine)
  states, forced = [], []
  for file, count in settings.prompts:
    ids = model.tokenizer.encode(prompts.read(file))[:count]
    *_, state = prefill.chunks(np.asarray(ids[:-tokens], np.int32))
    states.append(state)
    forced.append(np.asarray(ids[-tokens:], np.int32))
  texts = forcing.Texts.gather(
    model.config, [file for file, _ in settings.prompts], states
  )
  oracle = forcing.Oracle(model.decode, texts, tokens=tokens, drafts=1, ends=())
  return list(oracle.logits(np.stack(forced), *forcing.read_both(texts, codec)))


def acceptance(blocks: Blocks) -> list[dict[str, Any]]:
  """Returns how often a draft is accepted, by two rules, in closed form."""
  rates = program(coupling, name='coupling')
  found = []
  for temperature in TEMPERATURES:
    both = [fetch(rates(*block, np.float32(temperature))) for block in blocks]
    for name, parts in zip(
      ('shared_noise', 'rejection'), zip(*both, strict=True), strict=True
    ):
      values = np.concatenate(parts, axis=1)
      found.append(
        results.summary_record(
          f'acceptance_{name}_temperature{temperature:g}',
          float(values.mean()),
          '',
          values.size,
        )
      )
  return found


def coupling(
  target: Float32[Array, 'B T V'],
  draft: Float32[Array, 'B T V'],
  temperature: Float32[Array, ''],
) -> tuple[Float32[Array, 'B T'], Float32[Array, 'B T']]:
  """Returns the chance that one noise chooses one token, and 1 - TV.

  The first is the sum over i of 1 / sum_j max(p_j / p_i, q_j / q_i), see
  arXiv:2408.07978. In the order of p / q the inner sum is one of p_j / p_i over
  those behind i, and one of q_j / q_i over those before.
  """

  def row(both):
    p, q = (jax.nn.softmax(x / temperature) for x in both)
    overlap = jnp.sum(jnp.minimum(p, q))
    order = jnp.argsort(jnp.log(p) - jnp.log(q))
    p, q = p[order], q[order]
    behind = jnp.cumsum(p[::-1])[::-1]
    before = jnp.cumsum(q) - q
    chance = jnp.where((p > 0) & (q > 0), 1 / (behind / p + before / q), 0.0)
    return jnp.sum(chance), overlap

  return jax.lax.map(lambda both: jax.lax.map(row, both), (target, draft))


def total_variation(logits: Float32[Array, 'V']) -> list[dict[str, Any]]:
  """Draws tokens, and returns their distance from the target's distribution.

  Of 20,480 draws from 50 tokens that are equally likely, the distance is 0.02
  on average. `sampling_chi_square_p` is the chance that draws from the target's
  distribution are at least so far from it by Pearson's test; tokens that are
  expected less than 5 times count as one.
  """
  how = Sampling(temperature=1.0, top_k=50)
  one = jax.tree.map(lambda x: x[None], how.row())
  (p,) = fetch(jax.nn.softmax(sampling.filtered(logits[None, None], one)))[0]
  rows = jnp.broadcast_to(logits, (_SLOTS, _SLOTS, *logits.shape))
  samplings = jax.tree.map(lambda x: np.repeat(x, _SLOTS), one)
  positions = np.tile(np.arange(_SLOTS, dtype=np.int32), (_SLOTS, 1))
  choose = program(sampling.choose, name='choose')
  seen = np.zeros(p.size)
  for first in range(0, _DRAWS // _SLOTS, _SLOTS):
    seeds = first + np.arange(_SLOTS, dtype=np.uint32)
    drawn = choose(
      rows,
      dataclasses.replace(samplings, seed=seeds),
      positions,
      np.ones(_SLOTS, bool),
    )
    seen += np.bincount(fetch(drawn).ravel(), minlength=p.size)
  draws = int(seen.sum())
  distance = np.abs(seen / draws - p).sum() / 2
  return [
    results.summary_record(
      'sampling_total_variation', float(distance), '', draws
    ),
    results.summary_record(
      'sampling_chi_square_p', chi_square(seen, p * draws), '', draws
    ),
  ]


def chi_square(seen: np.ndarray, expected: np.ndarray) -> float:
  """Returns the chance of counts at least so far from what is expected.

  Args:
    seen: counts.
    expected: as many in all.
  """
  often = expected >= 5
  both = (
    [*counts[often].tolist(), float(counts[~often].sum())]
    for counts in (seen, expected)
  )
  cells = [(n, mean) for n, mean in zip(*both, strict=True) if mean > 0]
  far = sum((n - mean) ** 2 / mean for n, mean in cells)
  if len(cells) < 2:
    return 1.0
  tail = jax.scipy.special.gammaincc((len(cells) - 1) / 2, far / 2)
  return float(fetch(tail))


def self_speculation(
  engine: Engine, prompt: Sequence[int], *, pairs: int
) -> list[dict[str, Any]]:
  """Returns tokens a second with drafts over those without, after arrival.

  `self_speculation_speedup` compares with the same guarantee, plain decoding in
  the verify program; `self_speculation_over_plain` with one row a step, whose
  output may differ.

  Args:
    engine: warmed up and idle, over a link without limit.
    prompt: of all requests.
    pairs: how often each form decodes, by turns.
  """
  chosen = engine.config.draft_tokens
  times: dict[str, list[float]] = {'drafts': [], 'verify': [], 'plain': []}
  for _ in range(pairs):
    for name, seconds in times.items():
      drafts = chosen if name == 'drafts' else 0
      engine.config = dataclasses.replace(engine.config, draft_tokens=drafts)
      result = engine.generate(
        Request(
          prompt=prompt,
          output_tokens=engine.config.output_tokens,
          form=Form.PLAIN if name == 'plain' else Form.VERIFY,
          streamed=False,
        )
      )
      own = after_first_s(result)
      assert own is not None, f'{len(result.tokens)} tokens: one round has them'
      seconds.append(own)
  engine.config = dataclasses.replace(engine.config, draft_tokens=chosen)
  return [
    results.summary_record(
      name,
      statistics.median(
        other / own
        for other, own in zip(times[form], times['drafts'], strict=True)
      ),
      'x',
      pairs,
    )
    for name, form in [
      ('self_speculation_speedup', 'verify'),
      ('self_speculation_over_plain', 'plain'),
    ]
  ]


def after_first_s(result: Result) -> float | None:
  """Returns seconds a token after the first verification; None without any.

  The first one may commit what was drafted while the Residual was under way.
  """
  if result.done_s is None or result.committed_s is None:
    return None
  later = sum(t > result.committed_s for t in result.commit_times_s)
  return (result.done_s - result.committed_s) / later if later else None


if __name__ == '__main__':
  main()
