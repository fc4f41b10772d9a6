# SPDX-License-Identifier: Apache-2.0
"""A process of a slice that serves a control channel as well.

python -m tests.distributed_process COORDINATOR NUMBER
"""

import sys

import jax


def main(coordinator: str, number: int) -> None:
  jax.distributed.initialize(
    coordinator_address=coordinator, num_processes=2, process_id=number
  )
  from lynx_jax.transport import control, messages

  def answer(channel: control.ServerChannel) -> None:
    while (message := channel.receive(10.0)) is not None:
      channel.send(message)

  server, port = control.serve(answer, lambda *_: iter(()), '127.0.0.1:0')
  # The port travels over the key-value store, whose gRPC is JAX's own.
  store = jax._src.distributed.global_state.client
  store.key_value_set(f'port{number}', str(port))
  other = store.blocking_key_value_get(f'port{1 - number}', 20_000)
  channel = control.ClientChannel(f'127.0.0.1:{other}')
  for beat in range(100):
    channel.send(messages.Beat(sent_s=float(beat)))
    received = channel.receive(10.0)
    assert received == messages.Beat(sent_s=float(beat)), received
  store.wait_at_barrier('end', 20_000)
  assert jax.process_count() == 2
  channel.close()
  server.stop(grace=None).wait()
  jax.distributed.shutdown()
  print('both live')


if __name__ == '__main__':
  main(sys.argv[1], int(sys.argv[2]))
