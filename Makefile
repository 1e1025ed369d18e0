# Every target sets up what it needs in .venv first; see `make help`.

PYTHON ?= python3
MODEL ?=

VENV := .venv
PY := $(VENV)/bin/python
PYTAG := $(or $(shell $(PYTHON) -c \
  'import sys; print("py%d%d" % sys.version_info[:2])' 2>/dev/null),missing)
LOCK := requirements/lock-$(PYTAG).txt
# Named after the Python version, so that another PYTHON= makes a new environment.
READY := $(VENV)/.ready-$(PYTAG)

# One thread per process: servers with more slow each other down on small machines.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full lint bench-quick

help:
	@echo 'make setup        install the pinned environment in .venv (Python 3.11 or 3.12)'
	@echo 'make demo         tiered against stock SGLang on a small real model; out/demo/'
	@echo '                  MODEL=FOLDER uses another Hugging Face model folder'
	@echo 'make test         lint, then all tests but the full end-to-end product'
	@echo 'make test-full    all tests'
	@echo 'make lint         ruff and mypy'
	@echo 'make bench-quick  the pressure and overhead benchmarks, small'
	@echo 'PYTHON=python3.12 with any target chooses the Python that .venv is made from'

setup: $(READY)

$(READY): $(LOCK) pyproject.toml
	@if ! $(PY) -c 'import sys; sys.exit("py%d%d" % sys.version_info[:2] != "$(PYTAG)")' \
	    2>/dev/null; then \
	  echo "making $(VENV) with $(PYTHON)"; \
	  rm -rf $(VENV) && $(PYTHON) -m venv --without-pip $(VENV); \
	fi
	$(PYTHON) -m pip --python $(PY) install "$$(grep '^pip==' $(LOCK))"
	$(PY) -m pip install -r $(LOCK)
	$(PY) -m pip install --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.ready-* && touch $@

# Reached only when there is no lock for this Python.
requirements/lock-%.txt:
	@echo '$(PYTHON) is $(PYTAG); sglang-tiered needs Python 3.11 or 3.12.' \
	  'Fix: make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 1

demo: setup
	MODEL='$(MODEL)' $(PY) -m bench.demo

# Two workers: one runs the servers, one after the other, and the other one the unit
# tests meanwhile.
PYTEST := $(PY) -m pytest tests -n 2 --dist loadgroup

test: lint
	$(PYTEST) -m 'not full'

test-full: lint
	$(PYTEST)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench-quick: setup
	$(PY) -m bench.pressure --quick
	$(PY) -m bench.overhead --quick
