"""Prompts as the model reads them: embeddings without padding, checked before any work.

    lengths = prompt_lengths(model.config, input_ids, attention_mask, max_new_tokens=64)
    prompt = compact(model.embed(input_ids, ...), attention_mask, lengths)

`compact` moves each row's real positions to slots 0 … length - 1, wherever the padding was. So prefill is
plain causal for every batch, and position equals slot. Rotary places are the slots, or a function of a
prompt's ids and image sizes, and slot + one number a row after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from generation.kv_cache import to_device


@dataclass(frozen=True)
class Prompt:
    """Embeddings (B, L, D) with each row's real positions in front, and how many those are.

    places: rotary places (3, B, L) where they are not the slots; None where they are.
    offsets: of each row, what is added to the slot of a token after the prompt.
    """

    embeddings: Tensor
    lengths: tuple[int, ...]
    places: Tensor | None = None
    offsets: tuple[int, ...] = (0,)


class ContextError(ValueError):
    """Prompt and answer are longer than the model's context."""

    def __init__(self, prompt_tokens: int, new_tokens: int, context: int):
        super().__init__(
            f"the context holds {context} tokens, but the prompt has {prompt_tokens} and up to {new_tokens} "
            "new ones may follow: shorten the prompt or lower max_new_tokens"
        )
        self.prompt_tokens, self.new_tokens, self.context = prompt_tokens, new_tokens, context


def prompt_lengths(
    config, input_ids: Tensor, attention_mask: Tensor | None, max_new_tokens: int
) -> list[int]:
    """Real positions of each row, images included: checks shapes, and that an answer fits the context (else a
    ContextError), before any work.

    Args:
        input_ids: (B, T).
        attention_mask: (B, T), 0 on padding, wherever that is; or None.
    """
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"input_ids: expected (B, T) with at least one token, got {tuple(input_ids.shape)}")
    least, most = torch.stack(input_ids.aminmax()).tolist()
    # The placeholder may follow the vocabulary.
    known = max(config.text.vocab_size, config.image_token_id + 1)
    if input_ids.is_floating_point() or least < 0 or most >= known:
        raise ValueError(f"input_ids: expected ids below {known}, got {least} to {most}")
    batch, length = input_ids.shape
    lengths = [length] * batch
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask: expected the shape of input_ids, {tuple(input_ids.shape)}, "
                f"got {tuple(attention_mask.shape)}"
            )
        lengths = attention_mask.bool().sum(1).tolist()
    if min(lengths) == 0:
        raise ValueError(f"row {lengths.index(0)} of the batch is all padding: there is nothing to continue")
    context = config.text.max_position_embeddings
    if max(lengths) + max_new_tokens > context:
        raise ContextError(max(lengths), max_new_tokens, context)
    return lengths


def compact(
    embeddings: Tensor,
    attention_mask: Tensor | None,
    lengths: list[int],
    places: Sequence[tuple[Tensor, int]] | None = None,
) -> Prompt:
    """Move each row's real positions to the front, in order: padding anywhere becomes right padding.

    Args:
        embeddings: (B, T, D).
        attention_mask: (B, T), or None where nothing is padding.
        lengths: of `prompt_lengths`.
        places: of `VisionLanguage.places`, a row's each.
    """
    longest = max(lengths)
    rotary: tuple[Tensor | None, tuple[int, ...]] = (None, (0,) * len(lengths))
    if places is not None:
        padded = torch.stack([F.pad(own, (0, longest - own.shape[1])) for own, _ in places], 1)
        rotary = to_device(padded, embeddings.device), tuple(offset for _, offset in places)
    if attention_mask is None or min(lengths) == embeddings.shape[1]:
        return Prompt(embeddings, tuple(lengths), *rotary)
    padding = ~attention_mask.bool()
    order = torch.argsort(padding, dim=1, stable=True)[:, :longest]  # real ones first, order kept
    order = to_device(order, embeddings.device)[..., None].expand(-1, -1, embeddings.shape[2])
    return Prompt(embeddings.gather(1, order), tuple(lengths), *rotary)
