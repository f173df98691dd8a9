"""JSON that someone else wrote, read as what it is.

A file's size is known before it is read, and its values are counted before they are parsed, since Python's
objects take some twenty times its bytes; and a key that is given twice with different values is refused, for
each reader would make another model of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The largest config files are lists of a tokenizer's added tokens, a megabyte; an index lists at most the
# tensors of a thousand layers; tokenizer.json holds vocabulary and merges (Gemma's are 33 MB with two million
# values).
MAX_CONFIG, MAX_INDEX, MAX_TOKENIZER = 4 * 2**20, 8 * 2**20, 32 * 2**20  # bytes
MOST_VALUES = 2_500_000  # of one file: commas and opening brackets


def read_object(path: Path, most: int = MAX_CONFIG) -> dict[str, Any]:
    """A JSON object from a file of at most `most` bytes.

    Raises:
        ValueError: too large, not UTF-8, not JSON, a key with two values, or not an object; without the path.
    """
    check_size(path, most)
    raw = path.read_bytes()
    check_values(raw)
    try:
        value = parse_json(raw)
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def check_size(path: Path, most: int) -> None:
    """Raises ValueError for a file of more than `most` bytes, which is not read."""
    size = path.stat().st_size
    if size > most:
        raise ValueError(f"expected at most {most} bytes, got {size}")


def check_values(raw: bytes) -> None:
    """Raises ValueError for JSON of more than `MOST_VALUES` values."""
    if sum(map(raw.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise ValueError(f"expected at most {MOST_VALUES} values of JSON, got more")


def parse_json(raw: bytes) -> Any:
    """Raises ValueError for what is not UTF-8, not JSON, nested too deeply, or has a key with two values."""
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unambiguous)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        for name, value in pairs:
            if found[name] != value:
                raise ValueError(f"the key {name[:80]!r} stands twice, with different values")
    return found
