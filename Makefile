# One command each. `make` alone lists them.
#
# Which torch: on Linux the package index serves the CUDA build (several GB), which also runs on a CPU. For the small
# CPU build, give pip the address of PyTorch's CPU wheels (pytorch.org, "Get started", names it) before the first run:
#   PIP_EXTRA_INDEX_URL=<that address> make up
# pip reads that variable, and every other PIP_*, itself. PIP_INSTALL_ARGS goes to `pip install` as it is.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
PIP_INSTALL_ARGS ?=
BENCH_ARGS ?=
GPU_CHECK_ARGS ?=
COMPOSE ?= docker compose
BUF := npx --yes @bufbuild/buf@1.75.0

BIN := .venv/bin
PROTOS := $(sort $(wildcard protos/tandem/v1/*.proto))

.PHONY: help
help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- set-up and running ------------------------------------------------------------------------------------------

.PHONY: setup
setup: .venv/installed ## make .venv with everything in it, at the locked versions

.venv/installed: pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("Tandem needs Python 3.11 or newer; set PYTHON=" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_INSTALL_ARGS) \
	    --constraint requirements.lock --editable '.[model,gateway,cli,dev]'
	@touch $@

.PHONY: up
up: setup ## serve the bundled model on port 8000; Ctrl-C (or `make down` elsewhere) ends it
	$(BIN)/tandem up

.PHONY: down
down: setup ## end what `make up` started
	$(BIN)/tandem down

.PHONY: bench
bench: setup ## measure what speculation gains on this machine, with the bundled pair; BENCH_ARGS= adds options
	$(BIN)/tandem bench --up --concurrency 1,8 --max-tokens 96 --minutes 9 $(BENCH_ARGS)

# Each peer has an environment of its own, in .venv-peers (6 GB in all; llama.cpp is compiled). One that cannot be
# installed is left out, and the table says why.
.PHONY: bench-peers
bench-peers: setup ## the same prompts through llama.cpp, OpenVINO GenAI, transformers, vLLM; BENCH_PEERS_ARGS= adds options
	PIP_INSTALL_ARGS='$(PIP_INSTALL_ARGS)' $(BIN)/python -m benchmarks.peers.environments
	$(BIN)/python -m benchmarks.peers $(BENCH_PEERS_ARGS)

.PHONY: gpu-check
gpu-check: setup ## what the Torch engine does on this machine's GPU, checked and timed; GPU_CHECK_ARGS= adds options
	$(BIN)/python -m benchmarks.gpu_check $(GPU_CHECK_ARGS)

# --- checks and tests --------------------------------------------------------------------------------------------

.PHONY: check
check: setup check-protos ## format, lint, types, import contracts, protos; changes nothing
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

.PHONY: format
format: setup ## format the code, and mend what ruff can mend
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

.PHONY: test
test: setup ## unit, contract, integration and short end-to-end tests, in two processes of one thread each
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: prove
prove: setup ## the long proofs: exactness on real prompts, whole distributions
	$(BIN)/pytest -m prove --timeout 3600

.PHONY: test-clients
test-clients: setup .venv-clients/installed ## the clients people use, against real services
	.venv-clients/bin/python -m pytest -m clients -W ignore tests/clients

# An environment of its own: the client packages are no dependency of the project (1.9 GB; one of them imports torch).
.venv-clients/installed: tests/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet --disable-pip-version-check $(PIP_INSTALL_ARGS) --requirement $<
	@touch $@

.PHONY: test-browser
test-browser: setup .venv-browser/installed ## the page at / in a real Chromium (Debian: chromium), against real services
	.venv-browser/bin/python -m pytest -m browser -W ignore tests/browser

# An environment of its own, too (0.2 GB). The browser is whatever Chromium is installed, or TANDEM_CHROMIUM names.
.venv-browser/installed: tests/browser/requirements.txt
	$(PYTHON) -m venv .venv-browser
	.venv-browser/bin/pip install --quiet --disable-pip-version-check $(PIP_INSTALL_ARGS) --requirement $<
	@touch $@

# --- protos ------------------------------------------------------------------------------------------------------

# The stubs are committed, so that installing needs no compiler; they are never edited.
generate = PATH="$(CURDIR)/$(BIN):$$PATH" python -m grpc_tools.protoc -I protos \
    --python_out=$(1) --mypy_out=quiet:$(1) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)

.PHONY: protos
protos: setup ## write tandem/v1 anew from protos/
	$(call generate,.)

.PHONY: check-protos
check-protos: setup
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; $(call generate,"$$fresh"); \
	    diff --recursive --brief --exclude=__init__.py --exclude=__pycache__ "$$fresh/tandem/v1" tandem/v1 \
	    || { echo "tandem/v1 is not what protos/ gives: run make protos" >&2; exit 1; }
	@if command -v npx >/dev/null; then $(BUF) lint protos; \
	    elif [[ -n "$${CI:-}" ]]; then echo "buf lint needs npx: install Node.js and npm" >&2; exit 1; \
	    else echo "buf lint left out: it needs npx (install Node.js and npm)" >&2; fi

# --- versions and containers -------------------------------------------------------------------------------------

.PHONY: lock
lock: setup ## take the newest versions pyproject.toml allows into requirements.lock
	$(BIN)/python scripts/lock.py

.PHONY: image
image: ## build the container images
	$(COMPOSE) build

.PHONY: compose-test
compose-test: setup ## build the containers, bring them up, stream one answer, take them down
	TANDEM_COMPOSE="$(COMPOSE)" $(BIN)/pytest -m containers --timeout 3600
