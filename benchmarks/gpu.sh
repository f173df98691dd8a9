#!/usr/bin/env bash
# Everything that a GPU has to say about Ocelli, in nine minutes:
#
#   bash benchmarks/gpu.sh --output out           # at most five files in out; runs/gpu without it
#   bash benchmarks/gpu.sh --only env,probe,ours  # some sections of benchmarks/gpu.py
#   DEVICE=cpu bash benchmarks/gpu.sh             # the same code on a CPU, with a tiny model
#
# It needs Python 3.11 or newer with torch 2.11 or newer, triton, transformers, safetensors, huggingface_hub, Pillow,
# httpx, psutil, xxhash and pytest, and a C compiler for int8 and int4. `prove` and `training` need pydantic as well
# (pydantic-core and annotated-types with it); a section that lacks a package says so and takes no time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PY=${PY:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
exec "$PY" -m benchmarks.gpu --device "${DEVICE:-cuda}" "$@"
