"""Faster decode steps for the ordinary loop; the model's files do not know of them.

    step, how = fast_step(model.language_model)      # or None, and why there is none
    model.generate(**inputs, decode_step=step)

On a CPU: one C function for the whole step (`generation/fast/native/`), compiled once for this machine.
On CUDA: the step and the sampler as one graph (`generation/fast/cuda_graph.py`), compiled by inductor if the
run is long enough to make that worthwhile.

The step that is chosen stays, however many rows there are: changing it with their number would make a row's
rounding depend on what else is in the batch. The C step does not need it: at SmolVLM-256M's shape with 1, 4,
8, 16 and 32 rows it took 0.5, 0.5, 0.7, 0.9 and 1.0 of the eager step's time in float32, 0.2, 0.2, 0.3, 0.4
and 0.6 with weights packed in bfloat16, 0.1, 0.1, 0.2, 0.4 and 0.5 in int8 (one thread of a Zen 3 core, a
context of 100, both in turn, medians of 5).
"""

from __future__ import annotations

import math

import torch

from generation.decoding import DecodeStep
from generation.fast import cuda_graph
from generation.fast.cuda_graph import GraphStep
from generation.fast.native.build import NoCompiler
from generation.fast.native.step import NativeStep, is_compiled, unsupported
from generation.fast.quantized import pack

# Seconds that compiling takes, and that it saves in each step: of calling PyTorch in each block, and of
# reading weights. On a CPU: 2.5 to 3.5 s; 28 ms in place of 80 for 30 blocks and 538 MB (float32, results in
# decode-cpu-zen3.json), 0.3 in place of 2.5 for the embedded model's 4 blocks and 7 MB. On CUDA estimated:
# one block compiled by inductor, against 9 kernels more in each block of a graph that is recorded without it.
COMPILE_SECONDS = {"cpu": 3.0, "cuda": 45.0}
SAVED_PER_BLOCK = {"cpu": 5e-4, "cuda": 1.2e-5}
SAVED_PER_BYTE = {"cpu": 7e-11, "cuda": 0.0}


def break_even_steps(language_model) -> int | float:
    """Roughly how many decode steps save the time that compiling takes; infinite without a fast step."""
    device = language_model.norm.weight.device.type
    if device not in COMPILE_SECONDS:
        return math.inf
    blocks = language_model.layers
    read = [*blocks.parameters(), *blocks.buffers(), language_model.lm_head.weight]
    saved = SAVED_PER_BLOCK[device] * len(blocks) + SAVED_PER_BYTE[device] * sum(w.nbytes for w in read)
    return math.ceil(COMPILE_SECONDS[device] / saved)


def fast_step(language_model, steps: int | None = None) -> tuple[DecodeStep | None, str]:
    """(a decode step faster than the eager one, what it is), or (None, why there is none).

    Args:
        steps: the most that are expected. If they are too few to be worth compiling, only what costs next
            to nothing is used: a step that was compiled before, or a graph of PyTorch's own kernels. None
            always compiles.
    """
    device, needed = language_model.norm.weight.device.type, break_even_steps(language_model)
    pays = steps is None or steps >= needed
    if device == "cuda":
        if reason := cuda_graph.unsupported(language_model):
            return None, f"eager: {reason}"
        graph = GraphStep(language_model, backend="inductor" if pays else None)
        if reason := graph.rehearse():
            return None, f"eager: no CUDA graph: {reason}"
        return graph, "compiled CUDA graph" if pays else "CUDA graph"
    if reason := unsupported(language_model):
        return None, f"eager: {reason}"
    try:
        if not pays and not is_compiled(language_model):
            return None, f"eager: compiling pays from {needed} decode steps on, at most {steps} are expected"
        return NativeStep(language_model), "native C step"
    except NoCompiler as error:
        return None, f"eager: {error}"


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 at least as fast as float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def set_precision(model, precision: str) -> None:
    """Store a CPU model's weights in bfloat16 or int8, in place: tower, projector and language model."""
    pack(model, precision)
