"""Writing a model as GGUF files for llama.cpp: its text part, and its tower with the projector.

save_gguf(model, Path("out"), "mine", tokenizer, images)    # out/mine-BF16.gguf, and out/mmproj-…
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from models.checkpoints.gguf import SUFFIX, Place, write_file
from models.checkpoints.gguf_config import GENERATION, metadata
from models.checkpoints.gguf_tensors import arranged
from models.checkpoints.hub import naming
from models.checkpoints.save import stored_tensors, written
from models.checkpoints.weights import NAMES, Pending, memory_of, placed

# What llama.cpp computes with in float32, whatever a file's other weights are: norms, biases, and these.
_FLOAT32 = ("v.position_embd", "v.patch_embd", "shortconv.conv")
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}  # `general.file_type`


def save_gguf(
    model: Any, folder: Path, name: str, tokenizer: Mapping[str, Any], images: Mapping[str, Any]
) -> tuple[Path, Path]:
    """Both files, in the dtype of the model's weights, in a folder that exists.

    Args:
        tokenizer: metadata, of `gguf_tokenizer.write`.
        images: settings of the image processor, all written out.
    """
    described, places = written(model.config)
    with naming("the model cannot be written as GGUF"):
        text, vision = metadata(described, images)
    tensors = placed(stored_tensors(model), places)
    kind = NAMES[max((tensor.dtype for tensor in tensors.values()), key=lambda dtype: dtype != torch.float32)]
    parts: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    known = arranged(described)
    for theirs, tensor in tensors.items():
        how = known[theirs]
        pieces = how.split(torch.empty(tensor.shape, device="meta"))
        for index, (own, piece) in enumerate(zip(how.names, pieces)):
            plain = piece.dim() == 1 or any(part in own for part in _FLOAT32)
            make = partial(_piece, tensor, how.split, index, torch.float32 if plain else tensor.dtype)
            place = _place("F32" if plain else NAMES[tensor.dtype], tuple(piece.shape))
            parts[own.startswith(("v.", "mm."))][own] = place, make
    paths = folder / f"{name}-{kind}{SUFFIX}", folder / f"mmproj-{name}-{kind}{SUFFIX}"
    about = {"general.file_type": _FILE_TYPES[kind], "general.name": name}
    said = {"general.type": "model", GENERATION: json.dumps(model.generation_config)}
    write_file(paths[0], {**text, **about, **said, **tokenizer}, parts[0])
    write_file(paths[1], vision | about | {"general.type": "mmproj"}, parts[1])
    return paths


def _place(kind: str, shape: tuple[int, ...]) -> Place:
    return Place(kind, shape, 0, math.prod(shape) * (4 if kind == "F32" else 2))


def _piece(tensor: Pending, split: Any, index: int, dtype: torch.dtype) -> Any:
    made = split(tensor.make().detach().cpu())[index].to(dtype).contiguous()
    return memory_of(made).obj
