# SPDX-License-Identifier: Apache-2.0
"""Token ids against llama.cpp and transformers, and text that streams."""

import functools
import json
import pathlib
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lynx_jax.models import errors, gguf_file, weights
from lynx_jax.models.tokenizer import TextStream, Tokenizer

GOLDENS = pathlib.Path(__file__).parent / 'goldens'
TOKENS = json.loads((GOLDENS / 'tokens.json').read_text('utf-8'))
TEXTS = TOKENS['texts']

pytestmark = pytest.mark.xdist_group('packaged_model')


@functools.cache
def packaged() -> gguf_file.GgufFile:
  return gguf_file.read(weights.find_packaged_gguf())


@functools.cache
def real(pre: str = 'smollm') -> Tokenizer:
  return make(pre=pre)


def make(**changes) -> Tokenizer:
  """The packaged tokenizer with some metadata changed; None removes it."""
  changed = {f'tokenizer.ggml.{key}': x for key, x in changes.items()}
  metadata = packaged().metadata | changed
  return Tokenizer.from_gguf_metadata(
    {key: x for key, x in metadata.items() if x is not None},
    source='model.gguf',
  )


@functools.cache
def tiny() -> Tokenizer:
  return Tokenizer.from_directory(GOLDENS / 'tiny_llama')


@pytest.mark.parametrize('pre', sorted(TOKENS['plain']))
def test_ids_are_those_of_llama_cpp(pre):
  tokenizer = real(pre)
  for text, ids in zip(TEXTS, TOKENS['plain'][pre], strict=True):
    assert tokenizer.encode(text) == ids, text


def test_goldens_tell_the_pretokenizers_apart():
  plain = TOKENS['plain']
  # This vocabulary has no run of digits, in which alone these two differ.
  assert plain['llama-bpe'] == plain['qwen2']
  assert len({json.dumps(ids) for ids in plain.values()}) == 3


@pytest.mark.parametrize(
  ('pre', 'pieces'),
  [
    ('gpt-2', ['1234567']),
    ('smollm', list('1234567')),
    ('llama-bpe', ['123', '456', '7']),
    ('qwen2', list('1234567')),
  ],
)
def test_runs_of_digits_are_cut_as_the_pretokenizer_says(pre, pieces):
  cut = real(pre)._plain.pre_tokenizer.pre_tokenize_str('1234567')
  assert [piece for piece, _ in cut] == pieces


def test_control_tokens_are_read_in_markup_alone():
  for text, ids in zip(TEXTS, TOKENS['markup'], strict=True):
    assert real().encode_markup(text) == ids, text
  assert real().encode_markup('<|im_end|>') == [2]
  assert 2 not in real().encode('<|im_end|>')


@pytest.mark.parametrize('text', TEXTS)
def test_decoding_gives_the_text_back(text):
  assert real().decode(real().encode(text)) == text


@pytest.mark.parametrize('chat', TOKENS['chats'])
def test_chats_are_rendered_like_transformers(chat):
  assert real().render_chat(chat['messages']) == chat['text']
  assert real().encode_chat(chat['messages']) == chat['tokens']


def test_every_end_token_of_the_packaged_model():
  assert real().ends == {0, 2}  # <|endoftext|>, <|im_end|>
  assert real().bos is None
  assert real().vocab == 49_152
  assert make(eot_token_id=5).ends == {0, 2, 5}


def test_bos_is_added_once_and_only_where_wanted():
  tokenizer = make(add_bos_token=True)
  assert tokenizer.encode('a') == [1, *real().encode('a')]
  assert tokenizer.encode('') == [1]
  assert tokenizer.encode_markup('<|im_start|>a') == tokenizer.encode('a')
  assert make(add_bos_token=None).bos is None
  assert make(add_bos_token=None, pre='llama-bpe').bos == 1


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'pre': 'deepseek-v9'}, "pre is 'deepseek-v9', must be in"),
    ({'pre': None}, 'pre is None'),
    ({'model': 'llama'}, "model is 'llama', must be"),
    ({'merges': None}, 'merges is missing'),
    ({'tokens': ['a']}, '1 tokens, but 49152 types'),
    ({'eos_token_id': 49_152}, 'eos_token has id 49152'),
    ({'merges': ['no-such pair']}, 'the tokenizer is damaged'),
    ({'pre': ['smollm']}, r"pre is \['smollm'\], must be in"),
    ({'model': ['gpt2']}, r"model is \['gpt2'\], must be"),
    ({'eos_token_id': '1'}, "eos_token has id '1'"),
    ({'eos_token_id': 1.5}, 'eos_token has id 1.5'),
    ({'eos_token_id': True}, 'eos_token has id True'),
    ({'bos_token_id': [1]}, r'bos_token has id \[1\]'),
    ({'bos_token_id': -1}, 'bos_token has id -1'),
    ({'tokens': 'ab'}, "tokens='ab' must be a list of texts"),
    ({'tokens': [1] * 49_152}, 'tokens has 1, must be texts alone'),
    ({'token_type': ['x'] * 49_152}, "has 'x', must be integers alone"),
    ({'merges': [1.5]}, 'merges has 1.5, must be texts alone'),
    ({'add_bos_token': 'yes'}, "add_bos_token='yes' must be true or false"),
  ],
)
def test_unknown_tokenizers_are_refused(changes, message):
  with pytest.raises(errors.WeightsError, match=message):
    make(**changes)


