"""Qwen2.5-VL and Qwen3-VL as transformers has them (arXiv:2502.13923, arXiv:2511.21631): whole images of
their own grids, rotary places in time, rows and columns, and, in Qwen3-VL, features for the first text
layers (DeepStack).

Config keys and tensor names are those of transformers 5.23 and of the older checkpoints on the Hub, which
lack `model.visual` and `model.language_model`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from families.qwen_images import open_images
from families.saving import write_config
from families.text import checked, expect, first_id, number, numbers, section, text_config, vlm_config
from models.checkpoints.files import CheckpointError
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, part_of_qkv, rename
from models.config import PackedVisionConfig, VLMConfig
from models.language_model import LanguageModel
from models.packed_vision_transformer import PackedVisionTransformer, PatchMergers

__all__ = ["open_images"]

NAME = "qwen_vl"
TITLE = "transformers Qwen2.5-VL / Qwen3-VL"
BOX_FORMS = {"qwen2_5_vl": "qwen2.5-vl", "qwen3_vl": "qwen3-vl"}
IGNORABLE = re.compile(r".*rotary_pos_emb\.inv_freq|.*rotary_emb\.inv_freq|lm_head\.weight")
KINDS = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}  # model_type -> a text model's with the same blocks
_CLASS = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
# Defaults of transformers' configs, where they are not those of a text model of that type.
_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    },
    "qwen3_vl": {"max_position_embeddings": 128_000},
}  # fmt: skip
_THETA = {"qwen2_5_vl": 1e6, "qwen3_vl": 5e5}
_TOWER: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14, "hidden_act": "silu",
        "window_size": 112, "fullatt_block_indexes": (7, 15, 23, 31), "tokens_per_second": 4,
    },
    "qwen3_vl": {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
    },
}  # fmt: skip
_MARKERS = {"video_token_id": 151_656, "vision_start_token_id": 151_652, "vision_end_token_id": 151_653}


def recognises(config: Mapping) -> bool:
    return config.get("model_type") in KINDS


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing."""
    kind = config["model_type"]
    text = section(config, "text_config") or dict(config)  # older checkpoints have its keys at the top
    rope = section(text, "rope_scaling") or section(text, "rope_parameters")
    plain, sections = multimodal_rope(rope, [24, 20, 20] if kind == "qwen3_vl" else None)
    plain.setdefault("rope_theta", text.get("rope_theta") or _THETA[kind])
    decoder = text_config(
        text | {"model_type": KINDS[kind], "rope_scaling": None, "rope_parameters": plain},
        _TEXT[kind],
        rope_sections=sections,
        rope_interleaved=kind == "qwen3_vl",
    )
    tied = config.get("tie_word_embeddings") or (kind == "qwen2_5_vl" and text.get("tie_word_embeddings"))
    markers = (first_id(config.get(one), id, vocab_size=decoder.vocab_size) for one, id in _MARKERS.items())
    vision = vision_config(section(config, "vision_config"), kind)
    parts = {"family": NAME, "vision": vision, "scale_factor": 1, "marker_token_ids": tuple(markers)}
    config = {**config, "tie_word_embeddings": tied}
    return vlm_config(config, generation, 151_655, False, decoder, **parts)


def multimodal_rope(rope: dict, sections: list[int] | None) -> tuple[dict[str, Any], tuple[int, ...]]:
    """What is not about places in time, row and column, and how many frequencies each of those has."""
    found = numbers({"mrope_section": sections} | rope, "mrope_section")
    if len(found) != 3:
        raise CheckpointError(f"config.json: mrope_section: expected three whole numbers, got {found}")
    plain = {name: value for name, value in rope.items() if not name.startswith("mrope")}
    if plain.get("type", plain.get("rope_type")) == "mrope":
        plain |= {"rope_type": "default", "type": "default"}
    return plain, found


