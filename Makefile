# Everything runs in .venv, made here on first use. Needs Python 3.10 to 3.13 and Linux.
PYTHON ?= python3
# The torch that is tested. Another build: make demo TORCH="torch==2.13.0 --index-url ..."
TORCH  ?= torch==2.13.0
RANKS  ?= 2
# Test processes at a time, each with ranks of its own. One more than two cores: many tests wait for time to pass.
TESTERS ?= 3
OUT    ?= demo-out

VENV := .venv
BIN  := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test thorough check bench conformance frameworks docs clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(VENV)/.demo ## train a small GPT with 2 ranks on this machine (about 90 s)
	$(BIN)/gradsync demo --ranks $(RANKS) --out $(OUT)

# In the order of their names, files that take long come first; by the number of tests, which is the default, last.
PYTEST := $(BIN)/pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.test check ## ruff, mypy and the tests; each front and transport, not all combinations of them
	$(PYTEST)

thorough: $(VENV)/.test ## all tests, with all combinations of front, transport and number of ranks
	$(PYTEST) --thorough

check: $(VENV)/.test ## ruff and mypy only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench ## speed, bandwidth, memory and the engine's own cost, against torch's and MPI (about an hour)
	$(BIN)/python -m benchmarks step
	$(BIN)/python -m benchmarks sharing
	-$(BIN)/python -m benchmarks hosts  # needs root, for network namespaces
	$(BIN)/python -m benchmarks bandwidth
	$(BIN)/python -m benchmarks footprint
	$(BIN)/python -m benchmarks engine
	$(BIN)/python -m benchmarks watch
	$(BIN)/python -m benchmarks shards
	$(BIN)/python -m benchmarks elastic
	$(BIN)/python -m benchmarks records

conformance: $(VENV)/.test ## torch's own DistributedDataParallel tests against ours
	$(BIN)/python tests/conformance/check.py

frameworks: $(VENV)/.frameworks ## Accelerate, Lightning, transformers and Ignite, unchanged, on our engine (about 1 min)
	$(BIN)/pytest tests/frameworks

docs: $(VENV)/.docs ## build the site of the docs into site/; what is missing or leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	! grep -rnE '(src|href)="(https?:)?//' site --include='*.html'  # it works offline

clean: ## remove what these targets made
	rm -rf $(VENV) $(OUT) bench-out site

# The stamps depend on what decides the installation, so a second run installs nothing.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "gradsync needs Python 3.10 to 3.13; $(PYTHON) is $$($(PYTHON) --version). Try make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet -e '.[cli]'
	@touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet -e '.[cli,dev]'
	@touch $@ $(VENV)/.demo

# With the torch that is there: a framework that asks for another one is refused.
$(VENV)/.frameworks: $(VENV)/.test
	$(BIN)/pip freeze | { grep '^torch==' || true; } > $(VENV)/torch.txt
	$(BIN)/pip install --quiet -e '.[cli,dev,frameworks]' --constraint $(VENV)/torch.txt
	@touch $@

$(VENV)/.docs: $(VENV)/.test
	$(BIN)/pip install --quiet -e '.[cli,dev,docs]'
	@touch $@

# MPI and torchft are rivals, not needs: where there is no wheel of one, the benchmark shows it as absent.
$(VENV)/.bench: $(VENV)/.demo
	$(BIN)/pip install --quiet -e '.[cli,bench]' || echo "MPI can't be installed here: measuring without it" >&2
	$(BIN)/pip install --quiet -e '.[cli,bench-elastic]' || echo "torchft can't be installed here: measuring without it" >&2
	@touch $@
