"""Weights in GGUF files, by their names in the Hub's layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from families import family_of
from models.checkpoints import gguf
from models.checkpoints.files import CheckpointError, Opened, naming
from models.checkpoints.gguf_tensors import arranged
from models.checkpoints.weights import FLOATS, Entry

_OPENED = 4 * 2**20  # bytes of quantized blocks at a time


@dataclass(frozen=True)
class BlockEntry(Entry):
    """A tensor of numbers or of quantized blocks."""

    def read(self, dtype: torch.dtype | None, part: int, parts: int) -> Tensor:
        """Rows part/parts (R, C); blocks are opened some at a time."""
        if self.dtype in FLOATS:
            return super().read(dtype, part, parts)
        rows = math.prod(self.shape[:-1]) // parts
        of_row = self.num_bytes // parts // rows
        tensor = torch.empty(rows, self.shape[-1], dtype=dtype or torch.float32)
        step = max(1, _OPENED // of_row)
        with self.path.open("rb") as file:
            file.seek(self.begin + part * rows * of_row)
            for first in range(0, rows, step):
                raw = np.fromfile(file, np.uint8, wanted := min(step, rows - first) * of_row)
                if raw.size < wanted:
                    raise self.shorter()
                with naming(self.path), np.errstate(all="ignore"):  # of damaged scales
                    opened = gguf.dequantized(raw.reshape(-1, of_row), self.dtype)
                tensor[first : first + step] = torch.from_numpy(opened)
        return tensor


@dataclass(frozen=True)
class JoinedEntry(Entry):
    """A tensor that is several in the file, or one that is arranged otherwise there; `join` makes ours."""

    join: Callable[..., Tensor]
    pieces: tuple[Entry, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def read(self, dtype: torch.dtype | None, part: int, parts: int) -> Tensor:
        pieces = (piece.read(dtype, 0, 1).view(piece.shape).to(dtype) for piece in self.pieces)
        return self.join(*pieces).chunk(parts)[part].contiguous()


def gguf_entries(opened: Opened, paths: Iterable[Path]) -> dict[str, Entry]:
    """Every tensor of these files. One that has no place in the Hub's layout keeps its own name."""
    stored: dict[str, Entry] = {}
    for path in paths:
        with naming(path):
            tensors = gguf.read_header(path).tensors
        stored |= {name: BlockEntry(path, *where) for name, where in tensors.items()}
    kind, family = opened.config["model_type"], family_of(opened.config)
    assert family is not None, "GGUF files are translated by a family"
    with naming(opened.source):
        config = family.read_config(opened.config, {}, {})
    _mend(stored, config.vision)
    entries: dict[str, Entry] = {}
    layout = next(layout for layout in family.GGUF.values() if layout.model_type == kind)
    llama = opened.config["text_config"]["model_type"] == "llama"
    for name, how in arranged(family, layout, config, llama).items():
        if all(one in stored for one in how.names):
            pieces = tuple(stored.pop(one) for one in how.names)
            entries[name] = pieces[0] if how.join is None else _joined(name, pieces, how.join)
    return stored | entries


def _joined(name: str, pieces: tuple[Entry, ...], join: Callable[..., Tensor]) -> Entry:
    first = pieces[0]
    try:
        shape = join(*(torch.empty(piece.shape, device="meta") for piece in pieces)).shape
    except (RuntimeError, IndexError):  # as torch says that shapes do not fit
        shapes = ", ".join(str(list(piece.shape)) for piece in pieces)
        raise CheckpointError(f"{first.path}: shapes of {name} that do not fit together: {shapes}") from None
    return JoinedEntry(first.path, first.dtype, tuple(shape), first.begin, first.end, join, pieces)


def _mend(stored: dict[str, Entry], vision: Any) -> None:
    """llama.cpp's older converters called the first matrix of a tower's MLP `ffn_down`."""
    first, shape = stored.get("v.blk.0.ffn_down.weight"), (vision.intermediate_size, vision.hidden_size)
    if first is not None and first.shape == shape and shape[0] != shape[1]:
        for up in [name for name in stored if name.startswith("v.blk.") and ".ffn_up." in name]:
            down = up.replace(".ffn_up.", ".ffn_down.")
            if down in stored:
                stored[up], stored[down] = stored[down], stored[up]
