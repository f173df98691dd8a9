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

from families import keys
from families.qwen_gguf import GGUF
from families.qwen_images import image_rule, open_images
from families.saving import write_config, write_text
from families.sections import text_config, vlm_config
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, part_of_qkv, rename
from models.config import VLMConfig
from models.language_model import LanguageModel
from models.packed_vision_transformer import (
    PackedVisionConfig,
    PackedVisionTransformer,
    PatchMergers,
    patches_of,
)

__all__ = ["GGUF", "image_rule", "open_images"]

NAME = "qwen_vl"
TITLE = "transformers Qwen2.5-VL / Qwen3-VL"
BOX_FORMS = {"qwen2_5_vl": "qwen2.5-vl", "qwen3_vl": "qwen3-vl"}
IGNORABLE = re.compile(r".*rotary_pos_emb\.inv_freq|.*rotary_emb\.inv_freq|lm_head\.weight")
KINDS = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}  # model_type -> a text model's with the same blocks
MODEL_TYPES = (*KINDS,)
MLX = {
    "language_model.model.": "model.language_model.",
    "language_model.": "",
    "vision_tower.": "model.visual.",
    "": "",
}
_CLASS = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
PROCESSORS = {kind: (f"{name}Processor", "Qwen2VLImageProcessor") for kind, name in _CLASS.items()}
# Defaults of transformers' configs, where they are not those of a text model of that type.
_TEXT: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    },
    "qwen3_vl": {"max_position_embeddings": 128_000},
}  # fmt: skip
_THETA = {"qwen2_5_vl": 1e6, "qwen3_vl": 5e5}
_TOWER = {
    "num_attention_heads": keys.Key("num_heads", 16),
    "num_channels": keys.Key("in_channels", 3),
    "merge_size": keys.Key("spatial_merge_size", 2),
    "temporal_patch_size": keys.Key("temporal_patch_size", 2),
}
_QWEN2_5 = _TOWER | keys.same(
    hidden_size=3584, intermediate_size=3420, patch_size=14, tokens_per_second=4
) | {
    "num_hidden_layers": keys.Key("depth", 32),
    "whole_layers": keys.Key("fullatt_block_indexes", (7, 15, 23, 31)),
}  # fmt: skip
_QWEN3_5 = _TOWER | keys.same(hidden_size=1152, intermediate_size=4304, patch_size=16) | {
    "num_hidden_layers": keys.Key("depth", 27),
    "table_side": keys.squared("num_position_embeddings", 2304),
}  # fmt: skip
_QWEN3 = _QWEN3_5 | {"taps": keys.Key("deepstack_visual_indexes", (8, 16, 24))}
_TOWERS = {"qwen2_5_vl": _QWEN2_5, "qwen3_vl": _QWEN3, "qwen3_5": _QWEN3_5}
TURNS = {"rope_theta": keys.Key("rope_theta", 10_000.0)}  # in the tower's rope_parameters
_MARKERS = {"video_token_id": 151_656, "vision_start_token_id": 151_652, "vision_end_token_id": 151_653}


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing."""
    kind = config["model_type"]
    text = keys.section(config, "text_config") or dict(config)  # older checkpoints have its keys at the top
    rope = keys.section(text, "rope_scaling") or keys.section(text, "rope_parameters")
    plain, sections = multimodal_rope(rope, [24, 20, 20] if kind == "qwen3_vl" else None)
    plain.setdefault("rope_theta", text.get("rope_theta") or _THETA[kind])
    decoder = text_config(
        text | {"model_type": KINDS[kind], "rope_scaling": None, "rope_parameters": plain},
        _TEXT[kind],
        rope_sections=sections,
        rope_interleaved=kind == "qwen3_vl",
    )
    tied = config.get("tie_word_embeddings") or (kind == "qwen2_5_vl" and text.get("tie_word_embeddings"))
    parts = {"vision": vision_config(keys.section(config, "vision_config"), kind), "scale_factor": 1}
    config = {**config, "tie_word_embeddings": tied}
    return vlm_config(config, generation, 151_655, False, decoder, _MARKERS, family=NAME, **parts)


def multimodal_rope(rope: dict, sections: list[int] | None) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Rotary parameters without those of places, and the numbers of frequencies for time, row and column."""
    found = tuple(rope.get("mrope_section") or sections or ())
    plain = {name: value for name, value in rope.items() if not name.startswith("mrope")}
    if plain.get("type", plain.get("rope_type")) == "mrope":
        plain |= {"rope_type": "default", "type": "default"}
    return plain, found


