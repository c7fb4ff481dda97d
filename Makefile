# Everything sets itself up: the packages pinned in requirements/ go into .venv in this folder, and are installed again
# only when a pin or pyproject.toml changes. Once installed, nothing here needs a network.
#
#   make demo                 train a small agent on a text world and write its report
#   make demo ENV=alfworld    the same on ALFWorld
#   make test TESTS=tests/test_cli.py ARGS="-x"
#   make PYTHON=/path/to/python3.12 test

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test crosscheck lab bench lint clean
.DELETE_ON_ERROR:

VENV := .venv
VERL := .venv-verl
BIN := $(VENV)/bin
PIP := PATH="$(abspath $(BIN)):$$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq
PYTHON ?=
ENV := twc
OUT := runs
TESTS := tests
ARGS :=

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-$(if $(filter alfworld,$(ENV)),test,base) ## the main job: train, record, show; prints where the report is
	@$(BIN)/workbench demo --env "$(ENV)" --out "$(OUT)"

test: $(VENV)/.installed-test ## all tests; TESTS= and ARGS= go to pytest
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(TESTS) $(ARGS)

crosscheck: $(VENV)/.installed-trl $(VERL)/.installed ## losses, advantages and the engines against TRL and verl, installed for it
	@$(BIN)/python -m pytest -rs tests/crosscheck tests/engines $(ARGS)

lab: $(VENV)/.installed-base ## JupyterLab at notebooks/
	@$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks \
	  $(if $(filter 0,$(shell id -u)),--allow-root)

bench: $(VENV)/.installed-alfworld ## every script under benchmarks/
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

lint: $(VENV)/.installed-test ## ruff
	@$(BIN)/ruff check .

clean: ## remove the environment and caches; runs stay
	rm -rf $(VENV) $(VERL) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first Python that runs and has the right version, or PYTHON; pyenv's shims may be there and not run.
$(BIN)/python:
	@set +e; fits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'; \
	for python in $(if $(PYTHON),"$(PYTHON)",python3 python3.12 python3.11 python3.13); do \
	  "$$python" -c "$$fits" >/dev/null 2>&1 && break; \
	  found="$${found:-$$("$$python" -c 'import platform, sys; print(platform.python_version(), "at", sys.executable)' 2>/dev/null)}"; \
	  python=; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "Python 3.11 to 3.13 is needed, found $${found:-none}; set PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	  echo "the venv module is missing from $$(command -v "$$python") (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; \
	fi; \
	rm -rf $(VENV); "$$python" -m venv $(VENV) || { rm -rf $(VENV); echo "no environment could be made in $(VENV)" >&2; exit 1; }

$(VENV)/.installed-base: requirements/base.txt pyproject.toml | $(BIN)/python
	@echo "installing the packages of requirements/base.txt into $(VENV) (some minutes the first time)" >&2
	@$(PIP) -r requirements/base.txt
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-alfworld: requirements/alfworld.txt $(VENV)/.installed-base
	@echo "installing ALFWorld's engine" >&2
	@$(PIP) -r requirements/alfworld.txt
	@touch $@

$(VENV)/.installed-ray: requirements/ray.txt $(VENV)/.installed-base
	@echo "installing Ray" >&2
	@$(PIP) -r requirements/ray.txt
	@touch $@

$(VENV)/.installed-test: requirements/test.txt requirements/no-deps.txt $(VENV)/.installed-alfworld $(VENV)/.installed-ray
	@echo "installing what the tests need" >&2
	@$(PIP) -r requirements/test.txt
	@$(PIP) --no-deps -r requirements/no-deps.txt
	@touch $@

$(VENV)/.installed-trl: requirements/trl.txt $(VENV)/.installed-test
	@echo "installing TRL" >&2
	@$(PIP) -r requirements/trl.txt
	@touch $@

# verl asks for an older transformers, so it has an environment of its own. Most of what it names is for clusters and is
# not imported by its algorithms: torch brings its own dependencies, the rest comes without.
$(VERL)/.installed: requirements/verl.txt | $(BIN)/python
	@if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then \
	  echo "verl needs Python below 3.13: its checks are skipped" >&2; exit 0; \
	fi; \
	echo "installing verl into $(VERL) (a minute or two)" >&2; \
	rm -rf $(VERL); $(BIN)/python -m venv $(VERL); \
	pip="$(VERL)/bin/python -m pip install -qq --disable-pip-version-check"; \
	$$pip -c $< torch; $$pip --no-deps -r $<; touch $@
