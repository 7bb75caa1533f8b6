# SPDX-License-Identifier: Apache-2.0
# make train   sets everything up and trains on Pong
# make test    sets everything up and runs the tests
#
# ENV= names another environment, ARGS= passes flags on:
#   make train ENV=BreakoutNoFrameskip-v4 ARGS="--total_steps 1000"
#   make test ARGS="-k vtrace"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENV ?= PongNoFrameskip-v4
ARGS ?=

.PHONY: help train test learn-test lint format bench tensorboard clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed 1d

train: $(VENV)/ready
	$(BIN)/python -m monobeast --env $(ENV) $(ARGS)

test: $(VENV)/ready
	$(BIN)/python -m pytest $(ARGS)

# The slow tests: learning to thresholds, 50 killed actors.
learn-test: $(VENV)/ready
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/ready
	$(BIN)/python -m benchmarks.ideal_rate $(ARGS)

tensorboard: $(VENV)/ready
	$(BIN)/tensorboard --logdir runs $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# Written last, so that an interrupted set-up starts over.
$(VENV)/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Chimera needs Python 3.11 or newer; run: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "python3 -m venv failed; trying to install python3-venv"; \
	  SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq python3-venv && \
	  $(PYTHON) -m venv $(VENV); } || { \
	  echo "install the venv module of your Python, then run make again"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@
