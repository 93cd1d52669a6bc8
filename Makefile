# Three commands: `make demo`, `make test`, and `make setup` for the environment alone.
# Each installs what is missing and skips what is done.

PYTHON ?= python3
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

# Kernels run in Triton's interpreter, which is chosen before Triton is first imported.
test: lint
	$(BIN)/pytest --ignore=tests/ops
	TRITON_INTERPRET=1 $(BIN)/pytest tests/ops

clean:
	rm -rf $(VENV) build *.egg-info
