# SPDX-License-Identifier: Apache-2.0
"""Stands in for a peer's process: answers from names, reads no model.

`peer_fails` ends it; `peer_refused` is told as not run; others have a KL of
their prompt's first token in thousandths of a nat.
"""

from experiments.peers import exchange


def measure(task: exchange.Task) -> exchange.Findings:
  """Answers a task."""
  if 'peer_fails' in task.peers:
    raise ModuleNotFoundError("No module named 'torch'")
  found = {
    name: [
      exchange.Finding(
        figures={
          'kl': prompt.ids[0] / 1e3,
          'agreement': 0.5,
          'nll': 2.0,
          'nll_over_bf16': 0.25,
        },
        bits=4.5,
        prefill_s=2.0,
        coding_s=1.0 if name == 'peer_coded' else None,
      )
      for prompt in task.prompts
    ]
    for name in task.peers
    if name != 'peer_refused'
  }
  refused = {n: 'no such width' for n in task.peers if n == 'peer_refused'}
  return exchange.Findings(
    found=found, not_run=refused, versions={'peer': task.gguf}
  )


if __name__ == '__main__':
  exchange.serve(measure)
