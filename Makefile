# Everything from nothing but Python >= 3.11: `make demo`, `make test`, `make check`.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check setup clean

demo: .venv/.ready
	@$(BIN)/brigade demo

test: .venv/.ready-dev
	$(BIN)/python -m pytest

check: .venv/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: .venv/.ready-dev

.venv/.ready: pyproject.toml tools/setup.sh
	@PYTHON=$(PYTHON) bash tools/setup.sh

.venv/.ready-dev: pyproject.toml tools/setup.sh
	@PYTHON=$(PYTHON) bash tools/setup.sh dev

clean:
	rm -rf .venv
