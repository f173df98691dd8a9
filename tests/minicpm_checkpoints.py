"""Small random checkpoints of MiniCPM-V 4.6 and MiniCPM-OCR, written by transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MiniCPMOcrConfig,
    MiniCPMOcrForConditionalGeneration,
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from families.minicpm_v import ROLES
from tests import qwen_checkpoints
from tests.tiny import randomize

CLASSES = {
    "minicpmv4_6": (MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration),
    "minicpm_ocr": (MiniCPMOcrConfig, MiniCPMOcrForConditionalGeneration),
}
PATCH = 4
tokenizer = partial(qwen_checkpoints.tokenizer, ["<|im_start|>", "<|im_end|>", *ROLES.values()])
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if not loop.first %}{{- '\\n' }}{% endif %}
{%- if part.type == 'image' %}{{- '<|image_pad|>' }}{%- else %}{{- part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def hf_config(seed: int = 0, kind: str = "minicpmv4_6") -> Any:
    """A small config, as its seed has it."""
    draw, rounds = random.Random(seed), 1 + (seed % 3 == 2)
    heads = draw.choice([2, 3, 4])
    layers = draw.randint(2, 4)
    vision = {
        "hidden_size": 8 * heads,
        "intermediate_size": draw.choice([40, 52]),
        "num_hidden_layers": layers,
    }
    vision |= {
        "num_attention_heads": heads,
        "image_size": PATCH * draw.choice([5, 6, 9]),
        "patch_size": PATCH,
    }
    text = qwen_checkpoints.hf_config("qwen3_5", seed).text_config.to_dict()
    text["rope_parameters"].pop("mrope_section")
    return CLASSES[kind][0](
        text_config=text,
        vision_config=vision,
        insert_layer_id=draw.randrange(layers),
        # Two rounds make as many positions of a part without the window merger as one does with it.
        downsample_mode="4x" if rounds == 2 or seed % 4 == 0 else "16x",
        merger_times=rounds,
        tie_word_embeddings=seed % 2 == 0,
        image_token_id=tokenizer().convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer().convert_tokens_to_ids("<|video_pad|>"),
    )


def image_settings(config: Any) -> dict[str, Any]:
    """preprocessor_config.json of the images that this model takes."""
    folded = config.merger_times + (config.downsample_mode == "16x")
    return {
        "scale_resolution": 40,
        "max_slice_nums": 4,
        "patch_size": PATCH,
        "downsample_mode": {1: "4x", 2: "16x"}[folded],
    }


def save_hf(folder: Path, seed: int = 0, kind: str = "minicpmv4_6") -> nn.Module:
    """transformers' model, saved with its tokenizer, template and image settings."""
    config = hf_config(seed, kind)
    model = CLASSES[kind][1](config).eval()
    randomize(model, seed=seed)
    for module in model.modules():
        if isinstance(module, Qwen3_5RMSNorm):  # which is around 0
            module.weight.data -= 1
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(image_settings(config)))
    return model


def transformers_inputs(images: Sequence[Tensor], side: int = PATCH) -> dict[str, Tensor]:
    """Images (3, H, W) as transformers' processor gives them: patches row by row, side by side."""
    cut = [image.unflatten(2, (-1, side)).unflatten(1, (-1, side)) for image in images]
    sizes = [(one.shape[1], one.shape[3]) for one in cut]
    pixels = torch.cat([one.transpose(1, 2).reshape(3, side, -1) for one in cut], 2)
    return {"pixel_values": pixels[None], "target_sizes": torch.tensor(sizes)}
