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
    """Real positions of each row, images included: checks shapes, and that an answer fits, before any work.

    Args:
        input_ids: (B, T).
        attention_mask: (B, T), 0 on padding, wherever that is; or None.
        context: positions that prompt and answer may take (else a ContextError); None is all that there are.
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


def seen_tokens(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int, answers: int) -> Tensor:
    """(B · answers, V) bool: the tokens of each prompt, padding not counted."""
    counts = torch.zeros(input_ids.shape[0], vocab_size, dtype=torch.int64, device=input_ids.device)
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask.bool().long()
    return counts.scatter_add_(1, input_ids, real).bool().repeat_interleave(answers, 0)
