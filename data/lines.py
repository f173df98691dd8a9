"""Lines of JSON that someone else wrote, none of which may fill the memory.

A longer line is passed over piece by piece, and never held: what a reader gets of it is so much that
`is_too_long` can tell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from models.checkpoints.hub import check_values

# Bytes, without the line's end. A row may carry its images as base64; as Python's text, of which one
# character beyond the usual ones makes four bytes of each, it takes half a GiB twice while it is parsed.
MAX_LINE = 128 * 2**20
TOO_LONG = f"longer than {MAX_LINE >> 20} MiB"
_PIECE = 2**20


def lines_of(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """(place, line) of each line from where a file stands; of one that is too long, its beginning."""
    place = file.tell()
    while line := file.readline(MAX_LINE + 1):
        begin, place, cut = place, place + len(line), is_too_long(line)
        yield begin, line
        del line  # two of them are not held at once
        if cut:
            place = _pass_over(file, place)


def _pass_over(file: IO[bytes], place: int) -> int:
    """Go behind the end of the line that a file stands in, and say where that is."""
    while piece := file.read(_PIECE):  # faster than `readline`, which is made for short ones
        if end := piece.find(b"\n") + 1:
            return file.seek(place + end)
        place += len(piece)
    return place


def line_at(file: IO[bytes], place: int) -> bytes:
    """The line that begins at a place, as `lines_of` gives it."""
    file.seek(place)
    return file.readline(MAX_LINE + 1)


def is_too_long(line: bytes) -> bool:
    return len(line) > MAX_LINE and not line.endswith(b"\n")


def parse_line(line: bytes) -> Any:
    """What a line that is not too long holds.

    Raises:
        ValueError: no JSON, nested too deeply, or of more values than anyone means.
    """
    check_values(line)
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError(str(error)) from None
