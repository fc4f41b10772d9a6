# SPDX-License-Identifier: Apache-2.0
"""The shipped prompts are those fixed before anything was measured."""

import pytest

from experiments import prompts
from lynx_jax.config import ConfigError


def test_every_prompt_has_a_checksum():
  assert set(prompts.checksums()) == {f'{n}.txt' for n in prompts.KEEPS_END}


@pytest.mark.parametrize('name', prompts.KEEPS_END)
def test_prompt_is_what_was_recorded(name):
  assert prompts.digest(name) == prompts.checksums()[f'{name}.txt']


@pytest.mark.parametrize('name', prompts.KEEPS_END)
def test_prompt_is_long_enough(name):
  assert len(prompts.read(name).encode()) >= 10_000


def test_read_takes_any_file(tmp_path):
  file = tmp_path / 'a b.txt'
  file.write_text('Grüße', encoding='utf-8')
  assert prompts.read(file) == 'Grüße'


@pytest.mark.parametrize('data', [b'', b' \n\t\n'])
def test_an_empty_prompt_is_refused(tmp_path, data):
  file = tmp_path / 'empty.txt'
  file.write_bytes(data)
  with pytest.raises(ConfigError, match=r'empty\.txt.* is empty'):
    prompts.read(file)


def test_a_binary_prompt_is_refused(tmp_path):
  file = tmp_path / 'model.gguf'
  file.write_bytes(b'GGUF\xff\x00')
  with pytest.raises(ConfigError, match='byte 4 is 0xff'):
    prompts.read(file)


def test_cut():
  assert prompts.cut([1, 2, 3, 4], 3) == [1, 2, 3]
  assert prompts.cut([1, 2, 3, 4], 3, keeps_end=True) == [2, 3, 4]
  assert prompts.cut([1], 3) == [1]
  with pytest.raises(ConfigError, match='prompt_tokens=0'):
    prompts.cut([1], 0)
