"""JSON of a checkpoint, read as what it is: someone else's words.

A file's size is known before it is read, and its values are counted before they are parsed, since Python's
objects take some twenty times its bytes; and a key that is given twice with different values is refused, for
each reader would make another model of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.checkpoints.errors import CheckpointError

# The largest config files are lists of a tokenizer's added tokens, a megabyte; an index lists at most the
# tensors of a thousand layers; tokenizer.json holds vocabulary and merges (Gemma's are 33 MB with two million
# values). `data.file_limits` has the same.
MAX_CONFIG, MAX_INDEX, MAX_TOKENIZER = 4 * 2**20, 8 * 2**20, 32 * 2**20  # bytes
MOST_VALUES = 2_500_000  # of one file: commas and opening brackets


def most_bytes(name: str) -> int:
    """What a checkpoint's JSON file of that name may have."""
    limits = {"model.safetensors.index.json": MAX_INDEX, "tokenizer.json": MAX_TOKENIZER}
    return limits.get(name, MAX_CONFIG)


def read_json(path: Path, most: int = MAX_CONFIG) -> dict:
    """A JSON object from a file of at most `most` bytes.

    Raises:
        CheckpointError: too large, not UTF-8, not JSON, a key with two values, or not an object.
    """
    size = path.stat().st_size
    if size > most:
        raise CheckpointError(f"{path}: expected at most {most} bytes of JSON, got {size}")
    raw = path.read_bytes()
    if sum(map(raw.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise CheckpointError(f"{path}: expected at most {MOST_VALUES} values of JSON, got more")
    try:
        value = parse_json(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def parse_json(raw: bytes) -> Any:
    """Raises ValueError for what is not UTF-8, not JSON, nested too deeply, or has a key with two values."""
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unambiguous)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        for name, value in pairs:
            if found[name] != value:
                raise ValueError(f"the key {name[:80]!r} stands twice, with different values")
    return found
