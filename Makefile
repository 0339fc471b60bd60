# Two commands on a fresh machine: `make demo` and `make test`. Both make the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# GPU=1 takes torch with CUDA, GPU= the one for the CPU alone; unset, nvidia-smi decides.
GPU ?= $(shell command -v nvidia-smi)

.PHONY: demo test test-net docs wheel build bench leaderboard verify-claims clean

demo: $(VENV)/.runtime
	$(BIN)/vfl demo

test: $(VENV)/.development
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test

test-net: $(VENV)/.development
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test -m net

# The site, in dist/site: its reference is written from the code, and a warning is an error.
docs: $(VENV)/.development
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d dist/.trees docs dist/site

# The wheel alone: needs no package of vfl.
wheel:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --wheel-dir dist .

# What is given away: the wheel, what it was built beside, and whether that is known to be flawed.
build: $(VENV)/.development
	rm -rf dist
	$(MAKE) wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/sbom
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/audit

# Which defense holds against what: hours of trainings, which go on where they were stopped.
leaderboard: $(VENV)/.runtime
	$(BIN)/python -m benchmarks.leaderboard

# A random tenth of that page, of the frontier and of the columns again; DRAW=n draws other ones.
verify-claims: $(VENV)/.runtime
	$(BIN)/python -m benchmarks.verify --draw $(or $(DRAW),0)

bench: $(VENV)/.runtime
	$(BIN)/python -m benchmarks.step

$(VENV)/.runtime: pyproject.toml constraints.txt
	@echo "installing vfl in $(VENV): minutes without a message, 1.7 GB, or 5.5 GB with CUDA"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(GPU),)
	$(INSTALL) uv
	$(BIN)/uv pip install -q --python $(BIN)/python --torch-backend cpu -c constraints.txt --editable . || \
	  { echo "no torch for the CPU alone can be had here: installing the one with CUDA"; $(INSTALL) --editable .; }
else
	$(INSTALL) --editable .
endif
	touch $@

$(VENV)/.development: pyproject.toml constraints.txt
	@echo "installing vfl and its tools in $(VENV): minutes without a message, 6.7 GB"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[dev,simulation]'
	touch $@ $(VENV)/.runtime

clean:
	rm -rf $(VENV) dist runs .mypy_cache .ruff_cache .pytest_cache
