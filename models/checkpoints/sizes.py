"""The size of a checkpoint's weights, by the headers of its files; and the parts that they belong to."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from models.checkpoints.files import Opened
from models.checkpoints.gguf_weights import gguf_entries
from models.checkpoints.hub import client, fetched, one_sentence
from models.checkpoints.quantized import quantized_entries
from models.checkpoints.sources import GgufFiles
from models.checkpoints.weights import Entry, Shape, shapes_of, stored_entries

PARTS = ("vision", "projector", "embeddings", "blocks", "head")  # of a VisionLanguageModel


def module_of(name: str) -> str:
    """The one of PARTS that a parameter of a `VisionLanguageModel` belongs to."""
    owner, _, rest = name.partition(".")
    if owner != "language_model":
        return {"vision_model": "vision", "projector": "projector"}[owner]
    return {"embed_tokens": "embeddings", "lm_head": "head"}.get(rest.partition(".")[0], "blocks")


@dataclass(frozen=True)
class Headers:
    """Stored tensors by name, and the number of files."""

    entries: dict[str, Entry]
    files: int

    @property
    def shapes(self) -> dict[str, Shape]:
        return shapes_of(self.entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries.values())

    @property
    def num_elements(self) -> int:
        return sum(math.prod(entry.shape) for entry in self.entries.values())


def read_headers(opened: Opened) -> Headers | None:
    """The headers of a checkpoint's weights; None for a folder that holds none.

    Headers of a folder or of a downloaded repository are read from the files, as are those of GGUF files.
    Those of other repositories come by range requests, at most the first 100 kB of a file unless its header
    is longer; nothing is kept.
    """
    if isinstance(opened.files, GgufFiles):
        return Headers(gguf_entries(opened, opened.files.headers), len(opened.files.headers))
    if weights := opened.weights_here:
        tensors, count = stored_entries(opened), len(weights)
    elif opened.commit is None:
        return None
    else:
        with one_sentence(opened.source, opened.commit, "the header of the weights"):
            ask = client().HfApi().get_safetensors_metadata
            metadata = fetched(ask, opened.source, revision=opened.commit)
        tensors = {
            name: Entry(Path(os.devnull, file), info.dtype, tuple(info.shape), *info.data_offsets)
            for file, header in metadata.files_metadata.items()
            for name, info in header.tensors.items()
        }
        count = len(metadata.files_metadata)
    return Headers(quantized_entries(tensors, opened.config), count)
