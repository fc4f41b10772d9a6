# SPDX-License-Identifier: Apache-2.0
"""Quantised caches of Hugging Face transformers, on one prefill of a prompt.

Weights and activations are float32. Prefill attends to what it computed, and
then the whole prompt goes into the cache, recent tokens too, as in a call of
`generate`. Every peer is given the same keys and values. Forced tokens are read
from the cache in one pass: they are dense, but for `hf_fp8`, which has no dense
part.

Version 5.24 of transformers was read and run.
"""

import contextlib
import importlib.metadata
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from transformers import cache_utils

from experiments.peers import caches, exchange

_PACKAGES = ('torch', 'transformers', 'optimum-quanto', 'hqq')

# Keys and values of a layer, f32[1, K, P, H].
_States = list[tuple[torch.Tensor, torch.Tensor]]


def measure(task: exchange.Task) -> exchange.Findings:
  """Runs every peer on every prompt."""
  not_run = _refused(task.peers)
  names = [name for name in task.peers if name not in not_run]
  found: dict[str, list[exchange.Finding]] = {name: [] for name in names}
  if names:
    file = pathlib.Path(task.gguf)
    model = transformers.AutoModelForCausalLM.from_pretrained(
      file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    with torch.inference_mode():
      for prompt in task.prompts:
        for name, finding in _read(model, prompt, names):
          found[name].append(finding)
  versions = {}
  for package in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[package] = importlib.metadata.version(package)
  return exchange.Findings(found=found, not_run=not_run, versions=versions)


def _refused(names: Sequence[str]) -> dict[str, str]:
  """Returns the caches that transformers does not make, and why."""
  not_run = {}
  for name in names:
    try:
      _cache(transformers.LlamaConfig(num_hidden_layers=1), name)
    except (ImportError, ValueError) as error:
      not_run[name] = ' '.join(str(error).split())
  return not_run


def _read(
  model: Any, prompt: exchange.Prompt, names: Sequence[str]
) -> Iterator[tuple[str, exchange.Finding]]:
  """Yields what each cache did to a prompt."""
  states, prefill_s = _prefill(model, prompt.ids)
  values = sum(x.numel() for both in states for x in both)
  reference = _force(model, _fill(transformers.DynamicCache(), states), prompt)
  for name in names:
    _fill(_cache(model.config, name), states[:1])  # warms up
    start_s = time.monotonic()
    cache = _fill(_cache(model.config, name), states)
    coding_s = time.monotonic() - start_s
    bits = sum(
      caches.stored_bits((layer._quantized_keys, layer._quantized_values))
      for layer in cache.layers
    )
    own = _force(model, cache, prompt)
    yield (
      name,
      exchange.Finding(
        figures=exchange.score(reference, own, prompt.following[1:]),
        bits=bits / values,
        prefill_s=prefill_s,
        coding_s=coding_s,
      ),
    )


def _cache(config: Any, name: str) -> Any:
  kind = caches.TRANSFORMERS[name]
  if kind['backend'] != 'quanto' or kind['nbits'] != 8:
    return transformers.QuantizedCache(config=config, **kind)
  cache = transformers.QuantizedCache(config=config, backend='quanto', nbits=4)
  cache.layers = [_Quanto8() for _ in cache.layers]
  return cache


class _Quanto8(cache_utils.QuantoQuantizedLayer):
  """A layer of quanto's qint8, which transformers does not offer.

  It is symmetric and has no groups: a scale for each channel of the head, over
  all heads and tokens.
  """

  def __init__(self) -> None:
    super().__init__(axis_key=-1, axis_value=-1)
    # With it, as for the class above: it imports transformers.
    from optimum import quanto

    self.qtype, self.optimizer = quanto.qint8, quanto.AbsmaxOptimizer()

  def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
    from optimum import quanto

    scale = self.optimizer(tensor, self.qtype, axis)
    return quanto.quantize_weight(tensor, self.qtype, axis, scale)


def _prefill(model: Any, ids: list[int]) -> tuple[_States, float]:
  cache = transformers.DynamicCache()
  start_s = time.monotonic()
  model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)
  seconds = time.monotonic() - start_s
  return [(layer.keys, layer.values) for layer in cache.layers], seconds


def _fill(cache: Any, states: _States) -> Any:
  for layer, (k, v) in enumerate(states):
    cache.update(k, v, layer)
  return cache


def _force(model: Any, cache: Any, prompt: exchange.Prompt) -> Any:
  """Returns log-probabilities of what follows each forced token."""
  rows = torch.tensor([prompt.following[:-1]])
  logits = model(rows, past_key_values=cache).logits[0]
  return torch.log_softmax(logits.float(), dim=-1).numpy()


if __name__ == '__main__':
  exchange.serve(measure)
