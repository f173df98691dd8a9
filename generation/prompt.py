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
    def ragged(self) -> bool:
        return min(self.lengths) != max(self.lengths)

    def lengths_tensor(self) -> Tensor:
        return torch.tensor(self.lengths, device=self.embeddings.device)

    def repeat(self, n: int) -> Prompt:
        """Every row n times in a row."""
        lengths = tuple(length for length in self.lengths for _ in range(n))
        return Prompt(self.embeddings.repeat_interleave(n, 0), lengths)


class ContextError(ValueError):
    """Prompt and answer are longer than the model's context."""

    def __init__(self, prompt_tokens: int, new_tokens: int, context: int):
        super().__init__(
            f"the context holds {context} tokens, but the prompt has {prompt_tokens} and up to {new_tokens} "
            "new ones may follow: shorten the prompt or lower max_new_tokens"
        )
        self.prompt_tokens, self.new_tokens, self.context = prompt_tokens, new_tokens, context


def prompt_lengths(
    config,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    has_images: bool,
    max_new_tokens: int,
    context: int | None = None,
) -> list[int]:
    """Real positions of each row, images included, checked before any work is done.

    Args:
        input_ids: (B, T).
        attention_mask: (B, T), 0 on padding, wherever that is; or None.
        context: positions that prompt and answer may take; None is all that the model has.

    Raises:
        ContextError: prompt and answer are longer than that.
        ValueError: shapes that do not fit, a row without tokens.
    """
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"input_ids: expected (B, T) with at least one token, got {tuple(input_ids.shape)}")
    batch, length = input_ids.shape
    front = config.tokens_per_tile if has_images and config.image_placement == "prefix" else 0
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
    context = config.text.max_position_embeddings if context is None else context
    if max(lengths) + max_new_tokens > context:
        raise ContextError(max(lengths), max_new_tokens, context)
    return lengths


def compact(embeddings: Tensor, attention_mask: Tensor | None, lengths: list[int]) -> Prompt:
    """Move each row's real positions to the front, in order: padding anywhere becomes right padding.

    Args:
        embeddings: (B, F + T, D), with F image positions in front of the text.
        attention_mask: (B, T), or None where nothing is padding.
        lengths: of `prompt_lengths`.
    """
    longest = max(lengths)
    if attention_mask is None or min(lengths) == embeddings.shape[1]:
        return Prompt(embeddings, tuple(lengths))
    front = embeddings.shape[1] - attention_mask.shape[1]
    real = F.pad(attention_mask.bool(), (front, 0), value=True)
    order = torch.argsort(~real, dim=1, stable=True)[:, :longest]  # real ones first, order kept
    width = embeddings.shape[2]
    return Prompt(embeddings.gather(1, order[..., None].expand(-1, -1, width)), tuple(lengths))


def tiles_of_rows(
    pixel_values: Tensor, pixel_attention_mask: Tensor | None
) -> tuple[Tensor, Tensor | None, list[int] | None]:
    """The real tiles of a call, (N, 3, H, W) in order; their masks, (N, H, W) or None; tiles of each row.

    Args:
        pixel_values: (N, 3, H, W), which does not say which tiles are whose (None for the rows); or
            (B, n, 3, H, W) as processors pad them, where a tile of zeros is padding and is dropped.
        pixel_attention_mask: (N, H, W) or (B, n, H, W), 1 on real pixels; or None.
    """
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


def check_placeholders(
    config, input_ids: Tensor, tiles: int | None, row_tiles: list[int] | None = None
) -> None:
    """Raise ValueError unless the images of a call fit their places in the prompts.

    Args:
        input_ids: (B, T).
        tiles: of all rows together; None without images.
        row_tiles: tiles of each row, where that is known: then every row must have its own.
    """
    batch, per_tile = len(input_ids), config.tokens_per_tile
    if row_tiles is not None and len(row_tiles) != batch:
        raise ValueError(f"pixel_values: expected {batch} rows as in input_ids, got {len(row_tiles)}")
    if config.image_placement == "prefix":
        if tiles is not None and (tiles != batch or set(row_tiles or [1]) != {1}):
            raise ValueError(
                "this checkpoint puts one image in front of each row: "
                f"expected {batch} images, got {row_tiles if tiles == batch else tiles}"
            )
        return
    places = (input_ids == config.image_token_id).sum(1).tolist()  # the one read from the device
    if row_tiles is None:
        places, row_tiles = [sum(places)], [tiles or 0]
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
