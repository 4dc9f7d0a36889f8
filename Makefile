# Two commands for a newcomer:
#   make demo        draw pictures with the model in the package
#   make test        run the tests: nine minutes on two cores
# Both make their own .venv. PYTHON chooses the interpreter: make demo PYTHON=python3.13
# Before a merge: make test-all, forty minutes. Each week: make test-weekly, the tests that take longest.

PYTHON ?= python3
# The parity tests compare with PyTorch diffusers; `make test REFERENCE=no` leaves it out and skips them. With yes, a
# reference that is missing is a failure (conftest.py reads the variable).
# The ordinary Linux build of PyTorch is large. To use the CPU build, install it into .venv before `make test`.
REFERENCE ?= yes
export REFERENCE

BIN := .venv/bin
# uv installs in a tenth of pip's time. It does not read pip's settings, so it is passed pip's folder of wheels: a CPU
# build of PyTorch, say.
UV := $(BIN)/uv
INSTALL := $(UV) pip install --quiet --python
ifndef UV_FIND_LINKS
export UV_FIND_LINKS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
endif

# The newest Python that canvax supports, for which pip chooses the newest JAX. Empty where there is none.
EXECUTABLE := -c 'import sys; print(sys.executable)' 2>/dev/null
NEWEST ?= $(shell python3.13 $(EXECUTABLE) || PYENV_VERSION=$$(pyenv latest 3.13 2>/dev/null) python3.13 $(EXECUTABLE))

# Most of the time is XLA compiling, on one processor each. The server's tests also wait, so that there is one process
# more than two cores. A file stays in one process, which makes its models once.
WORKERS ?= 3
PYTEST := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all test-slow test-weekly test-bad test-page fuzz test-newest test-tpu test-wheel test-ray lint docs parity bench emoji-model clean

demo: .venv/runtime
	$(BIN)/canvax generate "a red apple" "a dog face" "a lemon" "a house" "a sunflower" "an umbrella" "a fire engine" \
		"a Christmas tree" "a clock" --seed 1 --grid --output out/demo

test: .venv/test-$(REFERENCE)
	$(BIN)/python $(PYTEST)

# The linters and the documentation, side by side, since each uses one processor, while the other environments are downloaded;
# and beside them the TPU's compiler; the same tests and the slow ones; side by side again the browser, which waits, and the
# newest Python and JAX. Each ends with its own count.
test-all: .venv/test-$(REFERENCE) .venv/docs
	$(MAKE) -j 4 lint docs test-tpu .venv-page/test $(if $(NEWEST),.venv-newest/test)
	$(MAKE) test-slow
	$(MAKE) -j 2 --output-sync=target test-page test-newest

# The ordinary, the bad and the slow tests.
test-slow: .venv/test-$(REFERENCE)
	$(BIN)/python $(PYTEST) -m "not weekly"

# Tests of minutes: every row of the covering array, thousands of random server runs, kills, clients, the recipes, the
# defects of tests/mutants.
test-weekly: .venv/test-$(REFERENCE)
	$(BIN)/python $(PYTEST) -m weekly

# Bad inputs and faults, each with its answer.
test-bad: .venv/test-$(REFERENCE)
	$(BIN)/python $(PYTEST) -m bad

# The page in a browser (the system's chromium, or the one that CHROMIUM names), and the server's own description. In an
# environment of its own: schemathesis brings a plugin, which would be part of all tests.
test-page: .venv-page/test
	.venv-page/bin/python $(PYTEST) tests/test_page.py tests/test_page_real.py tests/test_server_schema.py -m "not weekly"

# Files of strangers, made at random: FUZZ_SECONDS for each of six kinds.
fuzz: .venv/test-$(REFERENCE)
	FUZZ_SECONDS=$${FUZZ_SECONDS:-1200} $(BIN)/python -m pytest tests/test_fuzz.py -m ""

# What a new Python or JAX breaks first: the command line in a process, kernels, sharding, stored programs, several
# processes in one run. .github/workflows runs all ordinary tests on that Python for each change, and with JAX of the
# night each week.
NEW := cache.py cli_process.py sampler_programs.py kernels.py::test_flash_attention devices.py::test_same_picture \
	devices.py::test_no_collective_over_data
