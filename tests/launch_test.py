# SPDX-License-Identifier: Apache-2.0
"""Launch scripts print, without a cloud, commands that our own flags accept."""

import contextlib
import math
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time

import pytest
import yaml

from experiments import cli, options
from launch import gke

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / 'launch' / 'tpu_vm.sh'
SLICES = ('--zone=z', '--prefill=one', '--decode=two')
FLAGS = ('--config=configs/tiny.py', "--config.model.path=gs://it's/a model")


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
  monkeypatch.chdir(ROOT)


def tool(folder: pathlib.Path, name: str, body: str) -> pathlib.Path:
  """Makes a command that stands before the machine's own."""
  file = folder / name
  file.write_text(f'#!/bin/bash\n{body}')
  file.chmod(0o755)
  return folder


def script(
  *arguments: str, tools: pathlib.Path | None = None, cwd: pathlib.Path = ROOT
) -> subprocess.CompletedProcess:
  """Runs the script, which calls no gcloud but that of `tools`."""
  with tempfile.TemporaryDirectory() as empty:
    if tools is None:
      tools = tool(pathlib.Path(empty), 'gcloud', 'echo called: "$*"; exit 9')
    return subprocess.run(
      [SCRIPT, *arguments],
      capture_output=True,
      text=True,
      check=False,
      cwd=cwd,
      env={'PATH': f'{tools}:/usr/bin:/bin'},
    )


def called(tmp_path, addresses: str, *arguments: str) -> list[list[str]]:
  """Runs the script with a gcloud that knows addresses; returns its calls."""
  log, gcloud = tmp_path / 'log', tmp_path / 'gcloud'
  gcloud.write_text(
    '#!/bin/bash\n'
    f'printf "%s\\0" "$@" $\'\\n\' >> {shlex.quote(str(log))}\n'
    f'[[ $4 != describe ]] || echo {shlex.quote(addresses)}\n'
  )
  gcloud.chmod(0o755)
  done = subprocess.run(
    [SCRIPT, *SLICES, *arguments],
    capture_output=True,
    text=True,
    check=False,
    env={'PATH': f'{tmp_path}:/usr/bin:/bin'},
  )
  assert done.returncode == 0, done.stderr
  return [call.split('\0')[:-1] for call in log.read_text().split('\n\0')][:-1]


def printed(*arguments: str, cwd: pathlib.Path = ROOT) -> list[list[str]]:
  done = script(*SLICES, '--dry-run', *arguments, cwd=cwd)
  assert done.returncode == 0, done.stderr
  return [shlex.split(line) for line in done.stdout.splitlines()]


def remote(command: list[str]) -> str:
  """Returns what a command runs on a slice; it must be bash."""
  (text,) = [
    word.removeprefix('--command=')
    for word in command
    if word.startswith('--command=')
  ]
  subprocess.run(['bash', '-n', '-c', text], check=True)
  return text


def accepted(words: list[str]) -> options.Options | None:
  """Returns what our command line makes of flags, if it takes them."""
  _, own = cli._parse(['main', *words])
  return options.read(own)


def test_shell_scripts_are_bash():
  scripts = sorted(ROOT.glob('launch/*.sh'))
  assert SCRIPT in scripts
  for each in scripts:
    assert os.access(each, os.X_OK)
    assert 'set -euo pipefail' in each.read_text('utf-8')
    subprocess.run(['bash', '-n', each], check=True)


@pytest.mark.parametrize('step', ['run', 'preflight'])
def test_both_sides_get_the_flags_and_each_its_role(step):
  start, decode, stop = printed(step, *FLAGS)
  found = {}
  for command in (start, decode):
    assert command[:5] == ['gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh']
    assert '--worker=all' in command
    text = remote(command)
    assert text.startswith('cd lynx-jax && ')
    words = re.search(r'-m experiments\.main (.*?)( </dev/null|$)', text, re.S)
    flags = shlex.split(words[1])
    assert [flag for flag in FLAGS if flag not in flags] == []
    assert ('--config.study=preflight' in flags) == (step == 'preflight')
    found[command[5]] = accepted(flags)
  assert found['one'].role is options.Role.PREFILL
  assert found['two'].role is options.Role.DECODE
  assert found['one'].listen == found['two'].connect
  assert found['one'].token_file == found['two'].token_file == '.token'
  assert 'kill -TERM' in remote(stop)


