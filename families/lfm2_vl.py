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
from typing import Any

from torch import nn

from families import saving
from families import text as shared
from families.lfm2_images import open_images
from families.qwen_vl import positions
from families.text import checked, expect, layer_kinds, number, numbers, section
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, rename
from models.config import PackedVisionConfig, TextConfig, VLMConfig
from models.language_model import LanguageModel
from models.packed_vision_transformer import PackedVisionTransformer, PatchMergers

__all__ = ["open_images", "positions"]

NAME = "lfm2_vl"
TITLE = "transformers LFM2-VL / LFM2.5-VL"
BOX_FORMS = {kind: "lfm2.5-vl" for kind in ("lfm2_vl", "lfm2-vl")}
IGNORABLE = re.compile(r"(model\.)?vision_tower\.(vision_model\.)?head\..*|lm_head\.weight")  # its pooling
# Defaults of transformers' Lfm2Config and Siglip2VisionConfig.
_TEXT: dict[str, Any] = {
    "vocab_size": 65_536, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5,
    "rope_theta": 1e6, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}  # fmt: skip
_KINDS = {"full_attention": "attention", "conv": "conv"}
_VISION = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_channels": 3, "patch_size": 16,
}  # fmt: skip
_PLAIN = {"projector_hidden_act": "gelu"}  # whose other values would need code that is not here
_PLAIN_VISION = {"hidden_act": "gelu_pytorch_tanh"}


def recognises(config: Mapping) -> bool:
    return config.get("model_type") in (NAME, "lfm2-vl")  # the older spelling


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
        table_side=math.isqrt(number({"num_patches": 256} | known, "num_patches", 1, 4096**2)),
        table_antialias=True,
        rotary=False,
        last_norm=True,
        merger_norm="block" if config.get("projector_use_layernorm", True) else "none",
        merger_norm_eps=1e-5,
        merger_width=config.get("projector_hidden_size", 2560),
        merger_bias=bool(config.get("projector_bias", True)),
    )
    parts = {"family": NAME, "vision": tower, "scale_factor": 1}
    return shared.vlm_config(config, generation, 396, config.get("tie_embedding", True), decoder, **parts)


def _read_text(stored: Mapping) -> TextConfig:
    values: dict[str, Any] = _TEXT | {name: value for name, value in stored.items() if value is not None}
    expect(values, {"model_type": "lfm2"})
    given = "block_ff_dim" if "block_ff_dim" in values else "intermediate_size"
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size", given)
    layers, heads, width, inner = (number(values, name) for name in sizes)
    if values["block_auto_adjust_ff_dim"]:
        by = number(values, "block_ffn_dim_multiplier", 0, 1000, whole=False)
        multiple = number(values, "block_multiple_of")
        inner = multiple * math.ceil(int(by * int(2 * inner / 3)) / multiple)
    full = {*numbers({"full_attn_idxs": [*range(layers)]} | values, "full_attn_idxs")}
    default = ["full_attention" if layer in full else "conv" for layer in range(layers)]
    own = {"model_type": "qwen3", "attention_bias": False, "intermediate_size": inner, "layer_types": None}
    own |= {"head_dim": width // heads}
    return shared.text_config(
        values | own,
        {},
        rms_norm_eps=values["norm_eps"],
        layer_types=tuple(layer_kinds(values, _KINDS, default)),
        conv_kernel=values.get("conv_L_cache", 3),
        conv_bias=bool(values.get("conv_bias", False)),
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


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json of transformers' Lfm2VlForConditionalGeneration."""
    text, vision, names = config.text, config.vision, {ours: theirs for theirs, ours in _KINDS.items()}
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
        "layer_types": [names[kind] for kind in text.layer_types],
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
