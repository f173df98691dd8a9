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
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from data.chat import Message, chat_template
from data.errors import ImageError
from data.tiles import CLIP_PIXELS, Cell, Parts, Visual, pixel_rule, pixels_of, reading_settings
from data.tokenizer import AnyTokenizer, image_settings, open_with
from families.text import checked, section, text_config, vlm_config
from models.checkpoints.hub import CheckpointError
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, part_of_qkv, rename
from models.config import PackedVisionConfig, VLMConfig
from models.language_model import LanguageModel
from models.packed_vision_transformer import PackedVisionTransformer, PatchMergers

NAME = "qwen_vl"
TITLE = "transformers Qwen2.5-VL / Qwen3-VL"
IGNORABLE = re.compile(r".*rotary_pos_emb\.inv_freq|.*rotary_emb\.inv_freq|lm_head\.weight")
KINDS = {
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
}  # model_type -> that of a text model with the same blocks
_TOWER = {
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "patch_size": 14,
        "num_heads": 16,
    },
    "qwen3_vl": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "patch_size": 16,
        "num_heads": 16,
    },
}


def recognises(config: Mapping) -> bool:
    return config.get("model_type") in KINDS


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing."""
    kind = config["model_type"]
    text = section(config, "text_config") or dict(config)  # older checkpoints have its keys at the top
    rope = section(text, "rope_scaling") or section(text, "rope_parameters")
    sections = rope.get("mrope_section", [24, 20, 20] if kind == "qwen3_vl" else None)
    if not isinstance(sections, list) or not all(isinstance(size, int) for size in sections):
        raise CheckpointError(f"config.json: mrope_section: expected three whole numbers, got {sections!r}")
    plain = {name: value for name, value in rope.items() if not name.startswith("mrope")}
    if plain.get("type", plain.get("rope_type")) == "mrope":
        plain |= {"rope_type": "default", "type": "default"}
    defaults = {"rope_theta": 1e6 if kind == "qwen2_5_vl" else 5e5}
    decoder = text_config(
        text | {"model_type": KINDS[kind], "rope_scaling": None, "rope_parameters": plain or None},
        defaults,
        rope_sections=tuple(sections),
        rope_interleaved=kind == "qwen3_vl",
    )
    parts = {"family": NAME, "vision": _vision(section(config, "vision_config"), kind), "scale_factor": 1}
    return vlm_config(config, generation, 151_655, False, decoder, **parts)


def _vision(stored: Mapping, kind: str) -> PackedVisionConfig:
    known = _TOWER[kind] | {name: value for name, value in stored.items() if value is not None}
    shared = {
        "hidden_size": known["hidden_size"],
        "intermediate_size": known["intermediate_size"],
        "num_hidden_layers": known["depth"],
        "num_attention_heads": known["num_heads"],
        "num_channels": known.get("in_channels", 3),
        "patch_size": known["patch_size"],
        "merge_size": known.get("spatial_merge_size", 2),
        "temporal_patch_size": known.get("temporal_patch_size", 2),
        "rope_theta": section(known, "rope_parameters").get("rope_theta", 10_000.0),
    }
    if kind == "qwen3_vl":
        table = known.get("num_position_embeddings", 2304)
        taps = tuple(known.get("deepstack_visual_indexes", (8, 16, 24)))
        if not all(type(layer) is int and 0 <= layer < known["depth"] for layer in taps):
            raise CheckpointError(
                f"config.json: deepstack_visual_indexes: expected layers of {known['depth']}, "
                f"got {list(taps)}"
            )
        return checked(PackedVisionConfig, **shared, table_side=int(table**0.5), taps=taps)
    return checked(
        PackedVisionConfig,
        **shared,
        norm="rms",
        gated_mlp=True,
        patch_bias=False,
        table_side=0,
        window=known.get("window_size", 112) // known["patch_size"],
        whole_layers=tuple(known.get("fullatt_block_indexes", (7, 15, 23, 31))),
    )


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


def tensor_map(stored_names: Collection[str]) -> StoredTensorOf:
    """Where each of our tensors lies."""
    old = bool(stored_names) and not any(name.startswith("model.visual.") for name in stored_names)
    plain = any("merger.ln_q" in name for name in stored_names)

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
    vision = config.vision
    assert isinstance(vision, PackedVisionConfig)
    side = vision.least_side
    if height % side or width % side or not height or not width:
        raise ValueError(
            f"an image: expected sides that are multiples of {side} pixels, got {width} x {height}"
        )
    return height // side, width // side


def positions(config: VLMConfig, height: int, width: int) -> int:
    """Positions that an image of so many pixels takes."""
    return math.prod(grid(config, height, width))


def places(config: VLMConfig, ids: list[int], sizes: Iterator[tuple[int, int]]) -> tuple[Tensor, int]:
    """Rotary places (3, T) of a prompt's tokens in time, row and column, and what is added to the slot of a
    token after it. `sizes`: height and width in pixels of its images, in order.

    Text counts on from the largest place before it. An image's time stands still; its rows and columns count
    from there.
    """
    image_token_id, parts, at, place = config.image_token_id, [], 0, 0
    while at < len(ids):
        if ids[at] == image_token_id:
            rows, columns = grid(config, *next(sizes))
            row = torch.arange(rows).repeat_interleave(columns)
            column = torch.arange(columns).repeat(rows)
            parts.append(torch.stack((torch.zeros_like(row), row, column)) + place)
            at, place = at + rows * columns, place + max(rows, columns)
        else:
            end = ids.index(image_token_id, at) if image_token_id in ids[at:] else len(ids)
            parts.append((torch.arange(end - at) + place).expand(3, -1))
            at, place = end, place + end - at
    together = torch.cat(parts, dim=1)
    return together, place - len(ids)


# -------------------------------------------------------------------------------------------------- images
IMAGE = "<|image_pad|>"
# Qwen2VLImageProcessor's own, where a file does not say.
_DEFAULTS: dict[str, Any] = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    **CLIP_PIXELS,
    "patch_size": 14,
    "merge_size": 2,
}
_MOST_OBLONG = 200  # times as long as wide, transformers refuses more


class QwenImages:
    """How a transformers Qwen2VLImageProcessor (its PIL backend) resizes an image, whole, within a budget of
    pixels. `settings` are what preprocessor_config.json has."""

    image_token = IMAGE
    string_content = False
    add_special_tokens = True
    flat = own_sizes = True

    def __init__(self, settings: Mapping[str, Any]):
        self.settings = dict(settings)
        known: dict[str, Any] = _DEFAULTS | self.settings
        size = {**_DEFAULTS["size"], **(known["size"] or {})}
        with reading_settings(known):
            self.patch, self.factor = known["patch_size"], known["patch_size"] * known["merge_size"]
            self.least = known.get("min_pixels") or size["shortest_edge"]
            self.most = known.get("max_pixels") or size["longest_edge"]
            self._resample, self._values = pixel_rule(known)
        self.longest_side = math.isqrt(self.most * _MOST_OBLONG)

    def plan(self, width: int, height: int) -> Visual:
        rows, columns = self._grid(width, height)
        parts = Parts.planned(1, rows * self.factor, columns * self.factor)
        return Visual(parts, rows * columns, (rows, columns), (width, height))

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of positions: multiples of `factor` next to the image's sides, or those that keep
        its shape within the budget."""
        if max(width, height) > _MOST_OBLONG * min(width, height):
            raise ImageError(
                f"expected an image at most {_MOST_OBLONG} times as long as wide, "
                f"got {width} x {height} pixels"
            )
        factor, sides = self.factor, (height, width)
        rows, columns = (round(side / factor) for side in sides)
        if rows * columns * factor**2 > self.most:
            by = math.sqrt(height * width / self.most)
            rows, columns = (max(1, math.floor(side / by / factor)) for side in sides)
        elif rows * columns * factor**2 < self.least:
            by = math.sqrt(self.least / (height * width))
            rows, columns = (math.ceil(side * by / factor) for side in sides)
        return rows, columns

    def cut(self, image: Image.Image) -> Visual:
        """One part: the whole image in its own shape."""
        rows, columns = self._grid(*image.size)
        resized = image.resize((columns * self.factor, rows * self.factor), self._resample)
        parts = Parts.of(pixels_of(resized)[None], self._values)
        return Visual(parts, rows * columns, (rows, columns), image.size)

    def prompt(self, visual: Visual, index: int, count: int) -> str:
        return IMAGE * visual.positions  # what stands around it is in the chat template

    def whole(self, visual: Visual) -> None:
        return None

    def cells(self, visual: Visual) -> list[Cell]:
        return [(0, 0, *visual.grid)]

    def normalise_messages(self, messages: list[Message], label: str) -> list[Message]:
        """Images stay where the conversation has them."""
        return messages


def open_images(folder: Path, config: Mapping) -> tuple[QwenImages, AnyTokenizer, str | None]:
    """The image rule, tokenizer and chat template of a checkpoint folder."""
    tokenizer = open_with(folder, (IMAGE,))
    return QwenImages(image_settings(folder)), tokenizer, chat_template(folder)
