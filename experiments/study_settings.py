# SPDX-License-Identifier: Apache-2.0
"""What each study measures: its part of the settings, checks and parsing.

A study that has a group of fields has its dataclass here, light enough for
whoever only reads a config; the ablation, which is made of whole runs, is in
`config`. It starts nothing.
"""

import dataclasses
import enum
import math
from typing import Self

import ml_collections

from experiments import parsing, peer_formulas, synthetic
from experiments.peers import caches as peer_caches
from lynx_jax.config import CodecConfig, require


class Code(enum.Enum):
  """Levels of an Anchor in the codec search; engines have the linear one."""

  LINEAR = 'linear'
  LOG = 'log'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
  """A codec of the search, and what distinguishes it.

  Attributes:
    name: the entry.
    codec: the nested code.
    anchor: leading planes that drafts read. Engines send one; the search also
      shows what a 3-bit Anchor, planes 2 and 1, would do.
    code: of what drafts read.
  """

  name: str
  codec: CodecConfig
  anchor: int = 1
  code: Code = Code.LINEAR


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
  """What the codec search compares.

  Attributes:
    candidates: the run's own codec, then those of the config.
    most_bits: of the Anchor, mean over the first prompts.
    drafted: candidates whose acceptance is measured.
    compared_prompts: on how many prompts all candidates are measured; 0 is all.
    layer_prompts: on how many prompts KL is measured layer by layer, at least.
    slots: prompts side by side.
    at_once: prompts that one call measures; 0 is all.
  """

  candidates: tuple[Candidate, ...]
  most_bits: float
  drafted: int
  compared_prompts: int
  layer_prompts: int
  slots: int
  at_once: int

  def __post_init__(self):
    parsing.positive('search.slots', self.slots)
    require(
      self.most_bits > 0, f'search.most_bits={self.most_bits} must be positive'
    )
    for name in ('drafted', 'compared_prompts', 'layer_prompts', 'at_once'):
      value = getattr(self, name)
      require(value >= 0, f'search.{name}={value} must be 0 or more')

  @classmethod
  def parse(cls, values: ml_collections.ConfigDict) -> Self:
    """Parses the fields of `search`, on the ground of those of `codec`."""
    return cls(
      candidates=_candidates(values),
      most_bits=values.search.most_bits,
      drafted=values.search.drafted,
      compared_prompts=values.search.compared_prompts,
      layer_prompts=values.search.layer_prompts,
      slots=values.search.slots,
      at_once=values.search.at_once,
    )


