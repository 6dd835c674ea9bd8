# Every target does its own set-up. `make install` installs what running needs, `make setup` the development tools too.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
TOOLS := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -q --durations=10
EVERYDAY := tests/unit tests/distributed tests/browser

.PHONY: install setup browser sshd demo tour test test-slow test-gpu bench bench-page wheel lint format clean

install: $(RUNS)

setup: $(TOOLS)

$(RUNS): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(TOOLS): $(RUNS)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@# Compiles most of what searches run, which several tests at once would each do for themselves.
	$(BIN)/offbeat optimize mlp --cluster B9 -o $(VENV)/optimized.json
	touch $@

demo: $(RUNS)
	@$(BIN)/offbeat demo

# The whole loop in a few minutes: record, report, search, run again.
tour: $(RUNS)
	@$(BIN)/offbeat tour

# Tests of pages need a browser; where none can be installed they are skipped.
browser:
	@test -x /usr/bin/chromium -a -x /usr/bin/chromedriver || { \
	  test "$$(id -u)" = 0 && apt-get -qq update \
	  && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium chromium-driver >/dev/null; \
	} || echo "no browser could be installed: tests of pages are skipped"

# Tests of `offbeat launch` need ssh and its server, else they are skipped. It is installed in containers only: systemd
# would start it, and the machine would be open to logins.
sshd:
	@test -x /usr/sbin/sshd -a -x /usr/bin/ssh || { \
	  test "$$(id -u)" = 0 -a ! -d /run/systemd/system && apt-get -qq update \
	  && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends openssh-server openssh-client >/dev/null; \
	} || echo "no ssh server is installed: tests of offbeat launch are skipped"

# Tests that wait leave a core to the third worker. Those that measure time have the machine to themselves: another user
# of it can spoil one measurement, not three in a row. Bytecode is kept, or every process would compile the package again.
test: export PYTHONDONTWRITEBYTECODE =
test: $(TOOLS) browser sshd
	$(PYTEST) -m 'not slow and not timing' -n 3 --dist loadfile $(EVERYDAY)
	$(PYTEST) --reruns 2 -m 'not slow and timing' $$(grep -lr mark.timing --include='*.py' $(EVERYDAY))

test-slow: $(TOOLS)
	$(PYTEST) -m slow

# Skipped, with the reason, where there is no GPU. What other tests share, and need more packages for, stays out.
test-gpu: $(TOOLS)
	$(PYTEST) --confcutdir=tests/gpu tests/gpu

# Up to an hour on two cores, which nothing else should use meanwhile.
bench: $(TOOLS)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py; failed=$$?; $(BIN)/python benchmarks/report.py && exit $$failed

bench-page: $(TOOLS)
	$(BIN)/python benchmarks/report.py

# Builds the wheel and the source distribution, and tries both in an empty environment without development tools.
wheel:
	$(PYTHON) tools/try_wheel.py $(if $(TORCH),--torch $(TORCH))

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
