# Everything runs in .venv, which is created once and updated when pyproject.toml or constraints.txt change.
# With TORCH=2.8.0 everything runs with that version of torch, in an environment of its own.

PYTHON ?= python3
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
VISION := $(if $(TORCH),,$(VENV)/.vision-installed)
DECLARED := pyproject.toml constraints.txt
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal

# Byte code is written by the process that imports a module first, so that later ones start faster.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint types format docs messages bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUNTIME) ## train a small language model on every device, and prove each step (under two minutes)
	@$(BIN)/python -m instep demo

# Lint and types are checked with the pinned torch only: its annotations differ between versions.
test: $(DEV) $(if $(TORCH),,lint types) ## lint, types, and every test that is not marked slow, on all cores
	@$(PYTEST) -m "not slow"

test-all: $(DEV) $(VISION) $(if $(TORCH),,lint types) ## lint, types, and every test
	@$(PYTEST) --hypothesis-profile=thorough

lint: $(DEV) ## check style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(DEV) ## check types
	@$(BIN)/mypy

format: $(DEV) ## format, and fix what can be fixed by itself
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(DEV) ## build the documentation into build/docs
	@$(BIN)/python -m sphinx -W --keep-going -n -q -b html -d build/doctrees docs build/docs
	@echo "open build/docs/index.html"

messages: $(DEV) ## write docs/messages.md: every error and warning, with the code that leads to it
	@$(BIN)/python -m tests.messages

bench: $(RUNTIME) ## run every benchmark
	@set -e; for script in $(sort $(wildcard benchmarks/*/*.py)); do \
		echo "== $$script"; $(BIN)/python $$script; \
	done

clean: ## remove .venv and everything that is made
	rm -rf .venv .venv-torch-* build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis instep-demo.pt
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "instep needs Python 3.10 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# Without byte code, which is written on import: the packages have many modules that no test imports.
# torch first and alone: whatever else is installed then finds the pinned one in place and brings no other.
$(RUNTIME): $(DECLARED) | $(BIN)/python
	@echo "setting up $(VENV), once"
	@# tensordict pins the torch it was built for: another torch takes the newest tensordict that supports it.
	@$(if $(TORCH),sed -E '/^(torch|tensordict)==/d' constraints.txt > $(CONSTRAINTS) && echo 'torch==$(TORCH)' >> $(CONSTRAINTS))
	@$(PIP) install --no-compile -c $(CONSTRAINTS) torch
	@$(PIP) install --no-compile -c $(CONSTRAINTS) -e .
	@touch $@

$(DEV): $(RUNTIME)
	@echo "adding the development tools to $(VENV), once"
	@$(PIP) install --no-compile -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

# torchvision and timm go to a folder of their own, which only their tests have on the path: the wheel of torchvision may
# be compiled for another build of torch (CUDA) than the installed one, and then transformers, which looks for it, cannot be
# imported. Operators in Python replace those that cannot be loaded. Only for the pinned torch, which torchvision 0.28 is for.
VISION_FILES := tests/ecosystem/vision/torchvision_operators.py
$(VISION): $(DECLARED) $(VISION_FILES) | $(DEV)
	@echo "adding torchvision and timm to $(VENV)/vision, once"
	@rm -rf $(VENV)/vision
	@$(PIP) install --no-compile --no-deps --target $(VENV)/vision -c $(CONSTRAINTS) torchvision timm pillow
	@cp $(VISION_FILES) $(VENV)/vision
	@echo "import torchvision_operators" >> $(VENV)/vision/torchvision/extension.py
	@touch $@
