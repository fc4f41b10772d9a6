# SPDX-License-Identifier: Apache-2.0
"""One of two processes of a prefill or of a decode side, for `sides_test`.

    python -m tests.side_process prefill COORDINATOR NUMBER
    python -m tests.side_process decode COORDINATOR NUMBER ADDRESS SEEDS

A decode process prints what it has committed, seed by seed, and waits for the
end of its standard input.
"""

import heapq
import json
import os
import random
import sys
import time
from typing import Any

import jax
from flax import nnx

PROCESSES, DEVICES = 2, 2  # of a side, and of a process
LENGTHS = (120, 33, 97)
LEASE_S = 2.0
BOUND_S = 60.0  # programs are compiled meanwhile
SAYS = 'says '


def main(side: str, coordinator: str, number: str, *rest: str) -> None:
  # It takes longer to compile well than to run badly.
  jax.config.update('jax_disable_most_optimizations', True)
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', DEVICES)
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(coordinator, PROCESSES, int(number))
  if side == 'prefill':
    prefill()
  else:
    decode(*rest)
  sys.stdout.flush()
  os._exit(0)  # without a word to processes that may be dead


def say(value: Any) -> None:
  print(f'{SAYS}{json.dumps(value)}', flush=True)


def prefill() -> None:
  """Serves until its standard input ends."""
  from lynx_jax.prefill_server import PrefillServer
  from lynx_jax.transport import exchange

  server = PrefillServer(
    placed(), [wire()], lease_s=LEASE_S, exchange=exchange.join('127.0.0.1')
  )
  server.warm_up()
  say(server.port)
  sys.stdin.read()


def decode(address: str, seeds: str) -> None:
  """Decodes all prompts for every seed."""
  from lynx_jax import handshake, patience, remote_prefill
  from lynx_jax.engine import Costs, Engine, Mode, Request
  from lynx_jax.transport import control, exchange, pull
  from tests import engines

  model, format_ = placed(), wire()
  joined = exchange.join('127.0.0.1')
  remote = remote_prefill.RemotePrefill(
    format_,
    handshake.fingerprint(model),
    jax.tree.leaves(nnx.state(model))[0].sharding,
    dial=lambda: control.ClientChannel(address),
    server=pull.start_server('127.0.0.1'),
    patience=patience.Patience(reconnect_s=1.0, stall_s=20.0),
  )
  late = Late(remote)
  engine = Engine(late, model, format_.codec, format_.engine, exchange=joined)

  def run(lengths, streamed: bool) -> list[Any]:
    keys = [
      engine.submit(
        Request(
          prompt=engines.prompt(n).tolist(),
          output_tokens=engines.OUTPUT_TOKENS,
          mode=Mode.OVERLAPPED,
          streamed=streamed,
        )
      )
      for n in lengths
    ]
    until_s = time.monotonic() + BOUND_S
    while engine.busy:
      engine.step()
      assert time.monotonic() < until_s, 'the engine hangs'
    return [engine.forget(key) for key in keys]

  references = [
    engine.reference(engines.prompt(n), engines.OUTPUT_TOKENS) for n in LENGTHS
  ]
  say(references)
  for seed in range(int(seeds)):
    late.delay_up_to(random.Random(seed).choice((0.02, 0.5)), seed)
    # Whether the first verification is worth it depends on times too.
    engine.costs = Costs(0.01, 0.05, 0.01) if seed % 2 else None
    found = run(LENGTHS, streamed=True)
    say([result.tokens for result in found])
  sys.stdin.read()  # a process that ends takes the other one along


class Late:
  """A prefill side of which everything comes late by a random time.

  It draws by seed and process, so that processes differ.
  """

  def __init__(self, side: Any):
    self._side = side
    self._most_s, self._random = 0.0, random.Random(0)
    self._arrivals: list[tuple[float, int, Any]] = []
    self._records: list[tuple[float, int, Any]] = []
    self._count = 0

  def __getattr__(self, name: str) -> Any:
    return getattr(self._side, name)

  @property
  def transport(self) -> 'Late':
    return self

  def delay_up_to(self, most_s: float, seed: int) -> None:
    self._most_s = most_s
    self._random = random.Random(PROCESSES * seed + jax.process_index())

  def arrived(self) -> list[Any]:
    return self._due(self._arrivals, self._side.transport.arrived())

  def records(self) -> list[Any]:
    return self._due(self._records, self._side.records())

  def wait(self, timeout_s: float) -> bool:
    del timeout_s
    return self._side.transport.wait(0.001)

  def _due(self, held: list[tuple[float, int, Any]], new: list[Any]) -> Any:
    now_s = time.monotonic()
    for one in new:
      self._count += 1
      due_s = now_s + self._random.uniform(0, self._most_s)
      heapq.heappush(held, (due_s, self._count, one))
    due = []
    while held and held[0][0] <= now_s:
      due.append(heapq.heappop(held)[-1])
    return due


def wire() -> Any:
  from lynx_jax.transport.streams import WireFormat
  from tests import engines

  setup = engines.setup(
    (4, 4),
    slots=2,
    prompt_tokens=max(LENGTHS),
    draft_tokens=0,
    chunk_bytes=1,  # one unit each: fewest programs
  )
  return WireFormat(model_config(), setup.codec, setup.config)


def model_config() -> Any:
  from lynx_jax.models import presets

  return presets.tiny(
    layers=2,
    heads=8,
    kv_heads=4,
    head_dim=16,
    vocab=64,
    tied_embeddings=False,
  )


def placed() -> Any:
  """Returns the model on the devices of all processes."""
  from lynx_jax import mesh
  from tests import engines

  config = model_config()
  graph, params = nnx.split(engines.draw_model(config))
  where = mesh.places(mesh.make(jax.devices(), config), params)
  return nnx.merge(graph, mesh.put(jax.device_get(params), where))


if __name__ == '__main__':
  main(*sys.argv[1:])
