# SPDX-License-Identifier: Apache-2.0
"""The results contract: builds records and appends them, line by line.

It knows no engine and no study: values in, valid JSON lines out.
"""

import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lynx_jax.config import ConfigError, require
from lynx_jax.timeline import Event

FILE = 'results.jsonl'
CODEC, EQUIVALENCE = 'codec', 'equivalence'  # names of `event`s
FIDELITY = 'fidelity'
PEERS = 'peers'
CELL, ROWS = 'cell', 'rows'  # of an ablation; rows also of a plan

# Of a `request` record. Times are seconds since the request's arrival on one
# monotonic clock; what is not known is null, never 0.
REQUEST_FIELDS = (
  'study',
  'scheme',
  'target',
  'mode',
  'model',
  'prompt_tokens',
  'output_tokens',
  'token_ids',
  'text',
  'link_gbps',
  'rtt_ms',
  'bits_anchor',
  'bits_total',
  'bytes_anchor',
  'bytes_residual',
  'prefill_s',
  'split_s',
  'anchor_arrival_s',
  'residual_arrival_s',
  'ttft_prefill_token_s',
  'ttft_provisional_s',
  'ttft_committed_s',
  'tbt_first_s',
  'done_s',
  'exposed_s',
  'bound_ttft_s',
  'share',
  'drafted',
  'accepted',
  'retracted',
  'equal_to_reference',
  'equal_to_bf16',
  'commit_times_s',
  'device',
  'versions',
  'seed',
)
# Besides the contract: what a reader needs to pair records, (drafted, accepted)
# of every verification, the fields of the request's sampling, the exact plane,
# null or 0 where there is none, of projected requests the label and load, what
# the fidelity study has found, and of bf16 the bound that its request would
# have had with the bytes of an exponent codebook.
EXTRA_FIELDS = (
  'request',
  'repeat',
  'prompt',
  'form',
  'rounds',
  'sampling',
  'bytes_exact',
  'exact_arrival_s',
  'bound_codebook_s',
  'label',
  'plan',
  'fidelity',
)

# How a figure came to be: it ran here, the compiler counted it, or a model or
# an assumption enters.
LABELS = ('measured', 'compiled', 'projected')

_PACKAGES = ('jax', 'jaxlib', 'flax', 'numpy', 'lynx-jax')


class WorkdirError(OSError):
  """Records cannot be written; the message names the file and a remedy."""


def request_record(**values: Any) -> dict[str, Any]:
  """Builds a `request` record; fields not given are null.

  Raises:
    ValueError: for a field that the contract does not have.
  """
  known = (*REQUEST_FIELDS, *EXTRA_FIELDS)
  unknown = sorted(set(values) - set(known))
  if unknown:
    raise ValueError(f'no fields of a request record: {", ".join(unknown)}')
  record = dict.fromkeys(REQUEST_FIELDS) | values
  return {'kind': 'request'} | record


def event_record(request: Any, event: Event, **more: Any) -> dict[str, Any]:
  """Builds an `event` record of a request's timeline.

  Args:
    request: what names the request in its own record.
    event: a span or an instant.
    **more: what else tells records apart, such as `scheme`.
  """
  return {
    'kind': 'event',
    'request': request,
    'name': str(event.name),
    'start_s': event.start_s,
    'end_s': event.end_s,
    'detail': event.detail,
    **more,
  }


def run_record(command: Sequence[str], config: Any) -> dict[str, Any]:
  """Builds the `event` record that begins a run.

  Args:
    command: words of the command line.
    config: what JSON can hold of the configuration.
  """
  return _moment('run', None, {'command': list(command), 'config': config})


def acceptance_record(request: str, **detail: Any) -> dict[str, Any]:
  """Builds the `event` record of an acceptance run.

  Args:
    request: its name.
    **detail: prompt, draft_tokens, rounds and token_ids.
  """
  return _moment('acceptance', request, detail)


def codec_record(prompt: str, **detail: Any) -> dict[str, Any]:
  """Builds the `event` record of a prompt of the codec search.

  Args:
    prompt: its name.
    **detail: version of the settings, prompt_tokens, figures by candidate, and
      those by layer where they were measured.
  """
  return _moment(CODEC, prompt, detail)


