"""JSON of a checkpoint: `models.untrusted` with the checkpoint's own error and the file's path."""

from __future__ import annotations

from pathlib import Path

from models.checkpoints.errors import CheckpointError
from models.untrusted import MAX_CONFIG, MAX_INDEX, MAX_TOKENIZER, read_object


def most_bytes(name: str) -> int:
    """What a checkpoint's JSON file of that name may have."""
    limits = {"model.safetensors.index.json": MAX_INDEX, "tokenizer.json": MAX_TOKENIZER}
    return limits.get(name, MAX_CONFIG)


def read_json(path: Path, most: int = MAX_CONFIG) -> dict:
    """A JSON object from a file of at most `most` bytes.

    Raises:
        CheckpointError: too large, not UTF-8, not JSON, a key with two values, or not an object.
    """
    try:
        return read_object(path, most)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
