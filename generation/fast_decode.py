"""Faster decode steps behind the ordinary loop; the model's files do not know of them.

    step, how = fast_step(model.language_model)      # or None, and why there is none
    model.generate(**inputs, decode_step=step)

On a CPU: one C function for the whole step (`generation/native/`), compiled once for this machine. On CUDA:
the step and the choice of the token as one graph (`generation/graph_step.py`).
"""

from __future__ import annotations

import torch

from generation import fused_decoder
from generation.decoding import DecodeStep
from generation.graph_step import GraphStep
from generation.native.build import NoCompiler
from generation.native.step import NativeStep, is_compiled, unsupported
from generation.packed_weights import pack


def fast_step(language_model, pays: bool = True) -> tuple[DecodeStep | None, str]:
    """(a decode step faster than the eager one, what it is), or (None, why there is none).

    Args:
        pays: whether more than one short answer is to come. If not, only what costs nothing is used: a step
            that has been compiled before.
    """
    device = language_model.norm.weight.device
    short = "eager: one short answer does not pay for compiling"
    if device.type == "cuda":
        if reason := fused_decoder.unsupported(language_model):
            return None, f"eager: {reason}"
        return (GraphStep(language_model, backend="inductor"), "CUDA graph") if pays else (None, short)
    if device.type != "cpu":
        return None, f"eager: no fast decode step on {device.type}"
    reason = unsupported(language_model)
    if reason:
        return None, f"eager: {reason}"
    try:
        if not pays and not is_compiled(language_model):
            return None, short
        return NativeStep(language_model), "native C step"
    except NoCompiler as error:
        return None, f"eager: {error}"


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 at least as fast as float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def set_precision(model, precision: str) -> None:
    """Store a CPU model's weights in bfloat16 or int8, in place; the vision tower at most in bfloat16.

    Raises:
        ValueError: an unknown precision, or a model that is not on a CPU.
    """
    if precision == "int8":
        pack(model.vision_model, "bfloat16")
        pack(model.projector, "bfloat16")
        pack(model.language_model, "int8")
    else:
        pack(model, precision)
