"""PaddleOCR-VL 0.9B, 1.5 and 1.6 as transformers has them (arXiv:2510.14528): a SigLIP tower over images of
their own shapes, with rotary places beside its learned ones, and Ernie 4.5, which is a Llama with Qwen-VL's
rotary places.

Config keys and tensor names are those of transformers 5.23 and of the model's own code, in which the text's
keys are at the top of config.json. mlx-vlm's folders have queries, keys and values of the tower in one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from data.chat import chat_template
from data.reading import Reading
from data.tokenizer import AnyTokenizer, image_settings, open_with
from families import keys, qwen_vl
from families.qwen_images import QwenImages
from families.qwen_vl import TURNS, build, grid, places, positions
from families.saving import SavedProcessor, write_config, write_text
from families.sections import text_config, vlm_config
from models.checkpoints.files import Opened
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, part_of_qkv, rename
from models.config import VLMConfig
from models.packed_vision_transformer import PackedVisionConfig

__all__ = ["build", "grid", "places", "positions"]

NAME = "paddleocr_vl"
TITLE = "transformers PaddleOCR-VL"
MODEL_TYPES = (NAME,)
BOX_FORMS: dict[str, str] = {}
GGUF: dict[str, Any] = {}  # llama.cpp's files have a SentencePiece tokenizer
# Its makers ask for one piece at a time, a cut of a page; tables are answered in OTSL.
_ASKED = {"table": "Table Recognition:", "formula": "Formula Recognition:", "chart": "Chart Recognition:"}
READING = {NAME: Reading("markdown", {"page": "OCR:", "ocr": "OCR:", **_ASKED})}
PROCESSORS = {NAME: ("PaddleOCRVLProcessor", "PaddleOCRVLImageProcessor")}
# The tower's pooling, and a table that its code has and does not use.
IGNORABLE = re.compile(
    r"(model\.)?visual\.vision_model\.(head\..*|embeddings\.(packing_position_embedding\.weight|position_ids))"
    r"|.*\.inv_freq|lm_head\.weight"
)
# Defaults are those of transformers' PaddleOCRTextConfig and PaddleOCRVisionConfig.
_TEXT: dict[str, Any] = {
    "vocab_size": 103_424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072, "hidden_act": "silu", "use_bias": False,
}  # fmt: skip
_VISION = keys.same(
    hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16, num_channels=3,
    patch_size=14,
) | {
    "merge_size": keys.Key("spatial_merge_size", 2),
    "norm_eps": keys.Key("layer_norm_eps", 1e-6),
}  # fmt: skip
_FIXED: dict[str, Any] = {
    "temporal_patch_size": 1, "table_fit": "edges", "last_norm": True, "merger_norm_eps": 1e-5,
}  # fmt: skip
_PLAIN_VISION = {"hidden_act": "gelu_pytorch_tanh"}
_MARKERS = {"video_token_id": 100_296, "vision_start_token_id": 101_305, "vision_end_token_id": 101_306}


# ---------------------------------------------------------------------------------------------- checkpoint
def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; of `stored` a head of its own counts."""
    nested, seen = keys.section(config, "text_config"), keys.section(config, "vision_config")
    text = _TEXT | (nested or {**config})
    rope = keys.section(text, "rope_scaling") or keys.section(text, "rope_parameters")
    plain, sections = qwen_vl.multimodal_rope(rope, [16, 24, 24])
    plain.setdefault("rope_theta", text.get("rope_theta") or 500_000.0)
    own: dict[str, Any] = {"model_type": "llama", "rope_scaling": None, "rope_parameters": plain}
    own |= dict.fromkeys(("attention_bias", "mlp_bias"), bool(text["use_bias"]))
    decoder = text_config(text | own, {}, rope_sections=sections)
    keys.expect(seen, _PLAIN_VISION)
    values = keys.read(seen, _VISION) | keys.read(keys.section(seen, "rope_parameters"), TURNS)
    side = (seen.get("image_size") or 384) // values["patch_size"]
    tower = PackedVisionConfig(**values, **_FIXED, table_side=side)
    # Either of two sections ties them. In the model's own layout, which has one, a stored head is another.
    alone, key = not nested and (not stored or "lm_head.weight" in stored), "tie_word_embeddings"
    tied = config.get(key, True) or (not alone and nested.get(key, True))
    parts: dict[str, Any] = {"family": NAME, "vision": tower, "scale_factor": 1}
    return vlm_config({**config, key: tied}, generation, 100_295, True, decoder, _MARKERS, **parts)


