#!/usr/bin/env bash
# Everything that a GPU has to say about Ocelli, in nine minutes, on a machine with CUDA, torch, triton and transformers:
#
#   bash benchmarks/gpu.sh                        # results in runs/gpu
#   bash benchmarks/gpu.sh --only env,decode      # some sections of benchmarks/gpu.py
#   DEVICE=cpu bash benchmarks/gpu.sh             # the same code on a CPU, with a tiny model
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PY=${PY:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
exec "$PY" -m benchmarks.gpu --device "${DEVICE:-cuda}" "$@"
