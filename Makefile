# SPDX-License-Identifier: Apache-2.0
# make train   sets everything up and trains on Pong
# make test    sets everything up and runs the tests
#
# ENV= names another environment, ARGS= passes flags on:
#   make train ENV=BreakoutNoFrameskip-v4 ARGS="--total_steps 1000"
#   make test ARGS="-k vtrace"
#
# make libbeast   builds the C++ core; train and test do it too
# make libatari   builds the Atari engine, which needs a C++ compiler only; so do they
# make learn-test trains small tasks to thresholds, in less than 10 minutes
# make slow-test  runs the other tests that take minutes: kills, pages of docs/
# make results NAME=pong  trains, tests and draws a claim of results/ again
# make test-atari compares the engine with ale-py at length: all games, many frames
# make sanitize   runs the C++ tests under the sanitizers, 20 times each
#
# CHIMERA_NO_LIBBEAST=1 leaves the C++ core out everywhere, not the Atari engine.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ENV ?= PongNoFrameskip-v4
ARGS ?=
ROUNDS ?= 20

# Installed where missing, if there is apt and we may; setup.py knows the rest.
APT := g++ pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler
CORE := setup.py csrc/CMakeLists.txt $(wildcard csrc/*.cc csrc/*.h csrc/proto/*.proto)
ATARI := setup.py csrc/named_thread.h $(wildcard csrc/atari/*)
CPP := csrc/*.cc csrc/*.h csrc/atari/*.cc csrc/atari/*.h csrc/tests/*.cc \
       csrc/tests/*.h benchmarks/*.cc

.PHONY: help train test learn-test slow-test lint format bench tensorboard clean always
.PHONY: results libbeast libatari test-atari packages sanitize asan tsan

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

train: libatari
	@$(MAKE) --no-print-directory libbeast || \
	  echo "Training with MonoBeast, which does not need libbeast."
	@agent=polybeast; \
	[ -z "$$CHIMERA_NO_LIBBEAST" ] && $(BIN)/python -c 'import libbeast' 2>/dev/null || \
	  agent=monobeast; \
	set -x; exec $(BIN)/python -m $$agent --env $(ENV) $(ARGS)

test: libbeast libatari
ifndef CHIMERA_NO_LIBBEAST
	$(BIN)/cmake --build build/release
	$(BIN)/ctest --test-dir build/release --output-on-failure -j 4
endif
	$(BIN)/python -m pytest -n 3 --dist loadgroup $(ARGS)

# Does it still learn? To thresholds, in less than 10 minutes on 2 cores.
learn-test: libbeast libatari
	$(BIN)/python -m pytest -m learning $(ARGS)

# All other tests that take minutes, but those of test-atari.
slow-test: libbeast libatari
	$(BIN)/python -m pytest -m slow --ignore-glob="tests/test_atari_*.py" $(ARGS)

# NAME= is a claim of results/claims.toml; without one they are listed.
results: libbeast libatari
	$(BIN)/python -m tools.results $(NAME) $(ARGS)

test-atari: libatari
	$(BIN)/python -m pytest -m slow -n 2 tests/test_atari_*.py $(ARGS)

sanitize: asan tsan

asan: KIND := address
tsan: KIND := thread
asan tsan: packages
	$(BIN)/cmake -S csrc -B build/$@ -G Ninja -DBEAST_SANITIZE=$(KIND) \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build build/$@
	BEAST_ROUNDS=1 BEAST_FUZZ=500 BEAST_SECONDS=5 $(BIN)/ctest --test-dir build/$@ \
	  --output-on-failure --parallel 2 --repeat until-fail:$(ROUNDS)

lint: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --style=file:csrc/.clang-format --dry-run -Werror $(CPP)

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format --style=file:csrc/.clang-format -i $(CPP)

bench: libbeast libatari
	$(BIN)/python -m benchmarks.sps --save $(ARGS)

# Other systems at the same work; installs them in build/peers.
.PHONY: bench-peers
bench-peers: libbeast
	$(BIN)/python -m benchmarks.peers $(ARGS)

# What in docs/ is made from code: the page of flags, the drawings.
.PHONY: docs
docs: libbeast
	$(BIN)/python -m tools.docs

tensorboard: $(VENV)/ready
	$(BIN)/tensorboard --logdir runs $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache lib*.so

# The C++ core as a module beside the agents, built again after an edit in csrc.
ifdef CHIMERA_NO_LIBBEAST
libbeast: $(VENV)/ready
else
libbeast: build/libbeast
endif

build/libbeast: $(VENV)/ready $(CORE) $(if $(wildcard libbeast*.so),,always)
	@$(MAKE) --no-print-directory packages
	$(BIN)/python setup.py --quiet build_ext --inplace --build-temp build/release
	@touch $@

# Where this fails, ale-py plays; setup.py says so. Touched all the same, so that what
# cannot be built is tried again only after an edit.
libatari: build/libatari

build/libatari: $(VENV)/ready $(ATARI)
	@mkdir -p build
	CHIMERA_NO_LIBBEAST=1 $(BIN)/python setup.py --quiet build_ext --inplace \
	  --build-temp build/release
	@touch $@

packages: $(VENV)/ready
	@header=$$($(BIN)/python -c \
	  'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")'); \
	packages=; [ -e $$header ] || \
	  packages=$$($(BIN)/python -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])'); \
	{ pkg-config --exists grpc++ protobuf && command -v protoc && command -v c++; } \
	  >/dev/null 2>&1 || packages="$$packages $(APT)"; \
	if [ -n "$$packages" ] && command -v apt-get >/dev/null; then \
	  echo "Installing with apt: $$packages"; \
	  SUDO=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$SUDO apt-get update -qq && \
	  $$SUDO env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$packages || \
	  echo "apt did not install them."; \
	fi

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
