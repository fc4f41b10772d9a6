# SPDX-License-Identifier: Apache-2.0
"""Codes of others beside ours: bits, fidelity, bytes, time to first token.

    make peers

or, after `make setup` and with an environment that has the extra `peers`,

    python -m experiments.main --config=configs/peers.py --workdir=runs/peers \
      --config.fidelity.peers_python=PYTHON

NumPy oracles of the formulas of KIVI, QuantSpec and CacheGen (its size by an
entropy bound; `experiments/peer_formulas.py` has the sources) read the prompts
through the same program as our schemes. The quantised caches of Hugging Face
transformers and of llama.cpp read them by their own code, each in a process of
its own (`experiments/peers`); one that is not installed is named as not run.
"""

from configs import fidelity
from experiments import peer_formulas
from experiments.peers import caches


def get_config(arg: str | None = None):
  """Returns the run; `arg` narrows it to one shipped prompt."""
  values = fidelity.get_config(arg)
  values.fidelity.parts = 'forced,free,acceptance'
  values.fidelity.peers = ','.join((*peer_formulas.FORMULAS, *caches.NAMES))
  return values
