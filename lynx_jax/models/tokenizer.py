# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, as the model's own files prescribe it.

It knows no weights. Byte-pair encoding itself is the package `tokenizers`;
this module translates the metadata of a GGUF into it, and keeps the rules
about special tokens in one place.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from lynx_jax.models import errors, gguf_file

# Contractions, letters, digits, other signs, spaces before a word: the pattern
# of GPT-2 (https://github.com/openai/gpt-2/blob/master/src/encoder.py).
_GPT2 = (
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
  r'|\s+(?!\S)|\s+'
)
# Of Llama 3 and Qwen2, which differ in how many digits stay together.
_CL100K = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
  r'| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
# `tokenizer.ggml.pre`: the patterns that cut the text, one after the other.
_PRETOKENIZERS = {
  'gpt-2': (_GPT2,),
  'smollm': (r'\p{N}', _GPT2),
  'llama-bpe': (_CL100K.format(digits='{1,3}'),),
  'qwen2': (_CL100K.format(digits=''),),
}
# Where a whole word in the vocabulary wins over its merges, as in Llama 3.
_WHOLE_WORDS = ('llama-bpe',)

# Names of special tokens, and what a GGUF calls them.
_SPECIAL = {
  'bos_token': 'bos',
  'eos_token': 'eos',
  'eot_token': 'eot',
  'eom_token': 'eom',
  'unk_token': 'unknown',
  'pad_token': 'padding',
}
_CONTROL, _USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type`
# Generation ends at each of these where the vocabulary has it as a control
# token: a file names one end token, and chat models may emit another.
_END_NAMES = (
  '<|endoftext|>',
  '<|im_end|>',
  '<|end_of_text|>',
  '<|eot_id|>',
  '<|eom_id|>',
  '</s>',
)
_LISTS: dict[str, tuple[type, str]] = {  # of a GGUF's tokenizer
  'tokens': (str, 'texts'),
  'merges': (str, 'texts'),
  'token_type': (int, 'integers'),
}
_BOOLEAN = 'true or false'
_CONVERT = 'Convert the model again with a current llama.cpp.'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
  """A model's tokenizer; make one with `read`.

  Attributes:
    vocab: number of token ids.
    bos: id put before a text, or None where the model wants none.
    ends: ids at which generation ends.
    chat_template: Jinja source of the model, or None.
    special_text: text of `bos_token`, `eos_token`, … for the template.
  """

  vocab: int
  bos: int | None
  ends: frozenset[int]
  chat_template: str | None
  special_text: Mapping[str, str]
  # Two, because in the package whether control tokens are recognised in text
  # is a mutable property; nothing mutates them after construction.
  _plain: Any = dataclasses.field(repr=False)
  _markup: Any = dataclasses.field(repr=False)

  @classmethod
  def read(cls, path: epath.Path) -> 'Tokenizer':
    """Reads a directory as Hugging Face writes it, or a GGUF file."""
    return cls.from_directory(path) if path.is_dir() else cls.from_gguf(path)

  @classmethod
  def from_gguf(cls, path: str | os.PathLike[str]) -> 'Tokenizer':
    """Builds the tokenizer that a GGUF file describes.

    Raises:
      WeightsError: the file is damaged, or its tokenizer is of a kind or has
        a pre-tokenizer that is not known here.
    """
    file = gguf_file.read(path)
    return cls.from_gguf_metadata(file.metadata, source=file.path)

  @classmethod
  def from_gguf_metadata(
    cls, metadata: Mapping[str, Any], *, source: str | os.PathLike[str]
  ) -> 'Tokenizer':
    """Like `from_gguf`, of metadata already read from `source`."""
    tokens = _check_gguf(metadata, source)
    kinds = metadata['tokenizer.ggml.token_type']
    special: dict[str, Any] = {
      name: metadata.get(f'tokenizer.ggml.{key}_token_id')
      for name, key in _SPECIAL.items()
    }
    problems = [
      f'{name} has id {id_!r:.40}, the vocabulary {len(tokens)} tokens'
      for name, id_ in special.items()
      if id_ is not None and not _is_id(id_, len(tokens))
    ]
    # Absent, the rule depends on the pre-tokenizer.
    add_bos = metadata.get(
      'tokenizer.ggml.add_bos_token',
      metadata['tokenizer.ggml.pre'] == 'llama-bpe',
    )
    template = metadata.get('tokenizer.chat_template')
    if not isinstance(add_bos, bool):
      problems.append(_not('tokenizer.ggml.add_bos_token', add_bos, _BOOLEAN))
    if not isinstance(template, str | None):
      problems.append(_not('tokenizer.chat_template', template, 'a text'))
    if problems:
      raise errors.WeightsError(source, problems, _CONVERT)
    ends = {special[name] for name in ('eos_token', 'eot_token', 'eom_token')}
    ends |= {
      id_
      for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
      if kind == _CONTROL and token in _END_NAMES
    }
    description = _describe_gguf(metadata, tokens)
    return cls(
      vocab=len(tokens),
      bos=special['bos_token'] if add_bos else None,
      ends=frozenset(ends - {None}),
      chat_template=template,
      special_text={
        name: tokens[id_] for name, id_ in special.items() if id_ is not None
      },
      **_backends(description, source),
    )

  @classmethod
  def from_directory(cls, path: str | os.PathLike[str]) -> 'Tokenizer':
    """Reads `tokenizer.json` and the configs beside it.

    Raises:
      WeightsError: a file is missing, damaged or contradicts another.
    """
    root = epath.Path(path)
    backends = _backends(
      errors.read_text(root / 'tokenizer.json'), root / 'tokenizer.json'
    )
    options = _optional_json(root / 'tokenizer_config.json')
    problems: list[str] = []
    special = {
      name: text
      for name in _SPECIAL
      if (text := _token_text(name, options.get(name), problems))
    }
    ids = {
      text: backends['_markup'].token_to_id(text) for text in special.values()
    }
    problems += [
      f'{name} {text!r} is not in tokenizer.json'
      for name, text in special.items()
      if ids[text] is None
    ]
    vocab = backends['_markup'].get_vocab_size(with_added_tokens=True)
    ends = {ids[special['eos_token']]} if 'eos_token' in special else set()
    for name in ('config.json', 'generation_config.json'):
      value = _optional_json(root / name).get('eos_token_id')
      for id_ in value if isinstance(value, list) else [value]:
        if id_ is None or _is_id(id_, vocab):
          ends.add(id_)
        else:
          problems.append(
            f'{name}: end token {id_!r:.40} is not an id below {vocab}'
          )
    added = backends['_markup'].get_added_tokens_decoder()
    ends |= {
      id_
      for id_, token in added.items()
      if token.special and token.content in _END_NAMES
    }
    add_bos = options.get('add_bos_token')
    if not isinstance(add_bos, bool | None):
      problems.append(_not('add_bos_token', add_bos, _BOOLEAN))
    template = _chat_template(root, options, problems)
    if problems:
      raise errors.WeightsError(
        root, problems, 'Fetch all tokenizer files of one revision.'
      )
    return cls(
      vocab=vocab,
      bos=_bos_of_directory(backends['_markup'], add_bos, special),
      ends=frozenset(ends - {None}),
      chat_template=template,
      special_text=special,
      **backends,
    )

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the files from which `from_directory` makes an equal tokenizer."""
    root = epath.Path(path)
    root.mkdir(parents=True, exist_ok=True)
    options = {**self.special_text, 'add_bos_token': self.bos is not None}
    for name, text in (
      ('tokenizer.json', self._markup.to_str()),
      ('tokenizer_config.json', json.dumps(options)),
      ('generation_config.json', json.dumps({'eos_token_id': [*self.ends]})),
      ('chat_template.jinja', self.chat_template),
    ):
      if text is not None:
        (root / name).write_text(text, 'utf-8')

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text, after BOS where the model wants it.

    A control token spelled in the text stays text, so that what a user writes
    cannot end a turn. No end token is added: a prompt is to be continued.

    Raises:
      UnicodeEncodeError: the text holds a lone surrogate.
    """
    prefix = [] if self.bos is None else [self.bos]
    return prefix + self._encode(self._plain, text)

  def encode_markup(self, text: str) -> list[int]:
    """Returns the ids of a text in which control tokens mean themselves.

    BOS comes first where the model wants it, once, even if the text (a
    rendered template) begins with it.
    """
    ids = self._encode(self._markup, text)
    if self.bos is None or ids[:1] == [self.bos]:
      return ids
    return [self.bos, *ids]

  def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Returns the ids of a chat, up to where the assistant speaks next."""
    return self.encode_markup(self.render_chat(messages))

  def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
    """Renders the model's own chat template.

    A template may insert a default system prompt (SmolLM2's does). The content
    of messages is not escaped: a control token spelled in it acts as one.

    Args:
      messages: each with `role` (system, user, assistant) and `content`.

    Raises:
      WeightsError: the model has no template, or it refuses the messages or
        fails.
      MissingPackageError: jinja2 is not installed.
    """
    if not self.chat_template:
      raise errors.WeightsError(
        'chat template',
        ['the model has none'],
        'Use encode(): this is a base model, or its template was not packed.',
      )
    # The template comes with the weights: it must not reach Python objects.
    sandbox = errors.optional_package('jinja2.sandbox')
    environment = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=['jinja2.ext.loopcontrols'],
    )
    environment.filters['tojson'] = _to_json
    environment.globals['raise_exception'] = _refuse
    chat = [dict(message) for message in messages]
    # `strftime_now` is left undefined, on which templates take a fixed date:
    # the same messages give the same ids tomorrow.
    try:
      return environment.from_string(self.chat_template).render(
        messages=chat,
        add_generation_prompt=True,
        **self.special_text,
      )
    except Exception as error:  # the template is a program, and may do anything
      raise errors.WeightsError(
        'chat template',
        [f'{type(error).__name__}: {error}'],
        'Messages need a role and content that this template takes. If they '
        'have them, the template is damaged: fetch it again.',
      ) from error

  def decode(self, ids: Iterable[int]) -> str:
    """Returns the text of token ids, without control tokens.

    Bytes that are not UTF-8 become U+FFFD. Ids beyond the vocabulary have no
    text: a model's table may be longer (Qwen2.5's is, to be divisible), and
    with sampling any of its rows can be chosen.

    Raises:
      ValueError: an id is negative.
    """
    ids = list(ids)
    for id_ in ids:
      if id_ < 0:
        raise ValueError(f'token id {id_} must not be negative')
    return self._markup.decode(
      [id_ for id_ in ids if id_ < self.vocab], skip_special_tokens=True
    )

  def _encode(self, backend: Any, text: str) -> list[int]:
    text.encode('utf-8')  # the package panics on a lone surrogate
    return backend.encode(text, add_special_tokens=False).ids


class TextStream:
  """Turns ids into text as they come, never showing half a character.

  The pieces of `push` and the rest from `finish` make up `decode` of all ids.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    # Ids since the last point where all bytes made whole characters, after
    # those of one such stretch before: decoders look at what stands in front.
    self._before: list[int] = []
    self._open: list[int] = []
    self._shown = ''  # of the text of `_open`

  def push(self, ids: int | Iterable[int]) -> str:
    """Takes the next id or ids; returns the text that is now certain."""
    self._open += [ids] if isinstance(ids, int) else list(ids)
    text = self._text()
    # A tail of U+FFFD may yet become a character.
    whole = text.rstrip('\ufffd')
    new = whole[len(self._shown) :]
    self._shown = whole
    if whole == text and text:
      self._before, self._open, self._shown = self._open, [], ''
    return new

  def finish(self) -> str:
    """Returns what was held back: U+FFFD for each run of invalid bytes."""
    new = self._text()[len(self._shown) :]
    self._before, self._open, self._shown = [], [], ''
    return new

  def _text(self) -> str:
    decode = self._tokenizer.decode
    return decode(self._before + self._open)[len(decode(self._before)) :]


def _check_gguf(
  metadata: Mapping[str, Any], source: str | os.PathLike[str]
) -> list[str]:
  """Returns the tokens, after checking all that is needed with them."""
  model = metadata.get('tokenizer.ggml.model')
  if model != 'gpt2':
    raise errors.WeightsError(
      source,
      [f'tokenizer.ggml.model is {model!r}, must be "gpt2"'],
      'Only byte-level BPE is read from GGUF: give a directory that holds the '
      "model's tokenizer.json as its tokenizer (model.tokenizer).",
    )
  pre = metadata.get('tokenizer.ggml.pre')
  if not isinstance(pre, str) or pre not in _PRETOKENIZERS:
    raise errors.WeightsError(
      source,
      [
        f'tokenizer.ggml.pre is {pre!r:.40}, must be in '
        f'{sorted(_PRETOKENIZERS)}'
      ],
      'Another pre-tokenizer would give other ids without a warning: give a '
      "directory that holds the model's tokenizer.json as its tokenizer "
      '(model.tokenizer).',
    )
  lists: dict[str, Any] = {
    name: metadata.get(f'tokenizer.ggml.{name}') for name in _LISTS
  }
  problems = []
  for name, (kind, what) in _LISTS.items():
    value, key = lists[name], f'tokenizer.ggml.{name}'
    if value is None:
      problems.append(f'{key} is missing')
    elif not isinstance(value, list):
      problems.append(_not(key, value, f'a list of {what}'))
    elif wrong := [entry for entry in value if type(entry) is not kind]:
      problems.append(f'{key} has {wrong[0]!r:.40}, must be {what} alone')
  if not problems and len(lists['tokens']) != len(lists['token_type']):
    problems.append(
      f'{len(lists["tokens"])} tokens, but {len(lists["token_type"])} types'
    )
  if problems:
    raise errors.WeightsError(source, problems, _CONVERT)
  return lists['tokens']


def _describe_gguf(metadata: Mapping[str, Any], tokens: list[str]) -> str:
  """Returns a GGUF's tokenizer as a tokenizer.json.

  Written as JSON and not built from the package's classes: a GGUF fixes the
  ids of control tokens, which adding tokens to a built one would not.
  """
  pre = metadata['tokenizer.ggml.pre']
  splits = [
    {
      'type': 'Split',
      'pattern': {'Regex': pattern},
      'behavior': 'Isolated',
      'invert': False,
    }
    for pattern in _PRETOKENIZERS[pre]
  ]
  byte_level = {
    'type': 'ByteLevel',
    'add_prefix_space': False,
    'trim_offsets': False,
    'use_regex': False,
  }
  kinds = metadata['tokenizer.ggml.token_type']
  added = [
    {
      'id': id_,
      'content': tokens[id_],
      'single_word': False,
      'lstrip': False,
      'rstrip': False,
      'normalized': False,
      'special': kind == _CONTROL,
    }
    for id_, kind in enumerate(kinds)
    if kind in (_CONTROL, _USER_DEFINED)
  ]
  return json.dumps(
    {
      'version': '1.0',
      'truncation': None,
      'padding': None,
      'added_tokens': added,
      'normalizer': None,
      'pre_tokenizer': {
        'type': 'Sequence',
        'pretokenizers': [*splits, byte_level],
      },
      'post_processor': None,
      'decoder': byte_level,
      'model': {
        'type': 'BPE',
        'dropout': None,
        'unk_token': None,
        'continuing_subword_prefix': None,
        'end_of_word_suffix': None,
        'fuse_unk': False,
        'byte_fallback': False,
        'ignore_merges': pre in _WHOLE_WORDS,
        'vocab': {token: id_ for id_, token in enumerate(tokens)},
        'merges': metadata['tokenizer.ggml.merges'],
      },
    }
  )


def _backends(
  description: str, source: str | os.PathLike[str]
) -> dict[str, Any]:
  tokenizers = errors.optional_package('tokenizers')
  try:
    plain = tokenizers.Tokenizer.from_str(description)
    markup = tokenizers.Tokenizer.from_str(description)
  except Exception as error:  # the package raises bare Exception
    raise errors.WeightsError(
      source, [f'the tokenizer is damaged: {error}'], 'Fetch it again.'
    ) from error
  for backend in (plain, markup):
    backend.no_truncation()
    backend.no_padding()
  plain.encode_special_tokens = True
  return {'_plain': plain, '_markup': markup}


def _bos_of_directory(
  backend: Any, wanted: bool | None, special: Mapping[str, str]
) -> int | None:
  """Returns BOS if it is wanted; None asks the post-processor."""
  bos = special.get('bos_token')
  if bos is None:
    return None
  id_ = backend.token_to_id(bos)
  if wanted is None:
    wanted = backend.encode('', add_special_tokens=True).ids[:1] == [id_]
  return id_ if wanted else None


def _chat_template(
  path: epath.Path, options: Mapping[str, Any], problems: list[str]
) -> str | None:
  # Current checkpoints keep it in a file of its own.
  separate = path / 'chat_template.jinja'
  if separate.exists():
    return errors.read_text(separate)
  template = options.get('chat_template')
  if isinstance(template, list):  # several, by name
    for entry in template:
      if not isinstance(entry, dict) or any(
        not isinstance(entry.get(key), str) for key in ('name', 'template')
      ):
        what = 'an object with the texts name and template'
        problems.append(_not('chat_template', entry, what))
        return None
    named = {entry['name']: entry['template'] for entry in template}
    template = named.get('default')
  if not isinstance(template, str | None):
    problems.append(_not('chat_template', template, 'a text'))
    return None
  return template


def _token_text(name: str, value: Any, problems: list[str]) -> str | None:
  """A token is written as its text, or as a dict that holds it."""
  text = value.get('content') if isinstance(value, dict) else value
  if value is None:
    return None
  # JSON has a notation for half a character, which the package panics on.
  if isinstance(text, str) and not re.search('[\ud800-\udfff]', text):
    return text
  problems.append(_not(name, value, 'a text, or an object with it as content'))
  return None


def _is_id(value: Any, vocab: int) -> bool:
  # To Python a boolean is an integer.
  return type(value) is int and 0 <= value < vocab


def _not(name: str, value: Any, what: str) -> str:
  return f'{name}={value!r:.40} must be {what}'


def _optional_json(path: epath.Path) -> dict[str, Any]:
  return errors.read_json(path) if path.exists() else {}


def _to_json(value: Any, indent: int | None = None) -> str:
  """Jinja's own filter escapes HTML, which no model was trained on."""
  return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
  """`raise_exception` of the templates."""
  raise errors.optional_package('jinja2').TemplateError(message)
