"""Pixels that are no 8-bit colours, as 8-bit images: arrays and tensors, grey of 16 and 32 bits, and PNGs
whose file says which colour is transparent (tRNS)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from data.errors import ImageError

if TYPE_CHECKING:
    import torch  # whoever has a tensor has imported it


# -------------------------------------------------------------------------------------- arrays and tensors
def array_size(array: np.ndarray | torch.Tensor, name: str) -> tuple[int, int]:
    """(width, height) of an array in one of the accepted layouts."""
    shape = tuple(array.shape)
    if len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4)):
        return shape[1], shape[0]
    if len(shape) == 3 and shape[0] in (1, 3, 4):
        return shape[2], shape[1]
    raise ImageError(f"{name}: expected shape (H, W), (H, W, 1|3|4) or (1|3|4, H, W), got {shape}")


def from_array(array: np.ndarray | torch.Tensor, name: str) -> Image.Image:
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


def eight_bits(image: Image.Image, name: str) -> Image.Image:
    """An image of floats or of 16 or 32 bits of grey (modes F, I and I;16) in 8 bits, scaled, not clipped;
    its transparent value is white."""
    values, hidden = np.asarray(image), image.info.get("transparency")
    grey = _to_uint8(values, name)
    return Image.fromarray(grey if hidden is None else np.where(values == hidden, np.uint8(255), grey))


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


# ---------------------------------------------------------------------------------- colours that PNGs hide
def with_hidden_colour(image: Any) -> Image.Image:
    """A PNG that has such a colour, decoded. Pillow compares the colour, as the file has it, with pixels that
    it has scaled (2 and 4 bits) or halved (16 bits of a colour): here it is compared with what they were."""
    hidden, raw = image.info["transparency"], image.tile[0].args if image.tile else None
    if isinstance(hidden, int) and raw in ("L;2", "L;4"):
        levels = 2 ** int(raw[-1]) - 1
        # Of a later frame the value is scaled already: its lower bits are the same.
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
