# make train   train a small GPT on Shakespeare, on two CPU ranks or all GPUs (options: ARGS="--stage 2 --ranks 4")
# make test    run the fast tests (PYTEST_ARGS="-x -k gpt" to change); test-all: also those that start programs
#              Both run at most three cases of each test function, fewer if they take more than a second together;
#              each commit has others. CASES=all for all.
#              test-nightly: every case, also with Lightning, Ray and other large packages
#              test-versions: the fast tests on the oldest and the newest Python and torch
#              test-gpu: those that need a GPU, with several NCCL ranks on it
# make durations  measure which tests are slow: writes tests/durations.json
# make evidence  measure what docs/evidence.md shows, on a GPU, in about half an hour, and write the page
# make lint    run ruff and mypy
# make docs    build the documentation as a site: build/site/index.html
# make wheel   build a wheel and a source distribution: dist/
# make dev     install what tests and linters need
# make clean   remove the virtual environment and all caches

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
ARGS   ?=
PIP_ARGS ?=
CASES  ?= 3
PYTEST_ARGS ?= -q -n 2 --dist worksteal

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)
PYTEST := $(BIN)/python -m pytest
# More workers than cores: slow tests wait for processes and timeouts. Files stay together, for their fixtures.
ALL_ARGS := -q -n 4 --dist loadfile --no-loadscope-reorder
VERSIONS := python3.11/torch==2.11.0 python3.13/torch

.PHONY: train test test-all test-nightly test-versions test-gpu durations evidence lint docs wheel dev clean

train: $(VENV)/.train
	$(BIN)/zeroshard train $(ARGS)

test: $(VENV)/.test
	$(PYTEST) -m "not slow" --cases $(CASES) $(PYTEST_ARGS)

test-all: $(VENV)/.test
	$(PYTEST) --cases $(CASES) $(ALL_ARGS)

test-nightly: $(VENV)/.nightly
	$(PYTEST) $(ALL_ARGS)

test-versions:
	$(foreach pair,$(VERSIONS),$(MAKE) test VENV=build/$(subst /,-,$(pair)) PYTHON=$(firstword $(subst /, ,$(pair))) \
		TORCH=$(lastword $(subst /, ,$(pair))) &&) true

test-gpu: $(VENV)/.test  # on a machine with a GPU; several NCCL ranks share it if there are not enough
	$(PYTEST) tests/gpu -q

durations: $(VENV)/.nightly
	$(PYTEST) -q --record-durations

evidence: $(VENV)/.test
	$(BIN)/python -m benchmarks evidence $(ARGS)
	$(BIN)/python -m benchmarks docs

dev: $(VENV)/.dev

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev  # warnings are errors
	$(BIN)/python docs/site.py
	$(BIN)/zensical build --clean --strict

wheel: $(VENV)/.dev  # without a build environment of its own: nothing is downloaded
	$(BIN)/python -m hatchling build -d dist -t sdist
	$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# Install torch first and separately, so that the extras do not select another build.
$(VENV)/.base: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	touch $@

$(VENV)/.train: $(VENV)/.base
	$(PIP) --editable '.[train]'
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) --editable '.[test]'
	touch $@

$(VENV)/.nightly: $(VENV)/.base
	$(PIP) --editable '.[test-nightly]'
	touch $@ $(VENV)/.test

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --editable '.[test,dev]'
	touch $@ $(VENV)/.test

clean:
	rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find src tests examples -name __pycache__ -type d -exec rm -rf {} +
