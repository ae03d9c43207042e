# Every command sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.

# The first of these that starts: a version manager's shim may stand for a version that isn't installed.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do $$python -c "" 2>/dev/null && echo $$python && break; done)
VENV := .venv
RUN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# torch's CUDA build on stub libraries (tests/nullgpu): GPUs where there are none.
CUDA_VENV := .venv-cuda
CUDA_INSTALLED := $(CUDA_VENV)/.installed
# Other people's packages (tests/packages), which want torchvision: there is one for torch's CUDA build alone, so it runs on the stub libraries.
PACKAGES_VENV := .venv-packages
PACKAGES_INSTALLED := $(PACKAGES_VENV)/.installed
STUB := $(wildcard tests/nullgpu/*.py tests/nullgpu/src/* tests/nullgpu/compute/* tests/nullgpu/site/*)
# Where a shell has set it, each of the hundred processes that tests start compiles this package anew, half a second of a core each.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-cuda test-cuda-build conformance conformance-cuda packages packages-cuda fuzz chaos lightning-suite check same-report walks docs bench-decisions bench-elastic bench-first-step bench-memory bench-overhead bench-pipeline clean

# On a machine with GPUs the demo uses them; without, two CPU devices with a memory budget.
demo: $(INSTALLED)
	@if [ -z "$${AUTOPAR_DEVICES:-}" ] && ! $(RUN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
		export AUTOPAR_DEVICES="2xcpu:2GiB"; \
	fi; \
	$(RUN)/python examples/train_gpt.py
	$(RUN)/python examples/elastic.py

# Four parts side by side: a test waits for its processes a good part of its time, and four parts keep two cores busy. Each
# takes some 400 seconds of a core. What the others say follows when they are done.
PART_2 := tests/conformance tests/exact tests/planning tests/sharing
PART_3 := tests/memory/trace tests/memory/work tests/state tests/strategies/fsdp tests/strategies/trials tests/strategies/pipeline tests/strategies/zero
PART_4 := $(filter-out $(PART_3) %/__pycache__,$(patsubst %/,%,$(wildcard tests/strategies/*/ tests/strategies/test_*.py)))
test: export OMP_NUM_THREADS = 1
test: $(INSTALLED)
	@mkdir -p build; part=1; started=; for tests in "$(PART_2)" "$(PART_3)" "$(PART_4)"; do \
		part=$$((part + 1)); \
		$(RUN)/python -m pytest $$tests > build/part-$$part.txt 2>&1 & started="$$started $$!"; \
	done; \
	$(RUN)/python -m pytest $(foreach each,$(PART_2) $(PART_3) $(PART_4),--ignore=$(each)); failed=$$?; \
	for each in $$started; do wait $$each || failed=1; done; cat build/part-[234].txt; exit $$failed

# What `make test` leaves out: the rest of each promise's crossing with every engine (tests/later.md says what covers it there), and what takes
# most of a minute each: benchmarks run from end to end, the second demo, scripts started anew each time.
test-slow: export OMP_NUM_THREADS = 1
test-slow: $(INSTALLED)
	$(RUN)/python -m pytest --slow -m slow

# What needs GPUs, on two stub ones; where there is a real one, on that. CUDA_TESTS names a part.
CUDA_TESTS ?= tests
ifeq ($(shell nvidia-smi --list-gpus 2>/dev/null | grep -c .),0)
test-cuda: export NULLGPU_DEVICES = 2
test-cuda: export NULLGPU_COMPUTE = 1
test-cuda: export OMP_NUM_THREADS = 1
test-cuda: $(CUDA_INSTALLED)
	@state=$$(mktemp /dev/shm/nullgpu.XXXXXX); NULLGPU_STATE=$$state $(CUDA_VENV)/bin/python -m pytest -m gpu $(CUDA_TESTS); failed=$$?; \
	rm -f $$state; exit $$failed
else
test-cuda: $(INSTALLED)
	$(RUN)/python -m pytest -m gpu $(CUDA_TESTS)
endif

# The tests that need no GPU on torch's build for CUDA, which is what `pip install torch` gives most people, on a machine without a GPU.
test-cuda-build: export OMP_NUM_THREADS = 1
test-cuda-build: $(CUDA_INSTALLED)
	env -u NULLGPU_DEVICES $(CUDA_VENV)/bin/python -m pytest -m "not gpu"

# Every feature under every engine, half an hour or more; `make test` has a part of it. Writes docs/features.md.
# With LIGHTNING=pytorch_lightning that part runs under the other Lightning, some minutes, and writes nothing.
conformance: export OMP_NUM_THREADS = 1
conformance: $(INSTALLED)
ifeq ($(LIGHTNING),pytorch_lightning)
	$(RUN)/python -m tests.other_lightning tests/conformance
