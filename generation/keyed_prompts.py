"""Prompts with a key for each position, by which slots and stores know what is equal.

    prompt = read_prompt(model, input_ids, pixel_values, max_new_tokens=64)   # checked, with keys
    reused = ...                                                               # positions that a cache holds
    first, _ = first_part(prompt, reused)
    embeddings = embed_after(model, prompt, reused, features.encode(prompt.parts[first:], ...)[0])

A position's key is a token's id, or a number below 0 that stands for the digest of a part of an image (and,
where rotary places have it, for its time in a video), because all placeholders carry the same id. Two prompts
with the same keys from the front have the same keys and values there in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from generation.features import digests_of
from generation.kv_cache import to_device
from generation.prompts import prompt_lengths
from generation.protocol import Pixels, VisionLanguage

SHARE_FROM = 32  # positions of text that are worth sharing; an image always is


class Item(NamedTuple):
    """A part of an image in a prompt: what it is known by, and how many positions it takes."""

    digest: bytes
    positions: int


@dataclass(frozen=True, eq=False)
class KeyedPrompt:
    """A checked prompt of one row: ids (T,) on the CPU, without padding; the parts of its images, or None.

    items: of the parts, in order.
    keys: (T,) int64, one for each position; see the module's docstring.
    places: rotary places (3, T) where they are not the slots; None where they are.
    offset: what is added to the slot of a token after the prompt.
    """

    input_ids: Tensor
    parts: Pixels | None
    items: list[Item]
    keys: Tensor
    places: Tensor | None = None
    offset: int = 0

    def __len__(self) -> int:
        return len(self.keys)

    def worth_sharing(self, start: int, end: int) -> bool:
        """Whether getting positions start … end - 1 for free is worth an arrangement."""
        return end - start >= SHARE_FROM or bool((self.keys[start:end] < 0).any())

    @property
    def digests(self) -> list[bytes]:
        return [item.digest for item in self.items]


def read_prompt(
    model: VisionLanguage,
    input_ids: Tensor,
    pixel_values: Pixels | None = None,
    pixel_attention_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 0,
) -> KeyedPrompt:
    """The prompt of one row; raises ValueError for what the model cannot take, before any work.

    Takes the inputs of `VisionLanguageModel.generate`.
    """
    parts, row_parts, items = None, None, list[Item]()
    if pixel_values is not None and pixel_values.numel():
        parts, row_parts = model.parts_of_rows(pixel_values, pixel_attention_mask)
    prompt_lengths(model.config, input_ids, attention_mask, max_new_tokens)
    if len(input_ids) != 1:
        raise ValueError(f"input_ids: expected one prompt at a time, got a batch of {len(input_ids)}")
    ids = input_ids[0].cpu()
    if attention_mask is not None:
        ids = ids[attention_mask[0].bool().cpu()]
    if ids.dtype != torch.int64:  # it is what slots are compared by
        raise ValueError(f"input_ids: expected int64, got {ids.dtype}")
    if parts is not None:
        items = list(map(Item, digests_of(parts), model.positions(parts)))
    model.check_placeholders(ids[None], [item.positions for item in items], row_parts)
    # 62 bits of a digest: enough that no two of a visitor's tiles are taken for one another by chance, nor
    # can be made to look like somebody else's.
    known = [item.digest for item in items] if parts is None or isinstance(parts, Tensor) else parts.keys
    of_parts = zip((-1 - (int.from_bytes(one[:8]) >> 2) for one in known), items)
    of_positions = [key for key, item in of_parts for _ in range(item.positions)]
    shown = torch.tensor(of_positions, dtype=torch.int64)
    keys = ids.masked_scatter(ids == model.config.image_token_id, shown)
    places = model.places([ids], parts)
    return KeyedPrompt(ids, parts, items, keys, *(places[0] if places else ()))


def first_part(prompt: KeyedPrompt, reused: int) -> tuple[int, int]:
    """The index of the first part of an image that the first `reused` positions do not cover, and how many of
    its positions they do."""
    covered = int((prompt.keys[:reused] < 0).sum())
    for index, item in enumerate(prompt.items):
        if covered < item.positions:
            return index, covered
        covered -= item.positions
    return len(prompt.items), 0


def embed_after(
    model: VisionLanguage, prompt: KeyedPrompt, reused: int, features: Sequence[Tensor]
) -> Tensor:
    """Embeddings (1, L - reused, D) of the positions after the first `reused`; features are those of each
    part from `first_part` on, (its positions, D)."""
    ids = to_device(prompt.input_ids[None, reused:], model.device)
    rest = torch.cat(tuple(features))[first_part(prompt, reused)[1] :] if features else None
    return model.place_features(ids, rest)
