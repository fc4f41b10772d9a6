# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode as two jobs of one JobSet on GKE; see docs/pods.md.

    python -m launch.gke --name=lynx --slice=v6e-8 --image=IMAGE --dry-run -- \
        --config=configs/checkpoint.py --config.model.path=gs://BUCKET/MODEL

creates the secret and the JobSet with `kubectl`; where the JobSet fails, the
secret goes too. --dry-run prints the commands and the YAML instead. What
follows `--` goes to both sides. Of a slice of several hosts each runs a pod,
and together they are one side. Decode starts when prefill serves, finds it by
its names in the JobSet's network, and ends both.

It knows no study: roles, addresses and token are all that it adds.
"""

import argparse
import contextlib
import dataclasses
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import yaml


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
  """A node pool.

  Attributes:
    accelerator, topology: labels of its nodes.
    chips: that a pod asks for: those of a host.
    hosts: how many, and so how many pods.
  """

  accelerator: str
  topology: str
  chips: int
  hosts: int = 1


# https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
SLICES = {
  'v5e-8': Slice(accelerator='tpu-v5-lite-podslice', topology='2x4', chips=8),
  'v5p-8': Slice(accelerator='tpu-v5p-slice', topology='2x2x1', chips=4),
  'v6e-8': Slice(accelerator='tpu-v6e-slice', topology='2x4', chips=8),
  'v5e-16': Slice(
    accelerator='tpu-v5-lite-podslice', topology='4x4', chips=4, hosts=4
  ),
  'v5p-16': Slice(
    accelerator='tpu-v5p-slice', topology='2x2x2', chips=4, hosts=2
  ),
  'v6e-16': Slice(
    accelerator='tpu-v6e-slice', topology='4x4', chips=4, hosts=4
  ),
}


# https://kubernetes.io/docs/concepts/overview/working-with-objects/names
_LABEL = '[a-z0-9]([a-z0-9-]*[a-z0-9])?'
_DNS_1123 = re.compile(rf'{_LABEL}(\.{_LABEL})*')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
  """One JobSet.

  Attributes:
    name: of the JobSet and its secret, as DNS has names.
    slice: a key of `SLICES`; each side has one.
    image: built from launch/Dockerfile.
    port: of prefill's control channel.
    claim: a PersistentVolumeClaim for decode's records; None loses them with
      the pod, and leaves its log.
    flags: of `experiments.main`, for both sides.
  """

  name: str
  slice: str
  image: str
  port: int
  claim: str | None
  flags: tuple[str, ...]


def manifest(launch: Launch) -> dict[str, Any]:
  """Returns the JobSet."""
  return {
    'apiVersion': 'jobset.x-k8s.io/v1alpha2',
    'kind': 'JobSet',
    'metadata': {
      'name': launch.name,
      # A job has a node pool, and so a slice, of its own.
      'annotations': {
        'alpha.jobset.sigs.k8s.io/exclusive-topology': (
          'cloud.google.com/gke-nodepool'
        )
      },
    },
    'spec': {
      'startupPolicy': {'startupPolicyOrder': 'InOrder'},
      'successPolicy': {
        'operator': 'All',
        'targetReplicatedJobs': ['decode'],
      },
      'failurePolicy': {'maxRestarts': 0},
      'replicatedJobs': [
        _job('prefill', _prefill(launch), launch, claim=None),
        _job('decode', _decode(launch), launch, claim=launch.claim),
      ],
    },
  }


def _job(
  name: str, container: dict[str, Any], launch: Launch, claim: str | None
) -> dict[str, Any]:
  slice_ = SLICES[launch.slice]
  runs: dict[str, Any] = {'emptyDir': {}}
  if claim is not None:
    runs = {'persistentVolumeClaim': {'claimName': claim}}
  pod = {
    'restartPolicy': 'Never',
    'nodeSelector': {
      'cloud.google.com/gke-tpu-accelerator': slice_.accelerator,
      'cloud.google.com/gke-tpu-topology': slice_.topology,
    },
    'containers': [
      {
        'name': name,
        'image': launch.image,
        'resources': {'limits': {'google.com/tpu': slice_.chips}},
        'volumeMounts': [
          {'name': 'token', 'mountPath': '/token', 'readOnly': True},
          {'name': 'runs', 'mountPath': '/runs'},
        ],
      }
      | container
    ],
    'volumes': [
      {'name': 'token', 'secret': {'secretName': launch.name}},
      {'name': 'runs'} | runs,
    ],
  }
  job = {
    'parallelism': slice_.hosts,
    'completions': slice_.hosts,
    'completionMode': 'Indexed',  # GKE numbers a slice's workers by it
    'backoffLimit': 0,
    'template': {'spec': pod},
  }
  return {'name': name, 'replicas': 1, 'template': {'spec': job}}


def _prefill(launch: Launch) -> dict[str, Any]:
  return {
    'args': [
      *_flags(launch),
      '--role=prefill',
      # Kubernetes puts the pod's own address in.
      f'--listen=$(POD_IP):{launch.port}',
      '--token_file=/token/token',
      '--workdir=/runs',
    ],
    'env': [
      {
        'name': 'POD_IP',
        'valueFrom': {'fieldRef': {'fieldPath': 'status.podIP'}},
      }
    ],
    'ports': [{'containerPort': launch.port}],
    # The model is loaded before the port opens.
    'readinessProbe': {
      'tcpSocket': {'port': launch.port},
      'periodSeconds': 5,
    },
  }


def _decode(launch: Launch) -> dict[str, Any]:
  # JOBSET-JOB-INDEX-POD.SUBDOMAIN, the subdomain being the JobSet's name.
  hosts = [
    f'{launch.name}-prefill-0-{pod}.{launch.name}:{launch.port}'
    for pod in range(SLICES[launch.slice].hosts)
  ]
  return {
    'args': [
      *_flags(launch),
      '--role=decode',
      f'--connect={",".join(hosts)}',
      '--token_file=/token/token',
      '--workdir=/runs',
    ]
  }


def _flags(launch: Launch) -> list[str]:
  several = SLICES[launch.slice].hosts > 1
  # Kubernetes replaces $(NAME) in arguments, and reads $$ as $.
  flags = [flag.replace('$', '$$') for flag in launch.flags]
  return [*flags, *(['--distributed'] if several else [])]


def main(arguments: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--name', required=True, help='of the JobSet')
  parser.add_argument('--slice', required=True, choices=[*SLICES])
  parser.add_argument('--image', required=True, help='of launch/Dockerfile')
  parser.add_argument('--port', type=int, default=7000)
  parser.add_argument('--claim', help='PersistentVolumeClaim for records')
  parser.add_argument('--dry-run', action='store_true', help='prints it all')
  parser.add_argument('flags', nargs='+', help='of experiments.main, after --')
  values = vars(parser.parse_args(arguments))
  dry_run = values.pop('dry_run')
  # Kubernetes would refuse both only when the secret is made.
  if not re.fullmatch(r'[^\s-]\S*', values['image']):
    parser.error(
      f'--image={values["image"]!r}: must name an image, for example '
      'REGISTRY/lynx:1'
    )
  claim = values['claim']
  if claim is not None and not (
    len(claim) < 254 and _DNS_1123.fullmatch(claim)
  ):
    parser.error(
      f'--claim={claim!r}: must be at most 253 of a-z, 0-9, - and ., and begin '
      'and end with a letter or digit'
    )
  # A host's label is at most 63 letters: NAME-prefill-0-N.
  if not re.fullmatch(r'[a-z]([a-z0-9-]{0,44}[a-z0-9])?', values['name']):
    parser.error(
      f'--name={values["name"]}: must be at most 46 of a-z, 0-9 and -, and '
      'begin with a letter'
    )
  if not 0 < values['port'] < 1 << 16:
    parser.error(f'--port={values["port"]} must be in 1..65535')
  if not values['flags'][0].startswith('--config='):
    parser.error(
      f'after -- --config=FILE comes first, not {values["flags"][0]!r}; for '
      'example --config=configs/checkpoint.py'
    )
  launch = Launch(**values | {'flags': tuple(values['flags'])})
  text = yaml.safe_dump(manifest(launch), sort_keys=False)
  if dry_run:
    return _show(launch, text)
  if shutil.which('kubectl') is None:
    return _fail(
      'there is no kubectl on PATH; install it (`gcloud components install '
      'kubectl`), or see with --dry-run what it would be given'
    )
  try:
    return _create(launch, text)
  except KeyboardInterrupt:
    print(
      f'interrupted; `kubectl get secret/{launch.name} jobset/{launch.name}` '
      'shows what is left',
      file=sys.stderr,
    )
    return 130


def _commands(launch: Launch) -> tuple[list[str], list[str]]:
  """Returns what makes the secret, and what makes the JobSet."""
  # Arguments of a process can be read by everybody on its machine.
  token = '--from-file=token=/dev/stdin'
  secret = ['kubectl', 'create', 'secret', 'generic', launch.name, token]
  return secret, ['kubectl', 'apply', '--filename=-']


def _show(launch: Launch, text: str) -> int:
  secret, apply = _commands(launch)
  try:
    print(f'{shlex.join(secret)} <<< TOKEN')
    print(f"{shlex.join(apply)} <<'YAML'\n{text}YAML", flush=True)
  except BrokenPipeError:
    # The reader has gone (`| head`): Python would complain at exit.
    with contextlib.suppress(OSError):
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  return 0


def _create(launch: Launch, text: str) -> int:
  """Makes secret and JobSet; a secret without a JobSet does not stay."""
  secret, apply = _commands(launch)
  token = secrets.token_hex(32)
  done = subprocess.run(secret, input=token, text=True, check=False)
  if done.returncode:  # one of that name may be of a JobSet that runs
    return done.returncode
  status = None
  try:
    done = subprocess.run(apply, input=text, text=True, check=False)
    status = done.returncode
    return status
  finally:
    if status != 0:
      _delete_secret(launch.name)


def _delete_secret(name: str) -> None:
  command = ['kubectl', 'delete', f'secret/{name}']
  done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)
  if done.returncode:
    _fail(
      f'the secret {name} was made and could not be deleted again; '
      f'`{shlex.join(command)}` does it'
    )


def _fail(message: str) -> int:
  print(f'error: {message}', file=sys.stderr)
  return 2


if __name__ == '__main__':
  sys.exit(main())
