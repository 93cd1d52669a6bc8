# `make demo`, `make check` (two minutes: format, lint, types, imports, unit tests), `make test` (each
# push), `make nightly` (what takes longer), `make docs` (the site, in build/site), and `make setup`
# for the environment alone. Each installs what is missing and skips what is done.

PYTHON ?= python3
# Tests run side by side, each worker on a core of its own and in 4 GiB of memory. JOBS=0: one after
# the other, in one process and on all cores.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Keeps the checkout's folders from shadowing installed packages of the same name.
export PYTHONSAFEPATH := 1

.PHONY: setup demo lint types unit check test tests test-next nightly durations coverage docs clean

setup: $(READY)

$(READY): requirements/cpu.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "exitserve needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

demo: setup
	$(BIN)/exitserve demo

lint: types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

# Types, against the vLLM that is installed and against the sources of the one that GPUs have: what
# we import, subclass and call of either. For the next one: `make types VLLM_OF_GPUS=0.34.0`.
VLLM_OF_GPUS := 0.33.0
SOURCES := .cache/vllm-$(VLLM_OF_GPUS)
# Most of these run by hand or on a GPU: types tell what has moved since.
SCRIPTS := benchmarks benchmarks/gpu benchmarks/ops benchmarks/papers docs
types: setup $(SOURCES)
	$(BIN)/mypy
	[ -d $(SOURCES)/.mypy ] || cp -r .mypy_cache $(SOURCES)/.mypy  # torch takes longest
	MYPYPATH=$(SOURCES) $(BIN)/mypy --cache-dir $(SOURCES)/.mypy
	for folder in $(SCRIPTS); do MYPYPATH=$$folder $(BIN)/mypy $$folder/*.py || exit 1; done

$(SOURCES): | $(READY)
	$(BIN)/python requirements/vllm_sources.py $(VLLM_OF_GPUS) $@

# Tests that start no engine and train nothing.
UNIT := tests/unit tests/server tests/planning tests/deploy
PYTEST := $(BIN)/pytest -n $(JOBS)

unit: setup
	$(PYTEST) $(UNIT)

# Types take as long as the unit tests, so they are checked beside them.
check: setup
	$(MAKE) --jobs=2 --output-sync lint unit

# Kernels run in Triton's interpreter, which is chosen before Triton is first imported: our own, and
# those of vLLM's runner V2. Which tests stay together, in what order, and which run at night:
# tests/scheduling.py.
INTERPRETED := tests/ops tests/engine/runner_v2
EACH_RUN := -m 'not nightly'
OPTIONS :=
tests: setup
	$(PYTEST) $(EACH_RUN) $(OPTIONS) $(addprefix --ignore=,$(INTERPRETED))
	TRITON_INTERPRET=1 $(PYTEST) $(EACH_RUN) $(OPTIONS) $(INTERPRETED)

# On the two cores of continuous integration: 18 minutes. NO_TIME_LIMIT=1 for a slower machine.
# Types take a core for a minute, so they are checked beside the first tests.
MOST_SECONDS := 1080
test: setup
	@began=$$(date +%s); $(MAKE) --jobs=2 lint tests && seconds=$$(($$(date +%s) - began)) && \
	echo "make test: $$seconds s" && if [ -z "$(NO_TIME_LIMIT)" ] && [ $$seconds -gt $(MOST_SECONDS) ]; \
	then echo "make test took $$seconds s; allowed are $(MOST_SECONDS). Find what grew with \`make durations\`" \
	"and git diff tests/durations.json, or set NO_TIME_LIMIT=1 on a slower machine."; exit 1; fi

# All families, soak, demo, tutorial, routers, transfers of keys and values, several processes, the
# browser, recorded graphs, claims of papers.
nightly: setup
	$(MAKE) tests EACH_RUN='-m nightly'

# Engine and server with the Python of the vLLM that GPUs have, over the kernels of the CPU's.
OF_GPUS := PYTHONPATH=$(abspath $(SOURCES))
ENGINES := tests/engine tests/server tests/e2e
test-next: setup $(SOURCES)
	$(OF_GPUS) $(PYTEST) $(EACH_RUN) $(addprefix --ignore=,$(INTERPRETED)) $(ENGINES)
	$(OF_GPUS) TRITON_INTERPRET=1 $(PYTEST) $(EACH_RUN) tests/engine/runner_v2

# Writes tests/durations.json, by which tests are ordered.
durations: setup
	$(MAKE) tests OPTIONS=--write-durations

# Not part of `test`: what runs in processes of its own (servers, ranks, workers of training) is
# not seen, and tracing slows the oracle's loops.
# That a package was not imported is no error there.
COVER := --cov=exitserve --cov=exitserve_kernels --cov=exitserve_training \
	-W default::coverage.exceptions.CoverageWarning

coverage: setup
	$(PYTEST) $(COVER) --ignore=tests/e2e $(addprefix --ignore=,$(INTERPRETED))
	TRITON_INTERPRET=1 $(PYTEST) $(COVER) --cov-append $(INTERPRETED)

# In an environment of its own: the site needs nothing of what serving needs. Warnings, such as a
# link that leads nowhere, are errors. To look at it: python3 -m http.server --directory build/site
DOCS := .venv-docs
REPOSITORY := $(shell git remote get-url origin 2>/dev/null | sed 's|^git@\(.*\):|https://\1/|; s|\.git$$||')
docs: $(DOCS)/.ready
	$(PYTHON) docs/lay_out.py build/pages
	REPOSITORY=$(REPOSITORY) $(DOCS)/bin/zensical build --clean --strict

$(DOCS)/.ready: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements/docs.txt
	touch $@

clean:
	rm -rf $(VENV) $(DOCS) .cache build *.egg-info
