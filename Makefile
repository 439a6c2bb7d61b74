# What is installed, trained and tested with a word; all else is the command `cookbook`, which `make setup` writes.

PYTHON ?= python3
COOKBOOK := .venv/bin/python -m cookbook
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check
STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev

STRATEGY_FLAG = $(if $(STRATEGY),--strategy $(STRATEGY))

# Where the quickstart writes: --set run.output_dir=... among ARGS, or what its recipe has.
OUTPUT_DIRS = $(filter run.output_dir=%,$(patsubst --set=%,%,$(ARGS)))
QUICKSTART_RUN = $(or $(patsubst run.output_dir=%,%,$(lastword $(OUTPUT_DIRS))),outputs/quickstart)

# As many workers as the cores of CI: each costs 20 s of a core before its first test, and the runs of a test have
# processes of their own. Without compiled files beside the sources each of hundreds would compile all that it imports.
PYTEST = env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest -q -n $(or $(WORKERS),2) --dist worksteal

# Of pyproject.toml, for the tests.
GROUPS := --group dev --group fp8 --group trackers --group peers --group site

# Compilers and headers. Tests that lack them are skipped, or fail with SKIP_NOTHING, as where a record is written.
BUILD_NEEDS = sh system.sh .venv/bin/python build

.DEFAULT_GOAL := help
.PHONY: help help-dev setup quickstart finetune-7b test clean \
  test-long test-all test-newest lint mutants soak steady matrix simulated-gpus test-gpu test-gpu-node \
  lock audit site

# After `##`, what `make` lists; after `##-`, what `make help-dev` does.
LISTED = sed -nE 's/^([a-z0-9-]+):.*$(1) +/\1\t/p' Makefile | expand -t $(2)

