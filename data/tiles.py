"""The parts of images that a tower encodes whole, such as tiles: bytes until a model needs their numbers.

    parts = Parts.of(codes, values)        # (n, 3, M, M) uint8; (3, 256) float32, what a byte stands for
    parts = Parts.cat([parts, parts[:1]])  # nothing is copied
    parts.digests                          # of the bytes, taken once: parts with equal ones are equal
    parts.to("cpu", torch.bfloat16)        # (n + 1, 3, M, M): rescaled and normalised here, and only here

A `Visual` is an image with its parts, as its family cuts it and writes it into a prompt.

An image's 256 levels are 256 numbers in each colour, whatever a processor does to them. As bytes they take a
quarter of the memory, of the hashing, of the copy to the device, and of what passes between a worker and the
training process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from data.errors import ProcessorError, PromptError
from data.part_tensors import on_device, packed, unpacked

Cell: TypeAlias = tuple[int, int, int, int]  # top, left, bottom, right
# (width, height) of an image in pixels: its own, and that in which its model sees it.
Sizes: TypeAlias = tuple[tuple[int, int], tuple[int, int]]
_AS_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy has no bfloat16


@dataclass(frozen=True, eq=False)
class Part:
    """A piece of an image that a tower encodes at once, such as a tile. Nobody changes its tensors.

    pixels: (3, M, M) uint8, or float32 where they were computed with after rescaling (nanoVLM's whole image).
    values: (3, 256) float32, what a byte stands for in each colour; None where the pixels are numbers.
    time: rotary places since the first part of its video; None for that one, and where the family's places
        have no time.

    Frames of a video that are encoded together have pixels (3, F, M, M).
    """

    pixels: Tensor
    values: Tensor | None
    time: int | None = None

    @cached_property
    def digest(self) -> bytes:
        """A SHA-256 of all that its numbers depend on, because visitors choose the pixels."""
        digest = hashlib.sha256(f"{self.pixels.dtype} {tuple(self.pixels.shape)}".encode())
        for part in (self.pixels, self.values):
            if part is not None:
                digest.update(part.contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.digest()

    @property
    def key(self) -> bytes:
        """A SHA-256 of all that a cache keeps of it depends on: its numbers, and when it is shown."""
        return self.digest if self.time is None else hashlib.sha256(self.digest + b"%d" % self.time).digest()

    def write(self, out: Tensor) -> None:
        """Its numbers into out (3, M, M), on the CPU, of any floating-point dtype."""
        if self.values is None:
            out.copy_(self.pixels)
            return
        bits = _AS_BITS[out.element_size()]
        tables, numbers = self.values.to(out.dtype).view(bits).numpy(), out.view(bits).numpy()
        for table, codes, own in zip(tables, self.pixels.numpy(), numbers):
            table.take(codes, out=own, mode="clip")


@dataclass(frozen=True, eq=False)
class Parts:
    """n parts of one image or several, cut by one processor: see the module's docstring. They have one size,
    unless the family has images of their own sizes.

    A model takes them as `pixel_values` of one prompt, in place of a tensor (n, 3, M, M).
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, pixels: Tensor, values: Tensor | None = None) -> Parts:
        """Parts of pixels (n, 3, M, M); see `Part`."""
        return cls(tuple(Part(one, values) for one in pixels))

    @classmethod
    def planned(cls, count: int, height: int, width: int | None = None, frames: int | None = None) -> Parts:
        """Parts that have a shape and no pixels yet; they are square unless a width is given."""
        shape = (3, *([frames] if frames else []), height, width or height)
        return cls((Part(torch.empty(shape, dtype=torch.uint8, device="meta"), None),) * count)

    @classmethod
    def cat(cls, parts: Iterable[Parts]) -> Parts:
        """One after another, in order."""
        return cls(tuple(part for some in parts for part in some))

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def __getitem__(self, which: slice | Sequence[int]) -> Parts:
        return Parts(self.parts[which] if isinstance(which, slice) else tuple(self.parts[i] for i in which))

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, 3, M, M)."""
        return (len(self.parts), *(self.parts[0].pixels.shape if self.parts else (3, 0, 0)))

    @property
    def digests(self) -> list[bytes]:
        return [tile.digest for tile in self.parts]

    @property
    def keys(self) -> list[bytes]:
        return [tile.key for tile in self.parts]

    def numel(self) -> int:
        """0 where there is none, as of a tensor."""
        return sum(part.pixels.numel() for part in self.parts)

    def to(
        self, device: torch.device | str, dtype: torch.dtype = torch.float32, non_blocking: bool = False
    ) -> Any:
        """Their numbers, (n, 3, M, M), or where sizes differ or frames go together a list of (3, H, W) and
        (3, F, H, W): what the processor's own library gives, to the bit, then rounded to the dtype. With CUDA
        nobody waits for the copy, whatever `non_blocking` says."""
        if len({part.pixels.shape for part in self.parts}) > 1 or len(self.shape) > 4:
            return [one for part in self.parts for one in Parts((part,))._numbers(device, dtype)]
        return self._numbers(device, dtype)

    def _numbers(self, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """`to` of parts of one size."""
        if torch.device(device).type != "cpu":
            return on_device(self.parts, torch.device(device), dtype)
        numbers = torch.empty(self.shape, dtype=dtype)
        for tile, own in zip(self.parts, numbers):
            tile.write(own)
        return numbers

    def __reduce__(self) -> tuple[Any, tuple]:
        return _unpickled, packed(self.parts)


def _unpickled(*fields: Any) -> Parts:
    return Parts(tuple(Part(*one) for one in unpacked(*fields)))


@dataclass(frozen=True)
class Visual:
    """An image as the model sees it. It is accepted wherever an image is.

    positions: that it takes in the language model.
    grid: rows and columns of the parts that it was cut into; what that is for an uncut one, its family says.
    size: the image's own (width, height) in pixels.
    times: of a video, the seconds at which each part is shown; seconds: how long it is.
    """

    parts: Parts
    positions: int
    grid: tuple[int, int]
    size: tuple[int, int]
    name: str = "image"
    times: tuple[float, ...] = ()
    seconds: float = 0.0

    @property
    def sizes(self) -> Sizes:
        """With that of a part for the one that is seen: it is the whole image, where that is not cut."""
        return self.size, (self.parts.shape[-1], self.parts.shape[-2])


# ------------------------------------------------------------- parts, as the settings of a family cut images
MOST_TILE_SIDE = 4096  # transformers' own bound on what Idefics3 makes of an image


class TiledImages:
    """The common part of rules for square tiles: an image that is cut is a grid of tiles and, `with_whole`,
    all of it as one more, the last or the first.

    tile_size, tile_positions: of a tile, pixels along its side and positions in a prompt.
    uncut: the grid of an image that is not cut.
    """

    string_content, add_special_tokens, flat, own_sizes = False, True, False, False
    with_whole, whole_first, uncut = True, False, (1, 1)
    budget: int | None = None
    videos: Any = None
    tile_size: int
    tile_positions: int

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles."""
        raise NotImplementedError

    def plan(self, width: int, height: int) -> Visual:
        rows, columns = grid = self.grid(width, height)
        count = 1 if grid == self.uncut else rows * columns + self.with_whole
        parts = Parts.planned(count, self.tile_size)
        return Visual(parts, count * self.tile_positions, grid, (width, height))

    def whole(self, visual: Visual) -> Visual | None:
        if visual.grid == self.uncut or not self.with_whole:
            return visual if visual.grid == self.uncut else None
        shown = visual.parts[:1] if self.whole_first else visual.parts[-1:]
        return replace(visual, parts=shown, positions=self.positions(shown), grid=self.uncut)

    def positions(self, parts: Parts) -> int:
        """Positions that parts take in a prompt."""
        return len(parts) * self.tile_positions

    def cells(self, visual: Visual) -> list[Cell]:
        if visual.grid == self.uncut:
            return [(0, 0, 1, 1)]
        rows, columns = visual.grid
        tiles = [(row, col, row + 1, col + 1) for row in range(rows) for col in range(columns)]
        whole = [(0, 0, rows, columns)] * self.with_whole
        return [*whole, *tiles] if self.whole_first else [*tiles, *whole]

    def within(self, positions: int) -> Any:
        raise ProcessorError("images of this family have settings that belong to the weights")

    def _tiles_within(self, positions: int) -> int:
        """The number of tiles that take so many positions. Raises ProcessorError where it is none."""
        if positions < self.tile_positions:
            said = f"expected at least {self.tile_positions}, which a tile takes, got {positions}"
            raise ProcessorError(said)
        return positions // self.tile_positions

    def transformers(self, tokenizer: Any, chat_template: str) -> Any:
        """None: transformers has no processor of this kind."""

    def normalise_messages(self, messages: list[Any], label: str) -> list[Any]:
        """Images stay where the conversation has them."""
        return messages


