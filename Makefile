# Short names for `python -m cookbook`, with the set-up they need. `make` alone lists them.

PYTHON ?= python3
COOKBOOK := .venv/bin/python -m cookbook
STAMP := .venv/.installed
DEV_STAMP := .venv/.installed-dev

# RECIPE=... STRATEGY=... PROCESSES=... SIMULATE_GPUS=2 RANK_LOGS=1 SET="a.b=c d.e=f" on the command line, as flags of `python -m cookbook`.
STRATEGY_FLAG = $(if $(STRATEGY),--strategy $(STRATEGY))
PROCESSES_FLAG = $(if $(PROCESSES),--processes $(PROCESSES))
LOGS_FLAG = $(if $(filter-out 0,$(RANK_LOGS)),--rank-logs)
SIMULATE_FLAG = $(if $(SIMULATE_GPUS),--simulate-gpus $(SIMULATE_GPUS))
ON_FLAG = $(if $(ON),--on $(ON))
RECIPE_ARGUMENT = $(if $(RECIPE),"$(RECIPE)")
SET_FLAGS = $(foreach assignment,$(SET),--set '$(assignment)')

QUICKSTART_RUN = $(or $(patsubst run.output_dir=%,%,$(filter run.output_dir=%,$(SET))),outputs/quickstart)

TESTS ?= tests
# One more worker than the cores of CI: a test that waits leaves its core to another.
TEST_WORKERS = $(or $(WORKERS),3)

# Compilers and headers. Tests that lack them are skipped, or fail with SKIP_NOTHING, as where a record is written.
BUILD_NEEDS = sh system.sh .venv/bin/python build

# A variable that the help of no target on the command line names would be ignored, STRATGY=zero3 for example.
# A make that another one starts gets the variables of that one too.
ifeq ($(MAKELEVEL),0)
GIVEN := $(strip $(foreach name,$(.VARIABLES),$(if $(findstring command,$(origin $(name))),$(name))))
ifneq ($(GIVEN),)
MARK := \#\#
GOALS := $(or $(strip $(MAKECMDGOALS)),help)
READ := PYTHON SHELL MAKEFLAGS $(shell awk -F: -v goals=" $(GOALS) " 'index(goals, " " $$1 " ") && sub(/.*$(MARK)/, "")' Makefile | grep -oE '\b[A-Z][A-Z_]+=' | tr -d = | sort -u)
ifneq ($(filter-out $(READ),$(GIVEN)),)
$(error make $(GOALS) would ignore $(filter-out $(READ),$(GIVEN)); it reads $(READ))
endif
endif
endif

.DEFAULT_GOAL := help
.PHONY: help setup quickstart init convert train finetune-7b preview plan tune rehearse watch report compare why-slow summary chat sample evaluate merge export checkpoint check doctor explain schema library combinations test test-long test-all soak steady matrix simulated-gpus gpu-memory test-gpu lint lock audit clean

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## */\1\t/' | expand -t 14

setup: $(STAMP)  ## a virtual environment in .venv (PYTHON=python3.12 to choose; 3.11 or newer)

quickstart: $(STAMP)  ## [STRATEGY=...] [PROCESSES=2] [SIMULATE_GPUS=2] [SET=...]: train a small model on this machine, with or without GPUs, and sample from it
	@$(COOKBOOK) launch recipes/quickstart.yaml $(STRATEGY_FLAG) $(PROCESSES_FLAG) $(SIMULATE_FLAG) $(SET_FLAGS)
	@$(COOKBOOK) summary $(QUICKSTART_RUN)
	@$(COOKBOOK) sample $(QUICKSTART_RUN)

train: $(if $(RECIPE),$(STAMP))  ## RECIPE=recipes/mine.yaml [STRATEGY=fsdp2] [PROCESSES=2] [SIMULATE_GPUS=2] [RANK_LOGS=1] [SET="optim.learning_rate=1e-5 seed=7"]
	@$(if $(RECIPE),,echo 'make train: write RECIPE=..., for example: make train RECIPE=recipes/quickstart.yaml' >&2; exit 2)
	@$(COOKBOOK) launch "$(RECIPE)" $(STRATEGY_FLAG) $(PROCESSES_FLAG) $(SIMULATE_FLAG) $(LOGS_FLAG) $(SET_FLAGS)

