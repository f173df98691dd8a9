# Ocelli. Needs Python 3.11 or newer and make; gcc for the compiled decode step and its tests.
#
#   make answer                                          # the embedded model on the example picture
#   make answer IMAGE=photo.jpg QUESTION="How many?"
#   make demo                                            # ask in the browser
#   make serve                                           # answer programs, in OpenAI's protocol
#   make test                                            # lint, types and the tests that are quick: minutes
#   make test-all                                        # the slow tests as well: many minutes
#   make cuda-check                                      # CUDA's kernels without a GPU: installs PyTorch once more
#   make soak                                            # damaged inputs, kills and load, for an hour
#   make train                                           # the embedded model learns flags: minutes on a CPU

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/requirements.installed
TESTED := $(VENV)/requirements-dev.installed

# A Python that has requirements-cuda-check.txt: make cuda-check CUDA_PY=...
CUDA_VENV := .venv-cuda
CUDA_PY ?= $(CUDA_VENV)/bin/python
CUDA_INSTALLED := $(CUDA_VENV)/requirements.installed

export IMAGE QUESTION
# Where it is set, each of the tests' processes would compile every module again: seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: answer demo serve test test-all types quick-tests slow-tests cuda-check cuda-interpreted cuda-compiled soak train clean

answer: $(INSTALLED)
	@$(PY) generate.py $${IMAGE:+"$$IMAGE"} $${QUESTION:+-q "$$QUESTION"} </dev/null

demo: $(INSTALLED)
	@$(PY) app.py

serve: $(INSTALLED)
	@$(PY) serve.py

# Two tiers: tests that are marked slow are for `make test-all`. Types are checked beside the others.
PYTEST := MAKEFLAGS= $(PY) -m pytest -n logical --maxprocesses 8 --dist worksteal --durations=20

test: $(INSTALLED) $(TESTED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@$(MAKE) --no-print-directory -j2 types quick-tests

test-all: test
	@$(MAKE) --no-print-directory slow-tests

types: $(TESTED)
	$(PY) -m mypy

quick-tests: $(TESTED)
	$(PYTEST) -m "not slow"

slow-tests: $(TESTED)
	$(PYTEST) -m slow

# Triton's kernels in its interpreter, and compiled for GPUs that need not be here.
cuda-check: $(if $(filter $(CUDA_VENV)/%,$(CUDA_PY)),$(CUDA_INSTALLED))
	@$(MAKE) --no-print-directory -j2 cuda-interpreted cuda-compiled

cuda-interpreted cuda-compiled: export OMP_NUM_THREADS := 1

cuda-interpreted:
	TRITON_INTERPRET=1 $(CUDA_PY) -m pytest -W ignore::DeprecationWarning tests/cuda_check

cuda-compiled:
	$(CUDA_PY) -m tests.cuda_check.compile_kernels

# The long versions of what `make test-all` does a little of: damaged inputs, kills, the page and the server under load.
soak: $(TESTED)
	$(PY) -m tests.soak.fuzz
	$(PY) -m tests.soak.kills
	$(PY) -m tests.soak.load
	OCELLI_QUESTIONS=1000 OCELLI_SEQUENCES=1000 $(PY) -m pytest tests/test_draft.py tests/test_cache_properties.py

train: $(INSTALLED)
	$(PY) train.py

# The stamp is a copy of what was installed, made last: an interrupted installation starts again, and a new
# checkout of the same requirements.txt installs nothing.
$(INSTALLED): requirements.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("expected Python 3.11 or newer, got " + sys.version.split()[0] + ": make PYTHON=...")'
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@cmp -s $< $@ || $(PY) -m pip install --quiet --disable-pip-version-check -r $<
	@cp $< $@

# Its stamp holds all four files: a change of any installs again.
$(TESTED): requirements-dev.txt requirements-video.txt requirements-read.txt $(INSTALLED)
	@cat $^ | cmp -s - $@ || $(PY) -m pip install --quiet --disable-pip-version-check -r $<
	@cat $^ > $@

$(CUDA_INSTALLED): requirements.txt requirements-dev.txt requirements-video.txt requirements-read.txt requirements-cuda-check.txt
	@test -x $(CUDA_VENV)/bin/pip || $(PYTHON) -m venv $(CUDA_VENV)
	@$(CUDA_PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@$(CUDA_PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-cuda-check.txt
	@cp requirements-cuda-check.txt $@

clean:
	rm -rf $(VENV) $(CUDA_VENV) .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
