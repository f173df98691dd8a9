"""A checkpoint as llama.cpp's converter (convert_hf_to_gguf.py) writes it: what is read is held to this.

    write(folder, target)          # target/NAME-F32.gguf and target/mmproj-NAME-F32.gguf

Names of tensors are the gguf library's own tables, how they lie there is that converter's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

from benchmarks.gguf_files import text_metadata, write_file
from data.processor import Processor
from families import idefics3_images
from families.resizing import CLIP_PIXELS
from models import VisionLanguageModel
from models.checkpoints import gguf_tokenizer
from models.checkpoints.gguf import Place
from models.checkpoints.save import placed, stored_tensors, written

_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_ARCHITECTURES = {
    "idefics3": "llama", "qwen3_vl": "qwen3vl", "qwen2_5_vl": "qwen2vl", "lfm2_vl": "lfm2",
    "qwen3_5": "qwen35", "gemma4": "gemma4",
}  # fmt: skip
_PROJECTORS = {
    "idefics3": "idefics3", "qwen3_vl": "qwen3vl_merger", "qwen2_5_vl": "qwen2.5vl_merger", "lfm2_vl": "lfm2",
    "qwen3_5": "qwen3vl_merger", "gemma4": "gemma4v", "internvl": "internvl",
}  # fmt: skip
# Where the library's tables have names of another layout, or none: of the tower and the projector.
_AS_THERE = {
    "model.visual.merger.norm.": "v.post_ln.", "model.visual.merger.linear_fc1.": "mm.0.",
    "model.visual.merger.linear_fc2.": "mm.2.", "model.multi_modal_projector.layer_norm.": "mm.input_norm.",
    "model.multi_modal_projector.": "multi_modal_projector.", "model.vision_tower.": "model.vision_model.",
    "model.visual.": "visual.", "model.text_model.": "model.", "model.language_model.": "model.",
}  # fmt: skip
_OWN_AS_THERE = {
    "gemma4": {"model.vision_tower.encoder.": "vision_model.model."},
    "internvl": {
        "model.multi_modal_projector.layer_norm.": "mlp1.0.",
        "model.multi_modal_projector.linear_1.": "mlp1.1.",
        "model.multi_modal_projector.linear_2.": "mlp1.3.",
    },
}  # fmt: skip


def write(folder: Path, target: Path) -> None:
    """A checkpoint's two files in float32, called as the target is."""
    model = VisionLanguageModel.from_pretrained(folder, dtype="float32")
    processor = Processor.from_pretrained(folder)
    config, places = written(model.config)
    kind, text = config["model_type"], config["text_config"]
    backend = json.loads(processor.tokenizer.backend_tokenizer.to_str())
    stored = json.loads((folder / "tokenizer.json").read_text())
    backend |= {name: stored[name] for name in ("pre_tokenizer", "normalizer") if name in stored}
    roles = processor.tokenizer.special_tokens_map
    images = {**idefics3_images.DEFAULTS, **(CLIP_PIXELS if kind.startswith("qwen") else {})}
    images |= {"image_mean": [0.0] * 3, "image_std": [1.0] * 3} if kind == "gemma4" else {}
    images |= processor.images.settings
    if kind.startswith("qwen"):
        images["size"] = {"shortest_edge": processor.images.least, "longest_edge": processor.images.limit}
    said = text_metadata(architecture(config), text)
    said |= tokenizer_metadata(backend, roles, processor.chat.chat_template, text["vocab_size"])
    more = {"qwen3_5": _qwen3_5_metadata, "gemma4": _gemma4_metadata}.get(kind, lambda text: {})(text)
    said |= {f"{architecture(config)}.{key}": value for key, value in more.items()}
    if kind == "qwen3_vl":
        said["qwen3vl.n_deepstack_layers"] = len(config["vision_config"]["deepstack_visual_indexes"])
    parts: tuple[dict, dict] = ({}, {})
    for name, pending in placed(stored_tensors(model), places).items():
        for own, tensor in _tensors(name, pending.make().detach(), config):
            array = tensor.contiguous().numpy()
            place = Place("F32", tuple(tensor.shape), 0, array.nbytes)
            parts[own.startswith(("v.", "mm."))][own] = place, lambda array=array: array
    if kind == "gemma4":
        dim, share = (
            text["global_head_dim"] // 2,
            text["rope_parameters"]["full_attention"]["partial_rotary_factor"],
        )
        factors = np.where(np.arange(dim) < int(dim * share), 1, 1e30).astype(np.float32)
        parts[0]["rope_freqs.weight"] = Place("F32", (dim,), 0, factors.nbytes), lambda: factors
    target.mkdir()
    said |= {"general.name": target.name, "general.type": "model"}
    write_file(target / f"{target.name}-F32.gguf", said, parts[0])
    write_file(target / f"mmproj-{target.name}-F32.gguf", tower_metadata(config, images), parts[1])


