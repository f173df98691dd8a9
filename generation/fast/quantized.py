"""Weights stored in bfloat16, int8 or four bits: on CPUs without fast arithmetic in either, multiplied in
float32; int8 and four bits on CUDA, multiplied in bfloat16.

    pack(model, "int8")     # in place: linear layers and embeddings

Of four bits a row holds what `native/groups.h` describes, as 32-bit integers: the codes of all blocks of 64
columns, 8 units each, then of each block the unit with scales and zeros of its two groups, then zeros up to
a multiple of 16 bytes. `native/build.py` makes them of what C has rounded (`to_rows`).

Decoding reads every weight for each token, so its speed depends on their bytes, whatever the arithmetic.
`generation/fast/` computes straight from the packed weights; elsewhere each product unpacks them, a part at
a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Put = Callable[[str, nn.Module, Sequence[str], Tensor], None]
PARTIAL_FLOATS = 4_194_304  # weights rounded or unpacked at a time (16 MiB of float32)
# What a device multiplies in, and with it keeps activations and all that is small in.
ARITHMETIC = {"cpu": torch.float32, "cuda": torch.bfloat16}
UNPACKED = "position_embedding"


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(R, C) float -> (int8 (R, C), float32 scale (R,)): symmetric, the largest of each row becomes 127."""
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), device=weight.device)
    rows = max(1, PARTIAL_FLOATS // weight.shape[1])
    for numbers, code, own in zip(weight.split(rows), codes.split(rows), scale.split(rows)):
        own.copy_(numbers.float().abs().amax(1).clamp_(min=1e-12) / 127)
        code.copy_((numbers.float() / own[:, None]).round_())
    return codes, scale


def rows_of_units(blocks: Tensor) -> Tensor:
    """(R, blocks, 9) units as `native/groups.h` has them -> rows (R, units)."""
    rows = torch.cat((blocks[..., 1:].flatten(1), blocks[..., 0]), 1)
    return F.pad(rows, (0, -rows.shape[1] % 4))


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
    """What a parameter of a model takes with int8 or int4 weights on a CPU, in C (`put_packed`,
    `native.build.put_rounded`): 32 bits a number where it is no matrix."""
    if len(shape) != 2 or UNPACKED in name:
        return 4 * math.prod(shape)
    rows, columns = shape
    if has_four_bits(precision, name):
        return rows * (-(-columns // 64) * 36 + 4)  # see native/groups.h; a scale
    return rows * (-(-columns // 4) * 4 + 8)  # a scale, and a sum


def has_four_bits(precision: str, name: str) -> bool:
    """Whether a matrix has, or the eight bits of int8."""
    return precision == "int4" and not name.startswith(("vision_model.", "projector."))


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W (out, in) stored in bfloat16, int8 or four bits and one scale an output row; y is
    like x."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor | None, bias: Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        columns = x.shape[-1]
        rows = max(1, PARTIAL_FLOATS // columns)
        parts = [F.linear(x, widened(part, columns, x.dtype)) for part in self.weight.split(rows)]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if self.scale is not None:
            y = (y * self.scale).to(x.dtype)
        return y if self.bias is None else y + self.bias


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


@torch.no_grad()
def put_packed(precision: str, model: nn.Module, names: Sequence[str], tensor: Tensor) -> None:
    """Give a model a tensor: as `pack` has it, under the names of all that share it. With int8 a checkpoint
    is opened in the memory that it takes afterwards (`models.checkpoints.load.load`)."""
    arithmetic = ARITHMETIC[tensor.device.type]
    packed: tuple[Tensor, Tensor | None] | None = None
    for name in names:
        path, _, leaf = name.rpartition(".")
        above, _, own = path.rpartition(".")
        module: Any = model.get_submodule(path)
        is_linear = isinstance(module, nn.Linear)
        if leaf == "weight" and (is_linear or isinstance(module, nn.Embedding)) and own != UNPACKED:
            if packed is None:
                packed = quantize_rows(tensor) if precision == "int8" else (tensor.to(torch.bfloat16), None)
            if is_linear:
                bias = None if module.bias is None else module.bias.detach().to(arithmetic)
                module = PackedLinear(*packed, bias)
            else:
                module = PackedEmbedding(*packed, arithmetic, tensor.shape[1])
            setattr(model.get_submodule(above), own, module)
        elif isinstance(module, PackedLinear):
            module.bias = tensor.to(arithmetic)
        else:
            setattr(module, leaf, nn.Parameter(tensor.to(arithmetic)))


def pack(model: nn.Module, precision: str, put: Put = put_packed) -> nn.Module:
    """Store the weights of every linear layer and token embedding in `precision`, in place.

    One matrix at a time, so that no second copy of the model exists. Matrices that share their weight (a
    tied head) go on sharing it. Everything small, and with it all arithmetic, becomes float32 on a CPU and
    bfloat16 on CUDA, where `precision` is int8. `put` gives the model each tensor.
    """
    if any(isinstance(module, PackedLinear) for module in model.modules()):
        raise ValueError("the model's weights are packed already: load it again for another precision")
    device = next(model.parameters()).device.type
    if device not in ARITHMETIC or (device == "cuda" and precision != "int8"):
        raise ValueError(f"packed {precision} weights do not run on {device}")
    shared: dict[int, list[str]] = {}  # names by parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    for names in shared.values():
        put(precision, model, names, attrgetter(names[0])(model).detach())
    return model
