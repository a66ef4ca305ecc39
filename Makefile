# Every wish is one command: `make help`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || echo python3)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=

# Stamps: set-up is repeated only when the project file or the locked versions change.
RUN_READY := $(VENV)/.miles-run
DEV_READY := $(VENV)/.miles-dev

.PHONY: help
help: ## list the commands
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | awk 'BEGIN {FS = ":.*?## "} {printf "  make %-12s %s\n", $$1, $$2}'

$(VENV)/bin/python:
	@$(PYTHON) checks/machine.py $(MAKECMDGOALS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25'

$(RUN_READY): $(VENV)/bin/python pyproject.toml ci/pyproject.toml constraints.txt
	$(PIP) install --quiet --constraint constraints.txt --editable ./ci --editable .
	@touch $@

$(DEV_READY): $(RUN_READY)
	$(PIP) install --quiet --constraint constraints.txt --editable './ci[run,postgres,schema,pretty]' --editable '.[dev,tasks,docs]'
	@touch $@

# GitHub's own workflow parser, which tests compare ours with; where npm is missing they say so.
NODE := ci/miles_ci/workflows/node
NODE_READY := $(NODE)/node_modules/.package-lock.json
$(NODE_READY): $(NODE)/package-lock.json
	@if command -v npm >/dev/null; then cd $(NODE) && npm ci --silent --no-audit --no-fund && touch node_modules/.package-lock.json; \
	else echo "npm is missing: tests that need GitHub's workflow parser will be skipped, and the run is not green" >&2; fi

.PHONY: setup
setup: $(DEV_READY) ## create the environment with everything for development

.PHONY: quickstart
quickstart: $(RUN_READY) ## train a policy by GRPO on CPU and show reward rising (ARGS="--set seed=1")
	$(BIN)/miles train recipes/quickstart.yaml --fresh $(ARGS)

# A real SGLang server on the CPU, in an environment of its own: it pins other versions than the project.
SGLANG_VENV ?= .venv-sglang
SGLANG_READY := $(SGLANG_VENV)/.miles-sglang
$(SGLANG_READY): docker/sglang-cpu/build.sh docker/sglang-cpu/requirements.txt docker/sglang-cpu/constraints.txt \
		$(wildcard docker/sglang-cpu/sgl_kernel_stand_in/sgl_kernel/*.py)
	docker/sglang-cpu/build.sh $(PYTHON) $(SGLANG_VENV)
	@touch $@

.PHONY: sglang-cpu
sglang-cpu: $(SGLANG_READY) ## build the environment of engine.engine=sglang on the CPU in .venv-sglang

.PHONY: test
test: $(DEV_READY) $(NODE_READY) ## run the CPU test suites through the harness
	$(BIN)/miles-ci run --suite stage-a-cpu --quiet
	$(BIN)/miles-ci run --suite stage-b-cpu --quiet

.PHONY: test-nightly
test-nightly: $(DEV_READY) $(NODE_READY) ## the CPU suites with what only runs at night (kill tests, long fuzzing)
	TESTS_PROFILE=nightly $(BIN)/miles-ci run --suite stage-a-cpu --cadence nightly --quiet
	TESTS_PROFILE=nightly $(BIN)/miles-ci run --suite stage-b-cpu --cadence nightly --quiet

.PHONY: mutants
mutants: $(DEV_READY) $(NODE_READY) ## change the code and see whether a test notices (ARGS="miles/algos --sample 60")
	$(BIN)/python -m checks.mutants $(ARGS)

.PHONY: lint
lint: $(DEV_READY) ## formatting, lint, types, layers, dead code, registry, workflows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m checks.reachable
	$(BIN)/miles-ci lint --workflows
	$(BIN)/miles-ci generate --check
	$(BIN)/python -m checks.metrics_page --check

.PHONY: format
format: $(DEV_READY) ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: generate
generate: $(DEV_READY) ## write the generated workflows and pages
	$(BIN)/miles-ci generate
	$(BIN)/python -m checks.metrics_page

# MkDocs speaks of its own next version at every start.
.PHONY: docs
docs: $(DEV_READY) ## build the documentation site without a network into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml
	@echo "build/site/index.html"

.PHONY: bench
bench: $(DEV_READY) ## measure GRPO on CPU against TRL on this machine (10 minutes)
	$(BIN)/python benchmarks/grpo_cpu.py

.PHONY: clean
clean: ## remove results and caches (runs/ and the environment stay)
	rm -rf results .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
