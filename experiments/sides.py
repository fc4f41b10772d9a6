# SPDX-License-Identifier: Apache-2.0
"""Makes processes one side, and sees to it that they end together.

Inside a side, and only there, they are a job of `jax.distributed`. It knows no
study and no transfer.

A process that cannot go on tells the others why (`Exchange.leave`), and they
end with that. One that dies is noticed by its broken links, one that is silent
by `jax.distributed`; if a process then does not get out of what it is doing,
as a program that waits for the dead one, it is ended from another thread.
"""

import contextlib
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import clusters

from experiments.options import Options, Role
from lynx_jax.config import ConfigError, require
from lynx_jax.transport import control, exchange

LOST = 3  # exit code of a process without another one
_SILENT_S = 30  # longest silence of a process
_GRACE_S = 10.0  # in which a process gets out of what it is doing
_END_S = 60  # longest wait for the others at an end in order
_VERDICT_S = 2.0  # in which a broken link is noticed
_RETRY_S = 0.2
_LOOPBACK = '127.0.0.1'


class Side:
  """The processes of a side, as one of them sees them.

  Attributes:
    options: of this process, with its own addresses.
    process, processes: own number, and how many there are.
    exchange: between them; None if there is one.
    lost: why the side cannot go on, once a process is gone.
  """

  def __init__(self, options: Options, process: int = 0, processes: int = 1):
    self.options, self.process, self.processes = options, process, processes
    self.exchange: exchange.Exchange | None = None
    self.lost: Exception | None = None
    self._found_out = threading.Event()
    self._ends = False

  @property
  def leads(self) -> bool:
    """Whether this is process 0, which writes and shows."""
    return self.process == 0

  def gather(self, value: Any) -> list[Any]:
    """Returns what all processes have given; see `Exchange.gather`."""
    return [value] if self.exchange is None else self.exchange.gather(value)

  def agreed(self, value: Any) -> Any:
    """Returns the value of process 0, in all processes."""
    return self.gather(value)[0]

  def require_same(self, *values: Any) -> None:
    """Lets all processes fail unless they are asked for the same.

    Raises:
      ConfigError: a process has other values, by their `repr`, than process 0.
    """
    given = self.gather(hashlib.sha256(repr(values).encode()).hexdigest())
    other = [i for i, each in enumerate(given) if each != given[0]]
    require(
      not other,
      f'processes {", ".join(map(str, other))} of this side have another '
      'config, or other texts of prompts, than process 0; start all with the '
      'same flags and files',
    )

  @contextlib.contextmanager
  def leaving(self) -> Iterator[None]:
    """Tells the others, at the block's end, how it has ended.

    Raises:
      PeerLost: another process is gone, and what that has led to is no error
        of this one.
    """
    if self.exchange is None:
      yield
      return
    try:
      yield
    except jax.errors.JaxRuntimeError as error:
      # A program that needs another process fails before its link is missed.
      if not self._found_out.wait(_VERDICT_S):
        self._leave(error)
        raise
      assert self.lost is not None
      self._leave(self.lost)
      raise self.lost from error
    except BaseException as error:
      self._leave(error)
      raise
    self._ends = True
    self.exchange.leave()

  def on_lost(self, error: Exception) -> None:
    """Lets this process end, by itself or after a while by force."""
    if self._ends:
      return
    self.lost = error
    self._found_out.set()
    if isinstance(error, exchange.Ended):
      return
    timer = threading.Timer(_GRACE_S, self._end)
    timer.daemon = True
    timer.start()

  def _leave(self, error: BaseException) -> None:
    assert self.exchange is not None
    reason = ' '.join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyboardInterrupt):
      reason = 'interrupted'
    self.exchange.leave(reason)

  def _end(self) -> None:
    if not self._ends:
      print(f'error: {self.lost}', file=sys.stderr, flush=True)
      os._exit(LOST)