def vision_config(stored: Mapping, kind: str) -> PackedVisionConfig:
    expect(stored, {"hidden_act": _TOWER[kind]["hidden_act"]})
    known = _TOWER[kind] | {name: value for name, value in stored.items() if value is not None}
    depth, patch = number(known, "depth"), number(known, "patch_size")
    shared = {
        "hidden_size": known["hidden_size"],
        "intermediate_size": known["intermediate_size"],
        "num_hidden_layers": depth,
        "num_attention_heads": known.get("num_heads", 16),
        "num_channels": known.get("in_channels", 3),
        "patch_size": patch,
        "merge_size": known.get("spatial_merge_size", 2),
        "temporal_patch_size": known.get("temporal_patch_size", 2),
        "rope_theta": section(known, "rope_parameters").get("rope_theta", 10_000.0),
    }
    if kind == "qwen3_vl":
        taps = _layers(known, "deepstack_visual_indexes")
        table = math.isqrt(number(known, "num_position_embeddings", 1, 4096**2))
        return checked(PackedVisionConfig, **shared, table_side=table, taps=taps)
    return checked(
        PackedVisionConfig,
        **shared,
        norm="rms",
        gated_mlp=True,
        patch_bias=False,
        table_side=0,
        window=number(known, "window_size", patch, patch * 4096) // patch,
        whole_layers=_layers(known, "fullatt_block_indexes"),
        tokens_per_second=number(known, "tokens_per_second"),
    )


def _layers(known: Mapping, name: str) -> tuple[int, ...]:
    """Layers of the tower that a key of its section lists."""
    layers, depth = numbers(known, name), known["depth"]
    if not all(0 <= layer < depth for layer in layers):
        raise CheckpointError(f"config.json: {name}: expected layers of {depth}, got {str(layers)[:80]}")
    return layers


def _kind(config: VLMConfig) -> str:
    return "qwen3_vl" if config.text.rope_interleaved else "qwen2_5_vl"


def processor_classes(config: VLMConfig) -> tuple[str, str]:
    return f"{_CLASS[_kind(config)]}Processor", "Qwen2VLImageProcessor"


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json, in which nothing is left to a reader's defaults."""
    kind = _kind(config)
    rope: dict[str, Any] = {"mrope_section": list(config.text.rope_sections)}
    if kind == "qwen3_vl":
        rope["mrope_interleaved"] = True
    markers = {name: id for name, id in zip(_MARKERS, config.marker_token_ids) if id is not None}
    name = f"{_CLASS[kind]}ForConditionalGeneration"
    written = write_config(config, dtype, name, kind, write_vision(config), **markers)
    text = written["text_config"]
    rope |= text["rope_parameters"]
    text |= {
        "model_type": f"{kind}_text",
        "rope_parameters": rope,
        "rope_scaling": rope | {"type": "default"},
    }
    return written


def write_vision(config: VLMConfig) -> dict[str, Any]:
    kind, vision = _kind(config), config.vision
    if kind == "qwen3_vl":
        tower = {"num_position_embeddings": vision.table_side**2, "deepstack_visual_indexes": [*vision.taps]}
    else:
        tower = {"window_size": vision.window * vision.patch_size}
        tower |= {"fullatt_block_indexes": [*vision.whole_layers]}
        tower |= {"tokens_per_second": vision.tokens_per_second}
    return tower | {
        "model_type": f"{kind}_vision",
        "depth": vision.num_hidden_layers,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.intermediate_size,
        "num_heads": vision.num_attention_heads,
        "in_channels": vision.num_channels,
        "patch_size": vision.patch_size,
        "spatial_merge_size": vision.merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "out_hidden_size": config.text.hidden_size,
        "hidden_act": _TOWER[kind]["hidden_act"],
        "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
    }