@pytest.mark.parametrize('template', [5, ['a'], True])
def test_a_template_of_a_gguf_is_a_text(template):
  metadata = packaged().metadata | {'tokenizer.chat_template': template}
  with pytest.raises(errors.WeightsError, match=r'chat_template=.* a text'):
    Tokenizer.from_gguf_metadata(metadata, source='model.gguf')


def test_ids_that_pad_the_table_of_a_model_have_no_text():
  ids = real().encode('an island')
  assert real().decode([49_152, *ids, 1 << 20]) == real().decode(ids)
  with pytest.raises(ValueError, match='token id -1 must not be negative'):
    real().decode([-1])


def test_a_lone_surrogate_is_refused():
  with pytest.raises(UnicodeEncodeError):
    real().encode('a\ud800')


def test_a_template_that_refuses_says_why():
  tokenizer = make()
  object.__setattr__(
    tokenizer, 'chat_template', "{{ raise_exception('no system role') }}"
  )
  with pytest.raises(errors.WeightsError, match='no system role'):
    tokenizer.render_chat([])
  object.__setattr__(
    tokenizer, 'chat_template', '{{ messages.__class__.__mro__ }}'
  )
  with pytest.raises(errors.WeightsError, match='SecurityError'):
    tokenizer.render_chat([])
  for template, message in (
    ('{{ 1 / 0 }}', 'ZeroDivisionError: division by zero'),
    ('{{ "x" + 3 }}', 'TypeError: can only'),
    ('{% for %}', 'TemplateSyntaxError'),
    ('{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}', 'RecursionError'),
    ('{{ 10 ** 400 * 0.1 }}', 'OverflowError'),
  ):
    object.__setattr__(tokenizer, 'chat_template', template)
    with pytest.raises(errors.WeightsError, match=message):
      tokenizer.render_chat([])
  object.__setattr__(tokenizer, 'chat_template', None)
  with pytest.raises(errors.WeightsError, match='has none'):
    tokenizer.render_chat([])


def test_a_directory_gives_the_ids_of_transformers():
  golden = json.loads((GOLDENS / 'tiny_tokens.json').read_text('utf-8'))
  ours = [tiny().encode(text) for text in TEXTS]
  specials = [i for i, text in enumerate(TEXTS) if '<|' in text]
  assert [x for i, x in enumerate(ours) if i not in specials] == [
    x for i, x in enumerate(golden) if i not in specials
  ]
  assert tiny().bos == 0
  assert tiny().ends == {1, 2}  # of config.json; </s> is 1


def test_a_template_that_writes_bos_does_not_double_it():
  chat = [{'role': 'user', 'content': 'hi'}]
  assert tiny().render_chat(chat) == '<s>hi</s>'
  ids = tiny().encode_chat(chat)
  assert ids == [*tiny().encode('hi'), 1]
  assert ids.count(0) == 1


def test_a_saved_tokenizer_is_the_same(tmp_path):
  """Of a GGUF, which has no tokenizer.json."""
  real().save(tmp_path)
  saved = Tokenizer.from_directory(tmp_path)
  for field in ('vocab', 'bos', 'ends', 'chat_template', 'special_text'):
    assert getattr(saved, field) == getattr(real(), field), field
  for text, ids in zip(TEXTS, TOKENS['markup'], strict=True):
    assert saved.encode_markup(text) == ids, text
    assert saved.encode(text) == real().encode(text), text


