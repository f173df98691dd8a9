"""nanoVLM's own layout, in its three generations; tensor names are the same in all.

- today's (4e0c096): tiles and a global tile at placeholders; `global_image_token` among vlm_extra_tokens;
- in between: one square image at placeholders; vlm_extra_tokens without max_img_size;
- v0.1 (6ba9082): no vlm_extra_tokens; image features stand in front of the text.

The keys of config.json tell the generation. Unknown keys are ignored here, because nanoVLM itself dropped
keys that its own older configs still carry. Beyond lm_max_position_embeddings nanoVLM rescales its rotary
frequencies with the current length, which makes its cached tokens differ from recomputed ones; we keep the
plain frequencies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from models.checkpoints.hub import CheckpointError
from models.checkpoints.idefics3 import build, section, text_family
from models.checkpoints.weights import (
    FLOATS,
    Entry,
    StoredTensor,
    StoredTensorOf,
    export_tensors,
    read_tensor,
    rename,
)
from models.config import TextConfig, VisionConfig, VLMConfig

FAMILY = "nanoVLM (today's and v0.1)"
INV_FREQ = "decoder.rotary_embd.inv_freq"
HEAD, EMBEDDING = "decoder.head.weight", "decoder.token_embedding.weight"

# Keys of config.json in the order in which they are written -> (section, field, default) of ours, or what
# stands there in each checkpoint that we write.
_FIELDS: dict[str, Any] = {
    "vit_hidden_dim": ("vision", "hidden_size", None),
    "vit_inter_dim": ("vision", "intermediate_size", 3072),
    "vit_patch_size": ("vision", "patch_size", 16),
    "vit_img_size": ("vision", "image_size", 224),
    "vit_n_heads": ("vision", "num_attention_heads", 12),
    "vit_dropout": 0.0,
    "vit_n_blocks": ("vision", "num_hidden_layers", 12),
    "vit_ln_eps": ("vision", "layer_norm_eps", 1e-6),
    "vit_cls_flag": False,
    "lm_hidden_dim": ("text", "hidden_size", None),
    "lm_inter_dim": ("text", "intermediate_size", 1536),
    "lm_rms_eps": ("text", "rms_norm_eps", 1e-5),
    "lm_re_base": ("text", "rope_theta", 100_000),
    "lm_max_position_embeddings": ("text", "max_position_embeddings", 8192),
    "lm_vocab_size": ("text", "vocab_size", 49_152),
    "lm_n_heads": ("text", "num_attention_heads", 9),
    "lm_n_kv_heads": ("text", "num_key_value_heads", 3),
    "lm_dropout": 0.0,
    "lm_n_blocks": ("text", "num_hidden_layers", 30),
    "lm_attn_scaling": 1.0,
    "lm_max_length": None,  # the context
    "lm_use_tokens": False,
}
# Our tensor names -> theirs.
_VISION_BLOCK = {
    "layer_norm1.": "ln1.",
    "layer_norm2.": "ln2.",
    "self_attn.out_proj.": "attn.out_proj.",
    "mlp.": "mlp.",
}
_TEXT_BLOCK = {
    "self_attn.o_proj.": "attn.out_proj.",
    "self_attn.": "attn.",
    "mlp.": "mlp.",
    "input_layernorm.": "norm1.",
    "post_attention_layernorm.": "norm2.",
}
_OUTSIDE = {
    "vision_model.patch_embedding.": "vision_encoder.patch_embedding.conv.",
    "vision_model.post_layernorm.": "vision_encoder.layer_norm.",
    "projector.": "MP.",
    "language_model.lm_head.": "decoder.head.",
    "language_model.embed_tokens.": "decoder.token_embedding.",
    "language_model.": "decoder.",
}
_BLOCK = re.compile(r"(vision_model|language_model)\.layers\.(\d+)\.(.+)")


def recognises(config: Mapping) -> bool:
    return "model_type" not in config and "vit_hidden_dim" in config and "lm_hidden_dim" in config


def read_config(config: Mapping, generation: Mapping) -> VLMConfig:
    """nanoVLM's flat config.json -> VLMConfig. It names no stop tokens: those are the tokenizer's.

    Options that its published models never use are refused.
    """
    for name, plain in (("vit_cls_flag", False), ("lm_attn_scaling", 1.0)):
        if config.get(name, plain) != plain:
            raise CheckpointError(f"config.json: {name} must be {plain}, got {config[name]!r}")
    extra_tokens = section(config, "vlm_extra_tokens")
    placeholders = bool(extra_tokens)

    values: dict[str, dict] = {"vision": {}, "text": {}}
    for key, place in _FIELDS.items():
        if isinstance(place, tuple):
            values[place[0]][place[1]] = config.get(key, place[2])
    return build(
        VLMConfig,
        vision=build(VisionConfig, **values["vision"]),
        text=build(TextConfig, **values["text"]),
        scale_factor=config.get("mp_pixel_shuffle_factor", 2),
        image_token_id=_image_token_id(config, extra_tokens) if placeholders else None,
        tie_word_embeddings=bool(config.get("lm_tie_weights", True)),
        image_placement="placeholder" if placeholders else "prefix",
    )


def _image_token_id(config: Mapping, extra_tokens: Mapping) -> int:
    """The extra tokens take the ids after the base vocabulary, in the order of the config."""
    if "image_token" not in extra_tokens:
        raise CheckpointError("config.json: vlm_extra_tokens has no image_token")
    base, extra = config.get("lm_base_vocab_size"), config.get("extra_token_amount", len(extra_tokens))
    if base is None:
        base = _whole("lm_vocab_size", config.get("lm_vocab_size", 0)) - _whole("extra_token_amount", extra)
    return _whole("lm_base_vocab_size", base) + list(extra_tokens).index("image_token")


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"config.json: {name} must be a whole number, got {value!r}")
    return value


def tensor_map(stored_names: Collection[str]) -> StoredTensorOf:
    """Where each of our tensors lies. A tied checkpoint stores only the head."""
    head_only = EMBEDDING not in stored_names

    def stored_tensor(name: str) -> StoredTensor:
        if head_only and name == "language_model.embed_tokens.weight":
            return StoredTensor(HEAD)
        return _stored(name)

    return stored_tensor


def _stored(name: str) -> StoredTensor:
    block = _BLOCK.fullmatch(name)
    if block is None:
        if name == "vision_model.position_embedding.weight":
            return StoredTensor("vision_encoder.patch_embedding.position_embedding", leading_axis=True)
        return StoredTensor(rename(name, _OUTSIDE))
    tower, index, rest = block.groups()
    if tower == "language_model":
        return StoredTensor(f"decoder.blocks.{index}.{rename(rest, _TEXT_BLOCK)}")
    for part, projection in enumerate(("q_proj", "k_proj", "v_proj")):
        if rest.startswith(f"self_attn.{projection}."):  # rows: all of q, then all of k, then all of v
            leaf = rest.rsplit(".", 1)[1]
            return StoredTensor(f"vision_encoder.blocks.{index}.attn.qkv_proj.{leaf}", part, 3)
    return StoredTensor(f"vision_encoder.blocks.{index}.{rename(rest, _VISION_BLOCK)}")


def is_ignorable(name: str) -> bool:
    """inv_freq is read by `config_from_tensors`, and a tied head is the embedding."""
    return name in (INV_FREQ, HEAD)


def config_from_tensors(config: VLMConfig, entries: Mapping[str, Entry]) -> VLMConfig:
    """The config with the theta of the stored rotary frequencies, which override lm_re_base in nanoVLM."""
    if INV_FREQ not in entries or entries[INV_FREQ].dtype not in FLOATS:
        return config
    stored = read_tensor(entries[INV_FREQ])
    half = config.text.head_dim // 2
    if tuple(stored.shape) != (half,):
        raise CheckpointError(
            f"tensor {INV_FREQ} has shape {list(stored.shape)}, expected [{half}] from config.json"
        )
    tolerance = 8 * torch.finfo(stored.dtype).eps
    stored = stored.float()
    if torch.allclose(_frequencies(config.text), stored, rtol=tolerance, atol=0):
        return config
    usable = half > 1 and 0 < stored[-1] < math.inf
    theta = math.exp(-math.log(stored[-1]) * half / (half - 1)) if usable else 0.0
    for candidate in (float(round(theta)), theta):
        if 1e-38 < candidate < 1e38:
            text = replace(config.text, rope_theta=candidate)
            if torch.allclose(_frequencies(text), stored, rtol=tolerance, atol=0):
                return replace(config, text=text)
    raise CheckpointError(
        f"tensor {INV_FREQ} is no geometric series of rotary frequencies: expected theta^(-2i/d) for some "
        f"theta, got {[round(value, 6) for value in stored[:3].tolist()]} …"
    )


def _frequencies(text: TextConfig) -> Tensor:
    """Plain rotary frequencies, (D_h / 2,) float32: nanoVLM has no scaling."""
    exponent = torch.arange(0, text.head_dim, 2, dtype=torch.int64).float() / text.head_dim
    return 1.0 / (text.rope_theta**exponent)


def check_expressible(config: VLMConfig) -> None:
    """Refuse a model that nanoVLM's config has no fields for."""
    text, vision = config.text, config.vision
    problem = None
    if config.image_placement != "placeholder":
        problem = "image features in front of the text (v0.1) are not in today's layout"
    elif config.projector_bias:
        problem = "its projector has a bias, nanoVLM's has none"
    elif text.rope_scaling is not None:
        problem = f"nanoVLM has no {text.rope_scaling.rope_type} rotary scaling"
    elif text.attention_bias or text.mlp_bias:
        problem = "its language model has biases, nanoVLM's has none"
    elif text_family(text) != "llama":
        problem = "its language model norms queries and keys, nanoVLM's does not"
    elif text.head_dim * text.num_attention_heads != text.hidden_size:
        problem = (
            f"nanoVLM's heads are lm_hidden_dim / lm_n_heads wide, {text.hidden_size} / "
            f"{text.num_attention_heads}, these are {text.head_dim}"
        )
    elif vision.hidden_act != "gelu_pytorch_tanh":
        problem = f"nanoVLM's vision tower has the tanh GELU only, this one {vision.hidden_act}"
    elif vision.num_channels != 3:
        problem = f"nanoVLM's images have 3 channels, these {vision.num_channels}"
    if problem:
        raise CheckpointError(f"the model cannot be written in nanoVLM's layout: {problem}")


def write_config(config: VLMConfig, inputs: Mapping) -> dict:
    """config.json of today's nanoVLM, every field written out. `inputs` are the fields about tokens and
    images, which a model alone does not tell: `data.processor_conversion.as_nanovlm`."""
    check_expressible(config)
    written = {
        key: getattr(getattr(config, value[0]), value[1]) if isinstance(value, tuple) else value
        for key, value in _FIELDS.items()
    }
    return {
        **written,
        "lm_max_length": config.text.max_position_embeddings,
        "lm_tie_weights": config.tie_word_embeddings,
        "mp_pixel_shuffle_factor": config.scale_factor,
        "mp_image_token_length": config.tokens_per_tile,
        "vlm_load_backbone_weights": False,
        **inputs,
    }


def write_tensors(config: VLMConfig, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Our tensors under nanoVLM's names with the rotary buffer that its strict loading wants, and what the
    file's metadata says: a tied embedding is stored as the head, and named there.
    """
    tied = config.tie_word_embeddings
    stored = {HEAD} if tied else {HEAD, EMBEDDING}
    tensors = export_tensors(state, tensor_map(stored))
    tensors[INV_FREQ] = _frequencies(config.text)
    return tensors, {EMBEDDING: HEAD} if tied else {}
