PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint

# The main job: text from a real model (fetched on first use, 98 MB).
demo: .venv/installed
	$(BIN)/specbeam generate "Why is the sky blue?" --max-new-tokens 96

test: .venv/installed
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	touch $@
