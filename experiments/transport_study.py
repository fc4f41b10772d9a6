# SPDX-License-Identifier: Apache-2.0
"""All figures about transfers between two processes.

    python -m experiments.transport_study --workdir=runs/transport

Parts, each of which can be run alone with --parts:

    links    use, CPU time and priority over real links (root; 4 minutes)
    control  the control path of a prompt of 128k tokens (half a minute)
    pair     requests of a small model: times and memory (2 minutes)
    real     TTFT over a real link of 1 Gbit/s (root; 1 minute)
    ratio    INT8 over Lynx of the real model on a real link of 40 Mbit/s and on
             an emulated one (root; 4 minutes)
    cuts     a real link goes down for 5 s, and for good (root; 1 minute)
    faults   300 random fault schedules; goes on where it was stopped (about
             10 minutes)
"""

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from experiments import (
  fault_study,
  link_study,
  pair_study,
  ratio_study,
  results,
)

Records = Iterator[dict[str, Any]]


def _links() -> Records:
  for case in link_study.CASES.values():
    if case.rate_mbit is not None:
      yield from link_study.measure(case)


PARTS: dict[str, Callable[[results.Writer], Records]] = {
  'links': lambda _: _links(),
  'control': lambda _: link_study.measure(link_study.CASES['control']),
  'pair': lambda _: pair_study.emulated(),
  'real': lambda _: pair_study.real(),
  'ratio': lambda _: ratio_study.measure(),
  'cuts': lambda _: fault_study.cuts(),
  'faults': lambda writer: fault_study.run(writer.path),
}


def main(arguments: list[str] | None = None) -> int:
  """Runs the parts, whatever becomes of the others; returns the exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--workdir', default='runs/transport')
  parser.add_argument('--parts', default=','.join(PARTS))
  chosen = parser.parse_args(arguments)
  names = chosen.parts.split(',')
  if unknown := [name for name in names if name not in PARTS]:
    parser.error(f'--parts={unknown[0]} must be of {", ".join(PARTS)}')
  failed = []
  with results.Writer(chosen.workdir) as writer:
    for name in names:
      try:
        _run(PARTS[name], writer)
      except Exception:  # the other parts' figures are wanted all the same
        traceback.print_exc()
        failed.append(name)
  if failed:
    print(f'to be repeated: --parts={",".join(failed)}', file=sys.stderr)
  return int(bool(failed))


def _run(part: Callable[[results.Writer], Records], writer: Any) -> None:
  for record in part(writer):
    writer.write(record)
    if record['kind'] == 'summary':
      print(
        f'{record["name"]}: {record["value"]:.4g} {record["unit"]}', flush=True
      )


if __name__ == '__main__':
  sys.exit(main())