def vision_config(stored: Mapping, kind: str) -> PackedVisionConfig:
    keys.expect(stored, {"hidden_act": _act(kind)})
    values = keys.read(stored, _TOWERS[kind]) | keys.read(keys.section(stored, "rope_parameters"), TURNS)
    if kind == "qwen2_5_vl":
        values |= {"norm": "rms", "gated_mlp": True, "patch_bias": False, "table_side": 0}
        values["window"] = keys.present(stored).get("window_size", 112) // values["patch_size"]
    return PackedVisionConfig(**values)


def _act(kind: str) -> str:
    return "silu" if kind == "qwen2_5_vl" else "gelu_pytorch_tanh"


def _kind(config: VLMConfig) -> str:
    return "qwen3_vl" if config.text.rope_interleaved else "qwen2_5_vl"


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json, in which nothing is left to a reader's defaults."""
    kind = _kind(config)
    rope: dict[str, Any] = {"mrope_section": list(config.text.rope_sections)}
    if kind == "qwen3_vl":
        rope["mrope_interleaved"] = True
    text = write_text(config, dtype)
    rope |= text["rope_parameters"]
    text |= {
        "model_type": f"{kind}_text",
        "rope_parameters": rope,
        "rope_scaling": rope | {"type": "default"},
    }
    name, vision = f"{_CLASS[kind]}ForConditionalGeneration", write_vision(config, kind)
    return write_config(config, dtype, name, kind, text, vision, _MARKERS)


def write_vision(config: VLMConfig, kind: str) -> dict[str, Any]:
    vision = config.vision
    return keys.write(vision, _TOWERS[kind]) | {
        **({"window_size": vision.window * vision.patch_size} if kind == "qwen2_5_vl" else {}),
        "model_type": f"{kind}_vision",
        "out_hidden_size": config.text.hidden_size,
        "hidden_act": _act(kind),
        "rope_parameters": {"rope_type": "axial", **keys.write(vision, TURNS)},
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
# What stands in names of the tower; of mergers, those of Qwen2.5-VL and those of Qwen3-VL.
_IN_TOWER = {".self_attn.out_proj.": ".attn.proj.", ".self_attn.": ".attn.", ".mlp.fc": ".mlp.linear_fc"}
_IN_MERGERS = {".norm.": ".ln_q.", ".fc1.": ".mlp.0.", ".fc2.": ".mlp.2."}, {".fc": ".linear_fc"}


def tensor_map(stored_names: Collection[str], config: VLMConfig | None = None) -> StoredTensorOf:
    """The place of each of our tensors."""
    old = any(name.startswith("visual.") for name in stored_names)
    third = not any("merger.ln_q" in name for name in stored_names)
    third = third and (config is None or _kind(config) == "qwen3_vl")
    inside = {"vision_model": _IN_TOWER, "projector": _IN_MERGERS[third]}

    def stored_tensor(name: str) -> StoredTensor:
        theirs = rename(name, _NAMES, inside.get(name.partition(".")[0], {}))
        if old:
            theirs = re.sub(r"^model\.visual\.", "visual.", theirs)
            theirs = re.sub(r"^model\.language_model\.", "model.", theirs)
        return part_of_qkv(theirs) or StoredTensor(theirs)

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


def their_inputs(ids: Tensor, pixels: Tensor, config: VLMConfig) -> dict[str, Tensor]:
    """transformers' arguments beside ids, of one image of pixels (1, 3, H, W) from -1 to 1."""
    vision = config.vision
    patches = patches_of(pixels[0], vision).unflatten(1, (3, 1, -1))
    return {
        "pixel_values": patches.expand(-1, -1, vision.temporal_patch_size, -1).flatten(
            1
        ),  # a still, repeated
        "image_grid_thw": torch.tensor([[1, *(side // vision.patch_size for side in pixels.shape[2:])]]),
        "mm_token_type_ids": torch.eq(ids, config.image_token_id).int(),
    }
