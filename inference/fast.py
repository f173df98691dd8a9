"""The fastest decode step and vision tower of this machine, chosen in one place.

On a CPU they are C for prompts, tokens and tiles (`generation/fast/native/`), compiled once for this
machine. The step that is chosen stays, however many rows there are, and a row's bits depend neither on their
number nor on whether it is prefilled or decoded. On CUDA it is the step and the sampler as one graph
(`generation/fast/cuda/`), of Triton kernels where they can run the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from generation.fast.cuda.graph import GraphStep
from generation.fast.cuda.graph import unsupported as unrecorded
from generation.fast.native.build import NoCompiler
from generation.fast.native.panels import to_panels
from generation.fast.native.step import NativeStep, is_compiled, unsupported
from generation.fast.quantized import pack_layer, put_layers
from generation.fast.tower import FastTower, fast_tower
from generation.steps import Step
from models.gemma4_vision import Gemma4Projector
from models.packed_vision_transformer import PatchMergers
from models.vision_transformer import ModalityProjector


def fast_step(language_model, compiling: bool = True) -> tuple[Step | None, str]:
    """(a decode step faster than the eager one, what it is), or (None, why there is none).

    Args:
        compiling: else, on a CPU, only a step that was compiled before is used.
    """
    if language_model.norm.weight.device.type == "cuda":
        if reason := unrecorded(language_model):
            return None, f"eager: {reason}"
        graph = GraphStep(language_model)
        reason = graph.rehearse()
        return (None, f"eager: no CUDA graph: {reason}") if reason else (graph, graph.name)
    if reason := unsupported(language_model):
        return None, f"eager: {reason}"
    try:
        if compiling or is_compiled(language_model):
            return NativeStep(language_model), "native C step"
    except NoCompiler as error:
        return None, f"eager: {error}"
    return None, "eager: compiling does not pay for a few answers of a small model"


def speed_up(model, compiling: bool = True) -> tuple[Step | None, str, str]:
    """The fastest decode step (None: the eager one), and the names of step and tower, or why they are the
    eager ones. The model's tower and projector are replaced in place, and weights put into panels. Where
    nothing is to be compiled, only what costs next to nothing is used."""
    step, name = fast_step(model.language_model, compiling)
    if isinstance(model.vision_model, FastTower):
        return step, name, FastTower.NAME
    faster, tower_name = fast_tower(model.vision_model, compiling)
    model.vision_model = faster or model.vision_model
    if isinstance(model.vision_model, FastTower) or isinstance(step, NativeStep):
        # Whatever type its input and its weights have.
        if type(model.projector) in (ModalityProjector, PatchMergers, Gemma4Projector):
            to_panels(model.projector)
        else:
            model.projector.float()
    return step, name, tower_name


def has_fast_bfloat16() -> bool:
    """True if this CPU multiplies bfloat16 at least as fast as float32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def put_int8(model: torch.nn.Module, names: Sequence[str], read: Callable[[], torch.Tensor]) -> None:
    """Give a model a tensor, rounded to eight bits where it is a matrix."""
    put_layers(model, names, read(), partial(pack_layer, "int8"))
