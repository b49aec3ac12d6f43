# Two commands on a fresh machine:  make serve   and   make test
PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup serve test test-slow lint format bench gpu-check clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
		{ echo "jax-paged needs Python 3.12 or newer; '$(PYTHON)' is older. Try: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,plot]'
	@touch $@

serve: setup
	@$(BIN)/python serve.py $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m 'slow and not gpu' --timeout=3600 $(ARGS)

# jax_paged.models and jax_paged.pallas_kernels live in top-level folders. Linters read the file system
# and not import hooks, so they get a tree of links that looks as the installed package does.
LINKS := $(VENV)/links
lint: setup
	@rm -rf $(LINKS) && mkdir -p $(LINKS)/jax_paged
	@ln -s $(CURDIR)/jax_paged/*.py $(CURDIR)/models $(CURDIR)/pallas_kernels $(LINKS)/jax_paged/
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	PYTHONPATH=$(LINKS) $(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python benchmarks/throughput.py $(ARGS)

gpu-check:
	$(PYTHON) benchmarks/gpu_check.py $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info
