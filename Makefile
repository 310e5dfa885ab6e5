# Set-up and everyday commands; `make` without a target lists them. Nothing needs to be installed first.

VENV ?= .venv
PYTHON ?= python3
# A package index of PyTorch, to choose a build: TORCH_INDEX=https://download.pytorch.org/whl/cpu is without CUDA.
TORCH_INDEX ?=
# If the user is root, missing Debian packages are installed; SYSTEM_DEPS=no prevents that.
SYSTEM_DEPS ?= yes
PYTEST_ARGS ?=
# Test files run in parallel: three of the quick ones, which mostly wait. PYTEST_ARGS='-n 0 ...' runs them one by one,
# with live output.
PYTEST := $(VENV)/bin/pytest --dist loadfile -n
GPU_ARGS ?=
# The commit that `make test-near` compares with.
BASE ?= HEAD
# FRESH=1: `make test-all` starts from the beginning. ROOMS: it runs only these rooms.
FRESH ?=
ROOMS ?=
COMMA := ,
AXE := axe-core@4.14.1
LAB_ARGS ?=

NOTEBOOK := notebooks/01_quickstart.ipynb
# Each finished step leaves a file here, so that the next call skips it.
DONE := $(VENV)/.done
PIP_INSTALL := $(VENV)/bin/python -m pip install --constraint constraints.txt
HAS_ENSUREPIP := '$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null
# The rooms that run on a node: mypy checks them as Python 3.10 too.
ON_NODE = $(shell sed -n 's/^    on a node: *//p' docs/design.md | tr -d ,)
# The oldest Python for the notebook's side; on a node, NODE_PYTHON.
OLDEST := 3.11
# Other Pythons to test, each in its own environment (.venv-3.12). Those that are not installed are named and skipped.
OTHER_PYTHONS := 3.12 3.13
NODE_PYTHON := 3.10
# The oldest ipykernel that pyproject.toml allows, which has sub-shells; and one without, to test what views show there.
OLD_KERNEL := 7.1.0
KERNEL_WITHOUT_SUBSHELLS := 6.31.0
# The tests of what differs between Pythons: frames, tracebacks, signals, pickles, and torch itself.
SMOKE := tests/test_values.py tests/test_wire.py tests/test_launch.py tests/node tests/session/test_session.py \
  tests/session/test_failures.py tests/session/test_stop.py tests/session/test_death.py tests/magics/test_distributed.py \
  tests/parallel/test_splitter.py tests/parallel/test_pipeline.py tests/training/test_trainer.py
VENV_PACKAGE = $$('$(PYTHON)' -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Recipes read these in the shell, unchanged.
export ROOMS BASE
# Keep other environments out of this one.
unexport PYTHONPATH PYTHONHOME
# With it, every process of every rank would compile our modules again, and pytest every test.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install venv quickstart lab data test test-slow test-thorough test-near test-all test-gpu test-pythons test-kernels test-smoke test-node \
  test-deps lint ruff mypy docs bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  variables:         VENV=$(VENV) PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) SYSTEM_DEPS=$(SYSTEM_DEPS)'

install: $(DONE)/quickstart ## the package in a virtual environment, with what the quickstart needs
venv: install

quickstart: install data ## set up, then train on two ranks of this machine, from the shell
	$(VENV)/bin/detrain-nb run $(NOTEBOOK)

lab: install data ## set up, then open the same notebook in JupyterLab
	$(VENV)/bin/jupyter lab $$([ "$$(id -u)" != 0 ] || echo --allow-root) --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/$(NOTEBOOK) $(LAB_ARGS)

data:
	@$(call debian,dataset-fashion-mnist,the quickstart trains on the digits of scikit-learn instead)

test: $(DONE)/test test-deps ## unit, real-process and notebook tests: 10 minutes on 2 cores
	@$(VENV)/bin/python -m tests.checks.flaky
	exec $(PYTEST) 3 -m 'not slow and not thorough' $(PYTEST_ARGS)