finetune-7b: $(STAMP)  ## [STRATEGY=...] [PROCESSES=8] [RANK_LOGS=1] [SET=...]: full fine-tuning of Qwen2.5-7B with ZeRO-3, or the hardware that it needs
	@$(COOKBOOK) launch recipes/qwen25_7b/sft.yaml $(STRATEGY_FLAG) $(PROCESSES_FLAG) $(LOGS_FLAG) $(SET_FLAGS)

plan: $(STAMP)  ## [RECIPE=...] [GPUS=8xH100] [HOST_GIB=2000] [NVME_GIB=4000] [STRATEGY=...] [SAMPLES=10000] [PRICE=2.5] [SET=...]: will it fit, how fast, under which strategy
	@$(COOKBOOK) plan $(RECIPE_ARGUMENT) $(if $(GPUS),--gpus $(GPUS)) $(if $(HOST_GIB),--host-gib $(HOST_GIB)) $(if $(NVME_GIB),--nvme-gib $(NVME_GIB)) $(STRATEGY_FLAG) $(if $(SAMPLES),--samples $(SAMPLES)) $(if $(PRICE),--price $(PRICE)) $(SET_FLAGS)

tune: $(if $(RECIPE),$(STAMP))  ## RECIPE=... [GPUS=cpu] [STRATEGY=...] [TRIALS=4] [STEPS=8] [SET=...]: try the forecast's best settings here, and write the fastest into the recipe
	@$(if $(RECIPE),,echo 'make tune: write RECIPE=..., for example: make tune RECIPE=recipes/quickstart.yaml GPUS=cpu' >&2; exit 2)
	@$(COOKBOOK) tune "$(RECIPE)" $(if $(GPUS),--gpus $(GPUS)) $(STRATEGY_FLAG) $(if $(TRIALS),--trials $(TRIALS)) $(if $(STEPS),--steps $(STEPS)) $(SET_FLAGS)

rehearse: $(if $(RECIPE),$(STAMP))  ## RECIPE=... [STRATEGY=...] [PROCESSES=2] [ON=cpu] [SET=...]: a scaled-down run on simulated GPUs, with save and reload
	@$(if $(RECIPE),,echo 'make rehearse: write RECIPE=..., for example: make rehearse RECIPE=recipes/qwen25_7b/sft.yaml' >&2; exit 2)
	@$(COOKBOOK) rehearse "$(RECIPE)" $(STRATEGY_FLAG) $(PROCESSES_FLAG) $(ON_FLAG) $(SET_FLAGS)

preview: $(STAMP)  ## [RECIPE=...] [SET=...]: samples with the trained tokens highlighted, and their lengths
	@$(COOKBOOK) preview $(RECIPE_ARGUMENT) $(SET_FLAGS)

watch: $(if $(RUN),$(STAMP))  ## RUN=outputs/...: watch a run in another terminal, until it ends
	@$(if $(RUN),,echo 'make watch: write RUN=..., the run.output_dir of a recipe' >&2; exit 2)
	@$(COOKBOOK) watch "$(RUN)"

report: $(if $(RUN),$(STAMP))  ## RUN=outputs/...: write a page with the curves, events and settings of a run
	@$(if $(RUN),,echo 'make report: write RUN=..., the run.output_dir of a recipe' >&2; exit 2)
	@$(COOKBOOK) report "$(RUN)"

compare: $(if $(RUNS),$(STAMP))  ## RUNS="outputs/a outputs/b": write a page that lays runs over one another
	@$(if $(RUNS),,echo 'make compare: write RUNS="outputs/a outputs/b", the run.output_dir of two or more recipes' >&2; exit 2)
	@$(COOKBOOK) compare $(RUNS)

why-slow: $(if $(RUN),$(STAMP))  ## RUN=outputs/...: where the time of a run goes, and what to change first
	@$(if $(RUN),,echo 'make why-slow: write RUN=..., the run.output_dir of a recipe' >&2; exit 2)
	@$(COOKBOOK) why-slow "$(RUN)"

init: $(if $(and $(MODEL),$(DATA)),$(STAMP))  ## MODEL=Qwen/Qwen3-0.6B DATA=path/to/chats.jsonl [GPUS=1x24GB] [TASK=dpo] [OUT=recipes/mine.yaml]: write a recipe
	@$(if $(and $(MODEL),$(DATA)),,echo 'make init: write MODEL=... DATA=..., for example: make init MODEL=Qwen/Qwen3-0.6B DATA=path/to/chats.jsonl' >&2; exit 2)
	@$(COOKBOOK) init "$(MODEL)" "$(DATA)" $(if $(GPUS),--gpus $(GPUS)) $(if $(TASK),--task $(TASK)) $(if $(OUT),--out "$(OUT)")