help:  ## this list; make help-dev has the targets of maintainers
	@$(call LISTED,##,13)
	@echo
	@echo 'ARGS: flags of cookbook launch: make quickstart ARGS="--set run.max_steps=50"'
	@echo 'All else: source .venv/bin/activate, then cookbook -h'

help-dev:  ##- this list
	@$(call LISTED,##-,16)

setup: $(STAMP)  ## [PYTHON=python3.12] a virtual environment in .venv
	@echo 'For the command cookbook: source .venv/bin/activate'

quickstart: $(STAMP)  ## [STRATEGY=zero3] [ARGS=...] train a small model here, and try it
	@$(COOKBOOK) launch recipes/quickstart.yaml $(STRATEGY_FLAG) $(ARGS)
ifeq ($(filter --dry-run,$(ARGS)),)
	@$(COOKBOOK) report $(QUICKSTART_RUN)
	@$(COOKBOOK) chat $(QUICKSTART_RUN) --prompt 'Write `def get_name(self)`: Return the name.' --max-new-tokens 100
endif

finetune-7b: $(STAMP)  ## [STRATEGY=fsdp2] [ARGS=...] train Qwen2.5-7B, or what it needs
	@$(COOKBOOK) launch recipes/qwen25_7b/sft.yaml $(STRATEGY_FLAG) $(ARGS)

test: $(DEV_STAMP)  ## [TESTS=...] [WORKERS=2] the quick tests; no GPU, no network needed
	@$(BUILD_NEEDS)
	@$(PYTEST) $(TESTS)

test-long: $(DEV_STAMP)  ##- [TESTS=...] [WORKERS=2] the slow tests, all rehearsals too
	@$(BUILD_NEEDS)
	@$(PYTEST) -m due $(TESTS)

test-all: $(DEV_STAMP)  ##- [TESTS=...] [WORKERS=2] all: every column under every strategy
	@$(BUILD_NEEDS)
	@$(PYTEST) -m "slow or not slow" $(TESTS)

test-newest:  ##- [ARGS="--turn 3"] the tests with the newest libraries
	@sh system.sh $(PYTHON) venv
	@sh system.sh $(PYTHON) build
	@$(PYTHON) tests/newest.py $(GROUPS) $(ARGS)

soak: $(DEV_STAMP)  ##- [ARGS="--kills 30"] kill runs at random; curves must not change
	@.venv/bin/python tests/soak.py $(ARGS)

matrix: $(DEV_STAMP)  ##- [WORKERS=2] equivalence tests; write their table and picture
	@$(BUILD_NEEDS)
	@rm -rf outputs/curves
	@SKIP_NOTHING=1 CURVES=outputs/curves $(PYTEST) -m "slow or not slow" -k "not recorded" \
	  tests/test_equivalence.py tests/test_equivalence_features.py
	@.venv/bin/python benchmarks/equivalence_table.py outputs/curves

simulated-gpus: $(DEV_STAMP)  ##- [WORKERS=2] GPU tests on simulated GPUs; write their record
	@$(BUILD_NEEDS)
	@rm -rf outputs/simulated_gpus
	@SKIP_NOTHING=1 GPU_RUNS=outputs/simulated_gpus $(PYTEST) -m "not thorough" tests/test_gpu_*.py
	@.venv/bin/python benchmarks/gpu_runs.py outputs/simulated_gpus

mutants: $(DEV_STAMP)  ##- [AREA=rows] plant known faults in a copy; tests must notice
	@.venv/bin/python tests/mutants.py $(AREA)

steady: $(DEV_STAMP)  ##- [ARGS="--steps 2000"] a long run whose memory must not grow
	@.venv/bin/python tests/steady.py $(ARGS)

test-gpu: $(DEV_STAMP)  ##- [WORKERS=4] GPU tests on this machine's GPUs
	@$(BUILD_NEEDS)
	@rm -rf outputs/real_gpus
	@REAL_GPUS=1 GPU_RUNS=outputs/real_gpus $(PYTEST) -n $(or $(WORKERS),4) -m "not thorough" tests/test_gpu_*.py; code=$$?; \
	  .venv/bin/python benchmarks/gpu_runs.py outputs/real_gpus --compare && exit $$code

test-gpu-node: $(STAMP)  ##- [ARGS="--parts widths"] the first ten minutes on rented GPUs
	@.venv/bin/python benchmarks/gpu_node/run.py $(ARGS)

lint: $(DEV_STAMP)  ##- style, format and types
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

TOOLS := .cache/tools

lock: $(TOOLS)/.installed  ##- write requirements.lock from requirements.txt, with digests
	@head -2 requirements.lock > $(TOOLS)/lock
	@$(TOOLS)/bin/uv pip compile requirements.txt --quiet \
	  --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate --no-header \
	  -o $(TOOLS)/body
	@cat $(TOOLS)/lock $(TOOLS)/body > requirements.lock

audit: $(TOOLS)/.installed  ##- known vulnerabilities of the lock; needs the network
	@$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes -r requirements.lock

$(TOOLS)/.installed:
	@sh system.sh $(PYTHON) venv && $(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/pip install --quiet --disable-pip-version-check uv==0.13.8 pip-audit==2.10.1
	@touch $@

site: $(DEV_STAMP)  ##- [ARGS="--repository https://..."] the pages with search
	@.venv/bin/python -m website.build $(ARGS)

clean:  ## remove caches and .venv; outputs/ stays
	rm -rf .venv .cache .pytest_cache .ruff_cache .mypy_cache nvme_swap build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'make setup: $(PYTHON) is not Python 3.11 or newer; write PYTHON=python3.12, say' >&2; exit 2; }
	@test -x .venv/bin/pip || { sh system.sh $(PYTHON) venv && $(PYTHON) -m venv --clear .venv; }
	@$(PIP) --upgrade 'pip>=25.1'  # for --group
	@$(PIP) -r requirements.txt
	@printf '#!/bin/sh\nexport PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"\nexec "$(CURDIR)/.venv/bin/python" -m cookbook "$$@"\n' > .venv/bin/cookbook
	@chmod +x .venv/bin/cookbook
	@touch $@

$(DEV_STAMP): pyproject.toml $(STAMP)
	@$(PIP) -r requirements.txt $(GROUPS)
	@$(PIP) --no-deps --upgrade --target .cache/with_timm --group timm
	@touch $@
