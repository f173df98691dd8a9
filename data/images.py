"""The one image loader: anything that holds an image -> an upright RGB `PIL.Image`.

    image = load_image("photo.jpg")                       # a path
    image = load_image("https://example.org/photo.jpg")   # a URL
    image = load_image(data, ImageLimits(max_pixels=10_000_000))  # bytes

Pillow opens and decodes. A refusal is an `ImageError`, one sentence with the image's name. Bytes, pixels and
sides have limits, which are checked before a pixel is decoded. Whoever opens an image of their own chose it;
a visitor's image may be made to do harm, and is opened within `web.images.VisitorLimits`.
"""

from __future__ import annotations

import io
import mimetypes
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from data.errors import ImageError, optional
from messages import one_line

# Formats that Pillow decodes by itself and recognises by content; HEIC comes besides. Left out on purpose:
# those that run another program (EPS), and those so loosely marked that a text file can pass for one (TGA).
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000")

MAX_ASPECT = 200  # of the longer side to the shorter one
EXIF_HEAD = 2**14  # bytes of an EXIF block that are read: tags may share bytes, which Pillow copies for each

_ORIENTATION = 0x0112
_FLIP = Image.Transpose
_UPRIGHT = {
    2: _FLIP.FLIP_LEFT_RIGHT, 3: _FLIP.ROTATE_180, 4: _FLIP.FLIP_TOP_BOTTOM, 5: _FLIP.TRANSPOSE,
    6: _FLIP.ROTATE_270, 7: _FLIP.TRANSVERSE, 8: _FLIP.ROTATE_90,
}  # fmt: skip
_HEIC = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"))


@dataclass(frozen=True)
class ImageLimits:
    """The bounds of an image. `max_pixels` stays under Pillow's own guard (`PIL.Image.MAX_IMAGE_PIXELS`).

    `allow_urls` and `allow_paths` say whether a string may reach the network or the disk: turn them off where
    strangers write the strings (a web page, a dataset). `max_tiles` is for `data.processor`, which cuts the
    image into tiles; `max_seconds` for decoding a video (`data.video`).
    """

    max_bytes: int = 128 * 2**20
    max_pixels: int = 80_000_000
    max_tiles: int = 400
    max_seconds: float = 120.0
    allow_urls: bool = True
    allow_paths: bool = True

    def open(self, file: BinaryIO, formats: list[str]) -> Image.Image:
        """The image in a file, not decoded. Whatever this raises refuses the image."""
        return Image.open(file, formats=formats)


def load_image(source: Any, limits: ImageLimits = ImageLimits(), name: str | None = None) -> Image.Image:
    """An upright, opaque RGB image.

    Args:
        source: a path, an http(s) or data: URL, bytes, a binary file object or a PIL image.
        name: what error messages call the image; its path or URL by default.
    """
    name = name or describe(source)
    image, orientation = open_undecoded(source, limits, name)
    return upright(image, orientation, name, own=image is not source)


def upright(image: Image.Image, orientation: int, name: str, own: bool = False) -> Image.Image:
    """An image of `open_undecoded`, decoded, turned, opaque and RGB. `own`: nobody else holds the image."""
    with refusing_damage(f"{name}: the image"):
        image.load()
        turn = _UPRIGHT.get(orientation)
        turned = image if turn is None else image.transpose(turn)
    return _flatten(turned, name, own or turned is not image)


@contextmanager
def refusing_damage(what: str) -> Iterator[None]:
    """A block in which any error of a decoder becomes an ImageError."""
    try:
        yield
    except Exception as error:
        raise ImageError(f"{what} is damaged or cut off ({one_line(error, 200)})") from error


class NamedBytes(bytes):
    """An image that was read or fetched, and what error messages call it."""

    name = ""


def describe(source: Any) -> str:
    """A short name for error messages: the path or URL where there is one, else the kind of object."""
    if isinstance(source, Image.Image) and not getattr(source, "filename", ""):
        return f"PIL image ({source.mode}, {source.width}x{source.height})"
    if isinstance(source, NamedBytes):
        return source.name
    if isinstance(source, bytes | bytearray | memoryview):
        return f"image data ({len(source)} bytes)"
    if isinstance(source, str | os.PathLike):
        text = os.fspath(source)
        return repr(text if len(text) <= 200 else text[:60] + "…")
    return repr(getattr(source, "filename", None) or getattr(source, "name", type(source).__name__))


