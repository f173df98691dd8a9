"""Whether a cache fits the memory that there is now.

The system says of mapped files that their memory is free. So weights that are mapped count as taken.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

import psutil
import torch

from generation.options import CacheMemoryError
from generation.processors import cgroups

SPARE = 0.1  # share of the free memory that is left to activations
# Files of a control group, version 2 and 1: its limit, its use, and which part of that are droppable files.
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


_mapped: WeakSet[Any] = WeakSet()
_lock = Lock()  # for adding to them


def register(mapped: Any) -> None:
    """Count the `unused_bytes` of what maps a file into memory as taken, for as long as it lives."""
    with _lock:
        _mapped.add(mapped)


def mapped_bytes() -> int:
    """The sum of what is registered."""
    with _lock:
        return sum(one.unused_bytes for one in _mapped)


def check_fits(sizes: str, needed: int, device: torch.device, existing: int = 0) -> None:
    """Raise CacheMemoryError if a cache of `needed` bytes does not fit the memory of a device.

    Args:
        sizes: rows x positions of it.
        existing: bytes of a cache that exists already and becomes part of it.
    """
    available = available_bytes(device)
    if existing < needed and available is not None and needed > available + existing:
        raise CacheMemoryError(
            f"{sizes} positions need {needed} bytes of cache, but only {available + existing} are "
            "available: ask for fewer or shorter answers"
        )


def available_bytes(device: torch.device) -> int | None:
    """Bytes that a cache on this device may take now; None for a device that does not say."""
    if device.type == "cuda":
        # What PyTorch reserves and does not use, but for the pools of CUDA graphs, which nobody else gets.
        index = torch.cuda.current_device() if device.index is None else device.index
        held = (one for one in torch.cuda.memory_snapshot() if one["segment_pool_id"] == (0, 0))
        unused = sum(one["total_size"] - one["allocated_size"] for one in held if one["device"] == index)
        free = torch.cuda.mem_get_info(device)[0] + unused
    elif device.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    elif device.type == "cpu":
        free = min([psutil.virtual_memory().available, *cgroup_available(Path("/"))])
        return max(0, int(free * (1 - SPARE)) - mapped_bytes())
    else:
        return None
    return int(free * (1 - SPARE))


def cgroup_available(root: Path) -> list[int]:
    """Bytes that each limited control group of this process leaves to it (psutil knows nothing of them)."""
    found: list[int] = []
    for group, v2 in cgroups("memory", root):
        limit, used, droppable = _CGROUP_V2 if v2 else _CGROUP_V1
        with suppress(OSError, ValueError):  # it is not there, or has no limit
            left = int((group / limit).read_text()) - int((group / used).read_text())
            stat = (group / "memory.stat").read_text().splitlines()
            found.append(max(0, left + int(dict(map(str.split, stat)).get(droppable, 0))))
    return found
