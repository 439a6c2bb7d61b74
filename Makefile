# Short names for `python -m cookbook`, with the set-up they need. `make` alone lists them.

PYTHON ?= python3
RUN := .venv/bin/python -m cookbook
STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev

# RECIPE=... STRATEGY=... PROCESSES=... SET="a.b=c d.e=f" on the command line, as flags of `python -m cookbook`.
STRATEGY_FLAG = $(if $(STRATEGY),--strategy $(STRATEGY))
PROCESSES_FLAG = $(if $(PROCESSES),--processes $(PROCESSES))
SET_FLAGS = $(foreach assignment,$(SET),--set '$(assignment)')

.DEFAULT_GOAL := help
.PHONY: help setup quickstart train check schema test matrix lint clean

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## */\1\t/' | expand -t 14

setup: $(STAMP)  ## a virtual environment in .venv (PYTHON=python3.12 to choose; 3.11 or newer)

quickstart: $(STAMP)  ## train a small model on this machine, with or without GPUs, and let it write some code
	@$(RUN) launch recipes/quickstart.yaml $(STRATEGY_FLAG) $(PROCESSES_FLAG) $(SET_FLAGS)
	@$(RUN) summary outputs/quickstart
	@$(RUN) sample outputs/quickstart

train: $(if $(RECIPE),$(STAMP))  ## RECIPE=recipes/mine.yaml [STRATEGY=fsdp2] [PROCESSES=2] [SET="optim.learning_rate=1e-5 seed=7"]
	@$(if $(RECIPE),,echo 'make train: write RECIPE=..., for example: make train RECIPE=recipes/quickstart.yaml' >&2; exit 2)
	@$(RUN) launch $(RECIPE) $(STRATEGY_FLAG) $(PROCESSES_FLAG) $(SET_FLAGS)

check: $(STAMP)  ## every recipe and strategy file, or RECIPE=... [STRATEGY=...]; takes a moment
	@$(RUN) check $(RECIPE) $(STRATEGY_FLAG)

schema: $(STAMP)  ## write recipes/schema.json, by which an editor completes and checks recipes
	@$(RUN) schema

test: $(DEV_STAMP)  ## the whole test suite; no GPU and no network needed
	@.venv/bin/python -m pytest -q -n 2 tests

matrix: $(DEV_STAMP)  ## run the equivalence tests and write their table into the README
	@rm -rf outputs/curves
	@CURVES=outputs/curves .venv/bin/python -m pytest -q -n 2 tests/test_equivalence.py -k "not readme"
	@.venv/bin/python benchmarks/equivalence_table.py outputs/curves

lint: $(DEV_STAMP)  ## style, format and types
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

clean:  ## remove caches and .venv; outputs/ stays
	rm -rf .venv .cache .pytest_cache .ruff_cache .mypy_cache nvme_swap
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'make setup: $(PYTHON) is not Python 3.11 or newer; write PYTHON=python3.12, say' >&2; exit 2; }
	@test -x .venv/bin/pip || $(PYTHON) -m venv --clear .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(DEV_STAMP): requirements-dev.txt $(STAMP)
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@
