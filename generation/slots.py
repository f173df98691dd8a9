"""Slots: the rows of a cache that outlive their requests, so that a prompt may begin with what they hold.

slots = SlotCache(model.language_model, count=8, prefixes=PrefixStore(model))
slots.reserve(positions)
slot, reused = slots.take(prompt, free=[0], waiting={})  # with what is held of its first positions
...                                                      # compute those from `reused` on, and an answer
slots.put(slot, prompt, answer_ids)                      # hold all that for prompts to come; or
slots.drop(slot)                                         # zero what is not finite
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from generation import kv_cache as kv
from generation import memory
from generation.keyed_prompts import KeyedPrompt
from generation.kv_cache import STATE_WINDOW, KVCache
from generation.options import CacheMemoryError
from generation.prefix_store import Prefix, PrefixStore, is_finite
from generation.states import restore, snapshot, snapshot_numbers

SNAPSHOTS = 4  # snapshots of states that a slot keeps
NO_KEY = torch.iinfo(torch.int64).min  # the key of no position


class SlotCache:
    """A cache whose rows are slots for one prompt each. Allocated when first needed, and grown by `kv.STEP`.

    A slot remembers the keys of its positions, also after its request has ended. A new prompt is compared
    with all of them: what it shares with one from the front is copied from there, or stays where it is when
    the prompt gets that slot. What slots no longer hold, `prefixes` may have.

    A model with states can go on where a slot's row stands, in the window of positions that it stands in, and
    from `snapshots`, which are kept where prompts `stop` for them: at most `SNAPSHOTS` a slot, the first and
    the last ones.

    An interrupt (Ctrl-C, out of memory) may come between any two lines: `filled` never counts more positions
    than hold what `keys` says, so what is claimed is true at every moment.
    """

    def __init__(self, language_model: Any, count: int, prefixes: PrefixStore | None = None):
        self._language_model, self.count, self.prefixes = language_model, count, prefixes
        self._device = language_model.norm.weight.device
        self._context = language_model.config.max_position_embeddings
        self._states = kv.has_states(language_model.cache_layout)
        self.kv_cache: KVCache = []  # until the first `reserve`
        self._check(self._rounded(0))
        self.forget()

    @property
    def capacity(self) -> int:
        return kv.geometry(self.kv_cache).capacity if self.kv_cache else 0

    def forget(self) -> None:
        """Hold nothing any more; the memory stays."""
        self.filled = [0] * self.count  # positions of each slot that are computed
        # Of each slot, by position: what `states.restore` takes; and a position that its states stand at.
        self.snapshots: list[dict[int, Tensor]] = [{} for _ in range(self.count)]
        self._states_at: list[int | None] = [0] * self.count
        # Key of what is, or is about to be, at each position of each slot: (slots, S), on the host.
        self._keys = torch.full((self.count, self.capacity), NO_KEY)

    # -------------------------------------------------------------------------------------------- size

    def __str__(self) -> str:
        begin, grown = (f"{self._bytes(n) / 2**20:.1f} MiB" for n in (self._rounded(0), self._context))
        available = memory.available_bytes(self._device)
        left = "unknown" if available is None else f"{available / 2**20:.1f} MiB"
        sizes = f"{self.count} slots of {self._rounded(0)} positions: {begin} of cache"
        return f"{sizes}, up to {grown} if they grow; {left} available"

    def _bytes(self, positions: int) -> int:
        """Bytes of slots of so many positions, and of their snapshots."""
        snapshots = 4 * SNAPSHOTS * snapshot_numbers(self._language_model.cache_layout)
        return kv.bytes_for(self._language_model, self.count, positions) + self.count * snapshots

    def _rounded(self, needed: int) -> int:
        """Positions of a slot that has room for so many."""
        return min(max(kv.STEP, kv.round_up(needed, kv.STEP)), self._context)

    def reserve(self, needed: int) -> None:
        """Have `needed` positions in every slot. Raises CacheMemoryError if there is no memory for them."""
        if needed > self.capacity:
            wanted = self._rounded(needed)
            self._check(wanted)
            if self.kv_cache:
                kv.resize(self.kv_cache, wanted)
            else:
                self.kv_cache = kv.allocate_for(self._language_model, self.count, wanted)
        elif self.kv_cache and not kv.even(self.kv_cache):  # after a growth that could not be undone
            kv.resize(self.kv_cache, self.capacity)
        self._keys = F.pad(self._keys, (0, self.capacity - self._keys.shape[1]), value=NO_KEY)

    def _check(self, positions: int) -> None:
        """Raise CacheMemoryError if there is no memory, not even where kept prefixes lie: who asks now comes
        before who may ask again."""
        wanted = f"{self.count} x {positions}", self._bytes(positions), self._device
        while True:
            try:
                return memory.check_fits(*wanted, kv.size_in_bytes(self.kv_cache))
            except CacheMemoryError:
                on_cpu = self._device.type == "cpu"
                if not on_cpu or self.prefixes is None or not self.prefixes.drop(keep=3 / 4):
                    raise

    # ------------------------------------------------------------------------------------ take, put, drop

    def take(
        self, prompt: KeyedPrompt, free: Sequence[int], waiting: Mapping[int, Sequence[int]]
    ) -> tuple[int, int] | None:
        """Give a prompt one of the free slots, with what is held of its first positions, never all, because
        the last one's logits are not kept: (slot, how many it has of them). None if it is worth waiting for
        more of them: `waiting` are slots whose prompts are being computed, and `stops` that these come to."""
        keys, last, worth = prompt.keys, len(prompt) - 1, prompt.worth_sharing
        width = min(len(keys), self._keys.shape[1])
        differs = F.pad(self._keys[:, :width] != keys[:width], (0, 1), value=True)
        # By the first of equal maxima: what each slot has or is about to have, and after how much of it a row
        # can go on now.
        common = [min(shared, last) for shared in differs.to(torch.uint8).argmax(1).tolist()]
        ready = [self.resumed(slot, shared) for slot, shared in enumerate(common)]
        stored = Prefix([], 0)
        if self.prefixes is not None:
            stored = self.prefixes.find(keys, prompt.items, last)
        coming = [
            max((stop for stop in stops if stop <= common[slot]), default=0) if self._states else common[slot]
            for slot, stops in waiting.items()
        ]
        if worth(max(*ready, stored.end), max(coming, default=0)):
            return None
        source = max(range(self.count), key=ready.__getitem__)
        slot = max(free, key=ready.__getitem__)
        if not worth(ready[slot], ready[source]):
            source = slot
        # In its own slot it costs nothing.
        shared = ready[source] if source == slot or worth(0, ready[source]) else 0
        self._hold(slot, keys, source, shared)
        if self.prefixes is not None and stored.end > shared:
            reached, states = self.prefixes.take(stored, self.kv_cache, slot, shared)
            if not self._states:
                self.filled[slot] = reached
            elif states is not None and reached == stored.end:  # else the positions are worth nothing
                self.restore(slot, reached, states)
                self.filled[slot] = reached
        return slot, self.filled[slot]

    def put(self, slot: int, prompt: KeyedPrompt, tokens: list[int]) -> None:
        """Hold a prompt, as far as it is computed, and the tokens after it, for prompts to come. The last
        token has not been computed."""
        if tokens and self.filled[slot] == len(prompt):
            end = len(prompt) + len(tokens) - 1
            self._keys[slot, len(prompt) : end] = torch.tensor(tokens[:-1], dtype=torch.int64)
            self.compute(slot, end)
        if self.prefixes is not None:
            states = self.snapshots[slot]
            self.prefixes.put(self.keys(slot), prompt.items, self.kv_cache, slot, states)

    def drop(self, slot: int) -> None:
        """Zero a row that holds NaN, which would reach the slot's next request through the mask."""
        self.filled[slot], self.snapshots[slot], self._keys[slot] = 0, {}, NO_KEY
        for layer in self.kv_cache:
            for tensor in layer.values():
                tensor[slot].zero_()

    # ------------------------------------------------------------------------------------------- a slot

    def keys(self, slot: int) -> Tensor:
        """Of the positions of a slot that are computed: (filled,)."""
        return self._keys[slot, : self.filled[slot]]

    def is_finite(self, slot: int) -> bool:
        """Whether what is computed of a slot can be used."""
        row = kv.view(self.kv_cache, self.filled[slot], slot, 1)
        return all(is_finite(tensor) for layer in row for tensor in layer.values())

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row with all of its `length` positions, prompt and answer, into another slot."""
        self._copy(source, target, length)
        self._keys[target] = self._keys[source]
        self.snapshots[target] = dict(self.snapshots[source])
        self.filled[target], self._states_at[target] = self.filled[source], self._states_at[source]

    def _copy(self, source: int, target: int, length: int) -> None:
        """Copy positions, which the target holds once that is noted."""
        self.filled[target], self._states_at[target] = 0, None
        kv.copy(*(kv.view(self.kv_cache, length, slot, 1) for slot in (source, target)))

    def _hold(self, slot: int, keys: Tensor, source: int, shared: int) -> None:
        """Have a slot be about keys (L,), whose first `shared` positions another slot holds, or itself."""
        at, snapshots = self._states_at[source], self.snapshots[source]
        if source != slot:
            self._copy(source, slot, shared)
        self.snapshots[slot] = {at: states for at, states in snapshots.items() if at <= shared}
        if self._states and shared and (at is None or at // STATE_WINDOW != shared // STATE_WINDOW):
            self.restore(slot, shared, self.snapshots[slot][shared])
        self._states_at[slot] = shared
        self.filled[slot] = min(self.filled[slot], shared)
        self._keys[slot, : len(keys)] = keys
        self._keys[slot, len(keys) :] = NO_KEY
        self.filled[slot] = shared

    # -------------------------------------------------------------------------------------------- states

    def resumed(self, slot: int, shared: int) -> int:
        """After how many of a slot's first `shared` positions a row can go on."""
        shared, at = min(shared, self.filled[slot]), self._states_at[slot]
        if not self._states or (at is not None and at // STATE_WINDOW == shared // STATE_WINDOW):
            return shared
        return max((position for position in self.snapshots[slot] if position <= shared), default=0)

    def stops(self, prompt: KeyedPrompt) -> list[int]:
        """Where computing a prompt pauses for a snapshot: its last images' ends, for other questions, and a
        little before its own, because a prompt's last tokens often change when it becomes history."""
        if not self._states:
            return []
        of_image = F.pad(prompt.keys < 0, (0, 1))
        ends = (1 + (of_image[:-1] & ~of_image[1:]).nonzero().flatten()).tolist()
        wanted = [*ends[-2:], len(prompt) - STATE_WINDOW]
        return sorted({end - end % STATE_WINDOW for end in wanted if end >= STATE_WINDOW})

    def compute(self, slot: int, end: int | None = None) -> None:
        """Note that a slot's next positions are being computed, or up to which they are."""
        self._states_at[slot] = end
        if end is not None:
            self.filled[slot] = max(self.filled[slot], end)

    def keep(self, slot: int, position: int, states: Tensor | None = None) -> None:
        """Keep the states at a position at which a slot's row stands."""
        kept = self.snapshots[slot]
        kept[position] = snapshot(self.kv_cache, slot, position) if states is None else states
        if len(kept) > SNAPSHOTS:
            del kept[sorted(kept)[1]]

    def restore(self, slot: int, position: int, states: Tensor) -> None:
        """Have a slot's states at a position."""
        self._states_at[slot] = None
        restore(self.kv_cache, slot, position, states)
        self.keep(slot, position, states)
        self._states_at[slot] = position
