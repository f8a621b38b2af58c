# Everything runs in .venv, which the first target that needs it makes. PYTHON picks the interpreter (3.11 or later).
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 2

.PHONY: help demo agent chat test check format bench report stress gpu-test clean

help:  ## say what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

# torch goes first and by exact version: a range lets pip choose a build with several GB of CUDA libraries.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps bfcl-eval
	touch $@

demo: .venv/installed  ## train an agent through a real worker on the CPU (under 4 minutes)
	$(BIN)/python -m examples.find_number

agent: .venv/installed  ## watch SmolLM2 use two tools through a real worker (fetches 93 MB once)
	$(BIN)/python -m examples.agent

chat: .venv/installed  ## hold a two-turn chat with SmolLM2 through a real worker (fetches 93 MB once)
	$(BIN)/python -m examples.smollm2

test: .venv/installed  ## run the tests (under 12 minutes on 2 cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --durations 12

check: .venv/installed  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/installed  ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/installed  ## CPU speed: engine against transformers, host side alone, wire alone
	$(BIN)/python -m bench.cpu
	$(BIN)/python -m bench.scheduler
	$(BIN)/python -m bench.wire

report: .venv/installed  ## draw what is in bench/results into README.md, docs/performance.md and docs/figures
	$(BIN)/python -m bench.report

stress: .venv/installed  ## what is too long for `make test`
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m stress --timeout 1800

gpu-test:  ## run the GPU and kernel tests with the interpreter at hand (it must have torch with CUDA, and flashinfer)
	$(PYTHON) -m pytest -m "not stress" tests/gpu tests/engine/kernels tests/engine/cuda

clean:  ## remove the environment and caches
	rm -rf runs rollout-metrics .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
