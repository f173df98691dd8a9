# Ocelli. Needs Python 3.11 or newer and make; gcc for the compiled decode step and its tests.
#
#   make answer                                          # the embedded model on the example picture
#   make answer IMAGE=photo.jpg QUESTION="How many?"
#   make demo                                            # ask in the browser
#   make serve                                           # answer programs, in OpenAI's protocol
#   make test
#   make cuda-check                                      # CUDA's kernels without a GPU: installs PyTorch once more
#   make soak                                            # damaged inputs, kills and load, for an hour
#   make train                                           # a model of plain drawings from nothing: hours on a CPU

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/requirements.installed
TESTED := $(VENV)/requirements-video.installed

# A Python that has requirements-cuda-check.txt: make cuda-check CUDA_PY=...
CUDA_VENV := .venv-cuda
CUDA_PY ?= $(CUDA_VENV)/bin/python
CUDA_INSTALLED := $(CUDA_VENV)/requirements.installed

export IMAGE QUESTION

.PHONY: answer demo serve test types tests-of-training other-tests cuda-check soak train clean

answer: $(INSTALLED)
	@$(PY) generate.py $${IMAGE:+"$$IMAGE"} $${QUESTION:+-q "$$QUESTION"} </dev/null

demo: $(INSTALLED)
	@$(PY) app.py

serve: $(INSTALLED)
	@$(PY) serve.py

# At once, of about the same length: what trains, evaluates and serves with the commands of the docs, and
# everything else. Beside them are the types: much of the time somebody waits. (The last line is there for the length.)
TRAINING := $(sort $(wildcard tests/test_train*.py tests/test_eval*.py tests/test_page*.py tests/test_serv*.py)) \
    tests/test_docs_commands.py tests/test_engine.py tests/test_finetune.py tests/test_launch.py \
    tests/test_loader.py tests/test_locks.py tests/test_notebook.py tests/test_convert.py \
    tests/test_benchmarks.py tests/test_chat_terminal.py tests/test_qwen_vl.py

test: $(INSTALLED) $(TESTED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@$(MAKE) --no-print-directory -j3 types tests-of-training other-tests

types: $(INSTALLED)
	$(PY) -m mypy

tests-of-training: $(INSTALLED)
	MAKEFLAGS= $(PY) -m pytest --durations=20 $(TRAINING)

other-tests: $(INSTALLED)
	MAKEFLAGS= $(PY) -m pytest --durations=20 $(addprefix --ignore=,$(TRAINING))

# Triton's kernels in its interpreter, and compiled for GPUs that need not be here.
cuda-check: export OMP_NUM_THREADS := 1
cuda-check: $(if $(filter $(CUDA_VENV)/%,$(CUDA_PY)),$(CUDA_INSTALLED))
	TRITON_INTERPRET=1 $(CUDA_PY) -m pytest -W ignore::DeprecationWarning tests/cuda_check
	$(CUDA_PY) -m tests.cuda_check.compile_kernels

# The long versions of what `make test` does a little of: damaged inputs, kills, the page and the server under load.
soak: $(INSTALLED)
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

# What is optional for users, and what the tests do not do without.
$(TESTED): requirements-video.txt $(INSTALLED)
	@cmp -s $< $@ || $(PY) -m pip install --quiet --disable-pip-version-check -r $<
	@cp $< $@

$(CUDA_INSTALLED): requirements.txt requirements-cuda-check.txt
	@test -x $(CUDA_VENV)/bin/pip || $(PYTHON) -m venv $(CUDA_VENV)
	@$(CUDA_PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@$(CUDA_PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-cuda-check.txt
	@cp requirements-cuda-check.txt $@

clean:
	rm -rf $(VENV) $(CUDA_VENV) .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
