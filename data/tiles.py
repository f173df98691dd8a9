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
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from data.errors import ProcessorError, PromptError
from data.video import Clip

Cell: TypeAlias = tuple[int, int, int, int]  # top, left, bottom, right
# (width, height) of an image in pixels: its own, and that in which its model sees it.
Sizes: TypeAlias = tuple[tuple[int, int], tuple[int, int]]
_AMPLE = 16  # times the tiles' bytes: so much shared memory must be free for them to go through it
_AS_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy has no bfloat16


@dataclass(frozen=True, eq=False)
class Part:
    """What a tower encodes as a whole: a tile. It is not changed any more, nor is what it is a view of. Two
    are equal where all that their numbers depend on is.

    pixels: (3, M, M) uint8, or float32 where they were computed with after rescaling (nanoVLM's whole image).
    values: (3, 256) float32, what a byte stands for in each colour; None where the pixels are numbers.
    time: of what a video shows after its first part, rotary places since that; None where places do not tell.

    Frames of a video that are encoded together have pixels (3, F, M, M).
    """

    pixels: Tensor
    values: Tensor | None
    time: int | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Part) or self.pixels.dtype != other.pixels.dtype:
            return False
        mine, theirs = self.values, other.values
        known = mine is theirs or (mine is not None and theirs is not None and torch.equal(mine, theirs))
        return known and torch.equal(self.pixels, other.pixels)

    def __hash__(self) -> int:
        return hash(self.pixels[:, ::64, ::64].numpy().tobytes())  # a few pixels tell most tiles apart

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
        """A SHA-256 of all that it leaves in a cache: of its numbers, and of when it is shown."""
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
        """Parts that have a shape, square ones without a width, and no pixels yet."""
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
    def nbytes(self) -> int:
        return sum(tile.pixels.nbytes for tile in self.parts)

    @property
    def digests(self) -> list[bytes]:
        return [tile.digest for tile in self.parts]

    @property
    def keys(self) -> list[bytes]:
        return [tile.key for tile in self.parts]

    def numel(self) -> int:
        return sum(tile.pixels.numel() for tile in self.parts)

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
            return self._on_device(torch.device(device), dtype)
        numbers = torch.empty(self.shape, dtype=dtype)
        for tile, own in zip(self.parts, numbers):
            tile.write(own)
        return numbers

    def _on_device(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """`to` of parts of one size, with a copy of the bytes, and a table of their numbers there."""
        pinned = device.type == "cuda"
        coded, *on_host = self._joined(pinned)
        codes, others, values = (part.to(device, non_blocking=pinned) for part in on_host)
        codes, others = (part.view(-1, *self.shape[1:]) for part in (codes, others))
        places = codes.int()
        colours = torch.arange(0, 768, 256, dtype=torch.int32, device=device)
        places += colours.view(3, *[1] * (codes.dim() - 2))
        numbers = values.to(dtype).flatten().index_select(0, places.flatten()).view(codes.shape)
        if coded.all():
            return numbers
        own = {True: iter(numbers), False: iter(others.to(dtype))}
        return torch.stack([next(own[one]) for one in coded.tolist()])

    def _joined(self, pinned: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(n,) bool, which parts are bytes; all of those, (K,) uint8; those of the others, (L,) float32;
        (3, 256), what the bytes stand for. All but the first `pinned` in memory for copies to a GPU."""
        found = [tile.values for tile in self.parts if tile.values is not None]
        distinct = {id(one): one for one in found}.values()  # from several workers, several
        assert all(torch.equal(one, found[0]) for one in distinct), "tiles are of one processor"
        coded = torch.tensor([tile.values is not None for tile in self.parts], dtype=torch.bool)

        def joined(bytes_: bool, dtype: torch.dtype) -> Tensor:
            own = [tile.pixels.flatten() for tile in self.parts if (tile.values is not None) == bytes_]
            out = torch.empty(sum(map(len, own)), dtype=dtype, pin_memory=pinned)
            return torch.cat(own, out=out) if own else out

        codes, others = joined(True, torch.uint8), joined(False, torch.float32)
        values = torch.zeros(3, 256, pin_memory=pinned)
        return coded, codes, others, values.copy_(found[0]) if found else values

    def __reduce__(self) -> tuple[Any, tuple]:
        """Between processes tensors go through shared memory. Containers often have 64 MB of it, and whoever
        writes more is killed: where it is short, arrays go through the pipe, which is slower."""
        shapes, joined = [(tile.pixels.shape, tile.time) for tile in self.parts], self._joined()
        if _free_shared_memory() >= _AMPLE * self.nbytes:
            return _apart, (shapes, *joined)
        return _from_arrays, (shapes, *(field.numpy() for field in joined))


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


Shape: TypeAlias = tuple[torch.Size, int | None]  # of a part's pixels; its time


def _apart(shapes: list[Shape], coded: Tensor, codes: Tensor, others: Tensor, values: Tensor) -> Parts:
    parts, done = [], {True: 0, False: 0}
    for (shape, time), bytes_ in zip(shapes, coded.tolist(), strict=True):
        start, done[bytes_] = done[bytes_], done[bytes_] + shape.numel()
        pixels = (codes if bytes_ else others)[start : done[bytes_]].view(shape)
        parts.append(Part(pixels, values if bytes_ else None, time))
    return Parts(tuple(parts))


def _from_arrays(shapes: list[Shape], *fields: Any) -> Parts:
    return _apart(shapes, *map(torch.from_numpy, fields))


def _free_shared_memory() -> float:
    """Bytes; elsewhere than on Linux there is no such bound."""
    if not os.path.isdir("/dev/shm"):
        return float("inf")
    space = os.statvfs("/dev/shm")
    return space.f_bavail * space.f_frsize


# ------------------------------------------------------------- parts, as a stranger's settings cut images
MOST_TILE_SIDE = 4096  # transformers' own bound on what Idefics3 makes of an image
MOST_TILE_TOKENS = 65_536  # per tile
MOST_PIXELS = 8192 * 8192  # of an image that is taken whole, four times as many as any checkpoint's
MOST_TILES = 400  # the time to list their grids grows with the square


class Videos(Protocol):
    """How a family chooses frames of a video, makes parts of them, and writes them into a prompt."""

    token: str  # what its template writes for a video, special to the tokenizer or not
    template: str | None  # for conversations with videos, where it is not the checkpoint's own
    fps: float  # frames that are shown of a second
    most: int  # and of a video

    def plan(self, clip: Clip) -> Visual:
        """What `cut` makes of a video, with pixels on the meta device."""

    def cut(self, clip: Clip) -> Visual:
        """The frames that are shown, in parts."""

    def prompt(self, visual: Visual) -> str:
        """What stands in a prompt for it."""


class Images(Protocol):
    """How a family cuts images into parts, and writes them into a prompt."""

    image_token: str  # what stands in a prompt once for each position of an image
    string_content: bool  # the chat template takes a message's content as one string
    add_special_tokens: bool  # let the tokenizer add its own (a BOS) around what the template wrote
    flat: bool  # parts go to the model as (N, 3, M, M), not padded per row with a pixel mask
    own_sizes: bool  # or as `Parts`, because their sizes differ
    longest_side: int  # pixels of an image that it makes something of
    budget: int | None  # most pixels of an image that is taken whole; None where images are cut into tiles
    videos: Videos | None  # how it takes videos; None where their frames are images to it

    def plan(self, width: int, height: int) -> Visual:
        """What `cut` makes of an image of this size, with pixels on the meta device."""

    def cut(self, image: Image.Image) -> Visual:
        """An RGB image in its parts."""

    def prompt(self, visual: Visual, index: int, count: int) -> str:
        """What stands in a prompt for image `index` of `count`."""

    def whole(self, visual: Visual) -> Visual | None:
        """A small picture of all of it, made of this one: as if it were not cut, or of fewer pixels. The same
        object where it is small already; None where no part shows all of it."""

    def cells(self, visual: Visual) -> list[Cell]:
        """What each part shows of the image: (top, left, bottom, right) in cells of its grid."""

    def within(self, positions: int) -> Images:
        """This rule for images that take at most so many positions, but for those far longer than wide, as it
        is saved. Raises ProcessorError where there is none."""

    def normalise_messages(self, messages: list[Any], label: str) -> list[Any]:
        """Messages with their images where the family has them."""

    def transformers(self, tokenizer: Any, chat_template: str) -> Any:
        """transformers' processor, for saving; None where it has none for this family."""


def check_tiles(side: Any, longest_side: Any, positions: Any) -> None:
    """Refuse, with a ProcessorError, numbers that memory is asked for by and that no real checkpoint has."""
    check_numbers(
        ("pixels per tile side", side, MOST_TILE_SIDE),
        ("pixels of an image's longest side", longest_side, MOST_TILE_SIDE),
        ("image tokens per tile", positions, MOST_TILE_TOKENS),
    )


def check_numbers(*bounds: tuple[str, Any, int]) -> None:
    """Refuse, with a ProcessorError, what is no whole number from 1 to the last of the three."""
    for what, got, most in bounds:
        if isinstance(got, bool) or not isinstance(got, int) or not 1 <= got <= most:
            raise ProcessorError(f"{what}: expected an integer from 1 to {most}, got {str(got)[:80]}")


class TiledImages:
    """What image rules of square tiles share: an image that is cut is a grid of tiles and, `with_whole`, all
    of it as one more, the last or the first.

    tile_size, tile_positions: of a tile, pixels along its side and positions in a prompt.
    uncut: the grid of an image that is not cut.
    """

    string_content, add_special_tokens, flat, own_sizes = False, True, False, False
    with_whole, whole_first, uncut = True, False, (1, 1)
    budget: int | None = None
    videos: Videos | None = None
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

    def within(self, positions: int) -> Images:
        raise ProcessorError("images of this family have settings that belong to the weights")

    def _tiles_within(self, positions: int) -> int:
        """How many tiles that are. Raises ProcessorError where it is none."""
        if positions < self.tile_positions:
            said = f"expected at least {self.tile_positions}, which a tile takes, got {positions}"
            raise ProcessorError(said)
        return positions // self.tile_positions

    def transformers(self, tokenizer: Any, chat_template: str) -> Any:
        """None: transformers has no processor of this kind."""

    def normalise_messages(self, messages: list[Any], label: str) -> list[Any]:
        """Images stay where the conversation has them."""
        return messages


class TileGrids:
    """The grids of `least` to `most` square tiles of a side, as InternVL's rule has them."""

    def __init__(self, least: Any, most: Any, side: int):
        if type(least) is not int or type(most) is not int or not 1 <= least <= most <= MOST_TILES:
            raise ProcessorError(
                f"preprocessor_config.json: expected 1 <= least <= most <= {MOST_TILES} tiles, "
                f"got {least!r} and {most!r}"
            )
        grids = ((rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1))
        self._grids = sorted((one for one in grids if math.prod(one) >= least), key=math.prod)
        self._tile = side * side

    def nearest(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) that relate most like the image's sides. Of two that do alike, and here only then,
        the one of more tiles is taken unless they would be more than twice the image."""
        best, nearest = (1, 1), math.inf
        for rows, columns in self._grids:  # those of few tiles first
            distance = abs(width / height - columns / rows)
            large = width * height > 0.5 * self._tile * columns * rows
            if distance < nearest or (distance == nearest and large):
                best, nearest = (rows, columns), distance
        return best


def pixels_of(image: Image.Image) -> Tensor:
    """An RGB image → (3, H, W) uint8."""
    return torch.from_numpy(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)))


def tiles_of(image: Image.Image, side: int, values: Tensor) -> Parts:
    """An RGB image of whole tiles → its tiles, row by row; for `values` see `Part`."""
    grid = np.asarray(image).reshape(image.height // side, side, image.width // side, side, 3)
    pixels = np.ascontiguousarray(grid.transpose(0, 2, 4, 1, 3).reshape(-1, 3, side, side))
    return Parts.of(torch.from_numpy(pixels), values)


# How transformers' image processors that resample bicubically, with CLIP's mean and deviation, make numbers
# of pixels where a file does not say.
CLIP_PIXELS: dict[str, Any] = {
    "do_resize": True, "resample": int(Image.Resampling.BICUBIC), "do_rescale": True,
    "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip


def byte_values(settings: Mapping[str, Any]) -> torch.Tensor:
    """What the 256 values of a byte become in each colour, (3, 256) float32: in transformers' precisions.
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
    """How images are resampled, and (3, 256) what a byte then becomes in each colour."""
    return Image.Resampling(settings["resample"]), byte_values(settings)


@contextmanager
def reading_settings(settings: Mapping[str, Any]) -> Iterator[None]:
    """What is wrong with the settings of images, as a PromptError or ProcessorError."""
    if not settings["do_resize"]:
        raise ProcessorError("preprocessor_config.json: expected do_resize to be true")
    try:
        yield
    except (KeyError, ValueError, TypeError, ArithmeticError) as error:
        raise PromptError(f"image settings: {type(error).__name__}: {error}") from error


def resized(pixels: Tensor, width: int, height: int, mode: str) -> Tensor:
    """(3, H, W) uint8 in another size, as torchvision resizes, which calls the same operator."""
    if pixels.shape[1:] == (height, width):
        return pixels
    return F.interpolate(pixels[None], (height, width), mode=mode, antialias=True)[0]


def shape_within(width: int, height: int, longest_side: int) -> tuple[int, int]:
    """(width, height) with the longest side as long as that, and the other even."""
    aspect = width / height
    if width >= height:
        other = int(longest_side / aspect)
        return longest_side, max(other + other % 2, 1)
    other = int(longest_side * aspect)
    return max(other + other % 2, 1), longest_side
