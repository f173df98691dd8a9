"""The header of a picture, read at a bounded price.

Pillow reads headers in Python: a chunk, a marker, a letter of a comment at a time. A file may consist of a
hundred million of them, and then the header alone takes minutes; or of one list of a hundred million numbers.
A few kinds of pictures are even decoded in Python, and a JPEG may tell its pixels in thousands of passes.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
from collections.abc import Iterator
from itertools import islice

from PIL import Image, UnidentifiedImageError

from data.errors import ImageError

# Formats that Pillow decodes by itself and recognises by content. Left out on purpose: those that run another
# program (EPS), and those so loosely marked that a text file can pass for one (TGA).
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000")

READS = 300_000  # pieces that a file is read in; 128 MiB in chunks of 8 kB take 50,000
STRIPS = 100_000  # of a TIFF
SCANS = 100  # of a JPEG; a usual progressive one has ten
PIXELS_IN_PYTHON = 2_000_000  # one to three seconds of a decoder in Python

_STRIP_TAGS = (273, 279, 324, 325)  # offsets and lengths of strips and tiles
_MARKER = re.compile(rb"\xff+([^\x00\xff])")
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))  # TEM, RST0 to RST7, SOI
_SOS, _EOI = 0xDA, 0xD9


class _CountedReads(io.BytesIO):
    """Bytes that may be read in so many pieces."""

    left = READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"it consists of more than {READS:,} pieces")
        return super().read(size)


def open_header(data: bytes, name: str, max_pixels: int) -> Image.Image:
    """A picture of which nothing but the header has been read.

    Raises:
        ImageError: no picture, or a header that is damaged or takes too long.
    """
    Image.init()  # registers every plugin, once; naming one that is not registered is a KeyError
    formats = [name for name in FORMATS if name in Image.OPEN]
    try:
        _check_strips(data)
        with warnings.catch_warnings():  # of a large picture: our own limit says it, in one sentence
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(_CountedReads(data), formats=formats)
    except UnidentifiedImageError as error:
        raise ImageError(
            f"{name}: expected a picture (PNG, JPEG, WebP, GIF, BMP, TIFF, ...), got a file that starts with "
            f"{data[:16]!r}; it is another kind of file or damaged"
        ) from error
    except Image.DecompressionBombError as error:  # Pillow's guard, at 179 million pixels
        raise ImageError(
            f"{name}: expected at most {max_pixels:,} pixels, got far more ({one_line(error)})"
        ) from error
    except Exception as error:  # a decoder meets hostile bytes: whatever it raises is a refusal
        raise ImageError(f"{name}: the picture's header is damaged ({one_line(error)})") from error


def check_decoder(image: Image.Image, data: bytes, name: str) -> None:
    """Raises ImageError for what would be decoded pixel by pixel in Python, or in very many passes."""
    in_python = [tile[0] for tile in getattr(image, "tile", ()) if tile[0] in Image.DECODERS]
    if in_python and image.width * image.height > PIXELS_IN_PYTHON:
        raise ImageError(
            f"{name}: expected at most {PIXELS_IN_PYTHON:,} pixels in this rare encoding ({in_python[0]}), "
            f"got {image.width} x {image.height}; save the picture as PNG"
        )
    if image.format in ("JPEG", "MPO") and (scans := _jpeg_scans(data)) > SCANS:
        raise ImageError(f"{name}: expected a JPEG of at most {SCANS} scans, got {scans}; save it again")


def _check_strips(data: bytes) -> None:
    """A TIFF lists its strips; Pillow makes a dozen Python objects of each, however large the picture."""
    if data[:4] in (b"II*\0", b"MM\0*"):
        first, count, number, entry = 4, "H", "I", 12
    elif data[:4] in (b"II+\0", b"MM\0+"):  # BigTIFF
        first, count, number, entry = 8, "Q", "Q", 20
    else:
        return
    order = "<" if data[:1] == b"I" else ">"
    try:
        (place,) = struct.unpack_from(order + number, data, first)
        (entries,) = struct.unpack_from(order + count, data, place)
        place += struct.calcsize(order + count)
        for index in range(min(entries, 65_536)):
            tag, _, length = struct.unpack_from(f"{order}HH{number}", data, place + index * entry)
            if tag in _STRIP_TAGS and length > STRIPS:
                raise ValueError(f"{length:,} strips or tiles, at most {STRIPS:,} are read")
    except (struct.error, OverflowError):
        return  # it is cut off: Pillow will say so


def _jpeg_scans(data: bytes) -> int:
    """How often the pixels are gone through."""
    return sum(marker == _SOS for marker in islice(_markers(data), READS))


def _markers(data: bytes) -> Iterator[int]:
    """A JPEG's markers up to its end; what its segments hold is skipped."""
    place = 0
    while match := _MARKER.search(data, place):
        marker, place = match[1][0], match.end()
        if marker == _EOI:
            return
        yield marker
        if marker not in _WITHOUT_LENGTH:
            place += int.from_bytes(data[place : place + 2], "big")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