_NAMES = {
    "vision_model.patch_embedding.": "model.visual.patch_embed.proj.",
    "vision_model.position_embedding.": "model.visual.pos_embed.",
    "vision_model.layers.": "model.visual.blocks.",
    "projector.deep.": "model.visual.deepstack_merger_list.",
    "projector.merger.": "model.visual.merger.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.language_model.",
}
_WITHIN = {".self_attn.out_proj.": ".attn.proj.", ".mlp.fc": ".mlp.linear_fc", ".fc": ".linear_fc"}
_MERGER_2_5 = {".norm.": ".ln_q.", ".fc1.": ".mlp.0.", ".fc2.": ".mlp.2."}


def tensor_map(stored_names: Collection[str], config: VLMConfig | None = None) -> StoredTensorOf:
    """Where each of our tensors lies."""
    old = any(name.startswith("visual.") for name in stored_names)
    plain = any("merger.ln_q" in name for name in stored_names)
    plain = plain or (config is not None and _kind(config) == "qwen2_5_vl")

    def stored_tensor(name: str) -> StoredTensor:
        theirs, part, parts = rename(name, _NAMES), 0, 1
        if name.startswith(("vision_model.", "projector.")):
            if found := part_of_qkv(theirs.replace(".self_attn.", ".attn.")):
                theirs, part, parts = found.name, found.part, found.parts
            for ours, other in (_MERGER_2_5 if plain and name.startswith("projector.") else _WITHIN).items():
                theirs = theirs.replace(ours, other, 1) if ".linear_fc" not in theirs else theirs
        if old:
            theirs = re.sub(r"^model\.visual\.", "visual.", theirs)
            theirs = re.sub(r"^model\.language_model\.", "model.", theirs)
        return StoredTensor(theirs, part, parts)

    return stored_tensor


def build(config: VLMConfig) -> tuple[nn.Module, nn.Module, LanguageModel]:
    """Tower, projector and text."""
    vision = config.vision
    assert isinstance(vision, PackedVisionConfig)
    text = LanguageModel(config.text, config.tie_word_embeddings)
    return PackedVisionTransformer(vision), PatchMergers(vision, config.text.hidden_size), text


def grid(config: VLMConfig, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of the positions that an image of so many pixels takes."""
    side = config.vision.least_side
    if height % side or width % side or not height or not width:
        raise ValueError(
            f"an image: expected sides that are multiples of {side} pixels, got {width} x {height}"
        )
    return height // side, width // side


def positions(config: VLMConfig, height: int, width: int) -> int:
    """Positions that an image of so many pixels takes."""
    return math.prod(grid(config, height, width))


def places(
    config: VLMConfig, ids: list[int], shown: Iterator[tuple[int, int, int | None]]
) -> tuple[Tensor, int]:
    """Rotary places (3, T) of a prompt's tokens in time, row and column, and what is added to the slot of a
    token after it. `shown`: height and width in pixels of the parts of its images and videos, in order, and
    how long after the first part of its video it stands, unless it is that or an image.

    Text counts on from the largest row or column before it. An image's time stands still; its rows and
    columns count from there, and so do those of all parts of a video.
    """
    image_token_id, parts, at, place, begin = config.image_token_id, [], 0, 0, 0
    while at < len(ids):
        if ids[at] == image_token_id:
            height, width, time = next(shown)
            rows, columns = grid(config, height, width)
            if (count := ids[at : at + rows * columns].count(image_token_id)) < rows * columns:
                raise ValueError(
                    f"an image of {rows * columns} positions has {count} placeholders side by side"
                )
            row = torch.arange(rows).repeat_interleave(columns)
            column = torch.arange(columns).repeat(rows)
            if time is None:
                begin, place = place, place + max(rows, columns)
            parts.append(torch.stack((torch.full_like(row, time or 0), row, column)) + begin)
            at += rows * columns
        else:
            end = ids.index(image_token_id, at) if image_token_id in ids[at:] else len(ids)
            parts.append((torch.arange(end - at) + place).expand(3, -1))
            at, place = end, place + end - at
    together = torch.cat(parts, dim=1)
    return together, int(together.max()) + 1 - len(ids)
