"""Weights stored in bfloat16, int8 or four bits: on CPUs without fast arithmetic in either, multiplied in
float32; int8 and four bits on CUDA, multiplied in bfloat16, before Ampere in float16.

    pack(model, "int8")                             # in place: linear layers and embeddings
    replace_layers(model, make)                     # with layers of another kind

Of four bits a row holds what `native/codes.h` describes, as 32-bit integers: the codes of all blocks of 64
columns, 8 units each, then of each block the word with scales and zeros of its two groups, then zeros up to
a multiple of 16 bytes. `native/panels.py` makes them of what C has rounded (`to_rows`).

Decoding reads every weight for each token, so its speed depends on their bytes, whatever the arithmetic.
`generation/fast/` computes straight from the packed weights; elsewhere each product unpacks them, a part at
a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from generation.codes import PARTIAL_FLOATS, product
from generation.devices import suited

LAYERS: tuple[type, ...] = (nn.Linear, nn.Embedding)
# (a layer, the names of its weight, the first replacement of a layer with this weight) -> its replacement
Make = Callable[[Any, Sequence[str], Any], nn.Module]
ARITHMETIC = {"cpu": torch.float32}  # of `arithmetic`; a GPU's is `suited`
UNPACKED = "position_embedding"  # no matrix that anything is multiplied with


def arithmetic(device: torch.device) -> torch.dtype:
    """What a device multiplies packed weights in, and with it keeps activations and all that is small in."""
    return ARITHMETIC.get(device.type) or suited(device)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(R, C) float -> (int8 (R, C), float32 scale (R,)): symmetric, the largest of each row becomes 127."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), device=weight.device)
    rows = max(1, PARTIAL_FLOATS // weight.shape[1])
    for numbers, code, own in zip(weight.split(rows), codes.split(rows), scale.split(rows)):
        own.copy_(numbers.float().abs().amax(1).clamp_(min=1e-12) / 127)
        code.copy_((numbers.float() / own[:, None]).round_())
    return codes, scale


def widened(weight: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The weights (…, columns) of stored rows, without the scales of rows; of four bits what they stand for,
    rounded to `dtype` once."""
    if weight.dtype != torch.int32:
        return weight.to(dtype)
    blocks = -(-columns // 64)
    units, words = weight[..., : 8 * blocks], weight[..., 8 * blocks : 9 * blocks]
    pairs = units.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    codes = torch.stack((pairs & 15, pairs >> 4), -2).flatten(-3).unflatten(-1, (-1, 32))
    groups = torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), -1).flatten(-2)[..., None]
    scales = (((groups & 0x1FF) << 18) + (112 << 23)).view(torch.float32)
    # Exact, as a zero is in eighths: scales and differences have fewer bits than any of these types.
    numbers = (codes - ((groups >> 9) / 8).to(dtype)) * scales.to(dtype)
    return numbers.flatten(-2)[..., :columns]


