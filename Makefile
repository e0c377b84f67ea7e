# Every version of server_patches.compat.SUPPORTED; the last one is what all targets but test-matrix run with.
ENGINES := 0.5.21 0.5.22 0.5.23
NEWEST := $(lastword $(ENGINES))
SGLANG ?= $(NEWEST)
VENV := .venv$(if $(filter-out $(NEWEST),$(SGLANG)),-$(SGLANG))
PYTHON ?= python3
INSTALLED := $(VENV)/.installed-$(SGLANG)
EXTRA := $(wildcard requirements/engine-cpu-$(SGLANG).txt)
BIN := $(VENV)/bin
# every Python process of the environment can import torchvision, beside a CPU build of torch too
ON_CPU = $(BIN)/python -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "sgld_lora_merge_on_cpu.pth").write_text("$(CURDIR)/support/engine_site\nimport torchvision_on_cpu\n")'
SECONDS ?= 240
ENGINE_TESTS := tests/core/wire/test_payload_sglang.py tests/patches tests/server

.PHONY: help install install-locked demo demo-sync test test-engine test-matrix check docs fuzz schema audit licences clean

help:
	@echo "make install  .venv with the plugin and the real sglang-diffusion for CPU (about 3 minutes, 2.4 GB)"
	@echo "make install-locked   the same, every archive but torch's by its hash (requirements/lock.txt says for which machine)"
	@echo "make demo     reinforcement learning in miniature with the real engine, every sync verified (about 4 minutes)"
	@echo "make demo-sync   push LoRA updates into the real engine, verify them, draw the images (1 minute)"
	@echo "make test     all tests that need no GPU, with coverage of the core"
	@echo "make check    ruff and mypy"
	@echo "make docs     the site of docs/, in build/site; a warning is an error"
	@echo "make fuzz     every reader of a caller's bytes under atheris, SECONDS=$(SECONDS) each"
	@echo "make schema   the engine's answers against its own OpenAPI schema, by schemathesis"
	@echo "make audit    known vulnerabilities of what is installed (needs a network)"
	@echo "make test-matrix   what depends on sglang, on each of sglang $(ENGINES) (2.4 GB each)"

install: $(INSTALLED)

$(INSTALLED): requirements/torch-cpu.txt requirements/engine-cpu.txt requirements/engine-cpu-nodeps.txt $(EXTRA) requirements/dev.txt requirements/docs.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements/torch-cpu.txt
	$(BIN)/python -m pip install -q -r requirements/engine-cpu.txt $(EXTRA:%=-r %) -r requirements/dev.txt -r requirements/docs.txt
	$(BIN)/python -m pip install -q --no-deps -r requirements/engine-cpu-nodeps.txt sglang==$(SGLANG)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	$(ON_CPU)
	touch $@

# the same environment from archives of known content, on the kind of machine that the lock is for
install-locked: requirements/lock.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "the lock is of Python 3.11: make PYTHON=python3.11 install-locked")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements/torch-cpu.txt
	$(BIN)/python -m pip install -q --no-deps --require-hashes -r requirements/lock.txt
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	$(ON_CPU)
	touch $(INSTALLED)

demo: install
	$(BIN)/python -m examples.tiny_grpo

demo-sync: install
	$(BIN)/python -m examples.demo

test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not gpu and not slow" --cov --cov-report=term

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

docs: install
	$(BIN)/mkdocs build --strict

$(INSTALLED)-fuzz: $(INSTALLED) requirements/fuzz.txt
	$(BIN)/python -m pip install -q -r requirements/fuzz.txt
	touch $@

fuzz: $(INSTALLED)-fuzz
	for target in unpickler layout upload request; do $(BIN)/python -m fuzz $$target -max_total_time=$(SECONDS) || exit 1; done

schema: $(INSTALLED)-fuzz
	$(BIN)/python -m pytest -m slow tests/server/test_openapi.py

audit: $(INSTALLED)-fuzz
	$(BIN)/pip-audit --skip-editable

licences: install
	$(BIN)/python -m support.licences > docs/licences.md

clean:
	rm -rf .venv .venv-* build demo_output .coverage
