"""InternVL3 and 3.5, Qianfan-OCR: InternViT, an MLP projector, a Qwen2 or Qwen3 text, tiles of 448 pixels.

The layout is that of transformers (`InternVLForConditionalGeneration`; repositories that end in -HF, and
`QianfanOCRForConditionalGeneration`, whose files have the names of OpenGVLab's own code). The
image rule is bit for bit that of transformers' GotOcr2 image processor (its PIL backend): tiles in the grid
whose sides relate most like the image's, then the whole image as one more tile. It is ours, because
transformers' takes seconds to import.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from PIL import Image
from torch import Tensor, nn

from data import tiles
from data.chat import chat_template
from data.reading import TASKS, Reading
from data.tokenizer import AnyTokenizer, image_settings, open_with
from families import keys
from families.idefics3 import positions
from families.resizing import CLIP_PIXELS, TileGrids
from families.saving import SavedProcessor, write_config, write_text
from families.sections import TEXT_FAMILIES, VISION_KEYS, text_config, vision_config, vlm_config
from models.checkpoints.files import Opened
from models.checkpoints.gguf_config import SIGLIP, Join, Layout, Tower
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, part_of_qkv, rename
from models.config import VLMConfig
from models.language_model import LanguageModel
from models.vision_transformer import MLPProjector, VisionTransformer

NAME, QIANFAN = "internvl", "qianfan_ocr"
TITLE = "transformers InternVL3 / InternVL3.5 (repositories whose names end in -HF), Qianfan-OCR"
BOX_FORMS: dict[str, str] = {}
MODEL_TYPES = (NAME, QIANFAN)
_CLASSES = {NAME: "InternVL", QIANFAN: "QianfanOCR"}  # how the names of transformers' classes begin
PROCESSORS = {kind: (f"{name}Processor", "GotOcr2ImageProcessor") for kind, name in _CLASSES.items()}
_PAGE, _TABLE = "Parse this document to Markdown.", "Extract tables to HTML format."
_ASKED = _PAGE, _PAGE, _TABLE, "Extract formulas to LaTeX.", "What trends are shown in this chart?"
READING = {QIANFAN: Reading(prompts=dict(zip(TASKS, _ASKED)))}
MLX = {"": ""}
# What follows from the config, a tied head, and a token that only pre-training used.
IGNORABLE = re.compile(r".*rotary_emb\.inv_freq|(language_model\.)?lm_head\.weight|.*\.mask_token")
# How our tensors' names begin as transformers' modules have them, which adapters name and we write, as in
# published files, which have names of its older versions, and as in those of Qianfan-OCR.
_FRONTS = {
    "vision_model.": ("model.vision_tower.", "vision_tower.", "vision_model."),
    "projector.": ("model.multi_modal_projector.", "multi_modal_projector.", "mlp1."),
    "language_model.lm_head.": ("lm_head.", "language_model.lm_head.", "language_model.lm_head."),
    "language_model.": ("model.language_model.", "language_model.model.", "language_model.model."),
}
# What then stands in those of tower and projector.
_INSIDE = {
    ".class_token": ".embeddings.cls_token",
    ".position_embedding.weight": ".embeddings.position_embeddings",
    ".patch_embedding.": ".embeddings.patch_embeddings.projection.",
    ".layers.": ".encoder.layer.",
    ".layer_norm1.": ".layernorm_before.",
    ".layer_norm2.": ".layernorm_after.",
    ".layer_scale": ".lambda_",
    ".self_attn.out_proj.": ".attention.projection_layer.",
    ".self_attn.": ".attention.",
    "projector.norm.": "projector.layer_norm.",
    "projector.fc1.": "projector.linear_1.",
    "projector.fc2.": "projector.linear_2.",
}
_IN_QIANFAN = {
    ".class_token": ".embeddings.class_embedding", ".patch_embedding.": ".embeddings.patch_embedding.",
    ".position_embedding.weight": ".embeddings.position_embedding", ".layers.": ".encoder.layers.",
    ".layer_norm": ".norm", ".layer_scale": ".ls", ".self_attn.out_proj.": ".attn.proj.",
    ".self_attn.q_norm.": ".attention.q_norm.", ".self_attn.k_norm.": ".attention.k_norm.",
    ".self_attn.": ".attn.", "projector.norm.": "projector.0.", "projector.fc1.": "projector.1.",
    "projector.fc2.": "projector.3.",
}  # fmt: skip
_LEADING = ("vision_model.class_token", "vision_model.position_embedding.weight")
# Keys of config.json and of its vision_config, of which other values need code that is not here.
_PLAIN: dict[str, Any] = {
    "vision_feature_layer": -1, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu",
}  # fmt: skip
_PLAIN_VISION = {"use_absolute_position_embeddings": True, "use_mean_pooling": True}
# Defaults of transformers' InternVLVisionConfig.
_VISION = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 448, "patch_size": 14, "hidden_act": "gelu",
}  # fmt: skip
# Keys of a vision_config that SigLIP's lacks.
_OWN = keys.same(norm_type="layer_norm", attention_bias=False) | {"qk_norm": keys.Key("use_qk_norm", False)}

START, END, IMAGE = "<img>", "</img>", "<IMG_CONTEXT>"
# What transformers' processor asks a tokenizer for.
ROLES = {
    "start_image_token": START, "end_image_token": END,
    "context_image_token": IMAGE, "video_token": "<video>",
}  # fmt: skip
# Settings of transformers' GotOcr2ImageProcessor where a file does not say.
_DEFAULTS: dict[str, Any] = {
    "crop_to_patches": True,  # which transformers' InternVLProcessor asks for whatever a file says
    "do_convert_rgb": True, "size": {"height": 384, "width": 384}, "min_patches": 1, "max_patches": 12,
    **CLIP_PIXELS,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------- checkpoint
def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing."""
    seen, text = keys.section(config, "vision_config"), keys.section(config, "text_config")
    keys.expect(config, _PLAIN)
    # In transformers the norms of queries and keys have this epsilon, whatever the others' is.
    keys.expect(seen, _PLAIN_VISION | ({"layer_norm_eps": 1e-6} if seen.get("use_qk_norm") else {}))
    kind = config.get("model_type", NAME)
    seen = {"attention_bias": kind == QIANFAN} | keys.present(seen)
    own = {"class_token": True, "layer_scale": True, "last_norm": False, **keys.read(seen, _OWN)}
    ratio = config.get("downsample_ratio", 0.5)
    if not (folded := 1 / ratio).is_integer():
        raise ValueError(f"downsample_ratio: expected 1, 1/2, 1/4, …, got {ratio!r}")
    parts: dict[str, Any] = {"vision": vision_config(seen, _VISION, **own), "scale_factor": int(folded)}
    decoder = text_config({"model_type": "qwen2" if kind == NAME else "qwen3"} | text, {})
    return vlm_config(config, generation, 151_667, kind == NAME, decoder, family=kind, **parts)


