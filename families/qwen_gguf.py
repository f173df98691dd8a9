"""Qwen2.5-VL and Qwen3-VL in GGUF files, as llama.cpp has them."""

from __future__ import annotations

from functools import partial

import torch

from models.checkpoints.gguf_config import Layout, Tower, rows
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
_FRAMES = {"vision_model.patch_embedding.weight": (lambda *both: torch.stack(both, 2), (".1",))}
_FUSED = {"vision_model": {f".self_attn.{one}_proj.": ".attn_qkv." for one in "qkv"}}
GGUF = {
    "qwen2.5vl_merger": Layout(
        "qwen2_5_vl", {"qwen2vl": "qwen2"}, partial(_read, "qwen2_5_vl", (3136, 12_845_056)),
        fronts=_fronts, joins=_FRAMES,
    ),
    "qwen3vl_merger": Layout(
        "qwen3_vl", {"qwen3vl": "qwen3"}, partial(_read, "qwen3_vl", (65_536, 16_777_216)),
        fronts=_fronts, inside=_FUSED, joins=_FRAMES,
    ),
}  # fmt: skip
