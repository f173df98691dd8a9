"""Small random checkpoints of Qwen2.5-VL, Qwen3-VL, Qwen3.5 and PaddleOCR-VL, written by transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from models.config import VLMConfig
from models.packed_vision_transformer import patches_of
from recipes.shapes.tokenizer import build_tokenizer
from tests.rows import WORDS
from tests.tiny import randomize

CLASSES = {
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen3_5": Qwen3_5ForConditionalGeneration,
    "paddleocr_vl": PaddleOCRVLForConditionalGeneration,
}
KINDS = (*CLASSES,)
QWEN = KINDS[:3]  # which see videos and write boxes
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


# Images of a message stand before its texts.
PADDLE_TEMPLATE = """\
{%- if not cls_token is defined -%}{%- set cls_token = "<|begin_of_sentence|>" -%}{%- endif -%}
{{- cls_token -}}
{%- for message in messages -%}
    {{- "User: " if message.role == "user" else "Assistant:\\n" -}}
    {%- for part in message.content -%}
        {%- if part.type == "image" -%}{{ "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>" }}{%- endif -%}
    {%- endfor -%}
    {%- for part in message.content -%}
        {%- if part.type == "text" -%}{{ part.text }}{%- endif -%}
    {%- endfor -%}
    {{ "\\n" if message.role == "user" else "</s>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "Assistant:\\n" -}}{%- endif -%}
"""
PADDLE_SPECIAL = [
    "<|begin_of_sentence|>", "</s>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>", "<|video|>",
]  # fmt: skip


def tokenizer(special=SPECIAL):
    made = build_tokenizer(WORDS, vocab_size=300)
    made.add_special_tokens({"additional_special_tokens": special, "eos_token": special[1]})
    if special is PADDLE_SPECIAL:
        made.add_special_tokens({"cls_token": special[0]})
        made._set_model_specific_special_tokens(special_tokens={"image_token": special[4]})
    return made


def of_kind(kind: str):
    """The tokenizer of a kind."""
    return tokenizer(PADDLE_SPECIAL if kind == "paddleocr_vl" else SPECIAL)


def image_settings(kind: str, most: int = 100_000) -> dict[str, Any]:
    """preprocessor_config.json, with a budget of pixels."""
    paddle = kind == "paddleocr_vl"
    patch = 14 if kind == "qwen2_5_vl" or paddle else 16
    mean = 0.4 if kind == "qwen2_5_vl" else 0.5
    return {
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 1 if paddle else 2,
        "size": {"shortest_edge": 4 * patch**2, "longest_edge": most},
        "image_mean": [mean] * 3,
        "image_std": [0.5] * 3,
        "image_processor_type": "PaddleOCRVLImageProcessor" if paddle else "Qwen2VLImageProcessor",
    }


def hf_config(kind: str, seed: int = 0, more: dict | None = None):
    """A small config, as its seed has it; tests of many take many seeds. `more`: keys of Qwen3.5's text."""
    draw, words = random.Random(seed), of_kind(kind)
    head_dim = draw.choice([16, 32])
    of_axis = head_dim // 6
    rope = {"rope_type": "default", "rope_theta": 1e4}
    text = {
        "vocab_size": 352,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 64 // head_dim,
        "num_key_value_heads": draw.choice([1, 2]),
        "max_position_embeddings": 1024,
        "rope_parameters": rope | {"mrope_section": [head_dim // 2 - 2 * of_axis, of_axis, of_axis]},
    }
    vision = {"depth": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start"}
    names |= {"vision_end": "vision_end"}
    if kind == "paddleocr_vl":
        names = {"image": "IMAGE_PLACEHOLDER", "video": "video", "vision_start": "IMAGE_START"}
        names |= {"vision_end": "IMAGE_END"}
    ids = {f"{name}_token_id": words.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}
    if kind == "paddleocr_vl":
        tied = seed % 4 < 2
        text |= {"head_dim": head_dim, "use_bias": seed % 3 == 2, "tie_word_embeddings": tied}
        text |= {"eos_token_id": words.eos_token_id, "num_attention_heads": draw.choice([2, 4, 6])}
        vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        vision |= {"num_attention_heads": draw.choice([2, 4, 8]), "image_size": draw.randint(30, 180)}
        return PaddleOCRVLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, **ids)
    if kind == "qwen3_vl":
        text |= {"head_dim": head_dim}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}
        return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=seed % 4 < 2, **ids)
    if kind == "qwen3_5":
        factor = draw.choice([0.25, 0.5, 1.0])
        rotary = int(head_dim * factor) // 2
        sections = [rotary - 2 * (rotary // 3), rotary // 3, rotary // 3]
        text["rope_parameters"] |= {"mrope_section": sections, "partial_rotary_factor": factor}
        key_heads = draw.choice([1, 2])
        text |= {"head_dim": head_dim, "linear_num_key_heads": key_heads}
        text |= {"linear_num_value_heads": key_heads * draw.choice([1, 2])}
        text |= {"linear_key_head_dim": draw.choice([8, 16]), "linear_value_head_dim": draw.choice([8, 16])}
        # A head's result may be near 0, and the norm after it must not blow up what rounding made of it.
        text |= {"linear_conv_kernel_dim": draw.choice([2, 4]), "rms_norm_eps": 1e-3}
        vision |= {"num_position_embeddings": 64}
        text |= more or {}
        vision["out_hidden_size"] = text["hidden_size"]
        return Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=seed % 4 < 2, **ids)
    vision |= {"fullatt_block_indexes": [1, 3], "window_size": 56}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)


def save_hf(kind: str, folder: Path, seed: int = 0, more: dict | None = None, **saving) -> nn.Module:
    """transformers' model, saved with its tokenizer, template and image settings."""
    model = CLASSES[kind](hf_config(kind, seed, more)).eval()
    randomize(model, seed=seed)
    for module in model.modules():
        if isinstance(module, Qwen3_5RMSNorm):  # which is around 0
            module.weight.data -= 1
    model.save_pretrained(folder, **saving)
    of_kind(kind).save_pretrained(folder)
    template = PADDLE_TEMPLATE if kind == "paddleocr_vl" else TEMPLATE
    (folder / "chat_template.jinja").write_text(template)
    (folder / "preprocessor_config.json").write_text(json.dumps(image_settings(kind)))
    return model


def transformers_inputs(images: Sequence[Tensor], config: VLMConfig) -> dict[str, Tensor]:
    """Images (3, H, W) as transformers' processors give them."""
    side = config.vision.patch_size
    if config.family == "paddleocr_vl":  # row by row
        cut = [image.unflatten(2, (-1, side)).unflatten(1, (-1, side)) for image in images]
        patches = torch.cat([one.permute(1, 3, 0, 2, 4).flatten(0, 1) for one in cut])
    else:  # block by block, a still twice
        patches = torch.cat([patches_of(image, config.vision) for image in images]).view(-1, 3, 1, side**2)
        patches = patches.expand(-1, -1, 2, -1).flatten(1)
    grids = [[1, *(one // side for one in image.shape[1:])] for image in images]
    return {"pixel_values": patches, "image_grid_thw": torch.tensor(grids)}
