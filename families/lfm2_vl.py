"""LFM2-VL and LFM2.5-VL as transformers has them (arXiv:2511.23404): short convolutions between layers of
attention, a SigLIP2 tower for tiles and for a thumbnail of the image's own shape.

Config keys and tensor names are those of transformers 5.23; older checkpoints have `vision_model` in the
names of their tower.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from data.chat import chat_template
from data.errors import ProcessorError, PromptError
from data.tiles import Parts, TiledImages, Visual, byte_values, check_tiles, tiles_of
from data.tokenizer import AnyTokenizer, check_files, open_tokenizer, read_object
from families import text as shared
from families.text import checked, expect, read_ids, section
from models.checkpoints.hub import CheckpointError
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, rename
from models.config import PackedVisionConfig, TextConfig, VLMConfig
from models.language_model import LanguageModel
from models.packed_vision_transformer import PackedVisionTransformer, PatchMergers

NAME = "lfm2_vl"
TITLE = "transformers LFM2-VL / LFM2.5-VL"
PROCESSOR = ("Lfm2VlProcessor", "Lfm2VlImageProcessor")
IGNORABLE = re.compile(r"(model\.)?vision_tower\.(vision_model\.)?head\..*|lm_head\.weight")  # its pooling
_TEXT = {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
_VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "patch_size": 16,
}


def recognises(config: Mapping) -> bool:
    return config.get("model_type") == NAME


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing."""
    text, vision = section(config, "text_config"), section(config, "vision_config")
    expect(config, {"projector_hidden_act": "gelu"})
    expect(vision, {"hidden_act": "gelu_pytorch_tanh"})
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
    return checked(
        VLMConfig,
        family=NAME,
        vision=tower,
        text=decoder,
        scale_factor=1,
        image_token_id=config.get("image_token_id", 396),
        tie_word_embeddings=config.get("tie_embedding", config.get("tie_word_embeddings", True)),
        **read_ids(config, generation, text, decoder.vocab_size),
    )


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


def tensor_map(stored_names: Collection[str]) -> StoredTensorOf:
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
    as_qwen3 = shared.write_text(replace(config, text=replace(text, layer_types=())), dtype)
    own = {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "norm_eps": text.rms_norm_eps,
        "layer_types": [kind.replace("attention", "full_attention") for kind in text.layer_types],
        "conv_L_cache": text.conv_kernel,
        "conv_bias": text.conv_bias,
        "block_auto_adjust_ff_dim": False,
    }
    return {
        "model_type": NAME,
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "image_token_id": config.image_token_id,
        "downsample_factor": vision.merge_size,
        "projector_hidden_size": vision.merger_width,
        "projector_hidden_act": "gelu",
        "projector_bias": vision.merger_bias,
        "projector_use_layernorm": vision.merger_norm == "block",
        "tie_word_embeddings": config.tie_word_embeddings,
        "text_config": {**as_qwen3, **own},
        "vision_config": {
            "model_type": "siglip2_vision_model",
            **{name: getattr(vision, name) for name in _VISION},
            "layer_norm_eps": vision.norm_eps,
            "hidden_act": "gelu_pytorch_tanh",
            "num_patches": vision.table_side**2,
            "vision_use_head": False,
            **shared.both_dtypes(dtype),
        },
        **shared.both_dtypes(dtype),
    }