def tensor_map(stored_names: Collection[str], config: VLMConfig | None = None) -> StoredTensorOf:
    """The place of each of our tensors, under the names of today or older ones."""
    older = any(name.startswith("vision_tower.") for name in stored_names)
    form = 2 if "mlp1.0.weight" in stored_names else int(older)
    fronts = {ours: theirs[form] for ours, theirs in _FRONTS.items()}
    flat = config.family == QIANFAN if config else "model.vision_tower.layers.0.lambda_1" in stored_names
    inside = _IN_QIANFAN if form == 2 else _INSIDE | ({".layers.": ".layers."} if flat else {})
    # Where transformers 5.23 renames the tower's layers, it renames those of the text as well.
    nested = any(name.startswith("language_model.model.encoder.") for name in stored_names)
    of_text = {".layers.": ".encoder.layers."} if nested else {}

    def stored_tensor(name: str) -> StoredTensor:
        theirs = rename(name, fronts, of_text if name.startswith("language_model.") else inside)
        return part_of_qkv(theirs) or StoredTensor(theirs, leading_axis=name in _LEADING)

    return stored_tensor


def build(config: VLMConfig) -> tuple[nn.Module, nn.Module, LanguageModel]:
    """Tower, projector and text."""
    text = LanguageModel(config.text, config.tie_word_embeddings)
    return VisionTransformer(config.vision), MLPProjector(config), text


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json in transformers' layout, in which nothing is left to a reader's defaults."""
    vision = {name: getattr(config.vision, name) for name in VISION_KEYS}
    vision |= {"model_type": f"{config.family}_vision", **keys.write(config.vision, _OWN), **_PLAIN_VISION}
    name = f"{_CLASSES[config.family]}ForConditionalGeneration"
    described = write_config(config, dtype, name, config.family, write_text(config, dtype), vision)
    sizes = {"downsample_ratio": 1 / config.scale_factor, "image_seq_length": positions(config)}
    return described | _PLAIN | sizes


def _read_gguf(tower: Tower) -> tuple[dict[str, Any], dict[str, Any]]:
    vision, side = tower.section(SIGLIP), tower.said["image_size"]
    vision["attention_bias"] = "v.blk.0.attn_q.bias" in tower.tensors
    vision["use_qk_norm"] = "v.blk.0.attn_q_norm.weight" in tower.tensors
    config = {"image_token_id": tower.id(IMAGE), "vision_config": vision}
    config["downsample_ratio"] = 1 / tower.said.get("projector.scale_factor", 2)
    most = tower.section({"preproc_min_tiles": "min_patches", "preproc_max_tiles": "max_patches"})
    return config, most | {
        "size": {"height": side, "width": side},
        "image_processor_type": PROCESSORS[NAME][1],
    }


# Leading axes of length one are kept there by the converter, and lost to a quantizer.
_WITH_AXIS = Join(lambda table: table.reshape(1, -1, table.shape[-1]))
GGUF = {
    NAME: Layout(
        NAME, {kind: kind for kind in TEXT_FAMILIES}, _read_gguf,
        fronts=lambda config: {
            "vision_model.class_token": "v.class_embd", "projector.norm.": "mm.model.mlp.0.",
            "projector.fc1.": "mm.model.mlp.1.", "projector.fc2.": "mm.model.mlp.3.",
        },
        inside={"vision_model": {f".layer_scale{at}": f".ls{at}.weight" for at in (1, 2)}},
        joins=lambda config: dict.fromkeys(_LEADING, _WITH_AXIS),
    )
}  # fmt: skip


# -------------------------------------------------------------------------------------------------- images
class InternVLImages(tiles.TiledImages):
    """The rule of transformers' InternVLProcessor. `settings` are those of preprocessor_config.json,
    `tile_positions` is its `image_seq_length`."""

    image_token = IMAGE
    flat = True
    placeholder = IMAGE  # what the saved chat template writes for an image

    def __init__(self, settings: Mapping[str, Any], tile_positions: int):
        self.settings = _DEFAULTS | {key: settings[key] for key in _DEFAULTS if settings.get(key) is not None}
        self.tile_positions = tile_positions
        with tiles.reading_settings(self.settings):
            self.tile_size: int = self.settings["size"]["height"]
            self._resample, self._values = tiles.pixel_rule(self.settings)
        most = self.settings["max_patches"]
        self._grids = TileGrids(self.settings["min_patches"], most, self.tile_size)
        self.longest_side = self.tile_size * most  # an image of one row

    def transformers(self, tokenizer: Any, chat_template: str) -> SavedProcessor:
        settings = {"image_seq_length": self.tile_positions, "image_processor": self.settings}
        roles, template = ROLES, chat_template
        if self.placeholder != IMAGE:  # Qianfan-OCR, which has no videos
            roles = {role: token for role, token in ROLES.items() if role != "video_token"}
            template = chat_template.replace(IMAGE, self.placeholder)
        return SavedProcessor(tokenizer, template, IMAGE, settings, self.tile_positions, roles)

    def within(self, positions: int) -> InternVLImages:
        most = self._tiles_within(positions)
        most = most - 1 if most > 2 else 1  # all of a cut image is one more
        counts = {"min_patches": min(self.settings["min_patches"], most), "max_patches": most}
        return InternVLImages(self.settings | counts, self.tile_positions)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return self._grids.nearest(width, height)

    def cut(self, image: Image.Image) -> tiles.Visual:
        side, planned = self.tile_size, self.plan(*image.size)
        grids = [planned.grid] if planned.grid == self.uncut else [planned.grid, self.uncut]
        sizes = [(columns * side, rows * side) for rows, columns in grids]
        parts = [tiles.tiles_of(image.resize(one, self._resample), side, self._values) for one in sizes]
        return replace(planned, parts=tiles.Parts.cat(parts))

    def prompt(self, visual: tiles.Visual, index: int, count: int) -> str:
        return START + IMAGE * visual.positions + END + ("\n" if self.string_content else "")


def image_rule(settings: Mapping[str, Any], config: VLMConfig) -> InternVLImages:
    """The rule of a model with these settings, where there is no folder."""
    return InternVLImages(settings, positions(config))


def open_images(opened: Opened) -> tuple[InternVLImages, AnyTokenizer, str | None]:
    """The image rule, tokenizer and chat template of a checkpoint."""
    tokenizer = open_with(opened, (START, END, IMAGE))
    tile_positions = positions(read_config(opened.config, {}, {}))
    images, template = InternVLImages(image_settings(opened), tile_positions), chat_template(opened)
    if opened.config.get("model_type") == QIANFAN and IMAGE not in (template or ""):
        images.placeholder = opened.json("processor_config.json").get("image_placeholder_token") or "<image>"
        template = template and template.replace(images.placeholder, IMAGE)
    images.string_content = IMAGE not in (template or IMAGE)  # a text model's: an image stands in the text
    return images, tokenizer, template


def their_inputs(ids: Tensor, pixels: Tensor, config: VLMConfig) -> dict[str, Tensor]:
    """transformers' arguments beside ids, of one image of pixels (1, 3, H, W) from -1 to 1."""
    return {"pixel_values": pixels}
