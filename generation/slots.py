"""The rows of one cache as slots for many requests: what each holds, and how much memory they may take.

A slot remembers the prompt it was filled with, position by position, also after its request has ended. A new
prompt is compared with all of them; what it shares with one from the front is copied from there, or stays
where it is when that slot is given to it. So there is no second store of prefixes, and nothing to evict.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from generation import kv_cache as kv
from generation.kv_cache import KVCache
from generation.memory import CacheMemoryError, mebibytes

NOTHING = torch.iinfo(torch.int64).min  # no position's key


@dataclass(frozen=True)
class Plan:
    """Memory of a cache: `slots` rows of `positions` to begin with, of `context` at most.

    had: bytes that the cache may take; None where this machine does not tell.
    """

    slots: int
    positions: int
    context: int
    bytes_per_position: int
    had: int | None

    @property
    def needed(self) -> int:
        """Bytes of the cache that the run begins with."""
        return self.slots * self.positions * self.bytes_per_position

    @property
    def at_most(self) -> int:
        """Bytes of the cache when every slot has the whole context."""
        return self.slots * self.context * self.bytes_per_position

    def check(self) -> None:
        """Raises CacheMemoryError where more is needed than had."""
        if self.had is not None and self.needed > self.had:
            raise CacheMemoryError(
                f"{self.slots} slots of {self.positions} positions need {self.needed} bytes of cache, "
                f"{self.had} are to be had: take fewer slots or a shorter context"
            )

    def __str__(self) -> str:
        had = "an unknown amount" if self.had is None else mebibytes(self.had)
        more = "" if self.positions == self.context else f", up to {mebibytes(self.at_most)} if they grow"
        return (
            f"{self.slots} slots of {self.positions} positions: {mebibytes(self.needed)} of cache{more}; "
            f"{had} to be had"
        )


class SlotCache:
    """A cache whose rows are given out one by one. Made when first needed, grown in steps of `kv.STEP`.

    Args:
        text_config: geometry of the model.
        plan: rows, longest row and memory; `check` it first.
        dtype, device: of keys and values.
    """

    def __init__(self, text_config, plan: Plan, dtype: torch.dtype, device: torch.device):
        self._text, self._plan = text_config, plan
        self._like = torch.empty(0, dtype=dtype, device=device)
        self.kv_cache: KVCache | None = None
        self.forget()

    @property
    def capacity(self) -> int:
        return 0 if self.kv_cache is None else kv.capacity(self.kv_cache)

    def forget(self) -> None:
        """Hold nothing any more; the memory stays."""
        # Key of what is, or is about to be, at each position of each slot: (slots, S), on the host.
        self._keys = torch.full((self._plan.slots, self.capacity), NOTHING)
        self.filled = [0] * self._plan.slots  # positions of each slot that are really there

    def make_room(self, needed: int) -> None:
        """Have `needed` positions in every slot, up to the plan's context.

        Raises:
            CacheMemoryError: so many need more memory than the plan has.
        """
        if needed <= self.capacity:
            return
        plan = self._plan
        wanted = min(max(plan.positions, kv.round_up(needed, kv.STEP)), plan.context)
        Plan(plan.slots, wanted, plan.context, plan.bytes_per_position, plan.had).check()
        if self.kv_cache is None:
            self.kv_cache = kv.allocate_for(self._text, plan.slots, wanted, like=self._like)
        else:
            kv.grow(self.kv_cache, wanted, plan.context)
        old = self._keys
        self._keys = torch.full((plan.slots, wanted), NOTHING)
        self._keys[:, : old.shape[1]] = old

    def common(self, keys: Tensor) -> list[int]:
        """How many positions of a prompt, keys (L,), each slot holds or is about to hold, from the front.

        The cache must have room for L.
        """
        differs = self._keys[:, : len(keys)] != keys
        first = differs.to(torch.uint8).argmax(1)  # of equal maxima the first
        return torch.where(differs.any(1), first, len(keys)).tolist()

    def take_over(self, slot: int, keys: Tensor, source: int, shared: int) -> None:
        """Give a slot to a prompt whose first `shared` positions are those of slot `source`."""
        if shared and source != slot:
            kv.fork_into(self.rows(source, 1, shared), self.rows(slot, 1, shared), shared)
        self._keys[slot] = NOTHING
        self._keys[slot, : len(keys)] = keys
        self.filled[slot] = shared

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row with all of its `length` positions, prompt and answer, into another slot."""
        kv.fork_into(self.rows(source, 1, length), self.rows(target, 1, length), length)
        self._keys[target] = self._keys[source]
        self.filled[target] = self.filled[source]

    def clear(self, slot: int) -> None:
        """Overwrite a row that is not finite: even masked, NaN would reach the slot's next request."""
        for layer in self.kv_cache:
            for tensor in layer.values():
                tensor[slot].zero_()
        self._keys[slot], self.filled[slot] = NOTHING, 0

    def rows(self, first: int, count: int, length: int) -> KVCache:
        """`length` positions of `count` slots from `first` on, sharing memory with the cache."""
        return [
            {name: tensor.narrow(0, first, count).narrow(2, 0, length) for name, tensor in layer.items()}
            for layer in self.kv_cache
        ]
