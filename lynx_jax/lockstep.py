# SPDX-License-Identifier: Apache-2.0
"""Prefill in several processes: process 0 says which token chunk comes next.

Every process of the side is asked for prompts by a peer of its own, and none
knows when the others are. But a program of prefill runs in all of them, and
all must start the same ones in the same order. So whoever is asked for a prompt
tells process 0, which lets all compute it, once, whoever asked first; a process
takes the result for the same prompt that it was asked for, then or later.

    process 1                     process 0                    both
    Want(prompt) ───────────────▶ opens computation 7 ───────▶ Open(7, prompt)
    takes computation 7 ◀──────── Take(7)
                                  when both can go on ───────▶ Step(7), Step(7)…
    no longer held: Release(7) ─▶ when nobody holds it ──────▶ Forget(7)

It knows no session, no chunk and no transfer.
"""

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import numpy as np
from absl import logging

from lynx_jax.prefill import Prefill, Prompt
from lynx_jax.sampling import GREEDY, Sampling
from lynx_jax.transport import control
from lynx_jax.transport.exchange import Exchange

Form = tuple[Any, ...]  # what a `Prefill` is made from, in every process
_Content = tuple[Form, bytes, tuple[Any, ...]]  # form, token ids, sampling


class Lockstep:
  """The computations of one process; each process of a side has one.

  Args:
    exchange: between the processes; nobody else may use it.
    make: returns what computes the prompts of a form, over all processes.
  """

  def __init__(self, exchange: Exchange, make: Callable[[Form], Prefill]):
    self._exchange, self._make = exchange, make
    self._forms: dict[Form, Prefill] = {}
    self._computations: dict[int, _Computation] = {}
    self._numbers, self._tickets = itertools.count(), itertools.count()
    self._asked: dict[int, futures.Future[tuple[int, _Computation]]] = {}
    self._lost: Exception | None = None
    # From this process and others; one thread does all there is to do.
    self._inbox: queue.SimpleQueue[tuple[int, tuple[Any, ...]]] = (
      queue.SimpleQueue()
    )
    exchange.follow(
      lambda process, told: self._inbox.put((process, told)),
      lambda error: self._put('lost', error),
    )
    threading.Thread(
      target=self._run, name='lynx-lockstep', daemon=True
    ).start()

  def prefill(self, form: Form) -> 'LockstepPrefill':
    """Returns what computes prompts of a form for one peer."""
    return LockstepPrefill(self, form)

  def chunks(
    self, form: Form, prompt: np.ndarray, sampling: Sampling
  ) -> Iterator[Prompt]:
    """Yields the growing prompt; see `Prefill.chunks`.

    Raises:
      NonFiniteError: as there.
      PeerLost: a process of the side is gone.
    """
    content = (
      form,
      prompt.astype('<i4').tobytes(),
      tuple(vars(sampling).items()),
    )
    asked: futures.Future[tuple[int, _Computation]] = futures.Future()
    self._put('want', asked, content)
    number, computation = asked.result()
    whole = False
    try:
      for held in computation.chunks():
        yield held
      whole = True
    finally:
      if whole:
        # It can be taken elsewhere for as long as anybody has it.
        weakref.finalize(held, self._put, 'release', number).atexit = False
      else:
        self._put('release', number)

  def split(self, form: Form, prompt: Prompt, token_chunk: int) -> None:
    """Splits what this process has of a token chunk; see `Prefill.split`."""
    self._form(form).split(prompt, token_chunk)

  def close(self) -> None:
    """Ends all computations, here and, since they depend on it, elsewhere."""
    self._exchange.close()

  def _put(self, *message: Any) -> None:
    self._inbox.put((self._exchange.process, message))

  def _form(self, form: Form) -> Prefill:
    if form not in self._forms:
      self._forms[form] = self._make(form)
    return self._forms[form]

  def _run(self) -> None:
    while True:
      unended = [n for n, c in self._computations.items() if not c.ended]
      steps = unended if self._exchange.leads else []
      try:
        process, message = self._inbox.get(block=not steps)
      except queue.Empty:
        process, message = 0, ('step', steps[0])
        self._tell(*message)
      try:
        self._on(process, message)
      except Exception as error:  # must reach whoever waits
        logging.exception('prefill is out of step')
        self._give_up(error)
        self._exchange.close()

  def _on(self, process: int, message: tuple[Any, ...]) -> None:
    match message:
      case ('want', futures.Future() as asked, content):
        self._on_want_here(asked, content)
      case ('want', ticket, content):
        self._on_want(process, ticket, content)
      case ('release', number):
        self._on_release(process, number)
      case ('open', number, content):
        self._open(number, content)
      case ('take', ticket, number):
        asked = self._asked.pop(ticket)
        asked.set_result((number, self._computations[number]))
      case ('step', number):
        self._computations[number].step()
      case ('forget', number):
        del self._computations[number]
      case ('lost', error):
        self._give_up(error)

  def _tell(self, *message: Any, process: int | None = None) -> None:
    try:
      self._exchange.tell(message, process)
    except control.PeerLost as error:
      self._give_up(error)

  def _on_want_here(self, asked, content: _Content) -> None:
    if self._lost is not None:
      asked.set_exception(self._lost)
      return
    ticket = next(self._tickets)
    self._asked[ticket] = asked
    if self._exchange.leads:
      self._on_want(0, ticket, content)
    else:
      self._tell('want', ticket, content)

  def _on_want(self, process: int, ticket: int, content: _Content) -> None:
    """Finds or opens a computation for a process; in process 0."""
    found = (
      number
      for number, computation in self._computations.items()
      if computation.content == content and process not in computation.takers
    )
    number = next(found, None)
    if number is None:
      number = next(self._numbers)
      self._tell('open', number, content)
      self._open(number, content)
    computation = self._computations[number]
    computation.takers.add(process)
    computation.holders.add(process)
    if process:
      self._tell('take', ticket, number, process=process)
    else:
      self._asked.pop(ticket).set_result((number, computation))

  def _on_release(self, process: int, number: int) -> None:
    if not self._exchange.leads:
      self._tell('release', number)
      return
    computation = self._computations.get(number)
    if computation is None:
      return
    computation.holders.discard(process)
    if not computation.holders:
      self._tell('forget', number)
      del self._computations[number]

  def _open(self, number: int, content: _Content) -> None:
    form, tokens, sampling = content
    steps = self._form(form).chunks(
      np.frombuffer(tokens, '<i4').astype(np.int32), Sampling(**dict(sampling))
    )
    self._computations[number] = _Computation(content, steps)

  def _give_up(self, error: Exception) -> None:
    self._lost = error
    for computation in self._computations.values():
      computation.fail(error)
    for asked in self._asked.values():
      asked.set_exception(error)
    self._computations.clear()
    self._asked.clear()


