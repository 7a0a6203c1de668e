# The two commands for a fresh machine with Python >= 3.10 and make: `make demo`, `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FIXTURES := fixtures/real
SIMULATED := fixtures/simulated

.PHONY: demo test test-verl verl-cpu-dir lint docs browser plotly fixtures clean

demo: $(VENV)/.installed
	$(BIN)/verl-audit diagnose $(FIXTURES)/async_drop_bias --baseline $(FIXTURES)/sync_baseline
	@echo; echo "--- and a simulated run whose true cause is known (fixtures/README.md)"; echo
	$(BIN)/verl-audit diagnose $(SIMULATED)/stale_bypass --baseline $(SIMULATED)/sync_bypass_baseline

test: lint
	$(BIN)/python -m pytest

# Real verl 0.9.1 on a CPU with the recorder; 2 GB, minutes. verl itself runs on GPUs only: VERL_CPU_DIR is a folder
# with the plugin that lets it run on a CPU, run_e2e.py that starts a run with it and make_assets.py for its toy model.
VERL_VENV := .venv-verl
test-verl: verl-cpu-dir $(VERL_VENV)/.verl
	VERL_CPU_DIR=$(abspath $(VERL_CPU_DIR)) $(VERL_VENV)/bin/python tests/verl/run.py

verl-cpu-dir:
	$(if $(wildcard $(VERL_CPU_DIR)/run_e2e.py),,$(error set VERL_CPU_DIR to a folder with run_e2e.py and make_assets.py, which run verl on a CPU))
	@:

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

# What the tests of the HTML report need beside Python: Chromium from Debian, axe-core from npm. Without them they skip.
AXE := axe-core@4.14.1
browser: $(VENV)/.dev
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then echo "Chromium is there"; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then apt-get update -qq && apt-get install -qq -y chromium; \
	else echo "no Chromium, and no way to install it here: its tests will be skipped"; fi
	@if [ -f $(VENV)/axe/package/axe.min.js ]; then echo "axe-core is there"; \
	elif command -v npm > /dev/null; then mkdir -p $(VENV)/axe && cd $(VENV)/axe && npm pack --silent $(AXE) > /dev/null && tar xzf *.tgz && rm *.tgz; \
	else echo "no npm to fetch axe-core with: its tests will be skipped"; fi

# Takes plotly.js for interactive reports again; the tests hold it to the version that the plotly of Python brings.
PLOTLY := plotly.js-basic-dist-min@4.1.1
VENDOR := verl_audit/report/html/vendor
plotly:
	cd $(VENDOR) && npm pack --silent $(PLOTLY) > /dev/null && tar xzf *.tgz && rm *.tgz
	mv $(VENDOR)/package/plotly-basic.min.js $(VENDOR)/ && mv $(VENDOR)/package/LICENSE $(VENDOR)/plotly-basic.LICENSE
	rm -r $(VENDOR)/package

# Copies the fixtures again from a folder that holds real_runs/ and public_logs/.
SHARED ?= ../shared
fixtures: $(VENV)/.dev
	@if [ -d $(SHARED)/real_runs ]; then $(PYTHON) fixtures/make_real.py $(SHARED); else echo "$(SHARED)/real_runs is not there: nothing to do"; fi

	$(BIN)/python fixtures/make_simulated.py

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