def pixels_of(image: Image.Image) -> Tensor:
    """An RGB image → (3, H, W) uint8."""
    return torch.from_numpy(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)))


def tiles_of(image: Image.Image, side: int, values: Tensor) -> Parts:
    """An RGB image of whole tiles → its tiles, row by row; for `values` see `Part`."""
    grid = np.asarray(image).reshape(image.height // side, side, image.width // side, side, 3)
    pixels = np.ascontiguousarray(grid.transpose(0, 2, 4, 1, 3).reshape(-1, 3, side, side))
    return Parts.of(torch.from_numpy(pixels), values)


def byte_values(settings: Mapping[str, Any]) -> torch.Tensor:
    """The numbers that bytes stand for in each colour, (3, 256) float32, in transformers' precisions.
    ValueError or TypeError where mean or deviation is neither a number nor three."""
    values = np.arange(256, dtype=np.uint8)
    scale = float(settings["rescale_factor"]) if settings["do_rescale"] else 1.0
    rescaled = values.astype(np.float64) * scale
    table = np.repeat(rescaled.astype(np.float32)[:, None], 3, axis=1)
    if settings["do_normalize"]:
        mean, std = (np.array(settings[name], np.float32) for name in ("image_mean", "image_std"))
        if not {mean.shape, std.shape} <= {(), (3,)}:
            raise ValueError("expected image_mean and image_std as a number or three")
        with np.errstate(all="ignore"):
            table = (table - mean) / std
    if not np.isfinite(table).all():
        raise ValueError("expected image_mean, image_std and rescale_factor to make finite pixels")
    return torch.from_numpy(np.ascontiguousarray(table.T))


def pixel_rule(settings: Mapping[str, Any]) -> tuple[Image.Resampling, Tensor]:
    """The filter that images are resampled with, and the `byte_values` (3, 256)."""
    return Image.Resampling(settings["resample"]), byte_values(settings)


@contextmanager
def reading_settings(settings: Mapping[str, Any]) -> Iterator[None]:
    """A block in which any fault of the settings of images becomes a PromptError or ProcessorError."""
    if not settings["do_resize"]:
        raise ProcessorError("preprocessor_config.json: expected do_resize to be true")
    for name in ("size", "max_image_size"):
        for key, value in settings[name].items() if isinstance(settings.get(name), Mapping) else ():
            if value is not None and (type(value) is not int or value < 1):
                raise PromptError(
                    f"image settings: {name}: {key}: expected a whole number above 0, got {value!r}"
                )
    try:
        yield
    except (KeyError, ValueError, TypeError, ArithmeticError) as error:
        raise PromptError(f"image settings: {type(error).__name__}: {error}") from error


def shape_within(width: int, height: int, longest_side: int) -> tuple[int, int]:
    """(width, height) with the longest side as long as that, and the other even."""
    aspect = width / height
    other = int(longest_side / aspect if width >= height else longest_side * aspect)
    other = max(other + other % 2, 1)
    return (longest_side, other) if width >= height else (other, longest_side)
