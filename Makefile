# One place for every command. `make` alone lists them. Nothing has to be installed by hand before.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# make dataset RAW=/path/to/imagenet [SIZE=256] [OUT=data/NAME.zarr] [JOBS=-1] [ARGS="--on-error skip ..."]
RAW  ?=
SIZE ?= 256
OUT  ?= data/imagenet-$(SIZE).zarr
JOBS ?= -1
ARGS ?=
export RAW OUT  # for the shell to quote: a path may hold an apostrophe
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes that import the same modules

.PHONY: help setup demo dataset test test-docs test-quick test-slow lint format bench docs gpu-check clean

help:
	@echo "make setup      a virtual environment in .venv with everything that training needs"
	@echo "make demo       handwritten digits: images -> store -> two-rank training, in under two minutes"
	@echo "make dataset    RAW=/path/to/imagenet [SIZE=256] [OUT=data/NAME.zarr] [JOBS=-1] [ARGS=...]"
	@echo "make test       the tests, in under three minutes; test-quick: those that take seconds"
	@echo "make test-docs  every command and code block of the documents, and the examples"
	@echo "make test-slow  kills, elasticity, clusters, fuzzing"
	@echo "make lint       ruff, mypy and the rule of imports; format: rewrite with ruff"
	@echo "make bench      the benchmarks of tests/bench"
	@echo "make docs       the public API as HTML pages in build/docs, from its docstrings"
	@echo "make gpu-check  training throughput with and without the loader, on this machine's GPU"
	@echo "make clean      delete .venv and caches; data/ and runs/ stay"

setup: $(VENV)/.setup

$(VENV)/.setup: pyproject.toml $(wildcard pipeline/compiled/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; run make with PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV) || \
	  { echo "error: $(PYTHON) can't make a virtual environment; on Debian: apt-get install python3-venv"; exit 2; }
	$(BIN)/pip install --quiet --editable '.[demo]'
	$(BIN)/python -m pipeline.compiled.install
	@touch $@

$(VENV)/.setup-dev: $(VENV)/.setup
	$(BIN)/pip install --quiet --editable '.[demo,dask,ray,parquet,timm,remote,examples,dev]'
	$(BIN)/python -m pipeline.compiled.install
	@touch $@

demo: setup
	$(BIN)/python data/demo.py

dataset: setup
ifeq ($(strip $(RAW)),)
	@echo "RAW is not given: building the demo's sample store (handwritten digits) instead of ImageNet."
	@echo "RAW may be a folder with train/ and val/, the official ImageNet archives' folder, the Kaggle tree,"
	@echo "tars, parquet files or a manifest: make dataset RAW=/path/to/imagenet"
	$(BIN)/python data/make_digits.py data/digits
	$(BIN)/python -m pipeline convert data/digits data/digits-32.zarr --size 32 --n-jobs $(JOBS) $(ARGS)
else
	$(BIN)/python -m pipeline convert "$$RAW" "$$OUT" --size $(SIZE) --n-jobs $(JOBS) $(ARGS)
endif

PARALLEL := -n logical --maxprocesses 8 --dist loadfile

test: $(VENV)/.setup-dev
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" --ignore=tests/docs $(ARGS)

test-docs: $(VENV)/.setup-dev
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" tests/docs $(ARGS)

test-quick: $(VENV)/.setup-dev
	$(BIN)/python -m pytest -m quick $(ARGS)

test-slow: $(VENV)/.setup-dev
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(VENV)/.setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.setup-dev
	$(BIN)/python -m tests.bench

docs: $(VENV)/.setup-dev
	$(BIN)/python -m pdoc --output-directory build/docs --docformat google pipeline.conversion.api \
	  pipeline.conversion.options pipeline.store.reader trainer.dataset trainer.loader trainer.order \
	  trainer.augment trainer.resample

gpu-check: setup
	$(BIN)/python -m trainer.gpu_check $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
