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
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

_AMPLE = 16  # times the tiles' bytes: so much shared memory must be free for them to go through it
_AS_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # numpy has no bfloat16


@dataclass(frozen=True, eq=False)
class Part:
    """What a tower encodes as a whole: a tile. It is not changed any more, nor is what it is a view of. Two
    are equal where all that their numbers depend on is.

    pixels: (3, M, M) uint8, or float32 where they were computed with after rescaling (nanoVLM's whole image).
    values: (3, 256) float32, what a byte stands for in each colour; None where the pixels are numbers.
    """

    pixels: Tensor
    values: Tensor | None

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
    """n parts of one size, of one image or several, cut by one processor: see the module's docstring.

    A model takes them as `pixel_values` of one prompt, in place of a tensor (n, 3, M, M).
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, pixels: Tensor, values: Tensor | None = None) -> Parts:
        """Parts of pixels (n, 3, M, M); see `Part`."""
        return cls(tuple(Part(one, values) for one in pixels))

    @classmethod
    def planned(cls, count: int, height: int, width: int | None = None) -> Parts:
        """Parts that have a shape, square ones without a width, and no pixels yet."""
        shape = (3, height, width or height)
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

    def numel(self) -> int:
        return sum(tile.pixels.numel() for tile in self.parts)

    def to(
        self, device: torch.device | str, dtype: torch.dtype = torch.float32, non_blocking: bool = False
    ) -> Tensor:
        """Their numbers, (n, 3, M, M): what the processor's own library gives, to the bit, then rounded to
        the dtype. With CUDA nobody waits for the copy, whatever `non_blocking` says."""
        if torch.device(device).type != "cpu":
            return self._on_device(torch.device(device), dtype)
        numbers = torch.empty(self.shape, dtype=dtype)
        for tile, own in zip(self.parts, numbers):
            tile.write(own)
        return numbers

    def _on_device(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """`to`, with a copy of the bytes, and a table of their numbers there."""
        pinned = device.type == "cuda"
        coded, *on_host = self._stacked(pinned)
        codes, others, values = (part.to(device, non_blocking=pinned) for part in on_host)
        places = codes.int()
        places += torch.arange(0, 768, 256, dtype=torch.int32, device=device)[:, None, None]  # of each colour
        numbers = values.to(dtype).flatten().index_select(0, places.flatten()).view(codes.shape)
        if coded.all():
            return numbers
        own = {True: iter(numbers), False: iter(others.to(dtype))}
        return torch.stack([next(own[one]) for one in coded.tolist()])

    def _stacked(self, pinned: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(n,) bool, which tiles are bytes; those, (k, 3, M, M) uint8; the others, (n - k, 3, M, M) float32;
        (3, 256), what the bytes stand for. All but the first `pinned` in memory for copies to a GPU."""
        found = [tile.values for tile in self.parts if tile.values is not None]
        distinct = {id(one): one for one in found}.values()  # from several workers, several
        assert all(torch.equal(one, found[0]) for one in distinct), "tiles are of one processor"
        coded = torch.tensor([tile.values is not None for tile in self.parts], dtype=torch.bool)
        codes = torch.empty((len(found), *self.shape[1:]), dtype=torch.uint8, pin_memory=pinned)
        others = torch.empty((len(self) - len(found), *self.shape[1:]), pin_memory=pinned)
        values = torch.zeros(3, 256, pin_memory=pinned)
        for stack, bytes_ in ((codes, True), (others, False)):
            own = (tile.pixels for tile in self.parts if (tile.values is not None) == bytes_)
            for place, pixels in zip(stack, own):
                place.copy_(pixels)
        return coded, codes, others, values.copy_(found[0]) if found else values

    def __reduce__(self) -> tuple[Any, tuple]:
        """Between processes tensors go through shared memory. Containers often have 64 MB of it, and whoever
        writes more is killed: where it is short, arrays go through the pipe, which is slower."""
        stacked = self._stacked()
        if _free_shared_memory() >= _AMPLE * self.nbytes:
            return _unstacked, stacked
        return _from_arrays, tuple(field.numpy() for field in stacked)


@dataclass(frozen=True)
class Visual:
    """An image as the model sees it. It is accepted wherever an image is.

    positions: that it takes in the language model.
    grid: rows and columns of the parts that it was cut into; what that is for an uncut one, its family says.
    size: the image's own (width, height) in pixels.
    """

    parts: Parts
    positions: int
    grid: tuple[int, int]
    size: tuple[int, int]
    name: str = "image"


def _unstacked(coded: Tensor, codes: Tensor, others: Tensor, values: Tensor) -> Parts:
    own = {True: iter(codes), False: iter(others)}
    return Parts(tuple(Part(next(own[one]), values if one else None) for one in coded.tolist()))


def _from_arrays(*fields: Any) -> Parts:
    return _unstacked(*map(torch.from_numpy, fields))


def _free_shared_memory() -> float:
    """Bytes; elsewhere than on Linux there is no such bound."""
    if not os.path.isdir("/dev/shm"):
        return float("inf")
    space = os.statvfs("/dev/shm")
    return space.f_bavail * space.f_frsize
