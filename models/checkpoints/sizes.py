"""The size of a checkpoint's weights, by the headers of its files; and the parts that they belong to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from models.checkpoints.files import Opened
from models.checkpoints.gguf_weights import gguf_entries
from models.checkpoints.hub import client, fetched, one_sentence
from models.checkpoints.sources import GgufFiles
from models.checkpoints.weights import Shape, stored_entries

PARTS = ("vision", "projector", "embeddings", "blocks", "head")  # of a VisionLanguageModel


def module_of(name: str) -> str:
    """The one of PARTS that a parameter of a `VisionLanguageModel` belongs to."""
    owner, _, rest = name.partition(".")
    if owner != "language_model":
        return {"vision_model": "vision", "projector": "projector"}[owner]
    return {"embed_tokens": "embeddings", "lm_head": "head"}.get(rest.partition(".")[0], "blocks")


@dataclass(frozen=True)
class Headers:
    """Stored tensors by name, dtypes as the file calls them, all bytes, and the number of files."""

    shapes: dict[str, Shape]
    dtypes: dict[str, str]
    num_bytes: int
    files: int

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


def read_headers(opened: Opened) -> Headers | None:
    """The headers of a checkpoint's weights; None for a folder that holds none.

    Headers of a folder or of a downloaded repository are read from the files, as are those of GGUF files.
    Those of other repositories come by range requests, at most the first 100 kB of a file unless its header
    is longer; nothing is kept.
    """
    tensors: dict[str, Any]
    if isinstance(opened.files, GgufFiles):
        tensors, count = gguf_entries(opened, opened.files.headers), len(opened.files.headers)
        size = sum(entry.num_bytes for entry in tensors.values())
    elif weights := opened.weights_here:
        tensors, count = stored_entries(opened), len(weights)
        size = sum(entry.num_bytes for entry in tensors.values())
    elif opened.commit is None:
        return None
    else:
        with one_sentence(opened.source, opened.commit, "the header of the weights"):
            ask = client().HfApi().get_safetensors_metadata
            metadata = fetched(ask, opened.source, revision=opened.commit)
        tensors = {n: info for file in metadata.files_metadata.values() for n, info in file.tensors.items()}
        count = len(metadata.files_metadata)
        size = sum(info.data_offsets[1] - info.data_offsets[0] for info in tensors.values())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Headers(shapes, {name: tensor.dtype for name, tensor in tensors.items()}, size, count)
