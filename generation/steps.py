"""Decode steps: what the token loop calls for the logits of the next token.

A decode step is any callable (token ids (B, 1), kv_cache, start_pos) -> logits (B, V). A `ChunkStep` can run
several positions at once, so that proposed tokens can be verified together, and a `PromptStep` computes
prompts. A `DecodeLoop` samples by itself, and `generation.decoding.decode` leaves the loop to it.

Here are the eager step and the slow reference; `generation/fast/` has faster ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from generation.kv_cache import CachePosition, KVCache, Prompt
from generation.protocol import Decoder
from generation.sampling import Sampler

DecodeStep = Callable[[Tensor, KVCache, "int | Tensor"], Tensor]


@runtime_checkable
class ChunkStep(Protocol):
    """A decode step that can also run several positions at once."""

    same_bits: bool  # whether `chunk` gives, to the bit, the logits of single steps

    def __call__(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor: ...
    def chunk(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        """(B, T) token ids -> (B, T, V) logits of each position; the cache gains T positions in each row."""


@runtime_checkable
class PromptStep(Protocol):
    """A decode step that also computes prompts, each row by itself: padding costs nothing."""

    def prefill(
        self, embeddings: Tensor, lengths: Sequence[int], kv_cache: KVCache, start_pos: int | Tensor
    ) -> Tensor:
        """(B, L, D) embeddings, of which each row's first `lengths` are real -> (B, V) logits of its last
        position; the cache gains `lengths` positions in each row."""


@runtime_checkable
class DecodeLoop(Protocol):
    """A decode step that runs the whole loop, to sample tokens where the logits are made."""

    def decode(
        self, logits: Tensor, sampler: Sampler, position: CachePosition, max_new_tokens: int
    ) -> Iterator[Tensor]:
        """What `generation.decoding.decode` does, as far as a caller can see.

        It calls `position.reserve` before each step, and leaves in the sampler which rows have stopped after
        how many tokens. It may write into the cache after these, and may yield tokens on the host.
        """


class EagerStep:
    """The ordinary decode step: (B, 1) ids in, (B, V) logits out, the cache one position longer."""

    same_bits = False  # a product of several positions may round otherwise than that of one

    def __init__(self, language_model: Decoder):
        self._language_model = language_model

    def __call__(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        return self.chunk(token_ids, kv_cache, start_pos)[:, -1]

    def chunk(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        """(B, T) ids in, (B, T, V) logits of each position out, the cache T positions longer."""
        x = self._language_model.embed_tokens(token_ids)  # (B, T, D)
        hidden, _ = self._language_model(x, kv_cache=kv_cache, start_pos=start_pos)
        return self._language_model.logits(hidden)


def eager_step(language_model: Decoder) -> DecodeStep:
    """PyTorch's own operations, one after another."""
    return EagerStep(language_model)


def uncached_step(language_model: Decoder, embed_prompt: Callable[[], Prompt]) -> DecodeStep:
    """The slow reference: no cache; images, prompt and all tokens so far are recomputed for each token."""
    new_ids: list[Tensor] = []

    def step(token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        new_ids.append(token_ids)
        prompt, new = embed_prompt(), language_model.embed_tokens(torch.cat(new_ids, 1))  # (B, n, D)
        count = new.shape[1]
        x = F.pad(prompt.embeddings, (0, 0, 0, count))  # (B, L + n, D)
        slots = prompt.lengths_tensor()[:, None] + torch.arange(count, device=x.device)  # (B, n)
        rows = torch.arange(x.shape[0], device=x.device)
        x[rows[:, None], slots] = new  # after each row's real positions
        hidden, _ = language_model(x)
        return language_model.logits(hidden[rows, slots[:, -1]])

    return step
