"""Slots: the rows of a cache that outlive their requests: the next prompt may go on from what they hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from generation import kv_cache as kv
from generation import memory
from generation.keyed_prompts import KeyedPrompt
from generation.kv_cache import STATE_WINDOW, KVCache, Layout, bytes_per_position, bytes_per_row, view
from generation.options import CacheMemoryError
from generation.protocol import Decoder

SNAPSHOTS = 4  # states that a slot keeps beside where it stands
NO_KEY = torch.iinfo(torch.int64).min  # the key of no position


class CacheBudget:
    """Memory of a cache: `slots` rows of `positions` to begin with and of `context` at most.

    available: asked whenever the cache is to grow: bytes that it may take besides those it has; None for no
        limit.
    """

    def __init__(
        self, language_model: Decoder, slots: int, available: Callable[[], int | None] = lambda: None
    ):
        context, layout = language_model.config.max_position_embeddings, language_model.cache_layout
        self.slots, self.positions, self.context = slots, min(kv.STEP, context), context
        self.available, self.bytes_per_position = available, bytes_per_position(language_model)
        # Of a row however long it is: states and their snapshots.
        self.bytes_per_slot = bytes_per_row(layout) + 4 * SNAPSHOTS * snapshot_numbers(layout)

    def size_in_bytes(self, positions: int) -> int:
        """Of slots of so many positions."""
        return self.slots * (positions * self.bytes_per_position + self.bytes_per_slot)

    def check(self, positions: int, existing: int = 0) -> None:
        """Raise CacheMemoryError if slots of so many positions are too large now, for a cache that has `held`
        bytes of them."""
        needed, available = self.size_in_bytes(positions), self.available()
        if available is not None and needed > available + existing:
            raise CacheMemoryError(
                f"{self.slots} slots of {positions} positions need {needed} bytes of cache, but only "
                f"{available + existing} are available: ask for a shorter answer, or use fewer slots"
            )

    def __str__(self) -> str:
        begin, grown = (
            f"{self.size_in_bytes(positions) / 2**20:.1f} MiB" for positions in (self.positions, self.context)
        )
        more = "" if self.positions == self.context else f", up to {grown} if they grow"
        available = self.available()
        there = "unknown" if available is None else f"{available / 2**20:.1f} MiB"
        return f"{self.slots} slots of {self.positions} positions: {begin} of cache{more}; {there} available"


def is_finite(tensor: Tensor) -> bool:
    """Whether no number of it is NaN or infinite. Waits for the device."""
    # NaN and infinity go into any sum; so would numbers far beyond what a cache holds.
    return math.isfinite(tensor.sum(dtype=torch.float32).item())


class SlotCache:
    """A cache whose rows are slots for one prompt each. Allocated when first needed, grown by `kv.STEP`, and
    made smaller by `shrink`.

    A slot remembers the keys of its positions, also after its request has ended. A new prompt is compared
    with all of them: what it shares with one from the front is copied from there, or stays where it is when
    the prompt gets that slot. What slots no longer hold, a `prefix_store.PrefixStore` may keep.

    A model with states can go on where a slot's row stands, in the window of positions that it stands in, and
    from `snapshots`, which are kept where prompts `stop` for them: at most `SNAPSHOTS` a slot, the first and
    the last ones.

    An interrupt (Ctrl-C, out of memory) may come between any two lines: `filled` never counts more positions
    than hold what `keys` says, so what is claimed is true at every moment.
    """

    def __init__(self, language_model: Decoder, budget: CacheBudget):
        self._language_model, self._budget = language_model, budget
        self.kv_cache: KVCache = []  # until the first `reserve`
        self.filled, self._used = [0] * budget.slots, [0] * budget.slots  # _used: see `unused_bytes`
        self._states = kv.has_states(language_model.cache_layout)
        self.forget()
        memory.register(self)

    @property
    def capacity(self) -> int:
        return kv.geometry(self.kv_cache).capacity if self.kv_cache else 0

    @property
    def unused_bytes(self) -> int:
        """See `memory.Keeper`; with room for snapshots that are not taken."""
        if not self.kv_cache or kv.geometry(self.kv_cache).device.type != "cpu":
            return 0
        used = [min(self.capacity, most) for most in map(max, self._used, self.filled)]
        states = bytes_per_row(self._language_model.cache_layout) * (len(used) - used.count(0))
        used_bytes = sum(used) * self._budget.bytes_per_position + states + self._snapshot_bytes
        return max(0, self._budget.size_in_bytes(self.capacity) - used_bytes)

    @property
    def _snapshot_bytes(self) -> int:
        return sum({id(one): one.nbytes for kept in self.snapshots for one in kept.values()}.values())

    def forget(self) -> None:
        """Hold nothing any more; the memory stays."""
        self._used = list(map(max, self._used, self.filled))
        self.filled = [0] * self._budget.slots  # positions of each slot that are computed
        # Of each slot, by position: what `kv.restore` takes; and a position that its states stand at.
        self.snapshots: list[dict[int, Tensor]] = [{} for _ in range(self._budget.slots)]
        self._states_at: list[int | None] = [0] * self._budget.slots
        # Key of what is, or is about to be, at each position of each slot: (slots, S), on the host.
        self._keys = torch.full((self._budget.slots, self.capacity), NO_KEY)

    def reserve(self, needed: int) -> None:
        """Have `needed` positions in every slot. Raises CacheMemoryError if the budget is too small."""
        budget, model = self._budget, self._language_model
        if needed > self.capacity:
            wanted = self._rounded(needed)
            budget.check(wanted, kv.size_in_bytes(self.kv_cache) + self._snapshot_bytes)
            if self.kv_cache:
                self._used = [self.capacity] * budget.slots  # copied, and so written
                kv.grow(self.kv_cache, wanted, budget.context)
            else:
                self.kv_cache = kv.allocate_for(model, budget.slots, wanted)
        elif self.kv_cache and not kv.even(self.kv_cache):  # after a growth that could not be undone
            kv.resize(self.kv_cache, self.capacity)
        self._keys = F.pad(self._keys, (0, self.capacity - self._keys.shape[1]), value=NO_KEY)

    def _rounded(self, needed: int) -> int:
        """Positions of a slot that has room for so many."""
        return min(max(self._budget.positions, kv.round_up(needed, kv.STEP)), self._budget.context)

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
            self._used = [length] * self._budget.slots

    def keys(self, slot: int) -> Tensor:
        """Of the positions of a slot that are computed: (filled,)."""
        return self._keys[slot, : self.filled[slot]]

    def in_common(self, keys: Tensor) -> list[int]:
        """How many positions of keys (L,) each slot holds or is about to hold, from the front."""
        width = min(len(keys), self._keys.shape[1])
        differs = F.pad(self._keys[:, :width] != keys[:width], (0, 1), value=True)
        return differs.to(torch.uint8).argmax(1).tolist()  # the first of equal maxima

    def ready(self, keys: Tensor, most: int) -> list[int]:
        """After how many of the positions that each slot has `in_common`, `most` at most, a row can go on."""
        return [self._resumed(slot, min(shared, most)) for slot, shared in enumerate(self.in_common(keys))]

    def _resumed(self, slot: int, shared: int) -> int:
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
        self._kept(slot, position, snapshot(self.kv_cache, slot, position))

    def _kept(self, slot: int, position: int, states: Tensor) -> None:
        kept = self.snapshots[slot]
        kept[position] = states
        if len(kept) > SNAPSHOTS:
            del kept[sorted(kept)[1]]

    def restore(self, slot: int, position: int, states: Tensor) -> None:
        """Have a slot's states at a position."""
        self._states_at[slot] = None
        restore(self.kv_cache, slot, position, states)
        self._kept(slot, position, states)
        self._states_at[slot] = position

    def assign(self, slot: int, keys: Tensor, source: int, shared: int) -> None:
        """Give a slot to a prompt whose first `shared` positions, of `ready`, slot `source` holds; see
        `reserve`."""
        at = self._states_at[source]
        if source != slot:
            self.filled[slot], self._states_at[slot] = 0, None
            self._copy(source, slot, shared)
        self._follow(slot, self, source, shared, at)
        self._used[slot] = max(self._used[slot], self.filled[slot])
        self.filled[slot] = min(self.filled[slot], shared)
        self._keys[slot, : len(keys)] = keys
        self._keys[slot, len(keys) :] = NO_KEY
        self.filled[slot] = shared

    def _follow(self, slot: int, other: SlotCache, source: int, shared: int, at: int | None) -> None:
        """Have the snapshots of another slot's first `shared` positions; its states, which stood `at`, are
        copied, and are set back to there if need be."""
        self.snapshots[slot] = {
            position: states for position, states in other.snapshots[source].items() if position <= shared
        }
        if self._states and shared and (at is None or at // STATE_WINDOW != shared // STATE_WINDOW):
            self.restore(slot, shared, self.snapshots[slot][shared])
        self._states_at[slot] = shared

    def append(self, slot: int, keys: Tensor) -> None:
        """Note tokens that were computed at the end of a slot."""
        end = self.filled[slot] + len(keys)
        self._keys[slot, self.filled[slot] : end] = keys
        self.compute(slot, end)

    def _copy(self, source: int, target: int, length: int) -> None:
        kv.copy(*(view(self.kv_cache, length, slot, 1) for slot in (source, target)))

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row with all of its `length` positions, prompt and answer, into another slot."""
        self.filled[target], self._states_at[target] = 0, None
        self._copy(source, target, length)
        self._keys[target] = self._keys[source]
        self.snapshots[target] = dict(self.snapshots[source])
        self.filled[target], self._states_at[target] = self.filled[source], self._states_at[source]

    def take_over(self, other: SlotCache, source: int, length: int) -> None:
        """Hold in the first slot so many positions that a slot of another cache holds. Raises
        CacheMemoryError."""
        self.reserve(length)
        kv.copy(view(other.kv_cache, length, source, 1), view(self.kv_cache, length, 0, 1))
        self._follow(0, other, source, length, other._states_at[source])
        self._keys[0, :length] = other.keys(source)[:length]
        self.filled[0] = length

    def is_finite(self, slot: int) -> bool:
        """Whether what is computed of a slot can be used."""
        layers = view(self.kv_cache, self.filled[slot], slot, 1)
        return all(is_finite(tensor) for layer in layers for tensor in layer.values())

    def clear(self, slot: int) -> None:
        """Zero a row that holds NaN, which would reach the slot's next request through the mask."""
        self.filled[slot], self._used[slot] = 0, self.capacity
        self.snapshots[slot], self._keys[slot] = {}, NO_KEY
        for layer in self.kv_cache:
            for tensor in layer.values():
                tensor[slot].zero_()


def snapshot(kv_cache: KVCache, row: int, position: int) -> Tensor:
    """What a row's states were at a position where a window begins, one of the last two such that the row has
    come by; flat, to be given back to `restore`."""
    return torch.cat([part.flatten() for part in _states(kv_cache, row, position)])


def restore(kv_cache: KVCache, row: int, position: int, kept: Tensor) -> None:
    """Have a row's states as a `snapshot` of that position has them."""
    targets = _states(kv_cache, row, position)
    for target, part in zip(targets, kept.split([target.numel() for target in targets]), strict=True):
        target.copy_(part.view(target.shape))


def snapshot_numbers(layout: Layout) -> int:
    """How many numbers a `snapshot` has, each of 4 bytes."""
    return sum(
        heads * width * (1 if name == "state" else (count or 0) // 2)
        for layer in layout
        for name, (heads, width, count) in layer.items()
        if name in ("state", "inputs")
    )


def _states(kv_cache: KVCache, row: int, position: int) -> list[Tensor]:
    """Of each state a row's matrix before a position where a window begins, and the inputs of the window
    before it, which a convolution may read."""
    parts = []
    for layer in kv_cache:
        if "state" in layer:
            number = position // STATE_WINDOW
            before = (number - 1) % 2 * STATE_WINDOW
            parts += [layer["state"][row, :, number % 2]]
            parts += [layer["inputs"][row, :, before : before + STATE_WINDOW]]
    return parts
