"""A TIFF whose directory holds nothing but what its pixels are decoded by.

Pillow copies what every tag of a TIFF points at, follows its directories and makes Python objects of their
numbers; tags may all point at the same bytes, and directories at each other.
"""

from __future__ import annotations

import struct
from typing import Any

STRIPS = 100_000  # of a TIFF, and values of any of its tags

_WIDTH, _HEIGHT, _TILE_WIDTH, _TILE_HEIGHT = 256, 257, 322, 323
_STRIP_TAGS = (273, 279, 324, 325)  # offsets and lengths of strips and tiles
_KEPT = frozenset((
    _WIDTH, _HEIGHT, _TILE_WIDTH, _TILE_HEIGHT, *_STRIP_TAGS,
    258, 259, 262, 266, 277, 278, 284,  # bits, compression, colours, samples, strips, planes
    274,  # orientation: Pillow turns a TIFF by itself
    292, 293, 317, 320, 332, 334, 338, 339, 340, 341,  # fax, predictor, palette, inks, kinds of samples
    347, *range(512, 522), 529, 530, 531, 532, 50674,  # JPEG's tables, YCbCr, LERC
))  # fmt: skip


def plain_tiff(data: bytes, max_pixels: int) -> bytes:
    """A TIFF or BigTIFF with a directory of its first image, rewritten at its end; other data as it is.

    Raises:
        ValueError: too many values in one tag, or tiles of more than `max_pixels` pixels together.
    """
    if data[:2] not in (b"II", b"MM") or not any(byte in (42, 43) for byte in data[2:4]):
        return data
    order = "<" if data[:1] == b"I" else ">"
    # Where Pillow looks for it: a big-endian BigTIFF it takes for a small one, and fails.
    first, count, number = (8, "Q", "Q") if data[2] == 43 else (4, "H", "I")
    width = struct.calcsize(number)
    entry = struct.Struct(f"{order}HH{number}{width}s")
    try:
        (place,) = struct.unpack_from(order + number, data, first)
        (entries,) = struct.unpack_from(order + count, data, place)
    except (struct.error, OverflowError):
        return data  # it is cut off: Pillow will say so
    place += struct.calcsize(order + count)
    listed = data[place : place + min(entries, 65_536) * entry.size]
    whole = listed[: len(listed) // entry.size * entry.size]
    found = {tag: rest for tag, *rest in entry.iter_unpack(whole) if tag in _KEPT}
    for tag, (_, length, _) in found.items():
        if length > STRIPS:
            what = "strips or tiles" if tag in _STRIP_TAGS else f"values of tag {tag}"
            raise ValueError(f"{length:,} {what}, at most {STRIPS:,} are read")
    _check_tiles(found, order, max_pixels)
    directory = struct.pack(order + count, len(found))
    directory += b"".join(entry.pack(tag, *found[tag]) for tag in sorted(found)) + bytes(width)
    end = len(data) + len(data) % 2
    if end >= 1 << 8 * width:
        return data
    return b"".join((data[:first], struct.pack(order + number, end), data[first + width :],
                     bytes(len(data) % 2), directory))  # fmt: skip


def _check_tiles(found: dict[int, list[Any]], order: str, max_pixels: int) -> None:
    """An image of few pixels may be cut out of tiles of many, which are decoded whole.

    `found` is {tag: [type, count, value or place]}.
    """
    if _TILE_WIDTH not in found or _TILE_HEIGHT not in found:
        return
    sizes = []
    for tag in (_WIDTH, _HEIGHT, _TILE_WIDTH, _TILE_HEIGHT):
        kind, _, value = found.get(tag, (4, 1, b"\0"))
        size = {1: 1, 3: 2, 4: 4}.get(kind, len(value))
        sizes.append(int.from_bytes(value[:size], "little" if order == "<" else "big"))
    width, height, tile_width, tile_height = sizes
    if tile_width and tile_height:
        pixels = -(-width // tile_width) * tile_width * -(-height // tile_height) * tile_height
        if pixels > max_pixels:
            raise ValueError(
                f"{pixels:,} pixels in tiles of {tile_width} x {tile_height}, at most {max_pixels:,} are read"
            )
