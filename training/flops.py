"""Floating-point operations of training, by formula, and what a device can do at most: for MFU and --plan.

A product costs 2 · in · out per position (Kaplan et al., arXiv:2001.08361). Attention costs 4 · d · heads
for each pair of positions, for scores and for their sum over values; a causal mask is not deducted, as in
PaLM's count (arXiv:2204.02311, appendix B). Norms, rotations, activations and the few taps of
short convolutions do not count. The tests compare this with torch's own counter.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from data.packing import IGNORE_INDEX
from families import FAMILIES
from models.checkpoints.load import meta_init
from models.config import TextConfig, VLMConfig
from models.gated_delta import CHUNK
from models.packed_vision_transformer import PackedVisionConfig, image_windows
from models.vision_language_model import part_size
from training.config import PEAKS
from training.optim import part_of

PARTS = ("vision_model", "projector", "language_model")


@dataclass(frozen=True)
class Amounts:
    """How much of what goes through the model. `patches` are those of all `tiles`; `patch_pairs` sums, over
    patches, how many each may look at in an average layer of the tower; `pairs` the same over positions.
    Without positions, tiles go through the vision tower alone."""

    tiles: float
    patches: float
    patch_pairs: float
    positions: float = 0
    pairs: float = 0
    labelled: float = 0


def tower_amounts(vision: Any, sizes: Iterable[Sequence[int]], each: float = 1) -> tuple[float, float, float]:
    """Tiles, or whole images, of these heights and widths in pixels, `each` so many times; their patches, and
    the pairs of these; see `Amounts`."""
    tiles = patches = pairs = 0.0
    for height, width in sizes:
        grid = (height // vision.patch_size, width // vision.patch_size)
        count = grid[0] * grid[1]
        tiles, patches, whole = tiles + each, patches + each * count, 1.0
        if isinstance(vision, PackedVisionConfig) and vision.window:
            whole = len(vision.whole_layers) / vision.num_hidden_layers
            _, windows = image_windows(grid, vision.merge_size, vision.window)
            pairs += each * (1 - whole) * sum(length**2 for length in windows)
        pairs += each * whole * count**2
    return tiles, patches, pairs


def amounts_of(batch: Mapping[str, Any], vision: Any) -> Amounts:
    """What a batch sends through the model, without padding. `vision` is the tower's config.

    Segments of a row are blind to each other; segment 0, where there is one, is a prefix that all see.
    """
    segments = batch["segment_ids"]
    of_tower = tower_amounts(vision, map(part_size, batch.get("pixel_values", ())))
    columns = int(segments.max()) + 1
    if columns == 0:  # nothing but padding
        return Amounts(*of_tower)
    rows = torch.arange(len(segments))[:, None]
    cells = (rows * columns + segments)[segments >= 0]
    lengths = torch.bincount(cells, minlength=len(segments) * columns).view(-1, columns)  # of segments
    pairs = (lengths**2).sum() + (lengths[:, :1] * lengths[:, 1:]).sum()
    labelled = (batch["labels"] != IGNORE_INDEX).sum()
    return Amounts(*of_tower, int(lengths.sum()), int(pairs), int(labelled))


@lru_cache(8)
def image_weights(config: VLMConfig) -> tuple[float, float, bool]:
    """Weights that each patch is multiplied with, in the tower's blocks and in the projector; and whether
    that one has a norm in front, whose weights need the gradient of its products' input."""
    with meta_init():
        tower, projector, _ = FAMILIES[config.family].build(config)
    blocks, after = (
        sum(p.numel() for p in part.parameters() if p.dim() == 2) for part in (tower.layers, projector)
    )
    side = config.vision.least_side
    patches = (side // config.vision.patch_size) ** 2
    share = FAMILIES[config.family].positions(config, side, side) / patches
    return blocks, after * share, any("norm" in name for name, _ in projector.named_parameters())


@lru_cache(8)
def linear_sizes(config: VLMConfig, part: str = "language_model") -> list[dict[str, tuple[int, int]]]:
    """(in, out) of the linear layers of each block of the language model, or of the tower."""
    with meta_init():
        tower, _, text = FAMILIES[config.family].build(config)
    return [
        {
            name.rpartition(".")[2]: (layer.in_features, layer.out_features)
            for name, layer in block.named_modules()
            if isinstance(layer, nn.Linear)
        }
        for block in (tower if part == "vision_model" else text).layers
    ]


def delta_products(text: TextConfig) -> int:
    """Multiplications of a position in a gated delta rule (`models.gated_delta.delta_rule`): with the keys
    and what the positions of its chunk add, and with the matrix before them."""
    key, value = text.delta_key_dim, text.delta_value_dim
    return text.delta_value_heads * (CHUNK * (2 * key + value) + 3 * key * value)


def training_flops(
    config: VLMConfig,
    amounts: Amounts,
    learns: frozenset[str] = frozenset(PARTS),
    adapters: Mapping[str, int] = MappingProxyType({}),
    recompute: bool = False,
) -> float:
    """FLOPs of forward and backward. `learns` says which of PARTS do; `adapters` is the number of weights
    that LoRA trains in a part in their place; `recompute` counts the second forward pass of activation
    checkpointing.

    Backward repeats a product once for its input, where something in front of it learns, and once for its
    weight, where that learns: three times forward where everything learns. Attention's two activations both
    get a gradient.
    """
    assert learns <= set(PARTS), f"expected parts out of {PARTS}, got {sorted(learns)}"
    vision, text = config.vision, config.text
    # Forward, per patch: the patch convolution (pixels get no gradient), the tower, the projector.
    convolution = 2 * vision.num_channels * vision.patch_size**2 * vision.hidden_size
    blocks, after, normed = image_weights(config)
    tower, projector = 2 * blocks, 2 * after
    seeing = vision.num_hidden_layers * 4 * vision.hidden_size  # per pair of patches
    # Forward, per position, per pair of positions, and per labelled position.
    products = 2 * sum(a * b for layer in linear_sizes(config) for a, b in layer.values())
    mixers = [text.mixer(layer) for layer in range(text.num_hidden_layers)]
    rules = mixers.count("delta") * 2 * delta_products(text)  # of which both sides get a gradient
    attending = sum(kind not in ("conv", "delta") for kind in mixers)
    attention = attending * 4 * text.num_attention_heads * text.head_dim
    head = 2 * text.hidden_size * text.vocab_size

    sees, projects, speaks = (part in learns for part in PARTS)
    in_tower, in_blocks = (adapters.get(PARTS[at], 0) for at in (0, 2))
    into_tower = sees or in_tower > 0  # gradients go back through the tower, and the decoder
    into_blocks = into_tower or projects or speaks or in_blocks > 0
    patch = convolution * (1 + sees) + tower * (1 + sees + into_tower) + 3 * 2 * in_tower
    patch_pair = seeing * (1 + 2 * into_tower)
    if amounts.positions:
        patch += projector * (1 + projects + (into_tower or (projects and normed)))
    position = products * (1 + speaks + into_blocks) + 3 * 2 * in_blocks + rules * (1 + 2 * into_blocks)
    pair = attention * (1 + 2 * into_blocks)
    label = head * (1 + speaks + into_blocks)
    if recompute:
        patch, patch_pair = patch + tower * into_tower, patch_pair + seeing * into_tower
        position, pair = position + products + rules, pair + attention
    through_tower = patch * amounts.patches + patch_pair * amounts.patch_pairs
    through_blocks = position * amounts.positions + pair * amounts.pairs
    return through_tower + through_blocks + label * amounts.labelled


def what_learns(model: nn.Module) -> tuple[frozenset[str], Counter[str]]:
    """Parts of the model whose own weights learn, and the number of weights in each part's adapters."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    adapters: Counter[str] = Counter()
    for name, p in named:
        adapters[part_of(name)] += p.numel() * ("lora_" in name)
    return frozenset(part_of(name) for name, _ in named if "lora_" not in name), adapters


# --------------------------------------------------------------------------------------------- devices
def known_peak(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a GPU by what it calls itself; None for one that is not in the table, or another dtype."""
    share = {torch.bfloat16: 1.0, torch.float32: 0.5}.get(dtype)
    words = [known for known in PEAKS if re.search(rf"\b{known}\b", name, re.IGNORECASE)]
    # "NVIDIA H100 PCIe" is both H100 and H100 PCIe: the longer name says more.
    return None if share is None or not words else share * PEAKS[max(words, key=len)]


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that a product of two large matrices reaches here: the best of some, a tenth of a second in all.
    They grow as long as a product is quick: of types that it has no instructions for, a CPU takes seconds for
    a large one."""
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda device: None
    own = torch.Generator(device).manual_seed(0)  # the run's random numbers are left alone
    side, best, spent, made = 256, 0.0, 0.0, 0
    while spent < 0.1 or made < 3:  # of this size: a GPU's first one loads its library
        # Not constants: their products are faster on a GPU than any that training computes.
        a = torch.randn(side, side, generator=own, device=device, dtype=dtype)
        wait(device)
        start = time.perf_counter()
        a @ a
        wait(device)
        seconds = time.perf_counter() - start
        best, spent, made = max(best, 2 * side**3 / seconds), spent + seconds, made + 1
        if seconds < 0.02 and side < 8192:
            side, made = 2 * side, 0
    return best


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s of a device of this machine, and how that is known."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if (peak := known_peak(name, dtype)) is not None:
            return peak, name
    return measured_peak(device, dtype), "measured with a product of large matrices"
