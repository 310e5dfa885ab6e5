# Set-up and everyday commands; `make` alone lists them. Nothing has to be installed by hand before.

VENV ?= .venv
PYTHON ?= python3
# PyTorch's own index, to choose a build: TORCH_INDEX=https://download.pytorch.org/whl/cpu has no CUDA in it.
TORCH_INDEX ?=
# Debian packages are installed where the user is root; SYSTEM_DEPS=no leaves them alone.
SYSTEM_DEPS ?= yes
PYTEST_ARGS ?=
LAB_ARGS ?=

NOTEBOOK := notebooks/01_quickstart.ipynb
# What is done once leaves a file here: the second call of a target is quick.
DONE := $(VENV)/.done
PIP_INSTALL := $(VENV)/bin/python -m pip install --constraint constraints.txt
HAS_ENSUREPIP := '$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null
# What runs on a node: checked once more as Python 3.10, whose standard library mypy knows.
ON_NODE = $(shell sed -n 's/^    on a node: *//p' docs/design.md | tr -d ,)
VENV_PACKAGE = $$('$(PYTHON)' -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# What belongs to another environment stays out of this one.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install venv quickstart lab data test test-slow test-thorough test-deps lint ruff mypy bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  variables:        VENV=$(VENV) PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) SYSTEM_DEPS=$(SYSTEM_DEPS)'

install: $(DONE)/quickstart ## the package in a virtual environment, with what the quickstart needs
venv: install

quickstart: install data ## set up, then train on two ranks of this machine, from the shell
	$(VENV)/bin/detrain-nb run $(NOTEBOOK)

lab: install data ## set up, then open the same notebook in JupyterLab
	$(VENV)/bin/jupyter lab $$([ "$$(id -u)" != 0 ] || echo --allow-root) $(LAB_ARGS) $(NOTEBOOK)

data:
	@$(call debian,dataset-fashion-mnist,the quickstart trains on the digits of scikit-learn instead)

test: $(DONE)/test test-deps ## unit, real-process and notebook tests: at most 15 minutes on 2 cores
	$(VENV)/bin/pytest -m 'not slow and not thorough' $(PYTEST_ARGS)

test-slow: $(DONE)/test test-deps ## the tests that take longer
	$(VENV)/bin/pytest -m 'slow and not thorough' $(PYTEST_ARGS)

test-thorough: $(DONE)/test test-deps ## the widest of all, before a release: left out of .ci/run
	$(VENV)/bin/pytest -m thorough $(PYTEST_ARGS)

test-deps:
	@$(call debian,chromium dataset-fashion-mnist iproute2 openssh-server,the tests that need them are skipped)

lint: ruff mypy ## ruff and mypy --strict

ruff: $(DONE)/test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# mypy does not see through an editable install with mapped packages: it reads a copy laid out as in the wheel.
mypy: $(DONE)/test
	@rm -rf build/mypy
	@$(VENV)/bin/python -c 'import setuptools; setuptools.setup()' --quiet build_py --build-lib build/mypy
	MYPYPATH=build/mypy $(VENV)/bin/mypy --package detrain_nb
	MYPYPATH=build/mypy $(VENV)/bin/mypy --python-version 3.10 --follow-imports silent --no-warn-unused-ignores \
	  $$(for room in $(ON_NODE); do ls -d build/mypy/detrain_nb/$$room build/mypy/detrain_nb/$$room.py 2>/dev/null; done)

bench: $(DONE)/bench ## the benchmarks, side by side with peers
	$(VENV)/bin/python benchmarks/session.py
	$(VENV)/bin/python benchmarks/faults.py
	$(VENV)/bin/python benchmarks/parallel.py
	@$(call debian,iproute2 openssh-server,the benchmark of hosts over SSH says what it lacks)
	@echo '$(VENV)/bin/python benchmarks/ssh.py'; [ "$$(id -u)" = 0 ] || { echo 'needs root: left out'; exit 0; }; \
	  $(VENV)/bin/python benchmarks/ssh.py

clean: ## remove what was built; the virtual environment too, if it is the default one
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(filter .venv,$(VENV))

$(DONE)/venv:
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo '$(PYTHON) is not found: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$$('$(PYTHON)' --version) is too old: install Python 3.11 or newer and name it: make PYTHON=python3.11" >&2; exit 1; }
	@$(HAS_ENSUREPIP) || $(call debian,$(VENV_PACKAGE),no virtual environment can be made)
	@$(HAS_ENSUREPIP) || { \
	  echo "$(PYTHON) lacks ensurepip: on Debian and Ubuntu run 'apt-get install $(VENV_PACKAGE)' as root" >&2; exit 1; }
	'$(PYTHON)' -m venv $(VENV)
	@mkdir -p $(DONE) && touch $@

# torch first and alone: whatever else asks for it then finds the build that was chosen here.
$(DONE)/torch: $(DONE)/venv constraints.txt
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(DONE)/quickstart: $(DONE)/torch pyproject.toml
	$(PIP_INSTALL) --editable '.[quickstart]'
	@touch $@

$(DONE)/test: $(DONE)/torch pyproject.toml
	$(PIP_INSTALL) --editable '.[quickstart,test]'
	@touch $@

$(DONE)/bench: $(DONE)/torch pyproject.toml
	$(PIP_INSTALL) --editable '.[quickstart,bench]'
	@touch $@

# $(call debian,PACKAGES,WITHOUT): install Debian packages where we may, else say what their absence means and go on.
define debian
( missing=; for name in $(1); do \
    case "$$(dpkg-query --show --showformat='$${db:Status-Status}' $$name 2>/dev/null)" in \
      installed) ;; *) missing="$$missing $$name" ;; esac; done; \
  [ -n "$$missing" ] || exit 0; \
  if [ '$(SYSTEM_DEPS)' = no ]; then echo "without$$missing (SYSTEM_DEPS=no): $(2)"; exit 0; fi; \
  command -v apt-get >/dev/null || { echo "without$$missing (no apt-get here): $(2)"; exit 0; }; \
  [ "$$(id -u)" = 0 ] || { echo "without$$missing ('apt-get install$$missing' as root brings it): $(2)"; exit 0; }; \
  echo "installing Debian packages:$$missing"; export DEBIAN_FRONTEND=noninteractive; \
  { apt-get -qq update && apt-get -qq install --yes --no-install-recommends $$missing; } </dev/null \
    || echo "could not install$$missing: $(2)" )
endef
