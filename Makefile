# Set-up and everyday commands; `make` alone lists them. Nothing has to be installed by hand before.

VENV ?= .venv
PYTHON ?= python3
# PyTorch's own index, to choose a build: TORCH_INDEX=https://download.pytorch.org/whl/cpu has no CUDA in it.
TORCH_INDEX ?=
# Debian packages are installed where the user is root; SYSTEM_DEPS=no leaves them alone.
SYSTEM_DEPS ?= yes
PYTEST_ARGS ?=
# Files of tests side by side, three of the quick ones, which wait a good deal. PYTEST_ARGS='-n 0 ...' runs one after the
# other, with its output as it comes.
PYTEST := $(VENV)/bin/pytest --dist loadfile -n
GPU_ARGS ?=
# What `make test-near` compares with.
BASE ?= HEAD
# What `make test-all` begins anew, and which rooms it is kept to.
FRESH ?=
ROOMS ?=
COMMA := ,
AXE := axe-core@4.14.1
LAB_ARGS ?=

NOTEBOOK := notebooks/01_quickstart.ipynb
# What is done once leaves a file here: the second call of a target is quick.
DONE := $(VENV)/.done
PIP_INSTALL := $(VENV)/bin/python -m pip install --constraint constraints.txt
HAS_ENSUREPIP := '$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null
# What runs on a node: checked once more as Python 3.10, whose standard library mypy knows.
ON_NODE = $(shell sed -n 's/^    on a node: *//p' docs/design.md | tr -d ,)
# A Python that the code is for: the notebook's side, or, as on a node, an older one.
OLDEST := 3.11
# Beside that of $(VENV): each has an environment of its own, .venv-3.12. Where it is not installed, it is named and left out.
OTHER_PYTHONS := 3.12 3.13
NODE_PYTHON := 3.10
# An ipykernel with sub-shells, the oldest that pyproject.toml allows; and one without, for what views say there.
OLD_KERNEL := 7.1.0
KERNEL_WITHOUT_SUBSHELLS := 6.31.0
# What differs between Pythons: frames, tracebacks, signals, pickles, and torch itself.
SMOKE := tests/test_values.py tests/test_wire.py tests/test_launch.py tests/node tests/session/test_session.py \
  tests/session/test_failures.py tests/session/test_stop.py tests/session/test_death.py tests/magics/test_distributed.py \
  tests/parallel/test_splitter.py tests/parallel/test_pipeline.py tests/training/test_trainer.py
VENV_PACKAGE = $$('$(PYTHON)' -c 'import sys; print("python3.%d-venv" % sys.version_info[1])')

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# A shell reads them as they were given.
export ROOMS BASE
# What belongs to another environment stays out of this one.
unexport PYTHONPATH PYTHONHOME
# Every process of every rank would compile our modules anew, and pytest each test.
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

test-thorough: $(DONE)/test test-deps ## the widest of all, before a release: left out of .ci/run
	exec $(PYTEST) 2 -m thorough $(PYTEST_ARGS)

# Both, whatever becomes of the first. Where nothing can be installed: python benchmarks/gpu.py
test-gpu: $(DONE)/test ## on a machine with GPUs: what only these can show; the figures go to benchmarks/results
	status=0; $(VENV)/bin/pytest -m gpu $(PYTEST_ARGS) || status=1; \
	  $(VENV)/bin/python benchmarks/gpu.py $(GPU_ARGS) || status=1; exit $$status

test-all: $(DONE)/test test-deps ## everything, a room after the other, at most 90 minutes; goes on where it was: FRESH=1, ROOMS='spec cli'
	@exec $(VENV)/bin/python -m tests.checks.everything $(if $(FRESH),--fresh) --rooms "$$ROOMS" -- -n 2 --dist loadfile $(PYTEST_ARGS)

test-near: $(DONE)/test test-deps ## the quick tests near what changed since HEAD, or BASE=rev: for a look, it decides nothing
	@exec $(VENV)/bin/python -m tests.checks.near "$$BASE" $(PYTEST_ARGS)

test-pythons: test-deps ## the quickstart and a part of the tests on Python 3.12 and 3.13, and a rank on 3.10
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

# The notebook is the Python of $(VENV), one of its ranks is $(NODE) on another host.
test-node: $(DONE)/test
	$(MAKE) VENV=$(NODE_VENV) PYTHON='$(NODE)' OLDEST=$(NODE_PYTHON) $(NODE_VENV)/.done/node
	$(VENV)/bin/pytest tests/session/test_ssh_older_python.py --older-python '$(abspath $(NODE_VENV))/bin/python' $(PYTEST_ARGS)

test-deps:
	@$(call debian,chromium dataset-fashion-mnist iproute2 munge openssh-server slurm-client slurmctld slurmd,the tests that need them are skipped)
	@$(call axe_core,$(VENV)/share/axe-core)
	@$(call akash_parser,tests/formats/akash,$(VENV)/share/akash)

lint: ruff mypy ## ruff, then mypy --strict as Python 3.11 and, what runs on a node, as 3.10

ruff: $(DONE)/test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# mypy does not see through an editable install with mapped packages: it reads a copy laid out as in the wheel.
mypy: $(DONE)/test
	@rm -rf build/mypy
	@$(VENV)/bin/python -c 'import setuptools; setuptools.setup()' --quiet build_py --build-lib build/mypy