class LockstepPrefill:
  """A `Prefill` for one peer of one process."""

  def __init__(self, lockstep: Lockstep, form: Form):
    self._lockstep, self._form = lockstep, form

  def chunks(
    self, prompt: np.ndarray, sampling: Sampling = GREEDY
  ) -> Iterator[Prompt]:
    """Yields the growing prompt; see `Lockstep.chunks`."""
    return self._lockstep.chunks(self._form, prompt, sampling)

  def split(self, prompt: Prompt, token_chunk: int) -> None:
    """Splits what this process has of a token chunk."""
    self._lockstep.split(self._form, prompt, token_chunk)


class _Computation:
  """A prompt that is being computed, here as in all other processes.

  Attributes:
    content: what is computed.
    takers: processes that have ever taken it; known in process 0.
    holders: those of them that still have it.
    ended: no token chunk is left, or it has failed.
  """

  def __init__(self, content: _Content, steps: Iterator[Prompt]):
    self.content = content
    self.takers: set[int] = set()
    self.holders: set[int] = set()
    self.ended = False
    self._steps = steps
    self._changed = threading.Condition()  # guards everything below
    self._prompt: Prompt | None = None
    self._computed = 0  # token chunks
    self._asked: int | None = None  # that its taker here is done with
    self._error: Exception | None = None

  def step(self) -> None:
    """Computes the next token chunk, once its taker is done with the last.

    The next one takes over the buffers.
    """
    with self._changed:
      self._changed.wait_for(lambda: self._asked in (None, self._computed))
      try:
        if not self.ended:
          self._prompt = next(self._steps)
          self._computed += 1
      except StopIteration:
        self.ended = True
      except Exception as error:  # reaches the taker
        self._error, self.ended = error, True
      self._changed.notify_all()

  def fail(self, error: Exception) -> None:
    """Ends it; what was computed stays."""
    with self._changed:
      if not self.ended:
        self._error, self.ended = error, True
      self._changed.notify_all()

  def chunks(self) -> Iterator[Prompt]:
    """Yields the growing prompt to its taker; see `Prefill.chunks`."""
    try:
      for done in itertools.count():
        with self._changed:
          self._asked = done
          self._changed.notify_all()
          while self._computed <= done and not self.ended:
            self._changed.wait()
          if self._computed <= done:
            break
          prompt = self._prompt
        assert prompt is not None
        yield prompt
      self._prompt = None  # the taker's, from now on
      if self._error is not None:
        raise self._error
    finally:
      with self._changed:
        self._asked = None
        self._changed.notify_all()
