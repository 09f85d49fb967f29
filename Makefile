PYTHON ?= python3
BIN := .venv/bin

# The tests need PyTorch. On Linux, PyPI's brings CUDA libraries of several gigabytes. TORCH_INDEX is the address of an index
# that has wheels for the CPU, which pip then prefers: make test TORCH_INDEX=ADDRESS.
ifdef TORCH_INDEX
export PIP_EXTRA_INDEX_URL := $(TORCH_INDEX) $(PIP_EXTRA_INDEX_URL)
endif

# Without bytecode, each process that a test starts would compile PyTorch and transformers again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-core test-thorough fuzz fuzz-native lint docs wheel wheels

# Two queries, and what the third one is for: beams are sure of it, so a draft saves most passes.
export define QUERIES
Users in Paris: SELECT name, email FROM users WHERE city = 'Paris' ORDER BY name;
Users in Oslo: SELECT name, email FROM users WHERE city = 'Oslo' ORDER BY name;
Users in Rome:
endef

# The main job: text from a real model (98 MB, fetched on first use, beside the packages), and the passes that lookups and lazy beams save.
demo: .venv/specbeam
	$(BIN)/specbeam generate "List three tips for a good night's sleep." --max-new-tokens 96
	$(BIN)/specbeam compare "$$QUERIES" --raw --stop-strings ';' --max-new-tokens 64
	@echo
	@echo "To watch the search in the browser: $(BIN)/specbeam demo"

# Every change must pass this. There is one worker per processor, with one thread each.
test: .venv/installed
	$(BIN)/python -m pytest -n auto --dist worksteal

# The tests that need no PyTorch, in an environment without it.
test-core:
	PYTHON=$(PYTHON) .ci/without-torch .venv-core -e.

# Everything, with the numbers of random cases that docs/exactness.md promises.
test-thorough: .venv/installed
	$(BIN)/python -m pytest -n auto --dist worksteal --hypothesis-profile=thorough -m ""

# Coverage-guided fuzzing of the files that people give, with each harness in turn: make fuzz SECONDS=3600.
fuzz: .venv/installed .venv/fuzz
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),3600)

# The same for the boundary to native code and for packed weights, with clang's libFuzzer.
fuzz-native:
	tests/fuzz/native/run $(or $(SECONDS),3600)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h')
	$(BIN)/mypy
	$(BIN)/python .ci/language
	$(BIN)/python .ci/touch-points

# The site, in site/. It loads nothing from other hosts, and a broken link is an error.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# An sdist and this machine's wheel, compiled by g++, in dist/: what .ci/run can afford. The wheel is tested without a compiler.
# It is built in the folder of the editable install, whose objects are the same.
wheel: .venv/installed .venv/wheel
	rm -rf build/dist dist
	$(BIN)/pyproject-build --sdist --outdir build/dist .
	$(BIN)/pyproject-build --wheel -C build-dir=cmake --outdir build/dist .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist/
	.ci/test-wheel dist/*.whl

# What a release has, in dist/: an sdist, and the wheels of all platforms, compiled by zig. The wheel for macOS is not run.
wheels: .venv/installed .venv/wheel
	rm -rf dist
	$(BIN)/pyproject-build --sdist --outdir dist .
	.ci/wheel manylinux_2_28_x86_64
	.ci/wheel manylinux_2_28_aarch64
	.ci/wheel macosx_12_0_arm64
	.ci/test-wheel dist/*manylinux_2_28_x86_64.whl
	.ci/test-wheel dist/*manylinux_2_28_aarch64.whl

# Python compiles a module when it first imports it. To compile all modules of all packages here takes a minute more.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile --quiet -c constraints.txt
NATIVE := cmake/CMakeLists.txt $(wildcard src/specbeam/backends/cpu/native/* src/specbeam/backends/cpu/native/parts/*)

$(BIN)/python:
	$(PYTHON) -m venv .venv

# Compiles only what changed: the build folder is kept.
.venv/specbeam: pyproject.toml constraints.txt $(NATIVE) | $(BIN)/python
	$(PIP) -e '.[chat,server]'
	touch $@

# Only the packages of the extra: specbeam itself is installed, so nothing is built again.
.venv/installed: pyproject.toml constraints.txt | .venv/specbeam
	@ls -d .venv/lib/*/site-packages/torch >/dev/null 2>&1 || $(BIN)/python .ci/torch-plan || true
	$(PIP) 'specbeam[dev]'
	touch $@

# For tests of the server: OpenAI's client for JavaScript, and axe-core, which checks that all people can use the page.
.venv/npm: Makefile | .venv/specbeam
	npm install --silent --no-audit --no-fund --no-package-lock --prefix $@ openai@7.57.0 axe-core@4.14.1
	touch $@

.venv/docs: .venv/specbeam
	$(PIP) 'specbeam[docs]'
	touch $@

.venv/fuzz: .venv/specbeam
	$(PIP) 'specbeam[fuzz]'
	touch $@

.venv/wheel: .venv/specbeam
	$(PIP) 'specbeam[wheel]'
	touch $@
