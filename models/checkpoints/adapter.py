"""A peft LoRA adapter (arXiv:2106.09685), as train.py writes it beside a run, added to its model's weights.

add_to_weights(model, adapter_updates(folder, model))       # W + (alpha / r) · B A for each layer
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.checkpoints.errors import CheckpointError, some
from models.checkpoints.idefics3 import our_name
from models.checkpoints.safetensors_io import read_header, read_tensor
from models.checkpoints.strict_json import read_json

if TYPE_CHECKING:
    from models.vision_language_model import VisionLanguageModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# What changes the formula or the layers; plain LoRA has none of it.
_PLAIN = {
    "bias": "none",
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_dora": False,
    "lora_bias": False,
}


def adapter_updates(folder: str | Path, model: VisionLanguageModel) -> dict[str, Tensor]:
    """What an adapter adds to each weight of a model, by the name of the weight.

    Raises:
        CheckpointError: files are missing, it is no plain LoRA, or its layers are not the model's.
    """
    folder = Path(folder).expanduser()
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}: expected the folder of a peft adapter")
    scale_of = _scale(folder)
    factors: dict[str, dict[str, Tensor]] = {}
    for name, entry in read_header(folder / WEIGHTS).items():
        match = _FACTOR.fullmatch(name)
        if match is None or len(entry.shape) != 2:
            raise CheckpointError(
                f"{folder / WEIGHTS}: expected matrices lora_A and lora_B of layers, got {name}"
            )
        tensor = read_tensor(entry, 0, 1, entry.shape, torch.float32, torch.device("cpu"))
        factors.setdefault(match[1], {})[match[2]] = tensor
    weights = dict(model.named_parameters())
    updates = {}
    for layer, pair in factors.items():
        try:
            name = our_name(f"{layer}.weight")
        except KeyError:
            name = layer
        if name not in weights or pair.keys() != {"A", "B"}:
            raise CheckpointError(
                f"{folder}: expected an A and a B for layers of this model, got {layer} with "
                f"{some(pair.keys())}"
            )
        shape, expected = (pair["B"].shape[0], pair["A"].shape[1]), tuple(weights[name].shape)
        if shape != expected or pair["A"].shape[0] != pair["B"].shape[1]:
            raise CheckpointError(
                f"{folder}: {layer} is adapted with B {list(pair['B'].shape)} and A {list(pair['A'].shape)}, "
                f"the model's weight is {list(expected)}: the adapter belongs to another model"
            )
        updates[name] = scale_of(pair["A"].shape[0]) * (pair["B"] @ pair["A"])
    if not updates:
        raise CheckpointError(f"{folder / WEIGHTS}: expected an adapter, it is empty")
    return updates


def _scale(folder: Path):
    """rank -> what B A is multiplied by."""
    settings = read_json(folder / CONFIG)
    if settings.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{folder / CONFIG}: expected an adapter of type LORA, got {settings.get('peft_type')!r}"
        )
    for name, plain in _PLAIN.items():
        value = settings.get(name)
        if value and value != plain:
            raise CheckpointError(
                f"{folder / CONFIG}: expected plain LoRA with {name} {plain!r}, got {value!r}: merge it with "
                f"peft's own merge_and_unload"
            )
    alpha = settings.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise CheckpointError(f"{folder / CONFIG}: expected a number as lora_alpha, got {alpha!r}")
    rank_stabilised = bool(settings.get("use_rslora"))
    return lambda rank: alpha / (math.sqrt(rank) if rank_stabilised else rank)