test-slow: $(DONE)/test test-deps ## the tests that take longer: 21 minutes
	exec $(PYTEST) 2 -m 'slow and not thorough' $(PYTEST_ARGS)

test-thorough: $(DONE)/test test-deps ## the longest tests, for a release; .ci/run leaves them out
	exec $(PYTEST) 2 -m thorough $(PYTEST_ARGS)

# Run both, even if the first fails. Where nothing can be installed, use python benchmarks/gpu.py.
test-gpu: $(DONE)/test ## the tests and figures that need a GPU; the figures go to benchmarks/results
	status=0; $(VENV)/bin/pytest -m gpu $(PYTEST_ARGS) || status=1; \
	  $(VENV)/bin/python benchmarks/gpu.py $(GPU_ARGS) || status=1; exit $$status

test-all: $(DONE)/test test-deps ## all tests, room by room, at most 90 minutes; continues where it stopped (FRESH=1, ROOMS='spec cli')
	@exec $(VENV)/bin/python -m tests.checks.everything $(if $(FRESH),--fresh) --rooms "$$ROOMS" -- -n 2 --dist loadfile $(PYTEST_ARGS)

test-near: $(DONE)/test test-deps ## the quick tests near the changes since HEAD, or BASE=rev: a first look, not a verdict
	@exec $(VENV)/bin/python -m tests.checks.near "$$BASE" $(PYTEST_ARGS)

test-pythons: test-deps ## the quickstart and some tests on Python 3.12 and 3.13, and a rank on 3.10
	@verdict=; status=0; \
	for version in $(OTHER_PYTHONS) $(NODE_PYTHON); do \
	  python=$$($(call find_python,$$version)); started=$$(date +%s); \
	  if [ -z "$$python" ]; then \
	    verdict="$$verdict\n  Python $$version: skipped, no python$$version runs from PATH and pyenv has none"; continue; fi; \
	  if [ $$version = $(NODE_PYTHON) ]; then \
	    $(MAKE) test-node NODE="$$python" NODE_VENV=$(VENV)-$$version; \
	  else $(MAKE) test-smoke VENV=$(VENV)-$$version PYTHON="$$python"; fi && outcome=passed || { outcome=FAILED; status=1; }; \
	  verdict="$$verdict\n  Python $$version: $$outcome after $$(($$(date +%s) - started)) s, $$python"; \
	done; printf "\nmake test-pythons$$verdict\n"; exit $$status

test-smoke: $(DONE)/test
	exec $(PYTEST) 2 -m 'not slow and not thorough' $(SMOKE) $(PYTEST_ARGS)
	$(VENV)/bin/pytest tests/notebooks -k 01_quickstart $(PYTEST_ARGS)

test-kernels: $(DONE)/test test-deps ## live views in a browser, in kernels of an older ipykernel: 3 minutes
	@$(call test_kernel,$(OLD_KERNEL),tests/lab/test_views.py)
	@$(call test_kernel,$(KERNEL_WITHOUT_SUBSHELLS),tests/lab/test_old_kernel.py)

# The notebook uses the Python of $(VENV); one of its ranks, on another host, uses $(NODE).
test-node: $(DONE)/test
	$(MAKE) VENV=$(NODE_VENV) PYTHON='$(NODE)' OLDEST=$(NODE_PYTHON) $(NODE_VENV)/.done/node
	$(VENV)/bin/pytest tests/session/test_ssh_older_python.py --older-python '$(abspath $(NODE_VENV))/bin/python' $(PYTEST_ARGS)

test-deps:
	@$(call debian,chromium dataset-fashion-mnist iproute2 munge openssh-server slurm-client slurmctld slurmd,the tests that need them are skipped)
	@$(call axe_core,$(VENV)/share/axe-core)
	@$(call akash_parser,tests/formats/akash,$(VENV)/share/akash)

lint: ruff mypy ## ruff, then mypy --strict as Python 3.11, and as 3.10 for the code on a node

