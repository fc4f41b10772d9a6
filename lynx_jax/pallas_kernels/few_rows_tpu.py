# SPDX-License-Identifier: Apache-2.0
"""Attention of at most 8 query rows a KV head to a block of packed planes.

It knows no copies; `split_attention_tpu` has the grid. A block is bound by its
bytes, so all of it is unrolled in two phases: scores and weights of every tile,
then their sums over V. Weights are two int8 digits, as queries are; every row
of every tile has its own maximum, so that weights far below a slot's maximum
(all but an attention sink's) keep their 16 bits.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from lynx_jax.pallas_kernels import tiles
from lynx_jax.pallas_kernels.attention_block_tpu import Block, Softmax
from lynx_jax.pallas_kernels.tiles import GROUP, LANES, LIMIT, Tile


class Scratch(NamedTuple):
  """What a step keeps in VMEM, of every tile of every head.

  Attributes:
    weights: digits.
    tops, masses: a tile's maximum and sum of weights.
    shifts, v_unit: where V's scales belong to tokens: the sum of the biases,
      and what undoes the scaling of weights.
  """

  weights: Any
  tops: Any
  masses: Any
  shifts: Any
  v_unit: Any


def scratch_shapes(
  tile: Tile, heads: int, groups: int, *, v_of_channels: bool
) -> Scratch:
  """Returns the scratch of a step."""
  n_tiles = groups // tile.pack
  per_tile = pltpu.VMEM((heads, n_tiles, tile.sublanes, LANES), jnp.float32)
  return Scratch(
    weights=pltpu.VMEM((heads, n_tiles, 2 * tile.sublanes, LANES), jnp.int8),
    tops=per_tile,
    masses=per_tile,
    shifts=None if v_of_channels else per_tile,
    v_unit=None
    if v_of_channels
    else pltpu.VMEM((heads, groups, LANES), jnp.float32),
  )


def attend(
  block: Block,
  q_ref,
  softmax: Softmax,
  scratch: Scratch,
  *,
  tiles_per_dot: int,
) -> None:
  """Adds a block to the softmax of every head.

  Args:
    q_ref: f32[heads, sublanes, width], in units of log 2.
    tiles_per_dot: tiles that share an MXU product.
  """
  heads = q_ref.shape[0]
  queries = [_prepare(block, q_ref[h], h, scratch) for h in range(heads)]
  pack = block.tile.pack
  together = tiles_per_dot * pack
  for h, query in enumerate(queries):
    for g in range(0, block.groups, together):
      gs = range(g, min(g + together, block.groups), pack)
      _weigh(block, h, gs, query, scratch)
  for h in range(heads):
    _accumulate(block, h, softmax, scratch, together)


def _prepare(block, q, h, scratch):
  """Fills the tables of one head; returns q as (plain, for digits, unit)."""
  scale, _ = block.fill(block.k, h)
  size = jnp.abs(q)
  if block.k.of_channels:
    size = size * jnp.max(scale, axis=0, keepdims=True)
  size = jnp.max(size, axis=1, keepdims=True)
  size = jnp.maximum(size, np.float32(1e-30))

  scale, _ = block.fill(block.v, h)
  v_scale = block.v.tables.scale
  if block.v.of_channels:
    v_scale[h] = scale * (1 / LIMIT)
  else:
    largest = jnp.max(scale, axis=1, keepdims=True)
    largest = jnp.maximum(largest, np.float32(1e-30))
    v_scale[h] = scale * (LIMIT / largest)
    scratch.v_unit[h] = jnp.broadcast_to(largest * (1 / LIMIT), scale.shape)
  return q, q * (LIMIT / size), size * (1 / LIMIT)


def _weigh(block, h, gs, query, scratch):
  """Scores tiles and stores their weights, these' maxima and sums."""
  q, fine, unit = query
  tile, k, v = block.tile, block.k, block.v
  size = (tile.sublanes, GROUP)
  digits, codes = [], []
  for g in gs:
    scaled = fine
    if k.of_channels:
      scaled = fine * tile.channels(k.tables.scale, h, g)
    digits.append(tiles.digits(scaled))
    code = block.codes(k, h, g)
    codes.append(jnp.concatenate(code, 0 if tile.stacked else 1))
  for g, dot in zip(gs, tiles.products(digits, codes, 1), strict=True):
    score = tiles.join(dot, tile, GROUP)
    if k.of_channels:
      bias = q * tile.channels(k.tables.bias, h, g)
      score = score * unit + jnp.sum(bias, 1, keepdims=True)
    else:
      score = score * (unit * tile.tokens(k.tables.scale, h, g))
      bias = tile.tokens(k.tables.bias, h, g)
      score += jnp.sum(q, 1, keepdims=True) * bias
    score = block.mask(block.cap(score), g)
    top = jnp.max(score, 1, keepdims=True)
    weight = jnp.exp2(score - top)
    n = g // tile.pack
    if v.of_channels:
      scratch.weights[h, n] = tiles.digits(weight * LIMIT)
    else:
      fine_weight = weight * tile.tokens(v.tables.scale, h, g)
      scratch.weights[h, n] = tiles.digits(fine_weight)
      shift = weight * tile.tokens(v.tables.bias, h, g)
      shift = jnp.sum(shift, 1, keepdims=True)
      scratch.shifts[h, n] = jnp.broadcast_to(shift, size)
    mass = jnp.sum(weight, 1, keepdims=True)
    scratch.tops[h, n] = jnp.broadcast_to(top, size)
    scratch.masses[h, n] = jnp.broadcast_to(mass, size)


def _accumulate(block, h, softmax, scratch, together):
  """Adds one head's tiles to its softmax."""
  tile, v = block.tile, block.v
  starts = range(0, block.groups, tile.pack)
  tops = {g: scratch.tops[h, g // tile.pack] for g in starts}
  before = softmax.top[h]
  top = functools.reduce(jnp.maximum, tops.values(), before)
  rest = jnp.exp2(before - top)
  mass, out = softmax.mass[h] * rest, softmax.out[h] * tile.spread(rest)
  for start in range(0, block.groups, together):
    gs = range(start, min(start + together, block.groups), tile.pack)
    weights = [scratch.weights[h, g // tile.pack] for g in gs]
    codes = [jnp.concatenate(block.codes(v, h, g), 0) for g in gs]
    for g, dot in zip(gs, tiles.products(weights, codes, 0), strict=True):
      n = g // tile.pack
      tile_mass = scratch.masses[h, n]
      value = tiles.join(dot, tile, tile.head_dim)
      if v.of_channels:
        value = value * tile.channels(v.tables.scale, h, g)
        value += tile.spread(tile_mass) * tile.channels(v.tables.bias, h, g)
      else:
        value = value * tile.spread(tile.tokens(scratch.v_unit, h, g))
        value += tile.spread(scratch.shifts[h, n])
      share = jnp.exp2(tops[g] - top)
      mass += tile_mass * share
      out += value * tile.spread(share)
  softmax.top[h], softmax.mass[h], softmax.out[h] = top, mass, out
