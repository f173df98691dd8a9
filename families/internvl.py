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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from PIL import Image
from torch import nn

from data.chat import chat_template
from data.errors import ProcessorError, PromptError
from data.tiles import Parts, TiledImages, Visual, byte_values, check_tiles, tiles_of
from data.tokenizer import AnyTokenizer, check_files, open_tokenizer, read_object
from families import text as shared
from families.idefics3 import positions
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
# How our tensors' names begin as transformers' modules have them, which adapters name and we write; in files
# that transformers writes, with names of its older versions; in those of InternVLChatModel.
_FRONTS = {
    "vision_model.": ("model.vision_tower.", "vision_tower.", "vision_model."),
    "projector.": ("model.multi_modal_projector.", "multi_modal_projector.", "mlp1."),
    "language_model.lm_head.": ("lm_head.", "language_model.lm_head.", "language_model.lm_head."),
    "language_model.": ("model.language_model.", "language_model.model.", "language_model.model."),
}
# What then stands in those of tower and projector, in transformers' two and in InternVLChatModel's.
_INSIDE = {
    ".class_token": (".embeddings.cls_token", ".embeddings.class_embedding"),
    ".position_embedding.weight": (".embeddings.position_embeddings", ".embeddings.position_embedding"),
    ".patch_embedding.": (".embeddings.patch_embeddings.projection.", ".embeddings.patch_embedding."),
    ".layers.": (".encoder.layer.", ".encoder.layers."),
    ".layer_norm1.": (".layernorm_before.", ".norm1."),
    ".layer_norm2.": (".layernorm_after.", ".norm2."),
    ".layer_scale": (".lambda_", ".ls"),
    ".self_attn.out_proj.": (".attention.projection_layer.", ".attn.proj."),
    ".self_attn.": (".attention.", ".attn."),
    "projector.norm.": ("projector.layer_norm.", "projector.0."),
    "projector.fc1.": ("projector.linear_1.", "projector.1."),
    "projector.fc2.": ("projector.linear_2.", "projector.3."),
}
_LEADING = ("vision_model.class_token", "vision_model.position_embedding.weight")
_FUSED = re.compile(r"(vision_model\..+\.attn\.)([qkv])_proj(\..+)")
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
_MOST_TILES = 400  # the time to list their grids grows with the square
CHAT_PIXELS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


# ---------------------------------------------------------------------------------------------- checkpoint
def recognises(config: Mapping) -> bool:
    return config.get("model_type") in (NAME, "internvl_chat")


def _as_transformers(config: Mapping) -> Mapping:
    """A config.json of InternVLChatModel with transformers' keys; one with them as it is."""
    if config.get("model_type") == NAME:
        return config
    vision, text = shared.section(config, "vision_config"), shared.section(config, "llm_config")
    plain = {"ps_version": "v2", "force_image_size": vision.get("image_size"), "use_thumbnail": True}
    shared.expect({"ps_version": "v1", "use_thumbnail": False, **config}, plain)  # its defaults
    vision = {"norm_type": "rms_norm", "qk_normalization": True, **vision}  # its defaults
    vision |= {"attention_bias": vision.get("qkv_bias"), "use_qk_norm": vision["qk_normalization"]}
    known = _IMAGE_TOKEN_IDS.get(str(text.get("model_type")))
    return {
        **config,
        "vision_config": vision,
        "text_config": text,
        "vision_feature_layer": config.get("select_layer"),
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "image_token_id": config.get("img_context_token_id", known),
    }


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json of either layout and generation_config.json (or {}); `stored` tensors change nothing."""
    config = _as_transformers(config)
    seen, text = shared.section(config, "vision_config"), shared.section(config, "text_config")
    shared.expect(config, _PLAIN)
    # In transformers the norms of queries and keys have this epsilon, whatever the others' is.
    shared.expect(seen, _PLAIN_VISION | ({"layer_norm_eps": 1e-6} if seen.get("use_qk_norm") else {}))
    vision = shared.vision_config(
        seen,
        _VISION,
        norm_type=seen.get("norm_type", "layer_norm"),
        attention_bias=bool(seen.get("attention_bias", False)),
        qk_norm=bool(seen.get("use_qk_norm", False)),
        class_token=True,
        layer_scale=True,
        last_norm=False,
    )
    ratio = config.get("downsample_ratio", 0.5)
    folded = 1 / ratio if isinstance(ratio, int | float) and ratio > 0 else 0.0
    if not folded.is_integer():
        raise CheckpointError(f"config.json: expected downsample_ratio to be 1, 1/2, 1/4, …, got {ratio!r}")
    decoder = shared.text_config({"model_type": "qwen2"} | text, {})
    return shared.checked(
        VLMConfig,
        family=NAME,
        vision=vision,
        text=decoder,
        scale_factor=int(folded),
        image_token_id=config.get("image_token_id", _IMAGE_TOKEN_IDS["qwen2"]),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
        **shared.read_ids(config, generation, text, decoder.vocab_size),
    )


def tensor_map(stored_names: Collection[str]) -> StoredTensorOf:
    """Where each of our tensors lies, in the layout that the stored names are of."""
    begun = {name.partition(".")[0] for name in stored_names}
    chat = "mlp1" in begun
    layout = 2 if chat else 1 if "vision_tower" in begun else 0
    fronts = {ours: theirs[layout] for ours, theirs in _FRONTS.items()}
    inside = {ours: theirs[chat] for ours, theirs in _INSIDE.items()}

    def stored_tensor(name: str) -> StoredTensor:
        place = name
        for ours, theirs in inside.items() if not name.startswith("language_model.") else ():
            place = place.replace(ours, theirs)
        place = rename(place, fronts)
        if found := _FUSED.fullmatch(place):  # rows: all of q, then all of k, then all of v
            return StoredTensor(f"{found[1]}qkv{found[3]}", "qkv".index(found[2]), 3)
        return StoredTensor(place, leading_axis=name in _LEADING)

    return stored_tensor


def build(config: VLMConfig) -> tuple[nn.Module, nn.Module, LanguageModel]:
    """Tower, projector and text."""
    text = LanguageModel(config.text, config.tie_word_embeddings)
    return VisionTransformer(config.vision), MLPProjector(config), text


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json in transformers' layout, in which nothing is left to a reader's defaults."""
    kept = (*shared.VISION_KEYS, "norm_type", "attention_bias")
    vision = {name: getattr(config.vision, name) for name in kept}
    vision |= {"model_type": "internvl_vision", "use_qk_norm": config.vision.qk_norm, **_PLAIN_VISION}
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": NAME,
        **shared.both_dtypes(dtype),
        **_PLAIN,
        "downsample_ratio": 1 / config.scale_factor,
        "image_seq_length": positions(config),
        "image_token_id": config.image_token_id,
        "tie_word_embeddings": config.tie_word_embeddings,
        "text_config": shared.write_text(config, dtype),
        "vision_config": vision | shared.both_dtypes(dtype),
    }


