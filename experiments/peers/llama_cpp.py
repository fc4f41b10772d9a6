# SPDX-License-Identifier: Apache-2.0
"""KV caches of llama.cpp through xllamacpp, on float32 weights.

The GGUF is rewritten with its weights in float32: kernels of quantised weights
quantise activations as well. Prefill itself reads the cache that it writes, and
so do forced tokens, one by one: KL has the error of both. Attention is the
fused one, which quantised values need; it computes in float16 even where the
cache, as for the reference, is in float32, so that `llama_f16` equals it.

A request brings the log-probabilities of the next token alone, of the 4,096
most likely ones; `exchange.score` says what becomes of the others.
"""

import contextlib
import importlib.metadata
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import xllamacpp

from experiments.peers import caches, exchange

_REFERENCE = 'F32'
_TOP = 4096
_ROOM_TOKENS = 16


def measure(task: exchange.Task) -> exchange.Findings:
  """Runs every peer on every prompt."""
  kinds = {_REFERENCE: _REFERENCE} | {
    name: caches.GGML[name][0] for name in task.peers
  }
  read: dict[str, list[tuple[np.ndarray, float]]] = {}
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / 'float32.gguf'
    vocab = _write_float32(pathlib.Path(task.gguf), file)
    tokens = max(len(p.ids) + len(p.following) for p in task.prompts)
    for name, kind in kinds.items():
      with _serve(file, kind, tokens + _ROOM_TOKENS) as server:
        read[name] = [_force(server, p, vocab) for p in task.prompts]
  found = {}
  for name in task.peers:
    found[name] = [
      exchange.Finding(
        figures=exchange.score(reference, own, prompt.following[1:]),
        bits=caches.ggml_bits(name),
        prefill_s=prefill_s,
        coding_s=None,
      )
      for prompt, (own, prefill_s), (reference, _) in zip(
        task.prompts, read[name], read[_REFERENCE], strict=True
      )
    ]
  versions = {'xllamacpp': importlib.metadata.version('xllamacpp')}
  return exchange.Findings(found=found, not_run={}, versions=versions)


@contextlib.contextmanager
def _serve(
  file: pathlib.Path, kind: str, tokens: int
) -> Iterator[xllamacpp.Server]:
  """Yields llama.cpp's server with a cache of this type."""
  params = xllamacpp.CommonParams()
  params.model.path = str(file)
  params.n_ctx, params.n_parallel = tokens, 1
  params.warmup, params.ui, params.verbosity = False, False, 0
  params.flash_attn_type = (
    xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
  )
  stored = xllamacpp.ggml_type[f'GGML_TYPE_{kind}']
  params.cache_type_k = params.cache_type_v = stored
  server = xllamacpp.Server(params)
  yield server
  del server


def _force(
  server: xllamacpp.Server, prompt: exchange.Prompt, vocab: int
) -> tuple[np.ndarray, float]:
  """Returns what follows each forced token, f32[T, V], and prefill's seconds.

  Unknown log-probabilities are -inf.
  """
  prefill_s = _ask(server, prompt.ids)['timings']['prompt_ms'] / 1e3
  rows = np.full((len(prompt.following) - 1, vocab), -np.inf, np.float32)
  for i, row in enumerate(rows, 1):
    answer = _ask(server, [*prompt.ids, *prompt.following[:i]])
    computed = answer['timings']['prompt_n']
    if computed != 1:
      raise RuntimeError(
        f'llama.cpp computed {computed} tokens anew instead of 1: its cache '
        'was not kept'
      )
    (position,) = answer['choices'][0]['logprobs']['content']
    for token in position['top_logprobs']:
      row[token['id']] = token['logprob']
  return rows, prefill_s


def _ask(server: xllamacpp.Server, ids: list[int]) -> dict[str, Any]:
  """Returns the answer to a request for one token."""
  answer = server.handle_completions(
    {
      'prompt': ids,
      'n_predict': 1,
      'n_probs': _TOP,
      'cache_prompt': True,
      'temperature': 0.0,
    }
  )
  if 'choices' not in answer:
    raise RuntimeError(f'llama.cpp answered {str(answer)[:200]}')
  return answer


def _write_float32(source: pathlib.Path, target: pathlib.Path) -> int:
  """Copies a GGUF with its weights in float32; returns the vocabulary."""
  reader = gguf.GGUFReader(source)
  arch = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
  writer = gguf.GGUFWriter(target, arch=arch)
  for name, field in reader.fields.items():
    if name.startswith('GGUF.') or name in (
      gguf.Keys.General.ARCHITECTURE,
      gguf.Keys.General.FILE_TYPE,
    ):
      continue
    kind, sub = field.types[0], None
    if kind == gguf.GGUFValueType.ARRAY:
      sub = field.types[-1]
    writer.add_key_value(name, field.contents(), kind, sub_type=sub)
  writer.add_file_type(gguf.LlamaFileType.ALL_F32)
  vocab = 0
  for tensor in reader.tensors:
    dense = gguf.dequantize(tensor.data, tensor.tensor_type)
    writer.add_tensor(tensor.name, dense.astype(np.float32))
    if tensor.name == 'token_embd.weight':
      vocab = len(dense)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return vocab


if __name__ == '__main__':
  exchange.serve(measure)
