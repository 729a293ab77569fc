# Everything from nothing but uv, or Python >= 3.11.3 (PYTHON=PATH): `make demo`, `make test`, `make check`.
# After `make setup`: .venv/bin/brigade.
SHELL := /bin/bash
BIN := .venv/bin
MARKS ?= not long and not matrix

.PHONY: demo test test-busy check pages setup clean

demo: .venv/.ready
	@$(BIN)/brigade demo

# Tests of processes wait more than they compute, so three at once fill two cores. They come first, the quickest last.
# The many processes that they start compile this project once.
test: .venv/.ready-dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "$(MARKS)" --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 10

# The same three times, beside a program that keeps one core busy: no test may depend on how fast the machine is.
test-busy: .venv/.ready-dev
	@tools/busy_suite.sh $(or $(RUNS),3)

check: .venv/.ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Which pages of docs/ are older than the code that they measure, and the commands that make them anew.
pages: .venv/.ready-dev
	@$(BIN)/python -m tools.pages

setup: .venv/.ready-dev

.venv/.ready: pyproject.toml constraints.txt tools/setup.sh
	@bash tools/setup.sh

.venv/.ready-dev: pyproject.toml constraints.txt tools/setup.sh
	@bash tools/setup.sh dev

clean:
	rm -rf .venv
