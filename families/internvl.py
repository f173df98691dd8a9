"""InternVL3 and InternVL3.5: InternViT, an MLP projector, a Qwen2 or Qwen3 text model, tiles of 448 pixels.

The Hub has them in two layouts. That of transformers (`InternVLForConditionalGeneration`, repositories that
end in -HF) is read and written. That of the models' own code (`InternVLChatModel`, which others run with
trust_remote_code) is read, and none of it is run. The image rule is bit for bit that of transformers' GotOcr2
image processor (its PIL backend): tiles in the grid whose sides relate most like the image's, then the whole
image as one more tile. It is ours, because transformers' takes seconds to import.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from data.chat import chat_template
from data.errors import ProcessorError, PromptError
from data.tiles import Parts, TiledImages, Visual, byte_values, check_tiles, tiles_of
from data.tokenizer import AnyTokenizer, check_files, open_tokenizer, read_object
from families.idefics3 import positions
from families.text import (
    VISION_KEYS,
    both_dtypes,
    checked,
    read_ids,
    section,
    text_config,
    vision_config,
    write_text,
)
from models.checkpoints.hub import CheckpointError
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, rename
from models.config import VLMConfig
from models.language_model import LanguageModel
from models.vision_transformer import MLPProjector, VisionTransformer

NAME = "internvl"
PROCESSOR = ("InternVLProcessor", "GotOcr2ImageProcessor")
TITLE = "InternVL3 / InternVL3.5 (transformers' layout, and that of InternVLChatModel)"
# What follows from the config, a tied head, and a token that only pre-training used.
IGNORABLE = re.compile(r".*rotary_emb\.inv_freq|(language_model\.)?lm_head\.weight|.*\.mask_token")
# How our names begin, those of the files that transformers writes, and InternVLChatModel's;
_OWNERS = {
    "vision_model": ("vision_tower.", "vision_model."),
    "projector": ("multi_modal_projector.", "mlp1."),
    "language_model": ("language_model.", "language_model."),
}
# how they go on (the first that fits),
_PLACES = "vision_model.position_embedding.weight"
_NAMES = (
    ("vision_model.class_token", "embeddings.cls_token", "embeddings.class_embedding"),
    (_PLACES, "embeddings.position_embeddings", "embeddings.position_embedding"),
    (
        "vision_model.patch_embedding.",
        "embeddings.patch_embeddings.projection.",
        "embeddings.patch_embedding.",
    ),
    ("vision_model.layers.", "encoder.layer.", "encoder.layers."),
    ("projector.norm.", "layer_norm.", "0."),
    ("projector.fc1.", "linear_1.", "1."),
    ("projector.fc2.", "linear_2.", "3."),
    ("language_model.lm_head.", "lm_head.", "lm_head."),
    ("language_model.", "model.", "model."),
)
# and within a block of the tower.
_BLOCK = (
    ("layer_norm1.", "layernorm_before.", "norm1."),
    ("layer_norm2.", "layernorm_after.", "norm2."),
    ("layer_scale", "lambda_", "ls"),
    ("self_attn.out_proj.", "attention.projection_layer.", "attn.proj."),
    ("self_attn.", "attention.", "attn."),
    ("mlp.", "mlp.", "mlp."),
)
# Names of transformers' files -> of its modules: it opens both, and adapters name these, so we write these.
_MODULES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "": "model.",
}
_LEADING = ("vision_model.class_token", _PLACES)
_LAYER = re.compile(r"(vision_model\.layers\.)(\d+\.)(.+)")
_FUSED = re.compile(r"self_attn\.([qkv])_proj\.(weight|bias)")
# Keys of config.json and of its vision_config whose other values would need code that is not here.
_PLAIN = {
    "vision_feature_layer": -1, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu",
}  # fmt: skip
_PLAIN_VISION = {"use_absolute_position_embeddings": True, "use_mean_pooling": True}
# Defaults of transformers' InternVLVisionConfig.
_VISION = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 448, "patch_size": 14, "hidden_act": "gelu",
}  # fmt: skip
# The ids of <IMG_CONTEXT> in the published tokenizers, which an InternVLChatModel's config.json does not say.
_IMAGE_TOKEN_IDS = {"qwen2": 151_667, "qwen3": 151_671}

START, END, IMAGE = "<img>", "</img>", "<IMG_CONTEXT>"
# What transformers' processor asks a tokenizer for.
ROLES = {
    "start_image_token": START, "end_image_token": END,
    "context_image_token": IMAGE, "video_token": "<video>",
}  # fmt: skip
# For a tokenizer whose own template has no place for images, as InternVLChatModel's.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Settings of transformers' GotOcr2ImageProcessor where a file does not say, and InternVLChatModel's.
_DEFAULTS: dict[str, Any] = {
    "crop_to_patches": True,  # which transformers' InternVLProcessor asks for whatever a file says
    "do_convert_rgb": True, "do_resize": True, "size": {"height": 384, "width": 384},
    "resample": int(Image.Resampling.BICUBIC), "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711], "min_patches": 1, "max_patches": 12,
}  # fmt: skip
CHAT_PIXELS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


# ---------------------------------------------------------------------------------------------- checkpoint
def recognises(config: Mapping) -> bool:
    return config.get("model_type") in (NAME, "internvl_chat")


def _as_transformers(config: Mapping) -> Mapping:
    """A config.json of InternVLChatModel with transformers' keys; one with them as it is."""
    if config.get("model_type") == NAME:
        return config
    vision, text = dict(section(config, "vision_config")), section(config, "llm_config")
    _expect({"ps_version": config.get("ps_version", "v1")}, {"ps_version": "v2"})
    _expect(config, {"force_image_size": vision.get("image_size"), "use_thumbnail": True})
    vision["attention_bias"] = vision.get("qkv_bias", False)
    vision["use_qk_norm"] = vision.get("qk_normalization", True)
    vision["norm_type"] = vision.get("norm_type", "rms_norm")
    known = _IMAGE_TOKEN_IDS.get(str(text.get("model_type")))
    return dict(config) | {
        "vision_config": vision,
        "text_config": text,
        "vision_feature_layer": config.get("select_layer", -1),
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "image_token_id": config.get("img_context_token_id", known),
    }


