# The two commands for a fresh machine with Python >= 3.10 and make: `make demo`, `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FIXTURES := fixtures/real

.PHONY: demo test test-verl lint docs fixtures clean

demo: $(VENV)/.installed
	$(BIN)/verl-audit diagnose $(FIXTURES)/async_drop_bias --baseline $(FIXTURES)/sync_baseline

test: lint
	$(BIN)/python -m pytest

# Real verl 0.9.1 on a CPU with the recorder; 2 GB, minutes. VERL_CPU_DIR holds the CPU plugin for verl.
VERL_VENV := .venv-verl
VERL_CPU_DIR ?= ../shared/verl_cpu
test-verl: $(VERL_VENV)/.verl
	VERL_CPU_DIR=$(abspath $(VERL_CPU_DIR)) $(VERL_VENV)/bin/python tests/verl/run.py

$(VERL_VENV)/.verl: pyproject.toml
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	    verl==0.9.1 TransferQueue==0.1.11 msgspec pyzmq cachetools fastapi uvicorn
	$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

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
	rm -rf $(VENV) $(VERL_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

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
