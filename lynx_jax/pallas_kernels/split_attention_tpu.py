# SPDX-License-Identifier: Apache-2.0
"""TPU kernel of `split_attention`."""

import dataclasses
import functools
import math

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from lynx_jax.pallas_kernels.dispatch import Unsupported

_LANES = 128
_MASKED = -1e30
_DIGITS = 32512.0
_MAGIC = 1.5 * 2**23 + 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
  tokens: int = 2048
  heads: int = 8
  chunk: int = 16
  delay: int = 1


def split_attention_tpu(q, k, v, *, layer, prefix_tokens, residual_tokens=None,
                        sinks=0, logits_scale=1.0, block_sizes=None,
                        soft_cap=None, interpret=False):
  B, T, N, H = q.shape
  K = k.planes[0].shape[2]
  G = N // K
  S = k.groups * k.group
  Q = k.group
  rows = T * G
  bs = block_sizes or BlockSizes()
  bt, hb = min(bs.tokens, S), min(bs.heads, K)
  stacked = H < _LANES
  pack = 2 if stacked or rows <= 4 else 1
  step = 4 if pack == 2 else 8
  rp = -(-rows // step) * step
  M, W = pack * rp, max(H, _LANES)

  q = q.astype(jnp.float32) * jnp.float32(logits_scale * math.log2(math.e))
  q = q.reshape(B, T, K, G, H).transpose(0, 2, 1, 3, 4).reshape(B, K, rows, H)
  q = jnp.pad(q, ((0, 0), (0, 0), (0, rp - rows), (0, 0)))
  if stacked:
    z = jnp.zeros_like(q)
    q = jnp.concatenate([jnp.concatenate([q, z], -1),
                         jnp.concatenate([z, q], -1)], -2)
  elif pack == 2:
    q = jnp.concatenate([q, q], -2)

  nb = pl.cdiv(S, bt)
  ng = bt // Q

  prefix_tokens = prefix_tokens.astype(jnp.int32)
  last = jnp.maximum(-(-prefix_tokens // bt) - 1, 0)

  def index(b, h, j, layer_ref, prefix_ref, last_ref):
    return (layer_ref[0], b, h, jnp.minimum(j, last_ref[b]), 0)

  def plane_spec(p):
    r = p.shape[3] // k.groups
    return pl.BlockSpec((None, None, hb, ng * r, Q), index)

  def meta_spec(m):
    return pl.BlockSpec((None, None, hb, ng, m.shape[-1]), index)

  kp = [p for p in k.planes if p is not None]
  vp = [p for p in v.planes if p is not None]
  row_spec = lambda r, w: pl.BlockSpec((None, hb, r, w),
                                       lambda b, h, j, *_: (b, h, 0, 0))
  kernel = functools.partial(
    _kernel, nk=len(kp), nv=len(vp), H=H, M=M, W=W, pack=pack, stacked=stacked,
    hb=hb, ng=ng, bt=bt, nb=nb, sinks=sinks, kc=k.codec, vc=v.codec,
    chunk=min(bs.chunk, ng), rp=rp, delay=bs.delay)
  mp = ng // 2 if stacked else ng
  out, lse = pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(B, K // hb, nb),
      in_specs=[row_spec(M, W)] + [plane_spec(p) for p in kp]
      + [meta_spec(k.scale), meta_spec(k.offset)]
      + [plane_spec(p) for p in vp]
      + [meta_spec(v.scale), meta_spec(v.offset)],
      out_specs=[row_spec(rp, H), row_spec(rp, _LANES)],
      scratch_shapes=[pltpu.VMEM((hb, M, W), jnp.float32),
                      pltpu.VMEM((hb, M, _LANES), jnp.float32),
                      pltpu.VMEM((hb, M, _LANES), jnp.float32)]
      + [pltpu.VMEM((hb, ng, H), jnp.float32)] * 4,
    ),
    out_shape=[jax.ShapeDtypeStruct((B, K, rp, H), jnp.float32),
               jax.ShapeDtypeStruct((B, K, rp, _LANES), jnp.float32)],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'arbitrary')),
    interpret=interpret,
    name='split_attention',
  )(jnp.asarray(layer, jnp.int32).reshape(1), prefix_tokens, last,
    q, *kp, k.scale, k.offset, *vp, v.scale, v.offset)
  out = out[:, :, :rows].reshape(B, K, T, G, H).transpose(0, 2, 1, 3, 4)
  lse = lse[:, :, :rows, 0].reshape(B, K, T, G).transpose(0, 2, 1, 3)
  return out.reshape(B, T, N, H), lse.reshape(B, T, N)


