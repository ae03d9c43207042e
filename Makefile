# Every command sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.

# The first of these that starts: a version manager's shim may stand for a version that isn't installed.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do $$python -c "" 2>/dev/null && echo $$python && break; done)
VENV := .venv
RUN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Where a shell has set it, each of the hundred processes that tests start compiles this package anew, half a second of a core each.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow conformance chaos check docs bench-decisions bench-elastic bench-memory bench-overhead bench-pipeline clean

# On a machine with GPUs the demo uses them; without, two CPU devices with a memory budget.
demo: $(INSTALLED)
	@if [ -z "$${AUTOPAR_DEVICES:-}" ] && ! $(RUN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
		export AUTOPAR_DEVICES="2xcpu:2GiB"; \
	fi; \
	$(RUN)/python examples/train_gpt.py
	@mkdir -p build; $(RUN)/python examples/elastic.py --picture build/elastic.png

# Two halves side by side, as many tests keep one core busy; what the second says follows when it is done.
test: export OMP_NUM_THREADS = 1
test: $(INSTALLED)
	@mkdir -p build; $(RUN)/python -m pytest tests/strategies tests/conformance > build/engine-tests.txt 2>&1 & second=$$!; \
	$(RUN)/python -m pytest --ignore tests/strategies --ignore tests/conformance; first=$$?; \
	wait $$second; second=$$?; cat build/engine-tests.txt; exit $$((first > second ? first : second))

# What takes most of a minute each and `make test` leaves out: benchmarks run from end to end, the second demo, scripts started anew each time.
test-slow: export OMP_NUM_THREADS = 1
test-slow: $(INSTALLED)
	$(RUN)/python -m pytest --slow -m slow

# Every feature under every engine, half an hour or more; `make test` has a part of it. Writes docs/features.md.
conformance: export OMP_NUM_THREADS = 1
conformance: $(INSTALLED)
	$(RUN)/python -m pytest tests/conformance --all-cells --deselect tests/conformance/test_conformance.py::test_the_page_shows_what_is_expected
	$(RUN)/python -m tests.conformance.render

check: $(INSTALLED)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy --strict

# build/site; fails on a warning. The variable silences what mkdocs-material prints about mkdocs 2, which isn't used.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict --quiet

# A hundred moves and forty kills under random schedules, against undisturbed runs; and 16,000 claims on one ledger. `make test` has a part.
chaos: export OMP_NUM_THREADS = 1
chaos: $(INSTALLED)
	$(RUN)/python -m pytest tests/chaos tests/ledger --nightly-chaos

bench-elastic: $(INSTALLED)
	$(RUN)/python benchmarks/elastic.py

bench-overhead: $(INSTALLED)
	$(RUN)/python benchmarks/overhead.py

bench-decisions: $(INSTALLED)
	$(RUN)/python benchmarks/decisions.py

bench-memory: $(INSTALLED)
	$(RUN)/python benchmarks/memory_cpu.py

bench-pipeline: $(INSTALLED)
	$(RUN)/python benchmarks/pipeline_speed.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,hf,report,docs,bench]"
	@touch $@