else
	$(RUN)/python -m pytest tests/conformance --all-cells --slow --deselect tests/conformance/test_conformance.py::test_the_page_shows_what_is_expected
	$(RUN)/python -m tests.conformance.render
endif

# The same on GPUs: on stub ones, or on real ones where there are two. Writes docs/features_cuda.md from what was run.
conformance-cuda: $(INSTALLED)
	$(MAKE) test-cuda CUDA_TESTS="tests/conformance/test_cuda.py --all-cells"; failed=$$?; \
	$(RUN)/python -m tests.conformance.render --cuda && exit $$failed

# Generated modules under every plan against plain Lightning, half a minute a seed; `make test` has a few. What is in build/fuzz.json isn't run again.
FIRST ?= 1
LAST ?= 500
fuzz: export OMP_NUM_THREADS = 1
fuzz: export AUTOPAR_CACHE = off
fuzz: export AUTOPAR_LEDGER = off
fuzz: $(INSTALLED)
	$(RUN)/python -m tests.fuzz.run $(FIRST) $(LAST)

# Other people's models under every plan against plain Lightning, an hour or more; nightly. Writes docs/packages.md. MEMBERS names some.
packages: $(PACKAGES_INSTALLED)
	$(PACKAGES_VENV)/bin/python -m tests.packages.matrix $(MEMBERS)

# The same on two stub GPUs. Renews the page's section of them.
packages-cuda: export NULLGPU_DEVICES = 2
packages-cuda: export NULLGPU_COMPUTE = 1
packages-cuda: $(PACKAGES_INSTALLED)
	@state=$$(mktemp /dev/shm/nullgpu.XXXXXX); NULLGPU_STATE=$$state $(PACKAGES_VENV)/bin/python -m tests.packages.matrix --cuda $(MEMBERS); failed=$$?; \
	rm -f $$state; exit $$failed

# Lightning's own tests under autopar, 40 minutes; LIGHTNING names the folder `tests` of its repository. See tests/lightning_suite/README.md.
lightning-suite: $(INSTALLED)
	$(RUN)/python -m tests.lightning_suite.run $(LIGHTNING)

# Whether planning says what it said at another commit: `make same-report WAS=main` plans there and here, some minutes each.
WAS ?= HEAD
same-report: export OMP_NUM_THREADS = 1
same-report: $(INSTALLED)
	@rm -rf build/was; git worktree add --quiet --force --detach build/was $(WAS) && cp tools/same_report.py build/was/tools/; \
	$(RUN)/python build/was/tools/same_report.py write build/reports.json && $(RUN)/python tools/same_report.py compare build/reports.json; \
	same=$$?; git worktree remove --force build/was; exit $$same

check: $(INSTALLED)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/lint-imports --no-cache
	$(RUN)/python tools/size.py
	$(RUN)/python tools/private_patches.py
	$(RUN)/python tools/engine_names.py 6
	$(RUN)/mypy --strict

# Which modules a batch, a plan and a move run through, counted by running them.
walks: $(INSTALLED)
	$(RUN)/python tools/walks.py

# build/site; fails on a warning. The variable silences what mkdocs-material prints about mkdocs 2, which isn't used.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict --quiet

# A hundred moves and forty kills under random schedules, against undisturbed runs; and 16,000 claims on one ledger. `make test` has a part.
chaos: export OMP_NUM_THREADS = 1
chaos: $(INSTALLED)
	$(RUN)/python -m pytest tests/chaos tests/ledger --nightly-chaos

bench-elastic: $(INSTALLED)
	$(RUN)/python benchmarks/elastic.py

bench-first-step: $(INSTALLED)
	$(RUN)/python benchmarks/first_step.py

bench-overhead: $(INSTALLED)
	$(RUN)/python benchmarks/overhead.py

bench-decisions: $(INSTALLED)
	$(RUN)/python benchmarks/decisions.py

bench-memory: $(INSTALLED)
	$(RUN)/python benchmarks/memory_cpu.py

bench-pipeline: $(INSTALLED)
	$(RUN)/python benchmarks/pipeline_speed.py

clean:
	rm -rf $(VENV) $(CUDA_VENV) $(PACKAGES_VENV) build dist .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python tools/install.py
	@touch $@

# The project's own install needs its build backend, which pip fetches.
$(CUDA_INSTALLED): pyproject.toml constraints.txt $(STUB)
	$(PYTHON) tests/nullgpu/environment.py $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

$(PACKAGES_INSTALLED): tests/packages/requirements.txt constraints.txt $(STUB)
	$(PYTHON) tests/nullgpu/environment.py $(PACKAGES_VENV)
	$(PACKAGES_VENV)/bin/python -m pip install --quiet --no-deps --requirement tests/packages/requirements.txt
	$(PACKAGES_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@
