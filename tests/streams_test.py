# SPDX-License-Identifier: Apache-2.0
"""Tests the manifest against a closed formula, and progress in any order.

They know no arrays and no scheduler.
"""

import collections
import contextlib
import dataclasses
import math
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from lynx_jax import config
from lynx_jax.transport import streams
from lynx_jax.transport.progress import Progress

SMOLLM2 = config.ModelConfig(
  name='smollm2-135m',
  layers=30,
  heads=9,
  kv_heads=3,
  head_dim=64,
  model_dim=576,
  ff_dim=1536,
  vocab=49152,
  context_tokens=8192,
)
PLANES = ((), (4,), (8,), (4, 4), (2, 1, 1, 4), (1,))


def model_of(layers=4, kv_heads=2, head_dim=16) -> config.ModelConfig:
  return config.ModelConfig(
    name='tiny',
    layers=layers,
    heads=2 * kv_heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    model_dim=32,
    ff_dim=64,
    vocab=64,
    context_tokens=8192,
  )


def tensor_pairs():
  """Planes and axis of K and V; None is a dense prefix."""
  tensor = st.tuples(
    st.sampled_from(PLANES[1:]), st.sampled_from(tuple(config.Axis))
  )
  return st.none() | st.tuples(tensor, tensor)


# Values only: `wire_of` builds from them inside the test, since the checker of
# annotations draws random numbers, which a strategy must not.
recipes = st.fixed_dictionaries(
  {
    'layers': st.integers(1, 5),
    'layer_groups': st.integers(1, 5),
    'kv_heads': st.integers(1, 3),
    'group': st.sampled_from(config.GROUPS),
    'groups_a_chunk': st.integers(1, 3),
    'chunk_bytes': st.sampled_from((1, 5_000, 40_000, 10**9)),
    'order': st.sampled_from(tuple(config.Order)),
    'sinks': st.integers(0, 5),
    'recent_tokens': st.sampled_from((0, 1, 16, 64, 100)),
    'pairs': st.lists(tensor_pairs(), min_size=6, max_size=6),
    'overridden': st.lists(st.booleans(), min_size=5, max_size=5),
    'window': st.sampled_from((None, 1, 2, 100, 129, 300)),
  }
)


def wire_of(recipe) -> streams.WireFormat:
  def pair(values):
    if values is None:
      return (config.TensorCodec(planes=()),) * 2
    return tuple(config.TensorCodec(planes=p, axis=a) for p, a in values)

  r = recipe
  model = model_of(r['layers'], r['kv_heads'])
  if r['window']:
    local = config.LocalLayers(
      window=r['window'], layers=tuple(range(0, r['layers'], 2))
    )
    model = dataclasses.replace(model, local=local)
  engine = config.EngineConfig(
    prompt_tokens=2048,
    token_chunk=r['group'] * r['groups_a_chunk'],
    layer_groups=min(r['layers'], r['layer_groups']),
    chunk_bytes=r['chunk_bytes'],
    order=r['order'],
  )
  first, *others = (pair(values) for values in r['pairs'])
  ranges = config.layer_ranges(model, engine)
  overrides = tuple(
    config.LayerCodec(start=start, stop=stop, k=k, v=v)
    for (start, stop), (k, v), wanted in zip(
      ranges, others, r['overridden'], strict=False
    )
    if wanted
  )
  codec = config.CodecConfig(
    k=first[0],
    v=first[1],
    group=r['group'],
    sinks=r['sinks'],
    recent_tokens=r['recent_tokens'],
    layers=overrides,
  )
  return streams.WireFormat(model, codec, engine)


lengths = st.one_of(
  st.integers(1, 700), st.sampled_from((32, 127, 128, 192, 256, 384, 448))
)


def whole(wire, prompt_tokens, request=0, generation=0):
  return [
    chunk
    for token_chunk in range(wire.token_chunks(prompt_tokens))
    for chunk in wire.manifest(request, prompt_tokens, token_chunk, generation)
  ]


def travels(wire, layer, prompt_tokens, last):
  """Whether a token is seen by the first row of decode, which sees the most."""
  window = wire.model.window(layer)
  return window is None or last > prompt_tokens - window


