# SPDX-License-Identifier: Apache-2.0
"""README's example runs as it stands."""

import pathlib
import re

import pytest

pytestmark = pytest.mark.usefixtures('unoptimised')
README = pathlib.Path(__file__).parents[1] / 'README.md'


def test_the_example_streams_to_its_end(capsys):
  text = README.read_text(encoding='utf-8')
  (code,) = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
  exec(compile(code, README.name, 'exec'), {})
  shown = capsys.readouterr().out.splitlines()
  assert shown[0].startswith('Provisional(')
  assert any(line.startswith('Committed(') for line in shown)
  assert shown[-1].startswith('Finished(')
