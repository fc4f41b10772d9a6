# SPDX-License-Identifier: Apache-2.0
"""Rules about the source: imports point down, one place reads device values.

The rules are functions over parsed source, so each is also shown to turn red
on a copy with a planted fault.
"""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LIBRARY = ROOT / 'lynx_jax'

# From the ground up. A module imports from its own layer or from those before
# it. A folder counts as one name.
LAYERS = (
  ('shapes', 'config'),
  ('timeline', 'sampling', 'mesh', 'programs', 'patience'),
  ('requests',),
  ('codec',),
  ('exact',),
  ('pallas_kernels',),
  ('kv_cache',),
  ('attention',),
  ('models',),
  ('prefill',),
  ('transport',),
  ('wire', 'sender', 'handshake'),
  ('agreed_prefill', 'lockstep'),
  ('prefill_server', 'session', 'remote_prefill'),
  ('memory',),
  ('speculative',),
  ('continuation',),
  ('engine',),
)
# The package itself may re-export the topmost; nothing imports it.
HEIGHT = {name: i for i, names in enumerate(LAYERS) for name in names}
HEIGHT['__init__'] = len(LAYERS)

# The library knows no flags, no experiment and no test.
FORBIDDEN = ('absl.flags', 'experiments', 'ml_collections', 'tests', 'configs')

# The only function in which a device value may reach the host.
FETCH = ('programs.py', 'fetch')
# Expressions that hold values which never were on a device, each with why.
HOST_VALUES = {
  ('codec.py', 'matrix'): 'a constant under construction',
  ('engine.py', 'end_tokens'): 'of the tokenizer',
  ('engine.py', 'prompt'): 'token ids of the caller',
  ('engine.py', 'request.prompt'): 'token ids of the caller',
  ('engine.py', 'self._queue'): 'a list of ids',
  ('mesh.py', 'devices'): 'chips, no values',
  ('models/weights.py', 'shape'): 'of a tensor in a file',
  ('models/weights.py', 'value'): 'a number of a JSON file',
  ('speculative/decode.py', 'end_tokens'): 'of the tokenizer',
  ('speculative/decode.py', 'grown'): 'fetched by the caller',
  ('speculative/decode.py', 'length'): 'fetched by the caller',
  ('remote_prefill.py', 'entry.prompt'): 'token ids of the caller',
  ('transport/courier.py', 'self._under_way'): 'a list of flights',
  ('wire.py', 'part'): 'a slice of a manifest',
}


def _sources() -> dict[str, str]:
  """Returns the library's sources by path below lynx_jax."""
  return {
    str(file.relative_to(LIBRARY)): file.read_text(encoding='utf-8')
    for file in sorted(LIBRARY.rglob('*.py'))
  }