ruff: $(DONE)/test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# mypy cannot follow an editable install with mapped packages, so it reads a copy laid out like the wheel.
mypy: $(DONE)/test
	@rm -rf build/mypy
	@$(VENV)/bin/python -c 'import setuptools; setuptools.setup()' --quiet build_py --build-lib build/mypy
# Both runs at once, one per core; the second one's output is shown if the first finds nothing.
	@export MYPYPATH=build/mypy; \
	  echo '$(VENV)/bin/mypy --python-version 3.10  # on a node: $(ON_NODE)'; \
	  $(VENV)/bin/mypy --python-version 3.10 --follow-imports silent --no-warn-unused-ignores \
	    $$(for room in $(ON_NODE); do ls -d build/mypy/detrain_nb/$$room build/mypy/detrain_nb/$$room.py 2>/dev/null; done) \
	    >build/mypy/on-node.txt 2>&1 & on_node=$$!; trap 'kill $$on_node; exit 1' INT TERM HUP; \
	  echo '$(VENV)/bin/mypy --package detrain_nb --package tests.checks'; \
	  $(VENV)/bin/mypy --package detrain_nb --package tests.checks || { wait $$on_node; exit 1; }; \
	  wait $$on_node; status=$$?; cat build/mypy/on-node.txt; exit $$status

# A warning fails the build. Then every link is checked, and that no page loads anything from the network.
docs: $(DONE)/docs ## the documentation site, in build/docs
	rm -rf build/docs
	$(VENV)/bin/sphinx-build -W --keep-going -q -b html docs build/docs
	$(VENV)/bin/python -m tests.checks.site build/docs

bench: $(DONE)/bench ## the benchmarks, side by side with peers
	$(VENV)/bin/python benchmarks/session.py
	$(VENV)/bin/python benchmarks/faults.py
	@$(call debian,chromium,the figures of pages are left out)
	$(VENV)/bin/python benchmarks/views.py
	$(VENV)/bin/python benchmarks/parallel.py
	@$(call debian,iproute2 openssh-server,the benchmark of hosts over SSH says what it lacks)
	@echo '$(VENV)/bin/python benchmarks/ssh.py, jobs.py'; [ "$$(id -u)" = 0 ] || { echo 'needs root: left out'; exit 0; }; \
	  $(VENV)/bin/python benchmarks/ssh.py && $(VENV)/bin/python benchmarks/jobs.py

clean: ## remove what was built; the virtual environment too, if it is the default one
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(filter .venv,$(VENV)) $(addsuffix -*,$(filter .venv,$(VENV)))

$(DONE)/venv:
	@command -v '$(PYTHON)' >/dev/null || { \
	  echo '$(PYTHON) is not found: install Python $(OLDEST) or newer, or name one: make PYTHON=/path/to/python$(OLDEST)' >&2; \
	  exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < ($(subst .,$(COMMA) ,$(OLDEST))))' || { \
	  echo "$$('$(PYTHON)' --version) is too old: install Python $(OLDEST) or newer and name it: make PYTHON=python$(OLDEST)" >&2; \
	  exit 1; }
	@$(HAS_ENSUREPIP) || $(call debian,$(VENV_PACKAGE),no virtual environment can be made)
	@$(HAS_ENSUREPIP) || { \
	  echo "$(PYTHON) lacks ensurepip: on Debian and Ubuntu run 'apt-get install $(VENV_PACKAGE)' as root" >&2; exit 1; }
	'$(PYTHON)' -m venv $(VENV)
# In the folder that contains a clone of the usual name, `import detrain_nb` would find the clone before the editable
# install. A package on the path, even at its end, comes before such a folder.
	@echo '$(CURDIR)' > "$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_detrain_nb.pth"
	@mkdir -p $(DONE) && touch $@

# Install torch first and alone, so that later packages find the build that was chosen here.
$(DONE)/torch: $(DONE)/venv constraints.txt
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(DONE)/quickstart: $(DONE)/torch pyproject.toml
	$(PIP_INSTALL) --editable '.[quickstart]'
	@touch $@

