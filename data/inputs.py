"""What goes to the model: encoded conversations, padded to one batch, and tiles that travel as bytes.

    tiles = ByteTiles.of(pixels)        # (n, 3, M, M) float32
    tiles.to("cuda")                    # the same numbers, to the bit

An image's 256 levels, rescaled and perhaps normalised, are 256 numbers. As bytes they take a quarter of the
memory, of the copy to the device, and of what passes between a worker and the training process. Tiles of
other numbers (nanoVLM's whole image is reduced after its rescaling) travel as they are.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class ModelInputs(dict):
    """Tensors for the model, by argument name; `image_tokens[i]` positions of row i are images."""

    image_tokens: list[int]

    def to(self, *args, **kwargs) -> ModelInputs:
        """The same on another device; as `Tensor.to`, but a dtype reaches only the pixels."""
        device = kwargs.get(
            "device", next((a for a in args if isinstance(a, str | int | torch.device)), None)
        )
        moved = ModelInputs()
        for name, value in self.items():
            moved[name] = value.to(*args, **kwargs) if value.is_floating_point() else value.to(device)
        moved.image_tokens = self.image_tokens
        return moved


@dataclass(frozen=True)
class TiledImage:
    """An image as the model sees it: tiles (n, 3, M, M) of `rows` x `columns` and the whole image, after or
    before them (`whole_first` of a processor's `images`).

    `Processor.tile` makes it once; it is accepted wherever an image is.
    """

    tiles: Tensor
    rows: int
    columns: int
    name: str


@dataclass(frozen=True)
class EncodedConversation:
    """One conversation, unpadded.

    `tiles` is (n, 3, M, M) or None; `assistant_mask` marks what the assistant says, end of turn included;
    `image_tokens` counts the positions that images take, in the ids or in front of them.
    """

    input_ids: list[int]
    assistant_mask: list[bool]
    tiles: Tensor | None
    image_tokens: int


def collate(
    rows: Sequence[EncodedConversation],
    pad_token_id: int,
    padding_side: str = "left",
    return_assistant_mask: bool = False,
    flat: bool = False,
) -> ModelInputs:
    """Pad rows to one length; returns what `data.processor.Processor.prepare` does.

    `flat` puts the tiles of all rows one after another, (N, 3, M, M), rather than pad them per row,
    (B, n, 3, M, M).
    """
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side: expected left or right, got {padding_side!r}")
    longest = max(len(row.input_ids) for row in rows)
    inputs = ModelInputs(
        input_ids=torch.full((len(rows), longest), pad_token_id, dtype=torch.int64),
        attention_mask=torch.zeros(len(rows), longest, dtype=torch.int64),
    )
    if return_assistant_mask:
        inputs["assistant_mask"] = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, row in enumerate(rows):
        length = len(row.input_ids)
        place = slice(longest - length, None) if padding_side == "left" else slice(0, length)
        inputs["input_ids"][i, place] = torch.tensor(row.input_ids)
        inputs["attention_mask"][i, place] = 1
        if return_assistant_mask:
            inputs["assistant_mask"][i, place] = torch.tensor(row.assistant_mask)
    tiles = [row.tiles for row in rows]
    if any(tile is not None for tile in tiles):
        if flat:
            inputs["pixel_values"] = torch.cat([tile for tile in tiles if tile is not None])
        else:
            inputs.update(_pad_tiles(tiles))
    inputs.image_tokens = [row.image_tokens for row in rows]
    return inputs


def _pad_tiles(rows: list[Tensor | None]) -> dict[str, Tensor]:
    """(n_i, 3, M, M) or None for each row → pixel_values (B, n, 3, M, M), zero-padded at the end, and
    pixel_attention_mask (B, n, M, M)."""
    sample = next(row for row in rows if row is not None)
    most = max(0 if row is None else len(row) for row in rows)
    pixel_values = sample.new_zeros(len(rows), most, *sample.shape[1:])
    mask = torch.zeros(len(rows), most, *sample.shape[2:], dtype=torch.int64)
    for i, row in enumerate(rows):
        if row is not None:
            pixel_values[i, : len(row)] = row
            mask[i, : len(row)] = 1
    return {"pixel_values": pixel_values, "pixel_attention_mask": mask}


# ------------------------------------------------------------------------------------------- tiles as bytes
_FROM_0_TO_1 = torch.arange(256).float() / 255  # nanoVLM
_FROM_MINUS_1 = (_FROM_0_TO_1 - 0.5) / 0.5  # Idefics3, SmolVLM
LEVELS = torch.stack((_FROM_0_TO_1, _FROM_MINUS_1))  # (2, 256): what a byte stands for
_AMPLE = 16  # times a row's bytes: so much shared memory must be free for the row to go through it


@dataclass(frozen=True)
class ByteTiles:
    """(n, 3, M, M) tiles.

    codes: (k, 3, M, M) uint8, of the tiles whose values are all among some LEVELS.
    levels: (k,) int32, which ones.
    others: (n - k, 3, M, M) float32.
    coded: (n,) bool, which tiles are in codes.
    """

    codes: Tensor
    levels: Tensor
    others: Tensor
    coded: Tensor

    @classmethod
    def of(cls, tiles: Tensor) -> ByteTiles:
        found = [_as_bytes(tile) for tile in tiles]
        codes = [one[0] for one in found if one is not None]
        coded = torch.tensor([one is not None for one in found])
        return cls(
            torch.stack(codes) if codes else tiles.new_empty(0, *tiles.shape[1:], dtype=torch.uint8),
            torch.tensor([one[1] for one in found if one is not None], dtype=torch.int32),
            tiles[~coded],
            coded,
        )

    @classmethod
    def cat(cls, parts: Sequence[ByteTiles]) -> ByteTiles:
        """One after another, in order."""
        return cls(*(torch.cat(fields) for fields in zip(*(part._fields for part in parts), strict=True)))

    def __len__(self) -> int:
        return len(self.coded)

    @property
    def nbytes(self) -> int:
        return sum(field.nbytes for field in self._fields)

    @property
    def _fields(self) -> tuple[Tensor, ...]:
        return self.codes, self.levels, self.others, self.coded

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Tensor:
        """The tiles themselves, (n, 3, M, M) float32, copied as bytes."""
        codes, levels, others = (field.to(device, non_blocking=non_blocking) for field in self._fields[:3])
        places = codes.int() + 256 * levels[:, None, None, None]
        tiles = LEVELS.flatten().to(device).index_select(0, places.flatten()).view(codes.shape)
        if self.coded.all():
            return tiles
        order = torch.argsort(torch.argsort(~self.coded, stable=True))  # places in (codes, others)
        return torch.cat((tiles, others))[order.to(device)]

    def __reduce__(self) -> tuple[Any, tuple]:
        """Between processes tensors go through shared memory. Containers often have 64 MB of it, and whoever
        writes more is killed: where it is short, arrays go through the pipe, which is slower."""
        if _free_shared_memory() >= _AMPLE * self.nbytes:
            return ByteTiles, self._fields
        return _from_arrays, tuple(field.numpy() for field in self._fields)


def _from_arrays(*fields: Any) -> ByteTiles:
    return ByteTiles(*map(torch.from_numpy, fields))


def _free_shared_memory() -> float:
    """Bytes; elsewhere than on Linux there is no such bound."""
    if not os.path.isdir("/dev/shm"):
        return float("inf")
    space = os.statvfs("/dev/shm")
    return space.f_bavail * space.f_frsize


def _as_bytes(tile: Tensor) -> tuple[Tensor, int] | None:
    """A tile's bytes and their LEVELS, or None where some value is no level."""
    for which, levels in enumerate(LEVELS):
        codes = _nearest(tile[:, :1], levels)
        if torch.equal(levels[codes.int()], tile[:, :1]):  # most tiles of other levels are told apart here
            codes = _nearest(tile, levels)
            if torch.equal(levels[codes.int()], tile):
                return codes, which
    return None


def _nearest(values: Tensor, levels: Tensor) -> Tensor:
    """uint8: the number of the level closest to each value."""
    low, high = levels[0].item(), levels[-1].item()
    return ((values - low) * (255 / (high - low))).round_().clamp_(0, 255).to(torch.uint8)