def test_every_host_of_a_slice_is_a_process_of_its_side(tmp_path):
  """Between addresses gcloud puts semicolons."""
  calls = called(tmp_path, '10.0.0.1;10.0.0.2', '--port=70', 'run', *FLAGS)
  commands = [['gcloud', *call] for call in calls]
  describe, start, decode, _ = commands
  assert describe[4] == 'describe'
  found = []
  for command in (start, decode):
    words = re.search(
      r'-m experiments\.main (.*?)( </dev/null|$)', remote(command), re.S
    )
    given = accepted(shlex.split(words[1]))
    assert given.distributed
    found.append([given.of(i, 2) for i in range(2)])
  prefills, decodes = found
  addresses = ['10.0.0.1:70', '10.0.0.2:70']
  assert [one.listen for one in prefills] == addresses
  assert [one.connect for one in decodes] == addresses


@pytest.mark.parametrize('fails', ['start', 'decode'])
def test_prefill_ends_however_the_run_does(tmp_path, fails):
  """A remote command that fails, or a log of an earlier run, leaves none."""
  log, gcloud = tmp_path / 'log', tmp_path / 'gcloud'
  word = {'start': '*nohup*', 'decode': '*role=decode*'}[fails]
  gcloud.write_text(
    '#!/bin/bash\n'
    f'printf "%s\\0" "$*" >> {shlex.quote(str(log))}\n'
    f'[[ $4 != describe ]] || echo 10.0.0.1; [[ $* != {word} ]]\n'
  )
  gcloud.chmod(0o755)
  done = subprocess.run(
    [SCRIPT, *SLICES, 'run', *FLAGS],
    check=False,
    env={'PATH': f'{tmp_path}:/usr/bin:/bin'},
  )
  assert done.returncode == 1
  calls = log.read_text().split('\0')[:-1]
  assert 'kill -TERM' in calls[-1]
  assert sum('kill -TERM' in call for call in calls) == 1