def expected_units(wire, prompt_tokens):
  """Lists what a request consists of, segment by segment."""
  end = wire.codec.prefix_end(prompt_tokens)
  ranges = config.layer_ranges(wire.model, wire.engine)
  units = []
  for layer_group, (start, stop) in enumerate(ranges):
    k, v = wire.codec.of_layer(start)
    for layer in range(stop - start):
      sinks, group = wire.codec.sinks, wire.codec.group
      if (
        end and sinks and travels(wire, start + layer, prompt_tokens, sinks - 1)
      ):
        units.append((streams.Segment.SINKS, 0, layer_group, layer, 0))
      for index in range(end // group):
        last = (index + 1) * group - 1
        if not travels(wire, start + layer, prompt_tokens, last):
          continue
        for plane in range(max(1, len(k.planes), len(v.planes))):
          units.append(
            (streams.Segment.PREFIX, plane, layer_group, layer, index)
          )
      for index in range(math.ceil((prompt_tokens - end) / 16)):
        units.append((streams.Segment.TAIL, 0, layer_group, layer, index))
  return units


def expected_bytes(wire, prompt_tokens):
  """The closed formula of the issue, tensor by tensor."""
  m, c = wire.model, wire.codec
  end = c.prefix_end(prompt_tokens)
  anchor = residual = 0
  for layer in range(m.layers):
    ends = range(c.group - 1, end, c.group)
    groups = sum(travels(wire, layer, prompt_tokens, last) for last in ends)
    has_sinks = end and travels(wire, layer, prompt_tokens, c.sinks - 1)
    sent = groups * c.group
    for tensor in c.of_layer(layer):
      row = m.kv_heads * m.head_dim * 2
      anchor += (c.sinks if has_sinks else 0) * row
      anchor += math.ceil((prompt_tokens - end) / 16) * 16 * row
      if not tensor.planes:
        anchor += sent * row
        continue
      widths = [w * m.kv_heads * m.head_dim * sent // 8 for w in tensor.planes]
      channel = tensor.axis is config.Axis.CHANNEL
      along = m.head_dim if channel else c.group
      anchor += widths[0] + groups * 2 * 2 * m.kv_heads * along
      residual += sum(widths[1:])
  return anchor, residual


@hypothesis.given(recipes, lengths)
@hypothesis.settings(max_examples=120, deadline=None)
def test_manifest_holds_every_unit_once_within_its_limits(
  recipe, prompt_tokens
):
  wire = wire_of(recipe)
  chunks = whole(wire, prompt_tokens)
  units = [unit for chunk in chunks for unit in chunk.units()]
  assert sorted(map(str, units)) == sorted(
    str(streams.Unit(*u)) for u in expected_units(wire, prompt_tokens)
  )
  counts = wire.slice_counts()
  tail = wire.token_chunks(prompt_tokens) - 1
  for chunk in chunks:
    inside = list(chunk.units())
    sizes = collections.Counter()
    for unit in inside:
      sizes[unit.stream] += wire.unit_bytes(*unit[:3])
      is_tail = unit.segment is streams.Segment.TAIL
      assert is_tail == (chunk.token_chunk == tail)
      if unit.segment is streams.Segment.PREFIX:
        assert (
          unit.index * wire.codec.group // wire.engine.token_chunk
          == chunk.token_chunk
        )
    assert chunk.anchor_bytes == sizes[streams.Stream.ANCHOR]
    assert chunk.residual_bytes == sizes[streams.Stream.RESIDUAL]
    assert chunk.bytes <= wire.engine.chunk_bytes or len(inside) == 1
    assert chunk.layer_group == min(u.layer_group for u in inside)
    if wire.engine.order is config.Order.ANCHOR_FIRST:
      assert {u.stream for u in inside} == {chunk.stream}
    elif wire.engine.order is config.Order.INTERLEAVED:
      assert chunk.stream is streams.Stream.ANCHOR
    else:
      assert chunk.stream is streams.Stream.RESIDUAL
    for part in chunk.slices:
      kind = part.segment, part.plane, part.layer_group
      assert len(part.layers) in counts[kind]
  totals = wire.stream_bytes(prompt_tokens)
  assert totals == expected_bytes(wire, prompt_tokens)
  assert totals.anchor == sum(c.anchor_bytes for c in chunks)
  assert totals.residual == sum(c.residual_bytes for c in chunks)
  assert len({c.key for c in chunks}) == len(chunks)


@hypothesis.given(recipes, lengths)
@hypothesis.settings(max_examples=40, deadline=None)
def test_chunks_are_filled(recipe, prompt_tokens):
  """The first unit of a chunk did not fit into the one before."""
  wire = wire_of(recipe)
  for token_chunk in range(wire.token_chunks(prompt_tokens)):
    chunks = wire.manifest(0, prompt_tokens, token_chunk)
    for a, b in zip(chunks, chunks[1:], strict=False):
      largest = max(wire.unit_bytes(*u[:3]) for u in b.units())
      if a.stream is b.stream:
        assert a.bytes + largest > wire.engine.chunk_bytes


@pytest.mark.parametrize(('spare', 'most'), [(0, 4), (-1, 3), (1, 4)])
def test_a_chunk_is_filled_to_the_byte(spare, most):
  unit = 16 * 2 * 2 * 16 * 2  # a tail block of K=2, H=16
  wire = streams.WireFormat(
    model_of(),
    config.CodecConfig(),
    config.EngineConfig(layer_groups=2, chunk_bytes=4 * unit + spare),
  )
  chunks = wire.manifest(0, 96, 1)  # 6 blocks in each of 4 layers
  counts = [len(list(c.units())) for c in chunks]
  assert counts == [most] * (24 // most)
  assert [c.bytes for c in chunks] == [most * unit] * len(chunks)


def test_interleaved_sends_the_planes_of_a_unit_side_by_side():
  engine = config.EngineConfig(
    order=config.Order.INTERLEAVED, chunk_bytes=60_000
  )
  wire = streams.WireFormat(SMOLLM2, config.CodecConfig(), engine)
  chunks = whole(wire, 1984)
  early = chunks[: len(chunks) // 2]
  anchor = sum(c.anchor_bytes for c in early)
  residual = sum(c.residual_bytes for c in early)
  assert residual / anchor == pytest.approx(24576 / 26112, rel=0.1)


def test_bits_a_value_of_the_demo():
  """Bits worked out by hand for 1,984 tokens: 15 groups, 64 dense tokens."""
  wire = streams.WireFormat(
    SMOLLM2, config.CodecConfig(), config.EngineConfig()
  )
  bits = wire.bits_a_value(1984)
  metadata = 2 * 16 / 128
  anchor = (1920 * (4 + metadata) + 4 * 16 + 64 * 16) / 1984
  assert bits.anchor == pytest.approx(anchor)
  assert bits.total == pytest.approx(anchor + 1920 * 4 / 1984)
  assert bits.anchor == pytest.approx(4.66, abs=0.005)
  best, worst = wire.bits_range(1920, 2047)
  assert best.prompt_tokens == 1984
  assert worst.anchor > 5
  assert worst.prompt_tokens in range(1969, 1984)  # padded to 16 rows


def test_slice_counts_are_few():
  wire = streams.WireFormat(
    SMOLLM2, config.CodecConfig(), config.EngineConfig()
  )
  counts = wire.slice_counts()
  assert counts[streams.Segment.PREFIX, 0, 0] == (1, 2, 4, 8)
  assert counts[streams.Segment.SINKS, 0, 4] == (1, 2, 4)
  assert counts[streams.Segment.TAIL, 0, 0] == (1, 2, 4, 8, 16)


@pytest.mark.parametrize(('prompt', 'token_chunk'), [(0, 0), (9, 2), (9, -1)])
def test_manifest_refuses(prompt, token_chunk):
  wire = streams.WireFormat(
    SMOLLM2, config.CodecConfig(), config.EngineConfig()
  )
  with pytest.raises(ValueError, match='must be in'):
    wire.manifest(0, prompt, token_chunk)


@hypothesis.given(recipes, lengths, st.integers(0, 10**6))
@hypothesis.settings(max_examples=80, deadline=None)
def test_progress_in_any_order(recipe, prompt_tokens, seed):
  wire = wire_of(recipe)
  chunks = whole(wire, prompt_tokens)
  random.Random(seed).shuffle(chunks)
  progress = Progress(wire, 0, prompt_tokens)
  left = set(expected_units(wire, prompt_tokens))
  end = wire.codec.prefix_end(prompt_tokens)
  for number in range(len(chunks) + 1):
    assert progress.complete == (not left)
    assert progress.anchor_complete == all(u[1] for u in left)
    assert progress.layer_groups == min(
      (u[2] for u in left), default=len(wire.layer_counts)
    )
    for layer_group, tokens in enumerate(progress.residual_tokens):
      missing = [u[4] for u in left if u[1] and u[2] == layer_group]
      assert tokens == min(missing, default=end // wire.codec.group) * (
        wire.codec.group
      )
    if number == len(chunks):
      break
    progress.land(chunks[number])
    left -= {tuple(u) for u in chunks[number].units()}


EXACT = streams.WireFormat(
  model_of(layers=3),
  config.CodecConfig(exact=True),
  config.EngineConfig(layer_groups=2, chunk_bytes=5_000),
)


@hypothesis.given(lengths, st.integers(0, 10**6))
@hypothesis.settings(max_examples=30, deadline=None)
def test_progress_of_an_exact_target_in_any_order(prompt_tokens, seed):
  """The lengths of strings are known from their chunks alone."""
  rng = random.Random(seed)
  chunks = whole(EXACT, prompt_tokens)
  strings = {
    (layer_group, token_chunk): rng.randint(1, EXACT.most_pages(layer_group))
    for layer_group, token_chunk in EXACT.strings(prompt_tokens)
  }
  for string, pages in strings.items():
    manifest = EXACT.exact_manifest(0, *string, pages)
    assert [u.index for c in manifest for u in c.units()] == [*range(pages)]
    assert all(c.bytes <= 5_000 and c.exact_bytes == c.bytes for c in manifest)
    chunks += manifest
  assert len({c.key for c in chunks}) == len(chunks)
  rng.shuffle(chunks)
  target = config.Target.EXACT
  progress = Progress(EXACT, 0, prompt_tokens, target=target)
  anchor, _, exact = streams.Stream
  while True:
    left = [(c, u) for c in chunks for u in c.units()]
    assert progress.complete == (not left)
    assert progress.layer_groups == min(
      (u.layer_group for _, u in left), default=2
    )
    for string in strings:
      needed = [
        unit
        for chunk, unit in left
        if unit.stream is anchor
        or (
          unit.layer_group == string[0]
          and (
            chunk.token_chunk == string[1]
            if unit.stream is exact
            else unit.index // 2 <= string[1]
          )
        )
      ]
      assert progress.mergeable(*string) == (not needed)
    if not chunks:
      break
    progress.land(chunks.pop())
  assert progress.exact_bytes_left == 0


def test_progress_refuses_pages_that_it_does_not_miss():
  (chunk, *_) = EXACT.exact_manifest(0, 0, 0, 7)
  other = EXACT.exact_manifest(0, 0, 0, 9)
  with pytest.raises(streams.UnexpectedChunk, match='no string'):
    Progress(EXACT, 0, 300).land(chunk)  # of another target
  exact = Progress(EXACT, 0, 300, target=config.Target.EXACT)
  exact.land(chunk)
  with pytest.raises(streams.UnexpectedChunk, match='the string has 7'):
    exact.land(other[-1])
  for again in range(3):
    key = chunk.key._replace(sequence=again)
    error = (
      pytest.raises(streams.UnexpectedChunk, match='not missing')
      if again == 2
      else contextlib.nullcontext()
    )
    with error:
      exact.land(dataclasses.replace(chunk, key=key))
  with pytest.raises(ValueError, match=r'pages=0 must be in 1\.\.'):
    EXACT.exact_manifest(0, 0, 0, 0)


def test_progress_refuses_what_is_not_its_own():
  wire = streams.WireFormat(
    SMOLLM2, config.CodecConfig(), config.EngineConfig()
  )
  progress = Progress(wire, 7, 300, generation=2)
  mine = whole(wire, 300, 7, 2)
  with pytest.raises(streams.StaleChunk, match='generation=2'):
    progress.land(whole(wire, 300, 7, 1)[0])
  with pytest.raises(streams.StaleChunk, match='request=7'):
    progress.land(whole(wire, 300, 8, 2)[0])
  for chunk in mine:
    progress.land(chunk)
    with pytest.raises(streams.DuplicateChunk):
      progress.land(chunk)
  assert progress.complete
  residual = next(c for c in mine if c.residual_bytes)
  for chunk in (mine[0], residual):
    again = chunk.key._replace(sequence=999)
    with pytest.raises(streams.UnexpectedChunk):
      progress.land(dataclasses.replace(chunk, key=again))
  longer = whole(wire, 2000, 7, 2)
  with pytest.raises(streams.UnexpectedChunk):
    Progress(wire, 7, 300, generation=2).land(
      next(c for c in longer if c.residual_bytes and c.token_chunk == 5)
    )
  assert progress.complete
