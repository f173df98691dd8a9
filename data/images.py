"""The one image loader: anything that holds an image → an upright RGB `PIL.Image`.

    image = load_image("photo.jpg")                       # a path
    image = load_image("https://example.org/photo.jpg")   # a URL
    image = load_image(array, ImageLimits(max_pixels=10_000_000))

Every refusal is an `ImageError`: one sentence with the image's name, what was expected and what was got.
Limits are checked on the header, before a pixel is decoded.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import sys
import urllib.parse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from data.errors import ImageError, one_line
from data.exif import orientation
from data.fetch import FetchError, fetch
from data.image_header import check_decoder, open_header

if TYPE_CHECKING:
    import torch

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
LONGEST_SIDE = 100_000  # of an image that is spoken of by its size alone


@dataclass(frozen=True)
class ImageLimits:
    """What an image may cost. `max_pixels` stays under Pillow's own guard (`PIL.Image.MAX_IMAGE_PIXELS`).

    `allow_urls` and `allow_paths` say whether a string may reach the network or the disk: turn them off
    wherever the strings come from someone else (a web page, a dataset). `allow_private_urls` lets a URL lead
    to this machine and its own network; the environment variable OCELLI_ALLOW_PRIVATE_URLS=1 does, too.
    `max_tiles` is for `data.processor`, which cuts the image up.
    """

    max_bytes: int = 128 * 2**20
    max_pixels: int = 80_000_000
    max_aspect: float = 200.0
    max_tiles: int = 400
    url_timeout: float = 15.0
    allow_urls: bool = True
    allow_paths: bool = True
    allow_private_urls: bool = False

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not field.name.startswith("allow_") and not value > 0:
                raise ValueError(f"ImageLimits.{field.name}: expected a positive number, got {value!r}")


def load_image(source: Any, limits: ImageLimits = ImageLimits(), name: str | None = None) -> Image.Image:
    """An upright, opaque RGB image from whatever `source` is.

    Args:
        source: a path, an http(s) or data: URL, bytes, a binary file object, a PIL image, or a numpy array or
            torch tensor: (H, W), (H, W, 1|3|4) or (1|3|4, H, W); 8-bit, 16-bit, or floats from 0 to 1.
        name: what error messages call the image; its path or URL by default.

    Raises:
        ImageError: the image cannot be read, is damaged, or is past a limit.
    """
    name = name or describe(source)
    if _is_array(source):
        check_size(*_array_size(source, name), limits, name)
        return _flatten(_from_array(source, name), name)
    return _decode(_header(source, limits, name), name)


def image_size(source: Any, limits: ImageLimits = ImageLimits(), name: str | None = None) -> tuple[int, int]:
    """(width, height) of what `load_image` gives, from its header; refused as there, as far as that shows."""
    if _is_array(source):
        return _array_size(source, name or describe(source))
    image = _header(source, limits, name or describe(source))
    return (image.height, image.width) if _turned(image) >= 5 else image.size


def _is_array(source: Any) -> bool:
    """Whether it is an array or a tensor: who has one of those has imported torch, which takes seconds."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", np.ndarray)
    return isinstance(source, np.ndarray | tensor)


def describe(source: Any) -> str:
    """A short name for error messages: the path or URL where there is one, else the kind of object."""
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if isinstance(source, str):
        return repr(source if len(source) <= 200 else source[:60] + "…")
    if isinstance(source, Image.Image):
        filename = getattr(source, "filename", "")
        return repr(filename) if filename else f"PIL image ({source.mode}, {source.width}x{source.height})"
    if _is_array(source):
        return f"array {tuple(source.shape)} of {source.dtype}"
    if isinstance(source, bytes | bytearray | memoryview):
        return f"image data ({len(source)} bytes)"
    return repr(getattr(source, "name", type(source).__name__))


