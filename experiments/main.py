# SPDX-License-Identifier: Apache-2.0
"""Runs a study from a config file.

    python -m experiments.main --config=configs/demo.py --workdir=runs/demo

Any field can be set on the command line:

    --config.scheme=int8,lynx         which schemes, of bf16, int8, int4, lynx,
                                      lynx_exact and interleaved, and of the
                                      further baselines prefill_continues,
                                      int8_lookup, kivi4, int8_layers and
                                      bf16_layers
    --config.prompt_file=FILE         any UTF-8 text, or a shipped prompt:
                                      book, code, manual, chat, question
    --config.output_tokens=N          how many tokens to generate
    --config.codec.k=4,4              widths of the bit planes, Anchor first
    --config.link.rate_gbps=R         rate of the link; without it the rate
                                      follows from --config.link.share
    --config.model.path=PATH          a .gguf file, a Hugging Face directory, a
                                      gs:// address or a hub id; docs/models.md
    --config.sampling.temperature=T   samples, with top_k, top_p, min_p and seed
                                      beside it; 0 is greedy

Prefill can run in a process of its own, on this machine or another one, over
an emulated link or, with --config.link.emulated=False, over the real one:

    --role=local                      starts it, and ends it with this one
    --role=prefill --listen=ADDR:PORT serves prefill; needs no --workdir
    --role=decode --connect=ADDR:PORT runs the study with prefill over there
    --token_file=FILE                 a token that both sides must know
    --certificate=PEM --key=PEM       TLS of the control channel, on either
    --authority=PEM                   side; payloads are not encrypted

A side can have several processes, on one host or several, as many as the other
side; config.prefill_mesh or decode_mesh are the devices of all of them. Process
i of decode connects to process i of prefill, and process 0 writes and shows:

    --coordinator=ADDR:PORT           an address of process 0 of this side
    --processes=N --process=I         how many there are, and which this one is
    --distributed                     instead of these three: JAX finds them on
                                      a TPU pod, on GKE or under Slurm
    --connect=ADDR:PORT,ADDR:PORT     one for each; --listen its own, or a list
    --start_s=N                       longest wait until all are there (300)

--profile writes an xprof trace of the first request of every scheme into
WORKDIR/profile, with phases named as in the report; with a --role, each process
into a folder of its own there. docs/pods.md says how to read it.

Compiled programs are kept in ~/.cache/lynx_jax for the next run.
JAX_COMPILATION_CACHE_DIR=DIR moves that, JAX_ENABLE_COMPILATION_CACHE=false
keeps none.

Results are appended to WORKDIR/results.jsonl. A mistake of yours ends with one
line that says what to change, and exit code 2; a lost process, of prefill or of
this side, with 3; an ablation of which cells failed or are missing with 4;
Ctrl-C with 130.
"""

import sys
from collections.abc import Sequence
from typing import Any

INTERRUPTED = 130


def main(argv: Sequence[str], study: Any = None) -> int:
  """Runs the command line `argv` and returns the exit code; see `cli.run`."""
  if {'-h', '-?', '--help', '--helpfull', '--helpshort'} & set(argv[1:]):
    print(__doc__)
    return 0
  try:
    # Imports take seconds: Ctrl-C in them must end as quietly as later on.
    from experiments import cli

    return cli.run(argv, study)
  except KeyboardInterrupt:
    message = 'interrupted; the records written so far are whole'
    print(message, file=sys.stderr, flush=True)
    return INTERRUPTED


def _end(code: int) -> None:
  """Ends this process, which may be one of several."""
  if 'experiments.sides' in sys.modules:
    sys.modules['experiments.sides'].end(code)
  sys.exit(code)


if __name__ == '__main__':
  _end(main(sys.argv))
