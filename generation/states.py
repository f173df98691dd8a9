"""Snapshots of states: the running sums of a row's gated delta rules, kept where a window begins.

    kept = snapshot(kv_cache, row, position)           # while the row stands a little after `position`
    restore(kv_cache, row, position, kept)             # the row can go on from there again

Slots of attention need none of this: they hold what they held, however far the row went on. How a layer lays
its states out stands in models/gated_delta.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from generation.kv_cache import STATE_WINDOW, KVCache, Layout


def snapshot(kv_cache: KVCache, row: int, position: int) -> Tensor:
    """A row's states before a position at which a window begins, the last such one that the row has passed or
    the one before that; flat."""
    return torch.cat([part.flatten() for part in _states(kv_cache, row, position)])


def restore(kv_cache: KVCache, row: int, position: int, kept: Tensor) -> None:
    """Have a row's states as a `snapshot` of that position has them."""
    targets = _states(kv_cache, row, position)
    for target, part in zip(targets, kept.split([target.numel() for target in targets]), strict=True):
        target.copy_(part.view(target.shape))


def snapshot_numbers(layout: Layout) -> int:
    """Numbers of a `snapshot`, each of 4 bytes."""
    return sum(
        heads * width * (1 if name == "state" else STATE_WINDOW)
        for layer in layout
        for name, (heads, width, _) in layer.items()
        if name in ("state", "inputs")
    )


def _states(kv_cache: KVCache, row: int, position: int) -> list[Tensor]:
    """Of each state a row's matrix before a position at which a window begins, and the inputs of the window
    before it, which a convolution may read."""
    parts = []
    for layer in kv_cache:
        if "state" in layer:
            number = position // STATE_WINDOW
            before = (number - 1) % 2 * STATE_WINDOW
            parts.append(layer["state"][row, :, number % 2])
            parts.append(layer["inputs"][row, :, before : before + STATE_WINDOW])
    return parts