def rounded_bytes(precision: str, name: str, shape: Sequence[int]) -> int:
    """Bytes of a parameter of a model with int8 or int4 weights on a CPU, in C (`native.panels.round_layer`):
    32 bits a number where it is no matrix."""
    if len(shape) != 2 or UNPACKED in name:
        return 4 * math.prod(shape)
    rows, columns = shape
    if has_four_bits(precision, name):
        return rows * (-(-columns // 64) * 36 + 4)  # see native/codes.h; a scale
    return rows * (-(-columns // 4) * 4 + 8)  # a scale, and a sum


def has_four_bits(precision: str, name: str) -> bool:
    """Whether a matrix is stored in four bits; else in the eight of int8."""
    return precision == "int4" and not name.startswith(("vision_model.", "projector."))


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W (out, in) stored in bfloat16, int8 or four bits and one scale an output row; y is
    like x, which alone may have a gradient."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor | None, bias: Tensor | None, columns: int):
        super().__init__()
        self.out_features, self.in_features = len(weight), columns
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.weight.split(max(1, PARTIAL_FLOATS // self.in_features))
        y = product(x, lambda dtype: (widened(part, self.in_features, dtype) for part in parts))
        if self.scale is not None:
            y = (y * self.scale).to(y.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class PackedEmbedding(nn.Module):
    """Rows of a table (rows, columns) stored in bfloat16, int8 or four bits, and `dtype` out."""

    weight: Tensor
    scale: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor | None, dtype: torch.dtype, columns: int):
        super().__init__()
        self.dtype, self.columns = dtype, columns
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)

    def forward(self, ids: Tensor) -> Tensor:
        x = widened(F.embedding(ids, self.weight), self.columns, torch.float32)
        return (x if self.scale is None else x * self.scale[ids][..., None]).to(self.dtype)


# ------------------------------------------------------------------------------------- replacing layers


def is_layer(model: nn.Module, name: str, kinds: tuple[type, ...] = LAYERS) -> bool:
    """Whether a name is that of the weight of a layer that `replace_layers` replaces."""
    path, _, leaf = name.rpartition(".")
    return leaf == "weight" and not path.endswith(UNPACKED) and isinstance(model.get_submodule(path), kinds)


@torch.no_grad()
def replace_layers(
    model: nn.Module, make: Make, kinds: tuple[type, ...] = LAYERS, names: Sequence[str] | None = None
) -> None:
    """Replace the linear layers and token embeddings of a model, in place, by what `make` returns.

    One matrix at a time, so that no second copy of the model exists. Layers that share their weight (a tied
    head) are replaced one after the other.

    Args:
        kinds: the types of layers that are replaced.
        names: of weights; None stands for all of the model's.
    """
    if names is None:
        names = [f"{path}.weight" for path, _ in model.named_modules(remove_duplicate=False) if path]
    shared: dict[int, list[str]] = {}  # names by weight
    for name in names:
        if is_layer(model, name, kinds):
            shared.setdefault(id(model.get_submodule(name.removesuffix(".weight")).weight), []).append(name)
    for group in shared.values():
        first = None
        for path in (name.removesuffix(".weight") for name in group):
            made = make(model.get_submodule(path), group, first)
            model.set_submodule(path, made)
            first = first or made


@torch.no_grad()
def put_layers(model: nn.Module, names: Sequence[str], tensor: Tensor, make: Make) -> None:
    """Give a model a tensor that was read from a checkpoint, under the names of all that share it. A layer
    whose weight it is is replaced, so that a checkpoint is opened in the memory that it takes afterwards
    (`models.checkpoints.load.load`)."""
    weight, small = nn.Parameter(tensor, requires_grad=False), arithmetic(tensor.device)
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner: Any = model.get_submodule(path)
        if leaf in owner._buffers:  # the bias of a layer that was replaced before: it may fill whole panels
            setattr(owner, leaf, F.pad(tensor.to(small), (0, len(getattr(owner, leaf)) - len(tensor))))
        else:
            setattr(owner, leaf, weight if is_layer(model, name) else nn.Parameter(tensor.to(small)))
    replace_layers(model, make, names=names)


def pack_layer(precision: str, layer: Any, names: Sequence[str], first: Any) -> nn.Module:
    """The replacement of a layer in bfloat16 or int8: a `Make`, after the precision."""
    dtype, weight, scale = arithmetic(layer.weight.device), layer.weight.detach(), None
    columns = weight.shape[1]
    if first is not None:
        weight, scale = first.weight, first.scale
    else:
        weight, scale = quantize_rows(weight) if precision == "int8" else (weight.to(torch.bfloat16), None)
    if isinstance(layer, nn.Embedding):
        return PackedEmbedding(weight, scale, dtype, columns)
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    return PackedLinear(weight, scale, bias, columns)


def pack(model: nn.Module, precision: str, make: Callable[..., nn.Module] = pack_layer) -> nn.Module:
    """Store the weights of every linear layer and token embedding in `precision`, in place.

    Everything small gets the dtype of `arithmetic`. On CUDA `precision` is int8. `make` is a `Make` after the
    precision.
    """
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        raise ValueError("the model's weights are packed already: load it again for another precision")
    device = next(model.parameters()).device
    if device.type not in {*ARITHMETIC, "cuda"} or (device.type == "cuda" and precision != "int8"):
        raise ValueError(f"packed {precision} weights do not run on {device}")
    replace_layers(model, partial(make, precision))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(arithmetic(device))
    return model
