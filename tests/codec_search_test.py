# SPDX-License-Identifier: Apache-2.0
"""The codec search measures what the engine does, without one."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import cli, config, forcing, main, results
from lynx_jax.config import (
  CodecConfig,
  ConfigError,
  EngineConfig,
  Rotation,
  TensorCodec,
)
from lynx_jax.models import presets, transformer
from lynx_jax.prefill import Prefill

pytestmark = pytest.mark.usefixtures('unoptimised')
NAME = 'k=2,2,4 v=2,2,4'
MODEL = presets.tiny(layers=2, head_dim=16, vocab=64, tied_embeddings=False)
TOKENS, DRAFTS = 24, 5
LENGTHS = (150, 97)
ENGINE = EngineConfig(
  prompt_tokens=192,
  output_tokens=TOKENS,
  token_chunk=64,
  layer_groups=2,
  draft_tokens=DRAFTS,
)


def _codec(planes, rotation=Rotation.HADAMARD, **more) -> CodecConfig:
  tensor = TensorCodec(planes=planes, rotation=rotation)
  return CodecConfig(
    k=tensor, v=tensor, group=32, recent_tokens=16, sinks=2, **more
  )


@functools.cache
def _model() -> transformer.Transformer:
  return transformer.Transformer(MODEL, rngs=nnx.Rngs(params=0))


def _prompts() -> list[np.ndarray]:
  draws = np.random.default_rng(0)
  return [draws.integers(0, MODEL.vocab, n, dtype=np.int32) for n in LENGTHS]


@functools.cache
def _oracle() -> tuple[forcing.Texts, forcing.Oracle]:
  prefill = Prefill(_model(), _codec(()), ENGINE)
  states = [list(prefill.chunks(prompt))[-1] for prompt in _prompts()]
  texts = forcing.Texts.gather(MODEL, ('a', 'b'), states)
  oracle = forcing.Oracle(
    _model(), texts, tokens=TOKENS, drafts=DRAFTS, ends=()
  )
  oracle.continue_exactly()
  return texts, oracle


def test_drafts_do_not_change_the_text():
  """Coarse drafts for the exact target give its greedy continuation."""
  texts, oracle = _oracle()
  target, _ = forcing.read_both(texts, _codec(()))
  _, draft = forcing.read_both(texts, _codec((1, 1), Rotation.NONE))
  rounds, tokens = oracle.accept(target, draft)
  assert tokens == oracle.forced.tolist()
  assert any(accepted < DRAFTS for _, accepted in rounds[0])  # drafts differ
  for slot in rounds:
    assert sum(n + 1 for _, n in slot[:-1]) < TOKENS - 1
    assert sum(n + 1 for _, n in slot) >= TOKENS - 1


def test_nothing_follows_an_end_token():
  texts, oracle = _oracle()
  end = oracle.forced[0, TOKENS // 2]
  ended = forcing.Oracle(
    _model(), texts, tokens=TOKENS, drafts=DRAFTS, ends=(int(end),)
  )
  both = forcing.read_both(texts, _codec(()))
  _, tokens = ended.accept(*both)
  for found, row in zip(tokens, oracle.forced.tolist(), strict=True):
    cut = row.index(end) + 1 if end in row else TOKENS
    assert found == row[:cut]


def test_logits_are_those_of_plain_causal_attention():
  """But for the rounding of keys and values to bfloat16."""
  texts, oracle = _oracle()
  target, _ = forcing.read_both(texts, _codec(()))
  model, tokens = _model(), oracle.forced[:, :DRAFTS]
  tail = tuple(
    tuple(jnp.zeros((2, MODEL.kv_heads, DRAFTS, MODEL.head_dim)) for _ in 'kv')
    for _ in range(MODEL.layers)
  )
  first = jnp.zeros(2, jnp.int32)
  logits, _ = nnx.jit(forcing.forward)(
    model, target, tail, tokens, texts.lengths, first
  )
  for slot, prompt in enumerate(_prompts()):
    text = np.concatenate([prompt, tokens[slot]])
    wanted = transformer.causal_forward(model, jnp.asarray(text[None]))
    wanted = wanted[0, len(prompt) :]
    np.testing.assert_allclose(logits[slot], wanted, atol=0.05)
    assert float(jnp.std(wanted)) > 0.5


def test_a_draft_that_reads_the_target_is_always_accepted():
  texts, oracle = _oracle()
  both = forcing.read_both(texts, _codec((4,)))
  kl, agreement = oracle.compare(*both)
  np.testing.assert_allclose(kl, 0.0, atol=1e-6)
  assert agreement == [1.0, 1.0]
  rounds, _ = oracle.accept(*both)
  assert {accepted for slot in rounds for _, accepted in slot} == {DRAFTS}


def test_more_bits_are_nearer_to_the_target():
  texts, oracle = _oracle()
  found = [
    np.mean(oracle.compare(*forcing.read_both(texts, _codec(planes)))[0])
    for planes in ((1, 1, 2, 4), (2, 2, 4), (4, 4))
  ]
  assert found[0] > 4 * found[1] > 16 * found[2] > 0


def test_a_dense_codec_reads_back_what_prefill_computed():
  texts, _ = _oracle()
  target, draft = forcing.read_both(texts, _codec(()))
  for exact, layer in zip(
    zip(texts.k, texts.v, strict=True), target, strict=True
  ):
    for x, read in zip(exact, layer, strict=True):
      np.testing.assert_array_equal(
        np.swapaxes(np.asarray(x, np.float32), 1, 2), read
      )
  jax.tree.map(np.testing.assert_array_equal, target, draft)


def test_only_whole_groups_between_sinks_and_recent_tokens_are_packed():
  texts, _ = _oracle()
  codec = _codec((1, 1))
  target, _ = forcing.read_both(texts, codec)
  exact, _ = forcing.read_both(texts, _codec(()))
  differ = (np.asarray(target[0][0]) != np.asarray(exact[0][0])).any(
    axis=(1, 3)
  )
  for slot, length in enumerate(LENGTHS):
    changed = np.flatnonzero(differ[slot])
    assert codec.sinks <= changed.min()
    assert changed.max() < codec.prefix_end(length)
    assert len(changed) > 0.9 * (codec.prefix_end(length) - codec.sinks)


def _settings(*flags) -> config.Settings:
  values, _ = cli.parse(
    ['main', '--config=configs/codec_search.py', '--workdir=w', *flags]
  )
  return config.settings(values)


def test_candidates_are_changes_of_the_codec():
  first, second, third, fourth = _settings(
    '--config.codec.k_rotation=hadamard',
    '--config.search.codecs=sinks=8 v=8; k_rotation=none;'
    "by layer: sinks=0 layers='0:1 k=8; 2:3 v=2,2,4'",
  ).search.candidates
  assert first.codec.k.rotation is Rotation.HADAMARD
  assert second.codec.sinks == 8
  assert second.codec.v.planes == (8,)
  assert second.codec.k == first.codec.k
  assert third.name == 'k_rotation=none'
  assert third.codec == dataclasses.replace(
    first.codec, k=dataclasses.replace(first.codec.k, rotation=Rotation.NONE)
  )
  assert fourth.name == 'by layer'
  assert fourth.codec.sinks == 0
  one, other = fourth.codec.layers
  assert (one.start, one.k.planes, one.v) == (0, (8,), first.codec.v)
  assert (other.start, other.v.planes) == (2, (2, 2, 4))


@pytest.mark.parametrize(
  'entry', ['sinks', 'sinks=many', 'depth=3', 'layers=0:6', 'v_axis=row']
)
def test_an_entry_that_is_no_change_is_refused(entry):
  with pytest.raises(ConfigError, match=entry.partition('=')[0]):
    _settings(f'--config.search.codecs={entry}')


def test_the_study_writes_candidates_and_summaries(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(pathlib.Path(__file__).parents[1])
  plain = 'k_rotation=none v_rotation=none'
  argv = [
    'main',
    '--config=configs/codec_search.py',
    f'--workdir={tmp_path}',
    '--config.prompt_file=book,chat,code',
    '--config.model.path=tiny',
    '--config.prompt_tokens=224',
    '--config.engine.layer_groups=2',
    '--config.acceptance.output_tokens=12',
    f'--config.search.codecs={NAME}; sinks=0; {plain}; {plain} sinks=0',
    '--config.search.most_bits=8.0',
    '--config.search.drafted=1',
    '--config.search.compared_prompts=1',
    '--config.search.slots=2',
  ]
  assert main.main([*argv, '--config.search.at_once=1']) == 0
  assert '2 prompts are left' in capsys.readouterr().out
  assert main.main(argv) == 0
  records = list(results.read(tmp_path / results.FILE))
  one, *others = (r['detail'] for r in records if r.get('name') == 'codec')
  assert [d['prompt_tokens'] for d in (one, *others)] == [192] * 3
  fine, coarse, *more = one['candidates'].values()
  # The first has less KL, but more bits than allowed.
  assert coarse['bits'] < 8.0 < fine['bits']
  assert fine['kl'] < coarse['kl']
  assert ['rounds' in each for each in (fine, coarse)] == [False, True]
  assert len(more) == 3
  # What is not compared, nor drafted with, is left out on the others; of the
  # two that an exact plane allows, the nearer one stays.
  exact = min(
    (plain, f'{plain} sinks=0'), key=lambda n: one['candidates'][n]['kl_exact']
  )
  base = next(iter(one['candidates']))
  assert [[*d['candidates']] for d in others] == [[base, NAME, exact]] * 2
  assert [sorted(layer) for layer in one['layers']] == [['k', 'v']] * 4
  assert min(min(layer.values()) for layer in one['layers']) >= 0
  assert not any('layers' in other for other in others)
  last = {r['name']: r for r in records if r['kind'] == 'summary'}
  all_kl = [d['candidates'][NAME]['kl'] for d in (one, *others)]
  assert last['kl_anchor']['value'] == np.mean(all_kl)
  assert last['kl_anchor']['n'] == last['kl_anchor_exact']['n'] == 3
  assert last['bits_anchor']['value'] == coarse['bits']
  assert 0 <= last['acceptance_gamma8']['value'] <= 1
  assert 'left' not in capsys.readouterr().out
  page = (tmp_path / 'report.html').read_text()
  assert 'What bits buy' in page
  assert 'Which layers need bits' in page
