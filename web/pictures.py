"""Uploaded images: which of them can be read, smaller copies of large ones, and how large those were.

A copy that page.js or `take_in` makes of a large image says in its first bytes, a comment of JPEG, how many
pixels the image has: an answer's boxes are in pixels of that, not of the copy.
"""

from __future__ import annotations

import io
import mimetypes
import re
from pathlib import Path

from PIL import Image

from data.images import ImageLimits

# What browsers show, by its first bytes.
_SHOWN = re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF....WEBP|.{4}ftypavi", re.DOTALL)
_COMMENT = "ocelli {}x{}"
_ORIGINAL = re.compile(rb"\xff\xd8\xff\xfe..ocelli (\d{1,6})x(\d{1,6})", re.DOTALL)
_QUALITY = 95  # of a copy


def take_in(path: str, image: Image.Image, edge: int) -> str:
    """The path of an uploaded image as a browser can show it: the file itself, or a copy that takes its
    place, with a longest side of `edge` pixels at most."""
    file = Path(path)
    with file.open("rb") as opened:
        shown = _SHOWN.match(opened.read(16))
    named = (mimetypes.guess_type(path)[0] or "").startswith("image/")
    size = original_size(path, image.size)
    if shown and named and max(image.size) <= edge:
        return path
    made = io.BytesIO()
    if max(image.size) <= edge:
        suffix = ".png"
        image.save(made, "PNG")
        data = made.getvalue()
    else:
        suffix = ".jpg"
        image.thumbnail((edge, edge), Image.Resampling.LANCZOS)
        image.save(made, "JPEG", quality=_QUALITY)
        comment = _COMMENT.format(*size).encode()
        data = made.getvalue()
        data = data[:2] + b"\xff\xfe" + (2 + len(comment)).to_bytes(2, "big") + comment + data[2:]
    copy = file.with_suffix(suffix)
    file.unlink(missing_ok=True)  # first: where file systems know no case, both are one file
    copy.write_bytes(data)
    return str(copy)


def original_size(path: str, size: tuple[int, int]) -> tuple[int, int]:
    """(width, height) of the image that a file of this size is a copy of, which are its own where it is none.
    The file is a stranger's: what cannot be true of a copy is not believed."""
    with open(path, "rb") as file:
        said = _ORIGINAL.match(file.read(64))
    if said is None:
        return size
    (width, height), (wide, high) = size, (int(said[1]), int(said[2]))
    alike = abs(width * high - height * wide) <= max(wide, high)  # the copy's sides are rounded
    believed = alike and wide >= width and high >= height and wide * high <= ImageLimits().max_pixels
    return (wide, high) if believed else size