def _imports(tree: ast.AST, package: tuple[str, ...]) -> set[tuple[int, str]]:
  """Returns (line, full name) of all imports, also those in functions."""
  found = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found |= {(node.lineno, alias.name) for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ''
      if node.level:
        above = package[: len(package) - node.level + 1]
        base = '.'.join((*above, *filter(None, [node.module])))
      found |= {(node.lineno, f'{base}.{a.name}') for a in node.names}
  return found


def _starts_with(name: str, prefix: str) -> bool:
  return name == prefix or name.startswith(f'{prefix}.')


def import_faults(path: str, source: str) -> list[str]:
  """Returns the imports of one library file that break the layers."""
  parts = pathlib.PurePath(path).with_suffix('').parts
  own = parts[0]
  if own not in HEIGHT:
    return [f'{path}: {own!r} has no layer yet; add it to LAYERS']
  faults = []
  package = ('lynx_jax', *parts[:-1])
  for line, name in sorted(_imports(ast.parse(source), package)):
    if any(_starts_with(name, prefix) for prefix in FORBIDDEN):
      faults.append(f'{path}:{line}: the library must not import {name}')
    if not _starts_with(name, 'lynx_jax') or name == 'lynx_jax':
      continue
    other = name.split('.')[1]
    if HEIGHT.get(other, len(LAYERS)) > HEIGHT[own]:
      faults.append(f'{path}:{line}: {own} must not import {other}, above it')
  return faults


_OPERATOR = ast.operator | ast.cmpop | ast.unaryop | ast.boolop


class _Reads(ast.NodeVisitor):
  """Collects expressions of one function that may read a device value.

  What an expression holds is not known here, so everything is suspect but
  what visibly lives on the host: constants, shapes, results of `fetch`, and
  names bound to such expressions.
  """

  CASTS = ('int', 'float', 'bool', 'complex')
  NUMPY = ('asarray', 'array', 'copy', 'ascontiguousarray', 'stack')
  METHODS = ('item', 'tolist', 'tobytes', '__array__', '__int__', '__float__')
  JAX = ('device_get', 'copy_to_host_async')
  HOST_RESULTS = ('fetch', 'len', 'range', 'str', *CASTS)
  HOST_IF_ARGUMENTS = frozenset(
    ['abs', 'enumerate', 'list', 'max', 'min', 'sorted', 'sum', 'tuple', 'zip']
  )
  HOST_ATTRIBUTES = ('shape', 'ndim', 'size', 'dtype', 'itemsize', 'nbytes')

  def __init__(
    self,
    function: ast.AST,
    *,
    handles_arrays: bool,
    known_host: frozenset[str] = frozenset(),
  ):
    self.handles_arrays = handles_arrays
    self.known_host = known_host
    self.found: list[tuple[int, str]] = []
    self.host: set[str] = set()
    before = -1
    while before != len(self.host):  # names bound to names, in any order
      before = len(self.host)
      for node in ast.walk(function):
        self._bind(node)
    for child in ast.iter_child_nodes(function):
      self.visit(child)

  def _bind(self, node: ast.AST) -> None:
    if isinstance(node, ast.Assign):
      pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.For | ast.comprehension):
      pairs = [(node.target, node.iter)]
    elif isinstance(node, ast.NamedExpr):
      pairs = [(node.target, node.value)]
    else:
      return
    for target, value in pairs:
      if self.on_host(value):
        self.host |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}

  def on_host(self, node: ast.AST) -> bool:
    if ast.unparse(node) in self.known_host:
      return True
    match node:
      case ast.Constant():
        return True
      case ast.Name():
        return node.id in self.host
      case ast.Attribute():
        return node.attr in self.HOST_ATTRIBUTES or self.on_host(node.value)
      case ast.Subscript(value=value):
        return self.on_host(value)
      case ast.Call(func=ast.Name(id=name), args=args):
        return name in self.HOST_RESULTS or (
          name in self.HOST_IF_ARGUMENTS and all(map(self.on_host, args))
        )
      case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)):
        return (
          attr in ('fetch', 'finfo', 'iinfo')
          or name in ('math', 'time', 'os')
          or (name == 'np' and all(map(self.on_host, node.args)))
          or name in self.host
        )
      case ast.Call(func=ast.Attribute(value=value)):
        return self.on_host(value)
    children = [
      child
      for child in ast.iter_child_nodes(node)
      if not isinstance(child, ast.expr_context | _OPERATOR)
    ]
    return bool(children) and all(map(self.on_host, children))

  def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
    """Leaves nested functions to their own visit."""

  visit_AsyncFunctionDef = visit_FunctionDef

  def visit_Attribute(self, node: ast.Attribute) -> None:
    if node.attr in self.JAX:
      self.found.append((node.lineno, ast.unparse(node)))
    self.generic_visit(node)

  def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
    for alias in node.names:
      if alias.name in self.JAX:
        self.found.append((node.lineno, ast.unparse(node)))

  def visit_Call(self, node: ast.Call) -> None:
    if self.handles_arrays and self._reads(node):
      self.found.append((node.lineno, ast.unparse(node)))
    self.generic_visit(node)

  def _reads(self, node: ast.Call) -> bool:
    match node.func:
      case ast.Name(id=name) if name in self.CASTS:
        return bool(node.args) and not all(map(self.on_host, node.args))
      case ast.Attribute(value=ast.Name(id='np' | 'numpy'), attr=attr):
        return attr in self.NUMPY and not self.on_host(node.args[0])
      case ast.Attribute(value=value, attr=attr):
        return attr in self.METHODS and not self.on_host(value)
    return False