_NAMES = {
    "vision_model.layers.": "model.visual.vision_model.encoder.layers.",
    "vision_model.norm.": "model.visual.vision_model.post_layernorm.",
    "vision_model.": "model.visual.vision_model.embeddings.",
    "projector.merger.norm.": "model.projector.pre_norm.",
    "projector.merger.fc": "model.projector.linear_",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.language_model.",
}
_IN_TOWER = {".norm1.": ".layer_norm1.", ".norm2.": ".layer_norm2."}
# Modules of transformers' model -> names in files, of the model's own code and of transformers alike.
_IN_FILES = {
    "model.language_model.": "model.", "model.visual.": "visual.", "model.projector.": "mlp_AR.", "": "",
}  # fmt: skip
MLX = {
    "language_model.model.": "model.", "language_model.": "", "visual.projector.": "mlp_AR.",
    "visual.layers.": "visual.vision_model.encoder.layers.", "visual.": "visual.vision_model.", "": "",
}  # fmt: skip
saved_name = partial(rename, prefixes=_IN_FILES)


def tensor_map(stored_names: Collection[str], config: VLMConfig | None = None) -> StoredTensorOf:
    """The place of each of our tensors; without stored names, in transformers' model."""
    in_files = any(name.startswith("visual.") for name in stored_names)
    fused = any(".self_attn.qkv." in name for name in stored_names)

    def stored_tensor(name: str) -> StoredTensor:
        tower = name.startswith("vision_model.")
        theirs = rename(name, _NAMES, _IN_TOWER if tower else {})
        theirs = saved_name(theirs) if in_files else theirs
        if fused and tower and (part := part_of_qkv(theirs.replace(".self_attn.", ".attn."))):
            return replace(part, name=part.name.replace(".attn.", ".self_attn."))
        return StoredTensor(theirs)

    return stored_tensor


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json of transformers' PaddleOCRVLForConditionalGeneration."""
    text, side = write_text(config, dtype), config.vision.table_side * config.vision.patch_size
    rope = text["rope_parameters"] | {"mrope_section": list(config.text.rope_sections)}
    text |= {"model_type": f"{NAME}_text", "use_bias": text["mlp_bias"], "rope_parameters": rope}
    del text["rope_scaling"]  # which would take the place of what is above
    vision = {"model_type": f"{NAME}_vision", "image_size": side, **_PLAIN_VISION}
    vision |= {"architectures": ["PaddleOCRVisionModel"], **keys.write(config.vision, _VISION)}
    vision["rope_parameters"] = {"rope_type": "axial", **keys.write(config.vision, TURNS)}
    name = "PaddleOCRVLForConditionalGeneration"
    return write_config(config, dtype, name, NAME, text, vision, _MARKERS)


def their_inputs(ids: Tensor, pixels: Tensor, config: VLMConfig) -> dict[str, Tensor]:
    """transformers' arguments beside ids, of one image of pixels (1, 3, H, W) from -1 to 1."""
    side = config.vision.patch_size
    patches = pixels[0].unflatten(2, (-1, side)).unflatten(1, (-1, side)).permute(1, 3, 0, 2, 4)
    return qwen_vl.their_inputs(ids, pixels, config) | {"pixel_values": patches.flatten(0, 1)}


# -------------------------------------------------------------------------------------------------- images
class PaddleImages(QwenImages):
    """The rule of transformers' PaddleOCRVLImageProcessor: Qwen-VL's, of an image with sides of a position
    or more. `settings` are those of preprocessor_config.json."""

    image_token = "<|IMAGE_PLACEHOLDER|>"
    defaults: Mapping[str, Any] = {
        **QwenImages.defaults, "size": {"shortest_edge": 384**2, "longest_edge": 1536**2},
    }  # fmt: skip

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        super()._grid(width, height)  # refuses what is too oblong
        if height < self.factor:
            width, height = round(width * self.factor / height), self.factor
        if width < self.factor:
            width, height = self.factor, round(height * self.factor / width)
        return super()._grid(width, height)

    def transformers(self, tokenizer: Any, chat_template: str) -> SavedProcessor:
        # transformers' processor asks for this name, which would change what such a template writes.
        roles = {} if "image_token is defined" in chat_template else {"image_token": self.image_token}
        return replace(super().transformers(tokenizer, chat_template), roles=roles)


_is_news = lambda record: "mrope_section" not in record.getMessage()
image_rule = lambda settings, config: PaddleImages(settings)  # where there is no folder


def open_images(opened: Opened) -> tuple[PaddleImages, AnyTokenizer, str | None]:
    """The image rule, tokenizer and chat template of a checkpoint."""
    # transformers reads config.json with the tokenizer, and does not know a key of its rotary places.
    logging.getLogger("transformers.modeling_rope_utils").addFilter(_is_news)
    tokenizer = open_with(opened, (PaddleImages.image_token,))
    return PaddleImages(image_settings(opened)), tokenizer, chat_template(opened)
