"""Writing GGUF files: random models for llama.cpp to be timed with, and those that tests read again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

from models.checkpoints.gguf import Place

# llama.cpp's key of a text part, after its architecture -> that of a text_config.
_TEXT = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.dimension_count": "head_dim",
    "vocab_size": "vocab_size",
}  # fmt: skip


def write_file(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[Place, Any]]) -> None:
    """Write a file. Beside the type and shape of each tensor stands what makes its bytes, an array, when it
    is written: one is held at a time."""
    writer: Any = gguf.GGUFWriter(path, metadata["general.architecture"])
    for name, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif name != "general.architecture":
            kinds = gguf.GGUFValueType
            writer.add_key_value(name, value, kinds.UINT32 if type(value) is int else kinds.get_type(value))
    for name, (place, _) in tensors.items():
        kind = gguf.GGMLQuantizationType[place.type]
        writer.add_tensor_info(name, place.shape, None, place.end - place.begin, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, make in tensors.values():
        writer.write_tensor_data(make())
    writer.close()


def text_metadata(name: str, text: Mapping[str, Any]) -> dict[str, Any]:
    """What the file of a text part says, of an architecture of llama.cpp and a whole text_config."""
    ropes = text["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    values = {key: text[theirs] for key, theirs in _TEXT.items()} | {"rope.freq_base": rope["rope_theta"]}
    if rope.get("rope_type") == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if "mrope_section" in rope:
        values["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if name == "lfm2":
        heads = [text["num_key_value_heads"] * (one != "conv") for one in text["layer_types"]]
        values |= {"attention.head_count_kv": heads, "shortconv.l_cache": text["conv_L_cache"]}
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in values.items()}
