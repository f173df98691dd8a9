"""The one image loader: anything that holds an image → an upright RGB `PIL.Image`.

    image = load_image("photo.jpg")                       # a path
    image = load_image("https://example.org/photo.jpg")   # a URL
    image = load_image(array, ImageLimits(max_pixels=10_000_000))

Images are strangers. Every refusal is an `ImageError`, one sentence with the image's name. Pillow opens and
decodes; what is held against limits here, before a pixel is decoded, is what Pillow leaves unbounded:

- Headers, which it reads in Python, a chunk or a letter at a time: the pieces of a file are counted.
- EXIF and TIFF directories, whose entries may all point at the same bytes, which it copies for each of them:
  it is shown the first kilobytes of an EXIF block and the first megabyte of TIFF tags.
- Decoders written in Python, JPEGs of thousands of scans, and tiles larger than their image.
"""

from __future__ import annotations

import base64
import io
import mimetypes
import os
import re
import sys
import urllib.parse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from data.errors import ImageError
from messages import one_line

if TYPE_CHECKING:
    import torch  # whoever has a tensor has imported it: see `_is_array`


# Formats that Pillow decodes by itself and recognises by content; HEIC comes besides. Left out on purpose:
# those that run another program (EPS), and those so loosely marked that a text file can pass for one (TGA).
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000")

MAX_ASPECT = 200  # of the longer side to the shorter one
HEADER_PIECES, PIECES = 10_000, 300_000  # reads of a header, and of a whole file: 128 MiB in chunks of 8 kB
TIFF_VALUES = 2**22  # bytes of what a TIFF's tags point at; Pillow reads them twice
EXIF_HEAD = 2**14  # bytes of an EXIF block; at worst Pillow copies each of them a thousand times
STRIPS = 100_000  # of a TIFF
SCANS, SCANNED_PIXELS = 100, 1_200_000_000  # of a JPEG (a usual progressive one has ten), and their pixels
PIXELS_IN_PYTHON = 2_000_000  # one to three seconds of a decoder that Pillow has in Python
PIXELS_IN_JPEG2000 = 16_000_000  # its decoder takes ten times as long as others

HEADER_BYTES = (2**14, 2**18)  # of a file that are read to find its size, at first and at most
PNG_TAIL = 2**17  # bytes at a PNG's end where its EXIF is looked for, if it is not before the pixels

