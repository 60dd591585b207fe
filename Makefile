# Everything runs in .venv, made once.  Another interpreter: PYTHON=python3.12 make test

PYTHON ?= python3.11
BIN := .venv/bin
INSTALLED := .venv/.installed
SAMPLES := sample_models/build/.written

.PHONY: demo samples test lint check-memory bench clean

demo: $(SAMPLES)
	$(BIN)/memopt optimize sample_models/build/spiking_vgg.pt --level 3 --force

samples: $(SAMPLES)

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py

check-memory: $(SAMPLES)
	failed=0; for name in char_rnn lif_rnn gpt resnet spiking_vgg; do echo "$$name:"; \
	  $(BIN)/memopt check sample_models/build/$$name.pt --baseline benchmarks/baselines/$$name.json -q || failed=1; \
	done; exit $$failed

bench: $(SAMPLES)
	for case in plans recommend_batch model_batching online; do $(BIN)/python benchmarks/$$case.py || exit 1; done

clean:
	rm -rf .venv sample_models/build .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --no-deps spikingjelly
	touch $@

$(SAMPLES): $(INSTALLED) $(wildcard sample_models/*.py)
	$(BIN)/python -m sample_models
	touch $@
