# SPDX-License-Identifier: Apache-2.0
"""Measures a device, so that projected figures can become measured ones.

  python -m experiments.calibrate             # under 10 minutes; a TPU or GPU
  python -m experiments.calibrate --dry-run   # any device, writes nothing

writes `experiments/calibration/DEVICE.json`: memory and link rates and the
times of the kernels (on a TPU also the clock that an issue-bound kernel shows).

The rule: where a record of a device exists, its rates and clock replace the
assumed ones of `tpu_compiler.CHIPS` in every projection (`chip`), and its
kernel times replace projected times; a figure says which it is. It knows no
engine.
"""

import argparse
import collections.abc
import dataclasses
import datetime
import functools
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp

from lynx_jax import codec as codec_lib
from lynx_jax import pallas_kernels
from lynx_jax.config import TensorCodec
from lynx_jax.pallas_kernels import split_attention_tpu, split_kv_tpu

FOLDER = pathlib.Path(__file__).with_name('calibration')
PLANES = TensorCodec(planes=(4, 4))
# What `device_kind` says, and the generation it means.
GENERATIONS = {
  'TPU v4': 'v4',
  'TPU v5 lite': 'v5e',
  'TPU v5e': 'v5e',
  'TPU v5': 'v5p',
  'TPU v5p': 'v5p',
  'TPU v6 lite': 'v6e',
  'TPU v6e': 'v6e',
  'TPU7x': 'tpu7x',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
  """Seconds a call: median and 90th percentile of `repeats`."""

  median_s: float
  p90_s: float
  repeats: int


def timed(
  call: collections.abc.Callable[[], object], repeats: int = 20
) -> Timing:
  """Times `call`, warmed up and waited for."""
  for _ in range(2):
    jax.block_until_ready(call())
  seconds = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(time.perf_counter() - start)
  return Timing(
    median_s=statistics.median(seconds),
    p90_s=sorted(seconds)[int(0.9 * (repeats - 1))],
    repeats=repeats,
  )


def hbm_gbyte_s(size_bytes: int = 1 << 28) -> float:
  """Returns the rate of reading and writing one large array."""
  # In place: a fresh result would cost a CPU its page faults.
  add = jax.jit(lambda x: x + 1, donate_argnums=0)
  x = jnp.zeros(size_bytes // 4, jnp.float32)

  def call():
    nonlocal x
    x = add(x)
    return x

  return 2 * size_bytes / timed(call).median_s / 1e9


def link_gbyte_s(size_bytes: int = 1 << 26) -> float:
  """Returns the rate from the host's memory to the device's."""
  x = jax.device_get(jnp.zeros(size_bytes // 4, jnp.float32))
  return size_bytes / timed(lambda: jax.device_put(x)).median_s / 1e9


def operands(*, tokens: int, kv_heads: int, head_dim: int, heads: int):
  """Returns (q, k, v) of a decode step; k and v are packed, one layer."""
  keys = jax.random.split(jax.random.key(0), 3)
  shape = (1, tokens, kv_heads, head_dim)
  q = jax.random.normal(keys[0], (1, 1, heads, head_dim), jnp.float32)

  @jax.jit
  def pack(key):
    x = jax.random.normal(key, shape, jnp.bfloat16)
    packed = codec_lib.split(x, PLANES, group=128)
    return jax.tree.map(lambda x: x[None], packed)

  return q, pack(keys[1]), pack(keys[2])


def attention(depth: int):
  """Returns the jitted op that reads `depth` planes."""

  @jax.jit
  def call(q, k, v):
    return pallas_kernels.split_attention(
      q,
      k.keep(depth),
      v.keep(depth),
      layer=0,
      prefix_tokens=jnp.full(1, k.groups * k.group, jnp.int32),
      logits_scale=q.shape[-1] ** -0.5,
    )

  return call


def kernel_times(tokens: int = 32768) -> dict[str, Timing]:
  """Times the kernels at the shape of `kernel_costs`: D=128, 8 KV heads."""
  q, k, v = operands(tokens=tokens, kv_heads=8, head_dim=128, heads=32)
  dense = jax.random.normal(
    jax.random.key(3), (1, tokens, 8, 128), jnp.bfloat16
  )
  split = jax.jit(
    functools.partial(
      pallas_kernels.split_kv, k_codec=PLANES, v_codec=PLANES, group=128
    )
  )
  merge = jax.jit(pallas_kernels.merge)
  one = jax.tree.map(lambda x: x[0], k)
  anchor, both = attention(1), attention(2)
  return {
    'attention_anchor': timed(lambda: anchor(q, k, v)),
    'attention_anchor_residual': timed(lambda: both(q, k, v)),
    'split': timed(lambda: split(dense, dense)),
    'merge': timed(lambda: merge(one)),
  }


def record() -> dict:
  """Measures the first device."""
  device = jax.devices()[0]
  times = kernel_times(32768 if device.platform != 'cpu' else 2048)
  result = {
    'device': device.device_kind,
    'platform': device.platform,
    'generation': GENERATIONS.get(device.device_kind),
    'date': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'versions': {'jax': jax.__version__, 'backend': _backend_version()},
    'hbm_gbyte_s': hbm_gbyte_s(
      1 << 30 if device.platform != 'cpu' else 1 << 26
    ),
    # A CPU has no link to itself: JAX passes the same memory on.
    'link_gbyte_s': link_gbyte_s() if device.platform != 'cpu' else None,
    'clock_ghz': None,
    'kernels': {name: dataclasses.asdict(t) for name, t in times.items()},
  }
  result['clock_ghz'] = _clock(result)
  return result


def _backend_version():
  return jax.devices()[0].client.platform_version.split('\n')[0]


def _clock(measured):
  """Returns issue cycles / time of the most issue-bound kernel of the table."""
  from experiments import kernel_costs

  attention = split_attention_tpu.BlockSizes().tokens
  ran = {'merge': split_kv_tpu.BlockSizes().tokens}
  best = None
  for cost in kernel_costs.load().values():
    timing = measured['kernels'].get(cost['kernel'])
    if (
      timing is None
      or cost['generation'] != measured['generation']
      or (cost['head_dim'], cost['query_rows']) != (128, 4)
      or cost['block'] != ran.get(cost['kernel'], attention)
      or cost['kernel'] == 'split'  # timed for K and V together
    ):
      continue
    bound = cost['issue_cycles'] / cost['floor_cycles']
    if bound > 1 and (best is None or bound > best[0]):
      best = bound, cost['issue_cycles'] / timing['median_s'] / 1e9
  return best and best[1]


def load(device_kind: str) -> dict | None:
  """Returns the record of a device, or None."""
  file = FOLDER / f'{device_kind.replace(" ", "_")}.json'
  return json.loads(file.read_text(encoding='utf-8')) if file.exists() else None


def chip(generation: str):
  """Returns (chip, basis): measured values wherever a record has them."""
  from experiments import tpu_compiler

  assumed = tpu_compiler.CHIPS[generation]
  for kind, name in GENERATIONS.items():
    found = load(kind) if name == generation else None
    if found:
      measured = {
        field: found[field]
        for field in ('clock_ghz', 'hbm_gbyte_s')
        if found[field] is not None
      }
      return dataclasses.replace(assumed, **measured), 'measured'
  return assumed, 'assumed'


def main(arguments=None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--dry-run', action='store_true', help='print the record, write nothing'
  )
  dry_run = parser.parse_args(arguments).dry_run
  device = jax.devices()[0]
  if device.platform == 'cpu' and not dry_run:
    parser.error(
      'JAX sees only a CPU, and a record is for a TPU or GPU: install '
      'jax[tpu] or jax[cuda12], or try the script with --dry-run'
    )
  text = json.dumps(record(), indent=1)
  print(text)
  if not dry_run:
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f'{device.device_kind.replace(" ", "_")}.json'
    file.write_text(text + '\n', encoding='utf-8')
    print(f'wrote {file}')


if __name__ == '__main__':
  main()
