"""Images of visitors, which may be made to do harm: bounded in what Pillow leaves unbounded.

- Headers, which it reads in Python, a chunk or a letter at a time: the pieces of a file are counted.
- EXIF and TIFF directories, whose entries may all point at the same bytes, which it copies for each of them:
  it is shown the first kilobytes of an EXIF block and the first megabytes of TIFF tags.
- Decoders written in Python, JPEGs of thousands of scans, and tiles larger than their image.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO

from PIL import Image

from data.images import EXIF_HEAD, ImageLimits, is_heic

HEADER_PIECES, PIECES = 10_000, 300_000  # reads of a header, and of a whole file: 128 MiB in chunks of 8 kB
TIFF_VALUES = 2**22  # bytes of what a TIFF's tags point at; Pillow reads them twice
STRIPS = 100_000  # of a TIFF
SCANS, SCANNED_PIXELS = 100, 1_200_000_000  # of a JPEG (a usual progressive one has ten), and their pixels
PIXELS_IN_PYTHON = 2_000_000  # one to three seconds of a decoder that Pillow has in Python
PIXELS_IN_JPEG2000 = 16_000_000  # its decoder takes ten times as long as others

# Blocks that Pillow and the HEIC library would read whole while opening: renamed, so that they do not.
_JPEG_BLOCK = re.compile(rb"(\xff[\xe1\xe2]..)(Exif\0\0|MPF\0)", re.DOTALL)
_JPEG_EXIF = re.compile(rb"\xff\xe1..(?=Exif\0\0)", re.DOTALL)
_AVIF_ITEM = re.compile(rb"(infe.{8}(?:..)?)Exif", re.DOTALL)  # an item information entry
_HEIC_ITEM = re.compile(rb"infe(?!\x02.{7}(?:hvc1|grid)|\x03.{9}(?:hvc1|grid))", re.DOTALL)  # of no image
_MARKER = re.compile(rb"\xff([^\x00\xff])")
_COMMENT = re.compile(rb"#[^\r\n]*[\r\n]?")


@dataclass(frozen=True)
class VisitorLimits(ImageLimits):
    """Limits within which no image takes more than seconds and some hundred megabytes, whatever it holds."""

    def open(self, file: BinaryIO, formats: list[str]) -> Image.Image:
        data = file.read()
        tags = TIFF_VALUES if data[:2] in (b"II", b"MM") else float("inf")
        counted = _CountedReads(_harmless(data), HEADER_PIECES, tags)
        image = Image.open(counted, formats=formats)
        if data.startswith(b"\xff\xd8"):  # its EXIF was renamed; not that of a second image
            pixels = next((end for marker, end in _jpeg_segments(data) if marker == 0xDA), len(data))
            found = _JPEG_EXIF.search(data, 0, pixels)
            image.info["exif"] = data[found.end() : found.end() + EXIF_HEAD] if found else b""
        counted.pieces, counted.value_bytes = PIECES, float("inf")
        self._check_cost(image, data)
        return image

    def _check_cost(self, image: Image.Image, data: bytes) -> None:
        """Refuse what takes far longer to decode than its pixels suggest."""
        pixels = image.width * image.height
        codecs = [tile[0] for tile in getattr(image, "tile", ())]
        if any(codec in Image.DECODERS for codec in codecs):
            _check_most("pixels in this rare encoding", pixels, PIXELS_IN_PYTHON)
        if image.format == "JPEG2000":
            _check_most("pixels in JPEG 2000", pixels, PIXELS_IN_JPEG2000)
        if image.format == "JPEG":
            scans = sum(marker == 0xDA for marker, _ in islice(_jpeg_segments(data), PIECES))
            most = min(SCANS, max(1, SCANNED_PIXELS // max(1, pixels)))
            _check_most("scans of a JPEG of this size", scans, most)
        if image.format == "TIFF":
            _check_most("strips or tiles", len(codecs), STRIPS)
            # Tiles are decoded whole, and an image of few pixels may be cut out of one of many.
            tags = (image.tag_v2.get(number) for number in (322, 323))  # type: ignore[attr-defined]
            width, height = (tag if isinstance(tag, int) and tag > 0 else 1 for tag in tags)
            covered = -(-image.width // width) * width * -(-image.height // height) * height
            _check_most(f"pixels in tiles of {width} x {height}", covered, self.max_pixels)


def _check_most(what: str, got: int, most: int) -> None:
    if got > most:
        raise ValueError(f"expected at most {most:,} {what}, got {got:,}")


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """A JPEG's markers up to its end, and where the segment of each ends; what stands inside is skipped."""
    place = 0
    # Without `+` after \xff, which would try a run of them from each of its places.
    while (match := _MARKER.search(data, place)) and match[1] != b"\xd9":
        marker, place = match[1][0], match.end()
        if marker != 0x01 and not 0xD0 <= marker <= 0xD8:  # those have no length
            place += int.from_bytes(data[place : place + 2], "big")
        yield marker, place


class _CountedReads(io.BytesIO):
    """A file that may be read in `pieces` reads. Of its larger values so many bytes are given; it seems to
    have ended in front of a value that is longer than what is left of them."""

    def __init__(self, data: bytes, pieces: int, value_bytes: float):
        super().__init__(data)
        self.pieces, self.value_bytes = pieces, value_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        self.pieces -= 1
        if self.pieces < 0:
            raise ValueError("it consists of too many pieces")
        if size is not None and size > 64:
            if size > self.value_bytes:
                return b""
            self.value_bytes -= size
        return super().read(size)


def _harmless(data: bytes) -> bytes:
    """The same image without what takes unbounded time or memory to open."""
    if data.startswith(b"\xff\xd8"):
        return _JPEG_BLOCK.sub(lambda match: match[1] + bytes(len(match[2])), data)
    if data[4:8] == b"ftyp":  # turned by properties of its own, which go before its EXIF
        return _HEIC_ITEM.sub(b"free", data) if is_heic(data) else _AVIF_ITEM.sub(rb"\1none", data)
    if data[:2] in (b"P1", b"P2", b"P3"):  # for each comment Pillow copies all that follows it
        if data.count(b"#") > PIECES:
            raise ValueError("it consists of too many pieces")
        return _COMMENT.sub(b"", data)
    return data
