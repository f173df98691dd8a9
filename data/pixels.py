"""Pixels that are no 8-bit colours, as 8-bit images: arrays, tensors, and grey of 16 and 32 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
