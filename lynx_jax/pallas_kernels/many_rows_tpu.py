# SPDX-License-Identifier: Apache-2.0
"""Attention of more than 8 query rows a KV head to a block of packed planes.

It knows no copies; `split_attention_tpu` has the grid. A verification of 16
tokens x 4 heads is 64 rows: 8 registers of scores a group, whose bytes would
hide only some 70 bundles on v5e. So operations are what counts:

* All tiles of a head share one maximum, taken over tiles lane by lane first, so
  that lanes are reduced once and sums over V need no rescaling.
* Biases of keys are one product a head; so are those of values, for which the
  loop keeps the weights' sum of every tile. Neither masks of groups without
  tokens nor sums of weights cost more.
* Keys meet the MXU as int8, a query row being two int8 digits, or as bfloat16,
  a query row being a high and a low half side by side in a contraction of 256
  (a wide MXU takes that at once, and its float32 sums need no joining).
  Weights are bfloat16: their error, 2^-9 each, is well below that of a
  bfloat16 query, which moves every logit.
* V enters the MXU transposed, at 8 bundles a register. A wide MXU takes two
  tiles in that time; what of their product is not on the diagonal is dropped.

A loop sums heads over V and scores the next ones. Nothing can go on beside the
last scores of a turn, so that a turn is better long: of two heads, say.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from lynx_jax.pallas_kernels import tiles
from lynx_jax.pallas_kernels.attention_block_tpu import MASKED, Block, Softmax
from lynx_jax.pallas_kernels.tiles import GROUP, LANES, LIMIT, Tile


class Scratch(NamedTuple):
  """What a step keeps in VMEM.

  Attributes:
    q: queries of every head; scaled for `tiles.digits` where keys are int8.
    unit: of every head, undoes that scaling.
    bias: of every head's keys: lane n is tile n's. Where scales belong to
      tokens, the sum of a row of q.
    masses: of every head, sums of weights: lane n is tile n's.
    scores: of every tile of some heads in turn.
    top: their maximum, and that of the blocks before.
    rest: what that maximum leaves of earlier sums.
  """

  q: Any
  unit: Any
  bias: Any
  masses: Any
  scores: Any
  top: Any
  rest: Any


def scratch_shapes(tile: Tile, heads: int, groups: int, ahead: int) -> Scratch:
  """Returns the scratch of a step; `ahead` divides `heads`."""
  assert groups // tile.pack <= LANES, (groups, tile)
  state = (tile.sublanes, LANES)
  per_head = pltpu.VMEM((heads, *state), jnp.float32)
  return Scratch(
    q=pltpu.VMEM((heads, tile.sublanes, tile.width), jnp.float32),
    unit=per_head,
    bias=per_head,
    masses=per_head,
    scores=pltpu.VMEM((ahead, groups // tile.pack, *state), jnp.float32),
    top=pltpu.VMEM((ahead, *state), jnp.float32),
    rest=pltpu.VMEM((ahead, *state), jnp.float32),
  )


def attend(
  block: Block,
  q_ref,
  softmax: Softmax,
  scratch: Scratch,
  *,
  key_dtype,
  tiles_per_dot: int,
) -> None:
  """Adds a block to the softmax of every head.

  Args:
    q_ref: f32[heads, sublanes, width], in units of log 2.
    key_dtype: int8 or bfloat16.
    tiles_per_dot: tiles that share an MXU product.
  """
  heads, pack = q_ref.shape[0], block.tile.pack
  together = tiles_per_dot * pack
  dots = [
    range(g, min(g + together, block.groups), pack)
    for g in range(0, block.groups, together)
  ]
  ahead = scratch.scores.shape[0]
  score = functools.partial(_score, block, dots, softmax, scratch, key_dtype)
  add = functools.partial(_sum, block, dots, softmax, scratch)
  for h in range(heads):
    _prepare(block, q_ref[h], h, scratch, key_dtype)

  def sum_and_score(n, _):
    for i in range(ahead):
      add(n * ahead + i, i)
      score((n + 1) * ahead + i, i)

  for i in range(ahead):
    score(i, i)
  lax.fori_loop(0, heads // ahead - 1, sum_and_score, None)
  for i in range(ahead):
    add(heads - ahead + i, i)
  if block.v.of_channels:
    for h in range(heads):
      bias = _of_lanes(block.v.tables.bias[h])
      softmax.out[h] += tiles.product(scratch.masses[h], bias, 1)


def _prepare(block, q, h, scratch, key_dtype):
  """Fills what is of one head."""
  tile, k = block.tile, block.k
  shape = (tile.sublanes, LANES)
  scale, bias = block.fill(k, h)
  block.fill(block.v, h)
  size = jnp.full((tile.sublanes, 1), LIMIT, jnp.float32)
  if key_dtype == jnp.int8:
    size = jnp.abs(q)
    if k.of_channels:
      size = size * jnp.max(scale, axis=0, keepdims=True)
    size = jnp.max(size, axis=1, keepdims=True)
    size = jnp.maximum(size, np.float32(1e-30))
  scratch.q[h] = q * (LIMIT / size)
  scratch.unit[h] = jnp.broadcast_to(size * (1 / LIMIT), shape)
  if k.of_channels:
    sums = tiles.product(q, _of_lanes(bias), 0)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    group = lane * tile.pack + tile.per_group(list(range(tile.pack)))
    # What is masked here need not be tile by tile.
    scratch.bias[h] = jnp.where(group < block.held, sums, MASKED)
  else:
    scratch.bias[h] = jnp.broadcast_to(jnp.sum(q, 1, keepdims=True), shape)
  scratch.masses[h] = jnp.zeros(shape, jnp.float32)


def _score(block, dots, softmax, scratch, key_dtype, h, i):
  """Stores the scores of a head and the maximum it is summed with."""
  tile, k = block.tile, block.k
  q, unit, bias = scratch.q[h], scratch.unit[h], scratch.bias[h]
  best = softmax.top[h]
  for gs in dots:
    rows, codes = [], []
    for g in gs:
      scaled = q
      if k.of_channels:
        scaled = q * tile.channels(k.tables.scale, h, g)
      code = jnp.concatenate(block.codes(k, h, g), 0 if tile.stacked else 1)
      if key_dtype == jnp.int8:
        rows.append(tiles.digits(scaled))
      else:
        rows.append(tiles.halves(scaled))
        code = jnp.concatenate([code.astype(jnp.bfloat16)] * 2, 0)
      codes.append(code)
    for g, score in zip(gs, tiles.products(rows, codes, 1), strict=True):
      if key_dtype == jnp.int8:
        score = tiles.join(score, tile, GROUP) * unit
      n = g // tile.pack
      if k.of_channels:
        score += bias[:, n : n + 1]
      else:
        score *= tile.tokens(k.tables.scale, h, g)
        score += bias * tile.tokens(k.tables.bias, h, g)
      all_held = k.of_channels and block.soft_cap is None
      score = block.mask(block.cap(score), g, all_held=all_held)
      scratch.scores[i, n] = score
      best = jnp.maximum(best, score)
  before = softmax.top[h]
  top = jnp.broadcast_to(jnp.max(best, 1, keepdims=True), before.shape)
  softmax.top[h] = scratch.top[i] = top
  scratch.rest[i] = jnp.exp2(before - top)


def _sum(block, dots, softmax, scratch, h, i):
  """Adds a head's tiles to its sums of weights and over V."""
  tile, v = block.tile, block.v
  top, rest = scratch.top[i], scratch.rest[i]
  out = softmax.out[h] * tile.spread(rest)
  shifts = jnp.zeros_like(rest)
  for gs in dots:
    weights, codes = [], []
    for g in gs:
      n = g // tile.pack
      weight = jnp.exp2(scratch.scores[i, n] - top)
      scratch.masses[h, :, n : n + 1] = jnp.sum(weight, 1, keepdims=True)
      if not v.of_channels:
        shifts += weight * tile.tokens(v.tables.bias, h, g)
        weight *= tile.tokens(v.tables.scale, h, g)
      weights.append(weight.astype(jnp.bfloat16))
      code = jnp.concatenate(block.codes(v, h, g), 0)
      codes.append(code.astype(jnp.bfloat16))
    for g, value in zip(gs, tiles.products(weights, codes, 0), strict=True):
      if v.of_channels:
        value *= tile.channels(v.tables.scale, h, g)
      out += value
  if not v.of_channels:
    out += jnp.sum(shifts, 1, keepdims=True)
  softmax.out[h] = out
  mass = jnp.sum(scratch.masses[h], 1, keepdims=True)
  softmax.mass[h] = softmax.mass[h] * rest + mass


def _of_lanes(table):
  """Returns a table of tiles with as many rows as there are lanes."""
  spare = LANES - table.shape[0]
  return jnp.pad(table, ((0, spare), (0, 0)))
