# SPDX-License-Identifier: Apache-2.0
"""Published codes beside ours: bits, fidelity, projected time to first token.

    make peers

or, after `make setup`,

    python -m experiments.main --config=configs/peers.py --workdir=runs/peers

NumPy oracles of the formulas of KIVI, QuantSpec and CacheGen (its size by an
entropy bound) read the same prompts through the same program as our schemes;
`experiments/peer_formulas.py` has their sources.
"""

from configs import fidelity
from experiments import peer_formulas


def get_config(arg: str | None = None):
  """Returns the run; `arg` narrows it to one shipped prompt."""
  values = fidelity.get_config(arg)
  values.fidelity.parts = 'forced,free,acceptance'
  values.fidelity.peers = ','.join(peer_formulas.FORMULAS)
  return values
