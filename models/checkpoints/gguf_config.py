"""What GGUF's metadata say of a model, as the Hub's files: config.json, and the settings of images.

A model that sees is two files: its text part, and its tower with the projector (`mmproj`). Mistakes are
ValueErrors; what a config.json may hold is checked where one is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from models.checkpoints import gguf_tokenizer
from models.checkpoints.gguf import Header, Place

# llama.cpp's key -> that of config.json. Before the former stands the architecture, or clip.vision.
_TEXT = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}  # fmt: skip
_VISION = {
    "image_size": "image_size", "patch_size": "patch_size", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.layer_norm_epsilon": "layer_norm_eps",
}  # fmt: skip
_QWEN = {
    "patch_size": "patch_size", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "block_count": "depth", "attention.head_count": "num_heads",
    "spatial_merge_size": "spatial_merge_size",
}  # fmt: skip
# The architecture of a text part -> the model_type of a text_config.
_TEXTS = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "lfm2": "lfm2", 
    "qwen2vl": "qwen2", "qwen3vl": "qwen3",
}  # fmt: skip
# A projector -> the model_type of a config.json.
_PROJECTORS = {
    "idefics3": "idefics3", "qwen3vl_merger": "qwen3_vl", "qwen2.5vl_merger": "qwen2_5_vl", "lfm2": "lfm2_vl",
}  # fmt: skip
# A model_type -> the architecture of its text part, where that belongs to this family alone.
_TEXT_OF = {"qwen3_vl": "qwen3vl", "qwen2_5_vl": "qwen2vl", "lfm2_vl": "lfm2"}
_QWEN_MARKERS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
# Pixels of an image in the published models, where a file does not say.
_QWEN_PIXELS = {"qwen3_vl": (65_536, 16_777_216), "qwen2_5_vl": (3136, 12_845_056)}
_WINDOW = 112  # pixels, of Qwen2.5-VL: llama.cpp knows no other
_CLIP = "clip.vision."
_SCALE, _PREPROC, _DEEP = (f"{_CLIP}{name}" for name in (
    "projector.scale_factor", "preproc_image_size", "is_deepstack_layers"))  # fmt: skip
_LIMITS = (f"{_CLIP}image_min_pixels", f"{_CLIP}image_max_pixels")
_LFM2_TILES = {_PREPROC: "tile_size"}
_LFM2_TILES |= {f"{_CLIP}preproc_{name}_tiles": f"{name}_tiles" for name in ("min", "max")}
_LFM2_TOKENS = ("min_image_tokens", "max_image_tokens")
_MOST_LAYERS = 1000
_GENERATION = "ocelli.generation_config"  # JSON, in files that earlier versions of Ocelli wrote


def hub_files(text: Header, vision: Header) -> dict[str, Any]:
    """The files of a checkpoint folder by name, JSON or text, but for its weights."""
    said = vision.metadata
    kind = said.get("clip.projector_type") or said.get(f"{_CLIP}projector_type")
    if (model_type := _PROJECTORS.get(str(kind))) is None:
        expected = f"expected {', '.join(_PROJECTORS)}, got {str(kind)[:80]!r}"
        raise ValueError(f"{vision.path}: the projector is not supported: {expected}")
    text_config = _read_text(text)
    name = str(text.metadata["general.architecture"])
    if (name if name in _TEXT_OF.values() else None) != _TEXT_OF.get(model_type):
        of = f"a text part of {name} and a tower of {model_type} ({vision.path})"
        raise ValueError(f"expected both files of one model, got {of}")
    files, ids = gguf_tokenizer.read(text.metadata)
    read = {"idefics3": _read_idefics3, "lfm2_vl": _read_lfm2}.get(model_type, _read_qwen)
    config, images = read(model_type, said, vision.tensors, ids)
    tower = config["vision_config"]
    _number(tower, "depth" if "depth" in tower else "num_hidden_layers", _MOST_LAYERS)
    for name in ("hidden_size", "intermediate_size"):  # by which tensors are told apart
        _number(tower, name)
    config |= {"model_type": model_type, "text_config": text_config}
    config["tie_word_embeddings"] = config["tie_embedding"] = "output.weight" not in text.tensors
    pixels = {name: said.get(_CLIP + name, [0.5] * 3) for name in ("image_mean", "image_std")}
    seen = {"image_seq_len": images.pop("image_seq_len", None), "image_processor": images | pixels}
    bos, eos, eot, pad = (
        text.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")
    )
    stops = {"eos_token_id": [one for one in (eos, eot) if one is not None]}
    files["generation_config.json"] = _kept(text) | stops | {"bos_token_id": bos, "pad_token_id": pad}
    return files | {"config.json": config, "processor_config.json": seen}


def _kept(text: Header) -> dict[str, Any]:
    """What else its generation_config.json said, where the file holds that."""
    try:
        kept = json.loads(text.metadata.get(_GENERATION, "{}"))
    except (TypeError, ValueError, RecursionError):
        kept = None
    if not isinstance(kept, dict):
        raise ValueError(f"{text.path}: {_GENERATION}: expected a JSON object")
    return kept


def _number(metadata: Mapping[str, Any], name: str, most: int = 65_536, default: Any = None) -> int:
    """A whole number that something is computed from."""
    value = metadata.get(name, default)
    if type(value) is not int or not 0 < value <= most:
        raise ValueError(f"{name}: expected a whole number from 1 to {most}, got {str(value)[:80]}")
    return value


def _rows(tensors: Mapping[str, Place], name: str, axis: int = 0) -> int:
    if (place := tensors.get(name)) is None or len(place.shape) <= axis:
        raise ValueError(f"the tensor {name} is missing")
    return place.shape[axis]


def _id(ids: Mapping[str, int], token: str) -> int:
    if token not in ids:
        raise ValueError(f"the tokenizer has no special token {token}")
    return ids[token]


def _read_text(text: Header) -> dict[str, Any]:
    said, tensors = text.metadata, text.tensors
    kind = str(said.get("general.architecture"))
    if kind not in _TEXTS:
        expected = f"expected {', '.join(_TEXTS)}, got {kind[:80]!r}"
        raise ValueError(f"{text.path}: the architecture is not supported: {expected}")
    if said.get("split.count", 1) not in (0, 1):
        raise ValueError(f"{text.path} is one of several parts: expected one file (llama-gguf-split --merge)")
    config = {name: said[f"{kind}.{key}"] for key, name in _TEXT.items() if f"{kind}.{key}" in said}
    config |= {"model_type": _TEXTS[kind], "vocab_size": _rows(tensors, "token_embd.weight")}
    _number(config, "num_hidden_layers", _MOST_LAYERS)
    heads = _number(config, "num_attention_heads")
    config.setdefault("num_key_value_heads", heads)
    config.setdefault("head_dim", _number(config, "hidden_size") // heads)
    config |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}
    rope = {"rope_type": said.get(f"{kind}.rope.scaling.type", "none")}
    if rope["rope_type"] == "linear":
        rope["factor"] = said.get(f"{kind}.rope.scaling.factor")
    elif rope["rope_type"] != "none" or "rope_freqs.weight" in tensors:
        raise ValueError(f"{text.path}: its rotary scaling is not supported, expected none or linear")
    else:
        rope["rope_type"] = "default"
    if said.get(f"{kind}.rope.dimension_count", config["head_dim"]) != config["head_dim"]:
        raise ValueError(f"{text.path}: rotary places of a part of a head are not supported")
    if isinstance(sections := said.get(f"{kind}.rope.dimension_sections"), list):
        rope["mrope_section"] = sections[:3]
    if kind == "lfm2":
        config |= _read_convolutions(config, said)
    _number(config, "num_key_value_heads")
    return config | {"rope_parameters": rope | {"rope_theta": config.get("rope_theta", 10_000.0)}}


def _read_convolutions(config: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """What LFM2's text_config has of its own. Layers without key heads are convolutions."""
    heads = config.get("num_key_value_heads")
    if not isinstance(heads, list) or not all(type(one) is int for one in heads) or not any(heads):
        raise ValueError(f"lfm2.attention.head_count_kv: expected a number each layer, got {str(heads)[:80]}")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if one else "conv" for one in heads],
        "norm_eps": config.get("rms_norm_eps"),
        "conv_L_cache": said.get("lfm2.shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _section(said: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    return {name: said[_CLIP + key] for key, name in keys.items() if _CLIP + key in said}


def _read_idefics3(kind: str, said: Mapping, tensors: Mapping, ids: Mapping) -> tuple[dict, dict]:
    vision, scale = _section(said, _VISION), _number(said, _SCALE, 64)
    side, patch = _number(vision, "image_size"), _number(vision, "patch_size")
    vision["hidden_act"] = "gelu_pytorch_tanh" if said.get("clip.use_gelu") else "quick_gelu"
    config = {"image_token_id": _id(ids, "<image>"), "scale_factor": scale, "vision_config": vision}
    return config, {
        "image_seq_len": (side // patch // scale) ** 2,
        "max_image_size": {"longest_edge": side},
        "size": {"longest_edge": said.get(_PREPROC, 4 * side)},
        "image_processor_type": "Idefics3ImageProcessor",
    }


def _read_qwen(kind: str, said: Mapping, tensors: Mapping, ids: Mapping) -> tuple[dict, dict]:
    vision = _section(said, _QWEN)
    depth = _number(vision, "depth", _MOST_LAYERS)
    if kind == "qwen3_vl":
        deep = said.get(_DEEP, [])
        if not isinstance(deep, list) or len(deep) > depth:
            raise ValueError(f"{_DEEP}: expected a value each layer, got {str(deep)[:80]}")
        vision["deepstack_visual_indexes"] = [layer for layer, taken in enumerate(deep) if taken]
        vision["num_position_embeddings"] = _rows(tensors, "v.position_embd.weight")
    else:
        every = _number(said, f"{_CLIP}n_wa_pattern", _MOST_LAYERS)
        vision |= {"fullatt_block_indexes": [*range(every - 1, depth, every)], "window_size": _WINDOW}
    config = {name: _id(ids, token) for name, token in _QWEN_MARKERS.items()}
    least, most = (said.get(name, pixels) for name, pixels in zip(_LIMITS, _QWEN_PIXELS[kind]))
    return config | {"vision_config": vision}, {
        "size": {"shortest_edge": least, "longest_edge": most},
        "patch_size": vision.get("patch_size"),
        "merge_size": vision.get("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "image_processor_type": "Qwen2VLImageProcessor",
    }


def _read_lfm2(kind: str, said: Mapping, tensors: Mapping, ids: Mapping) -> tuple[dict, dict]:
    vision, scale = _section(said, _VISION), said.get(_SCALE, 2)
    vision["num_patches"] = _rows(tensors, "v.position_embd.weight")
    config = {
        "image_token_id": _id(ids, "<image>"),
        "downsample_factor": scale,
        "projector_hidden_size": _rows(tensors, "mm.1.weight"),
        "projector_bias": "mm.1.bias" in tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in tensors,
        "vision_config": vision,
    }
    images = {"downsample_factor": scale, "encoder_patch_size": vision.get("patch_size")}
    images |= {name: said[key] for key, name in _LFM2_TILES.items() if key in said}
    for key, name in zip(_LIMITS, _LFM2_TOKENS):
        if key in said:
            factor = _number(said, _SCALE, 64, 2) * _number(vision, "patch_size")
            images[name] = _number(said, key, 2**28) // factor**2
    return config, images | {"image_processor_type": "Lfm2VlImageProcessor"}
