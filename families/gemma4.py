"""Gemma 4's small models (E2B, E4B) as transformers has them: pictures and text, without the audio tower.

Config keys and tensor names are those of transformers 5.23.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from families import text as shared
from families.gemma4_images import open_images
from families.qwen_vl import positions
from families.text import both_dtypes, checked, expect, layer_kinds, number, section, vlm_config, write_ids
from models.checkpoints.files import CheckpointError
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf, rename
from models.config import Gemma4TextConfig, Gemma4VisionConfig, VLMConfig
from models.gemma4_text import Gemma4LanguageModel
from models.gemma4_vision import Gemma4Projector, Gemma4VisionTransformer

__all__ = ["open_images", "positions"]

NAME = "gemma4"
TITLE = "transformers Gemma 4 (E2B, E4B)"
BOX_FORMS: dict[str, str] = {}
# What hears, and keys of layers that read those of others.
IGNORABLE = re.compile(
    r"model\.(audio_tower|embed_audio)\..*|lm_head\.weight"
    r"|model\.language_model\.layers\.\d+\.self_attn\.(k|v)_(proj|norm)\..*"
)
_KINDS = {"sliding_attention": "sliding", "full_attention": "full"}
# Defaults of transformers' Gemma4TextConfig and Gemma4VisionConfig, and whose other values are not here.
_TEXT: dict[str, Any] = {
    "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072, "sliding_window": 512,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
    "patch_size": 16,
}  # fmt: skip
_VISION_NAMES = {
    "norm_eps": ("rms_norm_eps", 1e-6),
    "merge_size": ("pooling_kernel_size", 3),
    "table_side": ("position_embedding_size", 10_240),
    "clips": ("use_clipped_linears", False),
    "standardizes": ("standardize", False),
}
_MARKERS = {"video_token_id": 258_884, "audio_token_id": 258_881}  # where a config.json has none
_PLAIN_TEXT = {"attention_k_eq_v": False, "enable_moe_block": False, "attention_bias": False}
_PLAIN_VISION = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def recognises(config: Mapping) -> bool:
    return config.get("model_type") == NAME


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing."""
    text, vision = section(config, "text_config"), section(config, "vision_config")
    if not vision:
        raise CheckpointError("config.json: expected a vision_config, got none: the model does not see")
    expect(vision, _PLAIN_VISION)
    known = _VISION | {name: value for name, value in vision.items() if value is not None}
    heads, width = number(known, "num_attention_heads"), number(known, "hidden_size")
    expect(vision, {"head_dim": width // heads, "num_key_value_heads": heads})
    tower = checked(
        Gemma4VisionConfig,
        **{name: known[name] for name in _VISION},
        **{ours: known.get(theirs, default) for ours, (theirs, default) in _VISION_NAMES.items()},
        rope_theta=section(known, "rope_parameters").get("rope_theta", 100.0),
    )
    decoder = _read_text({"hidden_activation": Gemma4TextConfig.act} | text)
    named = {**_MARKERS, **config}
    markers = (shared.first_id(named[name], vocab_size=decoder.vocab_size) for name in _MARKERS)
    parts = {"family": NAME, "vision": tower, "scale_factor": 1, "marker_token_ids": tuple(markers)}
    return vlm_config(config, generation, 258_880, True, decoder, **parts)


def _read_text(stored: dict) -> Gemma4TextConfig:
    expect(stored, {**_PLAIN_TEXT, "hidden_activation": Gemma4TextConfig.act})
    if (looks := stored.get("use_bidirectional_attention")) is not None:
        raise CheckpointError(
            f"config.json: use_bidirectional_attention: expected null, as of E2B and E4B, got {looks!r}"
        )
    known = _TEXT | {name: value for name, value in stored.items() if value is not None}
    layers = number(known, "num_hidden_layers", 1, 1_024)
    shared = number({"num_kv_shared_layers": 0} | known, "num_kv_shared_layers", 0, layers - 1)
    default = ["full_attention" if (at + 1) % 6 == 0 else "sliding_attention" for at in range(layers)]
    kinds = layer_kinds(known, _KINDS, default)
    kinds[-1] = "full"  # as transformers has it
    own = len(kinds) - shared
    if not {*kinds[own:]} <= {*kinds[:own]}:
        raise CheckpointError("config.json: num_kv_shared_layers: those layers have no keys to read")
    kinds[own:] = [f"{kind} shared" for kind in kinds[own:]]
    ropes = section(known, "rope_parameters")
    near, far = section(ropes, "sliding_attention"), section(ropes, "full_attention")
    expect(near, {"rope_type": "default"})
    expect(far, {"rope_type": "proportional"})
    width = {"hidden_size_per_layer_input": 256} | known
    return checked(
        Gemma4TextConfig,
        **{name: known[name] for name in _TEXT},
        hidden_act=known["hidden_activation"],
        layer_types=tuple(kinds),
        full_head_dim=_full_head_dim(known, kinds),
        rope_theta=near.get("rope_theta", 1e4),
        full_rope_theta=far.get("rope_theta", 1e6),
        full_rotary_factor=far.get("partial_rotary_factor", 0.25),
        shared_mlp_factor=2 if known.get("use_double_wide_mlp") else 1,
        per_layer_width=number(width, "hidden_size_per_layer_input", 0, 4_096),
        per_layer_count=layers,
        per_layer_vocab=known.get("vocab_size_per_layer_input", 262_144),
        logit_cap=known.get("final_logit_softcapping"),
        placeholder_id=number({"pad_token_id": 0} | known, "pad_token_id", 0, 4_194_304),
        qk_norm=True,
    )


def _full_head_dim(known: dict, kinds: list[str]) -> int:
    """What published checkpoints say once, transformers 5.23 writes for each layer that differs."""
    if "per_layer_config" not in known:
        return known.get("global_head_dim", 512)
    of_layers = section(known, "per_layer_config")
    found = [section(of_layers, str(at)).get("head_dim") for at, kind in enumerate(kinds) if "full" in kind]
    return next((dim for dim in found if dim is not None), known["head_dim"])


_NAMES = {
    "vision_model.input_proj.": "model.vision_tower.patch_embedder.input_proj.",
    "vision_model.position_embedding_table": "model.vision_tower.patch_embedder.position_embedding_table",
    "vision_model.layers.": "model.vision_tower.encoder.layers.",
    "vision_model.": "model.vision_tower.",
    "projector.": "model.embed_vision.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.language_model.",
}
_IN_TOWER = re.compile(r"(layers\.\d+\.)([qkvo]_proj|[qk]_norm|gate_proj|up_proj|down_proj)\.")


def tensor_map(stored_names: Collection[str], config: VLMConfig | None = None) -> StoredTensorOf:
    """Where each of our tensors lies."""

    def stored_tensor(name: str) -> StoredTensor:
        theirs = rename(name, _NAMES)
        if name.startswith("vision_model."):
            part = "self_attn" if re.search(r"\.[qkvo]_", name) else "mlp"
            theirs = _IN_TOWER.sub(rf"\1{part}.\2.", theirs)
        return StoredTensor(theirs)

    return stored_tensor


def build(config: VLMConfig) -> tuple[nn.Module, nn.Module, Gemma4LanguageModel]:
    """Tower, projector and text."""
    text, vision = config.text, config.vision
    assert isinstance(text, Gemma4TextConfig) and isinstance(vision, Gemma4VisionConfig)
    soft_ids = [id for id in (config.image_token_id, *config.marker_token_ids) if id is not None]
    decoder = Gemma4LanguageModel(text, config.tie_word_embeddings, soft_ids)
    return Gemma4VisionTransformer(vision), Gemma4Projector(vision, text.hidden_size), decoder


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json of transformers' Gemma4ForConditionalGeneration, without its audio part."""
    text, vision = config.text, config.vision
    assert isinstance(text, Gemma4TextConfig) and isinstance(vision, Gemma4VisionConfig)
    names = {ours: theirs for theirs, ours in _KINDS.items()}
    far = {"partial_rotary_factor": text.full_rotary_factor, "rope_theta": text.full_rope_theta}
    described = {name: getattr(text, name) for name in _TEXT}
    described |= {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_activation": text.hidden_act,
        "global_head_dim": text.full_head_dim,
        "layer_types": [names[kind.split()[0]] for kind in text.layer_types],
        "num_kv_shared_layers": sum("shared" in kind for kind in text.layer_types),
        "use_double_wide_mlp": text.shared_mlp_factor == 2,
        "hidden_size_per_layer_input": text.per_layer_width,
        "vocab_size_per_layer_input": text.per_layer_vocab,
        "final_logit_softcapping": text.logit_cap,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": text.rope_theta},
            "full_attention": {"rope_type": "proportional"} | far,
        },
        **_PLAIN_TEXT,
        **write_ids(config),
        "pad_token_id": text.placeholder_id,
        "tie_word_embeddings": config.tie_word_embeddings,
        **both_dtypes(dtype),
    }
    seen = {name: getattr(vision, name) for name in _VISION}
    seen |= {theirs: getattr(vision, ours) for ours, (theirs, _) in _VISION_NAMES.items()}
    seen |= {
        "model_type": "gemma4_vision",
        "head_dim": vision.hidden_size // vision.num_attention_heads,
        "num_key_value_heads": vision.num_attention_heads,
        "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
        **_PLAIN_VISION,
        **both_dtypes(dtype),
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": NAME,
        **both_dtypes(dtype),
        "image_token_id": config.image_token_id,
        **{name: id for name, id in zip(_MARKERS, config.marker_token_ids) if id is not None},
        "tie_word_embeddings": config.tie_word_embeddings,
        "text_config": described,
        "vision_config": seen,
        "audio_config": None,
    }


def processor_classes(config: VLMConfig) -> tuple[str, str]:
    return "Gemma4Processor", "Gemma4ImageProcessor"
