VENV ?= .venv
PYTHON ?= python3
RUN := $(VENV)/bin

.PHONY: demo test lint format install clean

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

lint: install
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .

format: install
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

clean:
	rm -rf $(VENV) outputs build dist *.egg-info