# -------------------------------------------------------------------------------------------------- images
START, END, THUMBNAIL = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
# Lfm2VlImageProcessor's own, where a file does not say.
_DEFAULTS: dict[str, Any] = {
    "downsample_factor": 2,
    "do_image_splitting": True,
    "min_tiles": 2,
    "max_tiles": 10,
    "use_thumbnail": True,
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "encoder_patch_size": 16,
    "tile_size": 512,
    "max_pixels_tolerance": 2.0,
    "resample": int(Image.Resampling.BILINEAR),
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_MOST_TILES = 100


class Lfm2Images(TiledImages):
    """How transformers' Lfm2VlProcessor cuts images and writes them into a prompt: a large one becomes a grid
    of tiles, and all of it in its own shape follows. `settings` are what preprocessor_config.json has."""

    flat = own_sizes = True

    def __init__(self, settings: Mapping[str, Any], image_token: str):
        self.image_token = image_token
        self.settings = _DEFAULTS | {key: settings[key] for key in _DEFAULTS if settings.get(key) is not None}
        known = SimpleNamespace(**self.settings)
        self.tile_size, self.with_whole = known.tile_size, known.use_thumbnail
        self.patch, self.factor = known.encoder_patch_size, known.encoder_patch_size * known.downsample_factor
        tokens = (known.min_image_tokens, known.max_image_tokens)
        self.least, self.most = (count * self.factor**2 for count in tokens)
        self.tile_positions = (known.tile_size // self.factor) ** 2
        check_tiles(self.tile_size, self.tile_size, max(self.tile_positions, known.max_image_tokens))
        fewest, most = (known.min_tiles, known.max_tiles) if known.do_image_splitting else (1, 1)
        if not 1 <= fewest <= most <= _MOST_TILES or self.tile_size % self.factor:
            raise ProcessorError(
                f"preprocessor_config.json: expected 1 <= min_tiles <= max_tiles <= {_MOST_TILES} and "
                f"tiles of a multiple of {self.factor} pixels, got {fewest}, {most} and {self.tile_size}"
            )
        self._splits, self._tolerance = most > 1, known.max_pixels_tolerance
        self.longest_side = self.tile_size * most
        self._resample, self._values = Image.Resampling(known.resample), byte_values(self.settings)
        grids = ((rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1))
        self._grids = sorted((one for one in grids if math.prod(one) >= fewest), key=math.prod)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of tiles, (1, 1) for an image that is not cut; of two grids that relate alike the
        later one, unless it is more than twice the image."""
        near = max(self.patch, self._round(height)) * max(self.patch, self._round(width))
        if not self._splits or near <= self.most * self._tolerance:
            return self.uncut
        best, nearest = (1, 1), math.inf
        for rows, columns in self._grids:
            distance = abs(width / height - columns / rows)
            large = width * height > 0.5 * self.tile_size**2 * columns * rows
            if distance < nearest or (distance == nearest and large):
                best, nearest = (rows, columns), distance
        return best

    def _round(self, side: float) -> int:
        return round(side / self.factor) * self.factor

    def _whole_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of the image in its own shape, between the least and the most pixels."""
        sides = (width, height)
        rounded = [max(self.factor, self._round(side)) for side in sides]
        if math.prod(rounded) > self.most:
            by = math.sqrt(width * height / self.most)
            rounded = [max(self.factor, math.floor(side / by / self.factor) * self.factor) for side in sides]
        elif math.prod(rounded) < self.least:
            by = math.sqrt(self.least / (width * height))
            rounded = [math.ceil(side * by / self.factor) * self.factor for side in sides]
        return rounded[0], rounded[1]

    def plan(self, width: int, height: int) -> Visual:
        grid, (wide, high) = self.grid(width, height), self._whole_size(width, height)
        parts = []
        if grid != self.uncut:
            parts.append(Parts.planned(math.prod(grid), self.tile_size))
        if grid == self.uncut or self.with_whole:
            parts.append(Parts.planned(1, high, wide))
        together = Parts.cat(parts)
        return Visual(together, self._positions(together), grid, (width, height))

    def _positions(self, parts: Parts) -> int:
        return sum(math.prod(part.pixels.shape[1:]) for part in parts) // self.factor**2

    def cut(self, image: Image.Image) -> Visual:
        planned, side = self.plan(*image.size), self.tile_size
        rows, columns = planned.grid
        parts = []
        if planned.grid != self.uncut:
            resized = image.resize((columns * side, rows * side), self._resample)
            parts.append(tiles_of(resized, side, self._values))
        if planned.grid == self.uncut or self.with_whole:
            whole = np.array(image.resize(self._whole_size(*image.size), self._resample))
            parts.append(Parts.of(torch.from_numpy(whole.transpose(2, 0, 1).copy())[None], self._values))
        return replace(planned, parts=Parts.cat(parts))

    def whole(self, visual: Visual) -> Visual | None:
        if visual.grid == self.uncut or not self.with_whole:
            return visual if visual.grid == self.uncut else None
        return replace(
            visual, parts=visual.parts[-1:], positions=self._positions(visual.parts[-1:]), grid=(1, 1)
        )

    def prompt(self, visual: Visual, index: int, count: int) -> str:
        rows, columns = visual.grid
        tiles, text = rows * columns if visual.grid != self.uncut else 0, ""
        for number in range(tiles):
            text += f"<|img_row_{number // columns + 1}_col_{number % columns + 1}|>"
            text += self.image_token * self.tile_positions
        rest = visual.positions - tiles * self.tile_positions
        text += (THUMBNAIL if tiles and rest else "") + self.image_token * rest
        return START + text + END

    def transformers(self, tokenizer: Any, template: str) -> SimpleNamespace:
        """What saving asks of transformers' processor, which itself needs torchvision."""

        def save_pretrained(folder: Path) -> None:
            tokenizer.save_pretrained(folder)
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
            described = {"processor_class": PROCESSOR[0], "image_processor_type": PROCESSOR[1]}
            described |= self.settings
            (folder / "preprocessor_config.json").write_text(json.dumps(described), encoding="utf-8")

        return SimpleNamespace(
            tokenizer=tokenizer,
            image_token_id=tokenizer.convert_tokens_to_ids(self.image_token),
            image_seq_len=None,
            save_pretrained=save_pretrained,
        )


def open_images(folder: Path, config: Mapping) -> tuple[Lfm2Images, AnyTokenizer, str | None]:
    """The image rule, tokenizer and chat template of a checkpoint folder."""
    check_files(folder)
    settings = read_object(folder / "processor_config.json").get("image_processor")
    settings = settings or read_object(folder / "preprocessor_config.json")
    tokenizer = open_tokenizer(folder)
    if absent := [token for token in (START, END) if token not in tokenizer.get_added_vocab()]:
        raise PromptError(f"tokenizer: expected special tokens for images, {', '.join(absent)} are absent")
    token = tokenizer.convert_ids_to_tokens(config.get("image_token_id", 396))
    return Lfm2Images(settings, token), tokenizer, chat_template(folder)
