"""The end of a sentence that refuses a checkpoint without config.json or weights: what it has instead."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Names of files that are there where a checkpoint's own are missing -> what is said about the first of them.
_INSTEAD = {
    "adapter_config.json": "it is an adapter: open its run's folder, or merge it (tools convert --adapter)",
    "*.incomplete": "a download was cut short, download it again",
    "openvino*.*": "it holds OpenVINO weights ({}): take the safetensors that they were made from",
    "*.onnx": "it holds ONNX weights ({}): take the safetensors that they were made from",
    "pytorch_model*.bin": "it holds PyTorch's pickle ({}): take the safetensors, or convert it to them",
}


def instead(names: Iterable[str]) -> str:
    """What to say about a checkpoint that lacks something and has files of these names; "" for nothing."""
    known = sorted(names)
    found = (
        (said, name) for pattern, said in _INSTEAD.items() for name in known if PurePath(name).match(pattern)
    )
    return next((f": {said.format(name)}" for said, name in found), "")
