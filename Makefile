# Every target does its own set-up; `make demo` and `make test` are all a newcomer needs.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup browser demo test test-slow bench bench-page lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/offbeat demo

# Tests of pages need a browser; where none can be installed they are skipped.
browser:
	@test -x /usr/bin/chromium -a -x /usr/bin/chromedriver || { \
	  test "$$(id -u)" = 0 && apt-get -qq update \
	  && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium chromium-driver >/dev/null; \
	} || echo "no browser could be installed: tests of pages are skipped"

test: $(STAMP) browser
	$(BIN)/python -m pytest -q -m 'not slow and not timing' -n 2 --dist loadfile tests/unit
	$(BIN)/python -m pytest -q -m 'not slow and timing' tests/unit tests/distributed tests/browser
	$(BIN)/python -m pytest -q -m 'not slow and not timing' -n 2 --dist loadfile tests/distributed tests/browser tests/gpu

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -m slow

# Up to an hour on two cores, which nothing else should use meanwhile.
bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py; failed=$$?; $(BIN)/python benchmarks/report.py && exit $$failed

bench-page: $(STAMP)
	$(BIN)/python benchmarks/report.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
