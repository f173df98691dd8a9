"""Which way up an image is, read from its EXIF block alone.

Pillow copies every tag of an EXIF block, and tags may all point at the same bytes: half a megabyte of them
becomes gigabytes. So Pillow is not shown the blocks that it would read, and the one tag that counts is read
here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from itertools import islice
from typing import Any

from data.image_kinds import is_heic

EXIF = b"Exif\0\0"
PIECES = 300_000  # chunks or segments that are looked at

_ORIENTATION_TAG = 0x0112
_VALUES = {(1, 1): "B3x", (3, 1): "H2x", (4, 1): "I"}  # by (type, count): BYTE, SHORT, LONG
_PNG = b"\x89PNG\r\n\x1a\n"
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_JPEG_BLOCK = re.compile(rb"(\xff[\xe1\xe2]..)(Exif\0\0|MPF\0)", re.DOTALL)
_AVIF_ITEM = re.compile(rb"(infe.{8}(?:..)?)Exif", re.DOTALL)  # of an item information entry
# Such an entry of anything but an image in HEVC and its tiles.
_HEIC_ITEM = re.compile(rb"infe(?!\x02.{7}(?:hvc1|grid)|\x03.{9}(?:hvc1|grid))", re.DOTALL)
_MARKER = re.compile(rb"\xff([^\x00\xff])")  # without `+`, which tries a run of 0xFF from every place of it
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))  # TEM, RST0 to RST7, SOI
_APP1, SOS, _EOI = 0xE1, 0xDA, 0xD9


def orientation(info: dict[Any, Any]) -> int:
    """1 to 8, of an image's `info`: its EXIF, else its XMP. What cannot be read counts as none, 1."""
    exif = info.get("exif")
    if exif is None and isinstance(text := info.get("Raw profile type exif"), str):
        try:
            exif = bytes.fromhex("".join(text.split("\n")[3:]))
        except ValueError:
            return 1
    found = _orientation_tag(exif) if isinstance(exif, bytes) else None
    xmp = info.get("XML:com.adobe.xmp") or info.get("xmp")
    if found is None and isinstance(xmp, bytes | str):
        match = _XMP.search(xmp.encode(errors="replace") if isinstance(xmp, str) else xmp)
        found = int(match[1]) if match else None
    return found if found is not None and 1 <= found <= 8 else 1


def _orientation_tag(exif: bytes) -> int | None:
    block = exif.removeprefix(EXIF).removeprefix(EXIF)  # Pillow puts one before a PNG's, which may have one
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None:
        return None
    try:
        (place,) = struct.unpack_from(order + "I", block, 4)
        (count,) = struct.unpack_from(order + "H", block, place)
    except struct.error:
        return None
    entries = block[place + 2 : place + 2 + 12 * count]
    for tag, kind, values, value in struct.iter_unpack(order + "HHI4s", entries[: len(entries) // 12 * 12]):
        if tag == _ORIENTATION_TAG and (form := _VALUES.get((kind, values))):
            return struct.unpack(order + form, value)[0]
    return None


def find_exif(data: bytes) -> bytes | None:
    """The EXIF block of a JPEG or PNG, wherever in the file it stands."""
    if data.startswith(b"\xff\xd8"):
        for marker, place in islice(jpeg_markers(data), PIECES):
            if marker == SOS:
                return None
            if marker == _APP1 and data.startswith(EXIF, place + 2):
                return data[place + 2 : place + int.from_bytes(data[place : place + 2], "big")]
    elif data.startswith(_PNG):
        place = len(_PNG)
        for _ in range(PIECES):
            length, name = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8]
            if name == b"eXIf":
                return data[place + 8 : place + 8 + length]
            if name in (b"IEND", b""):
                return None
            place += 12 + length
    return None


def without_exif(data: bytes) -> bytes:
    """A JPEG, AVIF or HEIC whose EXIF and list of further images are not recognised; of the same length.

    An AVIF or HEIC is turned by properties of its own, which go before its EXIF. Of a HEIC everything but the
    image is hidden: its library reads all items, a thousand of which may be the same megabytes.
    """
    if data.startswith(b"\xff\xd8"):
        return _JPEG_BLOCK.sub(lambda match: match[1] + bytes(len(match[2])), data)
    if data[4:8] == b"ftyp":
        return _HEIC_ITEM.sub(b"free", data) if is_heic(data) else _AVIF_ITEM.sub(rb"\1none", data)
    return data


def jpeg_markers(data: bytes) -> Iterator[tuple[int, int]]:
    """A JPEG's markers up to its end, and where what follows each begins; what segments hold is skipped."""
    place = 0
    while match := _MARKER.search(data, place):
        marker, place = match[1][0], match.end()
        if marker == _EOI:
            return
        yield marker, place
        if marker not in _WITHOUT_LENGTH:
            place += int.from_bytes(data[place : place + 2], "big")
