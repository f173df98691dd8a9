"""The tensors of GGUF files as those of a checkpoint in the Hub's layout: names, and how they lie there."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.checkpoints.gguf_config import Layout
from models.checkpoints.weights import rename

# Our names -> llama.cpp's, which are the same for all models: how they begin, and what then stands in them.
_FRONTS = {
    "language_model.layers.": "blk.", "language_model.embed_tokens.": "token_embd.",
    "language_model.norm.": "output_norm.", "language_model.lm_head.": "output.",
    "vision_model.layers.": "v.blk.", "vision_model.patch_embedding.": "v.patch_embd.",
    "vision_model.position_embedding.": "v.position_embd.", "vision_model.post_layernorm.": "v.post_ln.",
    "vision_model.norm.": "v.post_ln.",
}  # fmt: skip
_INSIDE = {
    ".input_layernorm.": ".attn_norm.", ".post_attention_layernorm.": ".ffn_norm.",
    ".layer_norm1.": ".ln1.", ".layer_norm2.": ".ln2.", ".norm1.": ".ln1.", ".norm2.": ".ln2.",
    ".self_attn.o_proj.": ".attn_output.", ".self_attn.out_proj.": ".attn_out.",
    **{f".self_attn.{one}_{kind}.": f".attn_{one}{end}."
       for one in "qkv" for kind, end in (("proj", ""), ("norm", "_norm"))},
    **{f".mlp.{one}_proj.": f".ffn_{one}." for one in ("gate", "up", "down")},
    ".mlp.fc1.": ".ffn_up.", ".mlp.fc2.": ".ffn_down.",
}  # fmt: skip


class Arranged(NamedTuple):
    """Tensors of GGUF files that are one of the Hub's, and the function that makes it of them; None: it is
    the tensor of that name as it lies."""

    names: tuple[str, ...]
    join: Callable[..., Tensor] | None = None


def arranged(family: Any, layout: Layout, config: Any, llama: bool) -> dict[str, Arranged]:
    """Every tensor of a model of this config (`VLMConfig`), by its name in the Hub's layout. `llama`: its
    text part is a Llama, of which llama.cpp rotates neighbours."""
    with torch.device("meta"):
        modules = dict(zip(("vision_model", "projector", "language_model"), family.build(config)))
    own, place = layout.fronts(config), family.tensor_map((), config)
    fronts = {**own, **_FRONTS, **own}  # its own come first
    heads = {"q": config.text.num_attention_heads, "k": config.text.num_key_value_heads}
    found: dict[str, Arranged] = {}
    for part, module in modules.items():
        inside = {**_INSIDE, **layout.inside.get(part, {})}
        for name, _ in module.named_parameters(part, remove_duplicate=False):
            hubs, theirs = place(name).name, rename(name, fronts, inside)
            names = dict.fromkeys((*(found[hubs].names if hubs in found else ()), theirs))
            join = None if len(names) == 1 else lambda *rows: torch.cat(rows)  # of q, k and v, fused there
            for end, (more, others) in layout.joins.items():
                if name.endswith(end):
                    names, join = dict.fromkeys((theirs, *(theirs + other for other in others))), more
            if llama and (of := re.search(r"^language_model.*\.([qk])_proj\.", name)):
                join = partial(_halves, heads=heads[of[1]])
            found[hubs] = Arranged((*names,), join)
    return found


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Rows (H · D_h, ...) of queries or keys of a Llama: llama.cpp rotates neighbours, (H, D_h / 2, 2), the
    Hub's layout halves of a head, (H, 2, D_h / 2)."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
