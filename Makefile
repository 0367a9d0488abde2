# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each sets up what it needs in .venv and nowhere else.

VENV    := .venv
PYTHON  ?= python3
PY      := $(VENV)/bin/python
PYTEST  := $(PY) -m pytest --quiet
TWO_AT_ONCE := --numprocesses 2 --dist loadfile
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-all lint bench docs clean

demo: $(VENV)/examples
	DDP_UTILS_NPROC=2 $(PY) examples/digits/after.py

test: lint
	$(PYTEST) -m "not slow" $(TWO_AT_ONCE)

# The slow tests have the machine to themselves: real launchers, kill loops, statistics.
test-all: test
	$(PYTEST) -m slow

lint: $(VENV)/test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

bench: $(VENV)/bench
	$(PY) -m benchmarks

docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

# Each stamp stands for one set of extras, installed. torch is named first and by its
# pinned version, so that no other package's wish decides which build is fetched.
$(VENV)/%: setup.cfg constraints.txt | $(VENV)/bin/python
	$(INSTALL) "$$(grep '^torch==' constraints.txt)"
	$(INSTALL) --editable ".[$(EXTRAS_$*)]"
	touch $@

EXTRAS_examples := examples
EXTRAS_test     := test,examples,docs
EXTRAS_bench    := bench,examples
EXTRAS_docs     := docs

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
