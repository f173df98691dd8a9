"""Images of their own grids to features: a vision transformer over packed patches, as Qwen2.5-VL and
Qwen3-VL have it (arXiv:2502.13923, arXiv:2511.21631).

An image is not cut into tiles: its patches, in blocks of `merge_size` × `merge_size`, stand one after
another, and those of several images after one another. A patch attends within its image, or within its window
of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import Checked, require, require_multiple
from models.language_model import MLP, apply_rope
from models.vision_transformer import VisionMLP

Grid = tuple[int, int]  # patches of an image: rows, columns


@dataclass(frozen=True)
class PackedVisionConfig(Checked):
    """A vision transformer over images of their own grids: patches of several stand one after another."""

    may_be_zero: ClassVar = ("num_hidden_layers", "table_side", "window")
    choices: ClassVar = {
        "norm": ("layer", "rms"),
        "merger_norm": ("patch", "block", "none"),
        "table_fit": ("corners", "edges", "picture", "nearest"),
    }

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24  # 0: there is no tower
    num_attention_heads: int = 16
    num_channels: int = 3
    patch_size: int = 16
    merge_size: int = 2  # merge_size² patches, a square, become one position among the text
    temporal_patch_size: int = 2  # pictures that one patch spans; a still is repeated
    norm: str = "layer"
    norm_eps: float = 1e-6
    gated_mlp: bool = False
    patch_bias: bool = True
    channels_last: bool = False  # a patch is flattened pixel by pixel, not colour by colour (SigLIP2)
    table_side: int = 48  # of the square table of learned positions; 0: there is none
    # How it is stretched to a grid: corner on corner, edge on edge, this with antialiasing ("picture"); or
    # a patch has the place of the table that it lies in.
    table_fit: str = "corners"
    rope_theta: float = 10_000.0
    rotary: bool = True  # queries and keys are rotated by row and column
    last_norm: bool = False
    window: int = 0  # patches along a side of an attention window; 0: layers attend to the whole image
    whole_layers: tuple[int, ...] = ()  # layers without windows
    insert_layer: int | None = None  # after which a window merger makes one patch of four (MiniCPM-V)
    inserts: bool = True  # False: the weights of the window merger are kept and not used
    kind: str = ""  # model_type, where several have this tower; kept for saving
    taps: tuple[int, ...] = ()  # layers whose output goes to the first layers of the text part as well
    tokens_per_second: int = 4  # places in time that a video takes (Qwen2.5-VL); kept for saving
    # The projector:
    merger_norm: str = "patch"  # of each patch, of a whole block of them, or none
    merger_norm_eps: float = 1e-6
    merger_width: int | None = None  # None: as wide as a block
    merger_bias: bool = True

    def __post_init__(self):
        super().__post_init__()
        require_multiple(self, "hidden_size", "num_attention_heads")
        require_multiple(self, "window", "merge_size")
        fits = self.hidden_size // self.num_attention_heads % 4 == 0
        require(self, fits, "num_attention_heads", "heads whose width is a multiple of 4")
        for name in ("taps", "whole_layers"):
            layers = getattr(self, name)
            fits = list(layers) == sorted({*layers} & {*range(self.num_hidden_layers)})
            require(self, fits, name, f"some of {self.num_hidden_layers} layers, in ascending order")
        fits = self.insert_layer in (None, *range(self.num_hidden_layers)) or not self.inserts
        require(self, fits, "insert_layer", f"one of {self.num_hidden_layers} layers, from 0 on")

    def images(self, scale: int) -> str:
        """As of `VisionConfig`; the scale is `merge_size`."""
        side = self.patch_size * self.merge_size
        return f"in patches of {self.patch_size} px, a token for each {side} x {side} px"

    @property
    def merger_times(self) -> int:
        """How often one is made of four patches, apart from the window merger."""
        return self.merge_size.bit_length() - 1 - self.inserts

    @property
    def least_side(self) -> int:
        """Pixels along a side of the smallest image, which takes one position."""
        return self.patch_size * self.merge_size


def norm_of(config: PackedVisionConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
    return kind(config.hidden_size, eps=config.norm_eps)


class PackedAttention(nn.Module):
    """Bidirectional multi-head attention within each of several segments that stand one after another."""

    def __init__(self, config: PackedVisionConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: Sequence[int]) -> Tensor:
        """x (P, D), `rope` as `axial_rope` gives it, the segments' lengths, whose sum is P."""
        q, k, v = (
            part(x).view(len(x), self.num_heads, -1) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        # Angles are float32, and so is the rotation: half precision would move a patch of a large image.
        if rope is not None:
            q, k = (apply_rope(part.float(), *rope).to(v.dtype) for part in (q, k))
        done, out = 0, []
        for length, same in groupby(lengths):  # one call for neighbours of one length, as most windows are
            count = len(list(same))
            parts = slice(done, done := done + count * length)
            # (n · L, H, D_h) -> (n, H, L, D_h)
            queries, keys, values = (
                part[parts].view(count, length, *part.shape[1:]).transpose(1, 2) for part in (q, k, v)
            )
            seen = F.scaled_dot_product_attention(queries, keys, values)
            out.append(seen.transpose(1, 2).reshape(count * length, -1))
        return self.out_proj(torch.cat(out))


class PackedBlock(nn.Module):
    def __init__(self, config: PackedVisionConfig):
        super().__init__()
        self.norm1, self.norm2 = norm_of(config), norm_of(config)
        self.self_attn = PackedAttention(config)
        sizes = config.hidden_size, config.intermediate_size
        self.mlp = MLP(*sizes, bias=True) if config.gated_mlp else VisionMLP(*sizes)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, lengths: Sequence[int]) -> Tensor:
        x = x + self.self_attn(self.norm1(x), rope, lengths)
        return x + self.mlp(self.norm2(x))