# -------------------------------------------------------------------------------------------------- images
class InternVLImages(TiledImages):
    """How transformers' InternVLProcessor cuts images and writes them into a prompt. `settings` are what
    preprocessor_config.json has, `tile_positions` is its `image_seq_length`."""

    image_token = IMAGE
    flat = True

    def __init__(self, settings: Mapping[str, Any], tile_positions: int):
        self.settings = _DEFAULTS | {key: settings[key] for key in _DEFAULTS if settings.get(key) is not None}
        self.tile_positions = tile_positions
        self.tile_size: int = self.settings["size"]["height"]
        self._resample = Image.Resampling(self.settings["resample"])
        self._values = byte_values(self.settings)
        least, most = self.settings["min_patches"], self.settings["max_patches"]
        if type(least) is not int or type(most) is not int or not 1 <= least <= most <= _MOST_TILES:
            raise ProcessorError(
                f"preprocessor_config.json: expected 1 <= min_patches <= max_patches <= {_MOST_TILES}, "
                f"got {least!r} and {most!r}"
            )
        check_tiles(self.tile_size, self.tile_size, tile_positions)
        self.longest_side = self.tile_size * most  # an image of one row
        if self.settings["size"].get("width") != self.tile_size or not self.settings["do_resize"]:
            raise ProcessorError("preprocessor_config.json: expected a square size, and do_resize to be true")
        grids = ((rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1))
        self._grids = sorted((one for one in grids if math.prod(one) >= least), key=math.prod)

    def transformers(self, tokenizer: Any, chat_template: str) -> SimpleNamespace:
        """What saving asks of transformers' InternVLProcessor, which itself needs torchvision, for videos."""

        def save_pretrained(folder: Path) -> None:
            tokenizer.save_pretrained(folder)
            (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
            settings = {"image_seq_length": self.tile_positions, "image_processor": self.settings}
            for name, more in (("tokenizer_config.json", ROLES), ("processor_config.json", settings)):
                written = read_object(folder / name) | more
                (folder / name).write_text(json.dumps(written), encoding="utf-8")

        return SimpleNamespace(
            tokenizer=tokenizer,
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            image_seq_len=self.tile_positions,
            save_pretrained=save_pretrained,
        )

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) that relate most like the image's sides. Of two that do alike, and here only then,
        the one of more tiles is taken unless they would be more than twice the image."""
        best, nearest = (1, 1), math.inf
        for rows, columns in self._grids:  # those of few tiles first
            distance = abs(width / height - columns / rows)
            large = width * height > 0.5 * self.tile_size * self.tile_size * columns * rows
            if distance < nearest or (distance == nearest and large):
                best, nearest = (rows, columns), distance
        return best

    def cut(self, image: Image.Image) -> Visual:
        side, planned = self.tile_size, self.plan(*image.size)
        grids = [planned.grid] if planned.grid == self.uncut else [planned.grid, self.uncut]
        sizes = [(columns * side, rows * side) for rows, columns in grids]
        parts = [tiles_of(image.resize(one, self._resample), side, self._values) for one in sizes]
        return replace(planned, parts=Parts.cat(parts))

    def prompt(self, visual: Visual, index: int, count: int) -> str:
        return START + IMAGE * visual.positions + END


def open_images(folder: Path, config: Mapping) -> tuple[InternVLImages, AnyTokenizer, str]:
    """The image rule, tokenizer and chat template of a checkpoint folder in either layout."""
    check_files(folder)
    tokenizer = open_tokenizer(folder)
    if absent := [token for token in (START, END, IMAGE) if token not in tokenizer.get_added_vocab()]:
        raise PromptError(f"tokenizer: expected special tokens for images, {', '.join(absent)} are absent")
    known = read_config(config, {}, {})
    if config["model_type"] != NAME:
        side, most = known.vision.image_size, config.get("max_dynamic_patch", 6)
        settings: dict[str, Any] = CHAT_PIXELS | {"size": {"height": side, "width": side}}
        settings["min_patches"] = config.get("min_dynamic_patch", 1)
        settings["max_patches"] = most if config.get("dynamic_image_size", False) else 1
    else:
        stored = read_object(folder / "processor_config.json").get("image_processor")
        settings = stored or read_object(folder / "preprocessor_config.json")
    template = chat_template(folder) or ""
    return InternVLImages(settings, positions(known)), tokenizer, template if IMAGE in template else TEMPLATE