# Both runs at once, each on a core; what the second says is shown when the first has found nothing.
	@export MYPYPATH=build/mypy; \
	  echo '$(VENV)/bin/mypy --python-version 3.10  # on a node: $(ON_NODE)'; \
	  $(VENV)/bin/mypy --python-version 3.10 --follow-imports silent --no-warn-unused-ignores \
	    $$(for room in $(ON_NODE); do ls -d build/mypy/detrain_nb/$$room build/mypy/detrain_nb/$$room.py 2>/dev/null; done) \
	    >build/mypy/on-node.txt 2>&1 & on_node=$$!; trap 'kill $$on_node; exit 1' INT TERM HUP; \
	  echo '$(VENV)/bin/mypy --package detrain_nb --package tests.checks'; \
	  $(VENV)/bin/mypy --package detrain_nb --package tests.checks || { wait $$on_node; exit 1; }; \
	  wait $$on_node; status=$$?; cat build/mypy/on-node.txt; exit $$status

# Any warning fails; then every link of the pages is followed, and nothing in them may come from the network.
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
# Beside a clone that has its usual name, `import detrain_nb` would find the clone's folder before an editable install: a
# package that stands on the path, even as the last, comes before such a folder.
	@echo '$(CURDIR)' > "$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_detrain_nb.pth"
	@mkdir -p $(DONE) && touch $@

# torch first and alone: whatever else asks for it then finds the build that was chosen here.
$(DONE)/torch: $(DONE)/venv constraints.txt
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(DONE)/quickstart: $(DONE)/torch pyproject.toml
	$(PIP_INSTALL) --editable '.[quickstart]'
	@touch $@

# The last torchtitan that reads TOML: of it the tests use the parser alone, which needs neither a GPU nor a dataset.
$(DONE)/test: $(DONE)/torch pyproject.toml
	$(PIP_INSTALL) --editable '.[quickstart,test]'
	$(PIP_INSTALL) --no-deps torchtitan==0.2.2
	@touch $@

# What the user of a node installs there.
$(DONE)/node: $(DONE)/torch
	$(PIP_INSTALL) ipython numpy
	@touch $@

$(DONE)/docs: $(DONE)/torch pyproject.toml
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

$(DONE)/bench: $(DONE)/torch pyproject.toml
	$(PIP_INSTALL) --editable '.[quickstart,bench]'
	@touch $@

# $(call find_python,VERSION): say where a Python is that runs: a shim of pyenv may be there and lead nowhere.
define find_python
for python in "$$(command -v python$(1))" "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$(1).*/bin/python$(1); do \
  "$$python" -c 'import sys; print(sys.executable)' 2>/dev/null && break; done
endef

# $(call test_kernel,VERSION,TESTS): run them with the kernels of this ipykernel, which has views and no torch beside it.
define test_kernel
python='$(abspath $(VENV)-ipykernel-$(1))/bin/python'; echo "ipykernel $(1): $$python"; \
  $(VENV)/bin/python -m venv '$(VENV)-ipykernel-$(1)' \
    && $$python -m pip install --quiet ipykernel==$(1) ipywidgets anywidget pydantic fsspec packaging pathspec pyyaml \
    && $$python -m pip install --quiet --no-deps --editable . \
    && $(VENV)/bin/pytest $(2) --kernel-python "$$python" $(PYTEST_ARGS)
endef

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

# $(call axe_core,FOLDER): fetch what finds barriers in a page: one file, which only the browser of the tests reads.
define axe_core
( [ ! -f $(1)/axe.min.js ] || [ "$$(cat $(1)/version 2>/dev/null)" != '$(AXE)' ] || exit 0; without='pages are not checked for accessibility'; \
  command -v npm >/dev/null || $(call debian,npm,$$without); \
  command -v npm >/dev/null || { echo "without $(AXE) (no npm here): $$without"; exit 0; }; \
  mkdir -p $(1) && echo 'fetching $(AXE) by npm' && npm pack --silent --fetch-retries=1 --fetch-timeout=30000 --pack-destination $(1) $(AXE) </dev/null >/dev/null \
    && tar -xzf $(1)/axe-core-*.tgz -C $(1) --strip-components=1 package/axe.min.js package/LICENSE \
    && rm $(1)/axe-core-*.tgz && echo '$(AXE)' > $(1)/version \
    || echo "could not fetch $(AXE): $$without" )
endef

# $(call akash_parser,FROM,FOLDER): install Akash's own parser of SDLs, of the versions in FROM/package-lock.json; no script of a package runs.
define akash_parser
( [ ! -d $(2)/node_modules ] || [ "$$(cat $(1)/package-lock.json)" != "$$(cat $(2)/installed.json 2>/dev/null)" ] || exit 0; without='the parser of Akash checks no SDL'; \
  command -v npm >/dev/null || $(call debian,npm,$$without); \
  command -v npm >/dev/null || { echo "without Akash's parser of SDLs (no npm here): $$without"; exit 0; }; \
  rm -rf $(2) && mkdir -p $(2) && cp $(1)/package.json $(1)/package-lock.json $(2) && echo "fetching Akash's parser of SDLs by npm" \
    && npm ci --prefix $(2) --ignore-scripts --no-audit --no-fund --silent --prefer-offline --fetch-retries=3 --fetch-retry-mintimeout=1000 \
      --fetch-retry-maxtimeout=5000 --fetch-timeout=30000 </dev/null >/dev/null \
    && cp $(1)/package-lock.json $(2)/installed.json || echo "could not fetch Akash's parser of SDLs: $$without" )
endef