class WindowMerger(nn.Module):
    """Squares of four patches (P, D), which attend to one another, to one each (P / 4, D)."""

    def __init__(self, config: PackedVisionConfig):
        super().__init__()
        width, inner = config.hidden_size, 4 * config.intermediate_size
        self.self_attn = PackedAttention(config)
        self.norm1, self.pre_norm = norm_of(config), nn.LayerNorm(4 * width, eps=config.norm_eps)
        self.linear_1, self.linear_2 = nn.Linear(4 * width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x), None, [4] * (len(x) // 4))
        squares = x.unflatten(0, (-1, 4))
        inner = self.linear_1(self.pre_norm(squares.flatten(1)))
        # In parts for one thread each: where two of PyTorch's meet, they round otherwise.
        parts = [F.gelu(part, approximate="tanh") for part in inner.split(max(1, 16_000 // inner.shape[1]))]
        return squares.mean(1) + self.linear_2(torch.cat(parts))


class PatchEmbedding(nn.Module):
    """Pictures in pairs, as the frames of a video come: a still is a pair of itself."""

    def __init__(self, config: PackedVisionConfig):
        super().__init__()
        side = config.patch_size
        together = [config.temporal_patch_size] if config.temporal_patch_size > 1 else []
        numbers: tuple[int, ...] = (config.num_channels, *together, side, side)
        if config.channels_last:
            numbers = (side * side * config.num_channels,)
        self.weight = nn.Parameter(torch.empty(config.hidden_size, *numbers))
        self.bias = nn.Parameter(torch.empty(config.hidden_size)) if config.patch_bias else None

    def forward(self, patches: Tensor) -> Tensor:
        """(P, C · side · side) of stills, or (P, C · F · side · side) of frames together -> (P, D)."""
        weight = self.weight.flatten(1)
        if weight.shape[1] != patches.shape[1]:
            weight = self.weight.sum(2).flatten(1)
        return F.linear(patches, weight, self.bias)


@dataclass(frozen=True)
class Arranged:
    """Images as a tower takes them, the patches of a window together."""

    patches: Tensor  # (P, C · side · side)
    places: Tensor | None  # (P, D), float32 or wider than the table: added to the embeddings
    rope: tuple[Tensor, Tensor] | None  # see axial_rope
    whole: list[int]  # number of patches of each image
    windows: list[int]  # number of patches of each window
    order: Tensor | None  # (P,): index of each patch in the order block by block; None: that is their order


class PackedVisionTransformer(nn.Module):
    """Patches, positions from a learned table (where there is one) and from two-dimensional rotation, and
    pre-norm blocks."""

    def __init__(self, config: PackedVisionConfig):
        super().__init__()
        self.config = config
        self.patch_embedding = PatchEmbedding(config)
        side = config.table_side
        self.position_embedding = nn.Embedding(side**2, config.hidden_size) if side else None
        self.layers = nn.ModuleList(PackedBlock(config) for _ in range(config.num_hidden_layers))
        self.window_merger = None if config.insert_layer is None else WindowMerger(config)
        self.norm = norm_of(config) if config.last_norm else None

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Normalised images (C, H, W), each of its own size, multiples of patch_size · merge_size; or frames
        of a video that go together, (C, F, H, W).

        Returns (P, 1 + taps, D): of each patch the last layer's output, and before it those of the layers in
        `config.taps`. The patches of an image stand block by block, block_order says how, or in nested
        squares. Where a window merger runs, they are P / 4.
        """
        if len({image.dim() for image in images}) > 1:
            return torch.cat([self([image]) for image in images])
        weight = self.patch_embedding.weight
        given = self.arrange([image.to(weight.device, weight.dtype) for image in images])
        # Of the weights' dtype: under autocast products are narrower, and hidden states stay float32.
        x = self.patch_embedding(given.patches).to(weight.dtype)
        if given.places is not None:
            x = x + given.places.to(weight.dtype)
        kept, whole = [], given.whole
        for index, layer in enumerate(self.layers):
            windowed = self.config.window and index not in self.config.whole_layers
            x = layer(x, given.rope, given.windows if windowed else whole)
            if self.window_merger and self.config.inserts and index == self.config.insert_layer:
                x, whole = self.window_merger(x), [length // 4 for length in whole]
            if index in self.config.taps:
                kept.append(x)
        if self.norm is not None:
            x = self.norm(x)
        features = torch.stack((*kept, x), dim=1)  # (P, taps + 1, D)
        return features if given.order is None else features[given.order.argsort()]

    def arrange(self, images: Sequence[Tensor]) -> Arranged:
        """The input of the first block, with the position of each patch."""
        config, device = self.config, images[0].device
        grids = [
            (image.shape[-2] // config.patch_size, image.shape[-1] // config.patch_size) for image in images
        ]
        patches, places = torch.cat([patches_of(image, config) for image in images]), None
        if self.position_embedding is not None:
            places = torch.cat([interpolated(self.position_embedding.weight, grid, config) for grid in grids])
        rope = axial_rope(grids, config, device) if config.rotary else None
        whole = [rows * columns for rows, columns in grids]
        if places is not None and self.window_merger:
            order = nested_order(len(patches), config.merge_size).to(device)
            patches, places = patches[order], places[order]
        if not config.window:
            return Arranged(patches, places, rope, whole, whole, None)
        order, windows = windows_of(grids, config)
        order = order.to(device)
        places = None if places is None else places[order]
        rope = rope and (rope[0][order], rope[1][order])
        return Arranged(patches[order], places, rope, whole, windows, order)


def patches_of(image: Tensor, config: PackedVisionConfig) -> Tensor:
    """(C, H, W) -> (P, C · side · side), block by block; (C, F, H, W) -> (P, C · F · side · side)."""
    side, merge = config.patch_size, config.merge_size
    *_, height, width = image.shape
    image = image.flatten(0, -3)
    channels = len(image)
    blocks = (channels, height // side // merge, merge, side, width // side // merge, merge, side)
    order = (1, 4, 2, 5, 3, 6, 0) if config.channels_last else (1, 4, 2, 5, 0, 3, 6)
    return image.reshape(blocks).permute(order).reshape(-1, channels * side * side)


def block_order(grid: Grid, merge: int) -> Tensor:
    """(P, 2) int64: row and column of each patch, in the order in which the patches of an image stand."""
    rows, columns = grid
    index = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
    index = index.transpose(1, 2).flatten()
    return torch.stack((index // columns, index % columns), dim=1)


def nested_order(patches: int, merge: int) -> Tensor:
    """(P,): indices of patches that stand block by block, each of merge² read row by row, in the order of
    squares of 2 × 2 within squares of 4 × 4, and so on."""
    half = merge.bit_length() - 1  # as often are a block's rows halved, and then its columns
    axes = (axis for row in range(1, half + 1) for axis in (row, row + half))
    return torch.arange(patches).view(-1, *[2] * (2 * half)).permute(0, *axes).flatten()


def interpolated(table: Tensor, grid: Grid, config: PackedVisionConfig) -> Tensor:
    """A square table of learned positions (side², D) stretched to a grid: (P, D)."""
    side = config.table_side
    order = block_order(grid, config.merge_size).to(table.device)
    if config.table_fit == "nearest":  # as transformers computes it, in float32
        edges = torch.arange(1 / side, 1.0, 1 / side)
        shares = (torch.arange(count) / count for count in grid)
        rows, columns = (torch.bucketize(share, edges, right=True).to(table.device) for share in shares)
        return table[rows[order[:, 0]] * side + columns[order[:, 1]]]
    if config.table_fit == "picture":
        picture = table.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        stretched = F.interpolate(picture, grid, mode="bilinear", align_corners=False, antialias=True)
        return stretched[0, :, order[:, 0], order[:, 1]].T.to(table.dtype)
    total = table.new_zeros(len(order), table.shape[1])
    taps = []
    for axis in (0, 1):
        place = order[:, axis].float()
        if config.table_fit == "edges":
            place = (place + 0.5) * side / grid[axis] - 0.5
        else:
            place = place * (side - 1) / max(grid[axis] - 1, 1)
        low = place.floor().long()
        above = (low + 1).clamp(max=side - 1), place - low
        taps.append(((low.clamp(min=0), 1 - (place - low)), above))
    for row, row_weight in taps[0]:
        for column, column_weight in taps[1]:
            total = total + table[row * side + column] * (row_weight * column_weight)[:, None]
    return total


def axial_rope(
    grids: Sequence[Grid], config: PackedVisionConfig, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin (P, 1, D_h), float32: a quarter of the angles from a patch's row, a quarter from its
    column, and both once more."""
    half = config.hidden_size // config.num_attention_heads // 2
    inv_freq = 1.0 / (config.rope_theta ** (torch.arange(0, half, 2).float() / half))
    places = torch.cat([block_order(grid, config.merge_size) for grid in grids])
    angles = (places[..., None].float() * inv_freq).flatten(1)  # (P, D_h / 2)
    angles = torch.cat((angles, angles), dim=-1)[:, None].to(device)
    return angles.cos(), angles.sin()


def windows_of(grids: Sequence[Grid], config: PackedVisionConfig) -> tuple[Tensor, list[int]]:
    """An order of all patches (P,) in which those of a window stand together, and the windows' lengths."""
    own = [image_windows(grid, config.merge_size, config.window) for grid in grids]
    begins = accumulate((len(order) for order, _ in own), initial=0)
    order = torch.cat([order + begin for (order, _), begin in zip(own, begins)])
    return order, [length for _, lengths in own for length in lengths]


@lru_cache(64)
def image_windows(grid: Grid, merge: int, window: int) -> tuple[Tensor, list[int]]:
    """`windows_of` one image; `window` is a window's side in patches."""
    rows, columns = (count // merge for count in grid)
    across = window // merge
    blocks = torch.arange(rows * columns).view(rows, columns)
    pieces = [
        blocks[top : top + across, left : left + across].flatten()
        for top in range(0, rows, across)
        for left in range(0, columns, across)
    ]
    patches = torch.arange(merge**2)
    order = (torch.cat(pieces)[:, None] * merge**2 + patches).flatten()
    return order, [len(piece) * merge**2 for piece in pieces]


class PatchMerger(nn.Module):
    """Blocks of merge_size² patches (P, D_v) to embeddings (P / merge_size², D): norm, and two layers."""

    def __init__(self, config: PackedVisionConfig, width: int, norm: str):
        super().__init__()
        self.block = block = config.hidden_size * config.merge_size**2
        inner, kind = config.merger_width or block, nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
        self.norm_block, normed = norm == "block", {"patch": config.hidden_size, "block": block}
        self.norm = kind(normed[norm], eps=config.merger_norm_eps) if norm in normed else None
        self.fc1 = nn.Linear(block, inner, bias=config.merger_bias)
        self.fc2 = nn.Linear(inner, width, bias=config.merger_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, self.block) if self.norm_block else x
        x = x if self.norm is None else self.norm(x)
        return self.fc2(F.gelu(self.fc1(x.reshape(-1, self.block))))


class PatchMergers(nn.Module):
    """The projector of a packed tower: (P, 1 + taps, D_v) -> (P / merge_size², (1 + taps) · D).

    First what stands among the text's embeddings, then what is added to the hidden states after text layer 0,
    1, …: DeepStack (arXiv:2406.04334).
    """

    def __init__(self, config: PackedVisionConfig, width: int):
        super().__init__()
        self.merger = PatchMerger(config, width, config.merger_norm)
        self.deep = nn.ModuleList(PatchMerger(config, width, "block") for _ in config.taps)

    def forward(self, x: Tensor) -> Tensor:
        deep = [merger(x[:, index]) for index, merger in enumerate(self.deep)]
        return torch.cat((self.merger(x[:, -1]), *deep), dim=-1)
