# SPDX-License-Identifier: Apache-2.0
"""The cells of an ablation: from the text of a config to checked settings.

It runs nothing. A mistake in any cell shows before the first one starts.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ml_collections

from experiments import cell_rows, config, defaults, parsing
from experiments.config import Ablation, Cell, Settings
from lynx_jax.config import ConfigError, Drafter, require

STUDY = 'ablation'

# What changes something between two processes alone.
APART = ('link.jitter_ms', 'link.emulated', 'transfer.window_bytes')
# What may be varied: all that a cell measures.
VARIED = (
  'scheme',
  'mode',
  'model',
  'codec',
  'engine',
  'link.rate_gbps',
  'link.rtt_ms',
  'prompt_file',
  'prompt_tokens',
  'prompt_lengths',
  'output_tokens',
  'sampling',
  'acceptance.output_tokens',
  'repeats',
  'seed',
  'prefill_mesh',
  'decode_mesh',
  'decode_data',
  *APART,
)


# What one may call an axis, and the field that it is.
_WORDS = {
  'backlog': 'engine.backlog_tokens',
  'bits': 'codec.k,codec.v',
  'gamma': 'engine.draft_tokens',
  'group': 'codec.group',
  'priority': 'engine.order',
  'rate': 'link.rate_gbps',
  'rotation': 'codec.k_rotation,codec.v_rotation',
  'target': 'scheme',
  'window': 'codec.recent_tokens or transfer.window_bytes',
  'acceptance.draft_tokens': 'engine.draft_tokens',
}


class CellsMissing(Exception):
  """Some cells have no result; the message says how many, and what to do."""


# Fields with the value that each of them takes.
_Change = dict[str, Any]


def settings(values: ml_collections.ConfigDict) -> Settings:
  """Turns the fields of a run into settings, with the cells of an ablation.

  Raises:
    ConfigError: naming the value, and the cell in which it cannot work.
  """
  ground = values.copy_and_resolve_references()
  ground.study = 'cell'
  if values.study != STUDY:
    return config.settings(values)
  defaults.check_fields(values, defaults.base())
  texts = values.ablation
  changes = _changes(values)
  require(
    any(changes),
    f'ablation.axes={texts.axes!r} must name what is varied, for example '
    "'codec.group=32|64; link.rtt_ms=1|50'",
  )
  require(
    not (texts.shard.strip() and texts.merge.strip()),
    f'ablation.shard={texts.shard!r} runs a part and '
    f'ablation.merge={texts.merge!r} runs nothing: leave one of them out',
  )
  fields = dict.fromkeys(itertools.chain.from_iterable(changes))
  cells: dict[Any, Cell] = {}
  for change in changes:
    name = ' '.join(f'{field}={value}' for field, value in change.items())
    try:
      cell = _cell(ground, name, change, fields)
    except ConfigError as error:
      raise ConfigError(f'ablation, cell {name}: {error}') from error
    cells.setdefault(cell.values, cell)
  return dataclasses.replace(
    config.settings(values),
    ablation=Ablation(
      cells=tuple(cells.values()),
      shard=_shard(texts.shard),
      merge=_names(texts.merge),
      heatmaps=_heatmaps(texts.heatmaps),
    ),
  )


def _changes(values: ml_collections.ConfigDict) -> list[_Change]:
  """Returns the changes of every cell: the list, times the grid."""
  lists, grid = values.ablation.cells, values.ablation.axes
  listed = [
    [
      pair
      for word in parsing.split('ablation.cells', entry, r'\s')
      for pair in _assigned(values, 'ablation.cells', word)[0]
    ]
    for entry in parsing.split('ablation.cells', lists, ';')
  ]
  axes = [
    _assigned(values, 'ablation.axes', entry)
    for entry in parsing.split('ablation.axes', grid, ';')
  ]
  return [
    _change([*one, *itertools.chain.from_iterable(place)])
    for one in listed or [[]]
    for place in itertools.product(*axes)
  ]


def _change(pairs: Sequence[tuple[str, Any]]) -> _Change:
  for field, times in collections.Counter(f for f, _ in pairs).items():
    values = ' and '.join(f'{value}' for f, value in pairs if f == field)
    require(
      times == 1,
      f'ablation: a cell sets {field} to {values}; name a field once, in '
      'ablation.axes or in the entries of ablation.cells',
    )
  return dict(pairs)


def _cell(
  ground: ml_collections.ConfigDict,
  name: str,
  change: _Change,
  fields: Iterable[str],
) -> Cell:
  changed = ground.copy_and_resolve_references()
  for field, value in change.items():
    group, last = _place(changed, field)
    group[last] = value
  found = config.settings(changed)
  require(
    not found.auto, 'scheme=auto is chosen by what others measure; name one'
  )
  require(
    found.link.rate_gbps is not None,
    'link.rate_gbps must be set or varied: the rate of a cell may not depend '
    'on what others measure',
  )
  require(
    not found.acceptance_tokens or found.sides == (1, 1),
    f'prefill_mesh={found.prefill_mesh}, decode_mesh={found.decode_mesh} and '
    f'decode_data={found.decode_data} must be 1 where KL is measured; '
    'acceptance.output_tokens=0 leaves it out',
  )
  values = []
  for field in fields:
    group, last = _place(changed, field)
    values.append((field, group[last]))
  return Cell(name=name, values=tuple(values), settings=found)


def _assigned(
  values: ml_collections.ConfigDict, name: str, entry: str
) -> list[list[tuple[str, Any]]]:
  """Parses `FIELD,FIELD=VALUE|VALUE`.

  Returns:
    For every value, what each field becomes.
  """
  left, equals, right = entry.partition('=')
  fields = [field.strip() for field in left.split(',')]
  words = parsing.split(name, right, '|')
  require(
    bool(equals) and all(fields) and all(words),
    f'{name}: {entry!r} must be FIELD=VALUE or FIELD=VALUE|VALUE, for example '
    "codec.group=64; no text is ''",
  )
  known = {*defaults.field_names(values)}
  for field in fields:
    require(
      field not in _WORDS,
      f'{name}: config.{field} is no axis; vary {_WORDS.get(field)} '
      '(docs/ablation.md has every axis)',
    )
    if field not in known:
      raise ConfigError(f'{name}: {defaults.unknown_field(field)}')
    require(
      _is_one(field, VARIED),
      f'{name}: config.{field} changes nothing that a cell measures; vary one '
      f'of {", ".join(VARIED)}',
    )
  return [
    [(field, _typed(values, name, field, word)) for field in fields]
    for word in words
  ]


def _is_one(field: str, fields: Iterable[str]) -> bool:
  return any(field == own or field.startswith(f'{own}.') for own in fields)


def check_apart(settings: Settings) -> None:
  """Raises `ConfigError` if a scheme needs both sides in one process."""
  for scheme in settings.schemes:
    require(
      scheme.drafter is not Drafter.PREFILL,
      f'scheme={scheme.name} needs both sides in one process: leave out '
      '--role, or the scheme',
    )


def between_processes(study: Ablation) -> Ablation:
  """Returns the ablation with every cell's sides in two processes.

  Raises:
    ConfigError: a cell measures what needs both in one.
  """
  for cell in study.cells:
    require(
      not cell.settings.acceptance_tokens,
      'KL is measured with both sides in one process: leave out --role, or set '
      'acceptance.output_tokens=0',
    )
    check_apart(cell.settings)
  apart = (dataclasses.replace(cell, apart=True) for cell in study.cells)
  return dataclasses.replace(study, cells=tuple(apart))


def in_one_process(study: Ablation) -> Ablation:
  """Returns the ablation as it is.

  Raises:
    ConfigError: a field that it varies needs two processes.
  """
  for cell in study.cells:
    for field, _ in cell.values:
      require(
        not _is_one(field, APART),
        f'config.{field} changes something between two processes alone: add '
        '--role=local',
      )
  return study


def command(argv: Sequence[str], cell: Cell) -> list[str]:
  """Returns the command line of a run that is this cell alone.

  A field that the cell leaves open (None) cannot be written, and so must not be
  set by `argv` either.
  """
  values = dict(cell.values) | {'study': 'cell'}
  flags = {f'--config.{field}': value for field, value in values.items()}
  return [
    *(word for word in argv if word.partition('=')[0] not in flags),
    *(f'{flag}={x}' for flag, x in flags.items() if x is not None),
  ]


def _typed(
  values: ml_collections.ConfigDict, name: str, field: str, word: str
) -> Any:
  """Returns the value of a field that a word stands for."""
  word = word.removeprefix("'").removesuffix("'")
  group, last = _place(defaults.base(), field)
  if word == 'None' and group[last] is None:
    return None
  kind = _place(values, field)[0].get_type(last)
  if kind is bool:
    require(
      word.lower() in ('true', 'false'),
      f'{name}: {field}={word} must be True or False',
    )
    return word.lower() == 'true'
  try:
    return kind(word)
  except ValueError as error:
    raise ConfigError(
      f'{name}: {field}={word} must be of type {kind.__name__}'
    ) from error


def _place(
  values: ml_collections.ConfigDict, field: str
) -> tuple[ml_collections.ConfigDict, str]:
  """Returns the group that holds a field, and its name in there."""
  *groups, last = field.split('.')
  for group in groups:
    values = values[group]
  return values, last


def _names(text: str) -> tuple[str, ...]:
  return tuple(filter(None, map(str.strip, text.split(','))))


def _heatmaps(text: str) -> tuple[str, ...]:
  for name in _names(text):
    require(
      name in cell_rows.FIGURES,
      f'ablation.heatmaps={name!r} must be of {", ".join(cell_rows.FIGURES)}',
    )
  return _names(text)


def _shard(text: str) -> tuple[int, int]:
  found = re.fullmatch(r'(\d+)/(\d+)', text.strip() or '1/1')
  shard = (int(found[1]), int(found[2])) if found else (0, 0)
  require(
    1 <= shard[0] <= shard[1],
    f'ablation.shard={text!r} must be I/N with I in 1..N, for example 1/4',
  )
  return shard


# --- The order ----------------------------------------------------------------


def model_key(cell: Settings) -> Any:
  """Returns what the loaded model depends on."""
  return (
    cell.model_path,
    cell.model_dtype,
    cell.model_tokenizer,
    cell.prefill_mesh,
    cell.decode_mesh,
    cell.decode_data,
  )


def engine_keys(cell: Settings) -> tuple[Any, ...]:
  """Returns, for every scheme, what its engine depends on.

  Policies that no program holds are left out: cells that differ in nothing
  else share the engine.
  """
  longest = max(tokens for _, tokens in cell.prompts)
  shapes = dataclasses.replace(
    cell.engine,
    prompt_tokens=longest,
    draft_tokens=None,
    sharpen=True,
    layer_ready=True,
  )
  return tuple(
    (model_key(cell), scheme.codec, scheme.engine(shapes))
    for scheme in cell.schemes
  )


def _program_key(cell: Settings) -> Any:
  """Returns what most programs depend on: chunks are cut by few of them."""
  return tuple(
    (
      model,
      codec,
      dataclasses.replace(
        engine, chunk_bytes=1, order=config.Order.ANCHOR_FIRST
      ),
    )
    for model, codec, engine in engine_keys(cell)
  )


def ordered(cells: Sequence[Cell]) -> tuple[Cell, ...]:
  """Returns cells so that those which share programs and engines are together.

  A pure function of the cells: every shard has the same order. Else they stay
  in the order of the config.
  """
  ranks: dict[Any, int] = {}

  def rank(cell: Cell) -> list[int]:
    parts = [
      (kind.__name__, kind(cell.settings))
      for kind in (model_key, _program_key, engine_keys)
    ]
    return [ranks.setdefault(part, len(ranks)) for part in parts]

  return tuple(sorted(cells, key=rank))


def part(cells: Sequence[Cell], shard: tuple[int, int]) -> Sequence[Cell]:
  """Returns the i-th of n runs of neighbours, sizes differing by at most 1."""
  index, count = shard
  return cells[(index - 1) * len(cells) // count : index * len(cells) // count]


def needs_engine(cells: Sequence[Cell]) -> Iterator[bool]:
  """Yields for every cell whether it needs an engine that none before had."""
  seen: set[Any] = set()
  for cell in cells:
    keys = {*engine_keys(cell.settings)}
    yield not keys <= seen
    seen |= keys
