# The two commands for a fresh machine with Python >= 3.10 and make: `make demo`, `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FIXTURES := fixtures/real

.PHONY: demo test lint docs fixtures clean

demo: $(VENV)/.installed
	$(BIN)/verl-audit diagnose $(FIXTURES)/async_drop_bias --baseline $(FIXTURES)/sync_baseline

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py

# Copies the fixtures again from a folder that holds real_runs/ and public_logs/.
SHARED ?= ../shared
fixtures:
	@if [ -d $(SHARED)/real_runs ]; then $(PYTHON) fixtures/make_real.py $(SHARED); else echo "$(SHARED)/real_runs is not there: nothing to do"; fi

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/.pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "verl-audit needs Python >= 3.10; make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	touch $@

$(VENV)/.installed: $(VENV)/.pip pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --group dev
	touch $@
