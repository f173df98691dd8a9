"""Encoded conversations → one padded batch of model inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class ModelInputs(dict):
    """Tensors for the model, by argument name; `image_tokens[i]` positions of row i are images."""

    image_tokens: list[int]

    def to(self, *args, **kwargs) -> ModelInputs:
        """The same on another device; as `Tensor.to`, but a dtype reaches only the pixels."""
        device = _device(args, kwargs)
        moved = ModelInputs()
        for name, value in self.items():
            if value.is_floating_point():
                moved[name] = value.to(*args, **kwargs)
            else:
                moved[name] = value if device is None else value.to(device)
        moved.image_tokens = self.image_tokens
        return moved


@dataclass(frozen=True)
class TiledImage:
    """An image as the model sees it: tiles (n, 3, M, M) of `rows` x `columns` and the whole, behind them or
    in front of them (`whole_first` of a processor's `images`).

    Made once by `Processor.tile`, it goes wherever an image goes.
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
    """Pad rows to one length.

    Args:
        flat: tiles of all rows one after another, (N, 3, M, M), rather than padded per row, (B, n, 3, M, M).

    Returns:
        As `data.processor.Processor.prepare`.
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
    """Tiles of each row, (n_i, 3, M, M) or None → pixel_values (B, n, 3, M, M), zero-padded at the end, and
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


def _device(args: tuple, kwargs: dict) -> torch.device | None:
    named = kwargs.get("device", next((a for a in args if isinstance(a, str | int | torch.device)), None))
    return torch.device(named) if named is not None else None
