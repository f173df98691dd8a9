"""Small random checkpoints of Gemma 4, written by transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

from models.gemma4_vision import Gemma4VisionConfig
from models.packed_vision_transformer import block_order, patches_of
from recipes.shapes.tokenizer import build_tokenizer
from tests.rows import WORDS
from tests.tiny import randomize

SPECIAL = ["<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>", "<|channel>", "<channel|>"]
SPECIAL += [
    f"<{mark}>" for name in ("tool", "tool_call", "tool_response") for mark in (f"|{name}", f"{name}|")
]
SPECIAL += ['<|"|>']
TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '\\n\\n<|image|>\\n\\n' }}
{%- else %}{{- part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{{- '<turn|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|turn>model\\n' }}{% endif %}
"""


def tokenizer():
    made = build_tokenizer(WORDS, vocab_size=300)
    made.add_special_tokens({"additional_special_tokens": SPECIAL, "eos_token": "<turn|>"})
    return made


def hf_config(seed: int = 0) -> Gemma4Config:
    """A small config, as its seed has it; tests of many take many seeds."""
    draw, words = random.Random(seed), tokenizer()
    kinds = [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ]
    text: dict[str, Any] = {
        "vocab_size": 352, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": len(kinds),
        "num_attention_heads": 4, "num_key_value_heads": draw.choice([1, 2]), "head_dim": 16,
        "global_head_dim": draw.choice([16, 32]), "max_position_embeddings": 1024, "layer_types": kinds,
        "sliding_window": draw.choice([8, 24]), "num_kv_shared_layers": draw.choice([0, 3]),
        "use_double_wide_mlp": draw.choice([False, True]), "vocab_size_per_layer_input": 352,
        "hidden_size_per_layer_input": draw.choice([0, 8]), "pad_token_id": 0,
        "final_logit_softcapping": draw.choice([None, 30.0]),
    }  # fmt: skip
    if text["num_kv_shared_layers"]:  # transformers' generate cannot do without
        text["hidden_size_per_layer_input"] = 8
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "position_embedding_size": 128,
        "use_clipped_linears": draw.choice([False, True]), "standardize": draw.choice([False, True]),
    }  # fmt: skip
    names = {"image": "<|image|>", "boi": "<|image>", "eoi": "<image|>"}
    ids = {f"{name}_token_id": words.convert_tokens_to_ids(token) for name, token in names.items()}
    return Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **ids)


def image_settings(tokens: int = 70) -> dict[str, Any]:
    settings = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 3}
    return settings | {"max_soft_tokens": tokens, "do_normalize": False}


def save_hf(folder: Path, seed: int = 0, **saving) -> nn.Module:
    """transformers' model, saved with its tokenizer, template and image settings."""
    model = Gemma4ForConditionalGeneration(hf_config(seed)).eval()
    randomize(model, seed=seed)
    for name, norm in model.named_parameters():
        if name.endswith("q_norm.weight"):  # scores are not divided by the width of a head
            norm.data *= 0.3
    for name, buffer in model.named_buffers():
        if name.endswith(("input_max", "output_max")):
            buffer.fill_(3.0)
        elif name.endswith(("input_min", "output_min")):
            buffer.fill_(-2.5)
        elif name.endswith(("layer_scalar", "std_bias", "std_scale")):
            buffer.fill_(0.8)
    model.save_pretrained(folder, **saving)
    tokenizer().save_pretrained(folder)
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said |= {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(image_settings()))
    return model


def transformers_inputs(images: list[Tensor], vision: Gemma4VisionConfig) -> dict[str, Tensor]:
    """What its model takes of images (3, H, W): patches, padded to the longest, and their places."""
    if not len(images):
        return {}
    grids = [tuple(side // vision.patch_size for side in image.shape[1:]) for image in images]
    places = [block_order(grid, vision.merge_size).flip(1) for grid in grids]
    padded = pad_sequence(places, batch_first=True, padding_value=-1)
    pixels = pad_sequence([patches_of(image, vision) for image in images], batch_first=True)
    return {"pixel_values": pixels, "image_position_ids": padded}
