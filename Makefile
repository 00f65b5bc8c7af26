# Two commands that do all the set-up: `make demo` and `make test`. Each makes .venv, installs with pip, and runs.
# `make demo-vision` does the same with images.
# `make wheel-demo` tries the wheel by itself: it is built, installed into an empty environment, and runs in an empty folder.
#
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"   PyTorch without CUDA from PyTorch's index
#   make test PYTHON=python3.12 VENV=/somewhere/else

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
WORKERS ?= 2

PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

# Bytecode is kept, whatever the environment says: every worker, and every process that a test starts, reads it.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(VENV)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal --durations 10

.PHONY: demo demo-vision test test-system test-all lint bench wheel-demo clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.demo
	$(VENV)/bin/linnet demo

demo-vision: $(VENV)/.demo-vision
	$(VENV)/bin/linnet demo --vision

test: $(VENV)/.test lint
	$(PYTEST) -m "not system and not thorough and not reproduce"

# Several processes, a cluster, a browser, kills.
test-system: $(VENV)/.test
	$(PYTEST) -m "system and not thorough"

# Both, with the cases that they leave out, marked `thorough`.
test-all: $(VENV)/.test lint
	$(PYTEST) -m "not reproduce"

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/mypy

bench: $(VENV)/.demo
	$(VENV)/bin/python benchmarks/cpu_attention.py
	$(VENV)/bin/python benchmarks/train_overhead.py

# The quick demo may take 90 s; the installation is not counted.
wheel-demo: $(VENV)/bin/python
	scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
	$(VENV)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$$scratch" . && \
	$(PYTHON) -m venv "$$scratch/venv" && \
	"$$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt \
	  "$$(echo "$$scratch"/linnet_lm-*.whl)[study]" && \
	mkdir "$$scratch/empty" && cd "$$scratch/empty" && \
	env -u PYTHONPATH timeout 90 "$$scratch/venv/bin/linnet" demo --quick

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Linnet needs Python 3.11 or newer; name one with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing Linnet and PyTorch into $(VENV): some minutes and about a gigabyte or more of downloads, without further output"
	$(PIP) -e '.[study]'
	touch $@

$(VENV)/.demo-vision: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing Linnet, PyTorch and Pillow into $(VENV): some minutes and about a gigabyte or more of downloads, without further output"
	$(PIP) -e '.[study,vision]'
	touch $(VENV)/.demo $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing Linnet, PyTorch and the tools of the tests into $(VENV): some minutes, without further output"
	$(PIP) -e '.[dev]'
	touch $(VENV)/.demo $(VENV)/.demo-vision $@
