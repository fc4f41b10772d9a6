# SPDX-License-Identifier: Apache-2.0
"""What every test runs under: 8 CPU devices, strict numbers, checked shapes.

It must be imported before JAX makes a backend and before `lynx_jax`.
Tests that compile with libtpu carry `pytest.mark.xdist_group('libtpu')`: one
worker loads it and runs them all.
"""

import gc
import os
import signal
import tempfile

# The tests are about the program, never about the machine's accelerator; what
# the caller's shell says about devices must not change them.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ.pop('XLA_FLAGS', None)
# libtpu 0.0.42 asks the metadata server of a TPU VM for its topology, minutes
# of retries anywhere else, and logs to a file in the temporary folder.
os.environ['TPU_SKIP_MDS_QUERY'] = '1'
os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'  # whoever else compiles
os.environ['TPU_STDERR_LOG_LEVEL'] = '3'
os.environ['TPU_MIN_LOG_LEVEL'] = '3'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '2'
# The workers of a run share what they compile. What an earlier run has compiled
# must not decide what this one sees: it starts with nothing.
if 'PYTEST_XDIST_WORKER' not in os.environ:
  _PROGRAMS = tempfile.TemporaryDirectory(prefix='lynx-test-programs-')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _PROGRAMS.name
os.environ['JAX_ENABLE_COMPILATION_CACHE'] = 'true'
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.1'

# A shell's background jobs ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import jaxtyping
import pytest

from tests import shape_check

jax.config.update('jax_num_cpu_devices', 8)
jax.devices()  # before a test runs a study, which makes as many as it needs
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')

# Array annotations are checked in every call, at trace time. Modules without
# any are left alone: checking each call of the scheduler's simulations would
# take most of the tests' time and find nothing about arrays.
jaxtyping.install_import_hook(
  shape_check.modules_with_arrays(),
  f'{shape_check.__name__}.{shape_check.check.__name__}',
)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
  """Gives a module with `unoptimised` to one worker.

  Its tests share programs, which are dropped at its end: in turns with another
  worker each would compile most of them once more.
  """
  for item in items:
    alone = item.get_closest_marker('xdist_group') is None
    if alone and 'unoptimised' in item.fixturenames:
      item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_collection_finish():
  """Lets garbage collections pass over what lives as long as the process."""
  gc.collect()
  gc.freeze()


@pytest.fixture(scope='module')
def unoptimised():
  """Compiles quickly rather than well, where compiling takes most of the time.

  Not for tests that compare bits of different programs: there the programs of
  users count, and theirs are optimised.
  """
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)
  jax.clear_caches()  # other modules have the same programs optimised
