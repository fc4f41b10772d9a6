# SPDX-License-Identifier: Apache-2.0
"""A decode process that asks for two prompts, over a link that never moves.

python -m tests.decode_process ADDRESS 1
"""

import sys
import time

from lynx_jax import handshake
from lynx_jax.remote_prefill import RemotePrefill
from lynx_jax.requests import Mode
from lynx_jax.timeline import Timeline
from lynx_jax.transport import control, pull
from lynx_jax.transport.receiver import Pace
from tests import engines, transfers


def main(address: str, pulls: bool) -> None:
  remote = RemotePrefill(
    transfers.FORMATS[0],
    handshake.fingerprint(engines.model()),
    transfers.placement(),
    dial=lambda: control.ClientChannel(address),
    server=pull.start_server('127.0.0.1') if pulls else None,
    pace=Pace(1e-6),
  )
  for request in range(2):
    remote.submit(
      request,
      engines.prompt(200),
      mode=Mode.SERIAL,
      timeline=Timeline(time.monotonic()),
    )
  time.sleep(60)


if __name__ == '__main__':
  main(sys.argv[1], bool(int(sys.argv[2])))
