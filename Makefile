# What is installed, trained and tested with a word; all else is the command `cookbook`, which `make setup` writes.

PYTHON ?= python3
COOKBOOK := .venv/bin/python -m cookbook
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check
STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev

# Each command is also a target: make plan ARGS="recipes/quickstart.yaml --gpus 8xH100". None in an image that is built,
# where the set-up comes before the code.
VERBS := $(shell sed -n '/^for command in (/,/^)/s/^    \([a-z_]*\),/\1/p' cookbook/commands/cli.py 2>/dev/null | tr _ -)

STRATEGY_FLAG = $(if $(STRATEGY),--strategy $(STRATEGY))

# Where the quickstart writes: --set run.output_dir=... among ARGS, or what its recipe has.
OUTPUT_DIRS = $(filter run.output_dir=%,$(patsubst --set=%,%,$(ARGS)))
QUICKSTART_RUN = $(or $(patsubst run.output_dir=%,%,$(lastword $(OUTPUT_DIRS))),outputs/quickstart)

TESTS ?= tests simulated_gpus/tests
# One more worker than the cores of CI: a test that waits leaves its core to another.
TEST_WORKERS = $(or $(WORKERS),3)

# Compilers and headers. Tests that lack them are skipped, or fail with SKIP_NOTHING, as where a record is written.
BUILD_NEEDS = sh system.sh .venv/bin/python build

# A variable that the help of no target on the command line names would be ignored, STRATGY=zero3 for example.
# A make that another one starts gets the variables of that one too.
ifeq ($(MAKELEVEL),0)
GOALS := $(or $(strip $(MAKECMDGOALS)),help)
ifneq ($(filter train,$(GOALS)),)
$(error make train: write cookbook launch RECIPE, or make launch ARGS="RECIPE --strategy zero3")
endif
GIVEN := $(strip $(foreach name,$(.VARIABLES),$(if $(findstring command,$(origin $(name))),$(name))))
GIVEN := $(filter-out SHELL MAKEFLAGS,$(GIVEN))
ifneq ($(GIVEN),)
MARK := \#\#
EXPLAINED := awk -F: -v goals=" $(GOALS) " 'index(goals, " " $$1 " ") && sub(/.*$(MARK)/, "")' Makefile
READ := PYTHON $(if $(filter $(VERBS),$(GOALS)),ARGS) $(shell $(EXPLAINED) | grep -oE '\b[A-Z]+=' | tr -d = | sort -u)
ifneq ($(filter-out $(READ),$(GIVEN)),)
$(error make $(GOALS) would ignore $(filter-out $(READ),$(GIVEN)); it reads $(strip $(READ)))
endif
endif
endif

.DEFAULT_GOAL := help
.PHONY: help help-dev setup quickstart finetune-7b $(VERBS) test clean \
  test-long test-all lint mutants soak steady matrix simulated-gpus gpu-memory test-gpu test-gpu-node lock audit

# After `##`, what `make` lists; after `##-`, what `make help-dev` does.
LISTED = sed -nE 's/^([a-z0-9-]+):.*$(1) +/\1\t/p' Makefile | expand -t $(2)

help:  ## this list; make help-dev has the targets of maintainers
	@$(call LISTED,##,13)
	@echo
	@echo 'ARGS: flags of cookbook launch: make quickstart ARGS="--set run.max_steps=50"'
	@echo 'All else: source .venv/bin/activate, then cookbook -h; or make plan ARGS="..."'

help-dev:  ##- this list
	@$(call LISTED,##-,16)

setup: $(STAMP)  ## [PYTHON=python3.12] a virtual environment in .venv
	@echo 'For the command cookbook: source .venv/bin/activate'

quickstart: $(STAMP)  ## [STRATEGY=zero3] [ARGS=...] train a small model here, and try it
	@$(COOKBOOK) launch recipes/quickstart.yaml $(STRATEGY_FLAG) $(ARGS)
ifeq ($(filter --dry-run,$(ARGS)),)
	@$(COOKBOOK) summary $(QUICKSTART_RUN)
	@$(COOKBOOK) sample $(QUICKSTART_RUN)
endif

finetune-7b: $(STAMP)  ## [STRATEGY=fsdp2] [ARGS=...] train Qwen2.5-7B, or what it needs
	@$(COOKBOOK) launch recipes/qwen25_7b/sft.yaml $(STRATEGY_FLAG) $(ARGS)

$(VERBS): $(STAMP)
	@$(COOKBOOK) $@ $(ARGS)

test: $(DEV_STAMP)  ## [TESTS=...] [WORKERS=3] the quick tests; no GPU, no network needed
	@$(BUILD_NEEDS)
	@.venv/bin/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal $(TESTS)

test-long: $(DEV_STAMP)  ##- [TESTS=...] [WORKERS=3] the slow tests, all rehearsals too
	@$(BUILD_NEEDS)
	@.venv/bin/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m due $(TESTS)

test-all: $(DEV_STAMP)  ##- [TESTS=...] [WORKERS=3] all: every column under every strategy
	@$(BUILD_NEEDS)
	@.venv/bin/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m "slow or not slow" $(TESTS)

soak: $(DEV_STAMP)  ##- [ARGS="--kills 30"] kill runs at random; curves must not change
	@.venv/bin/python tests/soak.py $(ARGS)

matrix: $(DEV_STAMP)  ##- [WORKERS=3] equivalence tests; write their table and picture
	@$(BUILD_NEEDS)
	@rm -rf outputs/curves
	@SKIP_NOTHING=1 CURVES=outputs/curves .venv/bin/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal tests/test_equivalence.py tests/test_equivalence_features.py \
	  -m "slow or not slow" -k "not recorded"
	@.venv/bin/python benchmarks/equivalence_table.py outputs/curves

simulated-gpus: $(DEV_STAMP)  ##- [WORKERS=3] GPU tests on simulated GPUs; write their record
	@$(BUILD_NEEDS)
	@rm -rf outputs/simulated_gpus
	@SKIP_NOTHING=1 GPU_RUNS=outputs/simulated_gpus .venv/bin/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m "not thorough" tests/test_gpu_*.py
	@.venv/bin/python benchmarks/gpu_runs.py outputs/simulated_gpus

mutants: $(DEV_STAMP)  ##- [AREA=rows] plant known faults in a copy; tests must notice
	@.venv/bin/python tests/mutants.py $(AREA)

steady: $(DEV_STAMP)  ##- [ARGS="--steps 2000"] a long run whose memory must not grow
	@.venv/bin/python tests/steady.py $(ARGS)

gpu-memory: $(DEV_STAMP)  ##- peak memory on simulated GPUs against the forecast; 30 min
	@.venv/bin/python benchmarks/forecast_accuracy/run.py simulated

test-gpu: $(DEV_STAMP)  ##- [WORKERS=4] GPU tests on this machine's GPUs
	@$(BUILD_NEEDS)
	@rm -rf outputs/real_gpus
	@REAL_GPUS=1 GPU_RUNS=outputs/real_gpus .venv/bin/python -m pytest -q -n $(or $(WORKERS),4) --dist worksteal -m "not thorough" tests/test_gpu_*.py; code=$$?; \
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
	@$(PIP) -r requirements.txt --group dev --group fp8 --group trackers --group peers
	@$(PIP) --no-deps --upgrade --target .cache/with_timm --group timm
	@touch $@
