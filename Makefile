# Commands of contributors and CI. The virtual environment in .venv is installed from the hash-pinned
# files in requirements/, and updated when they change.
#
#   make serve ARGS="--http-port 9000"    arguments go through ARGS
#   make test PYTHON=python3.13           another interpreter (after `make clean`)

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
HOSTS := $(VENV)-hosts
FLINK := $(VENV)-flink
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
LOCKED := $(PIP) install --require-hashes
# Scripts have no suffix, so those in Python are listed for the checkers.
SCRIPTS = $(shell grep -lsE '^\#!.*python' scripts/*)
CHECKED = server tests $(wildcard benchmarks) $(SCRIPTS)

# Test files run in parallel, in MORE processes than there are cores, up to six: slow tests often wait.
# Long files come first (tests/conftest.py), others by name, so that no core is idle at the end.
MORE := 2
BESIDE = --numprocesses $(shell n=$$(($$(nproc) + $(MORE))); echo $$((n < 6 ? n : 6))) --dist loadfile --no-loadscope-reorder

# Without byte code every process of every test would compile its imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve test test-slow test-whole test-hosts test-flink coverage check fmt bench bench-hosts bench-inboxes scorecard weight path protos models docs lock clean
.DELETE_ON_ERROR:

help: ## show the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  \1\t/' | expand -t 14

serve: $(VENV)/.cli ## run the server on ./model_repository
	$(BIN)/headrace serve --model-repository model_repository $(ARGS)

test: $(VENV)/.dev ## run the tests, without the slow ones
	$(BIN)/python -m pytest $(BESIDE) $(ARGS)

test-slow: $(VENV)/.dev ## run the slow tests
	$(BIN)/python -m pytest -m "slow and not whole" $(BESIDE) $(ARGS)

test-whole: $(VENV)/.dev ## run further cases of slow and generated tests, before a release
	$(BIN)/python -m pytest -m "whole or hypothesis" $(BESIDE) $(ARGS)

test-hosts: $(HOSTS)/.hosts ## run the tests with Ray, Spark and the like, and with brokers
	$(HOSTS)/bin/python -m pytest tests/hosts -m "" $(ARGS)

test-flink: $(FLINK)/.hosts ## run the test with PyFlink, which has an environment of its own, too
	$(FLINK)/bin/python -m pytest tests/hosts/test_pages.py -k flink $(ARGS)

coverage: $(VENV)/.dev ## run the tests and show uncovered lines
	$(BIN)/python -m coverage run -m pytest $(ARGS)
	$(BIN)/python -m coverage report

check: $(VENV)/.dev ## check format, style, types, layers, generated files and weight
	$(BIN)/ruff format --check . $(SCRIPTS)
	$(BIN)/ruff check . $(SCRIPTS)
	$(BIN)/mypy $(CHECKED)
	$(BIN)/python -m pytest tests/architecture -q
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/protos --check
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/config_docs --check
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/protocol_docs --check
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/api_docs --check
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/manifests --check
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/request_path --check
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/weight --check

fmt: $(VENV)/.dev ## format the code and fix style where possible
	$(BIN)/ruff check --fix . $(SCRIPTS)
	$(BIN)/ruff format . $(SCRIPTS)

bench: $(VENV)/.dev ## run the benchmarks
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/bench $(ARGS)

bench-hosts: $(HOSTS)/.hosts ## measure jobs of Ray, Spark and the like beside ONNX Runtime by hand
	$(HOSTS)/bin/python -c 'from benchmarks.hosts import main; main()' $(ARGS)

bench-inboxes: $(HOSTS)/.hosts ## measure messages of brokers beside the HTTP door
	$(HOSTS)/bin/python -c 'from benchmarks.inboxes import main; main()' $(ARGS)

scorecard: $(VENV)/.dev ## benchmark this server against others, see docs/benchmarks.md
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/bench --scorecard $(ARGS)

weight: $(VENV)/.dev ## print lines, files and calls per request, with budgets
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/weight $(ARGS)

path: $(VENV)/.dev ## regenerate docs/request-path.md from real requests
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/request_path $(ARGS)

protos: $(VENV)/.dev ## regenerate server/headrace/protocol/pb from protos/
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/protos $(ARGS)

models: $(VENV)/.dev ## regenerate the example models in model_repository
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/make_models $(ARGS)

docs: $(VENV)/.docs ## build the site of docs/ into build/site, and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet $(ARGS)

lock: $(VENV)/.dev ## rewrite requirements/*.txt (ARGS=--upgrade for newer versions)
	UV=$(BIN)/uv scripts/lock $(ARGS)

clean: ## remove the environment and everything built
	rm -rf $(VENV) $(HOSTS) $(FLINK) build dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments of their own: those engines pin old versions of what the others use.
$(HOSTS)/.hosts $(FLINK)/.hosts: $(VENV)-%/.hosts: pyproject.toml requirements/%.txt requirements/build.txt
	$(MAKE) VENV=$(@D) $(@D)/.made
	$(@D)/bin/python -m pip --disable-pip-version-check -qq install --require-hashes --no-deps \
	    -r requirements/$*.txt -r requirements/build.txt
	$(@D)/bin/python -m pip --disable-pip-version-check -qq install \
	    --no-deps --no-build-isolation --editable .
	@touch $@

# Stamps of the environment's installed levels: made, serve, cli, docs, dev.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "headrace needs Python 3.11 or newer; $(PYTHON) is" \
	        "$$($(PYTHON) --version 2>/dev/null || echo missing)." \
	        "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.serve: $(VENV)/.made pyproject.toml requirements/serve.txt requirements/build.txt
	$(LOCKED) -r requirements/serve.txt -r requirements/build.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# For images, colours and completion on the command line. Workers of the example models need no packages
# here: the server builds their environments.
$(VENV)/.cli: $(VENV)/.serve requirements/cli.txt
	$(LOCKED) -r requirements/cli.txt
	@touch $@

$(VENV)/.docs: $(VENV)/.made requirements/docs.txt
	$(LOCKED) -r requirements/docs.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.serve requirements/dev.txt
	$(LOCKED) -r requirements/dev.txt
	@touch $@
