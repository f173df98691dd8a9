"""What tensors a checkpoint stores, from the headers of its safetensors files alone.

A folder's headers are read from the files, and so are a repository's that was downloaded; of others they come
by range requests, at most the first 100 kB of a file unless its header is longer, and nothing is kept.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from huggingface_hub import HfApi
from huggingface_hub.errors import NotASafetensorsRepoError, OfflineModeIsEnabled, SafetensorsParsingError

from models.checkpoints.errors import CheckpointError
from models.checkpoints.hub import one_sentence
from models.checkpoints.load import stored_entries
from models.checkpoints.locate import CheckpointFiles

_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # one for all others
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Headers:
    """Stored tensors by name, their dtypes as safetensors calls them, and how many files hold them."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    files: int

    @property
    def numbers(self) -> int:
        """Of all stored tensors together."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def stored_bytes(self) -> int:
        return sum(math.prod(self.shapes[name]) * _BYTES.get(kind, 1) for name, kind in self.dtypes.items())

    @property
    def dtype_counts(self) -> dict[str, int]:
        """Numbers stored in each dtype, the most first."""
        counted: Counter[str] = Counter()
        for name, kind in self.dtypes.items():
            counted[DTYPE_NAMES.get(kind, kind)] += math.prod(self.shapes[name])
        return dict(counted.most_common())


def read_headers(files: CheckpointFiles) -> Headers | None:
    """The headers of a checkpoint's weights; None for a folder that holds none.

    Raises:
        CheckpointError: a header is broken, or the Hub does not give it.
    """
    if files.weights:
        entries = stored_entries(files)
        shapes = {name: entry.shape for name, entry in entries.items()}
        dtypes = {name: entry.dtype for name, entry in entries.items()}
        return Headers(shapes, dtypes, len(files.weights))
    repo, commit = files.source, files.origin.commit
    if commit is None:
        return None
    with one_sentence(repo, commit, "the header of the weights"):
        return _read_remote(repo, commit)


def _read_remote(repo: str, commit: str) -> Headers:
    try:
        metadata = HfApi().get_safetensors_metadata(repo, revision=commit)
    except NotASafetensorsRepoError:
        raise CheckpointError(f"repository {repo} has no safetensors weights") from None
    except SafetensorsParsingError as error:
        raise CheckpointError(
            f"repository {repo}: a safetensors header cannot be read ({str(error).splitlines()[0]})"
        ) from error
    except OfflineModeIsEnabled:
        raise CheckpointError(
            f"the weights of {repo} at {commit[:12]} are not all in the local cache: reading their headers "
            f"needs a network, and HF_HUB_OFFLINE is set"
        ) from None
    tensors = {name: info for file in metadata.files_metadata.values() for name, info in file.tensors.items()}
    return Headers(
        {name: tuple(info.shape) for name, info in tensors.items()},
        {name: info.dtype for name, info in tensors.items()},
        len(metadata.files_metadata),
    )