NEWEST_PYTHON := REFERENCE=no .venv-newest/bin/python
test-newest:
	$(if $(NEWEST),$(MAKE) .venv-newest/test,@echo "no python3.13 here: not tested with the newest Python and JAX")
	$(if $(NEWEST),$(NEWEST_PYTHON) $(PYTEST) $(NEW:%=tests/test_%))
	$(if $(NEWEST),$(NEWEST_PYTHON) -m pytest tests/test_multihost.py -m "slow and not weekly" -k two_processes)

# libtpu needs no TPU to compile for one. In an environment of its own, so that no other test finds it.
test-tpu: .venv-tpu/test
	REFERENCE=no .venv-tpu/bin/python -m pytest tests/test_plan_compiled.py -m "not weekly"

# The wheel as a stranger installs it: bare environment, no network when it draws. VERSIONS=lowest-direct installs the
# oldest versions that pyproject.toml allows.
VERSIONS ?= highest
test-wheel: .venv/test-no
	rm -rf out/wheel && $(BIN)/uv build --quiet --out-dir out/wheel
	$(BIN)/python .ci/check_wheel.py out/wheel --resolution $(VERSIONS)

# A cluster of three nodes in this machine; Ray takes 750 MB on disk. No part of test-all.
test-ray: .venv/ray
	$(BIN)/python -m pytest tests/test_ray.py tests/test_deploy.py -m ""

lint: .venv/test-$(REFERENCE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# The documentation as a site, out/site/index.html; a link that leads nowhere is an error.
docs: .venv/docs
	$(BIN)/python docs/reference/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir out/site

# Full-size models against PyTorch: minutes, and 14 GB of memory and of disk.
parity: .venv/test-yes
	$(BIN)/python -m benchmarks.parity_full_size

# Side by side with PyTorch diffusers on this machine.
bench: .venv/test-yes
	$(BIN)/python -m benchmarks unet --model sd15 --against torch
	$(BIN)/python -m benchmarks vae --model sd15 --against torch

# The model in the package, from raw npm packages to the finished folder: minutes on a GPU, many hours on a CPU. Stop it
# as you like; the same command goes on. TRAIN="--minutes 16" chooses how long, see recipes/emoji/README.md.
emoji-model: .venv/train out/emoji.zip
	$(BIN)/python -m recipes.emoji train out/emoji.zip --output out/emoji-model $(TRAIN)
	$(BIN)/python -m recipes.emoji quality --data out/emoji.zip --model out/emoji-model/model --output out/emoji-quality

out/emoji.zip: | .venv/train
	$(BIN)/python -m recipes.emoji data $@

$(UV):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "canvax needs Python 3.11 or newer; make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

.venv/runtime: pyproject.toml | $(UV)
	$(INSTALL) .venv --editable '.[serve]'
	touch $@

.venv/train: pyproject.toml | $(UV)
	$(INSTALL) .venv --editable '.[train]'
	touch $@ .venv/runtime

.venv/test-no: pyproject.toml | $(UV)
	$(INSTALL) .venv --editable '.[test]'
	touch $@ .venv/runtime

.venv/test-yes: pyproject.toml | $(UV)
	$(INSTALL) .venv --editable '.[test,reference]'
	$(INSTALL) .venv --no-deps k-diffusion==0.1.1.post1  # only its formulas: what it imports for training is not needed
	$(INSTALL) .venv --no-deps compel==2.4.0  # only its prompts: not the notebooks that it asks for
	touch $@ .venv/runtime .venv/test-no

.venv/docs: pyproject.toml | $(UV)
	$(INSTALL) .venv --editable '.[docs]'
	touch $@ .venv/runtime

.venv-tpu/test: pyproject.toml | $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv-tpu
	$(INSTALL) .venv-tpu --editable '.[test,tpu]'
	touch $@

.venv-page/test: pyproject.toml | $(UV)
	$(UV) venv --quiet --allow-existing --python $(PYTHON) .venv-page
	$(INSTALL) .venv-page --editable '.[page]'
	touch $@

.venv/ray: pyproject.toml | .venv/test-$(REFERENCE)
	$(INSTALL) .venv --editable '.[ray]'
	touch $@ .venv/runtime

.venv-newest/test: pyproject.toml | $(UV)
	$(UV) venv --quiet --allow-existing --python $(NEWEST) .venv-newest
	$(INSTALL) .venv-newest --upgrade --editable '.[test]'
	touch $@

clean:
	rm -rf .venv .venv-newest .venv-page .venv-tpu out