def _candidates(values: ml_collections.ConfigDict) -> tuple[Candidate, ...]:
  """Parses the entries of `search.codecs`; the run's codec comes first.

  An entry is `FIELD=VALUE …` or `NAME: FIELD=VALUE …`.
  """
  found = [Candidate(name='codec', codec=parsing.codec(values.codec))]
  for entry in parsing.split('search.codecs', values.search.codecs, ';'):
    name, colon, rest = entry.partition(': ')
    name, fields = (name, rest) if colon and '=' not in name else (entry, entry)
    changed = values.codec.copy_and_resolve_references()
    anchor, code = 1, Code.LINEAR
    for word in parsing.split('search.codecs', fields, r'\s'):
      field, equals, value = word.partition('=')
      value = value.strip("'")
      if field == 'anchor' and value.isdecimal():
        anchor = parsing.positive(
          f'search.codecs={entry!r}: anchor', int(value)
        )
        continue
      if field == 'code':
        code = parsing.member(f'search.codecs={entry!r}: code', Code, value)
        continue
      require(
        bool(equals) and field in changed,
        f'search.codecs={entry!r}: {word!r} must be FIELD=VALUE with a field '
        f'of codec, for example k_rotation=hadamard',
      )
      kind = type(changed[field])
      try:
        changed[field] = kind(value)
      except ValueError:
        require(
          False, f'search.codecs={entry!r}: {word!r} is no {kind.__name__}'
        )
    found.append(
      Candidate(
        name=name, codec=parsing.codec(changed), anchor=anchor, code=code
      )
    )
  return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Equivalence:
  """The prompts of the equivalence study.

  Attributes:
    prompts: how many parts of the texts.
    shortest: tokens of a part, at least.
    at_once: how many one call measures; 0 is all.
  """

  prompts: int
  shortest: int
  at_once: int

  def __post_init__(self):
    for name, least in (('prompts', 1), ('shortest', 1), ('at_once', 0)):
      value = getattr(self, name)
      require(
        value >= least, f'equivalence.{name}={value} must be {least} or more'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What the planner predicts; see `defaults.base`."""

  records: tuple[str, ...]
  models: tuple[str, ...]
  slices: tuple[str, ...]
  prompt_tokens: tuple[int, ...]
  rates_gbps: tuple[float, ...]
  in_flight: tuple[int, ...]
  spread: float
  arrivals_per_s: float

  def __post_init__(self):
    for name in ('models', 'slices', 'prompt_tokens', 'in_flight'):
      require(bool(getattr(self, name)), f"plan.{name}='' must not be empty")
    require(bool(self.rates_gbps), "plan.link_gbps='' must not be empty")
    require(
      0 <= self.spread < 1,
      f'plan.spread={self.spread} must be 0 or more, and less than 1',
    )
    # Clocks of rarer arrivals would lose the seconds of a request.
    require(
      self.arrivals_per_s == 0 or 1e-6 <= self.arrivals_per_s < math.inf,
      f'plan.arrivals_per_s={self.arrivals_per_s} must be a number of 1e-6 or '
      'more, or 0 for all at once',
    )

  @classmethod
  def parse(cls, values: ml_collections.ConfigDict) -> Self:
    """Parses the fields of `plan`."""

    def words(name: str) -> tuple[str, ...]:
      return tuple(w.strip() for w in values[name].split(',') if w.strip())

    def counts(name: str) -> tuple[int, ...]:
      numbers = parsing.numbers(f'plan.{name}', values[name], least=1)
      for number in numbers:
        require(
          number.is_integer(), f'plan.{name}: {number:g} is no whole number'
        )
      return tuple(map(int, numbers))

    return cls(
      records=words('records'),
      models=words('models'),
      slices=words('slices'),
      prompt_tokens=counts('prompt_tokens'),
      rates_gbps=parsing.numbers('plan.link_gbps', values.link_gbps),
      in_flight=counts('in_flight'),
      spread=values.spread,
      arrivals_per_s=values.arrivals_per_s,
    )


# Parts of the fidelity study.
PARTS = ('forced', 'free', 'acceptance', 'tasks', 'longbench', 'ruler')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fidelity:
  """What the fidelity study measures; see `defaults.base`.

  Attributes:
    parts: of PARTS.
    peers: of `peer_formulas.FORMULAS` and `peer_caches.NAMES`.
    peers_python: interpreter that runs the latter.
    slots: prompts side by side.
    forced_tokens, free_tokens: of every shipped prompt.
    tasks: of the synthetic ones.
    lengths: tokens of their prompts.
    depths: places of an answer, 0 to 1.
    samples: prompts for every length and depth.
    longbench, longbench_config, ruler: folders.
    most_lines: of each file; 0 is all.
  """

  parts: tuple[str, ...]
  peers: tuple[str, ...]
  peers_python: str
  slots: int
  forced_tokens: int
  free_tokens: int
  tasks: tuple[str, ...]
  lengths: tuple[int, ...]
  depths: tuple[float, ...]
  samples: int
  longbench: str
  longbench_config: str
  ruler: str
  most_lines: int

  @property
  def formulas(self) -> tuple[str, ...]:
    """Peers that our own program reads."""
    return tuple(p for p in self.peers if p in peer_formulas.FORMULAS)

  @property
  def caches(self) -> tuple[str, ...]:
    """Peers that run their own code."""
    return tuple(p for p in self.peers if p in peer_caches.NAMES)

  def __post_init__(self):
    for name, least in (
      ('slots', 1),
      ('forced_tokens', 1),
      ('free_tokens', 2),
      ('samples', 1),
      ('most_lines', 0),
    ):
      value = getattr(self, name)
      require(
        value >= least, f'fidelity.{name}={value} must be {least} or more'
      )
    for name in ('lengths', 'depths'):
      require(
        bool(getattr(self, name)), f"fidelity.{name}='' must have a number"
      )
    require(
      max(self.depths) <= 1, f'fidelity.depths={self.depths} must be in 0..1'
    )
    for part, folder in (
      ('longbench', self.longbench),
      ('longbench', self.longbench_config),
      ('ruler', self.ruler),
    ):
      require(
        part not in self.parts or bool(folder),
        f'fidelity.parts has {part!r}: fidelity.{part} must name a folder of '
        'JSON lines'
        + (
          ', and fidelity.longbench_config one with dataset2prompt.json and '
          'dataset2maxlen.json'
          if part == 'longbench'
          else ''
        ),
      )

  @classmethod
  def parse(cls, values: ml_collections.ConfigDict) -> Self:
    """Parses the fields of `fidelity`."""
    return cls(
      **values.to_dict()
      | {
        'parts': parsing.names('fidelity.parts', values.parts, PARTS),
        'peers': (
          parsing.names(
            'fidelity.peers',
            values.peers,
            (*peer_formulas.FORMULAS, *peer_caches.NAMES),
          )
          if values.peers
          else ()
        ),
        'tasks': parsing.names('fidelity.tasks', values.tasks, synthetic.TASKS),
        'lengths': tuple(
          int(n)
          for n in parsing.numbers('fidelity.lengths', values.lengths, least=1)
        ),
        'depths': parsing.numbers('fidelity.depths', values.depths, least=0),
      }
    )