def test_a_damaged_directory_is_refused(tmp_path):
  path = pathlib.Path(shutil.copytree(GOLDENS / 'tiny_llama', tmp_path / 'm'))
  options = json.loads((path / 'tokenizer_config.json').read_text('utf-8'))
  options['eos_token'] = '<gone>'
  (path / 'tokenizer_config.json').write_text(json.dumps(options), 'utf-8')
  (path / 'generation_config.json').write_text('{"eos_token_id": 999}')
  with pytest.raises(errors.WeightsError) as caught:
    Tokenizer.from_directory(path)
  assert len(caught.value.problems) == 2
  (path / 'tokenizer.json').write_text('{"version": "1.0"')
  with pytest.raises(errors.WeightsError, match='damaged'):
    Tokenizer.from_directory(path)
  (path / 'tokenizer.json').unlink()
  with pytest.raises(errors.WeightsError, match='cannot be read'):
    Tokenizer.from_directory(path)


@pytest.mark.parametrize(
  ('file', 'changes', 'message'),
  [
    *(
      ('tokenizer_config.json', {'bos_token': value}, 'bos_token=.* a text, or')
      for value in (5, True, [], {}, {'content': 5}, '\ud800')
    ),
    *(
      ('generation_config.json', {'eos_token_id': value}, 'end token .* is not')
      for value in ([[1]], {}, {'a': 1}, '1', 1.5, True, [1, 'a'], -1)
    ),
    ('config.json', {'eos_token_id': [{}]}, r'config\.json: end token {} is'),
    (
      'tokenizer_config.json',
      {'add_bos_token': 'no'},
      "add_bos_token='no' must be true or false",
    ),
    *(
      ('tokenizer_config.json', {'chat_template': value}, 'chat_template=.* mu')
      for value in (
        5,
        {},
        [5],
        [{'name': 'default'}],
        [{'name': 'default', 'template': 5}],
        [{'name': ['default'], 'template': 'x'}],
      )
    ),
  ],
)
def test_a_value_of_a_wrong_type_is_named(file, changes, message, tmp_path):
  path = pathlib.Path(shutil.copytree(GOLDENS / 'tiny_llama', tmp_path / 'm'))
  (path / 'chat_template.jinja').unlink()
  values = json.loads((path / file).read_text('utf-8')) | changes
  (path / file).write_text(json.dumps(values), 'utf-8')
  with pytest.raises(errors.WeightsError, match=message) as caught:
    Tokenizer.from_directory(path)
  assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
  ('options', 'template'),
  [
    ({'chat_template': 'a'}, 'a'),
    ({'chat_template': []}, None),
    ({'chat_template': [{'name': 'tool', 'template': 'a'}]}, None),
    (
      {
        'bos_token': {'content': '<s>', 'lstrip': False},
        'add_bos_token': None,
        'chat_template': [
          {'name': 'tool', 'template': 'a'},
          {'name': 'default', 'template': 'b'},
        ],
      },
      'b',
    ),
  ],
)
def test_every_spelling_of_a_directory_is_read(options, template, tmp_path):
  path = pathlib.Path(shutil.copytree(GOLDENS / 'tiny_llama', tmp_path / 'm'))
  (path / 'chat_template.jinja').unlink()
  file = path / 'tokenizer_config.json'
  values = json.loads(file.read_text('utf-8')) | options
  file.write_text(json.dumps(values), 'utf-8')
  read = Tokenizer.from_directory(path)
  assert read.chat_template == template
  assert (read.bos, read.ends) == (tiny().bos, tiny().ends)


@pytest.mark.parametrize('text', TEXTS)
def test_no_half_character_is_ever_shown(text):
  stream, pieces = TextStream(real()), []
  for id_ in real().encode(text):
    pieces.append(stream.push(id_))
    assert '\ufffd' not in pieces[-1]
  assert stream.finish() == ''
  assert ''.join(pieces) == text


def test_text_is_shown_as_soon_as_it_is_whole():
  stream = TextStream(real())
  ids = real().encode('é🎉 end')
  shown = [stream.push(id_) for id_ in ids]
  assert shown[-1] == ' end'
  assert '' in shown, 'no token of this text is half a character'


def test_invalid_bytes_appear_at_the_end_alone():
  half = real().encode('🎉')[:1]
  stream = TextStream(real())
  assert stream.push([*real().encode('a'), *half]) == 'a'
  assert stream.finish() == '\ufffd'
  assert stream.finish() == ''


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 319), max_size=12), st.booleans())
def test_pieces_make_up_the_whole(ids, one_by_one):
  # Of 320 tokens most are single bytes: nearly all sequences are invalid.
  ids = [id_ % tiny().vocab for id_ in ids]
  stream = TextStream(tiny())
  pieces = [stream.push(x) for x in ids] if one_by_one else [stream.push(ids)]
  assert ''.join(pieces) + stream.finish() == tiny().decode(ids)
