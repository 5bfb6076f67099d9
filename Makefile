# make demo: the main job, with a node killed half way.   make test: everything CI runs.
PYTHON ?= python3
# What pip is asked for. On a machine without a GPU: a CPU wheel's path, say.
TORCH ?= torch>=2.13,<2.14
EXTRAS ?= dev,dashboard,slurm,docker,kubernetes,tensorboard,s3,mlflow,wandb,hf,accelerate,docs
BENCHMARKS ?= plan_scale plan_choice plan_loss start overhead snapshots restart goodput against_accelerate save coordinator traffic recovery submit kubernetes_submit status large dashboard gpu

# What depends on torch.
TORCH_TESTS = tests/config/test_torch_version.py tests/control tests/node tests/checkpoints tests/tiers tests/guards tests/hub tests/train tests/tools tests/plan/test_shapes.py tests/integration/test_scripts.py tests/integration/test_main_job.py tests/integration/test_fsdp1.py tests/integration/test_integrity.py tests/integration/test_damage.py

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST = $(BIN)/python -m pytest --numprocesses=3 --no-loadscope-reorder
unexport PYTHONDONTWRITEBYTECODE  # tests start a thousand interpreters: each would compile the package again
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.PHONY: help setup demo lint check test test-torch test-on bench soak docs docs-keys dist vendor clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

setup: $(READY)  ## .venv with everything the other targets need

demo: $(READY)  ## the main job on this machine, one of its nodes killed half way: about 2 minutes
	@$(BIN)/python examples/demo.py

lint: $(READY)  ## ruff, mypy and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

check: lint  ## lint and the tests that start no jobs
	$(PYTEST) -m "not integration and not soak"

test: lint  ## lint and all tests
	$(PYTEST) -m "not soak"

test-torch:  ## what depends on torch, on another version of it: make test-torch TORCH=2.15.0
	$(MAKE) test-on VENV=.venv-torch-$(TORCH) TORCH=torch==$(TORCH) EXTRAS=dev,hf,accelerate,s3

test-on: $(READY)
	$(PYTEST) -m "not soak" $(TORCH_TESTS)

bench: $(READY)  ## every benchmark, one after the other; traffic, recovery and submit need root
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py; done

soak: $(READY)  ## what is slow and rare: tests, then 50 kills at random moments of a 4-node job; needs root
	$(PYTEST) -m soak
	$(BIN)/python benchmarks/soak.py --kills 50
	$(BIN)/python benchmarks/soak.py --kills 50 --beside checkpoint.memory.every_steps=1

docs: $(READY)  ## the documentation site, in site/; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

docs-keys: $(READY)  ## what docs/reference/ takes from the code: keys, verbs, events
	$(BIN)/python docs/keys.py

dist: $(READY)  ## wheel and sdist in dist/, checked by twine
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

STATIC := $(CURDIR)/fsdp_jobs/observe/dashboard/static
UPLOT = uplot-1.6.32
UPLOT_SHA512 = KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==

vendor:  ## the dashboard's charts, uPlot, from npm: the version that is named here, checked
	set -e; cd "$$(mktemp -d)"; npm pack --silent $(subst -,@,$(UPLOT)); \
	[ "$$(openssl dgst -sha512 -binary $(UPLOT).tgz | base64 -w0)" = "$(UPLOT_SHA512)" ] || { echo "$(UPLOT) is not what it was"; exit 1; }; \
	tar -xzf $(UPLOT).tgz; cp package/dist/uPlot.iife.min.js package/dist/uPlot.min.css $(STATIC)/; cp package/LICENSE $(STATIC)/uPlot.LICENSE

clean:  ## remove .venv, caches and builds; runs/ stays
	rm -rf $(VENV) .venv-torch-* dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: make PYTHON=python3.12, say"; exit 1; }
	@$(PYTHON) -c 'import ctypes' || { echo "$(PYTHON) was built without libffi, which PyTorch needs: apt install libffi-dev, and build it again"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) -e '.[$(EXTRAS)]'
	@touch $@