def compared_record(request: str, **detail: Any) -> dict[str, Any]:
  """Builds the `event` record of a measured request and its prediction.

  Args:
    request: its name in the measured study.
    **detail: see `plan.compare`.
  """
  return _moment('compared', request, detail)


def schedule_record(seed: int, **detail: Any) -> dict[str, Any]:
  """Builds the `event` record of a fault schedule.

  Args:
    seed: of the schedule.
    **detail: how it ended.
  """
  return _moment('fault_schedule', None, {'seed': seed, **detail})


def equivalence_record(prompt: str, **detail: Any) -> dict[str, Any]:
  """Builds the `event` record of a prompt of the equivalence study.

  Args:
    prompt: its name.
    **detail: version of the settings, prompt_tokens, and figures by name.
  """
  return _moment(EQUIVALENCE, prompt, detail)


def cell_record(key: str, **detail: Any) -> dict[str, Any]:
  """Builds the `event` record of a cell of an ablation that was run.

  Args:
    key: identifies its settings.
    **detail: rows of figures, or the error; seconds, and engines made.
  """
  return _moment(CELL, key, detail)


def rows_record(**detail: Any) -> dict[str, Any]:
  """Builds the `event` record of what all cells of a study have given.

  Args:
    **detail: rows; of an ablation also unfinished cells, and heatmaps.
  """
  return _moment(ROWS, None, detail)


def split_record(request: str, **detail: Any) -> dict[str, Any]:
  """Builds the `event` record of a picture of one head's K or V.

  Args:
    request: whose prompt it is of.
    **detail: tensor (k or v), layer, head, tokens (first, stop), group,
      planes, rotation; and `dense`, `anchor` and `complete`, each a list of
      channels a token.
  """
  return _moment('split_example', request, detail)


def pieces_record(request: str, pieces: Sequence[str]) -> dict[str, Any]:
  """Builds the `event` record of the texts of a request's tokens.

  Args:
    request: its name.
    pieces: the text of every generated token alone.
  """
  return _moment('pieces', request, {'pieces': list(pieces)})


def fidelity_record(version: str, limits: str) -> dict[str, Any]:
  """Builds the `event` record that begins a run of the fidelity study.

  Args:
    version: of the settings, as in the requests that belong to it.
    limits: what the figures can and cannot show.
  """
  return _moment(FIDELITY, None, {'version': version, 'limits': limits})


def peers_record(
  not_run: Mapping[str, str], versions: Mapping[str, str]
) -> dict[str, Any]:
  """Builds the `event` record of what peers ran by their own code.

  Args:
    not_run: by peer, why it did not.
    versions: of the packages that ran.
  """
  return _moment(PEERS, None, {'not_run': not_run, 'versions': versions})


def _moment(name: str, request: Any, detail: dict[str, Any]) -> dict[str, Any]:
  return {
    'kind': 'event',
    'request': request,
    'name': name,
    'start_s': 0.0,
    'end_s': 0.0,
    'detail': detail,
  }


def summary_record(
  name: str,
  value: float | bool | None,
  unit: str,
  n: int,
  low: float | None = None,
  high: float | None = None,
  *,
  label: str = 'measured',
) -> dict[str, Any]:
  """Builds a `summary` record.

  Args:
    name: of the figure.
    value: None if it could not be formed.
    unit: '' for a plain number.
    n: how many measurements are in it.
    low, high: its 90 % interval, if there is one.
    label: one of LABELS.
  """
  if label not in LABELS:
    raise ValueError(f'label={label!r} must be one of {LABELS}')
  return {
    'kind': 'summary',
    'name': name,
    'value': value,
    'unit': unit,
    'label': label,
    'n': n,
    'low': low,
    'high': high,
  }


def environment() -> dict[str, Any]:
  """Returns `device` and `versions` for request records. Starts JAX."""
  import jax

  device = jax.devices()[0]
  versions = {'python': platform.python_version()}
  for package in _PACKAGES:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      versions[package] = importlib.metadata.version(package)
  return {
    'device': f'{jax.device_count()} x {device.device_kind} '
    f'({device.platform}, {os.cpu_count()} cores, {platform.machine()})',
    'versions': versions,
  }


