"""The fastest decode step and vision tower of this machine; the model's files do not know of them.

    step, how, tower = speed_up(model)               # how each was chosen, in words
    model.generate(**inputs, decode_step=step)

On a CPU: C for prompts, tokens and tiles (`generation/fast/native/`), compiled once for this machine. The
step that is chosen stays, however many rows there are, and a row's bits depend neither on their number nor on
whether it is prefilled or decoded.

On CUDA: the step and the sampler as one graph (`generation/fast/cuda_graph.py`), compiled by inductor if the
run is long enough to make that worthwhile.
"""

from __future__ import annotations

import math

import torch

from generation.fast import cuda_graph
from generation.fast.cuda_graph import GraphStep
from generation.fast.native.build import NoCompiler
from generation.fast.native.step import NativeStep, is_compiled, unsupported
from generation.fast.panels import to_panels
from generation.fast.quantized import pack
from generation.fast.tower import FastTower, break_even_tiles, fast_tower
from generation.fast.tower import unsupported as unsupported_tower
from generation.steps import DecodeStep

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


def speed_up(model, steps: int | None = None, tiles: int | None = None) -> tuple[DecodeStep | None, str, str]:
    """(the fastest decode step or None, its name or why there is none, the vision tower's name or why it is
    the eager one). The model's tower and projector are replaced in place, and weights put into panels.

    Args:
        steps, tiles: the most that are expected. If together they are not worth compiling, only what costs
            next to nothing is used. None always compiles.
    """
    language_model, tower = model.language_model, model.vision_model
    if isinstance(tower, FastTower):
        return *fast_step(language_model, steps), FastTower.NAME
    if steps is not None and tiles is not None and unsupported_tower(tower) is None:
        saved = steps / break_even_steps(language_model) + tiles / break_even_tiles(tower)
        steps, tiles = (None, None) if saved >= 1 else (steps, tiles)
    step, step_name = fast_step(language_model, steps)
    faster, tower_name = fast_tower(tower, tiles)
    model.vision_model = faster or tower
    if isinstance(model.vision_model, FastTower) or isinstance(step, NativeStep):
        to_panels(model.projector)  # whatever type its input and its weights have
    return step, step_name, tower_name


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 at least as fast as float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def set_precision(model, precision: str) -> None:
    """Store a CPU model's weights in bfloat16 or int8, in place: tower, projector and language model."""
    pack(model, precision)