# -------------------------------------------------------------------------------------------- to bytes
def _read(source: Any, limits: ImageLimits, name: str) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        _check_bytes(len(source), limits, name)
        return bytes(source)
    if isinstance(source, str):
        scheme = source[:8].lower()
        if scheme.startswith("data:"):
            return _read_data_url(source, limits, name)
        if scheme.startswith(("http://", "https://")):
            if not limits.allow_urls:
                raise ImageError(f"{name}: images from URLs are switched off here; send the image itself")
            try:
                return fetch(source, limits.max_bytes, limits.url_timeout, limits.allow_private_urls)
            except FetchError as error:
                raise ImageError(f"{name}: {error}") from error
        if "://" in source[:16]:
            raise ImageError(f"{name}: expected a path or an http(s) URL; no other kind of URL is read")
    if isinstance(source, str | os.PathLike):
        return _read_path(source, limits, name)
    if hasattr(source, "read"):
        data = source.read(limits.max_bytes + 1)
        if not isinstance(data, bytes):
            raise ImageError(
                f"{name}: expected a file opened in binary mode, got {type(data).__name__}; use 'rb'"
            )
        _check_bytes(len(data), limits, name)
        return data
    raise ImageError(
        f"expected an image as path, URL, bytes, file, PIL image or array, got {type(source).__name__}"
    )


