"""Qwen3.5 as transformers has it: three gated delta rules (arXiv:2412.06464) to one layer of attention with
an output gate, norms around 1, and Qwen3-VL's tower without features for further text layers.

Config keys and tensor names are those of transformers 5.23. `mtp.*`, which predicts further tokens, is left
out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from families import qwen_vl, saving
from families.qwen_images import open_images
from families.qwen_vl import build, grid, places, positions
from families.text import expect, first_id, layer_kinds, number, section, text_config, vlm_config
from models.checkpoints.files import CheckpointError
from models.checkpoints.weights import Entry, StoredTensor, StoredTensorOf
from models.config import VLMConfig

__all__ = ["build", "grid", "open_images", "places", "positions"]

NAME = "qwen3_5"
TITLE = "transformers Qwen3.5"
BOX_FORMS = {NAME: "qwen3-vl"}
IGNORABLE = re.compile(qwen_vl.IGNORABLE.pattern + r"|(model\.)?mtp\..*")
_MARKERS = {"video_token_id": 248_057, "vision_start_token_id": 248_053, "vision_end_token_id": 248_054}
# Defaults of transformers' Qwen3_5TextConfig and Qwen3NextConfig.
_TEXT: dict[str, Any] = {
    "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 32_768,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_DELTA = {
    "conv_kernel": "linear_conv_kernel_dim",
    "delta_key_dim": "linear_key_head_dim",
    "delta_value_dim": "linear_value_head_dim",
    "delta_key_heads": "linear_num_key_heads",
    "delta_value_heads": "linear_num_value_heads",
}
# Whose other values would need code that is not here: mixtures of experts, attention without its gate.
_PLAIN = {"model_type": "qwen3_5_text", "attn_output_gate": True, "num_experts": 0}
_KINDS = {"full_attention": "attention", "linear_attention": "delta"}


def recognises(config: Mapping) -> bool:
    return config.get("model_type") == NAME


def read_config(config: Mapping, generation: Mapping, stored: Mapping[str, Entry]) -> VLMConfig:
    """config.json and generation_config.json (or {}) -> VLMConfig; `stored` tensors change nothing."""
    given = section(config, "text_config")
    expect(given, _PLAIN)
    text = _TEXT | {name: value for name, value in given.items() if value is not None}
    rope = section(text, "rope_scaling") or section(text, "rope_parameters")
    factor = {"partial_rotary_factor": text.get("partial_rotary_factor", 0.25)} | rope
    share = number(factor, "partial_rotary_factor", 0, 1, whole=False)
    plain, sections = qwen_vl.multimodal_rope(
        {"rope_theta": text.get("rope_theta", 1e4)} | rope, [11, 11, 10]
    )
    plain.pop("partial_rotary_factor", None)
    own = {"model_type": "qwen3", "rope_scaling": None, "rope_parameters": plain, "layer_types": None}
    own["partial_rotary_factor"] = None
    decoder = text_config(
        text | own,
        {},
        rope_sections=sections,
        rope_interleaved=True,
        partial_rotary_factor=share,
        attention_gate=True,
        zero_centered_norms=True,
        layer_types=_layer_types(text),
        **{ours: text[theirs] for ours, theirs in _DELTA.items()},
    )
    markers = (first_id(config.get(one), id, vocab_size=decoder.vocab_size) for one, id in _MARKERS.items())
    vision = qwen_vl.vision_config(
        {"deepstack_visual_indexes": ()} | section(config, "vision_config"), "qwen3_vl"
    )
    parts = {"family": NAME, "vision": vision, "scale_factor": 1, "marker_token_ids": tuple(markers)}
    return vlm_config(config, generation, 248_056, False, decoder, **parts)


def _layer_types(text: dict) -> tuple[str, ...]:
    layers = number(text, "num_hidden_layers", 1, 1_024)
    every = number({"full_attention_interval": 4} | text, "full_attention_interval")
    default = ["full_attention" if (at + 1) % every == 0 else "linear_attention" for at in range(layers)]
    kinds = layer_kinds(text, _KINDS, default)
    if "attention" not in kinds:
        raise CheckpointError("config.json: layer_types: expected full_attention in at least one layer")
    return tuple(kinds)


def tensor_map(stored_names: Collection[str], config: VLMConfig | None = None) -> StoredTensorOf:
    """Where each of our tensors lies."""
    # transformers 5.5.0 to 5.5.3 saved the tower inside the text part, 5.5.0 and 5.5.1 the text part inside
    # itself as well.
    of_qwen_vl, nested = qwen_vl.tensor_map(stored_names), re.compile(r"model\.((language_model\.)*)(\w+)")
    inside = {found[3]: found[1] for found in map(nested.match, stored_names) if found}
    fronts = {"model.visual.": f"model.{inside.get('visual', '')}visual."}
    fronts["model.language_model."] = f"model.{inside.get('embed_tokens', 'language_model.')}"

    def stored_tensor(name: str) -> StoredTensor:
        found = of_qwen_vl(name)
        theirs = found.name.replace(".linear_attn.conv_weight", ".linear_attn.conv1d.weight")
        front = next((front for front in fronts if theirs.startswith(front)), "")
        return replace(found, name=fronts.get(front, "") + theirs.removeprefix(front))

    return stored_tensor


def write(config: VLMConfig, dtype: str) -> dict:
    """config.json of transformers' Qwen3_5ForConditionalGeneration."""
    text = config.text
    as_qwen3 = replace(
        text, layer_types=(), attention_gate=False, zero_centered_norms=False, partial_rotary_factor=1.0,
        rope_sections=(text.head_dim // 2, 0, 0),
    )  # fmt: skip
    tower = qwen_vl.write_vision(config)
    tower.pop("deepstack_visual_indexes")
    markers = {name: id for name, id in zip(_MARKERS, config.marker_token_ids) if id is not None}
    architecture = "Qwen3_5ForConditionalGeneration"
    known = replace(config, text=as_qwen3)
    tower["model_type"] = "qwen3_5_vision"
    written = saving.write_config(known, dtype, architecture, NAME, tower, **markers)
    names = {ours: theirs for theirs, ours in _KINDS.items()}
    rope = {"mrope_section": list(text.rope_sections), "mrope_interleaved": True}
    rope["partial_rotary_factor"] = text.partial_rotary_factor
    rope |= written["text_config"]["rope_parameters"]
    written["text_config"] |= {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "rope_parameters": rope,
        "rope_scaling": None,
        "layer_types": [names[kind] for kind in text.layer_types],
        **{theirs: getattr(text, ours) for ours, theirs in _DELTA.items()},
    }
    return written


def processor_classes(config: VLMConfig) -> tuple[str, str]:
    return "Qwen3VLProcessor", "Qwen2VLImageProcessor"
