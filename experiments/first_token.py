# SPDX-License-Identifier: Apache-2.0
"""Measures the time from a model's files to its first token, after imports.

  python -m experiments.first_token [--model=smollm2] [--tokens=64]

Run it twice: the first run fills the cache of compiled programs. Seconds of the
clock and of the CPU are given by part; it knows no transfer and no scheme.
"""

import argparse
import sys
import time

import jax

from experiments import cli, prompts, schemes, serving
from lynx_jax.config import CodecConfig, EngineConfig
from lynx_jax.engine import Committed, Request


def main(arguments: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--model', default='smollm2', help='as config.model.path')
  parser.add_argument('--dtype', default='bfloat16', help='of its weights')
  parser.add_argument('--tokens', type=int, default=64, help='of the prompt')
  chosen = parser.parse_args(arguments)
  cli.keep_programs()
  jax.devices()  # as an import does
  clock = _Clock()
  model = serving.load(chosen.model, chosen.dtype)
  clock.lap('load')
  prompt = model.tokenizer.encode(prompts.read('book'))[: chosen.tokens]
  engine_config = EngineConfig(
    prompt_tokens=chosen.tokens, output_tokens=16, layer_groups=10
  )
  scheme = schemes.scheme('lynx', CodecConfig())
  with serving.connect(model, scheme, engine_config) as line:
    clock.lap('engine')
    ask = Request(prompt=prompt, output_tokens=1)
    tokens = [
      token
      for event in line.engine.stream(ask)
      if isinstance(event, Committed)
      for token in event.tokens
    ]
    clock.lap('prefill')
  print(f'{len(prompt)} tokens, then {model.tokenizer.decode(tokens)!r}')
  print(clock.total())
  return 0


class _Clock:
  """Tells laps, and their sum."""

  def __init__(self):
    self._start = self._last = time.monotonic(), time.process_time()

  def lap(self, name: str) -> None:
    """Prints what has passed since the last lap."""
    print(f'{name:<8} {self._since(self._last)}')
    self._last = time.monotonic(), time.process_time()

  def total(self) -> str:
    """Returns what has passed since the start, up to the last lap."""
    seconds, cpu_s = (
      b - a for a, b in zip(self._start, self._last, strict=True)
    )
    return f'load_to_first_token_s {seconds:.2f}, {cpu_s:.2f} of the CPU'

  def _since(self, then: tuple[float, float]) -> str:
    return (
      f'{time.monotonic() - then[0]:.2f} s, '
      f'{time.process_time() - then[1]:.2f} of the CPU'
    )


if __name__ == '__main__':
  sys.exit(main())
