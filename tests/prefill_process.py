# SPDX-License-Identifier: Apache-2.0
"""A prefill process with a tiny random model, for tests of the transfer.

    python -m tests.prefill_process '{"port": 0, "pulls": true}'

It prints its port once it serves, and ends with its parent.
"""

import json
import os
import sys
import threading

from lynx_jax.prefill_server import PrefillServer
from tests import transfers


def main(options: dict) -> None:
  server = PrefillServer(
    transfers.model(),
    transfers.FORMATS,
    listen=f'127.0.0.1:{options.get("port", 0)}',
    pull_host='127.0.0.1' if options.get('pulls', True) else None,
    lease_s=options.get('lease_s', 5.0),
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
  main(json.loads(sys.argv[1]))
