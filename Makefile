# The commands of the cookbook. Each sets up what it needs first; `make` alone lists them.
#
# PYTHON=python3 uses an existing environment as it is and installs nothing (a GPU host without a network).

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= $(VENV)/bin/python
READY := $(if $(filter $(VENV)/bin/python,$(PYTHON)),setup)
GPU = $(shell nvidia-smi -L 2>/dev/null | head -1)
# Without a GPU there is a worker for each core: nproc alone would say what OMP_NUM_THREADS does.
# On a GPU host up to twelve workers share a GPU, and mostly compile. A worker takes up to 2 GB. It is given 6.5 GB of a
# GPU or more: with 5, as 16 workers had on an H100, tests ran out of memory.
GPU_MB = nvidia-smi $(if $(CUDA_VISIBLE_DEVICES),--id=$(CUDA_VISIBLE_DEVICES)) --query-gpu=memory.total --format=csv,noheader,nounits
GPU_WORKERS = $(GPU_MB) | awk '{ n += $$1 < 78000 ? int($$1 / 6500) : 12 } END { print n ? n : 1 }'
WORKERS ?= $(if $(GPU),$(shell $(GPU_WORKERS)),$(shell n=$$(env -u OMP_NUM_THREADS nproc); echo $$((n < 8 ? n : 8))))
# Interpreted kernels and references run once: XLA compiles them quickly rather than well. Its older emitters, which JAX
# 0.12 no longer has, take a third of the time; one module of LLVM's for a program takes less than several.
QUICK_XLA = --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true \
  --xla_cpu_parallel_codegen_split_count=1 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export XLA_PYTHON_CLIENT_PREALLOCATE ?= false
export XLA_FLAGS ?= $(if $(GPU),,$(QUICK_XLA))
export JUPYTER_CONFIG_PATH := $(CURDIR)/tools/jupyter$(if $(JUPYTER_CONFIG_PATH),:$(JUPYTER_CONFIG_PATH))

.PHONY: help
help:  ## List these commands
	@echo "The Pallas kernel cookbook. Commands:"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Each takes PYTHON=python3 to use that interpreter and what it has, without installing anything."

# TIMES=1 writes how long a command took into results/, from where the README's table is rendered.
TIMED = $(if $(TIMES),$(PYTHON) tools/times.py "make $@$(if $(ALL), ALL=1)")

# Without a GPU chapters show figures and bounds of the GPU on which the first, as most of them, was recorded.
RECORDED_ON = sed -n 's/.*"gpu": "NVIDIA \([A-Z0-9]*\).*/\1/p' notebooks/00_start_here.ipynb | tr A-Z a-z
run lab: export COOKBOOK_GPU ?= $(if $(GPU),,$(shell $(RECORDED_ON)))

.PHONY: run
run: export OMP_NUM_THREADS ?= 1
run: $(READY)  ## Run the course into build/notebooks (NB=05 for one notebook; ARGS="-p n 8192" for its parameters)
	@$(TIMED) $(PYTHON) tools/run_notebooks.py $(NB) $(ARGS)

# conftest.py shares them out: all cells of a notebook to one worker.
PYTEST = -n $(WORKERS) --nbval-lax --nbval-current-env --nbval-cell-timeout=120

.PHONY: test
test: export OMP_NUM_THREADS ?= 1
test: $(READY)  ## Check the style, test the kernels, run every notebook (ALL=1 for all tests; ARGS="-k softmax" for some)
	@$(PYTHON) -m ruff check --quiet .
	@$(PYTHON) -m ruff format --check --quiet . || { echo "Run: $(PYTHON) -m ruff format ."; exit 1; }
	@$(TIMED) $(MAKE) --no-print-directory _pytest

