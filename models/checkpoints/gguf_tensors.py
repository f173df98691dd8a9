"""Which tensors of GGUF files are which of a checkpoint in the Hub's layout, and how they lie there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TEXT = {
    "blk.{}.attn_norm": "layers.{}.input_layernorm",
    "blk.{}.ffn_norm": "layers.{}.post_attention_layernorm", "blk.{}.attn_q": "layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "layers.{}.self_attn.k_proj", "blk.{}.attn_v": "layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "layers.{}.self_attn.o_proj", "blk.{}.attn_q_norm": "layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "layers.{}.self_attn.k_norm", "blk.{}.ffn_gate": "layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "layers.{}.mlp.up_proj", "blk.{}.ffn_down": "layers.{}.mlp.down_proj",
    "token_embd": "embed_tokens", "output_norm": "norm",
}  # fmt: skip
_LFM2 = {
    "blk.{}.attn_norm": "layers.{}.operator_norm", "blk.{}.ffn_norm": "layers.{}.ffn_norm",
    "blk.{}.attn_output": "layers.{}.self_attn.out_proj",
    "blk.{}.attn_q_norm": "layers.{}.self_attn.q_layernorm",
    "blk.{}.attn_k_norm": "layers.{}.self_attn.k_layernorm", "blk.{}.ffn_gate": "layers.{}.feed_forward.w1",
    "blk.{}.ffn_up": "layers.{}.feed_forward.w3", "blk.{}.ffn_down": "layers.{}.feed_forward.w2",
    "blk.{}.shortconv.in_proj": "layers.{}.conv.in_proj",
    "blk.{}.shortconv.out_proj": "layers.{}.conv.out_proj", "blk.{}.shortconv.conv": "layers.{}.conv.conv",
    "token_embd_norm": "embedding_norm",
}  # fmt: skip
_SIGLIP = {
    "v.blk.{}.ln1": "encoder.layers.{}.layer_norm1", "v.blk.{}.ln2": "encoder.layers.{}.layer_norm2",
    "v.blk.{}.attn_q": "encoder.layers.{}.self_attn.q_proj",
    "v.blk.{}.attn_k": "encoder.layers.{}.self_attn.k_proj",
    "v.blk.{}.attn_v": "encoder.layers.{}.self_attn.v_proj",
    "v.blk.{}.attn_out": "encoder.layers.{}.self_attn.out_proj",
    "v.blk.{}.ffn_up": "encoder.layers.{}.mlp.fc1", "v.blk.{}.ffn_down": "encoder.layers.{}.mlp.fc2",
    "v.patch_embd": "embeddings.patch_embedding", "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
}  # fmt: skip
_QWEN = {
    "v.blk.{}.ln1": "blocks.{}.norm1", "v.blk.{}.ln2": "blocks.{}.norm2",
    "v.blk.{}.attn_out": "blocks.{}.attn.proj", "v.patch_embd": "patch_embed.proj",
}  # fmt: skip
_QWEN2_5 = {
    "v.blk.{}.ffn_gate": "blocks.{}.mlp.gate_proj", "v.blk.{}.ffn_up": "blocks.{}.mlp.up_proj",
    "v.blk.{}.ffn_down": "blocks.{}.mlp.down_proj", "v.post_ln": "merger.ln_q", "mm.0": "merger.mlp.0",
    "mm.2": "merger.mlp.2",
}  # fmt: skip
_QWEN3 = {
    "v.blk.{}.attn_qkv": "blocks.{}.attn.qkv", "v.blk.{}.ffn_up": "blocks.{}.mlp.linear_fc1",
    "v.blk.{}.ffn_down": "blocks.{}.mlp.linear_fc2", "v.position_embd": "pos_embed",
    "v.post_ln": "merger.norm", "mm.0": "merger.linear_fc1", "mm.2": "merger.linear_fc2",
}  # fmt: skip
_LFM2_PROJECTOR = {"mm.input_norm": "layer_norm", "mm.1": "linear_1", "mm.2": "linear_2"}
# By the model_type of a config.json, of text part, tower and projector: how names begin there, and what
# follows in a GGUF file and there.
_PARTS: dict[str, tuple[tuple[str, dict[str, str]], ...]] = {
    "idefics3": (
        ("model.text_model.", _TEXT),
        ("model.vision_model.", _SIGLIP),
        ("model.connector.modality_projection.", {"mm.model.fc": "proj"}),
    ),
    "qwen2_5_vl": (("model.language_model.", _TEXT), ("model.visual.", {**_QWEN, **_QWEN2_5})),
    "qwen3_vl": (("model.language_model.", _TEXT), ("model.visual.", {**_QWEN, **_QWEN3})),
    "lfm2_vl": (
        ("model.language_model.", {**_TEXT, **_LFM2}),
        ("model.vision_tower.", _SIGLIP),
        ("model.multi_modal_projector.", _LFM2_PROJECTOR),
    ),
}


class Arranged(NamedTuple):
    """Tensors of GGUF files that are one of the Hub's, and what `join` makes of them. None: it is the tensor
    of that name as it lies."""

    names: tuple[str, ...]
    join: Callable[..., Tensor] | None = None


def arranged(config: Mapping[str, Any]) -> dict[str, Arranged]:
    """Every tensor that a model of this config.json may have, by its name in the Hub's layout."""
    kind, text, vision = config["model_type"], config["text_config"], config["vision_config"]
    depth = vision["depth" if "depth" in vision else "num_hidden_layers"]
    found = {"lm_head.weight": Arranged(("output.weight",))}

    def add(ours: str, *theirs: str, join: Callable[..., Tensor] | None = None) -> None:
        for end in (".weight", ".bias"):
            found[ours + end] = Arranged(tuple(name + end for name in theirs), join)

    for (front, names), layers in zip(_PARTS[kind], (text["num_hidden_layers"], depth, 0)):
        for theirs, ours in names.items():
            for layer in range(layers) if "{}" in ours else ("",):
                add(front + ours.format(layer), theirs.format(layer))
    for at, layer in enumerate(vision.get("deepstack_visual_indexes", ())):
        for part, ours in (("norm", "norm"), ("fc1", "linear_fc1"), ("fc2", "linear_fc2")):
            add(f"model.visual.deepstack_merger_list.{at}.{ours}", f"v.deepstack.{layer}.{part}")
    front = _PARTS[kind][0][0]
    for layer in range(text["num_hidden_layers"] if text["model_type"] == "llama" else 0):
        for part, heads in (("q", text["num_attention_heads"]), ("k", text["num_key_value_heads"])):
            halves = partial(_halves, heads=heads)
            add(f"{front}layers.{layer}.self_attn.{part}_proj", f"blk.{layer}.attn_{part}", join=halves)
    if kind == "qwen2_5_vl":
        for layer in range(depth):
            parts = (f"v.blk.{layer}.attn_{part}" for part in "qkv")
            add(f"model.visual.blocks.{layer}.attn.qkv", *parts, join=lambda *rows: torch.cat(rows))
    if kind.startswith("qwen"):
        frames = "v.patch_embd.weight", "v.patch_embd.weight.1"
        found["model.visual.patch_embed.proj.weight"] = Arranged(frames, lambda *both: torch.stack(both, 2))
    if kind == "lfm2_vl":
        # The kernel of patches: (D, C, P, P) there, (D, P · P · C) in the Hub's layout of SigLIP2.
        name = "model.vision_tower.embeddings.patch_embedding.weight"
        found[name] = found[name]._replace(join=lambda kernel: kernel.permute(0, 2, 3, 1).flatten(1))
        for layer in range(text["num_hidden_layers"]):  # (D, K) there, (D, 1, K) in the Hub's layout
            name = f"{front}layers.{layer}.conv.conv.weight"
            found[name] = found[name]._replace(join=lambda kernel: kernel[:, None])
    return found


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Rows (H · D_h, ...) of queries or keys of a Llama: llama.cpp rotates neighbours, (H, D_h / 2, 2), the
    Hub's layout halves of a head, (H, 2, D_h / 2)."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
