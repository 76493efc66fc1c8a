# Everything that a newcomer types. `make demo` and `make test` do all their set-up themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-hosts test-timed docs figures check bench bench-dashboard predict dilation profiles papers papers-full benchmark mutants platforms clean

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

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 --no-warn-return-any agents/client agents/device agents/remote  # on real devices
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --quiet --noconftest tests/test_plain_words.py

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

# Byte code of what we use is compiled at the end: of all that torch brings, it would double the wait.
# Without it, where PYTHONDONTWRITEBYTECODE is set, every process would compile torch anew.
USED := agents.aggregator.main, agents.client.training, agents.device.main, testbed.cli.main, testbed.run.up, testbed.data.datasets, \
	testbed.cli.outputs, rich.console, analysis.summary, testbed.dashboard.web_server, testbed.images, testbed.runtimes.process.runtime, testbed.broker.embedded
# The broker of machines without Mosquitto, in a folder of its own, as Flower needs another typer.
AMQTT := 'from testbed.broker import programs; print(programs.AMQTT)'
AMQTT_FOLDER := 'from testbed.broker import programs; print(programs.AMQTT_FOLDER)'
$(VENV)/.installed: pyproject.toml
	@echo "Setting up $(VENV) (a few minutes, once) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --no-compile $$($(BIN)/python -I testbed/images/torch_index.py) --editable .
	@$(BIN)/python -m pip install -qq --no-compile --no-warn-conflicts --upgrade --target \
		"$$($(BIN)/python -c $(AMQTT_FOLDER))" "$$($(BIN)/python -c $(AMQTT))"
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -W ignore -c "import $(USED)"
	@touch $@

# The last version of Flower whose package has its quickstarts, which tests run as they are.
QUICKSTARTS := $(VENV)/share/flower-quickstarts flwr==1.24.0
$(VENV)/.installed-dev: $(VENV)/.installed
	@$(BIN)/python -m pip install -qq --no-compile --editable '.[dev]'
	@$(BIN)/python -m pip install -qq --no-compile --no-deps --upgrade --target $(QUICKSTARTS)
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info
