# SPDX-License-Identifier: Apache-2.0
"""Starts prefill and decode as processes of their own.

It knows no study: decode processes run the same ones as a single process.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import logging

from experiments import config, display, profiling, schemes, serving, sides
from experiments.options import SERVING, Role
from lynx_jax import handshake
from lynx_jax.config import ConfigError, EngineConfig
from lynx_jax.patience import Patience
from lynx_jax.prefill_server import PrefillServer
from lynx_jax.remote_prefill import RemotePrefill
from lynx_jax.transport import control, exchange, pull
from lynx_jax.transport.fault_plan import Peer, PeerFault
from lynx_jax.transport.faults import Faults
from lynx_jax.transport.receiver import Pace
from lynx_jax.transport.streams import WireFormat

_DRAIN_S = 30.0
_END_S = 5.0
_LOOK_S = 0.2
_LOOPBACK = '127.0.0.1'


@dataclasses.dataclass(frozen=True)
class Remote:
  """Where prefill runs, as `serving` needs it.

  Attributes:
    side: the processes of decode.
    dial: opens a control channel.
    server: this process's transfer server; None where it cannot start.
    patience: of every session.
    window_bytes: of every session; None is chosen.
    faults: of all sessions together; None is none on purpose.
  """

  side: sides.Side
  dial: Callable[[], control.Channel]
  server: object | None
  patience: Patience
  window_bytes: int | None = None
  faults: Faults | None = None

  def prefill(
    self,
    model: serving.Model,
    scheme: schemes.Scheme,
    engine: EngineConfig,
    pace: Pace | None,
  ) -> RemotePrefill:
    """Opens a session for one engine."""
    return RemotePrefill(
      WireFormat(model.config, scheme.codec, engine),
      _fingerprint(model),
      serving.placement(model.decode),
      dial=self.dial,
      server=self.server,
      pace=pace,
      patience=self.patience,
      window_bytes=self.window_bytes,
      faults=self.faults,
    )


@functools.lru_cache(maxsize=1)
def _fingerprint(model: serving.Model) -> str:
  return handshake.fingerprint(model.decode)


def serve(
  settings: config.Settings,
  side: sides.Side,
  screen: display.Screen,
  *,
  model: serving.Model | None = None,
  profile: str | None = None,
) -> None:
  """Serves prefill for the study's schemes until it is told to end.

  SIGTERM lets peers finish what they have asked for; Ctrl-C does not. With one
  process of a side all end.

  Args:
    settings: of the run.
    side: of this process.
    screen: for what is worth telling.
    model: what it serves; None is that of the settings.
    profile: where a trace of all that it serves goes; None makes none.

  Raises:
    ConfigError: the address cannot be bound, or model and schemes do not fit.
    PeerLost: another process of the side is gone.
  """
  options = side.options
  assert options.listen is not None
  host, _ = sides.numeric(options.listen)
  side.require_same(settings)
  if model is None:
    with screen.step(f'loading {settings.model_path}'):
      model = serving.load(
        settings.model_path,
        settings.model_dtype,
        (settings.prefill_mesh,),
        settings.model_tokenizer,
      )
  longest = max(tokens for _, tokens in settings.prompts)
  engine = dataclasses.replace(settings.engine, prompt_tokens=longest)
  int8 = schemes.scheme('int8', settings.codec)  # sets the rates
  codecs = dict.fromkeys(s.codec for s in (int8, *settings.schemes))
  window: dict[str, Any] = {}
  if settings.transfer.window_bytes is not None:
    window['window_bytes'] = settings.transfer.window_bytes
  server = PrefillServer(
    model.prefill,
    [WireFormat(model.config, codec, engine) for codec in codecs],
    listen=options.listen,
    security=options.security(),
    pull_host=host,
    lease_s=settings.transfer.lease_s,
    memory_bytes=settings.transfer.prefill_bytes,
    exchange=side.exchange,
    **window,
  )
  ends: queue.SimpleQueue[float] = queue.SimpleQueue()
  signal.signal(signal.SIGTERM, lambda *_: ends.put(_DRAIN_S))
  if options.ends_with_stdin:
    threading.Thread(target=_watch_stdin, args=(ends,), daemon=True).start()
  print(f'{SERVING}{sides.together(host, server.port)}', flush=True)
  try:
    with side.leaving(), profiling.trace(profile):
      server.drain(_told(ends, side))
  finally:
    server.close()


def _told(ends: queue.SimpleQueue[float], side: sides.Side) -> float:
  """Returns how long peers may still take, once it is told to end.

  A signal between Python's last look for signals and the system's wait wakes
  nobody, so no wait is long.
  """
  while True:
    try:
      return ends.get(timeout=_LOOK_S)
    except queue.Empty:
      if isinstance(side.lost, exchange.Ended):
        return _DRAIN_S
      if side.lost is not None:
        raise side.lost from None


def _watch_stdin(ends: queue.SimpleQueue[float]) -> None:
  sys.stdin.read()
  ends.put(0.0)


@contextlib.contextmanager
def remote(
  settings: config.Settings,
  side: sides.Side,
  argv: Sequence[str],
  screen: display.Screen,
) -> Iterator[Remote]:
  """Yields where prefill runs; with `local` it is started, and ended after.

  Args:
    settings: of the run.
    side: of this process, `decode` or `local`.
    argv: the command line of this process.
    screen: for what is worth telling.

  Raises:
    ConfigError: the prefill process did not start.
  """
  options = side.options
  security = options.security()
  with contextlib.ExitStack() as stack:
    address, suffer = options.connect, None
    if address is None:
      with screen.step('starting the prefill process'):
        process = stack.enter_context(contextlib.closing(_Process(argv)))
      address, suffer = process.address, process.suffer
    faults = None
    if not settings.faults.nothing:
      faults = Faults(settings.faults, suffer)
    yield Remote(
      side,
      lambda: control.ClientChannel(
        options.connect or process.address, security
      ),
      _transfer_server(address),
      patience=settings.patience,
      window_bytes=settings.transfer.window_bytes,
      faults=faults,
    )
    if faults is not None:
      made = ', '.join(f'{n} {fault.value}' for fault, n in faults.made.items())
      screen.note(f'faults on purpose: {made or "none happened"}')


def _transfer_server(peer: str) -> object | None:
  """Starts a transfer server on the interface that leads to the peer."""
  try:
    return pull.start_server(sides.interface(peer))
  except Exception as error:  # whatever the system or the runtime says
    logging.warning('no transfer server: %s; chunks go as bytes', error)
    return None


class _Process:
  """The same command line as a prefill process.

  It ends with this process, however that ends: its standard input is a pipe
  that the system closes.

  Attributes:
    address: HOST:PORT where it serves, or has served.

  Raises:
    ConfigError: it ended before it served.
  """

  def __init__(self, argv: Sequence[str]):
    # The last of two values holds.
    own = [f'--role={Role.PREFILL}', f'--listen={_LOOPBACK}:0']
    command = [sys.executable, '-m', 'experiments.main', *argv[1:], *own]
    self._command = [*command, '--ends_with_stdin']
    self._closed = False
    self._start()

  def suffer(self, fault: PeerFault) -> None:
    """Kills or stops the process, and lets it be back in time."""
    back: Callable[[], None] = self._start
    if fault.what is Peer.KILL:
      self._process.kill()
    else:
      self._process.send_signal(signal.SIGSTOP)
      back = functools.partial(self._process.send_signal, signal.SIGCONT)
    if fault.back_s < math.inf:
      timer = threading.Timer(fault.back_s, back)
      timer.daemon = True
      timer.start()

  def close(self) -> None:
    """Ends it."""
    self._closed = True
    process = self._process
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
      process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
    process.stdout.close()

  def _start(self) -> None:
    if self._closed:
      return
    self._process = subprocess.Popen(
      self._command,
      cwd=pathlib.Path(__file__).parents[1],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      start_new_session=True,  # Ctrl-C is for this process alone
    )
    assert self._process.stdout is not None
    try:
      for line in self._process.stdout:
        if line.startswith(SERVING):
          self.address = line.removeprefix(SERVING).strip()
          return
      raise ConfigError(
        f'the prefill process ended with code {self._process.wait()} before '
        'it served'
      )
    except BaseException:
      self.close()
      raise
