"""Slots: the rows of a cache that outlive their requests, so that a prompt may begin with what they hold.

slots = SlotCache(model.language_model, count=8, prefixes=PrefixStore(model))
slots.reserve(positions)
found = slots.find(prompt)                          # where its first positions are held
slot, reused = slots.take(prompt, found, free=[0])  # and now in a slot of its own
...                                                 # compute those from `reused` on, and an answer
slots.put(slot, prompt, answer_ids)                 # hold all that for prompts to come; or
slots.drop(slot)                                    # zero what is not finite
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from generation import kv_cache as kv
from generation import memory
from generation.keyed_prompts import KeyedPrompt
from generation.kv_cache import STATE_WINDOW, KVCache, bytes_for
from generation.options import CacheMemoryError
from generation.prefix_store import Prefix, PrefixStore, is_finite
from generation.protocol import Decoder
from generation.states import restore, snapshot, snapshot_numbers

SNAPSHOTS = 4  # snapshots of states that a slot keeps
NO_KEY = torch.iinfo(torch.int64).min  # the key of no position


class CacheBudget:
    """The memory of a cache: `slots` rows of `positions` to begin with and of `context` at most."""

    def __init__(self, language_model: Decoder, slots: int):
        self._language_model, self.slots = language_model, slots
        self.context = language_model.config.max_position_embeddings
        self.positions = min(kv.STEP, self.context)
        self.bytes_per_position = kv.bytes_per_position(language_model)
        self._snapshots = 4 * SNAPSHOTS * snapshot_numbers(language_model.cache_layout) * slots

    def size_in_bytes(self, positions: int) -> int:
        """Bytes of slots of so many positions, and of their snapshots."""
        return bytes_for(self._language_model, self.slots, positions) + self._snapshots

    def check(self, positions: int, existing: int = 0) -> None:
        """Raise CacheMemoryError if slots of so many positions are too large now, `existing` bytes of which
        are there already."""
        device = self._language_model.norm.weight.device
        memory.check_fits(f"{self.slots} x {positions}", self.size_in_bytes(positions), device, existing)

    def __str__(self) -> str:
        begin, grown = (
            f"{self.size_in_bytes(positions) / 2**20:.1f} MiB" for positions in (self.positions, self.context)
        )
        more = "" if self.positions == self.context else f", up to {grown} if they grow"
        available = memory.available_bytes(self._language_model.norm.weight.device)
        there = "unknown" if available is None else f"{available / 2**20:.1f} MiB"
        return f"{self.slots} slots of {self.positions} positions: {begin} of cache{more}; {there} available"


@dataclass(eq=False)
class Found:
    """Where the first positions of a prompt are held, by slot, and in the store.

    common: how many each slot has or is about to have, never all: the last one's logits are not kept.
    ready: after how many of these a row can go on now.
    """

    common: list[int]
    ready: list[int]
    look: Callable[[], Prefix]

    @cached_property
    def stored(self) -> Prefix:
        """What the store has; it is asked once."""
        return self.look()


class SlotCache:
    """A cache whose rows are slots for one prompt each. Allocated when first needed, grown by `kv.STEP`, and
    made smaller by `shrink`.

    A slot remembers the keys of its positions, also after its request has ended. A new prompt is compared
    with all of them: what it shares with one from the front is copied from there, or stays where it is when
    the prompt gets that slot. What slots no longer hold, `prefixes` may have.

    A model with states can go on where a slot's row stands, in the window of positions that it stands in, and
    from `snapshots`, which are kept where prompts `stop` for them: at most `SNAPSHOTS` a slot, the first and
    the last ones.

    An interrupt (Ctrl-C, out of memory) may come between any two lines: `filled` never counts more positions
    than hold what `keys` says, so what is claimed is true at every moment.
    """

    def __init__(self, language_model: Decoder, count: int, prefixes: PrefixStore | None = None):
        self._language_model, self.count, self.prefixes = language_model, count, prefixes
        self.budget = CacheBudget(language_model, count)
        self.budget.check(self.budget.positions)
        self.kv_cache: KVCache = []  # until the first `reserve`
        self.filled, self._used = [0] * count, [0] * count  # _used: positions that were ever written to
        self._states = kv.has_states(language_model.cache_layout)
        self.forget()
        memory.register(self)

    @property
    def capacity(self) -> int:
        return kv.geometry(self.kv_cache).capacity if self.kv_cache else 0

    @property
    def unused_bytes(self) -> int:
        """See `memory.register`; with room for snapshots that are not taken."""
        if not self.kv_cache or kv.geometry(self.kv_cache).device.type != "cpu":
            return 0
        used = [min(self.capacity, most) for most in map(max, self._used, self.filled)]
        taken = sum(bytes_for(self._language_model, 1, positions) for positions in used if positions)
        return max(0, self.budget.size_in_bytes(self.capacity) - taken - self._snapshot_bytes)

    @property
    def _snapshot_bytes(self) -> int:
        return sum({id(one): one.nbytes for kept in self.snapshots for one in kept.values()}.values())

    def forget(self) -> None:
        """Hold nothing any more; the memory stays."""
        self._used = list(map(max, self._used, self.filled))
        self.filled = [0] * self.count  # positions of each slot that are computed
        # Of each slot, by position: what `states.restore` takes; and a position that its states stand at.
        self.snapshots: list[dict[int, Tensor]] = [{} for _ in range(self.count)]
        self._states_at: list[int | None] = [0] * self.count
        # Key of what is, or is about to be, at each position of each slot: (slots, S), on the host.
        self._keys = torch.full((self.count, self.capacity), NO_KEY)

    # -------------------------------------------------------------------------------------------- size

    def reserve(self, needed: int) -> None:
        """Have `needed` positions in every slot. Raises CacheMemoryError if there is no memory for them."""
        if needed > self.capacity:
            wanted = self._rounded(needed)
            self._check(wanted)
            if self.kv_cache:
                self._used = [self.capacity] * self.count  # copied, and so written
                kv.grow(self.kv_cache, wanted, self.budget.context)
            else:
                self.kv_cache = kv.allocate_for(self._language_model, self.count, wanted)
        elif self.kv_cache and not kv.even(self.kv_cache):  # after a growth that could not be undone
            kv.resize(self.kv_cache, self.capacity)
        self._keys = F.pad(self._keys, (0, self.capacity - self._keys.shape[1]), value=NO_KEY)

    def _check(self, positions: int) -> None:
        """Raise CacheMemoryError if there is no memory, not even where kept prefixes lie: who asks now comes
        before who may ask again."""
        on_cpu = self._language_model.norm.weight.device.type == "cpu"
        while True:
            try:
                return self.budget.check(positions, kv.size_in_bytes(self.kv_cache) + self._snapshot_bytes)
            except CacheMemoryError:
                if not on_cpu or not self.prefixes or not self.prefixes.drop(keep=3 / 4):
                    raise

    def _rounded(self, needed: int) -> int:
        """Positions of a slot that has room for so many."""
        return min(max(self.budget.positions, kv.round_up(needed, kv.STEP)), self.budget.context)

    def spare(self, needed: int) -> bool:
        """Whether half of each slot or more would do where so many positions are needed."""
        return 2 * self._rounded(needed) <= self.capacity

    def shrink(self, needed: int) -> None:
        """Give back what lies after the first `needed` positions of each slot, or where slots began."""
        if (length := self._rounded(needed)) < self.capacity:
            self.filled = [min(filled, length) for filled in self.filled]
            for slot, kept in enumerate(self.snapshots):
                self.snapshots[slot] = {at: states for at, states in kept.items() if at <= length}
            self._keys = self._keys[:, :length].clone()
            kv.resize(self.kv_cache, length)
            self._used = [length] * self.count

    # ------------------------------------------------------------------------------ find, take, put, drop

    def find(self, prompt: KeyedPrompt) -> Found:
        """Where the first positions of a prompt are held."""
        keys, last = prompt.keys, len(prompt) - 1
        width = min(len(keys), self._keys.shape[1])
        differs = F.pad(self._keys[:, :width] != keys[:width], (0, 1), value=True)
        # The first of equal maxima.
        common = [min(shared, last) for shared in differs.to(torch.uint8).argmax(1).tolist()]
        ready = [self.resumed(slot, shared) for slot, shared in enumerate(common)]
        prefixes = self.prefixes
        return Found(
            common,
            ready,
            lambda: Prefix([], 0) if prefixes is None else prefixes.find(keys, prompt.items, last),
        )

    def take(self, prompt: KeyedPrompt, found: Found, free: Sequence[int]) -> tuple[int, int]:
        """Give a prompt one of the free slots, with what is held of its first positions: (slot, how many it
        has of them)."""
        ready = found.ready
        source = max(range(self.count), key=ready.__getitem__)
        slot = max(free, key=ready.__getitem__)
        if not prompt.worth_sharing(ready[slot], ready[source]):
            source = slot
        # In its own slot it costs nothing.
        shared = ready[source] if source == slot or prompt.worth_sharing(0, ready[source]) else 0
        self._hold(slot, prompt.keys, self, source, shared)
        if self.prefixes is not None and found.stored.end > shared:
            reached, states = self.prefixes.take(found.stored, self.kv_cache, slot, shared)
            if not self._states:
                self.filled[slot] = reached
            elif states is not None and reached == found.stored.end:  # else the positions are worth nothing
                self.restore(slot, reached, states)
                self.filled[slot] = reached
        return slot, self.filled[slot]

    def take_over(self, other: SlotCache, prompt: KeyedPrompt) -> None:
        """Hold in the first slot what a slot of another cache has of a prompt. Raises CacheMemoryError."""
        ready = other.find(prompt).ready
        if length := max(ready):
            self.reserve(length)
            self._hold(0, prompt.keys[:length], other, ready.index(length), length)

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
        self.filled[slot], self._used[slot] = 0, self.capacity
        self.snapshots[slot], self._keys[slot] = {}, NO_KEY
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
        self.filled[target], self._states_at[target] = 0, None
        kv.copy(*(kv.view(self.kv_cache, length, slot, 1) for slot in (source, target)))
        self._keys[target] = self._keys[source]
        self.snapshots[target] = dict(self.snapshots[source])
        self.filled[target], self._states_at[target] = self.filled[source], self._states_at[source]

    def _hold(self, slot: int, keys: Tensor, other: SlotCache, source: int, shared: int) -> None:
        """Have a slot be about keys (L,), whose first `shared` positions another slot holds, of this cache or
        another one."""
        at, snapshots = other._states_at[source], other.snapshots[source]
        if other is not self or source != slot:
            self.filled[slot], self._states_at[slot] = 0, None
            kv.copy(kv.view(other.kv_cache, shared, source, 1), kv.view(self.kv_cache, shared, slot, 1))
        self.snapshots[slot] = {at: states for at, states in snapshots.items() if at <= shared}
        if self._states and shared and (at is None or at // STATE_WINDOW != shared // STATE_WINDOW):
            self.restore(slot, shared, self.snapshots[slot][shared])
        self._states_at[slot] = shared
        self._used[slot] = max(self._used[slot], self.filled[slot])
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

    def coming(self, stops: Sequence[int], shared: int) -> int:
        """After how many of `shared` positions, of a prompt that is being computed, another one may go on."""
        return max((stop for stop in stops if stop <= shared), default=0) if self._states else shared

    def compute(self, slot: int, end: int | None = None) -> None:
        """Note that a slot's next positions are being computed, or up to which they are."""
        self._states_at[slot] = end
        if end is not None:
            self.filled[slot] = max(self.filled[slot], end)

    def keep(self, slot: int, position: int) -> None:
        """Take a snapshot at a stop that a slot's row has just come to."""
        self._keep(slot, position, snapshot(self.kv_cache, slot, position))

    def _keep(self, slot: int, position: int, states: Tensor) -> None:
        kept = self.snapshots[slot]
        kept[position] = states
        if len(kept) > SNAPSHOTS:
            del kept[sorted(kept)[1]]

    def restore(self, slot: int, position: int, states: Tensor) -> None:
        """Have a slot's states at a position."""
        self._states_at[slot] = None
        restore(self.kv_cache, slot, position, states)
        self._keep(slot, position, states)
        self._states_at[slot] = position
