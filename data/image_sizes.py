"""Sizes of images from their headers: no pixel is decoded, and of a file no more read than Pillow needs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from data.images import ImageLimits, NamedBytes, check_most, describe, open_file, open_undecoded, read_bytes


def image_size(
    source: Any,
    limits: ImageLimits = ImageLimits(),  # noqa: B008
    name: str | None = None,
) -> tuple[int, int]:
    """(width, height) of what `load_image` gives; refused as far as the header shows."""
    name = name or describe(source)
    if isinstance(source, Path) and limits.allow_paths and source.is_file():
        with suppress(OSError), source.open("rb") as file:
            check_most(name, "bytes", os.fstat(file.fileno()).st_size, limits.max_bytes)
            return _upright_size(*open_file(file, limits, name))
    return _upright_size(*open_undecoded(source, limits, name))


def measure(source: Any, limits: ImageLimits = ImageLimits()) -> tuple[tuple[int, int], Any]:  # noqa: B008
    """`image_size`, and what to give to `load_image`: `source`, or the bytes of what was fetched or piped."""
    if isinstance(source, str):
        data = NamedBytes(read_bytes(source, limits, name := describe(source)))
        data.name, source = name, data
    return image_size(source, limits), source


def _upright_size(image: Image.Image, orientation: int) -> tuple[int, int]:
    turned = orientation >= 5 and image.format != "TIFF"  # Pillow has turned a TIFF's size by itself
    return (image.height, image.width) if turned else image.size