# -------------------------------------------------------------------------------------------- to bytes
def read_bytes(source: Any, limits: ImageLimits, name: str) -> bytes:
    """The bytes of what `load_image` takes, except PIL images, within `max_bytes`."""
    if isinstance(source, str) and (source[:5].lower() == "data:" or "://" in source[:16]):
        if source[:4].lower() == "http" and not limits.allow_urls:
            raise ImageError(f"{name}: URLs are disabled here (serve.py --allow-urls); send the file itself")
        from data.fetch import read_url  # takes a tenth of a second to import

        try:
            data: Any = read_url(source, limits.max_bytes)
        except ImageError as error:
            raise ImageError(f"{name}: {error}") from error
    elif isinstance(source, str | os.PathLike):
        data = _read_path(source, limits, name)
    elif isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
    elif hasattr(source, "read"):
        data = source.read(limits.max_bytes + 1)
    else:
        kinds = "path, URL, bytes, file or PIL image (of an array: Image.fromarray)"
        raise ImageError(f"expected an image as {kinds}, got {type(source).__name__}")
    if not isinstance(data, bytes) or not data:
        got = "0 bytes" if isinstance(data, bytes) else type(data).__name__
        raise ImageError(f"{name}: expected a file with something in it, opened in binary mode, got {got}")
    check_most(name, "bytes", len(data), limits.max_bytes)
    return data


def _read_path(source: str | os.PathLike, limits: ImageLimits, name: str) -> bytes:
    if not limits.allow_paths:
        raise ImageError(f"{name}: paths are disabled here; send the file itself")
    try:
        path = Path(source).expanduser()
        if path.is_file():  # a pipe or a device might never end
            check_most(name, "bytes", path.stat().st_size, limits.max_bytes)
            return path.read_bytes()
        got = "a folder, a pipe or a device" if path.exists() else f"no such file (looked in {os.getcwd()})"
    except ImageError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: NUL in the path; RuntimeError: no home
        got = f"what cannot be read ({one_line(error, 200)})"
    raise ImageError(f"{name}: expected an image file, got {got}")


# ---------------------------------------------------------------------------------------------- limits
def check_most(name: str, what: str, got: int, most: int, detail: str = "") -> None:
    """Refuse more than there may be, with an ImageError."""
    if got > most:
        raise ImageError(f"{name}: expected at most {most:,} {what}, got {got:,}{detail}; shrink the image")


def check_size(width: int, height: int, limits: ImageLimits, name: str) -> None:
    """Refuse an image of so many pixels, with an ImageError."""
    if width < 1 or height < 1:
        raise ImageError(f"{name}: expected at least one pixel, got {width} x {height}")
    check_most(name, "pixels", width * height, limits.max_pixels, f" ({width} x {height})")
    aspect = max(width, height) / min(width, height)
    if aspect > MAX_ASPECT:
        raise ImageError(f"{name}: expected sides within {MAX_ASPECT}:1, got {aspect:,.0f}:1; crop the image")


# ---------------------------------------------------------------------------------- bytes to an image
def open_undecoded(source: Any, limits: ImageLimits, name: str) -> tuple[Image.Image, int]:
    """An image within the limits, not decoded unless it came decoded, and its orientation (1 to 8)."""
    if isinstance(source, Image.Image):
        check_size(source.width, source.height, limits, name)
        return source, 1 if source.format == "TIFF" else orientation_of(source)
    return open_file(io.BytesIO(read_bytes(source, limits, name)), limits, name)


def open_file(file: BinaryIO, limits: ImageLimits, name: str) -> tuple[Image.Image, int]:
    """`open_undecoded` of a file, which is read no further than Pillow's header."""
    head = file.read(4096)
    file.seek(0)
    formats = _formats(head, name)
    try:
        with warnings.catch_warnings():  # of large images and broken tags: what counts is said here
            warnings.simplefilter("ignore")
            image = limits.open(file, formats)
            orientation = orientation_of(image)
    except UnidentifiedImageError as error:
        raise _no_image(head, name) from error
    except Exception as error:  # Pillow's own guard of 179 million pixels, or damage
        raise ImageError(f"{name}: the image cannot be opened ({one_line(error, 200)})") from error
    check_size(image.width, image.height, limits, name)
    if image.format == "TIFF":  # it would read all directories, and turn the image as `upright` does
        image.load_end = lambda: None  # type: ignore[attr-defined,method-assign]
    return image, orientation


