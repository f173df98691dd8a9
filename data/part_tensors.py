"""Parts of images as a few tensors, for devices and between processes.

A part has pixels, `values` (what its bytes stand for, or None where its pixels are numbers) and a time: see
`data.tiles.Part`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

Shape: TypeAlias = tuple[torch.Size, int | None]  # of a part's pixels; its time


class Part(Protocol):
    """See the module's docstring."""

    @property
    def pixels(self) -> Tensor: ...
    @property
    def values(self) -> Tensor | None: ...
    @property
    def time(self) -> int | None: ...


def on_device(parts: Sequence[Part], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The numbers of parts of one size, (n, *size). Bytes are copied, and looked up in a table there."""
    pinned, size = device.type == "cuda", parts[0].pixels.shape
    coded, *on_host = _joined(parts, pinned)
    codes, others, values = (one.to(device, non_blocking=pinned) for one in on_host)
    codes, others = (one.view(-1, *size) for one in (codes, others))
    entries = codes.int()
    colours = torch.arange(0, 768, 256, dtype=torch.int32, device=device)
    entries += colours.view(3, *[1] * (codes.dim() - 2))
    numbers = values.to(dtype).flatten().index_select(0, entries.flatten()).view(codes.shape)
    if coded.all():
        return numbers
    own = {True: iter(numbers), False: iter(others.to(dtype))}
    return torch.stack([next(own[one]) for one in coded.tolist()])


def _joined(parts: Sequence[Part], pinned: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(n,) bool, which parts are bytes; all of those, (K,) uint8; those of the others, (L,) float32; and what
    the bytes stand for, (3, 256). All but the first are `pinned` in memory for copies to a GPU."""
    found = [part.values for part in parts if part.values is not None]
    distinct = {id(one): one for one in found}.values()  # from several workers, several
    assert all(torch.equal(one, found[0]) for one in distinct), "parts are of one processor"
    coded = torch.tensor([part.values is not None for part in parts], dtype=torch.bool)

    def joined(bytes_: bool, dtype: torch.dtype) -> Tensor:
        own = [part.pixels.flatten() for part in parts if (part.values is not None) == bytes_]
        out = torch.empty(sum(map(len, own)), dtype=dtype, pin_memory=pinned)
        return torch.cat(own, out=out) if own else out

    codes, others = joined(True, torch.uint8), joined(False, torch.float32)
    values = torch.zeros(3, 256, pin_memory=pinned)
    return coded, codes, others, values.copy_(found[0]) if found else values


def packed(parts: Sequence[Part]) -> tuple[Any, ...]:
    """The parts as `unpacked` takes them: arrays, which pass between processes through a pipe. Tensors would
    go through shared memory; containers often have 64 MB of it, and whoever writes more is killed."""
    shapes = [(part.pixels.shape, part.time) for part in parts]
    return shapes, *(field.numpy() for field in _joined(parts))


def unpacked(shapes: list[Shape], *fields: Any) -> Iterator[tuple[Tensor, Tensor | None, int | None]]:
    """(pixels, values, time) of each part."""
    coded, codes, others, values = map(torch.as_tensor, fields)
    done = {True: 0, False: 0}
    for (shape, time), bytes_ in zip(shapes, coded.tolist(), strict=True):
        start, done[bytes_] = done[bytes_], done[bytes_] + shape.numel()
        pixels = (codes if bytes_ else others)[start : done[bytes_]].view(shape)
        yield pixels, values if bytes_ else None, time
