"""Qwen2.5-VL, Qwen3-VL and Qwen3.5 in GGUF files, as llama.cpp has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.checkpoints.gguf_config import Join, Layout, Tower, rows
from models.config import VLMConfig

# llama.cpp's keys of a tower -> ours.
_TOWER = {
    "patch_size": "patch_size", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "block_count": "depth", "attention.head_count": "num_heads", "spatial_merge_size": "spatial_merge_size",
}  # fmt: skip
_MARKERS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip


def _read(kind: str, pixels: tuple[int, int], tower: Tower) -> tuple[dict, dict]:
    """`pixels`: least and most of an image in the published models, where a file does not say."""
    said, vision = tower.said, tower.section(_TOWER)
    if kind == "qwen3_vl":
        deep = enumerate(said.get("is_deepstack_layers", []))
        vision["deepstack_visual_indexes"] = [layer for layer, taken in deep if taken]
        vision["num_position_embeddings"] = rows(tower.tensors, "v.position_embd.weight")
    else:  # windows of 112 pixels: llama.cpp knows no others
        every = said["n_wa_pattern"]
        whole = [*range(every - 1, vision["depth"], every)]
        vision |= {"fullatt_block_indexes": whole, "window_size": 112}
    config = {name: tower.id(token) for name, token in _MARKERS.items()}
    least, most = (said.get(f"image_{end}_pixels", number) for end, number in zip(("min", "max"), pixels))
    return config | {"vision_config": vision}, {
        "size": {"shortest_edge": least, "longest_edge": most},
        "patch_size": vision.get("patch_size"),
        "merge_size": vision.get("spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "image_processor_type": "Qwen2VLImageProcessor",
    }


def _fronts(config: VLMConfig) -> dict[str, str]:
    deep = {f"projector.deep.{at}.": f"v.deepstack.{layer}." for at, layer in enumerate(config.vision.taps)}
    merger = {"norm.": "v.post_ln.", "fc1.": "mm.0.", "fc2.": "mm.2."}
    return deep | {f"projector.merger.{ours}": theirs for ours, theirs in merger.items()}


# The kernel of patches is a tensor for each of two frames there.
_FRAMES = {"vision_model.patch_embedding.weight": Join(lambda *both: torch.stack(both, 2), (".1",))}
_ENDS = ("<|im_end|>", "<|endoftext|>")
GGUF = {
    "qwen2.5vl_merger": Layout(
        "qwen2_5_vl", {"qwen2vl": "qwen2"}, partial(_read, "qwen2_5_vl", (3136, 12_845_056)),
        fronts=_fronts, joins=lambda config: _FRAMES, ends=_ENDS,
    ),
    "qwen3vl_merger": Layout(
        "qwen3_vl", {"qwen3vl": "qwen3"}, partial(_read, "qwen3_vl", (65_536, 16_777_216)), fronts=_fronts,
        inside={"vision_model": {f".self_attn.{one}_proj.": ".attn_qkv." for one in "qkv"}},
        joins=lambda config: _FRAMES, ends=_ENDS,
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- Qwen3.5
_SSM = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}  # fmt: skip
_IN_DELTA = {
    "in_proj_qkv.": "attn_qkv.", "in_proj_z.": "attn_gate.", "in_proj_b.": "ssm_beta.",
    "in_proj_a.": "ssm_alpha.", "conv_weight": "ssm_conv1d.weight", "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias", "norm.": "ssm_norm.", "out_proj.": "ssm_out.",
}  # fmt: skip


def _read_delta(config: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    text = {"linear_value_head_dim": said["ssm.inner_size"] // said["ssm.time_step_rank"]}
    if kinds := said.get("attention.recurrent_layers"):
        layers = kinds[: config["num_hidden_layers"]]
        text["layer_types"] = ["linear_attention" if one else "full_attention" for one in layers]
    return text


def _joins(config: VLMConfig) -> dict[str, Join]:
    """llama.cpp has its first value head of each key head first, then the second of each, and so on; the Hub
    those of one key head side by side. Its norms are around 1, and it has -exp(A_log)."""
    text = config.text
    each = text.delta_value_heads // text.delta_key_heads
    keys_end = 2 * text.delta_key_heads * text.delta_key_dim

    def put_back(x: Tensor, begin: int = 0, axis: int = 0) -> Tensor:
        heads = x.narrow(axis, begin, x.shape[axis] - begin).unflatten(axis, (each, text.delta_key_heads, -1))
        return torch.cat(
            (x.narrow(axis, 0, begin), heads.transpose(axis, axis + 1).flatten(axis, axis + 2)), axis
        )

    norms = ("_layernorm.weight", ".q_norm.weight", ".k_norm.weight", "language_model.norm.weight")
    by_heads = ("proj_z.weight", "proj_a.weight", "proj_b.weight", "dt_bias")
    columns = Join(lambda x: put_back(x, axis=1), run=text.delta_value_dim)
    return {
        **dict.fromkeys(norms, Join(lambda x: x - 1)),
        **dict.fromkeys(by_heads, Join(put_back, run=0)),
        "in_proj_qkv.weight": Join(lambda x: put_back(x, keys_end), run=0),
        **({"linear_attn.out_proj.weight": columns} if each > 1 else {}),
        "conv_weight": Join(lambda x: put_back(x, keys_end)[:, None]),
        "A_log": Join(lambda x: put_back(x.neg().log())),
        **_FRAMES,
    }


_VL = GGUF["qwen3vl_merger"]
GGUF_3_5 = {
    "qwen3vl_merger": replace(
        _VL, model_type="qwen3_5", texts={"qwen35": "qwen3_5_text"}, read_text=_read_delta, keys=_SSM,
        joins=_joins, alone="qwen3_5_text",
        inside={**_VL.inside, "language_model": {
            ".post_attention_layernorm.": ".post_attention_norm.",
            **{f".linear_attn.{ours}": f".{theirs}" for ours, theirs in _IN_DELTA.items()},
        }},
    )
}  # fmt: skip
