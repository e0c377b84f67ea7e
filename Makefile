VENV := .venv
PYTHON ?= python3
INSTALLED := $(VENV)/.installed
BIN := $(VENV)/bin

.PHONY: help install demo test check clean

help:
	@echo "make install  .venv with the plugin and the real sglang-diffusion for CPU (about 3 minutes, 2.4 GB)"
	@echo "make demo     start the real engine, push LoRA updates, verify them, draw the images"
	@echo "make test     all tests that need no GPU, with coverage of the core"
	@echo "make check    ruff and mypy"

install: $(INSTALLED)

$(INSTALLED): requirements/torch-cpu.txt requirements/engine-cpu.txt requirements/engine-cpu-nodeps.txt requirements/dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements/torch-cpu.txt
	$(BIN)/python -m pip install -q -r requirements/engine-cpu.txt -r requirements/dev.txt
	$(BIN)/python -m pip install -q --no-deps -r requirements/engine-cpu-nodeps.txt
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

demo: install
	$(BIN)/python -m examples.demo

test: install
	$(BIN)/python -m pytest -m "not gpu and not slow" --cov --cov-report=term

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build demo_output .coverage
