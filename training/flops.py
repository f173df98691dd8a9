"""Floating-point operations of training, by formula, and what a device can do at most: for MFU and --plan.

A product costs 2 · in · out per position (Kaplan et al., arXiv:2001.08361). Attention costs 4 · d · heads
for each pair of positions, for scores and for their sum over values; a causal mask is not deducted, as in
PaLM's count (arXiv:2204.02311, appendix B). Norms, rotations, activations and the few taps of
short convolutions do not count. The tests compare this with torch's own counter.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from data.packing import IGNORE_INDEX
from families import FAMILIES
from generation.codes import CodedLinear
from generation.fast.quantized import PackedLinear
from models.gated_delta import CHUNK
from models.packed_vision_transformer import PackedVisionConfig, image_windows
from models.vision_language_model import VisionLanguageModel, part_size

PARTS = ("vision_model", "projector", "language_model")
LINEAR = (torch.nn.Linear, PackedLinear, CodedLinear)


class Amounts(NamedTuple):
    """Amounts of work of a batch by kind, or the cost of one of each. `patches` are those of all
    `tiles`; `patch_pairs` sums, over patches, how many each may look at in an average layer of the tower;
    `pairs` the same over positions."""

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
    """The amounts of a batch, without padding. `vision` is the tower's config.

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


def costs(model: VisionLanguageModel) -> Amounts:
    """FLOPs that each patch, pair, position and label costs in forward and backward, by the weights that
    learn (adapters among them), without the second forward pass of activation checkpointing.

    Backward repeats a product once for its input, where something before it learns, and once for its
    weight, where that learns: three times forward where everything learns. Attention's two activations both
    get a gradient.
    """
    config, vision, text = model.config, model.config.vision, model.config.text
    products = dict[str, float]()  # of each part's weights
    backward = dict[str, bool]()  # whether gradients go back through all of the part
    before = False
    for part in PARTS:
        named = [*getattr(model, part).named_parameters(remove_duplicate=False)]
        learns = any(p.requires_grad for _, p in named)
        # The weights of a norm need the gradient of what the first product gets.
        backward[part] = into = before or (learns and any("norm" in name for name, _ in named))
        products[part] = sum(
            2 * one.in_features * one.out_features * (1 + one.weight.requires_grad + into)
            for name, one in getattr(model, part).named_modules()
            if isinstance(one, LINEAR) and (part == "projector" or name.startswith("layers."))
        )
        before |= learns
    in_tower, in_text = (1 + 2 * backward[part] for part in ("vision_model", "language_model"))
    own = (p for name, p in model.vision_model.named_parameters() if "lora_" not in name)
    # Pixels get no gradient.
    convolution = 2 * vision.num_channels * vision.patch_size**2 * vision.hidden_size
    convolution *= 1 + any(p.requires_grad for p in own)
    side = vision.least_side
    per_patch = FAMILIES[config.family].positions(config, side, side) / (side // vision.patch_size) ** 2
    mixers = [text.mixer(layer) for layer in range(text.num_hidden_layers)]
    attending = sum(kind not in ("conv", "delta") for kind in mixers)
    # A delta rule (`models.gated_delta.delta_rule`): with the keys and what the positions of its chunk add,
    # and with the matrix before them.
    key, value = text.delta_key_dim, text.delta_value_dim
    rule = 2 * text.delta_value_heads * (CHUNK * (2 * key + value) + 3 * key * value)
    head, head_learns = model.language_model.lm_head, model.language_model.lm_head.weight.requires_grad
    return Amounts(
        tiles=0,
        patches=convolution + products["vision_model"] + per_patch * products["projector"],
        patch_pairs=vision.num_hidden_layers * 4 * vision.hidden_size * in_tower,
        positions=products["language_model"] + mixers.count("delta") * rule * in_text,
        pairs=attending * 4 * text.num_attention_heads * text.head_dim * in_text,
        labelled=2 * head.in_features * head.out_features * (1 + head_learns + backward["language_model"]),
    )


def training_flops(costs: Amounts, amounts: Amounts) -> float:
    """FLOPs of forward and backward of so much, by what each `costs`."""
    return sum(cost * amount for cost, amount in zip(costs, amounts, strict=True))


# --------------------------------------------------------------------------------------------- devices
# What data sheets say of each GPU: FLOP/s of dense bfloat16 products with float32 sums. TF32, in which
# training multiplies float32, has half of that.
PEAKS = {
    "A10": 125e12,
    "A100": 312e12,
    "RTX A6000": 154.8e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H100": 989.4e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "B200": 2250e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165.2e12,
    "RTX 5090": 209.5e12,
}


def known_peak(name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s of a GPU by what it calls itself; None for one that is not in the table, or another dtype."""
    share = {torch.bfloat16: 1.0, torch.float32: 0.5}.get(dtype)
    words = [known for known in PEAKS if re.search(rf"\b{known}\b", name, re.IGNORECASE)]
    # "NVIDIA H100 PCIe" is both H100 and H100 PCIe: the longer name says more.
    return None if share is None or not words else share * PEAKS[max(words, key=len)]


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that a product of two large matrices reaches here. They grow as long as a product is quick: of
    types that it has no instructions for, a CPU takes seconds for a large one."""
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda device: None
    own = torch.Generator(device).manual_seed(0)  # the run's random numbers are left alone
    best, seconds, side = 0.0, 0.0, 128
    while seconds < 0.02 and side < 8192:
        side *= 2
        # Not constants: their products are faster on a GPU than any that training computes.
        a = torch.randn(side, side, generator=own, device=device, dtype=dtype)
        for _ in range(5):  # a GPU's first one loads its library
            wait(device)
            start = time.perf_counter()
            a @ a
            wait(device)
            seconds = time.perf_counter() - start
            best = max(best, 2 * side**3 / seconds)
    return best


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """FLOP/s of a device of this machine, and how that is known."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if (peak := known_peak(name, dtype)) is not None:
            return peak, name
    return measured_peak(device, dtype), "measured with a product of large matrices"
