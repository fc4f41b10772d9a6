# SPDX-License-Identifier: Apache-2.0
"""A prefill process with a tiny random model, for tests of the transfer.

    python -m tests.prefill_process

It prints its port once it serves, and ends with its parent.
"""

import os
import sys
import threading

from lynx_jax.prefill_server import PrefillServer
from tests import transfers


def main() -> None:
  server = PrefillServer(
    transfers.model(),
    transfers.FORMATS,
    lease_s=transfers.LEASE_S,
    window_bytes=transfers.WINDOW_BYTES,
  )
  threading.Thread(target=_end_with_parent, daemon=True).start()
  print(server.port, flush=True)
  for line in sys.stdin:
    match line.split():
      case ['held']:
        print(server.live_bytes(), server.prompts, server.peers, flush=True)
      case ['drain']:
        server.drain(10.0)
        break
  server.close()


def _end_with_parent() -> None:
  parent = os.getppid()
  while os.getppid() == parent:
    threading.Event().wait(0.5)
  os._exit(1)


if __name__ == '__main__':
  main()