convert: $(if $(FILES),$(STAMP))  ## FILES="trl.yaml zero3.json" [OUT=recipes/mine.yaml]: turn another project's files into a recipe and a strategy
	@$(if $(FILES),,echo 'make convert: write FILES="...", a training file, an accelerate YAML, a DeepSpeed JSON' >&2; exit 2)
	@$(COOKBOOK) convert $(FILES) $(if $(OUT),--out "$(OUT)")

chat: $(if $(RUN),$(STAMP))  ## RUN=outputs/... [COMPARE=1]: talk with the model of a run, beside the one before training
	@$(if $(RUN),,echo 'make chat: write RUN=..., the run.output_dir of a recipe' >&2; exit 2)
	@$(COOKBOOK) chat "$(RUN)" $(if $(COMPARE),--compare)

sample: $(if $(RUN),$(STAMP))  ## RUN=outputs/... [PROMPT="..."] [FROM_EVAL=5]: its model's answer to a prompt, or to held-out rows
	@$(if $(RUN),,echo 'make sample: write RUN=..., the run.output_dir of a recipe' >&2; exit 2)
	@$(COOKBOOK) sample "$(RUN)" $(if $(PROMPT),--prompt "$$PROMPT") $(if $(FROM_EVAL),--from-eval $(FROM_EVAL))

evaluate: $(if $(RUN),$(STAMP))  ## RUN=outputs/... [DATA=path/to/rows.jsonl] [SET=...]: loss and perplexity on held-out rows, or on any
	@$(if $(RUN),,echo 'make evaluate: write RUN=..., the run.output_dir of a recipe' >&2; exit 2)
	@$(COOKBOOK) evaluate "$(RUN)" $(if $(DATA),"$(DATA)") $(SET_FLAGS)

merge: $(if $(RUN),$(STAMP))  ## RUN=outputs/...: merge a trained adapter and its base into one model
	@$(if $(RUN),,echo 'make merge: write RUN=..., the run.output_dir of a recipe with an adapter' >&2; exit 2)
	@$(COOKBOOK) merge "$(RUN)"

summary: $(if $(RUN),$(STAMP))  ## RUN=outputs/...: what a run did: losses, speed, memory, its model
	@$(if $(RUN),,echo 'make summary: write RUN=..., the run.output_dir of a recipe' >&2; exit 2)
	@$(COOKBOOK) summary "$(RUN)"

export: $(if $(RUN),$(STAMP))  ## RUN=outputs/... [STEP=100]: write a checkpoint as a Hugging Face folder, and reopen it
	@$(if $(RUN),,echo 'make export: write RUN=..., the run.output_dir of a recipe' >&2; exit 2)
	@$(COOKBOOK) export "$(RUN)" $(if $(STEP),--step $(STEP))

checkpoint: $(if $(RUN),$(STAMP))  ## RUN=outputs/...: its checkpoints, complete or broken, and how to resume
	@$(if $(RUN),,echo 'make checkpoint: write RUN=..., the run.output_dir of a recipe' >&2; exit 2)
	@$(COOKBOOK) checkpoint "$(RUN)"

check: $(STAMP)  ## validate all recipes and strategies, or RECIPE=... [STRATEGY=...] [PROCESSES=8] [DATA=1: and every row] [SET=...]
	@$(COOKBOOK) check $(RECIPE_ARGUMENT) $(STRATEGY_FLAG) $(PROCESSES_FLAG) $(if $(DATA),--data) $(SET_FLAGS)

explain: $(STAMP)  ## [RECIPE=...] [STRATEGY=...] [PROCESSES=8] [WITH=...] [SET=...]: what will run, and where each value comes from; WITH=zero2: the differences
	@$(COOKBOOK) explain "$(or $(RECIPE),recipes/quickstart.yaml)" $(WITH) $(STRATEGY_FLAG) $(PROCESSES_FLAG) $(SET_FLAGS)

doctor: $(STAMP)  ## [RECIPE=...] [STRATEGY=...]: check that this machine is ready; fails on blocking problems only
	@$(COOKBOOK) doctor $(RECIPE_ARGUMENT) $(STRATEGY_FLAG) || test $$? -eq 1

