"""LFM2-VL and LFM2.5-VL as transformers has them (arXiv:2511.23404): short convolutions between layers of
attention, a SigLIP2 tower for tiles and for a thumbnail of the image's own shape.

Config keys and tensor names are those of transformers 5.23; older checkpoints have `vision_model` in the
names of their tower.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image
from torch import nn

from data import tiles
from data.chat import chat_template
from data.errors import ProcessorError
from data.tokenizer import AnyTokenizer, image_settings, open_with
from families import saving
from families import text as shared
from families.text import checked, expect, section
from models.checkpoints.hub import CheckpointError
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, rename
from models.config import PackedVisionConfig, TextConfig, VLMConfig
from models.language_model import LanguageModel
from models.packed_vision_transformer import PackedVisionTransformer, PatchMergers

NAME = "lfm2_vl"
TITLE = "transformers LFM2-VL / LFM2.5-VL"
BOX_FORMS: dict[str, str] = {}
IGNORABLE = re.compile(r"(model\.)?vision_tower\.(vision_model\.)?head\..*|lm_head\.weight")  # its pooling
# Defaults of transformers' Lfm2Config and Siglip2VisionConfig.
_TEXT: dict[str, Any] = {
    "vocab_size": 65_536, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5,
    "rope_theta": 1e6, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}  # fmt: skip
_VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "patch_size": 16,
}  # fmt: skip
_PLAIN = {"projector_hidden_act": "gelu"}  # whose other values would need code that is not here
_PLAIN_VISION = {"hidden_act": "gelu_pytorch_tanh"}


def recognises(config: Mapping) -> bool:
    return config.get("model_type") == NAME


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing."""
    text, vision = section(config, "text_config"), section(config, "vision_config")
    expect(config, _PLAIN)
    expect(vision, _PLAIN_VISION)
    decoder = _read_text(text)
    known = _VISION | {name: value for name, value in vision.items() if value is not None}
    tower = checked(
        PackedVisionConfig,
        **{name: known[name] for name in _VISION},
        norm_eps=known.get("layer_norm_eps", 1e-6),
        merge_size=config.get("downsample_factor", 2),
        temporal_patch_size=1,
        channels_last=True,
        table_side=math.isqrt(known.get("num_patches", 256)),
        table_antialias=True,
        rotary=False,
        last_norm=True,
        merger_norm="block" if config.get("projector_use_layernorm", True) else "none",
        merger_norm_eps=1e-5,
        merger_width=config.get("projector_hidden_size", 2560),
        merger_bias=config.get("projector_bias", True),
    )
    parts = {"family": NAME, "vision": tower, "scale_factor": 1}
    return shared.vlm_config(config, generation, 396, config.get("tie_embedding", True), decoder, **parts)