_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
_ORIENTATION = 0x0112
_FLIP = Image.Transpose
_UPRIGHT = {
    2: _FLIP.FLIP_LEFT_RIGHT, 3: _FLIP.ROTATE_180, 4: _FLIP.FLIP_TOP_BOTTOM, 5: _FLIP.TRANSPOSE,
    6: _FLIP.ROTATE_270, 7: _FLIP.TRANSVERSE, 8: _FLIP.ROTATE_90,
}  # fmt: skip
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_HEIC = frozenset((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"))
# Blocks that Pillow and the HEIC library would read whole while opening: renamed, so that they do not.
_JPEG_BLOCK = re.compile(rb"(\xff[\xe1\xe2]..)(Exif\0\0|MPF\0)", re.DOTALL)
_JPEG_EXIF = re.compile(rb"\xff\xe1..Exif\0\0", re.DOTALL)
_AVIF_ITEM = re.compile(rb"(infe.{8}(?:..)?)Exif", re.DOTALL)  # an item information entry
_HEIC_ITEM = re.compile(rb"infe(?!\x02.{7}(?:hvc1|grid)|\x03.{9}(?:hvc1|grid))", re.DOTALL)  # of no image
_MARKER = re.compile(rb"\xff([^\x00\xff])")
_COMMENT = re.compile(rb"#[^\r\n]*[\r\n]?")
# What people give in place of an image, by its first bytes.
_KINDS = (
    (rb"%PDF-", "a PDF document"),
    (rb"PK\x03\x04", "a ZIP archive or an Office document"),
    (rb"8BPS", "a Photoshop document"),
    (rb"\xff\x0a|\x00\x00\x00\x0cJXL ", "a JPEG XL image"),
    (rb"version https://git-lfs", "a Git LFS pointer, to be fetched with `git lfs pull`"),
    (rb".{4}ftyp(?!hei|hev|mif1|msf1)|\x1aE\xdf\xa3", "a video (MP4, QuickTime or WebM)"),
    (rb".{4}ftyp", "a HEIC image that is damaged or of a rare kind"),
    (rb"\s*<(?:!doctype )?html", "a web page (HTML)"),
    (rb"(?:\xef\xbb\xbf)?\s*<.{,4000}<?svg", "an SVG drawing"),
)


@dataclass(frozen=True)
class ImageLimits:
    """What an image may cost. `max_pixels` stays under Pillow's own guard (`PIL.Image.MAX_IMAGE_PIXELS`).

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


def load_image(source: Any, limits: ImageLimits = ImageLimits(), name: str | None = None) -> Image.Image:
    """An upright, opaque RGB image.

    Args:
        source: a path, an http(s) or data: URL, bytes, a binary file object, a PIL image, or a numpy array or
            torch tensor: (H, W), (H, W, 1|3|4) or (1|3|4, H, W); 8-bit, 16-bit, or floats from 0 to 1.
        name: what error messages call the image; its path or URL by default.
    """
    name = name or describe(source)
    if _is_array(source):
        check_size(*_array_size(source, name), limits, name)
        return _flatten(_from_array(source, name), name, own=True)
    image, orientation = open_undecoded(source, limits, name)
    _read_on(image)
    with _refusing_damage(f"{name}: the image"):
        loaded = _turned(_loaded(image), orientation)
    return _flatten(loaded, name, own=loaded is not source)


def animation(data: bytes, limits: ImageLimits, name: str) -> Iterator[tuple[Image.Image, float]]:
    """The frames of an animated GIF, WebP or PNG as `load_image` gives them, and for how many seconds each is
    shown. None of an image that does not move."""
    image, orientation = _open_bytes(data, limits, name)
    _read_on(image)
    with _refusing_damage(f"{name}: the animation"):
        count = getattr(image, "n_frames", 1) if getattr(image, "is_animated", False) else 0
    _read_on(image)  # Pillow has read a whole GIF to count its frames
    # A PNG may have one more in front, for programs that show no animation.
    for number in range(int(getattr(image, "default_image", False)), count):
        with _refusing_damage(f"{name}: the animation"):
            image.seek(number)
            picture = _turned(_loaded(image), orientation)
        milliseconds = image.info.get("duration") or 0
        # Browsers take a tenth of a second where a hundredth or less is said.
        shown = milliseconds / 1000 if milliseconds > 10 else 0.1
        yield _flatten(picture.copy() if picture is image else picture, name, own=True), shown


def moves(data: bytes, limits: ImageLimits, name: str) -> bool:
    """Whether it is an animated GIF, WebP or PNG, by the header and what follows the first frame."""
    image, _ = _open_bytes(data, limits, name)
    _read_on(image)
    with _refusing_damage(f"{name}: the animation"):
        return bool(getattr(image, "is_animated", False))


def _read_on(image: Image.Image) -> None:
    """Let as many pieces be read as a whole file may have."""
    if isinstance(file := getattr(image, "fp", None), _CountedReads):
        file.pieces = PIECES


@contextmanager
def _refusing_damage(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a decoder meets hostile bytes: whatever it raises is a refusal
        raise ImageError(f"{what} is damaged or cut off ({one_line(error, 200)})") from error


def image_size(source: Any, limits: ImageLimits = ImageLimits(), name: str | None = None) -> tuple[int, int]:
    """(width, height) of what `load_image` gives, from the header alone; refused as far as that shows."""
    name = name or describe(source)
    if _is_array(source):
        return _array_size(source, name)
    return _upright_size(*open_undecoded(source, limits, name))


class NamedBytes(bytes):
    """An image that was read or fetched, and what error messages call it."""

    name = ""


def measure(source: Any, limits: ImageLimits = ImageLimits()) -> tuple[tuple[int, int], Any]:
    """(width, height) of what `load_image` gives, and what to give to it: `source`, or its bytes where all of
    them had to be read or fetched. Of a JPEG or PNG no more than the header is read, and what it would cost
    to decode is left for `load_image` to refuse."""
    name = describe(source)
    header = _header(source, limits, name)
    if header is not None:
        with suppress(ImageError):  # the whole file decides
            return _upright_size(*_open_bytes(header, limits, name, whole=False)), source
    if isinstance(source, str | os.PathLike):
        data = NamedBytes(read_bytes(source, limits, name))
        data.name, source = name, data
    return image_size(source, limits, name), source


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    turn = _UPRIGHT.get(orientation)
    return image if turn is None else image.transpose(turn)


def _upright_size(image: Image.Image, orientation: int) -> tuple[int, int]:
    turned = orientation >= 5 and image.format != "TIFF"  # whose size Pillow has turned by itself
    return (image.height, image.width) if turned else image.size


def _is_array(source: Any) -> bool:
    """Whoever has a tensor has imported torch, which takes seconds; nobody else needs to."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", np.ndarray)
    return isinstance(source, np.ndarray | tensor)


def describe(source: Any) -> str:
    """A short name for error messages: the path or URL where there is one, else the kind of object."""
    if isinstance(source, Image.Image) and not getattr(source, "filename", ""):
        return f"PIL image ({source.mode}, {source.width}x{source.height})"
    if _is_array(source):
        return f"array {tuple(source.shape)} of {source.dtype}"
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
    """The bytes of what `load_image` takes, except images and arrays, within `max_bytes`."""
    if isinstance(source, str) and source[:5].lower() == "data:":
        data: Any = _read_data_url(source, limits, name)
    elif isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
        if not limits.allow_urls:
            raise ImageError(f"{name}: URLs are disabled here (serve.py --allow-urls); send the file itself")
        from data.fetch import fetch  # takes a tenth of a second to import

        try:
            return fetch(source, limits.max_bytes)
        except ImageError as error:
            raise ImageError(f"{name}: {error}") from error
    elif isinstance(source, str) and "://" in source[:16]:
        raise ImageError(f"{name}: expected a path or an http(s) URL; no other kind of URL is read")
    elif isinstance(source, str | os.PathLike):
        data = _read_path(source, limits, name)
    elif isinstance(source, bytes | bytearray | memoryview):
        data = source if isinstance(source, bytes) else bytes(source)
    elif hasattr(source, "read"):
        data = source.read(limits.max_bytes + 1)
    else:
        kinds = "path, URL, bytes, file, PIL image or array"
        raise ImageError(f"expected an image as {kinds}, got {type(source).__name__}")
    if not isinstance(data, bytes):
        raise ImageError(f"{name}: expected a file opened in binary mode ('rb'), got {type(data).__name__}")
    _check_most(name, "bytes", len(data), limits.max_bytes)
    if not data:
        raise ImageError(f"{name}: expected a file with something in it, got 0 bytes")
    return data


def _read_path(source: str | os.PathLike, limits: ImageLimits, name: str) -> bytes:
    if not limits.allow_paths:
        raise ImageError(f"{name}: paths are disabled here; send the file itself")
    try:
        path = Path(source).expanduser()
        if path.is_file():  # a pipe or a device might never end
            _check_most(name, "bytes", path.stat().st_size, limits.max_bytes)
            return path.read_bytes()
        got = "a folder, a pipe or a device" if path.exists() else f"no such file (looked in {os.getcwd()})"
    except ImageError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: NUL in the path; RuntimeError: no home
        got = f"what cannot be read ({one_line(error, 200)})"
    raise ImageError(f"{name}: expected an image file, got {got}")


def _header(source: Any, limits: ImageLimits, name: str) -> bytes | None:
    """What stands in front of the pixels of a JPEG or PNG, and of a PNG the end of the file as well, where
    its EXIF may be; None of every other image."""
    if isinstance(source, bytes):
        end = _header_end(source[: HEADER_BYTES[-1]])
        return source[:end] + source[max(end, len(source) - PNG_TAIL) :] if end else None
    if not (isinstance(source, Path) and limits.allow_paths and source.is_file()):
        return None
    with suppress(OSError), source.open("rb", buffering=0) as file:
        size, data = os.fstat(file.fileno()).st_size, b""
        _check_most(name, "bytes", size, limits.max_bytes)
        for most in HEADER_BYTES:
            data += file.read(most - len(data))
            if end := _header_end(data):
                if not data.startswith(_PNG):
                    return data[:end]
                file.seek(max(end, size - PNG_TAIL))
                return data[:end] + file.read()
    return None


def is_still(source: Any, limits: ImageLimits) -> bool:
    """Whether its header says that it is a JPEG, or a PNG that does not move: no video, and no animation."""
    with suppress(OSError):  # a string too long for the name of a file
        header = _header(Path(source) if isinstance(source, str) else source, limits, describe(source))
        return header is not None and b"acTL" not in header
    return False


def _header_end(data: bytes) -> int:
    """Where the header of a JPEG or PNG ends; 0 where `data` does not reach so far or is of another kind."""
    end = 0
    if data.startswith(_JPEG):
        segments = islice(_jpeg_segments(data), HEADER_PIECES)
        end = next((end for marker, end in segments if marker == 0xDA), 0)
    elif data.startswith(_PNG):
        place = len(_PNG)
        while not end and len(data) >= place + 8:  # a length and a kind, then so many bytes and a checksum
            if data[place + 4 : place + 8] == b"IDAT":
                end = place + 8
            place += 12 + int.from_bytes(data[place : place + 4], "big")
    return end if end <= len(data) else 0


def _read_data_url(source: str, limits: ImageLimits, name: str) -> bytes:
    header, _, body = source.partition(",")
    _check_most(name, "bytes", len(body) // 3, limits.max_bytes)  # at least: %xx is a byte
    if not header.lower().endswith(";base64"):
        return urllib.parse.unquote_to_bytes(body)
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise ImageError(f"{name}: expected base64 after the comma ({one_line(error, 200)})") from error


# ---------------------------------------------------------------------------------------------- limits
def _check_most(name: str, what: str, got: int, most: int, detail: str = "") -> None:
    if got > most:
        raise ImageError(f"{name}: expected at most {most:,} {what}, got {got:,}{detail}; shrink the image")


def check_size(width: int, height: int, limits: ImageLimits, name: str) -> None:
    """Refuse an image of so many pixels, with an ImageError."""
    if width < 1 or height < 1:
        raise ImageError(f"{name}: expected at least one pixel, got {width} x {height}")
    _check_most(name, "pixels", width * height, limits.max_pixels, f" ({width} x {height})")
    aspect = max(width, height) / min(width, height)
    if aspect > MAX_ASPECT:
        raise ImageError(f"{name}: expected sides within {MAX_ASPECT}:1, got {aspect:,.0f}:1; crop the image")


def check_sides(width: int, height: int) -> None:
    """`check_size` of an image that is described by its size alone."""
    check_size(width, height, ImageLimits(), f"an image of {width} x {height}")


def _check_cost(image: Image.Image, data: bytes, name: str, limits: ImageLimits) -> None:
    """Refuse what takes far longer to decode than its pixels suggest."""
    pixels = image.width * image.height
    codecs = [tile[0] for tile in getattr(image, "tile", ())]
    if any(codec in Image.DECODERS for codec in codecs):
        _check_most(name, "pixels in this rare encoding", pixels, PIXELS_IN_PYTHON)
    if image.format == "JPEG2000":
        _check_most(name, "pixels in JPEG 2000", pixels, PIXELS_IN_JPEG2000)
    if image.format == "JPEG":
        scans = sum(marker == 0xDA for marker, _ in islice(_jpeg_segments(data), PIECES))
        _check_most(name, "scans of a JPEG of this size", scans, min(SCANS, max(1, SCANNED_PIXELS // pixels)))
    if image.format == "TIFF":
        _check_most(name, "strips or tiles", len(codecs), STRIPS)
        # Tiles are decoded whole, and an image of few pixels may be cut out of one of many.
        tags = (image.tag_v2.get(number) for number in (322, 323))  # type: ignore[attr-defined]
        width, height = (tag if isinstance(tag, int) and tag > 0 else 1 for tag in tags)
        covered = -(-image.width // width) * width * -(-image.height // height) * height
        _check_most(name, "pixels", covered, limits.max_pixels, f" in tiles of {width} x {height}")


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """A JPEG's markers up to its end, and where the segment of each ends; what stands inside is skipped."""
    place = 0
    # Without `+` after \xff, which would try a run of them from each of its places.
    while (match := _MARKER.search(data, place)) and match[1] != b"\xd9":
        marker, place = match[1][0], match.end()
        if marker != 0x01 and not 0xD0 <= marker <= 0xD8:  # those have no length
            place += int.from_bytes(data[place : place + 2], "big")
        yield marker, place


# ---------------------------------------------------------------------------------- bytes to an image
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


def open_undecoded(source: Any, limits: ImageLimits, name: str) -> tuple[Image.Image, int]:
    """An image within the limits, not decoded unless it came decoded, and its orientation (1 to 8)."""
    if isinstance(source, Image.Image):
        check_size(source.width, source.height, limits, name)
        return source, 1 if source.format == "TIFF" else _orientation(source, b"")
    return _open_bytes(read_bytes(source, limits, name), limits, name)


def _open_bytes(data: bytes, limits: ImageLimits, name: str, whole: bool = True) -> tuple[Image.Image, int]:
    """See `open_undecoded`. What is not the `whole` file is opened, but cannot be decoded."""
    formats = _formats(data, name)
    try:
        with warnings.catch_warnings():  # of large images and broken tags: what counts is said here
            warnings.simplefilter("ignore")
            is_tiff = data[:2] in (b"II", b"MM")
            file = _CountedReads(_harmless(data), HEADER_PIECES, TIFF_VALUES if is_tiff else float("inf"))
            image = Image.open(file, formats=formats)
            orientation = _orientation(image, data)
            file.value_bytes = float("inf")
    except UnidentifiedImageError as error:
        kind = next((kind for start, kind in _KINDS if re.match(start, data, re.DOTALL | re.I)), "")
        got = kind or f"a file that starts with {data[:16]!r}"
        wanted = "an image, such as PNG, JPEG or WebP"
        if kind.startswith("a video"):
            got += ", which is given as a video: a part or column of that name"
        elif (mimetypes.guess_type(name.strip("'"))[0] or "").startswith("video/"):
            wanted = "a video: MP4, QuickTime, WebM, Matroska or AVI"
        raise ImageError(f"{name}: expected {wanted}, got {got}") from error
    except Exception as error:  # Pillow's own guard of 179 million pixels, or whatever hostile bytes lead to
        raise ImageError(f"{name}: the image cannot be opened ({one_line(error, 200)})") from error
    check_size(image.width, image.height, limits, name)
    if whole:
        _check_cost(image, data, name, limits)
    if image.format == "TIFF":  # it would read all directories, and turn the image as `load_image` does
        image.load_end = lambda: None  # type: ignore[attr-defined,method-assign]
    return image, orientation


def _is_heic(data: bytes) -> bool:
    """AVIF may name HEIC's brands too, and its own besides."""
    if data[4:8] != b"ftyp" or data[8:12] not in _HEIC:
        return False
    return b"avi" not in data[8 : min(int.from_bytes(data[:4], "big"), 4096)]


def _formats(data: bytes, name: str) -> list[str]:
    Image.init()  # registers every plugin, once; naming one that is not registered is a KeyError
    if not _is_heic(data):
        return [name for name in FORMATS if name in Image.OPEN]
    try:
        import pi_heif
    except ImportError:
        raise ImageError(f"{name}: to read HEIC images, install the package pi-heif") from None
    pi_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False)
    return ["HEIF"]


def _harmless(data: bytes) -> bytes:
    """The same image without what takes unbounded time or memory to open."""
    if data.startswith(_JPEG):
        return _JPEG_BLOCK.sub(lambda match: match[1] + bytes(len(match[2])), data)
    if data[4:8] == b"ftyp":  # turned by properties of its own, which go before its EXIF
        return _HEIC_ITEM.sub(b"free", data) if _is_heic(data) else _AVIF_ITEM.sub(rb"\1none", data)
    if data[:2] in (b"P1", b"P2", b"P3"):  # for each comment Pillow copies all that follows it
        if data.count(b"#") > PIECES:
            raise ValueError("it consists of too many pieces")
        return _COMMENT.sub(b"", data)
    return data


def _orientation(image: Image.Image, data: bytes) -> int:
    """1 to 8, by the image's EXIF, else its XMP; 1 where neither can be read."""
    try:
        if image.format == "TIFF" and hasattr(image, "tag_v2"):
            found = image.tag_v2.get(_ORIENTATION)
        else:
            exif = Image.Exif()
            exif.load((_exif_block(image, data) or b"")[:EXIF_HEAD])
            found = exif.get(_ORIENTATION)
    except Exception:  # a parser meets hostile bytes: an orientation that cannot be read is none
        found = None
    xmp = image.info.get("XML:com.adobe.xmp") or image.info.get("xmp")
    if found is None and isinstance(xmp, bytes | str):
        match = _XMP_ORIENTATION.search(xmp.encode(errors="replace") if isinstance(xmp, str) else xmp)
        found = int(match[1]) if match else None
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def _exif_block(image: Image.Image, data: bytes) -> bytes | None:
    """The EXIF block of an image that came from `data`, wherever in the file it stands."""
    if data.startswith(_JPEG):
        found = _JPEG_EXIF.search(data, 0, _header_end(data) or len(data))  # not that of a second image
        return data[found.end() : found.end() + EXIF_HEAD] if found else None
    if isinstance(block := image.info.get("exif"), bytes):
        return block
    if isinstance(text := image.info.get("Raw profile type exif"), str):  # ImageMagick's PNGs
        return bytes.fromhex("".join(text.split("\n")[3:]))
    if data.startswith(_PNG) and (place := data.rfind(b"eXIf", max(0, len(data) - PNG_TAIL))) > 0:
        return data[place + 4 : place + 4 + EXIF_HEAD]
    return None


def _loaded(image: Image.Image) -> Image.Image:
    """The image, decoded. Pillow compares the colour that a PNG hides (tRNS), as the file has it, with pixels
    that it has scaled (2 and 4 bits) or halved (16 bits of a colour): here with what they were."""
    hidden, tiles = image.info.get("transparency"), getattr(image, "tile", ())
    raw = tiles[0].args if tiles and image.format == "PNG" else None
    if isinstance(hidden, int) and raw in ("L;2", "L;4"):
        levels = (
            2 ** int(raw[-1]) - 1
        )  # of a later frame the value is scaled already: its lower bits are the same
        image.info["transparency"] = (hidden & levels) * 255 // levels
    if not (isinstance(hidden, tuple) and raw == "RGB;16B"):
        image.load()
        return image
    upper, lower = [value >> 8 for value in hidden], [value & 255 for value in hidden]
    if getattr(image, "is_animated", False):  # one reader of all frames: their lower bits are gone
        shown = (np.asarray(image) != upper).any(2)
    else:
        shown = (_lower_bytes(image) != lower).any(2) | (np.asarray(image) != upper).any(2)
        image.info["transparency"] = tuple(upper)  # for whoever takes the decoded image again
    image = image.convert("RGBA")
    image.putalpha(Image.fromarray(shown * np.uint8(255)))
    return image


def _lower_bytes(image: Any) -> np.ndarray:
    """Of a PNG of 16 bits a colour, the lower eight, (H, W, 3), which Pillow drops."""
    place = image.fp.tell()
    image.fp.seek(0)
    lower: Any = Image.open(image.fp, formats=["PNG"])
    lower.tile = [image.tile[0]._replace(args="RGB;16L")]
    array = np.asarray(lower)
    image.fp.seek(place)
    return array


def _flatten(image: Image.Image, name: str, own: bool) -> Image.Image:
    """Any mode → RGB; transparent parts over white; 16- and 32-bit grey scaled, not clipped. An image of our
    `own` that is RGB already is not copied, unless it would keep its file in memory."""
    if image.mode in ("F", "I") or image.mode.startswith("I;16"):
        values, hidden = np.asarray(image), image.info.get("transparency")
        grey = _to_uint8(values, name)
        image = Image.fromarray(grey if hidden is None else np.where(values == hidden, np.uint8(255), grey))
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


def _to_uint8(values: np.ndarray, name: str) -> np.ndarray:
    """Floats from 0 to 1 or to 255, 16-bit grey, and 32-bit grey where the values say so, to 8 bits."""
    low, high = float(values.min()), float(values.max())  # NaN where one value is
    if not np.issubdtype(values.dtype, np.floating):
        wide = values.dtype.itemsize > 2 and not 0 <= low <= high <= 65_535
        rows = (row.astype(np.uint32) for row in values)  # no wider copy of all of them at once
        return np.stack([(row >> 24 if wide else (row + 128) // 257).astype(np.uint8) for row in rows])
    if not 0 <= low <= high <= 255:
        raise ImageError(f"{name}: expected floats from 0 to 1 (or 0 to 255), got {low:g} to {high:g}")
    return ((values if high <= 1 else values / 255) * 255).round().astype(np.uint8)


# --------------------------------------------------------------------------------- arrays to an image
def _array_size(array: np.ndarray | torch.Tensor, name: str) -> tuple[int, int]:
    """(width, height) of an array in one of the accepted layouts."""
    shape = tuple(array.shape)
    if len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4)):
        return shape[1], shape[0]
    if len(shape) == 3 and shape[0] in (1, 3, 4):
        return shape[2], shape[1]
    raise ImageError(f"{name}: expected shape (H, W), (H, W, 1|3|4) or (1|3|4, H, W), got {shape}")


def _from_array(array: np.ndarray | torch.Tensor, name: str) -> Image.Image:
    if not isinstance(array, np.ndarray):
        array = array.detach().cpu()
        array = (array.float() if array.is_floating_point() else array).numpy()
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)  # (C, H, W) → (H, W, C)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    elif array.dtype == np.uint16 or np.issubdtype(array.dtype, np.floating):
        array = _to_uint8(array, name)
    elif not np.issubdtype(array.dtype, np.integer):
        raise ImageError(f"{name}: expected numbers, got dtype {array.dtype}")
    elif array.min() < 0 or array.max() > 255:
        raise ImageError(f"{name}: expected integers from 0 to 255, got {array.min()} to {array.max()}")
    return Image.fromarray(np.ascontiguousarray(array.astype(np.uint8, copy=False)))