def _kernel(layer_ref, prefix_ref, last_ref, q_ref, *refs, nk, nv, H, M, W, pack, stacked,
            hb, ng, bt, nb, sinks, kc, vc, chunk, rp, delay):
  kp, refs = refs[:nk], refs[nk:]
  (ks, ko), refs = refs[:2], refs[2:]
  vp, refs = refs[:nv], refs[nv:]
  (vs, vo), refs = refs[:2], refs[2:]
  out_ref, lse_ref, acc_ref, m_ref, l_ref, kss, kbs, vss, vbs = refs
  b, j = pl.program_id(0), pl.program_id(2)
  tokens = prefix_ref[b]

  @pl.when(j == 0)
  def _():
    acc_ref[...] = jnp.zeros_like(acc_ref)
    l_ref[...] = jnp.zeros_like(l_ref)
    m_ref[...] = jnp.full_like(m_ref, _MASKED)

  @pl.when(j * bt < tokens)
  def _():
    held = lax.shift_right_logical(tokens - j * bt, jnp.int32(7))  # groups
    valid = lax.broadcasted_iota(jnp.int32, (ng, H), 0) < held
    row_group = lax.div(lax.broadcasted_iota(jnp.int32, (M, 1), 0), jnp.int32(rp))
    lane = lax.broadcasted_iota(jnp.int32, (M, _LANES), 1)
    first = lax.broadcasted_iota(jnp.int32, (M, _LANES), 0) < rp
    n_sinks = jnp.where(j == 0, sinks, 0)
    kmid = 2.0**(kc.bits - 1) + (2.0**(kc.bits - sum(kc.planes[:nk])) - 1) / 2
    vmid = 2.0**(vc.bits - 1) + (2.0**(vc.bits - sum(vc.planes[:nv])) - 1) / 2
    unit_k = 2.0**(kc.bits - 8)
    unit_v = 2.0**(vc.bits - 8)

    def rows_of(ref, h, g):
      def row(i, n):
        return jnp.broadcast_to(ref[h, pl.ds(g + i, 1), :], (n, H))
      if stacked:
        return jnp.concatenate([row(0, M), row(1, M)], -1)
      if pack == 1:
        return row(0, M)
      f = first if H == _LANES else jnp.concatenate([first] * (H // _LANES), 1)
      return jnp.where(f, row(0, M), row(1, M))

    def select(x, n):  # [M, pack*n] -> [M, n]
      if stacked or pack == 1:
        return x
      f = first if n == _LANES else jnp.concatenate([first] * (n // _LANES), 1)
      return jnp.where(f, x[:, :n], x[:, n:])

    def combine(d, n):
      return ((select(d[:M], n) << 8) + select(d[M:], n)).astype(jnp.float32)

    def prepare(h):
      s = jnp.where(valid, ks[h].astype(jnp.float32), 0.0)
      o = jnp.where(valid, ko[h].astype(jnp.float32), 0.0)
      kss[h] = s
      kbs[h] = o + s * kmid
      smax = jnp.max(s, axis=0, keepdims=True)
      s = jnp.where(valid, vs[h].astype(jnp.float32), 0.0)
      o = jnp.where(valid, vo[h].astype(jnp.float32), 0.0)
      vss[h] = s * (unit_v / _DIGITS)
      vbs[h] = o + s * vmid
      if stacked:
        smax = jnp.concatenate([smax, smax], -1)
      q = q_ref[h]
      qmax = jnp.max(jnp.abs(q) * smax, axis=1, keepdims=True)
      qmax = jnp.maximum(qmax, 1e-30)
      return q, q * (_DIGITS / qmax), qmax * (unit_k / _DIGITS)

    def score(h, c, q, qn, qs):
      dots, out = [], []
      for g in range(c, c + chunk, pack):
        qd = _digits(qn * rows_of(kss, h, g))
        kcode = _codes(kp, h, g, pack, H, kc.planes)
        kcode = jnp.concatenate(kcode, 0 if stacked else 1)
        dots.append(jnp.dot(qd, kcode, preferred_element_type=jnp.int32))
      for g, d in zip(range(c, c + chunk, pack), dots):
        bias = jnp.sum(q * rows_of(kbs, h, g), 1, keepdims=True)
        bias = jnp.where(row_group + g < held, bias, _MASKED)
        x = combine(d, _LANES) * qs + bias
        if g == 0 and sinks:
          sink = lane < n_sinks
          if pack == 2:
            sink &= first
          x = jnp.where(sink, _MASKED, x)
        top = jnp.max(x, 1, keepdims=True)
        p = jnp.exp2(x - top)
        mass = jnp.sum(p, 1, keepdims=True)
        out.append((top, mass, _digits(p * _DIGITS)))
      return out

    def gather(h, c, scored):
      dots = []
      for g, (_, _, pd) in zip(range(c, c + chunk, pack), scored):
        vcode = jnp.concatenate(_codes(vp, h, g, pack, H, vc.planes), 0)
        dots.append(lax.dot_general(pd, vcode, (((1,), (1,)), ((), ())),
                                    preferred_element_type=jnp.int32))
      m_old, l, acc = state[h]
      m = functools.reduce(jnp.maximum, [t for t, _, _ in scored])
      m = jnp.maximum(m, m_old)
      alpha = jnp.exp2(m_old - m)
      l, acc = l * alpha, acc * wide(alpha)
      for g, d, (top, mass, _) in zip(range(c, c + chunk, pack), dots, scored):
        y = combine(d, H) * rows_of(vss, h, g) + mass * rows_of(vbs, h, g)
        w = jnp.exp2(top - m)
        l += mass * w
        acc += y * wide(w)
      state[h] = m, l, acc

    def wide(x):
      return x if W == _LANES else jnp.concatenate([x] * (W // _LANES), 1)

    prepared = [prepare(h) for h in range(hb)]
    work = [(h, c) for h in range(hb) for c in range(0, ng, chunk)]
    state = [(m_ref[h], l_ref[h], acc_ref[h]) for h in range(hb)]
    pending = []
    for h, c in work:
      pending.append((h, c, score(h, c, *prepared[h])))
      if len(pending) > delay:
        gather(*pending.pop(0))
    for p in pending:
      gather(*p)
    for h in range(hb):
      m_ref[h], l_ref[h], acc_ref[h] = state[h]

  @pl.when(j == nb - 1)
  def _():
    for h in range(hb):
      m, l, acc = m_ref[h], l_ref[h], acc_ref[h]
      if pack == 2:
        top = jnp.maximum(m[:rp], m[rp:])
        a, c = jnp.exp2(m[:rp] - top), jnp.exp2(m[rp:] - top)
        l = l[:rp] * a + l[rp:] * c
        ae = acc[:rp, :H]
        ao = acc[rp:, H:] if stacked else acc[rp:]
        acc = ae * a[:, :1] + ao * c[:, :1]
        m = top
      some = m > _MASKED / 2
      inv = jnp.where(some, 1.0 / l, 0.0)
      out_ref[h] = acc * inv[:, :1]
      lse = (m + jnp.log2(l)) * math.log(2)
      lse_ref[h] = jnp.where(some, lse, -jnp.inf)


def _digits(t):
  b = lax.bitcast_convert_type(t + _MAGIC, jnp.int32)
  return jnp.concatenate([b >> 8, b ^ 128], 0).astype(jnp.int8)


def _codes(planes, h, g, pack, H, widths):
  out = []
  for i in range(pack):
    word, used = None, 0
    for n, (ref, w) in enumerate(zip(planes, widths)):
      R = H * w // 8
      x = pltpu.bitcast(ref[h, pl.ds((g + i) * R, R), :], jnp.int32)
      used += w
      if n > 0:
        flip = sum(1 << (s + w - 1) for s in range(0, 32, w))
        x = x ^ jnp.int32(flip - (1 << 32) if flip >> 31 else flip)
      fields = []
      mask = ((1 << w) - 1) << (8 - used)
      mask = sum(mask << s for s in range(0, 32, 8))
      mask = jnp.int32(mask - (1 << 32) if mask >> 31 else mask)
      for low in range(0, 8, w):
        up = 8 - used - low
        y = x << up if up > 0 else lax.shift_right_logical(x, jnp.int32(-up)) if up < 0 else x
        fields.append(y if w == 8 else y & mask)
      field = jnp.concatenate(fields, 0) if len(fields) > 1 else fields[0]
      word = field if word is None else word | field
    out.append(pltpu.bitcast(word, jnp.int8))
  return out
