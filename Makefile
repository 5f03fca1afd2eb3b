# The commands that people run. Each makes the virtual environment that it needs, once per change of pyproject.toml, from
# nothing but Python >= 3.11 with pip.
#
#   make train ARGS="--steps 50"     options of the job: python -m models.train --help
#   make test PYTHON=python3         use that interpreter with the packages it has, and fetch nothing
#   make test-latest LATEST=python3  likewise, for the newest JAX
#   make -j environments             all environments at once

RUN := $(or $(PYTHON),.venv/bin/python)
ENV := $(if $(PYTHON),,.venv/ready)
TPU_RUN := $(or $(PYTHON),.venv-tpu/bin/python)
TPU_ENV := $(if $(PYTHON),,.venv-tpu/ready)
LATEST ?= $(if $(shell .ci/find-python 3.12),.venv-latest/bin/python)
LATEST_ENV := $(if $(filter .venv-latest/%,$(LATEST)),.venv-latest/ready)

ARGS ?=
PROCESSES ?= 2
PROGRAMS ?= 2000
PYTEST := -m pytest -n 2
TPU_WITHOUT_TPU := JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_WORKER_HOSTNAMES=localhost TPU_ACCELERATOR_TYPE=v5litepod-8

.PHONY: help environments train train-distributed test test-quick test-slow test-processes test-kill conformance check fuzz test-latest test-browser test-tpu lint format clean

help:
	@echo "make train | train-distributed | test | test-quick | test-slow | test-processes | test-kill | conformance | check | fuzz | test-latest | test-browser | test-tpu | lint | format | clean"

environments: $(ENV) $(LATEST_ENV) $(TPU_ENV)

train: $(ENV)
	$(RUN) -m models.train $(ARGS)

# two processes with four virtual devices each; `PROCESSES=4`: four with two
train-distributed: $(ENV)
	$(RUN) -m models.launch $(PROCESSES) $(ARGS)

test: $(ENV)
	$(RUN) $(PYTEST) shardax models tests

# the tests that need no devices and compile nothing; fails too where there are none
test-quick: $(ENV)
	$(RUN) $(PYTEST) --quick tests $(ARGS)

test-slow: $(ENV)
	$(RUN) $(PYTEST) -m 'slow and not tpu' shardax models tests

test-processes: $(ENV)
	$(RUN) -m pytest -m 'processes and not slow' tests

test-kill: $(ENV)
	$(RUN) -m tests.kill --kills 20 $(ARGS)

conformance: $(ENV)
	$(RUN) -m tests.conformance --jobs 2 $(ARGS)

check: $(ENV)
	$(RUN) -m shardax.check --all $(ARGS)

fuzz: $(ENV)
	$(RUN) -m tests.test_random_programs $(PROGRAMS) --jobs 2 $(ARGS)

test-latest: $(LATEST_ENV)
ifeq ($(LATEST),)
	@echo "test-latest SKIPPED: the newest JAX needs Python >= 3.12, and none is on PATH or in pyenv's versions"
else
	$(LATEST) -c "import jax, sys; print('test-latest: JAX', jax.__version__, 'on Python', sys.version.split()[0])"
	JAX_ENABLE_CHECKS=1 $(LATEST) $(PYTEST) $(ARGS) shardax models tests
endif

test-browser: $(ENV)
	PATH="$$(.ci/browser $(RUN)):$$PATH" $(RUN) -m pytest -rs -m browser tests/test_browser.py

test-tpu: $(TPU_ENV)
	$(TPU_WITHOUT_TPU) $(TPU_RUN) -m pytest -m tpu $(ARGS) tests/test_tpu.py tests/test_benchmarks_tpu.py tests/test_passes_casts.py tests/test_passes_unrolled.py tests/test_lookups.py tests/test_zero_offload.py tests/test_zero_stacks.py tests/test_zero_by_cost.py

lint: $(ENV)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m pyright --pythonpath $(RUN)
	$(RUN) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

format: $(ENV)
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

clean:
	rm -rf .venv .venv-latest .venv-tpu out build dist

# make-env <folder> <least Python> <extras>
define make-env
	@.ci/find-python $(2) > /dev/null || { echo "Python >= $(2) with venv and pip was not found: put one on PATH"; exit 1; }
	rm -rf $(1)
	"$$(.ci/find-python $(2))" -m venv $(1)
	$(1)/bin/python -m pip install --quiet --editable ".[$(3)]"
	touch $(1)/ready
endef

.venv/ready: pyproject.toml
	$(call make-env,.venv,3.11,dev)

.venv-latest/ready: pyproject.toml
	$(call make-env,.venv-latest,3.12,dev)

.venv-tpu/ready: pyproject.toml
	$(call make-env,.venv-tpu,3.11,dev$(comma)tpu)

comma := ,
