"""Networks of shapes without numbers, for whoever fills in or counts the weights.

with without_weights():
    model = VisionLanguageModel(config)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

TABLE_PARTS = ("vision", "projector", "embeddings", "blocks", "head")


def module_of(name: str) -> str:
    """One of TABLE_PARTS: where a parameter of a `VisionLanguageModel` belongs in a table of sizes."""
    owner, _, rest = name.partition(".")
    if owner != "language_model":
        return {"vision_model": "vision", "projector": "projector"}[owner]
    return {"embed_tokens": "embeddings", "lm_head": "head"}.get(rest.partition(".")[0], "blocks")


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules made inside are on the meta device, and PyTorch's own initialisation of them is left out: for
    drawing numbers that do not exist it would import its whole compiler (75 MB, one to three seconds)."""
    with torch.device("meta"), _Uninitialised():
        yield


class _Uninitialised(TorchFunctionMode):
    """Turns the functions of torch.nn.init into ones that return their tensor."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)
