# The verbs everybody needs. `make quickstart` and `make test` set themselves up in .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install -q -c constraints.txt
WORKERS ?= 2
SEEDS ?= 10

.PHONY: help quickstart test test-repeat test-latest test-lowest test-all lint format bench docs wheel clean
.DEFAULT_GOAL := help

help:  ## list these verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 14

.venv/core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e .
	@touch $@

.venv/dev: .venv/core
	$(PIP) -e '.[dev,tabular]'
	@touch $@

.venv/docs: .venv/dev
	$(PIP) -e '.[docs]'
	@touch $@

quickstart: .venv/core  ## train a small MoE on the bundled Shakespeare text (3 minutes on 2 cores after set-up)
	$(BIN)/moesaic quickstart

test: .venv/dev  ## the tests that run in minutes
	$(BIN)/python -m pytest -n $(WORKERS)

test-repeat: .venv/dev  ## the suite under SEEDS seeds; after the first only tests that draw random numbers
	$(BIN)/python tests/repeat_seeds.py --seeds $(SEEDS) --workers $(WORKERS)

test-latest:  ## the suite with the newest versions that pyproject.toml allows (torch may be a CUDA build of 5 GB)
	$(PYTHON) -m venv .venv-latest
	.venv-latest/bin/pip install -q --upgrade --upgrade-strategy eager -e '.[dev,tabular]'
	.venv-latest/bin/python -m pytest -n $(WORKERS)

test-lowest:  ## the suite with the oldest versions that pyproject.toml allows
	$(PYTHON) -m venv .venv-lowest
	$(PYTHON) .ci/lowest.py > .venv-lowest/constraints.txt
	.venv-lowest/bin/pip install -q -c .venv-lowest/constraints.txt -e '.[dev,tabular]'
	.venv-lowest/bin/python -m pytest -n $(WORKERS)

test-all: .venv/dev  ## every test, the slow ones too
	$(BIN)/python -m pytest -n $(WORKERS) -m ''

lint: .venv/dev  ## ruff, mypy --strict, import order of the folders
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: .venv/dev  ## let ruff format and mend what it can
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

bench: .venv/dev  ## the speed and quality tables (alone on the machine; resumable)
	$(BIN)/python benchmarks/quickstart.py
	$(BIN)/python benchmarks/tabular.py
	$(BIN)/python benchmarks/fill_docs.py

docs: .venv/docs  ## build the site into site/
	$(BIN)/mkdocs build --strict

wheel: .venv/dev  ## build the wheel and try it outside the tree
	.ci/wheel $(BIN)/python

clean:  ## remove what these verbs made
	rm -rf .venv .venv-latest .venv-lowest dist site .mypy_cache .ruff_cache .pytest_cache