def read_faults(path: str, source: str) -> list[str]:
  """Returns what in one library file may read a device value."""
  tree = ast.parse(source)
  # A module that imports neither jax nor a module with arrays holds none.
  handles_arrays = any(
    _starts_with(name, 'jax') or _starts_with(name, 'lynx_jax.programs')
    for _, name in _imports(tree, ())
  )
  known_host = frozenset(text for file, text in HOST_VALUES if file == path)
  scopes: list[tuple[str, ast.AST]] = [('<module>', tree)]
  scopes += [
    (node.name, node)
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
  ]
  return [
    f'{path}:{line}: {text} in {name} may read a device value; '
    f'only {"::".join(FETCH)} may'
    for name, scope in scopes
    if (path, name) != FETCH
    for line, text in _Reads(
      scope, handles_arrays=handles_arrays, known_host=known_host
    ).found
  ]


@pytest.mark.parametrize('path', _sources())
def test_imports_point_down(path):
  assert not import_faults(path, _sources()[path])


@pytest.mark.parametrize(
  'path, line',
  [
    ('codec.py', 'from lynx_jax import engine'),
    ('codec.py', 'from lynx_jax.models import transformer'),
    ('models/weights.py', 'from ..engine import Engine'),
    ('shapes.py', 'import lynx_jax.codec'),
    ('engine.py', 'from experiments import main'),
    ('engine.py', 'import ml_collections'),
    ('engine.py', 'from absl import flags'),
    ('engine.py', 'def f():\n  from absl.flags import FLAGS'),
    ('utils.py', 'import jax'),
  ],
)
def test_a_planted_import_is_seen(path, line):
  assert import_faults(path, line)


@pytest.mark.parametrize(
  'path, line',
  [
    ('models/weights.py', 'from lynx_jax import codec, shapes'),
    ('models/weights.py', 'from . import errors'),
    ('engine.py', 'from absl import logging'),
    ('speculative/decode.py', 'import lynx_jax.transport.links'),
  ],
)
def test_a_downward_import_is_allowed(path, line):
  assert not import_faults(path, line)


@pytest.mark.parametrize('path', _sources())
def test_device_values_are_read_in_one_place(path):
  assert not read_faults(path, _sources()[path])


def test_the_one_place_exists_and_reads():
  path, name = FETCH
  tree = ast.parse(_sources()[path])
  (fetch,) = [
    node
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef) and node.name == name
  ]
  assert _Reads(fetch, handles_arrays=True).found


def test_allowed_host_conversions_still_exist():
  sources = _sources()
  for path, text in HOST_VALUES:
    assert text in sources[path], f'{path}: {text} is gone'


@pytest.mark.parametrize(
  'planted',
  [
    'jax.device_get(x)',
    'np.asarray(x)',
    'np.array(x + 1)',
    'x.item()',
    'x[0].tolist()',
    'int(x)',
    'float(x.sum())',
    'bool(x > 0)',
    'jax.tree.map(jax.device_get, x)',
    '[int(t) for t in x]',
    '(lambda y: float(y))(x)',
  ],
)
@pytest.mark.parametrize('path', ['speculative/decode.py', 'programs.py'])
def test_a_planted_read_is_seen(path, planted):
  source = _sources()[path]
  planted_source = source + (
    f'\n\ndef planted(x):\n  import jax, numpy as np\n  return {planted}\n'
  )
  before = read_faults(path, source)
  (fault, *_) = set(read_faults(path, planted_source)) - set(before)
  assert 'in planted may read a device value' in fault


@pytest.mark.parametrize(
  'allowed',
  [
    'int(fetch(x))',
    'fetch(x).tolist()',
    '[int(t) for t in fetch(x)]',
    'int(x.shape[0])',
    "float('inf')",
    'float(jnp.finfo(jnp.bfloat16).max)',
    'bool(len(x))',
  ],
)
def test_a_value_on_the_host_may_be_converted(allowed):
  source = f'import jax\ndef f(x):\n  return {allowed}\n'
  assert not read_faults('engine.py', source)


def _own_files() -> list[pathlib.Path]:
  folders = ('lynx_jax', 'experiments', 'configs', 'launch', 'tests', '.ci')
  return [f for name in folders for f in sorted((ROOT / name).rglob('*.py'))]


@pytest.mark.parametrize(
  'file', _own_files(), ids=lambda f: str(f.relative_to(ROOT))
)
def test_every_file_names_its_licence(file):
  """An empty file needs none."""
  first = file.read_text(encoding='utf-8').split('\n', 1)[0]
  assert not first or first == '# SPDX-License-Identifier: Apache-2.0'
