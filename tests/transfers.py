# SPDX-License-Identifier: Apache-2.0
"""What both processes of the transfer's tests share: model, formats, child."""

import pathlib
import sys

import jax
import numpy as np

from experiments import pair
from lynx_jax import handshake
from lynx_jax.transport import messages
from lynx_jax.transport.streams import WireFormat
from tests import engines

SETUP = engines.SETUPS['lynx']
WINDOW_BYTES = 64 * 1024
LEASE_S = 2.0
FORMATS = [
  WireFormat(engines.MODEL, engines.SETUPS[name].codec, SETUP.config)
  for name in ('lynx', 'dense', 'exact')
]
model = engines.model
ENVIRONMENT = {'JAX_NUM_CPU_DEVICES': '2'}


class Child(pair.Process):
  """A prefill process.

  Args:
    cache: folder of compiled programs.
  """

  def __init__(self, cache: pathlib.Path):
    super().__init__(
      [sys.executable, '-m', 'tests.prefill_process'],
      environment=ENVIRONMENT | pair.keeping(str(cache)),
    )


def placement():
  return jax.sharding.SingleDeviceSharding(engines.DECODE_DEVICE)


def submitted(wire: WireFormat, prompt: np.ndarray) -> messages.Submit:
  """Returns the message that asks for a prompt."""
  return messages.Submit(
    request=0,
    generation=0,
    prompt=prompt.astype('<i4').tobytes(),
    manifest=handshake.manifest_hash(wire, len(prompt)),
    mode='serial',
    deadline_in_s=None,
    landed=(),
  )
