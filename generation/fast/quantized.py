"""Weights stored in bfloat16 or int8: on CPUs without fast arithmetic in either, multiplied in float32; int8
on CUDA as well, multiplied in bfloat16.

    pack(model, "int8")     # in place: linear layers and embeddings

Decoding reads every weight for each token, so its speed depends on their bytes, whatever the arithmetic.
`generation/fast/` computes straight from the packed weights; elsewhere each product unpacks them, a part at
a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_UNPACKED_FLOATS = 4_194_304  # weights unpacked at a time (16 MiB of float32)
# What a device multiplies in, and with it keeps activations and all that is small in.
_ARITHMETIC = {"cpu": torch.float32, "cuda": torch.bfloat16}


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(R, C) float -> (int8 (R, C), float32 scale (R,)): symmetric, the largest of each row becomes 127."""
    weight = weight.float()
    scale = weight.abs().amax(1).clamp(min=1e-12) / 127
    return (weight / scale[:, None]).round_().to(torch.int8), scale


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W (out, in) stored in bfloat16 or int8 and one scale an output row; y is like x."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor | None, bias: Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = max(1, _UNPACKED_FLOATS // self.weight.shape[1])
        parts = [F.linear(x, part.to(x.dtype)) for part in self.weight.split(rows)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.scale is not None:
            y = (y * self.scale).to(x.dtype)
        return y if self.bias is None else y + self.bias


class PackedEmbedding(nn.Module):
    """Rows of a table stored in bfloat16 or int8, and `dtype` out."""

    weight: Tensor
    scale: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor | None, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.dtype = dtype
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.weight).float()
        return (x if self.scale is None else x * self.scale[ids][..., None]).to(self.dtype)


@torch.no_grad()
def pack(model: nn.Module, precision: str) -> nn.Module:
    """Store the weights of every linear layer and token embedding in `precision`, in place.

    One matrix at a time, so that no second copy of the model exists. Matrices that share their weight (a
    tied head) go on sharing it. Everything small, and with it all arithmetic, becomes float32 on a CPU and
    bfloat16 on CUDA, where `precision` is int8.
    """
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        raise ValueError("the model's weights are packed already: load it again for another precision")
    device = next(model.parameters()).device.type
    if device not in _ARITHMETIC or (device == "cuda" and precision != "int8"):
        raise ValueError(f"packed {precision} weights do not run on {device}")
    arithmetic = _ARITHMETIC[device]
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # by weight, so that a shared one is packed once
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | nn.Embedding) and name != "position_embedding":
                places.setdefault(id(child.weight), []).append((parent, name))
    for users in places.values():
        whole = getattr(*users[0]).weight.detach()
        weight, scale = quantize_rows(whole) if precision == "int8" else (whole.to(torch.bfloat16), None)
        for parent, name in users:
            child = getattr(parent, name)
            if isinstance(child, nn.Linear):
                bias = None if child.bias is None else child.bias.detach().to(arithmetic)
                setattr(parent, name, PackedLinear(weight, scale, bias))
            else:
                setattr(parent, name, PackedEmbedding(weight, scale, arithmetic))
        del whole, child  # freed before the next one is packed
    for parameter in model.parameters():
        parameter.data = parameter.data.to(arithmetic)
    return model
