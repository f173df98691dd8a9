"""Weights in GGUF files, by their names in the Hub's layout: which tensors they are made of there, and how
these lie."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from families import family_of
from families.keys import section
from generation.codes import BLOCK, Codes
from models.checkpoints import gguf
from models.checkpoints.files import Opened, naming
from models.checkpoints.gguf_config import Join, Layout
from models.checkpoints.gguf_files import GgufFiles
from models.checkpoints.quantized import BLOCKS, codes_of_blocks, joined
from models.checkpoints.weights import FLOATS, Entry, memory_of, rename

_OPENED = 2**20  # bytes of quantized blocks at a time


@dataclass(frozen=True)
class BlockEntry(Entry):
    """A tensor of numbers or of quantized blocks."""

    def read(self, dtype: torch.dtype | None, part: int, parts: int) -> Tensor:
        """Rows part/parts (R, C)."""
        if self.dtype in FLOATS:
            return super().read(dtype, part, parts)
        tensor = torch.empty(
            math.prod(self.shape[:-1]) // parts, self.shape[-1], dtype=dtype or torch.float32
        )
        for first, raw in self._rows(part, parts):
            with naming(self.path), np.errstate(all="ignore"):  # of damaged scales
                opened = gguf.dequantized(raw.numpy(), self.dtype)
            tensor[first : first + len(raw)] = torch.from_numpy(opened)
        return tensor

    def codes(self, part: int, parts: int) -> Codes | None:
        if len(self.shape) != 2 or self.dtype not in BLOCKS:
            return None
        made, rows = None, self.shape[0] // parts
        for first, raw in self._rows(part, parts):
            own = codes_of_blocks(raw, self.dtype)
            made = made or own.of(*(tensor.new_empty(rows, tensor.shape[1]) for tensor in own.tensors))
            for whole, tensor in zip(made.tensors, own.tensors):
                whole[first : first + len(tensor)] = tensor
        return made

    def _rows(self, part: int, parts: int) -> Iterator[tuple[int, Tensor]]:
        """Rows part/parts, some at a time: where they begin, and their bytes (R, B), until the next ones."""
        rows = math.prod(self.shape[:-1]) // parts
        of_row = self.num_bytes // parts // rows
        with self.path.open("rb") as file:
            file.seek(self.begin + part * rows * of_row)
            step = min(max(1, _OPENED // of_row), rows)
            memory = torch.empty(step, of_row, dtype=torch.uint8)
            for first in range(0, rows, step):
                raw = memory[: rows - first]
                if file.readinto(memory_of(raw)) != raw.numel():
                    raise self.shorter()
                yield first, raw


def gguf_entries(opened: Opened, paths: Iterable[Path]) -> dict[str, Entry]:
    """Every tensor of these files. One that has no place in the Hub's layout keeps its own name."""
    stored: dict[str, Entry] = {}
    assert isinstance(opened.files, GgufFiles)
    for path, tensors in zip(paths, opened.files.tensors):
        stored |= {name: BlockEntry(path, *where) for name, where in tensors.items()}
    kind, family = opened.config["model_type"], family_of(opened.config)
    assert family is not None, "GGUF files are translated by a family"
    with naming(opened.source):
        config = family.read_config(opened.config, {}, {})
    _mend(stored, config.vision)
    entries: dict[str, Entry] = {}
    layout = next(one for one in family.GGUF.values() if kind in (one.model_type, one.alone))
    llama = section(opened.config, "text_config").get("model_type") == "llama"
    for name, (names, how) in arranged(family, layout, config, llama).items():
        if all(one in stored for one in names):
            entries[name], *others = (stored.pop(one) for one in names)
            if how is not None:
                whole = max(BLOCK, BLOCKS.get(entries[name].dtype, (0, 0))[1])  # columns that share a word
                keeps = how.run is not None and how.run % whole == 0
                entries[name] = joined(how.make, entries[name], *others, by_rows=keeps)
    return stored | entries


def _mend(stored: dict[str, Entry], vision: Any) -> None:
    """llama.cpp's older converters called the first matrix of a tower's MLP `ffn_down`."""
    first, shape = stored.get("v.blk.0.ffn_down.weight"), (vision.intermediate_size, vision.hidden_size)
    if first is not None and first.shape == shape and shape[0] != shape[1]:
        for up in [name for name in stored if name.startswith("v.blk.") and ".ffn_up." in name]:
            down = up.replace(".ffn_up.", ".ffn_down.")
            if down in stored:
                stored[up], stored[down] = stored[down], stored[up]


# --------------------------------------------------------------------------------------------------- names
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


def arranged(
    family: Any, layout: Layout, config: Any, llama: bool
) -> dict[str, tuple[tuple[str, ...], Join | None]]:
    """Every tensor of a model of this config (`VLMConfig`), by its name in the Hub's layout: the tensors of
    GGUF files that it is, and how it is made of them; None: it is the one of that name as it lies. `llama`:
    the text part is a Llama, of which llama.cpp rotates neighbours."""
    with torch.device("meta"):
        modules = dict(zip(("vision_model", "projector", "language_model"), family.build(config)))
    own, place, joins = layout.fronts(config), family.tensor_map((), config), layout.joins(config)
    fronts = {**own, **_FRONTS, **own}  # its own come first
    heads = {"q": config.text.num_attention_heads, "k": config.text.num_key_value_heads}
    found: dict[str, tuple[tuple[str, ...], Join | None]] = {}
    for part, module in modules.items():
        of_part = layout.inside.get(part, {})
        inside = {**of_part, **_INSIDE, **of_part}
        for name, _ in module.named_parameters(part, remove_duplicate=False):
            hubs, theirs = place(name).name, rename(name, fronts, inside)
            names = dict.fromkeys((*(found[hubs][0] if hubs in found else ()), theirs))
            how = None if len(names) == 1 else Join(lambda *rows: torch.cat(rows), run=0)  # q, k, v, fused
            for end, join in joins.items():
                if name.endswith(end):
                    names, how = dict.fromkeys((theirs, *(theirs + other for other in join.others))), join
            if llama and (of := re.search(r"^language_model.*\.([qk])_proj\.", name)):
                how = Join(partial(_halves, heads=heads[of[1]]), run=0)
            found[hubs] = (*names,), how
    return found


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Rows (H · D_h, ...) of queries or keys of a Llama: llama.cpp rotates neighbours, (H, D_h / 2, 2), the
    Hub's layout halves of a head, (H, 2, D_h / 2)."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