def _no_image(data: bytes, name: str) -> ImageError:
    """The error for a file that is none of the formats that are read."""
    wanted = "an image that is opened here, such as PNG, JPEG, WebP or GIF"
    got = f"a file that starts with {data[:24]!r}"
    if re.match(rb".{4}ftyp(?!hei|hev|mif1|msf1|avif|avis)|\x1aE\xdf\xa3", data, re.DOTALL):
        got = "a video, which is given as a video: a part or column of that name"
    elif (mimetypes.guess_type(name.strip("'"))[0] or "").startswith("video/"):
        wanted = "a video: MP4, QuickTime, WebM, Matroska or AVI"
    return ImageError(f"{name}: expected {wanted}, got {got}")


def is_heic(data: bytes) -> bool:
    """AVIF may name HEIC's brands too, and its own besides."""
    if data[4:8] != b"ftyp" or data[8:12] not in _HEIC:
        return False
    return b"avi" not in data[8 : min(int.from_bytes(data[:4], "big"), 4096)]


def _formats(data: bytes, name: str) -> list[str]:
    Image.init()  # registers every plugin, once; naming one that is not registered is a KeyError
    if not is_heic(data):
        return [name for name in FORMATS if name in Image.OPEN]
    pi_heif = optional("pi_heif", f"{name}: to read HEIC images, install the package pi-heif")
    pi_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False)
    return ["HEIF"]


def orientation_of(image: Image.Image) -> int:
    """1 to 8, by the image's EXIF, else its XMP; 1 where neither can be read. Of a PNG, EXIF counts that
    stands before the pixels."""
    found = None
    with suppress(Exception):  # an orientation that cannot be read is none
        if image.format == "TIFF" and hasattr(image, "tag_v2"):
            found = image.tag_v2.get(_ORIENTATION)
        else:
            # Not the image itself: it may be somebody's, and a PNG's own `getexif` decodes its pixels.
            head = Image.Image()
            head.info = dict(image.info)
            if "exif" in head.info:
                head.info["exif"] = head.info["exif"][:EXIF_HEAD]
            found = head.getexif().get(_ORIENTATION)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _flatten(image: Image.Image, name: str, own: bool) -> Image.Image:
    """Any mode → RGB; transparent parts over white; 16- and 32-bit grey scaled, not clipped. An image of our
    `own` that is RGB already is not copied, unless it would keep its file in memory."""
    if image.mode in ("F", "I") or image.mode.startswith("I;16"):
        image = eight_bits(image, name)
    try:
        if image.mode == "La":
            image = image.convert("LA")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            rgb = Image.new("RGB", image.size, "white")
            rgb.paste(image, mask=image.getchannel("A"))
        else:
            own = own and image.mode == "RGB" and image.format in (None, "JPEG")
            rgb = image if own else image.convert("RGB")
    except Exception as error:  # a mode that Pillow cannot convert, such as LAB
        raise ImageError(f"{name}: its mode {image.mode} has no RGB ({one_line(error, 200)})") from error
    rgb.info = {}  # so that a second load does not turn it again by the same EXIF
    return rgb


def eight_bits(image: Image.Image, name: str) -> Image.Image:
    """An image of floats (0 to 1, or to 255) or of 16 or 32 bits of grey (modes F, I and I;16) in 8 bits,
    scaled, not clipped; its transparent value is white."""
    values, hidden = np.asarray(image), image.info.get("transparency")
    low, high = float(values.min()), float(values.max())  # NaN where one value is
    if not np.issubdtype(values.dtype, np.floating):  # I has 16 bits where the values say so
        wide = values.dtype.itemsize > 2 and not 0 <= low <= high <= 65_535
        rows = (row.astype(np.uint32) for row in values)  # no wider copy of all of them at once
        grey = np.stack([(row >> 24 if wide else (row + 128) // 257).astype(np.uint8) for row in rows])
    elif 0 <= low <= high <= 255:
        grey = ((values if high <= 1 else values / 255) * 255).round().astype(np.uint8)
    else:
        raise ImageError(f"{name}: expected floats from 0 to 1 (or 0 to 255), got {low:g} to {high:g}")
    return Image.fromarray(grey if hidden is None else np.where(values == hidden, np.uint8(255), grey))
