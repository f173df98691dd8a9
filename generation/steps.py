"""Steps: what the token loops call for the logits of the next token.

    step = Step(model.language_model)
    logits = step.prefill(embeddings, lengths, kv_cache, 0)        # (B, V)
    logits = step(token_ids, kv_cache, start_pos)                  # (B, V)

`Step` itself is the eager one, in PyTorch's own operations; `generation/fast/` has faster ones, which derive
from it. The slow reference, without a cache, is here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from generation.kv_cache import KVCache, Prompt, to_device
from generation.protocol import Decoder

DecodeStep = Callable[[Tensor, KVCache, "int | Tensor"], Tensor]


class Step:
    """A decode step, and what else its maker knows to compute. What is not overridden is eager.

    same_bits: whether `chunk` gives, to the bit, the logits of single steps. A product of several positions
        may round otherwise than that of one.
    chunks: whether it can run several positions of a row at once, so that proposed tokens are verified
        together.
    alone: whether `prefill` computes each row by itself: padding costs nothing, and company changes no bit.
    records: whether `bind` and `adopt` are worth it: what they give is recorded, and launched as a whole.
    """

    same_bits, chunks, alone, records = False, True, False, False

    def __init__(self, language_model: Decoder):
        self._language_model = language_model

    def __call__(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        """(B, 1) token ids -> (B, V) logits; the cache gains a position in each row."""
        return self.chunk(token_ids, kv_cache, start_pos)[:, -1]

    def chunk(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        """(B, T) token ids -> (B, T, V) logits of each position; the cache gains T positions in each row."""
        x = self._language_model.embed_tokens(token_ids)  # (B, T, D)
        hidden, _ = self._language_model(x, kv_cache=kv_cache, start_pos=start_pos)
        return self._language_model.logits(hidden)

    def prefill(
        self, embeddings: Tensor, lengths: Sequence[int], kv_cache: KVCache, start_pos: int | Tensor = 0
    ) -> Tensor:
        """(B, L, D) embeddings, of which each row's first `lengths` are real -> (B, V) logits of its last
        position; the cache, if there is one, gains `lengths` positions in each row."""
        language_model = self._language_model
        hidden, _ = language_model(embeddings, kv_cache=kv_cache or None, start_pos=start_pos)  # (B, L, D)
        if min(lengths) == max(lengths):
            return language_model.logits(hidden[:, max(lengths) - 1])
        last = to_device(torch.tensor(lengths) - 1, hidden.device)[:, None, None]
        return language_model.logits(hidden.gather(1, last.expand(-1, 1, hidden.shape[2]))[:, 0])

    def ragged(
        self, token_ids: Sequence[Sequence[int]], kv_cache: KVCache, starts: Sequence[int]
    ) -> list[Tensor]:
        """`chunk` of so many ids of each row from its own position on: logits (n, V) of each row."""
        longest, device = max(map(len, token_ids)), next(iter(kv_cache[0].values())).device
        padded = torch.tensor([[*own, *[own[-1]] * (longest - len(own))] for own in token_ids])
        start_pos = starts[0] if min(starts) == max(starts) else to_device(torch.tensor(starts), device)
        logits = self.chunk(to_device(padded, device), kv_cache, start_pos)
        return [row[: len(own)] for row, own in zip(logits, token_ids, strict=True)]

    def adopt(self, kv_cache: KVCache, filled: int, needed: int) -> None:
        """A loop will decode on this cache, which has so many filled positions and will have `needed`. A step
        that is bound to addresses may put other tensors into its dicts."""

    def bind(
        self,
        token: Tensor,
        kv_cache: KVCache,
        positions: Tensor,
        choose: Callable[[Tensor], None],
        state: list[Tensor],
        key: tuple,
    ) -> Callable[[], None]:
        """What runs a step, and then `choose` with its logits (B, V), each time it is called.

        Args:
            token, positions: (B, 1) ids and where they go, (B,): buffers that stay, read anew by each run.
            kv_cache: whose buffers stay; a view of it must hold every position that is run.
            choose: operations on the device that read nothing back.
            state: every tensor that `choose` changes, which binding must not.
            key: equal only where `choose` does the same to the same tensors.

        Ask again where any of these or the weights may have changed; a step that records does so once.
        """
        return lambda: choose(self(token, kv_cache, positions))


class FunctionStep(Step):
    """A function in place of the single step, which knows nothing else."""

    chunks = False

    def __init__(self, function: DecodeStep, language_model: Decoder):
        super().__init__(language_model)
        self._function = function

    def __call__(self, token_ids: Tensor, kv_cache: KVCache, start_pos: int | Tensor) -> Tensor:
        return self._function(token_ids, kv_cache, start_pos)


def uncached_step(language_model: Decoder, embed_prompt: Callable[[], Prompt]) -> Step:
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

    return FunctionStep(step, language_model)
