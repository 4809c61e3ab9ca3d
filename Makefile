# Everything runs in .venv, which is made at first use and again when pyproject.toml or
# requirements/ change. Needs Python >= 3.11 and make, nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HASH := $(shell cat pyproject.toml requirements/*.txt | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.installed-$(HASH)

# Nothing here talks to a model hub; HF_HUB_OFFLINE=0 on the command line lifts that.
HF_HUB_OFFLINE ?= 1
export HF_HUB_OFFLINE
export MPLBACKEND := Agg
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export TOKENIZERS_PARALLELISM := false
# The number of threads is part of the layout that a bitwise test fixes: the tests set it themselves.
unexport OMP_NUM_THREADS

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test test-fast test-slow lint format typecheck clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP) ## make .venv with all that is needed (does nothing when it is up to date)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "flowrl needs Python 3.11 or newer; say which with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Installing into $(VENV): a few minutes the first time"
	$(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	$(BIN)/python -m pip install --quiet -r requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/cpu-nodeps.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

quickstart: $(STAMP) ## train a small model on this machine's CPU
	$(BIN)/flowrl run recipes/quickstart.py

test: lint typecheck ## what CI runs: lint, types, all tests but the slow ones
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-fast: $(STAMP) ## while working: stop at the first failure, load no real model
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not smollm2" -x

test-slow: $(STAMP) ## only the slow tests
	$(BIN)/python -m pytest -m slow

lint: $(STAMP) ## ruff: rules and format, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## ruff: repair what can be repaired
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(STAMP) ## pyright
	$(BIN)/pyright

clean: ## remove .venv and all caches (runs/ stays)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
