# Each target creates .venv and installs what it needs.
PYTHON ?= python3
CLUSTERS ?= 1
KILLS ?= 300
MINUTES ?= 30
CALLS ?= 1000000
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Without bytecode, each of the many processes of the tests compiles all modules of Ravnest, for a second.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-failed system-tools check format vendor screenshots zoo bench chaos soak fuzz clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) --editable '.[demo,dev,upnp,zoo]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo ## set up, then run a server, three providers and a job; CLUSTERS=2: five nodes, two clusters
ifeq ($(CLUSTERS),1)
	$(BIN)/ravnest demo
else
	$(BIN)/python examples/digits/demo.py $(CLUSTERS)
endif

# Two cores run many child processes at once.
test test-full test-failed: export OMP_NUM_THREADS = 1

# Tests of routers with NAT, of bubblewrap, and of the page in a browser are skipped without these; only root
# can install them.
system-tools:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	  ! { command -v ip && command -v nft && command -v conntrack && command -v bwrap && command -v chromium; } >/dev/null; then \
	  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes \
	    --no-install-recommends iproute2 nftables conntrack bubblewrap chromium; } >/dev/null 2>&1 || \
	    echo "nftables, conntrack, bubblewrap and chromium could not be installed: tests that need them are skipped"; \
	fi

test: $(VENV)/.dev system-tools ## set up, then run the tests that CI runs
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-full: $(VENV)/.dev system-tools ## all tests, including the longest combinations
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder -m '' $(ARGS)

test-failed: $(VENV)/.dev ## run the tests that failed last time again, one after the other
	$(BIN)/python -m pytest --verbose --last-failed --last-failed-no-failures none $(ARGS)

check: $(VENV)/.dev ## formatting, lint, types, layers, names
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_names.py

format: $(VENV)/.dev ## rewrite the files the way check wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

vendor: ## fetch the JavaScript libraries of the page and its tests again, as pinned in tools/vendor.py
	$(PYTHON) tools/vendor.py

screenshots: $(VENV)/.dev system-tools ## pictures of each state of the page: build/screenshots; those of the docs: docs/images
	$(BIN)/python tools/screenshots.py $(ARGS)

zoo: $(VENV)/.dev ## split every model of the zoo into 2, 3 and 4 stages; writes docs/zoo.md
	$(BIN)/python benchmarks/zoo.py $(ARGS)

bench: $(VENV)/.dev ## measure cost, memory and planning; writes docs/benchmarks.md
	$(BIN)/python benchmarks/run.py $(ARGS)

chaos: $(VENV)/.dev ## kill nodes of a training at random, KILLS=300 times, and report what it costs; about an hour
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/chaos.py --kills $(KILLS) $(ARGS)

soak: $(VENV)/.dev ## train for MINUTES=30 with kills, and report whether memory, threads and files stay flat
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py --minutes $(MINUTES) $(ARGS)

fuzz: $(VENV)/.dev ## call the operators of stages with hostile arguments, CALLS=1000000 times; about half an hour
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz_operators.py --calls $(CALLS) --processes $$(nproc) $(ARGS)

clean: ## remove the environment and caches; keeps your results
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build