# The last torchtitan that reads TOML. The tests use only its parser, which needs neither a GPU nor a dataset.
$(DONE)/test: $(DONE)/torch pyproject.toml
	$(PIP_INSTALL) --editable '.[quickstart,test]'
	$(PIP_INSTALL) --no-deps torchtitan==0.2.2
	@touch $@

# What a user installs on a node.
$(DONE)/node: $(DONE)/torch
	$(PIP_INSTALL) ipython numpy
	@touch $@

$(DONE)/docs: $(DONE)/torch pyproject.toml
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

$(DONE)/bench: $(DONE)/torch pyproject.toml
	$(PIP_INSTALL) --editable '.[quickstart,bench]'
	@touch $@

# $(call find_python,VERSION): print the path of a Python that runs; a shim of pyenv may exist and not run.
define find_python
for python in "$$(command -v python$(1))" "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$(1).*/bin/python$(1); do \
  "$$python" -c 'import sys; print(sys.executable)' 2>/dev/null && break; done
endef

# $(call test_kernel,VERSION,TESTS): run them with this ipykernel, in an environment that has the views and no torch.
define test_kernel
python='$(abspath $(VENV)-ipykernel-$(1))/bin/python'; echo "ipykernel $(1): $$python"; \
  $(VENV)/bin/python -m venv '$(VENV)-ipykernel-$(1)' \
    && $$python -m pip install --quiet ipykernel==$(1) ipywidgets anywidget pydantic fsspec packaging pathspec pyyaml \
    && $$python -m pip install --quiet --no-deps --editable . \
    && $(VENV)/bin/pytest $(2) --kernel-python "$$python" $(PYTEST_ARGS)
endef

# $(call debian,PACKAGES,WITHOUT): install Debian packages if permitted, else print what their absence means and continue.
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

# $(call axe_core,FOLDER): fetch the accessibility checker: one file, which only the browser of the tests loads.
define axe_core
( [ ! -f $(1)/axe.min.js ] || [ "$$(cat $(1)/version 2>/dev/null)" != '$(AXE)' ] || exit 0; without='pages are not checked for accessibility'; \
  command -v npm >/dev/null || $(call debian,npm,$$without); \
  command -v npm >/dev/null || { echo "without $(AXE) (no npm here): $$without"; exit 0; }; \
  mkdir -p $(1) && echo 'fetching $(AXE) by npm' && npm pack --silent --fetch-retries=1 --fetch-timeout=30000 --pack-destination $(1) $(AXE) </dev/null >/dev/null \
    && tar -xzf $(1)/axe-core-*.tgz -C $(1) --strip-components=1 package/axe.min.js package/LICENSE \
    && rm $(1)/axe-core-*.tgz && echo '$(AXE)' > $(1)/version \
    || echo "could not fetch $(AXE): $$without" )
endef

# $(call akash_parser,FROM,FOLDER): install Akash's own SDL parser with the versions in FROM/package-lock.json; no script of a package runs.
define akash_parser
( [ ! -d $(2)/node_modules ] || [ "$$(cat $(1)/package-lock.json)" != "$$(cat $(2)/installed.json 2>/dev/null)" ] || exit 0; without='the parser of Akash checks no SDL'; \
  command -v npm >/dev/null || $(call debian,npm,$$without); \
  command -v npm >/dev/null || { echo "without Akash's parser of SDLs (no npm here): $$without"; exit 0; }; \
  rm -rf $(2) && mkdir -p $(2) && cp $(1)/package.json $(1)/package-lock.json $(2) && echo "fetching Akash's parser of SDLs by npm" \
    && npm ci --prefix $(2) --ignore-scripts --no-audit --no-fund --silent --prefer-offline --fetch-retries=3 --fetch-retry-mintimeout=1000 \
      --fetch-retry-maxtimeout=5000 --fetch-timeout=30000 </dev/null >/dev/null \
    && cp $(1)/package-lock.json $(2)/installed.json || echo "could not fetch Akash's parser of SDLs: $$without" )
endef
