# make train   set up (first time only), then train the bundled model on the bundled tasks
# make test    set up, then run the tests, JOBS of them at once
# Arguments are passed on:  make train ARGS="--run-dir DIR --seed 1"

PYTHON ?= python3
VENV   ?= .venv
CONFIG ?= examples/first-steps.toml
ARGS   ?=
JOBS   ?= 2
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.set-up

.DEFAULT_GOAL := help
.PHONY: help setup train test lint format bench clean

help:
	@sed -n 's/^# //p' Makefile | head -3
	@echo "make setup   set up only;  make lint, make format, make bench, make clean"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@set -e; found=; \
	for python in "$(PYTHON)" python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "error: no Python 3.11 or newer with the venv module was found" >&2; \
	  echo "  hint: install one (Debian, Ubuntu: apt install python3-venv) or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
	  exit 2; \
	fi; \
	echo "setting up $(VENV) with $$found (about 2 GB; takes a few minutes, once)"; \
	"$$found" -m venv "$(VENV)"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[train,bubblewrap,openenv,docker,dev]'
	$(BIN)/python -m termrl.engine.bundled
	@touch $@

train: $(STAMP)
	@$(BIN)/termrl doctor
	@$(BIN)/termrl train -c $(CONFIG) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadgroup --no-loadscope-reorder $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

bench: $(STAMP)
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