class Writer:
  """Appends records to `results.jsonl`, which is valid line by line always.

  A record goes out in one write. If that fails half-way (a full disk), or if
  an earlier process died in it, the half line is taken out of the file:
  `isolated` is then where it went.
  """

  def __init__(self, workdir: str | os.PathLike[str]):
    """Makes the folder and opens the file.

    Raises:
      WorkdirError: one of them cannot be written.
    """
    self.path = pathlib.Path(workdir) / FILE
    self.isolated: pathlib.Path | None = None
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      self._file = os.open(
        self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
      )
    except OSError as error:
      raise _explained(error, self.path, 'choose another --workdir') from error
    try:
      self._isolate_half_line()
    except BaseException:
      self.close()
      raise

  def __enter__(self) -> 'Writer':
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def close(self) -> None:
    """Closes the file; closing twice is no mistake."""
    if self._file >= 0:
      os.close(self._file)
      self._file = -1

  def write(self, record: dict[str, Any]) -> None:
    """Appends one record.

    Raises:
      WorkdirError: it could not be written whole; the file is as before.
      ValueError: it is no JSON: NaN and infinity have no place in it.
    """
    line = (encode(record) + '\n').encode('ascii')
    before = os.fstat(self._file).st_size
    written = 0
    try:
      while written < len(line):
        written += os.write(self._file, line[written:])
    except BaseException as error:
      if written:
        os.ftruncate(self._file, before)
      if isinstance(error, OSError):
        raise _explained(
          error, self.path, 'free some space or choose another --workdir'
        ) from error
      raise

  def _isolate_half_line(self) -> None:
    size = os.fstat(self._file).st_size
    start = size
    tail = b''
    while start > 0 and b'\n' not in tail:
      step = min(start, 1 << 16)
      start -= step
      tail = os.pread(self._file, step, start) + tail
    half = tail[tail.rfind(b'\n') + 1 :]
    if not half:
      return
    try:
      json.loads(half)
    except ValueError:
      self.isolated = self.path.with_name(FILE + '.broken')
      with self.isolated.open('ab') as broken:
        broken.write(half + b'\n')
      os.ftruncate(self._file, size - len(half))
    else:  # only its end was lost
      os.write(self._file, b'\n')


class Nowhere(Writer):
  """Checks records and keeps none: what all processes but the first have."""

  def __init__(self):
    self.path, self.isolated = pathlib.Path(os.devnull), None
    self._file = -1

  def write(self, record: dict[str, Any]) -> None:
    """Checks one record; see `Writer.write`."""
    encode(record)


def encode(record: dict[str, Any]) -> str:
  """Returns the record as one line of plain ASCII JSON.

  ASCII, since a text may hold characters that some readers take for the end
  of a line (U+2028).

  Raises:
    ValueError: for NaN and infinity, which JSON does not have.
  """
  return json.dumps(record, allow_nan=False, default=_plain)


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
  """Yields the records of a `results.jsonl`.

  Raises:
    ConfigError: a line is no JSON object; the message names it.
  """
  with open(path, 'rb') as file:
    for number, line in enumerate(file, 1):
      yield parse(line, f'{path}:{number}')


def parse(line: bytes, place: str) -> dict[str, Any]:
  """Returns the object of a line of JSON.

  Raises:
    ConfigError: it holds none; the message begins with `place`.
  """
  try:
    record = json.loads(line)
  except (ValueError, RecursionError) as error:  # of the text's encoding, too
    raise ConfigError(f'{place}: no JSON: {error}; remove that line') from error
  require(
    isinstance(record, dict),
    f'{place}: {record!r:.40} must be an object; remove that line',
  )
  return record


def _plain(value: Any) -> Any:
  """Turns numpy's numbers and arrays into Python's."""
  if hasattr(value, 'tolist'):
    return value.tolist()
  if isinstance(value, os.PathLike | datetime.datetime):
    return str(value)
  raise TypeError(f'{type(value).__name__} has no place in a record: {value!r}')


def _explained(error: OSError, path: pathlib.Path, remedy: str) -> WorkdirError:
  where = error.filename or path
  return WorkdirError(f'{str(where)!r}: {error.strerror}; {remedy}')
