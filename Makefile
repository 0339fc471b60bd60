# Two commands on a fresh machine: `make demo` and `make test`. Both make the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-net bench clean

demo: $(VENV)/.runtime
	$(BIN)/vfl demo

test: $(VENV)/.development
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test

test-net: $(VENV)/.development
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test -m net

bench: $(VENV)/.runtime
	$(BIN)/python -m benchmarks.step

$(VENV)/.runtime: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(VENV)/.development: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev,simulation]'
	touch $@ $(VENV)/.runtime

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache
