# Three commands: `make demo`, `make test`, and `make setup` for the environment alone.
# Each installs what is missing and skips what is done.

PYTHON ?= python3
# make test JOBS=2 runs tests side by side, each on a core of its own and in 4 GiB of memory.
JOBS ?= 0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Keeps the checkout's folders from shadowing installed packages of the same name.
export PYTHONSAFEPATH := 1

.PHONY: setup demo test lint clean

setup: $(READY)

$(READY): requirements/cpu.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "exitserve needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: setup
	$(BIN)/exitserve demo

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Kernels run in Triton's interpreter, which is chosen before Triton is first imported. A file's
# tests stay together, because they share engines.
test: lint
	$(BIN)/pytest -n $(JOBS) --dist loadfile --ignore=tests/ops
	TRITON_INTERPRET=1 $(BIN)/pytest -n $(JOBS) --dist loadfile tests/ops

clean:
	rm -rf $(VENV) build *.egg-info