def _read_path(source: str | os.PathLike, limits: ImageLimits, name: str) -> bytes:
    if not limits.allow_paths:
        raise ImageError(f"{name}: images from the disk are switched off here; send the image itself")
    try:
        # Non-blocking, and looked at before it is read: a pipe or a device would never end.
        with open(os.open(Path(source).expanduser(), os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
                raise ImageError(f"{name}: expected an image file, got {kind}")
            _check_bytes(status.st_size, limits, name)
            return file.read(limits.max_bytes + 1)
    except FileNotFoundError as error:
        raise ImageError(f"{name}: no such file (looked in {os.getcwd()}); check the path") from error
    except IsADirectoryError as error:
        raise ImageError(f"{name}: expected an image file, got a directory") from error
    except ImageError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: NUL in the path; RuntimeError: no home
        raise ImageError(f"{name}: the file cannot be read ({one_line(error, 200)})") from error


def _read_data_url(source: str, limits: ImageLimits, name: str) -> bytes:
    header, comma, body = source.partition(",")
    if not comma:
        raise ImageError(f"{name}: expected 'data:image/...;base64,...', got a data: URL with no comma")
    is_base64 = header.lower().endswith(";base64")
    _check_bytes(len(body) * 3 // 4 - 2 if is_base64 else len(body) // 3, limits, name)
    try:
        data = base64.b64decode(body, validate=True) if is_base64 else urllib.parse.unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{name}: expected base64 after the comma ({one_line(error, 200)})") from error
    _check_bytes(len(data), limits, name)
    return data


# ---------------------------------------------------------------------------------------------- limits
def _check_bytes(got: int, limits: ImageLimits, name: str) -> None:
    if got > limits.max_bytes:
        raise ImageError(
            f"{name}: expected at most {limits.max_bytes:,} bytes, got {got:,} or more; shrink the image "
            "or raise ImageLimits.max_bytes"
        )


def check_size(width: int, height: int, limits: ImageLimits, name: str) -> None:
    """Raises ImageError: an image of so many pixels is over a limit."""
    if width < 1 or height < 1:
        raise ImageError(f"{name}: expected at least one pixel, got {width} x {height}")
    if width * height > limits.max_pixels:
        raise ImageError(
            f"{name}: expected at most {limits.max_pixels:,} pixels, got {width} x {height} = "
            f"{width * height:,}; shrink the image or raise ImageLimits.max_pixels"
        )
    aspect = max(width, height) / min(width, height)
    if aspect > limits.max_aspect:
        raise ImageError(
            f"{name}: expected sides within {limits.max_aspect:g}:1 of each other, got {width} x {height} "
            f"({aspect:,.0f}:1); crop the image or raise ImageLimits.max_aspect"
        )


def check_sides(width: int, height: int) -> None:
    """Raises ImageError: sides that no image has, or that none which is opened here may have."""
    if not (1 <= width <= LONGEST_SIDE and 1 <= height <= LONGEST_SIDE):
        raise ImageError(f"expected sides of 1 to {LONGEST_SIDE} pixels, got {width} x {height}")
    check_size(width, height, ImageLimits(), f"an image of {width} x {height}")


# ---------------------------------------------------------------------------------- bytes to an image
def _header(source: Any, limits: ImageLimits, name: str) -> Image.Image:
    """An image held against the limits, not decoded yet unless it came decoded."""
    if isinstance(source, Image.Image):
        check_size(source.width, source.height, limits, name)
        return source
    data = _read(source, limits, name)
    if not data:
        raise ImageError(f"{name}: expected an image, got 0 bytes; the file is empty")
    image = open_header(data, name, limits.max_pixels)
    check_size(image.width, image.height, limits, name)
    check_decoder(image, data, name)
    return image


def _decode(image: Image.Image, name: str) -> Image.Image:
    """Decode the (first) frame, turn it upright and make it RGB."""
    turn = _UPRIGHT.get(_turned(image))  # as of the header, so that `image_size` says the same
    try:
        image.load()
    except Exception as error:  # see open_header
        raise ImageError(
            f"{name}: the image is damaged or cut off ({one_line(error, 200)}); get a whole copy of it"
        ) from error
    return _flatten(image if turn is None else image.transpose(turn), name)


def _turned(image: Image.Image) -> int:
    """EXIF orientation 1..8 of what Pillow gives; it turns TIFFs by itself."""
    return 1 if image.format == "TIFF" else orientation(image.info)


def _flatten(image: Image.Image, name: str) -> Image.Image:
    """Any mode → RGB; transparent parts over white; 16- and 32-bit grey scaled, not clipped."""
    try:
        if image.mode == "F":
            image = Image.fromarray(_unit_to_uint8(_unit_range(np.asarray(image), name)))
        elif image.mode == "I" or image.mode.startswith("I;16"):
            image = Image.fromarray(_integers_to_uint8(np.asarray(image)))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            opaque = Image.new("RGB", image.size, "white")
            opaque.paste(image, mask=image.getchannel("A"))
            return opaque
        rgb = image.convert("RGB")
    except ImageError:
        raise
    except Exception as error:  # see open_header; also a mode Pillow cannot convert, such as LAB
        raise ImageError(
            f"{name}: an image in mode {image.mode} cannot be made RGB ({one_line(error, 200)})"
        ) from error
    rgb.info = {}  # so that a second load does not turn it again by the same EXIF
    return rgb


def _unit_range(values: np.ndarray, name: str) -> np.ndarray:
    """Floats checked to be finite and from 0 to 1, or from 0 to 255, which is divided out."""
    if not np.isfinite(values).all():
        raise ImageError(f"{name}: expected finite pixel values, got NaN or infinity")
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 255:
        raise ImageError(
            f"{name}: expected floats from 0 to 1 (or 0 to 255), got {low:g} to {high:g}; rescale it"
        )
    return values if high <= 1 else values / 255


def _unit_to_uint8(values: np.ndarray) -> np.ndarray:
    return (values * 255).round().astype(np.uint8)


def _integers_to_uint8(values: np.ndarray) -> np.ndarray:
    """16-bit grey, or 32-bit grey where the values say so, to 8 bits; no wider copy of all rows at once."""
    wide = values.dtype.itemsize > 2 and (values.min() < 0 or values.max() > 65_535)
    rows = (row.astype(np.uint32) for row in values)
    return np.stack([(row >> 24 if wide else (row + 128) // 257).astype(np.uint8) for row in rows])


# --------------------------------------------------------------------------------- arrays to an image
def _array_size(array: np.ndarray | torch.Tensor, name: str) -> tuple[int, int]:
    """(width, height) of an array in one of the accepted layouts."""
    shape = tuple(array.shape)
    if len(shape) == 2:
        return shape[1], shape[0]
    if len(shape) == 3 and shape[2] in (1, 3, 4):
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
    elif array.dtype == np.uint16:
        array = _integers_to_uint8(array)
    elif np.issubdtype(array.dtype, np.floating):
        array = _unit_to_uint8(_unit_range(array, name))
    elif np.issubdtype(array.dtype, np.integer) and array.dtype != np.uint8:
        if array.min() < 0 or array.max() > 255:
            raise ImageError(f"{name}: expected integers from 0 to 255, got {array.min()} to {array.max()}")
        array = array.astype(np.uint8)
    elif array.dtype != np.uint8:
        raise ImageError(f"{name}: expected numbers, got dtype {array.dtype}")
    return Image.fromarray(np.ascontiguousarray(array))
