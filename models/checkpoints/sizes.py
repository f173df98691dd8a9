"""What a checkpoint takes, before it is read: tensors by their headers, a repository's files by the Hub."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.checkpoints.files import INDEX, PROCESSOR_FILES, CheckpointError, Opened, naming
from models.checkpoints.gguf import choose
from models.checkpoints.gguf_files import GgufFiles
from models.checkpoints.gguf_weights import gguf_entries
from models.checkpoints.hub import Repository, client, fetched, one_sentence, patience
from models.checkpoints.sources import holds_gguf, open_files
from models.checkpoints.weights import Shape, stored_entries

MAX_JSON, MAX_TOKENIZER = 8 * 2**20, 32 * 2**20  # bytes of a repository that a visitor may name


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


@dataclass(frozen=True)
class DownloadSize:
    """The files that opening a repository at `commit` may fetch: bytes by name, and the bytes that are not in
    the cache yet."""

    commit: str
    sizes: dict[str, int]
    missing: int

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def measure(repo: str) -> DownloadSize:
    """What the main branch of a repository takes, before any of it is downloaded; where the Hub cannot be
    asked, of the newest commit that the cache holds with its weights."""
    try:
        with one_sentence(repo, None, "the list of files"):
            info = fetched(client().HfApi().model_info, repo, files_metadata=True, timeout=patience())
            names = [file.rfilename for file in info.siblings if "/" not in file.rfilename]
            with naming(f"repository {repo}"):
                pair = choose(names) if "gguf" in repo.lower() and holds_gguf(names) else ()
            needed = (file for file in info.siblings if file.rfilename in pair or _is_needed(file.rfilename))
            sizes = {file.rfilename: int(file.size) for file in needed}
            files = Repository(repo, str(info.sha))
    except CheckpointError as error:
        not_found = isinstance(error.__cause__, client().errors.RepositoryNotFoundError)
        if not_found or (found := _cached_size(repo)) is None:
            raise
        return found
    for name, size in sizes.items():
        if name.endswith(".json") and size > (
            most := MAX_TOKENIZER if name == "tokenizer.json" else MAX_JSON
        ):
            raise CheckpointError(f"repository {repo}: expected at most {most} bytes in {name}, got {size}")
    missing = sum(size for name, size in sizes.items() if not files.cached(name))
    return DownloadSize(str(info.sha), sizes, missing)


def _cached_size(repo: str) -> DownloadSize | None:
    place = Path(client().constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "snapshots"
    for folder in sorted(place.glob("*"), key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(CheckpointError):
            if open_files(folder).weights_here:
                sizes = {path.name: path.stat().st_size for path in folder.iterdir() if _is_needed(path.name)}
                return DownloadSize(folder.name, sizes, 0)
    return None


def _is_needed(path: str) -> bool:
    return path in (*PROCESSOR_FILES, INDEX) or (path.endswith(".safetensors") and "/" not in path)
