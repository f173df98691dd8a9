"""Steps: what the token loops call for the logits of the next token.

    step = Step(model.language_model)
    logits = step.prefill(embeddings, lengths, kv_cache, 0)        # (B, V)
    logits = step(token_ids, kv_cache, start_pos)                  # (B, V)

`Step` itself is the eager one, in PyTorch's own operations; `generation/fast/` has faster ones, which derive
from it. `UncachedStep` is the slow reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from generation.kv_cache import KVCache, geometry, has_states, per_row, to_device
from generation.prompts import Prompt


class Step:
    """A decode step, and what else its maker knows to compute. What is not overridden is eager.

    same_bits: whether `chunk` gives, to the bit, the logits of single steps. A product of several positions
        may round otherwise than that of one.
    alone: whether `prefill` computes each row by itself: padding costs nothing, and company changes no bit.
    records: whether it has `bind` (see `GraphStep`): what that gives is recorded, and launched as a whole.
    pass_steps: how many steps take as long as a pass over a few positions; 1 where it saves any.
    states: whether layers keep what does not forget, and so have to know which positions are real.
    """

    same_bits, alone, records, states, pass_steps = False, False, False, False, 1.0

    def rehearse(self, rows: int = 1) -> str | None:
        """Make what up to so many rows need before anyone waits for it. Returns why it fails, or None."""
        return None

    def __init__(self, language_model: Any):
        self._language_model = language_model
        self.states = has_states(language_model.cache_layout)

    def __call__(
        self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor, offset: int | Tensor = 0
    ) -> Tensor:
        """(B, 1) token ids -> (B, V) logits; the cache gains a position in each row. A token's rotary place
        is its slot plus its row's `offset`, an int or (B,)."""
        return self.chunk(token_ids, kv_cache, start_pos, offset)[:, -1]

    def chunk(
        self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor, offset: int | Tensor = 0
    ) -> Tensor:
        """(B, T) token ids -> (B, T, V) logits of each position; the cache gains T positions in each row."""
        return self._chunk(token_ids, kv_cache, start_pos, offset)

    def _chunk(self, token_ids, kv_cache, start_pos, offset, lengths: list[int] | None = None) -> Tensor:
        x = self._language_model.embed(token_ids)  # (B, T, D)
        at = {"start_pos": start_pos, "offset": offset, "lengths": lengths}
        return self._language_model.logits(self._language_model(x, kv_cache=kv_cache, **at)[0])

    def prefill(
        self,
        embeddings: Tensor,
        lengths: Sequence[int],
        kv_cache: KVCache,
        start_pos: int | Tensor = 0,
        places: Tensor | None = None,
    ) -> Tensor:
        """(B, L, D) embeddings, or wider ones (see `LanguageModel.forward`), of which each row's first
        `lengths` are real -> (B, V) logits of its last position, or nothing of a row without any; the cache,
        if there is one, gains `lengths` positions in each row. `places` (3, B, L) are their rotary places
        where those are not the slots."""
        language_model, real = self._language_model, None
        if kv_cache and min(lengths) < embeddings.shape[1]:
            real = lengths
        hidden, _ = language_model(
            embeddings, kv_cache=kv_cache or None, start_pos=start_pos, position_ids=places, lengths=real
        )  # (B, L, D)
        if min(lengths) == max(lengths):
            return language_model.logits(hidden[:, max(lengths) - 1])
        last = to_device(torch.tensor(lengths).clamp(min=1) - 1, hidden.device)[:, None, None]
        return language_model.logits(hidden.gather(1, last.expand(-1, 1, hidden.shape[2]))[:, 0])

    def ragged(
        self,
        token_ids: Sequence[Sequence[int]],
        kv_cache: KVCache,
        starts: Sequence[int],
        offsets: Sequence[int],
    ) -> list[Tensor]:
        """`chunk` of the ids of each row from its own slot on, with its own offset: logits (n, V) of each."""
        lengths, device = list(map(len, token_ids)), geometry(kv_cache).device
        longest = max(lengths)
        padded = torch.tensor([[*ids, *[ids[-1]] * (longest - len(ids))] for ids in token_ids])
        start_pos, offset = (per_row(numbers, device) for numbers in (starts, offsets))
        inputs = (to_device(padded, device), kv_cache, start_pos, offset)
        # Padding may be written to slots, but not into states.
        logits = self._chunk(*inputs, lengths) if self.states else self.chunk(*inputs)
        return [row[: len(ids)] for row, ids in zip(logits, token_ids, strict=True)]


class UncachedStep(Step):
    """The slow reference: no cache; images, prompt and all tokens so far are recomputed for each token."""

    def __init__(self, language_model: Any, embed_prompt: Callable[[], Prompt]):
        super().__init__(language_model)
        self._embed_prompt, self._new_ids = embed_prompt, list[Tensor]()

    def __call__(
        self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor, offset: int | Tensor = 0
    ) -> Tensor:
        self._new_ids.append(token_ids)
        language_model, prompt = self._language_model, self._embed_prompt()
        new = language_model.embed(torch.cat(self._new_ids, 1))  # (B, n, D)
        count, answers = new.shape[1], len(new) // len(prompt.lengths)  # of each prompt
        new = F.pad(new, (0, prompt.embeddings.shape[2] - new.shape[2]))
        x = F.pad(prompt.embeddings, (0, 0, 0, count)).repeat_interleave(answers, 0)  # (B, L + n, D)
        places = None
        if prompt.places is not None:
            places = F.pad(prompt.places, (0, count)).repeat_interleave(answers, 1)  # (3, B, L + n)
        ends = [length + count for length in prompt.lengths for _ in range(answers)]
        for row, end in enumerate(ends):
            x[row, end - count : end] = new[row]  # after the row's real positions
            if places is not None:
                places[:, row, end - count : end] = (
                    torch.arange(end - count, end) + prompt.offsets[row // answers]
                )
        hidden, _ = language_model(x, position_ids=places)
        return language_model.logits(hidden[range(len(x)), [end - 1 for end in ends]])
