# Everything runs in .venv, made once.  Another interpreter: PYTHON=python3.12 make test

PYTHON ?= python3.11
# Bytecode is cached, whatever the environment says: PyTorch's takes seconds to compile, in every process.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
INSTALLED := .venv/.installed
TRUST := --allow-package sample_models
SAMPLES := sample_models/build/.written

# What check-memory checks, in a few seconds each; the longest first.
MODELS := spiking_vgg resnet gpt lif_rnn char_rnn
SMALLER_gpt := --dim B=1
SMALLER_resnet := --dim B=1
SMALLER_spiking_vgg := --dim T=4 --dim B=1

# make test PART=search: the tests of one part alone.
PART ?=

# Cases of the fuzz, and which.
COUNT ?= 100000
SEED ?= 0

# make compat: the oldest PyTorch that pyproject.toml allows, what is tested on it and on the newest, which needs no
# further packages, and the most seconds that this takes on each.
COMPAT := build/compat
OLDEST_TORCH := torch==$(shell sed -n 's/^ *"torch>=\(.*\)",/\1/p' pyproject.toml).*
COMPAT_TESTS ?= tests/runtime tests/loading/test_exported.py $(addprefix tests/,model_batching online trace training/sharded)
COMPAT_SECONDS ?= 3600

.PHONY: demo samples test test-fast test-exhaustive compat lint lint-style lint-types lint-layers docs check-docs fuzz check-memory baselines bench gpu clean

demo: $(SAMPLES)
	$(BIN)/memopt optimize sample_models/build/spiking_vgg.pt --level 3 $(TRUST) --force

samples: $(SAMPLES)

# Three at a time on two cores: many tests wait for subprocesses.
test: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist worksteal tests/$(PART)

compat: $(COMPAT)/oldest/.installed $(COMPAT)/newest/.installed
	failed=0; for age in oldest newest; do $(COMPAT)/$$age/bin/python -c 'import torch; print("PyTorch", torch.__version__)'; \
	  OMP_NUM_THREADS=1 timeout $(COMPAT_SECONDS) $(COMPAT)/$$age/bin/python -m pytest -q $(COMPAT_TESTS) || failed=1; \
	done; exit $$failed

# Without what starts processes, and without what is marked slow.
test-fast: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not process and not slow and not exhaustive" tests/$(PART)

# The rows of long tables of which make test proves a few.
test-exhaustive: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m exhaustive tests/$(PART)

# make -j2 lint check-memory runs two at a time.
lint: lint-style lint-types lint-layers

lint-style: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

lint-types: $(INSTALLED)
	$(BIN)/mypy

lint-layers: $(INSTALLED)
	$(BIN)/python -m pytest -q --noconftest tests/test_layering.py

docs: $(INSTALLED)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Slow outputs too: SLOW=1.  Into the pages: UPDATE=1.
check-docs: $(SAMPLES)
	$(BIN)/python docs/check.py $(if $(SLOW),--slow) $(if $(UPDATE),--update)

fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m fuzz training --count $(COUNT) --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python -m fuzz peaks --count $$(($(COUNT) / 20)) --seed $(SEED)

check-memory: $(MODELS:%=check-memory-%)

check-memory-%: $(SAMPLES)
	@echo "$*:"
	@$(BIN)/memopt check sample_models/build/$*.pt $(TRUST) --baseline benchmarks/baselines/$*.json -q

baselines: $(SAMPLES)
	$(foreach name,$(MODELS),$(BIN)/memopt baseline sample_models/build/$(name).pt $(TRUST) $(SMALLER_$(name)) \
	  -o benchmarks/baselines/$(name).json --force &&) true

bench: $(SAMPLES)
	for case in plans compiled offload storage recommend_batch model_batching online lengths; do $(BIN)/python benchmarks/$$case.py || exit 1; done

# By a Python that has memopt's packages, without pip: six minutes on a GPU.  Tried on a CPU: DEVICE=cpu SMALL=1.
gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/gpu.py $(if $(DEVICE),--device $(DEVICE)) $(if $(SMALL),--small)

clean:
	rm -rf .venv sample_models/build .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --no-compile --disable-pip-version-check -c constraints.txt --no-deps spikingjelly
	touch $@

$(COMPAT)/oldest/.installed: TORCH := $(OLDEST_TORCH)
$(COMPAT)/newest/.installed: TORCH := torch
$(COMPAT)/%/.installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --no-compile --disable-pip-version-check '$(TORCH)' -e . hypothesis numpy pytest snntorch
	touch $@

$(SAMPLES): $(INSTALLED) $(wildcard sample_models/*.py)
	$(BIN)/python -m sample_models
	touch $@
