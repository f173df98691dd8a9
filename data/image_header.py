"""The header of an image, read at a bounded price.

Pillow reads headers in Python: a chunk, a marker, a letter of a comment at a time. A file may consist of a
hundred million of them, and then the header alone takes minutes; or of one list of a hundred million numbers.
A few kinds of images are even decoded in Python, and a JPEG may tell its pixels in thousands of passes.
"""

from __future__ import annotations

import io
import re
import warnings
from itertools import islice

from PIL import Image, UnidentifiedImageError

from data.errors import ImageError, one_line
from data.exif import PIECES, SOS, find_exif, jpeg_markers, without_exif
from data.image_kinds import is_heic, kind, register_heic
from data.tiff_directory import plain_tiff

# Formats that Pillow decodes by itself and recognises by content; HEIC comes besides. Left out on purpose:
# those that run another program (EPS), and those so loosely marked that a text file can pass for one (TGA).
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000")

READS = PIECES  # that a file is read in; 128 MiB in chunks of 8 kB take 50,000
GIF_READS = 10_000  # Pillow copies a comment anew for each piece of 255 bytes
SCANS = 100  # of a JPEG; a usual progressive one has ten
SCANNED_PIXELS = 1_200_000_000  # of a JPEG, each as often as it is gone through
PIXELS_IN_PYTHON = 2_000_000  # one to three seconds of a decoder in Python
_COMMENT = re.compile(rb"#[^\r\n]*[\r\n]?")
PIXELS_IN_JPEG2000 = 16_000_000  # its decoder takes ten times what others take


class _CountedReads(io.BytesIO):
    """Bytes that may be read in so many pieces."""

    def __init__(self, data: bytes):
        super().__init__(data)
        self.most = self.left = GIF_READS if data.startswith(b"GIF8") else READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise _too_many_pieces(self.most)
        return super().read(size)


def _too_many_pieces(most: int) -> ValueError:
    return ValueError(f"it consists of more than {most:,} pieces")


def _without_comments(data: bytes) -> bytes:
    """A PBM, PGM or PPM in text without its comments: Pillow copies all that follows for each of them."""
    if data[:2] not in (b"P1", b"P2", b"P3"):
        return data
    if data.count(b"#") > READS:
        raise _too_many_pieces(READS)
    return _COMMENT.sub(b"", data)


def open_header(data: bytes, name: str, max_pixels: int) -> Image.Image:
    """An image of which nothing but the header has been read, with its EXIF, if any, as `info["exif"]`.

    Raises:
        ImageError: no image, or a header that is damaged or takes too long.
    """
    Image.init()  # registers every plugin, once; naming one that is not registered is a KeyError
    formats = [name for name in FORMATS if name in Image.OPEN]
    if is_heic(data):
        formats = ["HEIF"] if register_heic() else []
    try:
        readable = without_exif(plain_tiff(_without_comments(data), max_pixels))
        with warnings.catch_warnings():  # of a large image: our own limit says it, in one sentence
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(_CountedReads(readable), formats=formats)
        if "exif" not in image.info and (exif := find_exif(data)) is not None:
            image.info["exif"] = exif
        return image
    except UnidentifiedImageError as error:
        raise ImageError(
            f"{name}: expected an image (PNG, JPEG, WebP, AVIF, HEIC, GIF, BMP, TIFF, ...), got {kind(data)}"
        ) from error
    except Image.DecompressionBombError as error:  # Pillow's guard, at 179 million pixels
        raise ImageError(
            f"{name}: expected at most {max_pixels:,} pixels, got far more ({one_line(error, 200)})"
        ) from error
    except Exception as error:  # a decoder meets hostile bytes: whatever it raises is a refusal
        raise ImageError(f"{name}: the image's header is damaged ({one_line(error, 200)})") from error


def check_decoder(image: Image.Image, data: bytes, name: str) -> None:
    """Raises ImageError for what would be decoded pixel by pixel in Python, or in very many passes."""
    in_python = [tile[0] for tile in getattr(image, "tile", ()) if tile[0] in Image.DECODERS]
    if in_python and image.width * image.height > PIXELS_IN_PYTHON:
        raise ImageError(
            f"{name}: expected at most {PIXELS_IN_PYTHON:,} pixels in this rare encoding ({in_python[0]}), "
            f"got {image.width} x {image.height}; save the image as PNG"
        )
    pixels = image.width * image.height
    if image.format == "JPEG2000" and pixels > PIXELS_IN_JPEG2000:
        raise ImageError(
            f"{name}: expected at most {PIXELS_IN_JPEG2000:,} pixels in JPEG 2000, got {image.width} x "
            f"{image.height}; save the image as PNG or JPEG"
        )
    if image.format == "JPEG":
        scans = sum(marker == SOS for marker, _ in islice(jpeg_markers(data), READS))
        most = min(SCANS, max(1, SCANNED_PIXELS // pixels))
        if scans > most:
            raise ImageError(
                f"{name}: expected a JPEG of at most {most} scans of {pixels:,} pixels, got {scans}; "
                "save it again"
            )
