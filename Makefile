# Every version of server_patches.compat.SUPPORTED; the last one is what all targets but test-matrix run with.
ENGINES := 0.5.21 0.5.22 0.5.23
NEWEST := $(lastword $(ENGINES))
SGLANG ?= $(NEWEST)
VENV := .venv$(if $(filter-out $(NEWEST),$(SGLANG)),-$(SGLANG))
PYTHON ?= python3
INSTALLED := $(VENV)/.installed-$(SGLANG)
EXTRA := $(wildcard requirements/engine-cpu-$(SGLANG).txt)
BIN := $(VENV)/bin
ENGINE_TESTS := tests/core/test_payload_sglang.py tests/patches tests/server

.PHONY: help install demo demo-grpo test test-engine test-matrix check clean

help:
	@echo "make install  .venv with the plugin and the real sglang-diffusion for CPU (about 3 minutes, 2.4 GB)"
	@echo "make demo     start the real engine, push LoRA updates, verify them, draw the images"
	@echo "make demo-grpo   reinforcement learning in miniature with the real engine"
	@echo "make test     all tests that need no GPU, with coverage of the core"
	@echo "make check    ruff and mypy"
	@echo "make test-matrix   what depends on sglang, on each of sglang $(ENGINES) (2.4 GB each)"

install: $(INSTALLED)

$(INSTALLED): requirements/torch-cpu.txt requirements/engine-cpu.txt requirements/engine-cpu-nodeps.txt $(EXTRA) requirements/dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements/torch-cpu.txt
	$(BIN)/python -m pip install -q -r requirements/engine-cpu.txt $(EXTRA:%=-r %) -r requirements/dev.txt
	$(BIN)/python -m pip install -q --no-deps -r requirements/engine-cpu-nodeps.txt sglang==$(SGLANG)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

demo: install
	$(BIN)/python -m examples.demo

demo-grpo: install
	$(BIN)/python -m examples.tiny_grpo

test: install
	$(BIN)/python -m pytest -m "not gpu and not slow" --cov --cov-report=term

test-engine: install
	$(BIN)/python -m pytest -m "not gpu and not slow" $(ENGINE_TESTS)

test-matrix:
	@for version in $(ENGINES); do \
	    echo "sglang $$version"; \
	    if $(MAKE) test-engine SGLANG=$$version; then green="$$green $$version"; else red="$$red $$version"; fi; \
	done; \
	echo "green:$${green:- none}; red:$${red:- none}"; \
	test -z "$$red"

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-* build demo_output .coverage