# Each worker sees one GPU. Where a host has several, the tests that need them run once more: a few processes, for each
# kernel waits for all GPUs, which serve the processes in turn. Pytest ends with 5 if ARGS choose none of them.
GPUS = $(shell $(GPU_MB) 2>/dev/null | wc -l)
ACROSS = $(if $(PATHS),$(filter-out notebooks% %.ipynb,$(PATHS)),tests)
.PHONY: _pytest
_pytest:
	@$(PYTHON) -m pytest $(PYTEST) $(if $(ALL),,-m "not slow") $(ARGS) $(or $(PATHS),tests notebooks); first=$$?; \
	if [ $(GPUS) -gt 1 ] && [ -n "$(ACROSS)" ]; then \
	  COOKBOOK_ALL_GPUS=1 $(PYTHON) -m pytest -n 4 -m "several_gpus$(if $(ALL),, and not slow)" $(ARGS) $(ACROSS); \
	  second=$$?; [ $$second -eq 5 ] || [ $$first -ne 0 ] || first=$$second; \
	fi; exit $$first

.PHONY: lab
lab: $(READY)  ## Open the notebooks in JupyterLab
	@$(PYTHON) -m jupyter lab --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

# The site and the figures show the same on each machine.
.PHONY: site
site: export COOKBOOK_GPU ?= h200
site: $(READY)  ## Build the web site into build/site
	@$(PYTHON) site/build.py $(ARGS)

# A command line's CASE is in the environment as it is, quotes and all.
.PHONY: fuzz
fuzz: export OMP_NUM_THREADS ?= 1
fuzz: $(READY)  ## Compare random problems of every op with NumPy (SECONDS=300 SEED=1 WORKERS=4 OPS=matmul,softmax; CASE='...' runs one again)
	@$(PYTHON) -m fuzz $(if $(CASE),"$$CASE",--seconds $(or $(SECONDS),60) --seed $(or $(SEED),1) --workers $(WORKERS) $(if $(OPS),--ops $(OPS))) $(ARGS)

.PHONY: bench
bench: $(READY)  ## Time the kernels and their peers on this GPU, into results/ (OP=softmax for one; with SAMPLE=40 SEED=1, random problems of it)
	@$(PYTHON) -m bench $(OP) $(if $(SAMPLE),--sample $(SAMPLE) --seed $(or $(SEED),1)) $(ARGS)

.PHONY: record
record: $(READY)  ## On a GPU: run the notebooks in place and record their outputs and results/ (NB=05 for one)
	@$(PYTHON) tools/run_notebooks.py --record $(NB) $(ARGS)

.PHONY: stale
stale: $(READY)  ## Find the recorded figures whose programs have changed since; no GPU is needed
	@$(PYTHON) tools/stale.py $(ARGS)

.PHONY: figures
figures: export COOKBOOK_GPU ?= h200
figures: $(READY)  ## Draw the SVGs of figures/ and the README's numbers again, from results/ (ARGS="memory wgmma" for two chapters)
	@$(PYTHON) -m figures $(ARGS)
	@$(PYTHON) tools/render_readme.py

.PHONY: draw
draw: $(READY)  ## Draw the pictures in notebooks again, in place; no GPU is needed (NB=05; ARGS="--say CELL" for its sentences with figures)
	@$(PYTHON) -m tools.draw $(NB) $(ARGS)

.PHONY: wheelhouse
wheelhouse: $(READY)  ## Collect the wheels that a GPU host without a network needs beside JAX into build/wheelhouse
	@$(PYTHON) tools/wheelhouse.py $(ARGS)

.PHONY: lift
lift: $(READY)  ## Copy an op and what it needs into your package, and call it there (OP=attention TO=../yours/kernels)
	@$(PYTHON) tools/lift.py $(OP) $(TO) $(ARGS)

.PHONY: clean
clean:  ## Remove what these commands made, the environment included
	rm -rf build .venv .uv .pytest_cache .ruff_cache
	find cookbook lab serving bench fuzz figures site tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: setup
setup:
	@VENV=$(VENV) JAX_VERSION=$(JAX_VERSION) tools/setup.sh
