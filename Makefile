SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
ARGS ?=
TEST_PROCESSES ?= 3
BENCH_ARGS ?=

# A machine with an NVIDIA driver gets the CUDA build of torch, every other one the CPU build.
HARDWARE := $(if $(shell command -v nvidia-smi 2>/dev/null),cuda,cpu)
CONSTRAINTS := constraints/$(HARDWARE).txt
TORCH := $(shell sed -n 's/^torch==/torch==/p' $(CONSTRAINTS))
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
STAMP := $(VENV)/installed-$(HARDWARE)
TRITON := $(VENV)/triton
# The tests that need nothing but .venv and a C compiler, in the language of pytest's -m.
ANYWHERE := not explore and not gpu and not docker and not sdk and not triton and not system

.PHONY: help install demo test test-slow test-system test-triton mutants explore soak chaos autoscale-demo check format format-check lint types imports sizes language commits protos \
	protos-check settings-docs settings-docs-check metrics-docs metrics-docs-check dashboards dashboards-check gpu-check test-docker test-sdk lock sbom clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

install: $(STAMP) ## create .venv with everything in it

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@bash tools/check_machine.sh $(PYTHON)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(HARDWARE),cpu)
	@echo "kvbaton: CPU build of torch ($(TORCH))"
	$(PIP) install --quiet --no-deps --retries 0 $(TORCH) --index-url $(TORCH_CPU_INDEX) \
		|| $(PIP) install $(TORCH) --constraint $(CONSTRAINTS)
else
	@echo "kvbaton: CUDA build of torch ($(TORCH))"
	$(PIP) install $(TORCH) --constraint $(CONSTRAINTS)
endif
	$(PIP) install --quiet --editable clients/python --editable '.[worker,dev]' --constraint $(CONSTRAINTS)
ifeq ($(shell command -v cc 2>/dev/null),)
	@echo "kvbaton: no C compiler here; Zig's is installed for the code that is compiled at first use"
	$(PIP) install --quiet --requirement constraints/compiler.txt
endif
	@touch $(STAMP)

demo: install ## start 1 prefill + 1 decode worker on the demo model, ask it twice, keep serving until Ctrl-C
	@exec $(BIN)/kvbaton demo $(ARGS)

test: install ## run the tests that take seconds, in TEST_PROCESSES processes (0: in this one)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "not slow and $(ANYWHERE)" $(ARGS)

# Exit status 5: ARGS selects no test of that part.
test-slow: install ## run the tests that take minutes, in TEST_PROCESSES processes, and then those that disturb whole pools one by one
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "slow and not alone and $(ANYWHERE)" --durations=15 $(ARGS) || (( $$? == 5 ))
	$(BIN)/python -m pytest -m "slow and alone and $(ANYWHERE)" --durations=15 $(ARGS) || (( $$? == 5 ))

test-docker: install ## build the images and run the compose stack; needs a Docker engine with Compose v2
	$(BIN)/python -m pytest -m docker $(or $(ARGS),tests/docker)

# promtool and prometheus are Debian's package `prometheus`, nginx is `nginx-light`, Caddy is `caddy`; .ci/run installs them.
test-system: install ## run the tests that need programs of the system: Prometheus, nginx and Caddy
	$(BIN)/python -m pytest -m system --durations=5 $(ARGS)

test-sdk: install ## run codex, opencode, langchain, litellm, instructor, lm_eval and npm's openai against a service, in environments of their own
	$(BIN)/python -m pytest -m sdk $(or $(ARGS),tests/sdk)

test-triton: install $(TRITON) ## run the GPU kernels without a GPU: interpreted, and compiled
	PYTHONPATH=$(CURDIR)/$(TRITON) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m triton $(or $(ARGS),tests/triton)

$(TRITON): constraints/triton.txt
	$(PIP) install --quiet --no-compile --no-deps --upgrade --target $@ --requirement $<
	@touch $@

mutants: install ## break one law at a time in a copy; a named test must see each (ARGS="--sample 3", "--seeds", or names)
	$(BIN)/python -m tools.mutants $(ARGS)

explore: install ## explore the hand-over's protocol in all sizes (some minutes); prints a trace where a law breaks
	$(BIN)/python -m pytest tests/protocol -m "" -s $(ARGS)

soak: install ## run the chaos tests' large counts once (two hours; ARGS="--only attack": a third of an hour); writes benchmarks/results/soak.json
	$(BIN)/python -m benchmarks.soak $(ARGS)

chaos: install ## change and break a pool under load for ten minutes, shrink and restart it; writes benchmarks/results/chaos.json
	$(BIN)/python -m benchmarks.chaos $(ARGS)

autoscale-demo: install ## let the pools of a service follow a load for a quarter of an hour; writes benchmarks/results/autoscale_demo.json
	$(BIN)/python -m benchmarks.autoscale_demo $(ARGS)

gpu-check: $(if $(GPU_PYTHON),,install) ## on a CUDA device: prove that it computes right, then measure (GPU_PYTHON=python3: without install)
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -c tests/gpu/alone.ini --rootdir . -m gpu tests/gpu $(ARGS)
	$(or $(GPU_PYTHON),$(BIN)/python) -m benchmarks.gpu $(BENCH_ARGS)

check: format-check lint types imports sizes language commits protos-check settings-docs-check metrics-docs-check dashboards-check ## the one definition of clean: what CI and pre-commit run

format-check: install
	$(BIN)/ruff format --check .

lint: install
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy .

imports: install
	$(BIN)/lint-imports

sizes: install
	$(BIN)/python -m tools.check_sizes

language: install
	$(BIN)/python -m tools.check_language

commits: install
	$(BIN)/python -m tools.check_commits

protos-check: install
	$(BIN)/python -m tools.generate_protos --check

settings-docs-check: install
	$(BIN)/python -m tools.generate_settings_docs --check

metrics-docs-check: install
	$(BIN)/python -m tools.generate_metrics_docs --check

dashboards-check: install
	$(BIN)/python -m tools.generate_dashboards --check

format: install ## format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: install ## generate the Python code of protos/*.proto
	$(BIN)/python -m tools.generate_protos

settings-docs: install ## write docs/settings.md from the settings classes
	$(BIN)/python -m tools.generate_settings_docs

metrics-docs: install ## write docs/metrics.md from the declared metrics
	$(BIN)/python -m tools.generate_metrics_docs

dashboards: install ## write docker/grafana/dashboards from tools/dashboards.py
	$(BIN)/python -m tools.generate_dashboards

lock: install ## write the versions in .venv to constraints/cpu.txt
	$(BIN)/python -m tools.lock > constraints/cpu.txt.new
	mv constraints/cpu.txt.new constraints/cpu.txt

SBOM := build/sbom
LOCKS := $(wildcard constraints/*.lock)
sbom: install ## write the components that each lock file names to build/sbom, as CycloneDX JSON
	mkdir -p $(SBOM)
	$(BIN)/python -m venv $(SBOM)/tool
	$(SBOM)/tool/bin/pip install --quiet --require-hashes --only-binary :all: -r constraints/sbom.lock
	docker/list-components $(SBOM)/tool/bin/cyclonedx-py $(SBOM) $(LOCKS)

clean: ## remove .venv, caches and builds
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
