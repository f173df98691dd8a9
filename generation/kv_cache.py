"""The key-value cache: a list with one dict {"key", "value"} per layer, tensors (B, H_kv, S, D_h).

Slot s of a row holds the token at absolute position s of that row. The cache knows no length: whoever
decodes owns `start_pos`, and everything at or past it is free. That is why `rewind` moves nothing, and why
`fork_into` has to be told how much of its target is in use.
"""

from __future__ import annotations

import torch
from torch import Tensor

KVCache = list[dict[str, Tensor]]

STEP = 1024  # positions by which an outlived buffer grows


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


def allocate(
    num_layers: int,
    batch: int,
    kv_heads: int,
    capacity: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> KVCache:
    """An empty cache for `batch` rows of `capacity` positions.

    Zeros, not uninitialised memory: a masked slot takes part in attention with weight 0, and 0 · NaN is NaN.

    Raises:
        ValueError: a size that is not positive.
    """
    sizes = {"num_layers": num_layers, "batch": batch, "kv_heads": kv_heads, "capacity": capacity}
    for name, size in (sizes | {"head_dim": head_dim}).items():
        if size < 1:
            raise ValueError(f"kv cache: {name} must be at least 1, got {size}")
    shape = (batch, kv_heads, capacity, head_dim)
    return [
        {name: torch.zeros(shape, dtype=dtype, device=device) for name in ("key", "value")}
        for _ in range(num_layers)
    ]


def allocate_for(
    text_config, batch: int, capacity: int, like: Tensor, dtype: torch.dtype | None = None
) -> KVCache:
    """`allocate` with the geometry of a text config, on the device of `like`, in its dtype or another."""
    return allocate(
        text_config.num_hidden_layers,
        batch,
        text_config.num_key_value_heads,
        capacity,
        text_config.head_dim,
        like.dtype if dtype is None else dtype,
        like.device,
    )


def rows(kv_cache: KVCache) -> int:
    return kv_cache[0]["key"].shape[0]


def capacity(kv_cache: KVCache) -> int:
    """Positions that each row has room for."""
    return kv_cache[0]["key"].shape[2]


def size_in_bytes(kv_cache: KVCache) -> int:
    """Bytes of the buffers, filled or not."""
    return sum(tensor.numel() * tensor.element_size() for layer in kv_cache for tensor in layer.values())


def bytes_per_token(num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one position of one row takes: keys and values of every layer."""
    return 2 * num_layers * kv_heads * head_dim * dtype.itemsize


def grow(kv_cache: KVCache, needed: int, limit: int | None = None) -> None:
    """Make room for `needed` positions in each row, keeping what is there; does nothing where there is room.

    The new capacity is the next multiple of `STEP`, at most `limit`. The list and its dicts stay the same
    objects and get new tensors, one layer at a time, so that no second whole cache stands beside the first;
    the first layer's keys, by which `capacity` goes, come last, so that a growth cut short (out of memory,
    Ctrl-C) can be tried again. Views taken earlier (`view`) still show the old buffers.

    Raises:
        ValueError: needed exceeds limit.
    """
    if needed <= capacity(kv_cache):
        return
    if limit is not None and needed > limit:
        raise ValueError(f"kv cache: {needed} positions needed, limited to {limit}")
    target = round_up(needed, STEP) if limit is None else min(round_up(needed, STEP), limit)
    for layer in reversed(kv_cache):
        for name in ("value", "key"):
            old = layer[name]
            batch, heads, length, dim = old.shape
            if length >= target:  # by a growth that was cut short
                continue
            new = old.new_zeros(batch, heads, target, dim)
            new[:, :, :length] = old
            layer[name] = new


def rewind(kv_cache: KVCache, length: int, new_length: int) -> int:
    """Give up the positions from `new_length` on: returns the start_pos to go on from.

    Nothing is erased or moved. A query at position p looks at slots 0 … p only, and whatever continues from
    `new_length` writes each slot before its first query looks there.

    Raises:
        ValueError: unless 0 <= new_length <= length <= capacity.
    """
    if not 0 <= new_length <= length <= capacity(kv_cache):
        raise ValueError(
            f"cannot rewind to {new_length}: {length} of {capacity(kv_cache)} positions are filled"
        )
    return new_length


def view(kv_cache: KVCache, length: int) -> KVCache:
    """The first `length` positions of every row, sharing memory: what is written there is in the cache."""
    return [{name: tensor.narrow(2, 0, length) for name, tensor in layer.items()} for layer in kv_cache]


def fork(source: KVCache, length: int, n: int, new_capacity: int | None = None) -> KVCache:
    """A new cache in which every row of `source` stands n times in a row: (B, …) -> (B · n, …).

    Only the first `length` positions are copied; `new_capacity` (default: the source's) is the room.

    Raises:
        ValueError: n < 1, length not within the source, or new_capacity < length.
    """
    if n < 1:
        raise ValueError(f"cannot fork a cache into {n} rows")
    batch, heads, room, dim = source[0]["key"].shape
    tensor = source[0]["key"]
    room = room if new_capacity is None else new_capacity
    target = allocate(len(source), batch * n, heads, room, dim, tensor.dtype, tensor.device)
    fork_into(source, target, length)
    return target


def fork_into(source: KVCache, target: KVCache, length: int, target_length: int = 0) -> None:
    """Copy the first `length` positions of each source row into its consecutive share of the target's rows.

    Args:
        source: B rows, usually one.
        target: B · n rows of the same layers, heads, head dimension and dtype, with room for `length`.
        length: filled positions of the source; 0 copies nothing.
        target_length: filled positions of the target, which its owner knows (the cache does not).

    Raises:
        ValueError: a target in use, a target that is the source, a length out of range, another geometry.
    """
    if target_length != 0:
        raise ValueError(
            f"cannot fork into a cache that holds {target_length} positions: expected an empty one"
        )
    # Views of no positions have no address to tell them by; nothing is copied then.
    if source[0]["key"].numel() and source[0]["key"].data_ptr() == target[0]["key"].data_ptr():
        raise ValueError("cannot fork a cache into itself")
    if len(source) != len(target):
        raise ValueError(f"fork: the source has {len(source)} layers, the target {len(target)}")
    if not 0 <= length <= min(capacity(source), capacity(target)):
        raise ValueError(
            f"fork: {length} positions do not fit capacities {capacity(source)} (source) and "
            f"{capacity(target)} (target)"
        )
    for index, (old, new) in enumerate(zip(source, target)):
        for name in ("key", "value"):
            _check_same_geometry(f"fork: layer {index} {name}", old[name], new[name])
            filled = old[name][:, :, :length]  # (B, H_kv, length, D_h)
            copies = new[name].shape[0] // filled.shape[0]
            new[name][:, :, :length] = filled if copies == 1 else filled.repeat_interleave(copies, 0)


def _check_same_geometry(what: str, source: Tensor, target: Tensor) -> None:
    (batch, heads, _, dim), (new_batch, new_heads, _, new_dim) = source.shape, target.shape
    if (heads, dim, source.dtype) != (new_heads, new_dim, target.dtype):
        raise ValueError(
            f"{what}: expected {heads} heads of {dim} in {source.dtype}, "
            f"got {new_heads} of {new_dim} in {target.dtype}"
        )
    if new_batch % batch:
        raise ValueError(f"{what}: {new_batch} rows are no multiple of the source's {batch}")
