VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin

.PHONY: demo test test-versions bench lint format install clean

install: $(VENV)/.installed

# torch by its pin: on Linux the default build brings CUDA libraries; a CPU build of this version that is there stays.
$(VENV)/.installed: setup.py pyproject.toml constraints.txt
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --constraint constraints.txt torch
	$(RUN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: install
	$(RUN)/python examples/quickstart.py

test: lint
	$(RUN)/python -m pytest -n 2

# Makes two environments, with a torch each, in outputs/versions.
test-versions: install
	$(RUN)/python tests/versions.py oldest newest

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
