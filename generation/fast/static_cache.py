"""A small cache that stays where it is between answers, for what is bound to addresses.

    kept = KeptCache(text_config, max_bytes)
    kept.take_in(kv_cache, filled, needed)     # where it fits: the same positions, in the kept memory

What was recorded on the kept memory for one answer serves the next one too.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from generation import kv_cache as kv
from generation.kv_cache import KVCache

MULTIPLE = 256  # positions


class KeptCache:
    """One cache for the last number of rows that was asked for.

    Args:
        text_config: geometry of the model.
        max_bytes: that it may take; what needs more stays where it is.
    """

    def __init__(self, text_config, max_bytes: int):
        self._config, self._max_bytes = text_config, max_bytes
        self._cache: KVCache | None = None
        self._users: list[weakref.ref[Tensor]] = []

    def take_in(self, kv_cache: KVCache, filled: int, needed: int) -> bool:
        """Move a cache into the kept memory: the list and its dicts stay, and get other tensors.

        Args:
            kv_cache: whose tensors nobody else holds on to.
            filled: positions that are copied.
            needed: positions that there must be room for.

        Returns:
            Whether it is there now; not so where it is too large, or another one that is still in use is.
        """
        like, users = kv_cache[0]["key"], [user() for user in self._users]
        if any(user is like for user in users):
            return needed <= kv.capacity(kv_cache)
        rows, dtype = kv.rows(kv_cache), like.dtype
        positions = self._positions(rows, dtype)
        if needed > positions or any(user is not None for user in users):
            return False
        own = self._cache
        if own is None or kv.rows(own) != rows or own[0]["key"].dtype != dtype:
            self._cache = own = None  # the old memory is free before the new one is taken
            self._cache = own = kv.allocate_for(self._config, rows, positions, like=like)
        users = kv.view(own, positions)  # tensors of their own: alive as long as their user's cache
        for layer, target in zip(kv_cache, users, strict=True):
            for name, tensor in target.items():
                tensor[:, :, :filled] = layer[name][:, :, :filled]
        self._users = [weakref.ref(tensor) for layer in users for tensor in layer.values()]
        for layer, target in zip(kv_cache, users, strict=True):
            layer.update(target)
        return True

    def forget(self) -> None:
        """Leave the memory to whoever uses it."""
        self._cache, self._users = None, []

    def _positions(self, rows: int, dtype) -> int:
        """Room for so many rows within the bytes, or 0."""
        config = self._config
        each = kv.bytes_per_token(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, dtype
        )
        most = min(self._max_bytes // (each * rows), config.max_position_embeddings)
        return most if most == config.max_position_embeddings else most // MULTIPLE * MULTIPLE
