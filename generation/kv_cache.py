"""The cache: a list with one dict per layer, of tensors (B, H, S, D) by name: B rows, H heads, S slots, D
numbers.

    kv_cache = allocate(language_model.cache_layout, batch, capacity, dtype)
    kv_cache[layer]["key"][row, head, slot]                    # (D_h,): the key of the row's token `slot`

Attention keeps {"key", "value"}, (B, H_kv, S, D_h); a short convolution its inputs, {"conv"}, (B, 1, S, D). A
gated delta rule has running sums, `STATES`, (B, H, n, D): n is fixed, so they do not grow with a row.

**Slots.** Slot s of a row holds token s of that row. Keys are rotated before they are written. The cache
does not know how many slots are filled: the decode loop owns `start_pos`, the slot of the next token, an int,
or (B,) where rows differ. Layers alone write, each its own dict: its tokens at `start_pos` and after it, in
place. Then a query at slot p looks at slots 0 … p. So a chunk on a prefix of n slots writes n, n + 1, … and
sees all that came before, and slots after it may hold garbage: each is written before a query looks at it.

**Going back** is a smaller `start_pos`, and costs nothing. A state goes back within its last `STATE_WINDOW`
slots; from further back it has to be copied from where it was kept (`generation/states.py`).

**Padding** is not in the cache: all prompts begin at slot 0 (`generation.prompts.compact`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

KVCache = list[dict[str, Tensor]]


class Kept(NamedTuple):
    """The size of what a layer keeps of each row under one name: (heads, S, width); of a state, in float32,
    (heads, fixed, width)."""

    heads: int
    width: int
    fixed: int | None = None


Layout = Sequence[Mapping[str, Kept]]  # of each layer, by name

STEP = 1024  # slots by which a buffer grows
STATES = frozenset({"state", "recent", "inputs"})
# How many slots back a running sum can go: it stands in the cache as it was at the last two multiples of
# this, with what came since, of which it is summed anew (`models/gated_delta.py`). Of the tokens that one
# pass computes for a row at most half as many may be rejected.
STATE_WINDOW = 16


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device; with CUDA through pinned memory, so that nobody waits for it."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def per_row(numbers: Sequence[int], device: torch.device | str) -> int | Tensor:
    """One number of each row: an int where all have the same, else (B,) int64."""
    return numbers[0] if min(numbers) == max(numbers) else to_device(torch.tensor(numbers), device)


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def allocate(
    layout: Layout, batch: int, capacity: int, dtype: torch.dtype, device: torch.device | str | None = None
) -> KVCache:
    """An empty cache for `batch` rows of `capacity` slots.

    Zeros, not uninitialised memory: a masked slot takes part in attention with weight 0, and 0 · NaN is NaN.
    """

    def empty(heads: int, width: int, fixed: int | None) -> Tensor:
        kind = torch.float32 if fixed else dtype
        return torch.zeros(batch, heads, fixed or capacity, width, dtype=kind, device=device)

    return [{name: empty(*sizes) for name, sizes in layer.items()} for layer in layout]


def allocate_for(language_model: Any, batch: int, capacity: int) -> KVCache:
    """An empty cache for a language model, on its device."""
    device = language_model.norm.weight.device
    return allocate(language_model.cache_layout, batch, capacity, language_model.cache_dtype, device)


def has_states(layout: Layout) -> bool:
    """Whether a layer keeps running sums."""
    return any(not STATES.isdisjoint(layer) for layer in layout)


def numbers_per_token(layout: Layout) -> int:
    """Numbers that all layers keep of one slot of one row."""
    return sum(heads * width for layer in layout for heads, width, fixed in layer.values() if not fixed)


def bytes_per_row(layout: Layout) -> int:
    """Bytes of all states of a row."""
    return sum(4 * heads * width * (fixed or 0) for layer in layout for heads, width, fixed in layer.values())


def bytes_per_position(language_model: Any) -> int:
    """Bytes of what this model keeps of one slot of one row."""
    return numbers_per_token(language_model.cache_layout) * language_model.cache_dtype.itemsize


def bytes_for(language_model: Any, rows: int, positions: int) -> int:
    """Bytes of a cache of so many rows with so many slots each."""
    each = positions * bytes_per_position(language_model) + bytes_per_row(language_model.cache_layout)
    return rows * each


def size_in_bytes(kv_cache: KVCache) -> int:
    """Bytes of the buffers, filled or not."""
    return sum(tensor.nbytes for layer in kv_cache for tensor in layer.values())


def by_slot(kv_cache: KVCache) -> Iterator[tuple[dict[str, Tensor], str]]:
    """(layer, name) of each tensor that has slots: of all but states."""
    return ((layer, name) for layer in kv_cache for name in layer if name not in STATES)


class Geometry(NamedTuple):
    """The sizes that all layers of a cache have in common, and the strides of its first tensor of slots."""

    rows: int
    capacity: int  # slots that each row has room for
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def geometry(kv_cache: KVCache) -> Geometry:
    """The sizes of a cache. Nobody else looks into it for them: not every kind of layer has keys."""
    layer, name = next(by_slot(kv_cache))
    first = layer[name]
    return Geometry(first.shape[0], first.shape[2], first.stride(), first.dtype, first.device)


def even(kv_cache: KVCache) -> bool:
    """Whether all layers of a kind are laid out alike, as kernels that know one layout take for granted."""
    strides: dict[tuple, tuple[int, ...]] = {}  # by name, heads and width
    tensors = [named for layer in kv_cache for named in layer.items()]
    alike = all(
        tensor.stride() == strides.setdefault((name, *tensor.shape[1::2]), tensor.stride())
        for name, tensor in tensors
    )
    return alike and len({layer[name].shape[2] for layer, name in by_slot(kv_cache)}) == 1


def view(kv_cache: KVCache, length: int, first: int = 0, count: int | None = None) -> KVCache:
    """`length` slots of `count` rows (None: all) from row `first` on, sharing memory with the cache."""
    rows = slice(first, None if count is None else first + count)
    shown = [{name: tensor[rows] for name, tensor in layer.items()} for layer in kv_cache]
    for layer, name in by_slot(shown):
        layer[name] = layer[name][:, :, :length]
    return shown


def copy(source: KVCache, target: KVCache) -> None:
    """Copy a view into one of the same size."""
    for layer, into in zip(source, target, strict=True):
        for name, tensor in into.items():
            tensor.copy_(layer[name])


def fork(kv_cache: KVCache, length: int, n: int, capacity: int) -> KVCache:
    """A new cache, the first `length` slots of every row n times side by side: (B, …) -> (B · n, …)."""
    forked = [
        {name: tensor.repeat_interleave(n, 0) for name, tensor in layer.items()}
        for layer in view(kv_cache, length)
    ]
    resize(forked, capacity)
    return forked


def resize(kv_cache: KVCache, target: int) -> None:
    """Have `target` slots in each row, with what the first of them held.

    The list and its dicts stay the same objects and get new tensors one at a time, so that no second whole
    cache exists meanwhile. Cut short (out of memory, Ctrl-C), it puts back the length that there was; if that
    fails as well, layers are not `even`, and another call makes them so. The first tensor, which `geometry`
    reads, comes last.
    """
    before = geometry(kv_cache).capacity
    try:
        _resize_tensors(kv_cache, target)
    except BaseException:
        _resize_tensors(kv_cache, before)
        raise


def _resize_tensors(kv_cache: KVCache, target: int) -> None:
    for layer, name in reversed([*by_slot(kv_cache)]):
        batch, heads, length, dim = layer[name].shape
        if length != target:
            new, kept = layer[name].new_zeros(batch, heads, target, dim), min(length, target)
            new[:, :, :kept] = layer[name][:, :, :kept]
            layer[name] = new
