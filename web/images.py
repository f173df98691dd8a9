"""Images of visitors, which may be made to do harm: four formats, bounded in what Pillow leaves unbounded.

- Headers, which it reads in Python, a chunk at a time: the pieces of a file are counted.
- EXIF, whose entries may all point at the same bytes, which it copies for each of them: it is shown the first
  kilobytes of a block.
- JPEGs of thousands of scans.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO

from PIL import Image

from data.images import EXIF_HEAD, ImageLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # those of OpenAI's and Anthropic's servers
HEADER_PIECES, PIECES = 10_000, 300_000  # reads of a header, and of a whole file: 128 MiB in chunks of 8 kB
SCANS, SCANNED_PIXELS = 100, 1_200_000_000  # of a JPEG (a usual progressive one has ten), and their pixels

# Blocks that Pillow would read whole while opening: renamed, so that it does not.
_JPEG_BLOCK = re.compile(rb"(\xff[\xe1\xe2]..)(Exif\0\0|MPF\0)", re.DOTALL)
_JPEG_EXIF = re.compile(rb"\xff\xe1..(?=Exif\0\0)", re.DOTALL)
_MARKER = re.compile(rb"\xff([^\x00\xff])")


@dataclass(frozen=True)
class VisitorLimits(ImageLimits):
    """Limits within which no image takes more than seconds and some hundred megabytes, whatever it holds."""

    def open(self, file: BinaryIO, formats: list[str]) -> Image.Image:
        data = file.read()
        jpeg = data.startswith(b"\xff\xd8")
        plain = _JPEG_BLOCK.sub(lambda match: match[1] + bytes(len(match[2])), data) if jpeg else data
        counted = _CountedReads(plain)
        image = Image.open(counted, formats=FORMATS)
        if jpeg:
            scans = [end for marker, end in islice(_jpeg_segments(data), PIECES) if marker == 0xDA]
            most = min(SCANS, max(1, SCANNED_PIXELS // max(1, image.width * image.height)))
            if len(scans) > most:
                raise ValueError(f"expected at most {most} scans of a JPEG of this size, got {len(scans):,}")
            # Its EXIF was renamed; not that of a second image, behind the pixels.
            found = _JPEG_EXIF.search(data, 0, scans[0] if scans else len(data))
            image.info["exif"] = data[found.end() : found.end() + EXIF_HEAD] if found else b""
        counted.pieces = PIECES
        return image


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
    """A file that may be read in `pieces` reads."""

    pieces = HEADER_PIECES

    def read(self, size: int | None = -1, /) -> bytes:
        self.pieces -= 1
        if self.pieces < 0:
            raise ValueError("it consists of too many pieces")
        return super().read(size)
