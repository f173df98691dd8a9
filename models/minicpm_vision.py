"""The vision tower of MiniCPM-V 4.6: SigLIP over images of their own grids, in which squares of 2 × 2 patches
become one after an early layer.

Patches stand in nested squares: the four of a square side by side, the squares that become one later on too.
So what merges them takes four neighbours at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import require
from models.packed_vision_transformer import (
    Arranged,
    PackedAttention,
    PackedVisionConfig,
    PackedVisionTransformer,
    PatchMerger,
    block_order,
    patches_of,
)


@dataclass(frozen=True)
class MiniCPMVisionConfig(PackedVisionConfig):
    """`merge_size` follows from the fields."""

    may_be_zero: ClassVar = (*PackedVisionConfig.may_be_zero, "insert_layer_id")

    temporal_patch_size: int = 1
    rotary: bool = False
    last_norm: bool = True
    insert_layer_id: int = 6  # after which the window merger makes one patch of four
    downsample_mode: str = "16x"  # "4x": the window merger is there, and left out
    merger_times: int = 1  # rounds of the projector, each of which makes one patch of four
    kind: str = "minicpmv4_6"  # model_type, kept for saving

    def __post_init__(self):
        object.__setattr__(self, "merge_size", 2 ** (self.merger_times + self.inserted))
        super().__post_init__()
        fits = not self.inserted or self.insert_layer_id < self.num_hidden_layers
        require(self, fits, "insert_layer_id", f"one of {self.num_hidden_layers} layers, from 0 on")

    @property
    def inserted(self) -> bool:
        """Whether the window merger runs."""
        return self.downsample_mode != "4x"


class WindowMerger(nn.Module):
    """Squares of four patches (P, D) that attend to one another, to one each (P / 4, D)."""

    def __init__(self, config: PackedVisionConfig):
        super().__init__()
        width = config.hidden_size
        self.norm1, self.norm2 = (nn.LayerNorm(size, eps=config.norm_eps) for size in (width, 4 * width))
        self.self_attn = PackedAttention(config)
        self.fc1 = nn.Linear(4 * width, 4 * config.intermediate_size)
        self.fc2 = nn.Linear(4 * config.intermediate_size, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x), None, [4] * (len(x) // 4))
        squares = x.unflatten(0, (-1, 4))
        inner = F.gelu(self.fc1(self.norm2(squares.flatten(1))), approximate="tanh")
        return squares.mean(1) + self.fc2(inner)


class MiniCPMVisionTransformer(PackedVisionTransformer):
    """See the module's docstring."""

    config: MiniCPMVisionConfig

    def __init__(self, config: MiniCPMVisionConfig):
        super().__init__(config)
        kernel = self.patch_embedding.weight[:, :, 0]  # of single pictures
        self.patch_embedding.weight = nn.Parameter(kernel.detach())
        self.window_merger = WindowMerger(config)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Normalised images (C, H, W), of own sizes, multiples of patch_size · merge_size, to features
        of their patches (P, D), or where the window merger runs (P / 4, D)."""
        weight = self.patch_embedding.weight
        given = self.arrange([image.to(weight.device, weight.dtype) for image in images])
        # Of the weights' dtype: under autocast products are narrower, and hidden states stay float32.
        x, lengths = self.patch_embedding(given.patches).to(weight.dtype) + given.places, given.whole
        for index, layer in enumerate(self.layers):
            x = layer(x, None, lengths)
            if self.config.inserted and index == self.config.insert_layer_id:
                x, lengths = self.window_merger(x), [length // 4 for length in lengths]
        return self.norm(x)

    def arrange(self, images: Sequence[Tensor]) -> Arranged:
        """The input of the first layer. A patch has the position that lies in the square table of them where
        the patch lies in the image."""
        config, table = self.config, self.position_embedding.weight
        side, patches, places = config.table_side, [], []
        for image in images:
            grid = (image.shape[-2] // config.patch_size, image.shape[-1] // config.patch_size)
            patches.append(patches_of(image, config))
            order = nested_order(len(patches[-1]), config.merge_size)
            patches[-1] = patches[-1][order.to(table.device)]
            buckets = [nearest(count, side) for count in grid]
            row, column = block_order(grid, config.merge_size)[order].T
            places.append(table[(buckets[0][row] * side + buckets[1][column]).to(table.device)])
        whole = [len(one) for one in patches]
        return Arranged(torch.cat(patches), torch.cat(places), None, whole, whole, None)


def nested_order(patches: int, merge: int) -> Tensor:
    """(P,): indices of patches that stand block by block, each of merge² read row by row, in the order of
    squares of 2 × 2 within squares of 4 × 4, and so on."""
    rounds = merge.bit_length() - 1
    halvings = zip(range(1, rounds + 1), range(rounds + 1, 2 * rounds + 1))  # of a block's rows, its columns
    blocks = torch.arange(patches).view(-1, *[2] * (2 * rounds))
    return blocks.permute(0, *(axis for pair in halvings for axis in pair)).flatten()


def nearest(count: int, side: int) -> Tensor:
    """(count,): of a table of so many places along a side those of so many patches."""
    return torch.bucketize(torch.arange(count) / count, torch.arange(1 / side, 1.0, 1 / side), right=True)


def projector(config: MiniCPMVisionConfig, width: int) -> nn.Sequential:
    """Rounds that make one of four patches each, the last of them embeddings of a width."""
    square = PackedVisionConfig(
        hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads
    )
    widths = [*[config.hidden_size] * (config.merger_times - 1), width]
    return nn.Sequential(*(PatchMerger(square, one, "block") for one in widths))
