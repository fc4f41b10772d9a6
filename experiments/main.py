# SPDX-License-Identifier: Apache-2.0
"""Runs a study from a config file.

    python -m experiments.main --config=configs/demo.py --workdir=runs/demo

Any field can be set on the command line:

    --config.scheme=int8,lynx         which schemes, of bf16, int8, int4, lynx
                                      and interleaved
    --config.prompt_file=FILE         any UTF-8 text, or a shipped prompt:
                                      book, code, manual, chat, question
    --config.output_tokens=N          how many tokens to generate
    --config.codec.k=4,4              widths of the bit planes, Anchor first
    --config.link.rate_gbps=R         rate of the link; without it the rate
                                      follows from --config.link.share
    --config.model.path=FILE          a .gguf file or Hugging Face directory

Results are appended to WORKDIR/results.jsonl. A mistake of yours ends with one
line that says what to change, and exit code 2; Ctrl-C with 130.
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


if __name__ == '__main__':
  sys.exit(main(sys.argv))
