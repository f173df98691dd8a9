"""Small random checkpoints of LFM2-VL, written by transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration

from tests import qwen_checkpoints
from tests.tiny import randomize

ROWS = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *ROWS,
]  # fmt: skip
tokenizer = partial(qwen_checkpoints.tokenizer, SPECIAL)
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<image>' }}{%- else %}{{- part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
SETTINGS = {
    "downsample_factor": 2,
    "encoder_patch_size": 4,
    "tile_size": 32,
    "max_tiles": 4,
    "min_image_tokens": 2,
    "max_image_tokens": 12,
    "image_processor_type": "Lfm2VlImageProcessor",
}


def hf_config(seed: int = 0) -> Lfm2VlConfig:
    """A small config, as its seed has it."""
    draw = random.Random(seed)
    layers = draw.randint(3, 5)
    text = {
        "model_type": "lfm2",
        "hidden_size": 64,
        "intermediate_size": 96,
        "block_multiple_of": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": draw.choice([2, 4]),
        "num_key_value_heads": draw.choice([1, 2]),
        "vocab_size": 352,
        "full_attn_idxs": sorted(draw.sample(range(layers), draw.randint(1, layers - 1))),
        "conv_L_cache": draw.choice([2, 3, 4]),
        "conv_bias": draw.random() < 0.5,
        "max_position_embeddings": 1024,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    vision = {"model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 48}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "num_patches": 36}
    return Lfm2VlConfig(
        text_config=text,
        vision_config=vision,
        projector_hidden_size=40,
        projector_use_layernorm=draw.random() < 0.5,
        image_token_id=tokenizer().convert_tokens_to_ids("<image>"),
    )


def save_hf(folder: Path, seed: int = 0) -> nn.Module:
    """transformers' model, saved with its tokenizer, template and image settings."""
    model = Lfm2VlForConditionalGeneration(hf_config(seed)).eval()
    randomize(model, seed=seed)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return model


def transformers_inputs(images: Sequence[Tensor], side: int) -> dict[str, Tensor]:
    """Images (3, H, W) as transformers' processor gives them: patches of so many pixels, padded."""
    shapes = [(image.shape[1] // side, image.shape[2] // side) for image in images]
    most = max(rows * columns for rows, columns in shapes)
    pixels = torch.zeros(len(images), most, 3 * side**2)
    mask = torch.zeros(len(images), most, dtype=torch.int64)
    for index, (image, (rows, columns)) in enumerate(zip(images, shapes)):
        cut = image.reshape(3, rows, side, columns, side).permute(1, 3, 2, 4, 0)
        pixels[index, : rows * columns] = cut.reshape(rows * columns, -1)
        mask[index, : rows * columns] = 1
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor(shapes)}