@contextlib.contextmanager
def joined(
  options: Options, devices: int, make_devices: Callable[[int], None]
) -> Iterator[Side]:
  """Yields the side of this process, once all of its processes are there.

  The block is left by all of them together, or by none in order.

  Args:
    options: of this process.
    devices: of the side.
    make_devices: makes so many of a CPU, where JAX runs on it.

  Raises:
    ConfigError: numbers or addresses do not fit.
    PeerLost: a process is not there in time, or is gone.
  """
  if not options.several:
    make_devices(devices)
    yield Side(options)
    return
  address, count, process, local = _found(options)
  side = Side(options.of(process, count), process, count)
  require(
    devices % count == 0,
    f'{options.role}_mesh={devices} cannot be shared by {count} processes; set '
    f'--config.{options.role}_mesh to what they have together',
  )
  host = _host(side.options)
  _initialize(side, address, local)
  make_devices(devices // count)
  found, own = jax.device_count(), jax.local_device_count()
  require(
    found == count * own,
    f'--processes={count} with {own} devices each would have {count * own}, '
    f'but the processes of this side have {found}; start all with the same '
    f'--processes and --config.{options.role}_mesh',
  )
  side.exchange = exchange.join(host)
  if side.exchange is not None:
    side.exchange.watch(side.on_lost)
  with side.leaving():
    yield side
    if options.role is Role.DECODE:
      side.gather(None)  # the report takes process 0 a while
  jax.distributed.shutdown()


def _initialize(side: Side, coordinator: str, local: Any) -> None:
  """Starts `jax.distributed`, in which nothing but this side is."""
  count, limit_s = side.processes, side.options.start_s
  host, port = numeric(coordinator)
  address = together(host, port)
  _reach(side, host, port)
  # It would take SIGTERM for a warning, and a process would outlive it.
  jax.config.update('jax_enable_preemption_service', False)
  # JAX aborts a process that waits too long: this one ends itself before.
  missing = threading.Timer(limit_s, _end_without, (count, limit_s))
  missing.daemon = True
  missing.start()
  jax.distributed.initialize(
    address if side.leads else _detour(host, port),
    count,
    side.process,
    local,
    cluster_detection_method='deactivate',
    coordinator_bind_address=address,
    initialization_timeout=limit_s + _END_S,
    heartbeat_timeout_seconds=_SILENT_S,
    shutdown_timeout_seconds=_END_S,
  )
  missing.cancel()


def _end_without(count: int, limit_s: int) -> None:
  print(
    f'error: not all {count} processes of this side came within --start_s='
    f'{limit_s}; start all, with the same --processes and a --process each',
    file=sys.stderr,
    flush=True,
  )
  os._exit(LOST)


def _found(options: Options) -> tuple[str, int, int, Any]:
  """Returns process 0's address, how many there are, own number, devices.

  Devices are None for all of this host.
  """
  if not options.distributed:
    assert options.coordinator is not None
    assert options.processes is not None
    assert options.process is not None
    return options.coordinator, options.processes, options.process, None
  # As `jax.distributed.initialize()` does, which keeps the numbers to itself.
  found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
    None, None, None, None, None, options.start_s
  )
  address, count, process, devices = found
  if address is None or count is None or process is None:
    raise ConfigError(
      '--distributed finds no TPU pod and no other cluster that JAX knows; use '
      '--coordinator, --processes and --process'
    )
  return address, count, process, devices


def _reach(side: Side, host: str, port: int) -> None:
  """Waits for process 0; in process 0, sees that others can reach it.

  Raises:
    ConfigError: its address cannot be bound.
    PeerLost: nobody answers.
  """
  if side.leads:
    try:
      with socket.create_server((host, port), family=_family(host)):
        return
    except OSError as error:
      raise ConfigError(
        f'--coordinator={host}:{port} cannot be bound ({error}); it must be a '
        'free address of process 0'
      ) from error
  until_s = time.monotonic() + side.options.start_s
  while True:
    try:
      with socket.create_connection((host, port), timeout=_RETRY_S):
        return
    except OSError as error:
      if time.monotonic() > until_s:
        raise control.PeerLost(
          f'no process 0 at --coordinator={host}:{port} within '
          f'{side.options.start_s} s ({error}); start it, or open the port'
        ) from error
    time.sleep(_RETRY_S)


def _detour(host: str, port: int) -> str:
  """Returns a local address that leads to process 0, even when that is gone.

  JAX (0.10.2) ends a process with code 1 in the moment in which its connection
  to process 0 breaks, whatever it would still have to say or to write. This one
  does not break: it falls silent.
  """
  listener = socket.create_server((_LOOPBACK, 0))
  held = []

  def accept() -> None:
    while True:
      near, _ = listener.accept()
      try:
        far = socket.create_connection((host, port))
      except OSError:
        near.close()
        continue
      held.append((near, far))
      for source, sink in ((near, far), (far, near)):
        source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(
          target=_pass_on, args=(source, sink), daemon=True
        ).start()

  threading.Thread(target=accept, name='lynx-detour', daemon=True).start()
  return f'{_LOOPBACK}:{listener.getsockname()[1]}'


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
  with contextlib.suppress(OSError):
    while data := source.recv(1 << 16):
      sink.sendall(data)


def _host(options: Options) -> str:
  """Returns the address at which the side's other processes find this one."""
  if options.listen is not None:
    return numeric(options.listen)[0]
  assert options.connect is not None
  return interface(options.connect)


def interface(peer: str) -> str:
  """Returns the numeric address of the interface that leads to HOST:PORT.

  Raises:
    ConfigError: nobody knows the host.
    OSError: nothing leads there.
  """
  host, port = numeric(peer)
  with socket.socket(_family(host), socket.SOCK_DGRAM) as route:
    route.connect((host, port))  # sends nothing
    return str(route.getsockname()[0])


def numeric(address: str) -> tuple[str, int]:
  """Returns the numeric address and port of HOST:PORT.

  Raises:
    ConfigError: nobody knows the host.
  """
  host, _, port = address.rpartition(':')
  try:
    found = socket.getaddrinfo(host.strip('[]'), int(port))
  except (OSError, ValueError, OverflowError) as error:
    raise ConfigError(
      f'{address!r} must be ADDRESS:PORT, for example 127.0.0.1:7000 ({error})'
    ) from error
  return str(found[0][4][0]), int(found[0][4][1])


def together(host: str, port: int) -> str:
  """Returns HOST:PORT, which `numeric` takes apart."""
  return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'


def _family(host: str) -> socket.AddressFamily:
  return socket.AF_INET6 if ':' in host else socket.AF_INET


def end(code: int) -> None:
  """Ends this process; one that is left by others does not wait for them."""
  if jax.distributed.is_initialized():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)