def _tensors(name: str, tensor: Tensor, config: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """What a tensor of the Hub's layout is there: name and numbers."""
    kind, text = config["model_type"], config["text_config"]
    own_names = _OWN_AS_THERE.get(kind)
    tower = own_names is not None and not name.startswith("model.language_model.")
    for ours, theirs in (own_names if own_names and tower else _AS_THERE).items():
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
            break
    if name.startswith(("v.", "mm.")):
        return [(name, tensor)]
    if name.startswith("visual.deepstack_merger_list."):
        at, part, end = name.removeprefix("visual.deepstack_merger_list.").split(".")
        layer = config["vision_config"]["deepstack_visual_indexes"][int(at)]
        return [(f"v.deepstack.{layer}.{part.removeprefix('linear_')}.{end}", tensor)]
    if kind == "qwen2_5_vl" and ".attn.qkv." in name:
        return [
            (_known(name.replace("qkv", part), config), rows) for part, rows in zip("qkv", tensor.chunk(3))
        ]
    if kind == "qwen3_5" and name.startswith("model."):
        name, tensor = _delta(name, tensor, text)
    if kind == "gemma4":
        name = name.replace(".linear.weight", ".weight")
        name += ".weight" if name.endswith(("layer_scalar", "position_embedding_table")) else ""
        tensor = tensor.reshape(tensor.shape or (1,))
    if kind == "internvl" and (".lambda_" in name or name.endswith("position_embeddings")):
        name += ".weight"
    own = _known(name, config)
    if own == "v.patch_embd.weight" and kind.startswith("qwen"):  # a kernel for each of two frames
        return [(own, tensor[:, :, 0]), (f"{own}.1", tensor[:, :, 1])]
    if own == "v.patch_embd.weight" and kind in ("lfm2_vl", "gemma4"):  # colours come last in the Hub's
        side = math.isqrt(tensor.shape[1] // 3)
        return [(own, tensor.reshape(-1, side, side, 3).permute(0, 3, 1, 2))]
    if own.endswith("shortconv.conv.weight"):
        return [(own, tensor.squeeze(1))]
    heads = {"attn_q": text["num_attention_heads"], "attn_k": text["num_key_value_heads"]}
    if architecture(config) == "llama" and own.startswith("blk.") and own.split(".")[-2] in heads:
        count = heads[own.split(".")[-2]]  # llama.cpp rotates neighbours, not halves
        pairs = tensor.reshape(count, 2, len(tensor) // count // 2, *tensor.shape[1:])
        tensor = pairs.transpose(1, 2).reshape(tensor.shape)
    return [(own, tensor)]


def _delta(name: str, tensor: Tensor, text: Mapping[str, Any]) -> tuple[str, Tensor]:
    """Of Qwen3.5's text part: value heads are ordered by their place among those of a key head."""
    heads, keys = text["linear_num_value_heads"], text["linear_num_key_heads"]
    width, before = text["linear_value_head_dim"], 2 * keys * text["linear_key_head_dim"]
    order = [key * (heads // keys) + place for place in range(heads // keys) for key in range(keys)]
    columns = [head * width + at for head in order for at in range(width)]
    part = name.rpartition("linear_attn.")[2]
    if part in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        tensor = tensor[order]
    elif part == "in_proj_z.weight":
        tensor = tensor[columns]
    elif part == "out_proj.weight":
        tensor = tensor[:, columns]
    elif part in ("in_proj_qkv.weight", "conv1d.weight"):
        tensor = tensor[[*range(before), *(before + at for at in columns)]]
    if part == "conv1d.weight":
        tensor = tensor.squeeze(1)
    elif part == "A_log":
        tensor = -tensor.exp()
    elif name.endswith("norm.weight") and part != "norm.weight":
        tensor = tensor + 1
    return name.replace(".dt_bias", ".dt_proj.bias"), tensor


@cache
def _names(architecture: gguf.MODEL_ARCH) -> gguf.TensorNameMap:
    """It takes a second to make."""
    return gguf.get_tensor_name_map(architecture, 99)


def architecture(config: Mapping[str, Any]) -> str:
    return _ARCHITECTURES.get(config["model_type"], config["text_config"]["model_type"])


def _known(name: str, config: Mapping[str, Any]) -> str:
    text = next(one for one, label in gguf.MODEL_ARCH_NAMES.items() if label == architecture(config))
    bounds = [f".{side}put_{end}" for side in ("in", "out") for end in ("min", "max")]
    for known in (text, gguf.MODEL_ARCH.MMPROJ):
        if found := _names(known).get_name(name, (".weight", ".bias", *bounds)):
            return found
    raise KeyError(name)


def tower_metadata(config: Mapping[str, Any], images: Mapping[str, Any]) -> dict[str, Any]:
    """What the file of a tower says, of a whole config.json and all settings of images."""
    kind, vision = config["model_type"], config["vision_config"]
    patch, qwen = vision["patch_size"], kind.startswith("qwen")
    values: dict[str, Any] = {
        "patch_size": patch, "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "projection_dim": config["text_config"]["hidden_size"],
        "block_count": vision["depth" if qwen else "num_hidden_layers"],
        "attention.head_count": vision["num_heads" if qwen else "num_attention_heads"],
        "attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
        "image_mean": images["image_mean"], "image_std": images["image_std"],
    }  # fmt: skip
    if kind == "gemma4":
        values |= {"image_size": 224, "projector.scale_factor": vision["pooling_kernel_size"]}
    elif kind == "internvl":
        values |= {
            "image_size": vision["image_size"],
            "projector.scale_factor": int(1 / config["downsample_ratio"]),
        }
        values |= {f"preproc_{end}_tiles": images[f"{end}_patches"] for end in ("min", "max")}
    elif kind == "idefics3":
        values |= {"image_size": vision["image_size"], "projector.scale_factor": config["scale_factor"]}
        values |= {"preproc_image_size": images["size"]["longest_edge"]}
    elif kind == "lfm2_vl":
        factor = config["downsample_factor"]
        values |= {"image_size": math.isqrt(vision["num_patches"]) * patch, "projector.scale_factor": factor}
        values |= {"preproc_image_size": images["tile_size"]}
        values |= {f"preproc_{name}_tiles": images[f"{name}_tiles"] for name in ("min", "max")}
        least, most = images["min_image_tokens"], images["max_image_tokens"]
        values |= {"image_min_pixels": least * (factor * patch) ** 2}
        values |= {"image_max_pixels": most * (factor * patch) ** 2}
    else:
        values |= {"spatial_merge_size": vision["spatial_merge_size"]}
        values |= {"image_min_pixels": images["size"]["shortest_edge"]}
        values |= {"image_max_pixels": images["size"]["longest_edge"]}
    if kind in ("qwen3_vl", "qwen3_5"):
        deep = vision.get("deepstack_visual_indexes", [])
        values["image_size"] = math.isqrt(vision["num_position_embeddings"]) * patch
        values["is_deepstack_layers"] = [layer in deep for layer in range(vision["depth"])]
    elif kind == "qwen2_5_vl":
        values |= {"n_wa_pattern": vision["fullatt_block_indexes"][0] + 1, "image_size": 40 * patch}
    return {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": _PROJECTORS[kind],
        "clip.use_silu" if kind == "qwen2_5_vl" else "clip.use_gelu": True,
        **{f"clip.vision.{key}": value for key, value in values.items()},
    }


def _qwen3_5_metadata(text: Mapping[str, Any]) -> dict[str, Any]:
    values = text["linear_num_value_heads"]
    share = text["rope_parameters"]["partial_rotary_factor"]
    return {
        "rope.dimension_count": int(text["head_dim"] * share),
        "ssm.conv_kernel": text["linear_conv_kernel_dim"],
        "ssm.state_size": text["linear_key_head_dim"],
        "ssm.group_count": text["linear_num_key_heads"],
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * text["linear_value_head_dim"],
        "attention.recurrent_layers": [one == "linear_attention" for one in text["layer_types"]],
        "full_attention_interval": 4,
    }


def _gemma4_metadata(text: Mapping[str, Any]) -> dict[str, Any]:
    layers, shared, inner = text["layer_types"], text["num_kv_shared_layers"], text["intermediate_size"]
    full, near = text["global_head_dim"], text["head_dim"]
    more = {
        "attention.sliding_window": text["sliding_window"],
        "attention.sliding_window_pattern": [one == "sliding_attention" for one in layers],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": text["hidden_size_per_layer_input"],
        "rope.freq_base_swa": text["rope_parameters"]["sliding_attention"]["rope_theta"],
        **{f"attention.{part}_length": full for part in ("key", "value")},
        **{f"attention.{part}_length_swa": near for part in ("key", "value")},
        "rope.dimension_count": full, "rope.dimension_count_swa": near,
    }  # fmt: skip
    if text["final_logit_softcapping"] is not None:
        more["final_logit_softcapping"] = text["final_logit_softcapping"]
    if text["use_double_wide_mlp"]:
        own = len(layers) - shared
        more["feed_forward_length"] = [inner * (1 + (at >= own)) for at in range(len(layers))]
    return more


def tokenizer_metadata(
    spec: Mapping[str, Any], roles: Mapping[str, str], template: str, rows: int
) -> dict[str, Any]:
    """Of a parsed tokenizer.json and its tokens by their role, for an embedding of so many rows. Where
    llama.cpp has no name for how it cuts text into words, all of it stands there, too."""
    model, added = spec["model"], spec.get("added_tokens") or []
    exact = next((name for name, words in gguf_tokenizer.WORDS.items() if _cuts_alike(words, spec)), None)
    tokens, kinds = [f"[PAD{i}]" for i in range(rows)], [int(gguf.TokenType.UNUSED)] * rows
    for token, i in model["vocab"].items():
        kind = gguf.TokenType.BYTE if re.fullmatch("<0x..>", token) else gguf.TokenType.NORMAL
        tokens[i], kinds[i] = token, int(kind)
    for one in added:
        special = gguf.TokenType.CONTROL if one["special"] else gguf.TokenType.USER_DEFINED
        tokens[one["id"]], kinds[one["id"]] = one["content"], int(special)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    metadata = {
        "tokenizer.ggml.model": "gemma4" if exact == "gemma4" else "gpt2",
        "tokenizer.ggml.pre": exact or ("llama-bpe" if model.get("ignore_merges") else "smollm"),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges or [f"{tokens[0]} {tokens[0]}"],  # it wants one; these never meet
        "tokenizer.ggml.add_bos_token": bool((spec.get("post_processor") or {}).get("special_tokens")),
        "tokenizer.chat_template": template,
    }
    if exact is None:
        metadata["tokenizer.huggingface.json"] = json.dumps(spec)
    ids = {f"tokenizer.ggml.{name}_token_id": roles.get(role) for name, role in _ROLES.items()}
    return metadata | {name: tokens.index(token) for name, token in ids.items() if token in tokens}


def _cuts_alike(words: Any, spec: Mapping[str, Any]) -> bool:
    """Offsets, and how the parts of a tokenizer are nested, change nothing."""

    def parts(value: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        inner = (value or {}).get("pretokenizers") or (value or {}).get("normalizers") or [value or {}]
        return [{key: part[key] for key in part if key != "trim_offsets"} for part in inner]

    same = all(parts(spec.get(key)) == parts(getattr(words, key)) for key in ("pre_tokenizer", "normalizer"))
    return same and bool(spec["model"].get("ignore_merges")) == words.model.get("ignore_merges", False)
