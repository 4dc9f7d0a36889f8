# Two commands for a newcomer:
#   make demo    draw pictures with the model in the package
#   make test    run the tests
# Both make their own .venv. PYTHON chooses the interpreter: make demo PYTHON=python3.13

PYTHON ?= python3
# The parity tests compare with PyTorch diffusers; `make test REFERENCE=no` leaves it out and skips them.
# pip's ordinary Linux build of PyTorch is large. To use the CPU build, install it into .venv before `make test`.
REFERENCE ?= yes

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint parity bench emoji-model clean

demo: .venv/runtime
	$(BIN)/canvax generate "a red apple" "a dog face" "a lemon" "a house" "a sunflower" "an umbrella" "a fire engine" \
		"a Christmas tree" "a clock" --seed 1 --grid --output out/demo

# Two processes: most of the time is XLA compiling, on one processor each.
test: .venv/test-$(REFERENCE) lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: .venv/test-$(REFERENCE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# Full-size models against PyTorch: minutes, and 14 GB of memory and of disk.
parity: .venv/test-yes
	$(BIN)/python -m benchmarks.parity_full_size

# Side by side with PyTorch diffusers on this machine.
bench: .venv/test-yes
	$(BIN)/python -m benchmarks unet --model sd15 --against torch
	$(BIN)/python -m benchmarks vae --model sd15 --against torch

# The model in the package, from raw npm packages to the finished folder: minutes on a GPU, many hours on a CPU. Stop it
# as you like; the same command goes on. TRAIN="--minutes 16" chooses how long, see docs/emoji-model.md.
emoji-model: .venv/train out/emoji.zip
	$(BIN)/python -m recipes.emoji train out/emoji.zip --output out/emoji-model $(TRAIN)
	$(BIN)/python -m recipes.emoji quality --data out/emoji.zip --model out/emoji-model/model --output out/emoji-quality

out/emoji.zip: | .venv/train
	$(BIN)/python -m recipes.emoji data $@

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "canvax needs Python 3.11 or newer; make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/runtime: pyproject.toml | .venv/bin/python
	$(PIP) --editable .
	touch $@

.venv/train: pyproject.toml | .venv/bin/python
	$(PIP) --editable '.[train]'
	touch $@ .venv/runtime

.venv/test-no: pyproject.toml | .venv/bin/python
	$(PIP) --editable '.[test]'
	touch $@ .venv/runtime

.venv/test-yes: pyproject.toml | .venv/bin/python
	$(PIP) --editable '.[test,reference]'
	$(PIP) --no-deps k-diffusion==0.1.1.post1  # only its formulas: what it imports for training is not needed
	touch $@ .venv/runtime .venv/test-no

clean:
	rm -rf .venv out
