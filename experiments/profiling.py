# SPDX-License-Identifier: Apache-2.0
"""Writes xprof traces, in which phases have the names of the timeline's.

It knows no study: whoever runs something says what is traced.
"""

import contextlib
import os
from collections.abc import Iterator

import jax

FOLDER = 'profile'  # of a work directory


@contextlib.contextmanager
def trace(folder: str | os.PathLike[str] | None) -> Iterator[None]:
  """Traces host and devices while its block runs; None traces nothing.

  The host's spans are `prefill`, `split`, `draft`, `verify` and `commit`, as in
  `timeline.Phase`. Programs have those names too, and the operations of a
  decode round the scopes `draft`, `verify` and `commit`.

  Args:
    folder: for TensorBoard's xprof plugin, or https://ui.perfetto.dev.
  """
  if folder is None:
    yield
    return
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0  # every Python call would drown the phases
  jax.profiler.start_trace(folder, profiler_options=options)
  try:
    yield
  finally:
    jax.profiler.stop_trace()
