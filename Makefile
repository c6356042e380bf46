# `make reproduce` and `make test` are all a new machine needs: Python 3.11 to 3.13, pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SCALE ?= demo
# The demo's models are so small that each is trained by one core.
CORES := $(shell nproc)
SIDE_BY_SIDE := $(if $(filter demo,$(SCALE)),cluster.parallel=$(CORES) cluster.cpus=1)
# Where it runs: the GPU studies need a machine with GPUs (slurm/clusters/).
CLUSTER ?= $(if $(filter gpu,$(SCALE)),gpu_box,local)
CUDA_SOURCES := $(wildcard kernels/twell/hopper/*.cu kernels/twell/hopper/*.cuh)
# From the CUDA toolkit; and parts of the names of our kernels, so that torch's own are left alone.
SANITIZER ?= compute-sanitizer
UNCACHED := sparse_backends sparse_training hopper few_tokens triton_kernels dense_activation
SANITIZED := quantise gate_pack gated_down few_gate few_down transpose token_gradients weight_gradients hot_forward \
  hot_hidden hot_backward mark_kernel sum_up_kernel order_kernel reserve_kernel
NAMED_BARRIERS := tests/gpu/test_sanitize.py::test_more_than_one_slice_of_the_hidden_size[hopper]
# Processes that run tests, each a file at a time; auto: one more than there are cores. 0: all in this process.
WORKERS ?= auto
PYTEST := -m pytest tests --ignore=tests/triton_interpreter -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Triton is told of its interpreter when it is imported: in processes of their own.
INTERPRETER := -m pytest tests/triton_interpreter -n $(WORKERS)
# The environments of `make test-newest` and `make test-oldest`, made anew each time.
NEWEST := .venv-newest
OLDEST := .venv-oldest
# Of `make fuzz`: how long, and from which seed.
SECONDS ?= 600
SEED ?= 0
# Folder with the seven tasks as JSON lines; empty: the tasks are reported as missing, cross-entropy is still measured.
TASKS ?=
# Text to train on instead of the study's own: path:FOLDER, hf:NAME.
DATA ?=

# The package `twell` of this checkout, also where it is not installed.
export PYTHONPATH := $(CURDIR)/kernels$(if $(PYTHONPATH),:$(PYTHONPATH))

.DEFAULT_GOAL := help
.PHONY: help install reproduce figures notebooks test test-all test-newest test-oldest fuzz test-gpu test-gpu-uncached sanitize lint format

help: ## list the targets
	@echo "make reproduce      the paper in small on this machine: four to nine minutes on two cores"
	@echo "make test           the tests that a change is most likely to break: seven minutes"
	@echo
	@echo "All targets:"
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(VENV)/.installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else f"Python 3.11, 3.12 or 3.13 is needed, this is {sys.version.split()[0]}: make PYTHON=python3.12 ...")'
	@echo "Installing the pinned environment into $(VENV): about 3 GB (more where torch comes with CUDA) and three minutes."
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt \
	  || { echo "pip could not install requirements.txt: its last lines above name the package" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e . \
	  || { echo "pip could not install the package twell of this repository (pyproject.toml)" >&2; exit 1; }
	@touch $@

install: $(VENV)/.installed ## make .venv with the pinned requirements

reproduce: $(VENV)/.installed ## the paper in small on this machine; on GPUs: SCALE=gpu (DATA=path:folder TASKS=folder)
	$(BIN)/python -m slurm.submit study=$(SCALE) cluster=$(CLUSTER) $(SIDE_BY_SIDE) $(if $(TASKS),'tasks=$(TASKS)') $(if $(DATA),'data=$(DATA)')

figures: $(VENV)/.installed ## every table, figure, page, number and notebook again from the committed rows; no GPU, three minutes
	$(BIN)/python -m analysis.build
	$(BIN)/python -m experiments.run_notebooks out=notebooks

notebooks: $(VENV)/.installed ## open the notebooks in JupyterLab (TWELL_RESULTS=folder: on other results)
	$(BIN)/jupyter lab notebooks

test: $(VENV)/.installed ## what a change is most likely to break (WORKERS=2)
	$(BIN)/python $(PYTEST) -m "not slow"
	TRITON_INTERPRET=1 $(BIN)/python $(INTERPRETER) -m "not slow"

test-all: test ## everything that must hold: also a real SLURM, the whole graph at scale=smoke, notebooks, the wheel, fuzzing
	$(BIN)/python $(PYTEST) -m slow
	TRITON_INTERPRET=1 $(BIN)/python $(INTERPRETER) -m slow

# What pip resolves today if nothing is pinned: a user of `twell` has no pins.
test-newest: ## everything in an environment of its own, with the newest versions that pip resolves
	$(PYTHON) -m venv --clear $(NEWEST)
	sed -E 's/==[^;# ]+//' requirements.txt > $(NEWEST)/requirements.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check -r $(NEWEST)/requirements.txt
	$(NEWEST)/bin/python -m pip list --disable-pip-version-check | grep -E '^(torch|triton|transformers|numpy) '
	$(NEWEST)/bin/python $(PYTEST)
	TRITON_INTERPRET=1 $(NEWEST)/bin/python $(INTERPRETER)

# The lower bounds of pyproject.toml; torch brings the triton and the CUDA that fit it. Triton 3.6's interpreter needs an
# older numpy.
test-oldest: ## the same with the oldest torch and transformers that `twell` allows
	$(PYTHON) -m venv --clear $(OLDEST)
	sed -nE 's/.*"(torch|transformers)(\[torch\])?>=([0-9.]+)".*/\1==\3.0/p' pyproject.toml > $(OLDEST)/requirements.txt
	grep -vE '^(torch|transformers|triton|cuda-bindings|nvidia-cuda-[a-z]+|numpy)==' requirements.txt >> $(OLDEST)/requirements.txt
	echo 'numpy<2.4' >> $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -r $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python -m pip list --disable-pip-version-check | grep -E '^(torch|triton|transformers|numpy) '
	$(OLDEST)/bin/python $(PYTEST)
	TRITON_INTERPRET=1 $(OLDEST)/bin/python $(INTERPRETER)

fuzz: $(VENV)/.installed ## hostile options and damaged files (SECONDS=600 SEED=0)
	PYTHONPATH=tests $(BIN)/python -m fuzz seconds=$(SECONDS) seed=$(SEED)

test-gpu: ## the GPU tests, with the torch of the current environment
	$(PYTHON) -m pytest tests/gpu tests/test_kernels_torch_internals.py -m gpu

# Without torch's cache each tensor is an allocation of its own: a kernel that reads far past the end of one fails.
test-gpu-uncached: ## the GPU tests of kernels, without torch's caching allocator
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(PYTHON) -m pytest $(UNCACHED:%=tests/gpu/test_%.py) -m gpu

# Likewise, so that memcheck sees where each tensor ends.
sanitize: ## memcheck, racecheck and synccheck over small GPU tests (SANITIZER=path of compute-sanitizer)
	@command -v $(SANITIZER) >/dev/null || { echo "make sanitize needs compute-sanitizer of the CUDA toolkit, and finds no $(SANITIZER): SANITIZER=path" >&2; exit 1; }
	# racecheck stops with an internal error when it is given names of kernels (compute-sanitizer of CUDA 13.0). Where
	# pairs of warps have named barriers of their own it reports what a barrier of the whole block orders (docs/log/2026-11-20.md).
	set -e; for tool in "memcheck --report-api-errors no $(SANITIZED:%=--kernel-name kernel_substring=%)" \
	    "synccheck $(SANITIZED:%=--kernel-name kernel_substring=%)" racecheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $$tool --error-exitcode 1 --launch-timeout 300 --target-processes application-only \
	    $(PYTHON) -m pytest tests/gpu/test_sanitize.py -m gpu -rs \
	    $$(test "$$tool" != racecheck || echo "--deselect=$(NAMED_BARRIERS)"); \
	done

lint: $(VENV)/.installed ## ruff, clang-format of the CUDA sources, and mypy on the folders of pyproject.toml
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CUDA_SOURCES)
	$(BIN)/mypy

format: $(VENV)/.installed ## let ruff and clang-format rewrite the files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CUDA_SOURCES)