schema: $(STAMP)  ## write recipes/schema.json, with which an editor completes and checks recipes
	@$(COOKBOOK) schema

library: $(STAMP)  ## write recipes/README.md from the recipes
	@$(COOKBOOK) library

combinations: $(STAMP)  ## write docs/combinations.md: what is refused, and why
	@$(COOKBOOK) combinations

test: $(DEV_STAMP)  ## [TESTS=tests/test_lock.py] [WORKERS=3]: the curves of the strategies, and all tests of a few seconds; no GPU and no network needed
	@$(BUILD_NEEDS)
	@.venv/bin/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal $(TESTS)

test-long: $(DEV_STAMP)  ## [TESTS=...] [WORKERS=3]: the slow tests: adapters, packing, objectives and optimizers under the strategies, faults, every rehearsal
	@$(BUILD_NEEDS)
	@.venv/bin/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m "slow and not thorough or due" $(TESTS)

test-all: $(DEV_STAMP)  ## [TESTS=...] [WORKERS=3]: all tests: also every column under every strategy, every fault
	@$(BUILD_NEEDS)
	@.venv/bin/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m "slow or not slow" $(TESTS)

soak: $(DEV_STAMP)  ## [KILLS=30]: kill runs at random moments under random strategies; the result must equal the uninterrupted run
	@.venv/bin/python tests/soak.py --kills $(or $(KILLS),30)

matrix: $(DEV_STAMP)  ## [WORKERS=3]: run the equivalence tests; write their table and the picture of the README
	@$(BUILD_NEEDS)
	@rm -rf outputs/curves
	@SKIP_NOTHING=1 CURVES=outputs/curves .venv/bin/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal tests/test_equivalence.py tests/test_equivalence_features.py \
	  -m "slow or not slow" -k "not recorded"
	@.venv/bin/python benchmarks/equivalence_table.py outputs/curves

simulated-gpus: $(DEV_STAMP)  ## [WORKERS=3]: run the GPU tests on simulated GPUs, and record what real ones are compared with
	@$(BUILD_NEEDS)
	@rm -rf outputs/simulated_gpus
	@SKIP_NOTHING=1 GPU_RUNS=outputs/simulated_gpus .venv/bin/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal -m "not thorough" tests/test_gpu_*.py
	@.venv/bin/python benchmarks/gpu_runs.py outputs/simulated_gpus

steady: $(DEV_STAMP)  ## [STEPS=2000]: one long run with evaluations and saves, whose memory must not grow
	@.venv/bin/python tests/steady.py --steps $(or $(STEPS),2000)

gpu-memory: $(DEV_STAMP)  ## peak memory on simulated GPUs against the forecast, every strategy; half an hour and more
	@.venv/bin/python benchmarks/forecast_accuracy/run.py simulated

test-gpu: $(DEV_STAMP)  ## [WORKERS=4]: the same tests on this machine's GPUs, with the error of the simulation
	@$(BUILD_NEEDS)
	@rm -rf outputs/real_gpus
	@REAL_GPUS=1 GPU_RUNS=outputs/real_gpus .venv/bin/python -m pytest -q -n $(or $(WORKERS),4) --dist worksteal -m "not thorough" tests/test_gpu_*.py; code=$$?; \
	  .venv/bin/python benchmarks/gpu_runs.py outputs/real_gpus --compare && exit $$code

lint: $(DEV_STAMP)  ## style, format and types
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

TOOLS := .cache/tools

lock: $(TOOLS)/.installed  ## write requirements.lock from requirements.txt: versions and digests of all packages
	@head -2 requirements.lock > $(TOOLS)/lock
	@$(TOOLS)/bin/uv pip compile requirements.txt --quiet \
	  --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate --no-header \
	  -o $(TOOLS)/body
	@cat $(TOOLS)/lock $(TOOLS)/body > requirements.lock

audit: $(TOOLS)/.installed  ## check the lock against PyPI's known vulnerabilities; needs the network
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
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@printf '#!/bin/sh\nexport PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"\nexec "$(CURDIR)/.venv/bin/python" -m cookbook "$$@"\n' > .venv/bin/cookbook
	@chmod +x .venv/bin/cookbook
	@touch $@

$(DEV_STAMP): requirements-dev.txt requirements-trackers.txt requirements-fp8.txt requirements-peers.txt $(STAMP)
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt -r requirements-trackers.txt \
		-r requirements-fp8.txt
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-peers.txt
	@touch $@
