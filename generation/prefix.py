"""What is known by its content: images' features, and the positions that the rows of a cache hold.

    features = FeatureCache(model)
    prompt = read_prompt(model, input_ids, pixel_values, max_new_tokens=64)   # checked, with keys
    slots = SlotCache(model.language_model, CacheBudget(model.language_model, slots=8))
    reused = slots.ready(prompt.keys, len(prompt) - 1)[slot]
    embeddings = embed_after(model, prompt, reused, features.encode(prompt.parts, prompt.digests)[0])

What a tower encodes as a whole, a tile, is a part of an image. A part's digest is taken over all that its
features depend on besides the weights: the pixels as preprocessing left them, or its bytes and what they
stand for, their shape and dtype. A position's key is a token's id, or a number below 0 that stands for a
part's digest (and, where rotary places have it, for its time in a video), because all placeholders carry the
same id. Two prompts with the same keys from the front have the same keys and values there in the cache.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from generation import kv_cache as kv
from generation import memory
from generation.kv_cache import KVCache, bytes_per_position, bytes_per_row, prompt_lengths, snapshot_numbers
from generation.options import CacheMemoryError, check_integer
from generation.protocol import Decoder, Pixels, VisionLanguage

FEATURE_BYTES = 64 * 2**20  # of features kept for a model; SmolVLM-256M's tile takes 147 kB in float32
SNAPSHOTS = 4  # states that a slot keeps beside where it stands
NO_KEY = torch.iinfo(torch.int64).min  # the key of no position


def digests_of(parts: Pixels) -> list[bytes]:
    """A SHA-256 of each part of images, because visitors choose the pixels: (N, 3, H, W), preprocessed; or
    cut, which know theirs."""
    if not isinstance(parts, Tensor):
        return parts.digests
    digests = []
    for part in parts:
        digest = hashlib.sha256(f"{part.dtype} {tuple(part.shape)}".encode())
        # As uint8, because numpy has no bfloat16.
        digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        digests.append(digest.digest())
    return digests


class FeatureCache:
    """Features of the parts of images (tiles) used last, on the model's device.

    Several sessions of one model may share one, from several threads. Call `clear` when the weights change.

    Args:
        max_bytes: size limit; the part used longest ago goes first. 0 keeps nothing.
    """

    def __init__(self, model: VisionLanguage, max_bytes: int = FEATURE_BYTES):
        check_integer("max_bytes", max_bytes, low=0)
        self.model, self.max_bytes, self.size_in_bytes = model, max_bytes, 0
        self._features: OrderedDict[bytes, Tensor] = OrderedDict()  # the part used last is the last
        self._lock = Lock()

    def __len__(self) -> int:
        """Parts kept."""
        return len(self._features)

    def missing(self, digests: Sequence[bytes]) -> set[bytes]:
        """Which of these `digests_of` would have to be encoded."""
        with self._lock:
            return set(digests) - self._features.keys()

    def clear(self) -> None:
        with self._lock:
            self._features.clear()
            self.size_in_bytes = 0

    @torch.no_grad()
    def encode(self, parts: Pixels, digests: Sequence[bytes]) -> tuple[list[Tensor], int]:
        """Features of each part with these `digests_of`, (its positions, D), and how many of them had to be
        encoded: all that are missing in one call, equal ones once."""
        found = {}
        with self._lock:
            for digest in digests:
                if digest in self._features:
                    self._features.move_to_end(digest)
                    found[digest] = self._features[digest]
        missing = {digest: index for index, digest in enumerate(digests) if digest not in found}
        if missing:
            if len(missing) < len(digests):  # else without a copy
                parts = parts[list(missing.values())]
            for digest, features in zip(missing, self.model.encode_images(parts)):
                found[digest] = features
                self._put(digest, features)
        return [found[digest] for digest in digests], len(missing)

    def _put(self, digest: bytes, features: Tensor) -> None:
        with self._lock:
            if features.nbytes > self.max_bytes or digest in self._features:  # by another thread
                return
            while self.size_in_bytes + features.nbytes > self.max_bytes:
                self.size_in_bytes -= self._features.popitem(last=False)[1].nbytes
            # A copy, because a row of the batch would keep the whole batch in memory.
            self._features[digest] = features.clone()
            self.size_in_bytes += features.nbytes


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
    of_parts = [-1 - (int.from_bytes(one[:8]) >> 2) for one in known]
    counts = torch.tensor([item.positions for item in items], dtype=torch.int64)
    of_positions = torch.tensor(of_parts, dtype=torch.int64).repeat_interleave(counts)
    keys = ids.masked_scatter(ids == model.config.image_token_id, of_positions)
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
    ids = kv.to_device(prompt.input_ids[None, reused:], model.device)
    rest = torch.cat(tuple(features))[first_part(prompt, reused)[1] :] if features else None
    return model.place_features(ids, rest)


class CacheBudget:
    """Memory of a cache: `slots` rows of `positions` to begin with and of `context` at most.

    available: asked whenever the cache is to grow: bytes that it may take besides those it has; None for no
        limit.
    """

    def __init__(
        self, language_model: Decoder, slots: int, available: Callable[[], int | None] = lambda: None
    ):
        context, layout = language_model.config.max_position_embeddings, language_model.config.cache_layout
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
        self._window = language_model.config.state_window
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
        states = kv.bytes_per_row(self._language_model.config.cache_layout) * (len(used) - used.count(0))
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
                like, dtype = model.norm.weight, model.cache_dtype
                self.kv_cache = kv.allocate_for(model.config, budget.slots, wanted, like, dtype)
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
        if not self._window or (at is not None and at // self._window == shared // self._window):
            return shared
        return max((position for position in self.snapshots[slot] if position <= shared), default=0)

    def stops(self, prompt: KeyedPrompt) -> list[int]:
        """Where computing a prompt pauses for a snapshot: its last images' ends, for other questions, and a
        little before its own, because a prompt's last tokens often change when it becomes history."""
        if not self._window:
            return []
        of_image = F.pad(prompt.keys < 0, (0, 1))
        ends = (1 + (of_image[:-1] & ~of_image[1:]).nonzero().flatten()).tolist()
        wanted = [*ends[-2:], len(prompt) - self._window]
        return sorted({end - end % self._window for end in wanted if end >= self._window})

    def coming(self, stops: Sequence[int], shared: int) -> int:
        """After how many of `shared` positions, of a prompt that is being computed, another one may go on."""
        return max((stop for stop in stops if stop <= shared), default=0) if self._window else shared

    def compute(self, slot: int, end: int | None = None) -> None:
        """Note that a slot's next positions are being computed, or up to which they are."""
        self._states_at[slot] = end
        if end is not None:
            self.filled[slot] = max(self.filled[slot], end)

    def keep(self, slot: int, position: int) -> None:
        """Take a snapshot at a stop that a slot's row has just come to."""
        self._kept(slot, position, kv.snapshot(self.kv_cache, slot, position))

    def _kept(self, slot: int, position: int, states: Tensor) -> None:
        kept = self.snapshots[slot]
        kept[position] = states
        if len(kept) > SNAPSHOTS:
            del kept[sorted(kept)[1]]

    def restore(self, slot: int, position: int, states: Tensor) -> None:
        """Have a slot's states at a position."""
        self._states_at[slot] = None
        kv.restore(self.kv_cache, slot, position, states)
        self._kept(slot, position, states)
        self._states_at[slot] = position

    def assign(self, slot: int, keys: Tensor, source: int, shared: int) -> None:
        """Give a slot to a prompt whose first `shared` positions, of `ready`, slot `source` holds; see
        `reserve`."""
        at = self._states_at[source]
        if source != slot:
            self.filled[slot], self._states_at[slot] = 0, None
            kv.copy_row(self.kv_cache, source, slot, shared)
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
        if self._window and shared and (at is None or at // self._window != shared // self._window):
            self.restore(slot, shared, self.snapshots[slot][shared])
        self._states_at[slot] = shared

    def append(self, slot: int, keys: Tensor) -> None:
        """Note tokens that were computed at the end of a slot."""
        end = self.filled[slot] + len(keys)
        self._keys[slot, self.filled[slot] : end] = keys
        self.compute(slot, end)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row with all of its `length` positions, prompt and answer, into another slot."""
        self.filled[target], self._states_at[target] = 0, None
        kv.copy_row(self.kv_cache, source, target, length)
        self._keys[target] = self._keys[source]
        self.snapshots[target] = dict(self.snapshots[source])
        self.filled[target], self._states_at[target] = self.filled[source], self._states_at[source]

    def take_over(self, other: SlotCache, source: int, length: int) -> None:
        """Hold in the first slot so many positions that a slot of another cache holds. Raises
        CacheMemoryError."""
        self.reserve(length)
        for layer, of_other in zip(self.kv_cache, other.kv_cache, strict=True):
            for name, tensor in layer.items():
                kv.slots(name, tensor, length)[0] = kv.slots(name, of_other[name], length)[source]
        self._follow(0, other, source, length, other._states_at[source])
        self._keys[0, :length] = other.keys(source)[:length]
        self.filled[0] = length

    def is_finite(self, slot: int) -> bool:
        """Whether what is computed of a slot can be used."""
        layers, end = self.kv_cache, self.filled[slot]
        parts = (kv.slots(name, tensor, end)[slot] for layer in layers for name, tensor in layer.items())
        return all(map(is_finite, parts))

    def clear(self, slot: int) -> None:
        """Zero a row that holds NaN, which would reach the slot's next request through the mask."""
        self.filled[slot], self._used[slot] = 0, self.capacity
        self.snapshots[slot], self._keys[slot] = {}, NO_KEY
        for layer in self.kv_cache:
            for tensor in layer.values():
                tensor[slot].zero_()