def _read_text(stored: Mapping) -> TextConfig:
    values: dict[str, Any] = _TEXT | {name: value for name, value in stored.items() if value is not None}
    expect(values, {"model_type": "lfm2"})
    inner, layers = values.get("block_ff_dim", values["intermediate_size"]), values["num_hidden_layers"]
    if values["block_auto_adjust_ff_dim"]:
        inner = int(values["block_ffn_dim_multiplier"] * int(2 * inner / 3))
        inner = values["block_multiple_of"] * math.ceil(inner / values["block_multiple_of"])
    full = values.get("full_attn_idxs", range(layers))
    kinds = values.get("layer_types") or ["full_attention" if i in full else "conv" for i in range(layers)]
    if strange := [kind for kind in kinds if kind not in ("conv", "full_attention")]:
        raise CheckpointError(
            f"config.json: layer_types: expected full_attention or conv, got {strange[0]!r}"
        )
    own = {"model_type": "qwen3", "attention_bias": False, "intermediate_size": inner, "layer_types": None}
    own |= {"head_dim": values["hidden_size"] // values["num_attention_heads"]}
    return shared.text_config(
        values | own,
        {},
        rms_norm_eps=values["norm_eps"],
        layer_types=tuple(kind.removeprefix("full_") for kind in kinds),
        conv_kernel=values.get("conv_L_cache", 3),
        conv_bias=values.get("conv_bias", False),
    )


_NAMES = {
    "vision_model.patch_embedding.": "model.vision_tower.embeddings.patch_embedding.",
    "vision_model.position_embedding.": "model.vision_tower.embeddings.position_embedding.",
    "vision_model.layers.": "model.vision_tower.encoder.layers.",
    "vision_model.norm.": "model.vision_tower.post_layernorm.",
    "projector.merger.norm.": "model.multi_modal_projector.layer_norm.",
    "projector.merger.fc": "model.multi_modal_projector.linear_",
    "language_model.lm_head.": "lm_head.",
    "language_model.norm.": "model.language_model.embedding_norm.",
    "language_model.": "model.language_model.",
}
_IN_TOWER = {".norm1.": ".layer_norm1.", ".norm2.": ".layer_norm2."}
_IN_TEXT = {
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".o_proj.": ".out_proj.",
    ".q_norm.": ".q_layernorm.",
    ".k_norm.": ".k_layernorm.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".conv.weight": ".conv.conv.weight",
    ".conv.bias": ".conv.conv.bias",
}


def tensor_map(stored_names: Collection[str], config: VLMConfig | None = None) -> StoredTensorOf:
    """Where each of our tensors lies."""
    nested = any(".vision_tower.vision_model." in name for name in stored_names)

    def stored_tensor(name: str) -> StoredTensor:
        theirs = rename(name, _NAMES)
        for ours, other in (_IN_TOWER if name.startswith("vision_model.") else _IN_TEXT).items():
            theirs = theirs.replace(ours, other)
        if nested:
            theirs = theirs.replace(".vision_tower.", ".vision_tower.vision_model.")
        return StoredTensor(theirs)

    return stored_tensor


def build(config: VLMConfig) -> tuple[nn.Module, nn.Module, LanguageModel]:
    """Tower, projector and text."""
    text = LanguageModel(config.text, config.tie_word_embeddings)
    return PackedVisionTransformer(config.vision), PatchMergers(config.vision, config.text.hidden_size), text


def positions(config: VLMConfig, height: int, width: int) -> int:
    """Positions that a part of an image of so many pixels takes."""
    side = config.vision.patch_size * config.vision.merge_size
    if height % side or width % side or not height or not width:
        raise ValueError(
            f"an image: expected sides that are multiples of {side} pixels, got {width} x {height}"
        )
    return (height // side) * (width // side)


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json of transformers' Lfm2VlForConditionalGeneration."""
    text, vision = config.text, config.vision
    seen = {name: getattr(vision, name) for name in _VISION}
    seen |= {
        "model_type": "siglip2_vision_model",
        "layer_norm_eps": vision.norm_eps,
        "vision_use_head": False,
    }
    seen |= {"num_patches": vision.table_side**2, **_PLAIN_VISION}
    as_qwen3 = replace(config, text=replace(text, layer_types=()))
    described = saving.write_config(as_qwen3, dtype, "Lfm2VlForConditionalGeneration", NAME, seen)
    described["text_config"] |= {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "norm_eps": text.rms_norm_eps,
        "layer_types": [kind.replace("attention", "full_attention") for kind in text.layer_types],
        "conv_L_cache": text.conv_kernel,
        "conv_bias": text.conv_bias,
        "block_auto_adjust_ff_dim": False,
    }
    return described | {
        "downsample_factor": vision.merge_size,
        "projector_hidden_size": vision.merger_width,
        **_PLAIN,
        "projector_bias": vision.merger_bias,
        "projector_use_layernorm": vision.merger_norm == "block",
    }


def processor_classes(config: VLMConfig) -> tuple[str, str]:
    return "Lfm2VlProcessor", "Lfm2VlImageProcessor"


# -------------------------------------------------------------------------------------------------- images
START, END, THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
# Lfm2VlImageProcessor's own, where a file does not say.
_DEFAULTS: dict[str, Any] = {
    "downsample_factor": 2, "do_image_splitting": True, "min_tiles": 2, "max_tiles": 10,
    "use_thumbnail": True, "min_image_tokens": 64, "max_image_tokens": 256, "encoder_patch_size": 16,
    "tile_size": 512, "max_pixels_tolerance": 2.0, **tiles.CLIP_PIXELS,
    "resample": int(Image.Resampling.BILINEAR), "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip


class Lfm2Images(tiles.TiledImages):
    """How transformers' Lfm2VlProcessor cuts images and writes them into a prompt: a large one becomes a grid
    of tiles, and all of it in its own shape follows. `settings` are what preprocessor_config.json has."""

    flat = own_sizes = True

    def __init__(self, settings: Mapping[str, Any], image_token: str):
        self.image_token = image_token
        self.settings = _DEFAULTS | {key: settings[key] for key in _DEFAULTS if settings.get(key) is not None}
        with tiles.reading_settings(self.settings):
            known = SimpleNamespace(**self.settings)
            self._resample, self._values = tiles.pixel_rule(self.settings)
            self.tile_size, self.with_whole = known.tile_size, bool(known.use_thumbnail)
            self.patch = known.encoder_patch_size
            self.factor = self.patch * known.downsample_factor
            tokens = (known.min_image_tokens, known.max_image_tokens)
            self.least, self.most = (count * self.factor**2 for count in tokens)
            self.tile_positions = (known.tile_size // self.factor) ** 2
            self._largest = self.most * known.max_pixels_tolerance
        fewest, most = (known.min_tiles, known.max_tiles) if known.do_image_splitting else (1, 1)
        self._grids = tiles.TileGrids(fewest, most, self.tile_size)
        self._splits, self.longest_side = most > 1, self.tile_size * most
        tiles.check_tiles(self.tile_size, self.longest_side, max(self.tile_positions, known.max_image_tokens))
        if self.tile_size % self.factor:
            raise ProcessorError(
                f"preprocessor_config.json: expected tiles of a multiple of {self.factor} pixels, "
                f"got {self.tile_size}"
            )

    def grid(self, width: int, height: int) -> tuple[int, int]:
        near = max(self.patch, self._round(height)) * max(self.patch, self._round(width))
        if not self._splits or near <= self._largest:
            return self.uncut
        return self._grids.nearest(width, height)

    def _round(self, side: float) -> int:
        return round(side / self.factor) * self.factor

    def _whole_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the image in its own shape, between the least and the most pixels."""
        sides, factor = (width, height), self.factor
        rounded = [max(factor, self._round(side)) for side in sides]
        if math.prod(rounded) > self.most:
            by = math.sqrt(width * height / self.most)
            rounded = [max(factor, math.floor(side / by / factor) * factor) for side in sides]
        elif math.prod(rounded) < self.least:
            by = math.sqrt(self.least / (width * height))
            rounded = [math.ceil(side * by / factor) * factor for side in sides]
        return rounded[0], rounded[1]

    def plan(self, width: int, height: int) -> tiles.Visual:
        grid, (wide, high) = self.grid(width, height), self._whole_size(width, height)
        parts = tiles.Parts.planned(0 if grid == self.uncut else math.prod(grid), self.tile_size)
        if grid == self.uncut or self.with_whole:
            parts = tiles.Parts.cat([parts, tiles.Parts.planned(1, high, wide)])
        return tiles.Visual(parts, self.positions(parts), grid, (width, height))

    def positions(self, parts: tiles.Parts) -> int:
        return sum(math.prod(part.pixels.shape[1:]) for part in parts) // self.factor**2

    def cut(self, image: Image.Image) -> tiles.Visual:
        planned, side, parts = self.plan(*image.size), self.tile_size, []
        rows, columns = planned.grid
        if planned.grid != self.uncut:
            resized = image.resize((columns * side, rows * side), self._resample)
            parts.append(tiles.tiles_of(resized, side, self._values))
        if planned.grid == self.uncut or self.with_whole:
            whole = image.resize(self._whole_size(*image.size), self._resample)
            parts.append(tiles.Parts.of(tiles.pixels_of(whole)[None], self._values))
        return replace(planned, parts=tiles.Parts.cat(parts))

    def prompt(self, visual: tiles.Visual, index: int, count: int) -> str:
        rows, columns = visual.grid
        cut = rows * columns if visual.grid != self.uncut else 0
        names = [f"<|img_row_{at // columns + 1}_col_{at % columns + 1}|>" for at in range(cut)]
        text = "".join(name + self.image_token * self.tile_positions for name in names)
        rest = visual.positions - cut * self.tile_positions
        return START + text + (THUMBNAIL if cut and rest else "") + self.image_token * rest + END

    def transformers(self, tokenizer: Any, chat_template: str) -> saving.SavedProcessor:
        token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        described = {"image_processor": self.settings | {"image_processor_type": "Lfm2VlImageProcessor"}}
        return saving.SavedProcessor(tokenizer, chat_template, token_id, None, {}, described)


def open_images(folder: Path, config: Mapping) -> tuple[Lfm2Images, AnyTokenizer, str | None]:
    """The image rule, tokenizer and chat template of a checkpoint folder."""
    tokenizer = open_with(folder, (START, END, THUMBNAIL))
    token = tokenizer.convert_ids_to_tokens(config.get("image_token_id", 396))
    return Lfm2Images(image_settings(folder), token), tokenizer, chat_template(folder)
