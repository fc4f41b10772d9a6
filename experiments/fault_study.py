# SPDX-License-Identifier: Apache-2.0
"""Random fault schedules on a prefill and a decode process.

    python -m experiments.fault_study --workdir=runs/transport

Runs the schedules of `fault_schedules` that WORKDIR has no record of: stop it
at any time, and the next call goes on. About 2 s a schedule on two cores. As
root, `cuts` takes a real link down, for 5 s and for good.
"""

import argparse
import contextlib
import functools
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from experiments import fault_schedules, namespaces, pair, results
from lynx_jax import handshake
from lynx_jax.engine import Engine, Request, Sampling
from lynx_jax.remote_prefill import RemotePrefill
from lynx_jax.transport import control, pull
from lynx_jax.transport.fault_plan import Peer, PeerFault

SCHEDULES = 300
_KIND = pair.KINDS['tiny']
_LENGTHS = (200, 97, 150, 33)
_NAME = 'fault_schedule'
_HOST = '127.0.0.1'
_CUT_MBIT, _CUT_S = 100, 5.0


def main(arguments: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--workdir', default='runs/transport')
  parser.add_argument('--schedules', type=int, default=SCHEDULES)
  parser.add_argument('--decode', metavar='ADDRESS', help='a side of `cuts`')
  chosen = parser.parse_args(arguments)
  if chosen.decode:
    _decode(chosen.decode)
    return
  with results.Writer(chosen.workdir) as writer:
    for record in run(writer.path, chosen.schedules):
      writer.write(record)
      if record['kind'] == 'summary':
        print(f'{record["name"]}: {record["value"]}')


def run(known: Any, schedules: int = SCHEDULES) -> Iterator[dict[str, Any]]:
  """Yields a record of every schedule not known yet, then the summaries.

  Args:
    known: file of records; those of other versions do not count.
    schedules: seeds 0 and up.
  """
  versions = results.environment()['versions']
  ended = {
    record['detail']['seed']: record['detail']
    for record in results.read(known)
    if record.get('name') == _NAME and record['detail']['versions'] == versions
  }
  left = [seed for seed in range(schedules) if seed not in ended]
  with contextlib.ExitStack() as stack:
    if left:
      processes = stack.enter_context(contextlib.closing(Processes()))
      bench = _bench(processes)
    for seed in left:
      outcome = bench.run(fault_schedules.draw(seed, _LENGTHS))
      record = results.schedule_record(seed, versions=versions, **vars(outcome))
      ended[seed] = record['detail']
      yield record
  found = [ended[seed] for seed in range(schedules)]
  counts = {
    'run': len(found),
    'hung': sum(outcome['hung'] for outcome in found),
    'wrong_tokens': sum(outcome['wrong_tokens'] for outcome in found),
    'leaked': sum(outcome['leaked'] for outcome in found),
  }
  for name, value in counts.items():
    yield results.summary_record(
      f'fault_schedules_{name}', value, '', len(found)
    )


def cuts() -> Iterator[dict[str, Any]]:
  """Takes a real link down in the middle of a Residual; needs root.

  Yields:
    seconds from the end of a cut of 5 s to that of the request, whose output
    must be right; and from a cut for good to the typed error.
  """
  with contextlib.ExitStack() as stack:
    stack.enter_context(namespaces.link(_CUT_MBIT))
    sender, receiver = map(namespaces.inside, namespaces.SPACES)
    prefill = stack.enter_context(
      contextlib.closing(pair.Prefill('bench', namespaces.ADDRESSES[0], sender))
    )
    side = [sys.executable, '-m', 'experiments.fault_study']
    process = subprocess.Popen(
      [*receiver, *side, f'--decode={prefill.address}'],
      stdout=subprocess.PIPE,
      text=True,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    process.stdout.readline()  # the Residual has begun
    namespaces.cut()
    time.sleep(_CUT_S)
    namespaces.mend()
    mended_s = time.monotonic()
    back = json.loads(process.stdout.readline())
    assert back == {'error': None, 'equal': True}, back
    yield results.summary_record(
      'link_cut_5s_recovery_s', time.monotonic() - mended_s, 's', 1
    )
    process.stdout.readline()
    namespaces.cut()
    cut_s = time.monotonic()
    gone = json.loads(process.stdout.readline())
    assert gone['error'] == 'PeerLost', gone
    yield results.summary_record(
      'link_cut_error_s', time.monotonic() - cut_s, 's', 1
    )


def _decode(address: str) -> None:
  """The decode side of `cuts`: two requests, each told of in its Residual."""
  kind = pair.KINDS['bench']
  model = pair.weights(kind)
  remote = RemotePrefill(
    kind.wire,
    handshake.fingerprint(model),
    pair.placement(),
    dial=lambda: control.ClientChannel(address),
    server=pull.start_server(namespaces.ADDRESSES[1]),
    window_bytes=kind.window_bytes,
  )
  request = Request(
    prompt=pair.prompt(kind, kind.engine.prompt_tokens), output_tokens=8
  )
  with Engine(remote, model, kind.codec, kind.engine) as engine:
    engine.warm_up()
    right = engine.generate(request).tokens
    for _ in range(2):
      engine.spoil_cache()  # it may hold all of this prompt
      result = engine.result(engine.submit(request))
      while not result.residual_bytes:
        engine.step()
      print('now', flush=True)
      while engine.busy:
        engine.step()
      found = {
        'error': result.error and type(result.error).__name__,
        'equal': result.tokens == right,
      }
      print(json.dumps(found), flush=True)


class Processes:
  """A prefill process, and one that stands by until it is killed."""

  def __init__(self):
    self._programs = tempfile.TemporaryDirectory()
    self._now, self._next = self._prefill(), self._prefill()
    self._timer: threading.Timer | None = None
    self._dead: list[pair.Prefill] = []

  def address(self) -> str:
    """Where prefill is served now, or was until it was killed."""
    return self._now.address

  def suffer(self, fault: PeerFault) -> None:
    """Kills or stops it, and lets it be back in time."""
    back = self._replace
    if fault.what is Peer.KILL:
      self._now.signal(signal.SIGKILL)
    else:
      self._now.signal(signal.SIGSTOP)
      back = functools.partial(self._now.signal, signal.SIGCONT)
    self._timer = threading.Timer(fault.back_s, back)
    self._timer.start()

  def held(self) -> tuple[int, int, int]:
    """Returns what it holds, once it is back."""
    if self._timer is not None:
      self._timer.join()
    return self._now.held()

  def close(self) -> None:
    """Ends all of them."""
    if self._timer is not None:
      self._timer.join()
    for process in (self._now, self._next, *self._dead):
      process.close()
    self._programs.cleanup()

  def _prefill(self) -> pair.Prefill:
    return pair.Prefill('tiny', programs=self._programs.name)

  def _replace(self) -> None:
    self._dead.append(self._now)
    self._now, self._next = self._next, self._prefill()


def _bench(processes: Processes) -> fault_schedules.Bench:
  """Returns a warm bench, with the outputs of runs without faults."""
  model = pair.weights(_KIND)
  fingerprint, server = handshake.fingerprint(model), pull.start_server(_HOST)
  references = {}
  remote = RemotePrefill(
    _KIND.wire,
    fingerprint,
    pair.placement(),
    dial=lambda: control.ClientChannel(processes.address()),
    server=server,
  )
  with Engine(remote, model, _KIND.codec, _KIND.engine) as engine:
    engine.warm_up()
    for length in _LENGTHS:
      references[length] = engine.reference(
        pair.prompt(_KIND, length),
        _KIND.engine.output_tokens,
        sampling=_sampling(length),
      )
  return fault_schedules.Bench(
    wire=_KIND.wire,
    model=model,
    fingerprint=fingerprint,
    sharding=pair.placement(),
    server=server,
    address=processes.address,
    suffer=processes.suffer,
    held=processes.held,
    prompt=functools.partial(pair.prompt, _KIND),
    sampling=_sampling,
    references=references,
    output_tokens=_KIND.engine.output_tokens,
  )


def _sampling(length: int) -> Sampling:
  """Returns that of a prompt: even lengths are decoded greedily."""
  return Sampling(temperature=float(length % 2), seed=length)


if __name__ == '__main__':
  main()
