"""The ends of sentences that refuse a checkpoint without config.json or weights: what it has instead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path, PurePath

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# How files of weights that are not opened here are called -> whose they are.
_OTHER_WEIGHTS = {"openvino*.*": "OpenVINO", "*.onnx": "ONNX", "pytorch_model*.bin": "PyTorch's pickle"}


def is_checkpoint(folder: Path) -> bool:
    return os.path.isfile(folder / "config.json")


def other_weights(names: Iterable[str]) -> str:
    """The end of a sentence about a checkpoint with these files and without weights that open here: the
    format that it has instead."""
    for pattern, kind in _OTHER_WEIGHTS.items():
        if name := next((name for name in sorted(names) if PurePath(name).match(pattern)), ""):
            return f"; it holds {kind} weights ({name}): take the safetensors that they were made from"
    return ""


def config(names: Callable[[], list[str]], folder: Path | None) -> str:
    """The end of a sentence about a missing config.json. `folder` is that of the checkpoint, if it is
    local."""
    if folder is None:
        return "a checkpoint needs one beside its weights"
    if (folder / "adapter_config.json").is_file():
        run = folder.resolve().parent
        what = f"open {run}" if is_checkpoint(run) else "merge it: tools convert BASE --adapter"
        return f"it is an adapter; {what}"
    return f"a checkpoint needs one beside its weights{other_weights(names())}"


def weights(names: Callable[[], list[str]], folder: Path | None) -> str:
    """The end of a sentence about missing weights: which, and what there is instead."""
    below, others = ("*.incomplete", ".cache/huggingface/download/*.incomplete"), ""
    if folder is not None and any(any(folder.glob(name)) for name in below):
        return f"no {WEIGHTS}: a download was cut short, download it again"
    with suppress(ValueError):  # the Hub cannot be asked
        others = other_weights(names())
    others = others or "; weights in another format must be converted to safetensors first"
    return f"neither {WEIGHTS} nor {INDEX}{others}"