def _expect(config: Mapping, plain: Mapping[str, Any]) -> None:
    for name, value in plain.items():
        if config.get(name) not in (None, value):
            raise CheckpointError(f"config.json: expected {name} to be {value!r}, got {config[name]!r}")


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json of either layout and generation_config.json (or {}); `stored` tensors change nothing."""
    config = _as_transformers(config)
    seen, text = section(config, "vision_config"), section(config, "text_config")
    _expect(config, _PLAIN)
    _expect(seen, _PLAIN_VISION)
    vision = checked(
        partial(replace, vision_config(seen, _VISION)),
        norm_type=seen.get("norm_type", "layer_norm"),
        attention_bias=bool(seen.get("attention_bias", False)),
        qk_norm=bool(seen.get("use_qk_norm", False)),
        class_token=True,
        layer_scale=True,
        last_norm=False,
    )
    if vision.qk_norm:  # in transformers their epsilon is this one whatever the others' is
        _expect({"layer_norm_eps": vision.layer_norm_eps}, {"layer_norm_eps": 1e-6})
    ratio = config.get("downsample_ratio", 0.5)
    folded = 1 / ratio if isinstance(ratio, int | float) and ratio > 0 else 0.0
    if not folded.is_integer():
        raise CheckpointError(f"config.json: expected downsample_ratio to be 1, 1/2, 1/4, …, got {ratio!r}")
    decoder = text_config({"model_type": "qwen2"} | text, {})
    return checked(
        VLMConfig,
        family=NAME,
        vision=vision,
        text=decoder,
        scale_factor=int(folded),
        image_token_id=config.get("image_token_id", _IMAGE_TOKEN_IDS["qwen2"]),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
        **read_ids(config, generation, text, decoder.vocab_size),
    )


def tensor_map(stored_names: Collection[str]) -> StoredTensorOf:
    """Where each of our tensors lies, in the layout that the stored names are of."""
    chat = any(name.startswith("mlp1.") for name in stored_names)
    in_modules = not chat and not any(name.startswith("vision_tower.") for name in stored_names)
    names, block = ({row[0]: row[1 + chat] for row in rows} for rows in (_NAMES, _BLOCK))

    def stored_tensor(name: str) -> StoredTensor:
        front = _OWNERS[name.partition(".")[0]][chat]
        if found := _LAYER.fullmatch(name):
            layer = front + rename(found[1], names) + found[2]
            if chat and (fused := _FUSED.fullmatch(found[3])):  # rows: all of q, then all of k, then all of v
                return StoredTensor(f"{layer}attn.qkv.{fused[2]}", "qkv".index(fused[1]), 3)
            place = layer + rename(found[3], block)
        else:
            place = front + rename(name, names)
        return StoredTensor(rename(place, _MODULES) if in_modules else place, leading_axis=name in _LEADING)

    return stored_tensor


def build(config: VLMConfig) -> tuple[nn.Module, nn.Module, LanguageModel]:
    """Tower, projector and text."""
    text = LanguageModel(config.text, config.tie_word_embeddings)
    return VisionTransformer(config.vision), MLPProjector(config), text


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json in transformers' layout, in which nothing is left to a reader's defaults."""
    vision = {name: getattr(config.vision, name) for name in (*VISION_KEYS, "norm_type", "attention_bias")}
    vision |= {"model_type": "internvl_vision", "use_qk_norm": config.vision.qk_norm, **_PLAIN_VISION}
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": NAME,
        **both_dtypes(dtype),
        **_PLAIN,
        "downsample_ratio": 1 / config.scale_factor,
        "image_seq_length": positions(config),
        "image_token_id": config.image_token_id,
        "tie_word_embeddings": config.tie_word_embeddings,
        "text_config": write_text(config, dtype),
        "vision_config": vision | both_dtypes(dtype),
    }


