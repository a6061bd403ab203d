# Two commands do everything: `make demo` (set up, then the main job) and `make test` (set up, then the tests).
export AGENTKV_CACHE ?= $(CURDIR)/build/cache
# Each of an engine's three processes imports 8,000 modules; compiling them anew every time doubles its start.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
UV := .venv/bin/uv
PARTS := gateway engine kernels phase_tagger evaluation

.PHONY: setup demo test test-long lint lock

setup: .venv/.done .venv-clients/.done

.venv/.done: requirements/dev.lock pyproject.toml setup.py
	test -x $(UV) || { $(PYTHON) -m venv .venv && .venv/bin/python -m pip install -q uv==0.13.9; }
	$(UV) pip install -q --python .venv/bin/python -r requirements/dev.lock
	$(UV) pip install -q --python .venv/bin/python --no-deps --no-build-isolation -e .
	touch $@

# Today's client SDKs cannot share an environment with the engine, which pins an older openai.
.venv-clients/.done: requirements/clients.lock .venv/.done
	test -x .venv-clients/bin/python || $(PYTHON) -m venv --without-pip .venv-clients
	$(UV) pip install -q --python .venv-clients/bin/python -r requirements/clients.lock
	touch $@

demo: setup
	.venv/bin/agentkv model
	.venv/bin/agentkv demo

test: setup lint
	.venv/bin/agentkv model
	.venv/bin/pytest -m "not long" --durations=15

test-long: setup
	.venv/bin/agentkv model
	.venv/bin/pytest -m long

# mypy does not know setuptools' package-dir: give it the import root as a tree of links.
lint: setup
	mkdir -p build/typed/agentkv_serve
	ln -sfn $(addprefix ../../../,$(PARTS)) build/typed/agentkv_serve/
	ln -sfn $(addprefix ../../../agentkv_serve/,$(notdir $(wildcard agentkv_serve/*))) build/typed/agentkv_serve/
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	MYPYPATH=build/typed .venv/bin/mypy -p agentkv_serve

lock:
	$(UV) pip compile -q pyproject.toml --all-extras --python-version 3.11 -o requirements/dev.lock
	$(UV) pip compile -q requirements/clients.in --python-version 3.11 -o requirements/clients.lock
