"""LFM2-VL and LFM2.5-VL as transformers has them (arXiv:2511.23404): short convolutions between layers of
attention, a SigLIP2 tower for tiles and for a thumbnail of the image's own shape.

Config keys and tensor names are those of transformers 5.23; older checkpoints have `vision_model` in the
names of their tower.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from families import keys
from families.lfm2_images import image_rule, open_images
from families.qwen_vl import build, positions
from families.saving import write_config, write_text
from families.sections import text_config, vlm_config
from models.checkpoints import gguf_config
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, rename
from models.config import TextConfig, VLMConfig
from models.packed_vision_transformer import PackedVisionConfig

__all__ = ["build", "image_rule", "open_images", "positions"]

NAME = "lfm2_vl"
TITLE = "transformers LFM2-VL / LFM2.5-VL"
MODEL_TYPES = (NAME, "lfm2-vl")  # the older spelling
MLX = {"language_model.model.": "model.language_model.", "": "model."}
BOX_FORMS = dict.fromkeys(MODEL_TYPES, "lfm2.5-vl")
PROCESSORS = {NAME: ("Lfm2VlProcessor", "Lfm2VlImageProcessor")}
IGNORABLE = re.compile(r"(model\.)?vision_tower\.(vision_model\.)?head\..*|lm_head\.weight")  # its pooling
# Defaults are those of transformers' Lfm2Config and Siglip2VisionConfig.
_TEXT: dict[str, Any] = {
    "vocab_size": 65_536, "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128_000,
    "rope_theta": 1e6, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}  # fmt: skip
_OWN_TEXT = {
    "rms_norm_eps": keys.Key("norm_eps", 1e-5),
    "conv_kernel": keys.Key("conv_L_cache", 3),
    "conv_bias": keys.Key("conv_bias", False),
}
_KINDS = {"full_attention": "attention", "conv": "conv"}
_VISION = keys.same(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, num_channels=3,
    patch_size=16,
) | {
    "norm_eps": keys.Key("layer_norm_eps", 1e-6),
    "table_side": keys.squared("num_patches", 256),
}  # fmt: skip
_PROJECTOR = {
    "merge_size": keys.Key("downsample_factor", 2),
    "merger_width": keys.Key("projector_hidden_size", 2560),
    "merger_bias": keys.Key("projector_bias", True),
    "merger_norm": keys.Key(
        "projector_use_layernorm",
        True,
        lambda norm: "block" if norm else "none",
        lambda kind: kind == "block",
    ),
}
_PLAIN = {"projector_hidden_act": "gelu"}  # other values need code that is not here
_PLAIN_VISION = {"hidden_act": "gelu_pytorch_tanh"}


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing."""
    text, vision = keys.section(config, "text_config"), keys.section(config, "vision_config")
    keys.expect(config, _PLAIN)
    keys.expect(vision, _PLAIN_VISION)
    tower = PackedVisionConfig(
        **keys.read(vision, _VISION),
        **keys.read(config, _PROJECTOR),
        temporal_patch_size=1,
        channels_last=True,
        table_fit="picture",
        rotary=False,
        last_norm=True,
        merger_norm_eps=1e-5,
    )
    parts: dict[str, Any] = {"family": NAME, "vision": tower, "scale_factor": 1}
    tied = config.get("tie_embedding", True)
    return vlm_config(config, generation, 396, tied, _read_text(text), **parts)


