VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin
COMPILED_TRAINING := "sliced N=4 r=64" "projected N=4 r=32" "sliced full r=64" "attnres full"

.PHONY: demo test bench lint format install clean

install: $(VENV)/.installed

# torch goes in first and pinned: an open range would pull in CUDA builds.
$(VENV)/.installed: setup.py pyproject.toml constraints.txt
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --constraint constraints.txt torch
	$(RUN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: install
	$(RUN)/python examples/quickstart.py

test: lint
	$(RUN)/python -m pytest -n 2

# Run nothing else meanwhile. A compiled row takes about a minute: here only those that a figure of the README needs.
bench: install
	$(RUN)/python benchmarks/memory.py
	$(RUN)/python benchmarks/depth_read.py
	$(RUN)/python benchmarks/scaling.py
	$(RUN)/python benchmarks/train_step.py --repeats 4 --compiled-rows $(COMPILED_TRAINING)
	$(RUN)/python benchmarks/prefill.py --repeats 3 --modes eager
	$(RUN)/python benchmarks/decode.py --repeats 5 --compiled-rows "sliced N=8 r=64"

lint: install
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: install
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

clean:
	rm -rf $(VENV) outputs build dist *.egg-info
