# SPDX-License-Identifier: Apache-2.0
"""Resolves pyproject.toml into requirements.lock and requirements-test.lock.

Needs `uv` on the path. Run it by `make lock`, read the diff, run `make test`.
"""

import pathlib
import re
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
SPDX = '# SPDX-License-Identifier: Apache-2.0\n'
RUN_HEADER = f"""{SPDX}\
# Everything that `make demo` installs, but for the model: core, weights, serve
# and experiments of pyproject.toml, for Python 3.11 to 3.14 on Linux x86-64.
# Complete, so it is installed with --no-deps. Made by `make lock`.
"""
TEST_HEADER = f"""{SPDX}\
# What `make test` installs besides: the extras test, notebook and tpu (libtpu
# compiles the kernels for TPUs on a machine without one). Made by `make lock`.
-r requirements.lock
"""
PLATFORM = (
  "sys_platform == 'linux' and platform_machine == 'x86_64' "
  "and python_version < '3.15'"
)


def resolve(extras: list[str], constraints: str = '') -> dict[str, str]:
  """Returns the pinned lines with hashes, by package."""
  with tempfile.TemporaryDirectory() as folder:
    project = pathlib.Path(folder) / 'pyproject.toml'
    project.write_text(
      (ROOT / 'pyproject.toml').read_text()
      + f'\n[tool.uv]\nenvironments = ["{PLATFORM}"]\n'
    )
    pins = pathlib.Path(folder) / 'pins.txt'
    pins.write_text(constraints)
    command = ['uv', 'pip', 'compile', str(project), '--universal']
    command += ['--python-version=3.11', '--generate-hashes', '--no-header']
    # One version for all Pythons: the lock has no markers.
    command += ['--fork-strategy=fewest']
    command += ['--no-annotate', f'--constraint={pins}']
    command += [f'--extra={extra}' for extra in extras]
    text = subprocess.run(
      command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder
    ).stdout
  # The markers go: on another platform a pin must fail, not be left out.
  text = re.sub(r'^(\S+==\S+) ;.*\\$', r'\1 \\', text, flags=re.MULTILINE)
  blocks = re.split(r'^(?=\S+==)', text, flags=re.MULTILINE)[1:]
  return {block.split('==')[0]: block for block in blocks}


def main() -> None:
  needed = ['weights', 'experiments', 'serve']
  run = resolve(needed)
  pins = ''.join(block.split(' \\')[0] + '\n' for block in run.values())
  everything = resolve([*needed, 'test', 'notebook', 'tpu'], pins)
  extra = [block for name, block in everything.items() if name not in run]
  (ROOT / 'requirements.lock').write_text(RUN_HEADER + ''.join(run.values()))
  (ROOT / 'requirements-test.lock').write_text(TEST_HEADER + ''.join(extra))


if __name__ == '__main__':
  main()