def _read_text(stored: Mapping) -> TextConfig:
    values = _TEXT | keys.present(stored)
    keys.expect(values, {"model_type": "lfm2"})
    given = "block_ff_dim" if "block_ff_dim" in values else "intermediate_size"
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size", given)
    layers, heads, width, inner = (values[name] for name in sizes)
    if values["block_auto_adjust_ff_dim"]:
        multiple, by = values["block_multiple_of"], values["block_ffn_dim_multiplier"]
        inner = multiple * math.ceil(int(by * int(2 * inner / 3)) / multiple)
    full = values.get("full_attn_idxs", range(layers))
    default = ["full_attention" if layer in full else "conv" for layer in range(layers)]
    own = {"model_type": "qwen3", "attention_bias": False, "intermediate_size": inner, "layer_types": None}
    own |= {"head_dim": width // heads}
    return text_config(
        values | own,
        {},
        layer_types=tuple(keys.layer_kinds(values, _KINDS, default)),
        **keys.read(values, _OWN_TEXT),
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
    """The place of each of our tensors."""
    nested = any(".vision_tower.vision_model." in name for name in stored_names)

    def stored_tensor(name: str) -> StoredTensor:
        theirs = rename(name, _NAMES, _IN_TOWER if name.startswith("vision_model.") else _IN_TEXT)
        return StoredTensor(
            theirs.replace("vision_tower.", "vision_tower.vision_model.") if nested else theirs
        )

    return stored_tensor


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json of transformers' Lfm2VlForConditionalGeneration."""
    names = {ours: theirs for theirs, ours in _KINDS.items()}
    text = write_text(config, dtype) | {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": [names[kind] for kind in config.text.layer_types],
        "block_auto_adjust_ff_dim": False,
        **keys.write(config.text, _OWN_TEXT),
    }
    vision = {
        "model_type": "siglip2_vision_model",
        "vision_use_head": False,
        **_PLAIN_VISION,
        **keys.write(config.vision, _VISION),
    }
    more: dict[str, Any] = {**_PLAIN, **keys.write(config.vision, _PROJECTOR)}
    return write_config(config, dtype, "Lfm2VlForConditionalGeneration", NAME, text, vision, **more)


_TILES = {
    "preproc_image_size": "tile_size",
    "preproc_min_tiles": "min_tiles",
    "preproc_max_tiles": "max_tiles",
}
_LIMITS = {"image_min_pixels": "min_image_tokens", "image_max_pixels": "max_image_tokens"}


def _read_gguf(tower: gguf_config.Tower) -> tuple[dict[str, Any], dict[str, Any]]:
    said, vision = tower.said, tower.section(gguf_config.SIGLIP)
    scale = said.get("projector.scale_factor", 2)
    vision["num_patches"] = gguf_config.rows(tower.tensors, "v.position_embd.weight")
    config = {
        "image_token_id": tower.id("<image>"),
        "downsample_factor": scale,
        "projector_hidden_size": gguf_config.rows(tower.tensors, "mm.1.weight"),
        "projector_bias": "mm.1.bias" in tower.tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in tower.tensors,
        "vision_config": vision,
    }
    images = {"downsample_factor": scale, "encoder_patch_size": vision.get("patch_size")}
    images |= tower.section(_TILES)
    for key, name in _LIMITS.items():
        if key in said:
            images[name] = said[key] // (scale * vision["patch_size"]) ** 2
    return config, images | {"image_processor_type": "Lfm2VlImageProcessor"}


def _read_gguf_text(config: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without key heads are convolutions."""
    heads = config["num_key_value_heads"]  # of each layer
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if one else "conv" for one in heads],
        "norm_eps": config.get("rms_norm_eps"),
        "block_auto_adjust_ff_dim": False,
    }


GGUF = {
    "lfm2": gguf_config.Layout(
        NAME, {"lfm2": "lfm2"}, _read_gguf, _read_gguf_text, keys={"shortconv.l_cache": "conv_L_cache"},
        fronts=lambda config: {
            "projector.merger.norm.": "mm.input_norm.", "projector.merger.fc": "mm.",
            "language_model.norm.": "token_embd_norm.",
        },
        inside={"language_model": {".conv.": ".shortconv.", ".shortconv.weight": ".shortconv.conv.weight"}},
        joins=lambda config: {
            "vision_model.patch_embedding.weight": gguf_config.COLOURS_LAST,
            ".conv.weight": gguf_config.Join(lambda kernel: kernel[:, None]),  # (D, K) there
        },
    )
}  # fmt: skip


def their_inputs(ids: Tensor, pixels: Tensor, config: VLMConfig) -> dict[str, Tensor]:
    """transformers' arguments beside ids, of one image of pixels (1, 3, H, W) from -1 to 1."""
    rows, columns = (side // config.vision.patch_size for side in pixels.shape[2:])
    cut = pixels[0].unflatten(2, (columns, -1)).unflatten(1, (rows, -1))  # patches row by row, colours last
    return {
        "pixel_values": cut.permute(1, 3, 2, 4, 0).reshape(1, rows * columns, -1),
        "spatial_shapes": torch.tensor([[rows, columns]]),
        "pixel_attention_mask": torch.ones(1, rows * columns, dtype=torch.long),
    }
