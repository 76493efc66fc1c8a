# Everything that a newcomer types. `make demo` and `make test` do all their set-up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-hosts test-timed docs figures check bench bench-dashboard predict dilation profiles papers papers-full benchmark mutants platforms constraints clean

demo: $(VENV)/.installed
	$(BIN)/testbed up topologies/quickstart.yaml

# The tests start hundreds of processes: without byte code, which some environments ask for, each would
# compile all modules anew.
test test-hosts test-timed: export PYTHONDONTWRITEBYTECODE =
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=25
# All that a change can break; nothing that other work on this machine can break.
test: $(VENV)/.installed-dev
	$(PYTEST) -n auto --no-loadscope-reorder -m "not hosts and not timed"

# Swarm, real devices, clusters, other kernels, the wheel, the site, notebooks, fuzzers.
test-hosts: $(VENV)/.installed-dev
	$(PYTEST) -n auto --no-loadscope-reorder -m hosts

# Seconds, rates and shares: one after the other, and nothing else on the machine.
test-timed: $(VENV)/.installed-dev
	$(PYTEST) -m timed

# Real devices, and who uses the conformance kit, may have Python 3.10.
check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 --no-warn-return-any agents/client agents/device agents/remote conformance/fl_conformance
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --quiet --noconftest tests/test_plain_words.py
	$(BIN)/python -m tests.budget

# The documentation: its words, links and commands are checked, then the site, which needs no network.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m tests.documents
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/docs/index.html"

# The pictures of docs/guide/rules.md, from runs in virtual time.
figures: $(VENV)/.installed
	$(BIN)/python docs/figures.py

# Which changes to the source no test notices (CONTRIBUTING.md).
mutants: $(VENV)/.installed-dev
	$(BIN)/python -m tests.mutants

# Other engines, kernels, architectures and Python versions (docs/evidence/platforms.md). As root; takes hours.
platforms: $(VENV)/.installed-dev
	$(BIN)/python -m tests.platforms

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.aggregator
	$(BIN)/python -m benchmarks.virtual
	$(BIN)/python -m benchmarks.loading
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.endtoend
	$(BIN)/python -m benchmarks.startup

# What watching costs. Needs chromium with its driver, a Docker engine, and a quiet machine.
bench-dashboard: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.dashboard page
	$(BIN)/python -m benchmarks.dashboard watching

predict: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.prediction

dilation: $(VENV)/.installed
	$(BIN)/python -m benchmarks.dilation

# Speeds of the device profiles in training, and their errors (docs/evidence/profiles.md).
profiles: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.profiles

# The papers' experiments: what fits in 20 minutes on two cores; all of them (days, resumable).
papers: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.papers

papers-full: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.papers --full

# Which asynchronous rule when (docs/benchmark): hours, resumable. ON=dask://HOST:8786 spreads it over a
# cluster.
benchmark: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.rules $(if $(ON),--on $(ON))

# uv installs, with your settings of pip; PIP=pip: pip does. CONSTRAINTS=: the newest versions of packages.
PIP ?= uv
CONSTRAINTS ?= constraints.txt
# A run of the demo in containers needs images: they are built at the same time.
SET_UP := -m testbed.installing --installer=$(PIP) --constraints=$(CONSTRAINTS)
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	@echo "Setting up $(VENV) (once):"
	@$(PYTHON) $(SET_UP) set-up --venv=$(VENV) $(if $(filter demo,$(MAKECMDGOALS)),--images)
	@touch $@

# The last version of Flower whose package has its quickstarts, which tests run as they are.
QUICKSTARTS := $(VENV)/share/flower-quickstarts flwr==1.24.0
$(VENV)/.installed-dev: $(VENV)/.installed conformance/pyproject.toml
	@$(BIN)/python $(SET_UP) install --editable '.[dev]' --editable ./conformance
	@$(BIN)/python -m testbed.installing --installer=$(PIP) install --no-deps --upgrade --target $(QUICKSTARTS)
	@touch $@

# The newest versions of all packages, for everybody's next set-up.
constraints: $(VENV)/.installed
	@$(BIN)/python $(SET_UP) pins

clean:
	rm -rf $(VENV) build *.egg-info conformance/build conformance/*.egg-info
