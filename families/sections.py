"""The sections of config.json that several families share: text models of Llama, Qwen2 and Qwen3, rotary
scaling, token ids, a SigLIP-shaped vision section. `saving.py` writes them by the same tables.

Keys are those of transformers 5.23 and of older checkpoints on the Hub; absent ones take the defaults of
transformers' LlamaConfig, Qwen2Config and Qwen3Config.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from families.keys import expect, first_id, present, section, token_ids
from models.config import RopeScaling, TextConfig, VisionConfig, VLMConfig

# The fields of a TextConfig that a config.json has keys for. What else there is belongs to a family's code.
TEXT_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "rope_scaling", "hidden_act", "attention_bias", "mlp_bias",
)  # fmt: skip
# Those of a VisionConfig that a SigLIP-shaped section has; the others say that a tower is none of SigLIP's.
VISION_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels",
    "image_size", "patch_size", "layer_norm_eps", "hidden_act",
)  # fmt: skip


class TextFamily(NamedTuple):
    """A family of text models: its causal class in transformers, the fields of TextConfig that its code
    fixes whatever config.json says, and the defaults of its config where they are not Llama's."""

    architecture: str
    fixed: Mapping[str, bool]
    defaults: Mapping[str, int] = {}


_QWEN2 = {
    "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}  # fmt: skip
# By the model_type of a text model's config. Llama comes first: of those that fit the first is written.
TEXT_FAMILIES = {
    "llama": TextFamily("LlamaForCausalLM", {"qk_norm": False, "qkv_bias_only": False}),
    "qwen2": TextFamily(
        "Qwen2ForCausalLM",
        {"qk_norm": False, "qkv_bias_only": True, "attention_bias": True, "mlp_bias": False},
        _QWEN2,
    ),
    "qwen3": TextFamily(
        "Qwen3ForCausalLM",
        {"qk_norm": True, "qkv_bias_only": False, "mlp_bias": False},
        _QWEN2 | {"head_dim": 128},
    ),
}
# Kinds of rotary scaling -> the fields of RopeScaling that they have.
SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def vision_config(stored: Mapping, defaults: Mapping[str, Any], **fixed) -> VisionConfig:
    """A SigLIP-shaped vision section: our field names are the Hub's. `fixed` says how a tower is none."""
    values = {**defaults, **present({name: stored.get(name) for name in VISION_KEYS})}
    for name in ("image_size", "patch_size"):
        if isinstance(size := values.get(name), list) and len({*size}) == 1:
            values[name] = size[0]  # [s, s] is a square
    return VisionConfig(**values, **fixed)


def text_config(stored: Mapping, defaults: Mapping[str, Any], **fixed: Any) -> TextConfig:
    """The text section of one of TEXT_FAMILIES. `defaults` are for keys that it lacks."""
    if (kind := stored.get("model_type", "llama")) not in TEXT_FAMILIES:
        raise ValueError(f"model_type of the text model: expected {', '.join(TEXT_FAMILIES)}, got {kind!r}")
    kinds, windows = stored.get("layer_types"), stored.get("use_sliding_window")
    if isinstance(kinds, list):  # as in transformers, it has the whole say
        windows = {*kinds} != {"full_attention"}
    if windows and kind != "llama":
        raise ValueError(
            "sliding-window attention (use_sliding_window, layer_types) is not supported, "
            "expected full attention in every layer"
        )
    family = TEXT_FAMILIES[kind]
    # What is null takes TextConfig's default: as many key heads as heads, for one.
    values = {name: value for name, value in {**family.defaults, **defaults}.items() if name not in stored}
    values |= present({name: stored.get(name) for name in TEXT_KEYS})
    rope = _read_rope(stored, values.get("max_position_embeddings", TextConfig.max_position_embeddings))
    return TextConfig(**{**values, **family.fixed, **fixed, **rope})


def _read_rope(stored: Mapping, max_positions: int) -> dict[str, Any]:
    """rope_theta and rope_scaling, by transformers' rules (`convert_rope_params_to_dict` of v5).

    A rope_scaling that is not null replaces rope_parameters; the theta inside whichever of them stands wins
    over the one beside it. Llama-3 scaling without an original length takes the maximum length.
    """
    rope = section(stored, "rope_scaling") or section(stored, "rope_parameters")
    thetas = rope.get("rope_theta"), stored.get("rope_theta"), TextConfig.rope_theta
    theta = next(one for one in thetas if one is not None)
    expect({**stored, **rope}, {"partial_rotary_factor": 1})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("default", "dynamic"):  # which sets in beyond max_position_embeddings, where no prompt goes
        return {"rope_theta": theta, "rope_scaling": None}
    known = {"original_max_position_embeddings": max_positions} | present(rope)
    if kind not in SCALINGS or (missing := [name for name in SCALINGS[kind] if name not in known]):
        lacks = f"{kind} without {', '.join(missing)}" if kind in SCALINGS else repr(kind)
        raise ValueError(f"rotary scaling: expected default, dynamic, {' or '.join(SCALINGS)}, got {lacks}")
    values = {name: known[name] for name in SCALINGS[kind]}
    return {"rope_theta": theta, "rope_scaling": RopeScaling(rope_type=kind, **values)}


def vlm_config(
    config: Mapping,
    generation: Mapping,
    image_token_id: int,
    tied: bool,
    text: TextConfig,
    markers: Mapping[str, int] = MappingProxyType({}),
    **parts: Any,
) -> VLMConfig:
    """From config.json, with the keys that all classes of transformers have, and generation_config.json;
    `image_token_id` and `tied` are for a config.json that does not say. `markers` are keys of further ids,
    with their defaults.

    The ids that end an answer are all that config.json, its text_config and generation_config.json name;
    `models.checkpoints.load` adds the tokenizer's own.
    """
    of_text = section(config, "text_config")

    def first(name: str, *sections: Mapping) -> int | None:
        return first_id(*(section.get(name) for section in sections), vocab_size=text.vocab_size)

    stops = [section.get("eos_token_id") for section in (generation, config, of_text)]
    named = {**markers, **config}
    return VLMConfig(
        text=text,
        image_token_id=config.get("image_token_id", image_token_id),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", tied)),
        bos_token_id=first("bos_token_id", generation, config, of_text, {"bos_token_id": 1}),
        eos_token_ids=token_ids(*stops, vocab_size=text.vocab_size),
        pad_token_id=first("pad_token_id", generation, of_text, config),
        marker_token_ids=tuple(first(name, named) for name in markers),
        **parts,
    )