# -------------------------------------------------------------------------------------------------- images
@lru_cache(maxsize=16)
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """(columns, rows) of at least and at most so many tiles, those of few tiles first."""
    every = [(width, height) for width in range(1, most + 1) for height in range(1, most // width + 1)]
    return sorted((one for one in every if math.prod(one) >= least), key=math.prod)


class InternVLImages(TiledImages):
    """How transformers' InternVLProcessor cuts images and writes them into a prompt. `settings` are what
    preprocessor_config.json has, `tile_positions` is its `image_seq_length`."""

    image_token = IMAGE
    flat = True

    def __init__(self, settings: Mapping[str, Any], tile_positions: int):
        self.settings = _DEFAULTS | {key: settings[key] for key in _DEFAULTS if settings.get(key) is not None}
        self.tile_positions = tile_positions
        try:
            size = self.settings["size"]
            self.tile_size: int = size["height"]
            self.most, self._least = int(self.settings["max_patches"]), int(self.settings["min_patches"])
            self._resample = Image.Resampling(self.settings["resample"])
            self._values = byte_values(self.settings)
        except (KeyError, ValueError, TypeError) as error:
            raise PromptError(f"image settings: {type(error).__name__}: {error}") from error
        # An image is resized to at most so many pixels as a square of this side has.
        self.longest_side = self.tile_size * math.isqrt(max(1, self.most) - 1) + self.tile_size
        check_tiles(self.tile_size, self.longest_side, tile_positions)
        if size.get("width") != self.tile_size or not self.settings["do_resize"]:
            raise ProcessorError("preprocessor_config.json: expected a square size, and do_resize to be true")

    def transformers(self, tokenizer: Any, chat_template: str) -> _ForSaving:
        return _ForSaving(self, tokenizer, chat_template)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) that relate most like the image's sides. Of two that do alike, and here only then,
        the one of more tiles is taken unless they would be more than twice the image."""
        best, nearest = (1, 1), math.inf
        for columns, rows in _grids(self._least, self.most) if self.most > 1 else ():
            distance = abs(width / height - columns / rows)
            large = width * height > 0.5 * self.tile_size * self.tile_size * columns * rows
            if distance < nearest or (distance == nearest and large):
                best, nearest = (rows, columns), distance
        return best

    def cut(self, image: Image.Image) -> Visual:
        side, planned = self.tile_size, self.plan(*image.size)
        rows, columns = planned.grid
        pixels = tiles_of(image.resize((columns * side, rows * side), self._resample), side)
        if len(planned.parts) > 1:
            pixels = np.concatenate((pixels, tiles_of(image.resize((side, side), self._resample), side)))
        return replace(planned, parts=Parts.of(torch.from_numpy(pixels), self._values))

    def prompt(self, visual: Visual, index: int, count: int) -> str:
        return START + IMAGE * visual.positions + END


class _ForSaving:
    """What saving asks of transformers' InternVLProcessor, which itself needs torchvision, for videos."""

    def __init__(self, images: InternVLImages, tokenizer: Any, template: str):
        self.images, self.tokenizer, self.template = images, tokenizer, template
        self.image_token_id: int = tokenizer.convert_tokens_to_ids(IMAGE)
        self.image_seq_len = images.tile_positions

    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        settings = {"image_seq_length": self.image_seq_len, "image_processor": self.images.settings}
        for name, more in (("tokenizer_config.json", ROLES), ("processor_config.json", settings)):
            written = read_object(folder / name) | more
            (folder / name).write_text(json.dumps(written), encoding="utf-8")


def open_images(folder: Path, config: Mapping) -> tuple[InternVLImages, AnyTokenizer, str]:
    """The image rule, tokenizer and chat template of a checkpoint folder in either layout."""
    check_files(folder)
    tokenizer = open_tokenizer(folder)
    if absent := [token for token in (START, END, IMAGE) if token not in tokenizer.get_added_vocab()]:
        raise PromptError(f"tokenizer: expected special tokens for images, {', '.join(absent)} are absent")
    known = read_config(config, {}, {})
    if config["model_type"] != NAME:
        side, most = known.vision.image_size, config.get("max_dynamic_patch", 12)
        settings: dict[str, Any] = CHAT_PIXELS | {"size": {"height": side, "width": side}}
        settings["min_patches"] = config.get("min_dynamic_patch", 1)
        settings["max_patches"] = most if config.get("dynamic_image_size", True) else 1
    else:
        stored = read_object(folder / "processor_config.json").get("image_processor")
        settings = stored or read_object(folder / "preprocessor_config.json")
    template = chat_template(folder) or ""
    return InternVLImages(settings, positions(known)), tokenizer, template if IMAGE in template else TEMPLATE
