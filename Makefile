VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin
BENCH_TRAINED := "sliced N=4 r=64" "projected N=4 r=32" "sliced full r=64" "attnres full" "Qwen3ForCausalLM"
BENCH_SERVED := "sliced N=8 r=64"

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

# Run nothing else meanwhile. Compiled rows are those with a published figure: each takes about a minute to compile.
bench: install
	$(RUN)/python benchmarks/memory.py
	$(RUN)/python benchmarks/depth_read.py
	$(RUN)/python benchmarks/scaling.py
	$(RUN)/python benchmarks/train_step.py --compiled-rows $(BENCH_TRAINED)
	$(RUN)/python benchmarks/prefill.py --compiled-rows $(BENCH_SERVED)
	$(RUN)/python benchmarks/decode.py --compiled-rows $(BENCH_SERVED)

lint: install
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

format: install
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

clean:
	rm -rf $(VENV) outputs build dist *.egg-info
