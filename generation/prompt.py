"""Prompts as the decoder wants them: embeddings with every row's real positions in front.

Padding ends here. `compact` moves each row's real positions to slots 0 … length - 1, wherever the padding
was, so that prefill is plain causal for every batch and position equals slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """Embeddings (B, L, D) with each row's real positions in front, and how many those are."""

    embeddings: Tensor
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        return self.embeddings.shape[1]

    @property
    def ragged(self) -> bool:
        return min(self.lengths) != max(self.lengths)

    def lengths_tensor(self) -> Tensor:
        return torch.tensor(self.lengths, device=self.embeddings.device)

    def repeat(self, n: int) -> Prompt:
        """Every row n times in a row."""
        lengths = tuple(length for length in self.lengths for _ in range(n))
        return Prompt(self.embeddings.repeat_interleave(n, 0), lengths)


def prompt_lengths(
    input_ids: Tensor, attention_mask: Tensor | None, front: int, max_new_tokens: int, context: int
) -> list[int]:
    """Real positions of each row, checked against the model's context before any work is done.

    Args:
        input_ids: (B, T).
        attention_mask: (B, T), 0 on padding, wherever that is; or None.
        front: image positions that stand in front of every row's text.
        max_new_tokens: how many are to follow.
        context: positions the model has.

    Raises:
        ValueError: shapes that do not fit, a row without tokens, prompt and answer longer than the context.
    """
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"input_ids: expected (B, T) with at least one token, got {tuple(input_ids.shape)}")
    batch, length = input_ids.shape
    lengths = [front + length] * batch
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask: expected the shape of input_ids, {tuple(input_ids.shape)}, "
                f"got {tuple(attention_mask.shape)}"
            )
        lengths = [front + real for real in attention_mask.bool().sum(1).tolist()]
    if min(lengths) == 0:
        raise ValueError(f"row {lengths.index(0)} of the batch is all padding: there is nothing to continue")
    if max(lengths) + max_new_tokens > context:
        raise ValueError(
            f"the context holds {context} tokens; the prompt has {max(lengths)}, "
            f"and {max_new_tokens} new ones were asked for"
        )
    return lengths


def compact(embeddings: Tensor, attention_mask: Tensor | None, lengths: list[int]) -> Prompt:
    """Move each row's real positions to the front, in order: padding anywhere becomes right padding.

    Args:
        embeddings: (B, F + T, D), F image positions standing in front of the text.
        attention_mask: (B, T), or None where nothing is padding.
        lengths: real positions of each row, images included.
    """
    longest = max(lengths)
    if attention_mask is None or min(lengths) == embeddings.shape[1]:
        return Prompt(embeddings, tuple(lengths))
    front = embeddings.shape[1] - attention_mask.shape[1]
    real = F.pad(attention_mask.bool(), (front, 0), value=True)
    order = torch.argsort(~real, dim=1, stable=True)[:, :longest]  # real ones first, order kept
    width = embeddings.shape[2]
    return Prompt(embeddings.gather(1, order[..., None].expand(-1, -1, width)), tuple(lengths))


def real_tiles(pixel_values: Tensor, pixel_attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The tiles of a call, (N, 3, H, W) in order, and their masks, (N, H, W) or None.

    Args:
        pixel_values: (N, 3, H, W) tiles, or (B, n, 3, H, W) as processors pad them: there, a tile that is
            zero throughout is padding and is dropped.
        pixel_attention_mask: (N, H, W) or (B, n, H, W), 1 on real pixels; or None.

    Raises:
        ValueError: pixel_values of another shape.
    """
    tiles, mask, _ = tiles_of_rows(pixel_values, pixel_attention_mask)
    return tiles, mask


def tiles_of_rows(
    pixel_values: Tensor, pixel_attention_mask: Tensor | None
) -> tuple[Tensor, Tensor | None, list[int] | None]:
    """`real_tiles`, and how many of them each row has; None for (N, 3, H, W), which tells no rows."""
    if pixel_values.dim() == 4:
        return pixel_values, pixel_attention_mask, None
    if pixel_values.dim() != 5:
        raise ValueError(
            f"pixel_values: expected (N, 3, H, W) or (B, n, 3, H, W), got {tuple(pixel_values.shape)}"
        )
    real = (pixel_values != 0).flatten(2).any(2)  # (B, n)
    counts = real.sum(1).tolist()  # the one read from the device
    tiles = pixel_values.flatten(0, 1)
    mask = None if pixel_attention_mask is None else pixel_attention_mask.flatten(0, 1)
    if sum(counts) < len(tiles):
        kept = real.flatten()
        tiles, mask = tiles[kept], None if mask is None else mask[kept]
    return tiles, mask, counts


def check_placeholders(held: Tensor, tiles: int, per_tile: int, row_tiles: list[int] | None) -> None:
    """Whether images fit their places in the prompts.

    Args:
        held: (B,) placeholders of each row.
        tiles: of all rows together.
        per_tile: features of each.
        row_tiles: how many of the tiles are whose, where that is known: then every row must have its own.

    Raises:
        ValueError: naming the first row that does not fit, where there are several.
    """
    places = held.tolist()  # the one read from the device
    if row_tiles is None:
        places, row_tiles = [sum(places)], [tiles]
    for row, (expected, got) in enumerate(zip(places, row_tiles, strict=True)):
        if expected != got * per_tile:
            raise ValueError(
                f"{f'row {row}: ' if len(places) > 1 else ''}the prompt holds {expected} image placeholders "
                f"but the images give {got * per_tile} features, {per_tile} a tile: build both with the "
                "same processor"
            )


def seen_tokens(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int, answers: int) -> Tensor:
    """(B · answers, V) bool: the tokens of each prompt, padding not counted."""
    counts = torch.zeros(input_ids.shape[0], vocab_size, dtype=torch.int64, device=input_ids.device)
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask.bool().long()
    return counts.scatter_add_(1, input_ids, real).bool().repeat_interleave(answers, 0)
