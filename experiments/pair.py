# SPDX-License-Identifier: Apache-2.0
"""A small random model on two processes, for the transport studies.

    python -m experiments.pair KIND ADDRESS

serves prefill at a free port of ADDRESS, prints the port, and answers commands
on its standard input: `held` and `memory`. It ends with its standard input.
"""

import ctypes
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from lynx_jax.config import CodecConfig, EngineConfig, ModelConfig, TensorCodec
from lynx_jax.models import presets
from lynx_jax.models.transformer import Transformer
from lynx_jax.prefill_server import PrefillServer
from lynx_jax.transport.streams import WireFormat

ROOT = pathlib.Path(__file__).parents[1]
_END_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """A model, its wire format, and the server's limits."""

  model: ModelConfig
  codec: CodecConfig
  engine: EngineConfig
  lease_s: float
  window_bytes: int

  @property
  def wire(self) -> WireFormat:
    return WireFormat(self.model, self.codec, self.engine)


_PLANES = TensorCodec(planes=(4, 4))
KINDS = {
  # Small enough for hundreds of schedules.
  'tiny': Kind(
    model=presets.tiny(layers=2, head_dim=16, vocab=64, tied_embeddings=False),
    codec=CodecConfig(
      k=_PLANES, v=_PLANES, group=32, sinks=4, recent_tokens=16
    ),
    engine=EngineConfig(
      slots=3,
      prompt_tokens=200,
      output_tokens=24,
      token_chunk=64,
      layer_groups=2,
      verify_rows=6,
      backlog_tokens=12,
      chunk_bytes=3000,
    ),
    lease_s=2.0,
    window_bytes=64 * 1024,
  ),
  # Large enough for its KV to show in times and in memory: 4 KiB a token.
  'bench': Kind(
    model=presets.tiny(layers=4, heads=4, kv_heads=4, head_dim=64),
    codec=CodecConfig(
      k=_PLANES, v=_PLANES, group=128, sinks=4, recent_tokens=64
    ),
    engine=EngineConfig(
      slots=2,
      prompt_tokens=4096,
      output_tokens=512,
      token_chunk=256,
      layer_groups=2,
      draft_tokens=4,
      chunk_bytes=256 * 1024,
    ),
    lease_s=2.0,
    window_bytes=8 * 2**20,
  ),
}


def weights(kind: Kind) -> Transformer:
  """Returns the model, with the same weights in every process."""
  return Transformer(kind.model, rngs=nnx.Rngs(params=0))


def prompt(kind: Kind, tokens: int, seed: int = 0) -> list[int]:
  """Returns random token ids."""
  rng = np.random.default_rng((tokens, seed))
  return rng.integers(0, kind.model.vocab, tokens).tolist()


def keeping(programs: str) -> dict[str, str]:
  """Returns the environment of processes that share compiled programs."""
  return {
    'JAX_ENABLE_COMPILATION_CACHE': 'true',
    'JAX_COMPILATION_CACHE_DIR': programs,
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }


class Process:
  """A prefill process that prints its port, and answers commands.

  It ends with its standard input.

  Args:
    words: of its command line.
    host: numeric address that it serves at.
    environment: what is set in it besides.
  """

  def __init__(
    self,
    words: Sequence[str],
    host: str = '127.0.0.1',
    environment: Mapping[str, str] | None = None,
  ):
    self._host = host
    self._process = subprocess.Popen(
      [*words],
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      start_new_session=True,
      env=os.environ | (environment or {}),
    )
    self._port = 0

  @property
  def address(self) -> str:
    """HOST:PORT; blocks until the process serves."""
    if not self._port:
      assert self._process.stdout is not None
      self._port = int(self._process.stdout.readline())
    return f'{self._host}:{self._port}'

  def held(self) -> tuple[int, int, int]:
    """Returns published bytes, prompts and peers that the process holds."""
    live, prompts, peers = self.ask('held')
    return live, prompts, peers

  def signal(self, number: signal.Signals) -> None:
    self._process.send_signal(number)

  def close(self) -> None:
    """Ends it."""
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    self._process.stdin.close()
    try:
      self._process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._process.stdout.close()

  def tell(self, command: str) -> None:
    assert self._process.stdin is not None
    print(command, file=self._process.stdin, flush=True)

  def ask(self, command: str) -> list[int]:
    """Returns the numbers that it answers."""
    assert self._process.stdout is not None
    self.tell(command)
    return [int(word) for word in self._process.stdout.readline().split()]


class Prefill(Process):
  """One that runs this module.

  Args:
    kind: a name of KINDS.
    host: numeric address that it serves at.
    inside: command words that put it in a namespace.
    programs: folder of compiled programs; the next one there starts sooner.
  """

  def __init__(
    self,
    kind: str,
    host: str = '127.0.0.1',
    inside: Sequence[str] = (),
    programs: str | None = None,
  ):
    own = (sys.executable, '-m', 'experiments.pair', kind, host)
    super().__init__(
      [*inside, *own], host, {} if programs is None else keeping(programs)
    )

  def memory(self) -> int:
    """Returns its resident bytes, after giving back what malloc keeps."""
    (resident,) = self.ask('memory')
    return resident


def placement() -> Any:
  """Returns where decode runs."""
  return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _serve(kind: Kind, host: str) -> None:
  server = PrefillServer(
    weights(kind),
    [kind.wire],
    listen=f'{host}:0',
    pull_host=host,
    lease_s=kind.lease_s,
    window_bytes=kind.window_bytes,
  )
  server.warm_up()
  print(server.port, flush=True)
  for line in sys.stdin:
    if line.strip() == 'held':
      print(server.live_bytes(), server.prompts, server.peers, flush=True)
    else:
      ctypes.CDLL(None).malloc_trim(0)
      pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
      print(pages * 4096, flush=True)
  server.close()


if __name__ == '__main__':
  _serve(KINDS[sys.argv[1]], sys.argv[2])