def test_the_log_of_an_earlier_run_is_not_this_one_serving(tmp_path):
  start, *_ = printed('run', *FLAGS)
  home = tmp_path / 'lynx-jax'
  (home / 'runs').mkdir(parents=True)
  (home / 'runs' / 'prefill.log').write_text('prefill serves 10.0.0.1:7000\n')
  python = home / '.venv' / 'bin' / 'python'
  python.parent.mkdir(parents=True)
  python.write_text('#!/bin/sh\nsleep 0.2; echo the port is taken; exit 1\n')
  python.chmod(0o755)
  done = subprocess.run(
    ['bash', '-c', remote(start)],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 1
  assert 'the port is taken' in done.stdout


@pytest.mark.parametrize(
  'accelerator, version',
  [
    ('v5litepod-8', 'v2-alpha-tpuv5-lite'),
    ('v5p-8', 'v2-alpha-tpuv5'),
    ('v6e-8', 'v2-alpha-tpuv6e'),
    ('v6e-16', 'v2-alpha-tpuv6e'),
  ],
)
def test_slices_are_made_with_the_runtime_of_their_generation(
  accelerator, version
):
  commands = printed('--project=p', 'create', accelerator)
  assert [command[4:6] for command in commands] == [
    ['create', 'one'],
    ['create', 'two'],
  ]
  for command in commands:
    assert f'--accelerator-type={accelerator}' in command
    assert f'--version={version}' in command
    assert '--project=p' in command


def test_setup_installs_the_pinned_jax_on_both_slices():
  _, *commands = printed('setup')
  copies, installs = commands[::2], commands[1::2]
  assert [command[5:7] for command in installs] == [
    ['one', '--worker=all'],
    ['two', '--worker=all'],
  ]
  assert all(command[4] == 'scp' for command in copies)
  (pin,) = re.findall(
    r'^jax==(\S+)', (ROOT / 'requirements.lock').read_text(), re.M
  )
  for command in installs:
    assert f"'jax[tpu]=={pin}'" in remote(command)


@pytest.mark.parametrize(
  'arguments, message',
  [
    (['run', *FLAGS], '--zone, --prefill and --decode are needed'),
    ([*SLICES, '--dry-run', 'run'], 'run needs --config=FILE first'),
    ([*SLICES, '--dry-run', 'create', 'v4-8'], 'create v4-8: must be'),
    ([*SLICES, '--dry', 'run'], '--dry is no option'),
    ([*SLICES, 'start'], 'start is no step'),
    ([*SLICES, '--port=70x', 'run'], '--port=70x must be in 1..65535'),
    ([*SLICES, '--port=70000', 'run'], '--port=70000 must be in'),
    ([*SLICES, '--decode=one', 'run'], 'must be two slices'),
  ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
  done = script(*arguments)
  assert done.returncode == 2
  assert message in done.stderr
  assert done.stderr.count('\n') == 1
  assert done.stdout == ''


STEPS = (
  ['create', 'v6e-8'],
  ['setup'],
  ['preflight', *FLAGS],
  ['run', *FLAGS],
  ['fetch', 'F'],
  ['delete'],
)


@pytest.mark.parametrize('words', STEPS, ids=lambda words: words[0])
def test_a_dry_run_may_be_asked_for_behind_the_step(words):
  step, *rest = words
  before = script(*SLICES, '--dry-run', *words)
  after = script(*SLICES, step, '--dry-run', *rest)
  assert before.returncode == after.returncode == 0, after.stderr
  assert 'gcloud' in before.stdout
  assert after.stdout == before.stdout
  if step in ('create', 'fetch'):
    last = script(*SLICES, *words, '--dry-run')
    assert (last.returncode, last.stdout) == (0, before.stdout)


@pytest.mark.parametrize('step', ['run', 'preflight'])
@pytest.mark.parametrize('flag', ['--dry-run', '--dry_run', '--dry-run=true'])
def test_a_dry_run_among_the_flags_of_a_run_is_refused(step, flag):
  done = script(*SLICES, step, *FLAGS, flag)
  assert (done.returncode, done.stdout) == (2, '')
  assert done.stderr == (
    f'error: {flag} must stand before the flags of {step}\n'
  )


@pytest.mark.parametrize(
  'words, surplus',
  [
    (['create', 'v6e-8', 'v6e-16'], 'v6e-16'),
    (['create', 'v6e-8', '--spot'], '--spot'),
    (['setup', 'now'], 'now'),
    (['fetch', 'F', 'G'], 'G'),
    (['fetch', '--dryrun'], '--dryrun'),
    (['delete', 'one'], 'one'),
    (['delete', ''], ''),
  ],
)
def test_what_a_step_does_not_take_is_refused_with_the_usage(words, surplus):
  done = script(*SLICES, *words)
  assert (done.returncode, done.stdout) == (2, '')
  error, *usage = done.stderr.splitlines()
  assert error == f'error: {words[0]} does not take {surplus!r}'
  assert any('--dry-run' in line for line in usage)


@pytest.mark.parametrize('statuses', [(0, 0), (3, 0), (0, 3), (3, 1), (1, 3)])
@pytest.mark.parametrize('words', [['delete'], ['fetch', 'F']])
def test_a_slice_that_fails_does_not_keep_the_other(tmp_path, words, statuses):
  """Slices cost until they are deleted; of records, one side is something."""
  one, two = statuses
  tool(
    tmp_path,
    'gcloud',
    f'echo "$*"; [[ "$*" != *" one"[\\ :]* ]] || exit {one}\n'
    f'[[ "$*" != *" two"[\\ :]* ]] || exit {two}\n',
  )
  done = script(*SLICES, *words, tools=tmp_path, cwd=tmp_path)
  assert done.returncode == max(statuses)
  calls = done.stdout.splitlines()
  first = {'delete': 'one', 'fetch': 'two:'}[words[0]]
  second = {'delete': 'two', 'fetch': 'one:'}[words[0]]
  assert len(calls) == 2
  assert f' {first}' in calls[0]
  assert f' {second}' in calls[1]
  for name, status in zip(('one', 'two'), statuses, strict=True):
    told = f'{words[0]} of {name} ended with {status}' in done.stderr
    assert told == (status != 0)


@pytest.mark.parametrize('fails', ['one', 'two'])
def test_what_was_created_before_a_failure_is_named(tmp_path, fails):
  tool(tmp_path, 'gcloud', f'[[ "$4 $5" != "create {fails}" ]]\n')
  done = script(*SLICES, 'create', 'v6e-8', tools=tmp_path)
  assert done.returncode == 1
  said = f'create of {fails} ended with 1'
  if fails == 'two':
    said += "; one is there, and costs until 'delete'"
  assert done.stderr == said + '\n'


def test_ctrl_c_leaves_the_slice_alone_that_has_its_turn_next(tmp_path):
  """What runs ends by itself then, with a status of its own."""
  log = tmp_path / 'log'
  tool(
    tmp_path,
    'gcloud',
    f'trap "exit 1" INT; echo "$*" >> {shlex.quote(str(log))}\n'
    'for _ in {1..300}; do sleep 0.1; done\n',
  )
  process = subprocess.Popen(
    [SCRIPT, *SLICES, 'delete'],
    stderr=subprocess.DEVNULL,
    env={'PATH': f'{tmp_path}:/usr/bin:/bin'},
    start_new_session=True,
  )
  try:
    for _ in range(300):
      if log.exists() and log.read_text():
        break
      time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(timeout=30) == 130
  finally:
    with contextlib.suppress(ProcessLookupError):  # whoever is left
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
  assert len(log.read_text().splitlines()) == 1


def test_a_folder_is_one_of_the_caller(tmp_path):
  make, *copies = printed('fetch', 'runs/pod', cwd=tmp_path)
  assert make == ['mkdir', '-p', f'{tmp_path}/runs/pod']
  assert [copy[7] for copy in copies] == [
    f'{tmp_path}/runs/pod/two',
    f'{tmp_path}/runs/pod/one',
  ]
  make, *_ = printed('fetch', '/at/a root', cwd=tmp_path)
  assert make[-1] == '/at/a root'


def rendered(capsys, *more: str, slice_: str = 'v6e-8') -> dict:
  arguments = ['--name=lynx', f'--slice={slice_}', '--image=registry/lynx:1']
  assert gke.main([*arguments, '--dry-run', *more, '--', *FLAGS]) == 0
  out = capsys.readouterr().out
  secret, apply, *lines, end = out.splitlines()
  assert secret == (
    'kubectl create secret generic lynx --from-file=token=/dev/stdin <<< TOKEN'
  )
  assert apply.startswith('kubectl apply')
  assert end == 'YAML'
  return yaml.safe_load('\n'.join(lines))


def test_the_token_is_no_argument(tmp_path, monkeypatch):
  """Everybody on a machine can read those of its processes."""
  kubectl, log = tmp_path / 'kubectl', tmp_path / 'log'
  kubectl.write_text(
    f'#!/bin/bash\n(echo "$@"; cat; echo) >> {shlex.quote(str(log))}\n'
  )
  kubectl.chmod(0o755)
  monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
  arguments = ['--name=lynx', '--slice=v6e-8', '--image=registry/lynx:1']
  assert gke.main([*arguments, '--', *FLAGS]) == 0
  secret, token, apply, *_ = log.read_text().splitlines()
  assert secret == 'create secret generic lynx --from-file=token=/dev/stdin'
  assert len(token) == 64
  assert apply == 'apply --filename=-'


KUBECTL = """
log={log}
echo "$*" >> $log
cat > /dev/null
[[ $1 != apply ]] || exit {apply}
[[ $1 != delete ]] || exit {delete}
"""


def kubectl(tmp_path, monkeypatch, **statuses: int) -> pathlib.Path:
  """Puts a kubectl on PATH that ends with statuses; returns its log."""
  log = tmp_path / 'log'
  defaults = {'apply': 0, 'delete': 0}
  body = KUBECTL.format(log=shlex.quote(str(log)), **defaults | statuses)
  tool(tmp_path, 'kubectl', body)
  monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
  return log


@pytest.mark.parametrize('deleted', [0, 1])
def test_a_secret_without_its_jobset_does_not_stay(
  tmp_path, monkeypatch, capsys, deleted
):
  """Else the next try fails for its name."""
  log = kubectl(tmp_path, monkeypatch, apply=7, delete=deleted)
  arguments = ['--name=lynx', '--slice=v6e-8', '--image=registry/lynx:1']
  assert gke.main([*arguments, '--', *FLAGS]) == 7
  assert log.read_text().splitlines()[-1] == 'delete secret/lynx'
  told = 'kubectl delete secret/lynx' in capsys.readouterr().err
  assert told == bool(deleted)


def test_a_secret_of_a_jobset_stays(tmp_path, monkeypatch):
  log = kubectl(tmp_path, monkeypatch)
  arguments = ['--name=lynx', '--slice=v6e-8', '--image=registry/lynx:1']
  assert gke.main([*arguments, '--', *FLAGS]) == 0
  assert 'delete' not in log.read_text()


def test_without_kubectl_one_line_says_so(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv('PATH', str(tmp_path))
  arguments = ['--name=lynx', '--slice=v6e-8', '--image=registry/lynx:1']
  assert gke.main([*arguments, '--', *FLAGS]) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: there is no kubectl on PATH; install it')
  assert error.count('\n') == 1


def test_a_reader_that_leaves_is_no_traceback():
  """As of `--dry-run | head -3`; the pipe is closed before it is written."""
  read, write = os.pipe()
  os.close(read)
  arguments = ['--name=lynx', '--slice=v6e-8', '--image=i', '--dry-run']
  done = subprocess.run(
    [sys.executable, '-m', 'launch.gke', *arguments, '--', *FLAGS],
    stdout=write,
    stderr=subprocess.PIPE,
    text=True,
    check=False,
  )
  os.close(write)
  assert (done.returncode, done.stderr) == (1, '')


def test_a_jobset_has_two_jobs_on_slices_of_their_own(capsys):
  made = rendered(capsys)
  assert made['apiVersion'] == 'jobset.x-k8s.io/v1alpha2'
  assert made['kind'] == 'JobSet'
  exclusive = 'alpha.jobset.sigs.k8s.io/exclusive-topology'
  assert made['metadata']['name'] == 'lynx'
  assert made['metadata']['annotations'][exclusive].endswith('gke-nodepool')
  spec = made['spec']
  assert spec['startupPolicy'] == {'startupPolicyOrder': 'InOrder'}
  assert spec['successPolicy']['targetReplicatedJobs'] == ['decode']
  prefill, decode = spec['replicatedJobs']
  assert (prefill['name'], decode['name']) == ('prefill', 'decode')
  found = []
  for job in (prefill, decode):
    assert job['replicas'] == 1
    batch = job['template']['spec']
    assert (batch['parallelism'], batch['completions']) == (1, 1)
    pod = batch['template']['spec']
    assert pod['restartPolicy'] == 'Never'  # a Job takes no Always
    assert pod['nodeSelector'] == {
      'cloud.google.com/gke-tpu-accelerator': 'tpu-v6e-slice',
      'cloud.google.com/gke-tpu-topology': '2x4',
    }
    (container,) = pod['containers']
    assert container['image'] == 'registry/lynx:1'
    assert container['resources']['limits'] == {'google.com/tpu': 8}
    mounted = {mount['name'] for mount in container['volumeMounts']}
    assert mounted == {volume['name'] for volume in pod['volumes']}
    assert [*FLAGS] == container['args'][: len(FLAGS)]
    words = [a.replace('$(POD_IP)', '10.0.0.1') for a in container['args']]
    found.append((accepted(words), container))
  (one, serves), (two, _) = found
  assert one.role is options.Role.PREFILL
  assert two.role is options.Role.DECODE
  # Decode starts once the port that it connects to is open.
  assert two.connect == 'lynx-prefill-0-0.lynx:7000'
  assert one.listen.endswith(':7000')
  assert serves['readinessProbe']['tcpSocket']['port'] == 7000
  assert serves['ports'] == [{'containerPort': 7000}]
  assert [e['name'] for e in serves['env']] == ['POD_IP']


@pytest.mark.parametrize(
  'name', [n for n, s in gke.SLICES.items() if s.hosts > 1]
)
def test_a_job_has_a_pod_for_every_host(capsys, name):
  slice_ = gke.SLICES[name]
  sizes = [int(size) for size in slice_.topology.split('x')]
  assert math.prod(sizes) == slice_.chips * slice_.hosts
  prefill, decode = rendered(capsys, slice_=name)['spec']['replicatedJobs']
  found = []
  for job in (prefill, decode):
    batch = job['template']['spec']
    assert batch['parallelism'] == batch['completions'] == slice_.hosts
    assert batch['completionMode'] == 'Indexed'
    (container,) = batch['template']['spec']['containers']
    assert container['resources']['limits'] == {'google.com/tpu': slice_.chips}
    words = [a.replace('$(POD_IP)', '10.0.0.1') for a in container['args']]
    found.append(accepted(words))
  one, two = found
  for pod in range(slice_.hosts):
    # Every pod has an address of its own, and decode knows all their names.
    assert one.of(pod, slice_.hosts).listen == '10.0.0.1:7000'
    name = two.of(pod, slice_.hosts).connect
    assert name == f'lynx-prefill-0-{pod}.lynx:7000'


@pytest.mark.parametrize(
  'more, message',
  [
    (['--port=70000', '--', '--config=x'], '--port=70000 must be in 1..65535'),
    (['--', '--workdir=x'], "comes first, not '--workdir=x'"),
    (['--image=', '--', '--config=x'], "--image='': must name an image"),
    (['--image=a b', '--', '--config=x'], "--image='a b': must name"),
    (['--claim=a b', '--', '--config=x'], "--claim='a b': must be at most"),
    (['--claim=', '--', '--config=x'], "--claim='': must be at most"),
    (['--claim=Mine', '--', '--config=x'], "--claim='Mine': must be"),
    (['--claim=a..b', '--', '--config=x'], "--claim='a..b': must be"),
    ([f'--claim={"a" * 254}', '--', '--config=x'], "a': must be at most"),
  ],
)
def test_a_mistake_in_flags_of_a_jobset(capsys, more, message):
  with pytest.raises(SystemExit) as ended:
    gke.main(['--name=n', '--slice=v6e-8', '--image=i', *more])
  assert ended.value.code == 2
  assert message in capsys.readouterr().err


def test_kubernetes_replaces_nothing_in_what_a_user_writes():
  """It reads $$ as $, and puts variables in."""
  flags = ('--config=c', '--config.prompt_file=$(POD_IP)/$$a b')
  launch = gke.Launch(
    name='n', slice='v6e-8', image='i', port=1, claim=None, flags=flags
  )
  (container,) = gke.manifest(launch)['spec']['replicatedJobs'][0]['template'][
    'spec'
  ]['template']['spec']['containers']
  _, written, *own = container['args']
  assert written.replace('$$', '$') == flags[1]
  assert '$(' not in written.replace('$$', '')
  assert '--listen=$(POD_IP):1' in own


def test_records_go_to_a_claim(capsys):
  prefill, decode = rendered(capsys, '--claim=mine')['spec']['replicatedJobs']
  kept = {'name': 'runs', 'persistentVolumeClaim': {'claimName': 'mine'}}
  volumes = [
    job['template']['spec']['template']['spec']['volumes']
    for job in (prefill, decode)
  ]
  assert [kept in each for each in volumes] == [False, True]


@pytest.mark.parametrize('name', ['Lynx', '1x', 'a' * 47, 'x-'])
def test_a_name_that_dns_refuses(capsys, name):
  arguments = [
    f'--name={name}',
    '--slice=v6e-8',
    '--image=i',
    '--',
    '--config=x',
  ]
  with pytest.raises(SystemExit) as ended:
    gke.main(arguments)
  assert ended.value.code == 2
  assert 'must be at most 46' in capsys.readouterr().err
