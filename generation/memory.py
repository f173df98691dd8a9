"""Whether a cache fits the memory that there is now, and what all caches of this process were promised.

A CPU's memory is taken when it is first written to, and until then the system says that it is free, as it
says of mapped files. So caches that are kept and weights that are mapped say how much that is, and nobody is
promised the same bytes twice.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

import psutil
import torch

from generation.options import CacheMemoryError
from generation.threads import cgroups

SPARE = 0.1  # share of the free memory that is left to activations
# Files of a control group, version 2 and 1: its limit, its use, and which part of that are droppable files.
_CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


_keepers: WeakSet[Any] = WeakSet()
_lock = Lock()  # for adding to them


def trim() -> None:
    """Return to the system what was freed between blocks that are in use: a copy of each weight, after they
    have been rearranged. glibc alone keeps such memory, and has this call."""
    with suppress(AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def register(keeper: Any) -> None:
    """Count as taken, for as long as it lives, what a cache or a mapped file keeps of a CPU's memory although
    the system calls that free: its `unused_bytes`, never written to, or a file's."""
    with _lock:
        _keepers.add(keeper)


def promised_bytes() -> int:
    """The sum of what is registered."""
    with _lock:
        keepers = list(_keepers)
    return sum(keeper.unused_bytes for keeper in keepers)


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
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = torch.cuda.mem_get_info(device)[0] + unused
    elif device.type == "mps":
        free = torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    elif device.type == "cpu":
        free = min([psutil.virtual_memory().available, *cgroup_available(Path("/"))])
        return max(0, int(free * (1 - SPARE)) - promised_bytes())
    else:
        return None
    return int(free * (1 - SPARE))


def cgroup_available(root: Path) -> list[int]:
    """Bytes that each limited control group of this process leaves to it (psutil knows nothing of them)."""
    found: list[int] = []
    for group, v2 in cgroups("memory", root):
        limit, used, droppable = _CGROUP_V2 if v2 else _CGROUP_V1
        if not (group / limit).is_file() or not (group / used).is_file():
            continue
        if (most := (group / limit).read_text().strip()) != "max":
            stat = group / "memory.stat"
            lines = stat.read_text().splitlines() if stat.is_file() else []
            files = int(dict(map(str.split, lines)).get(droppable, 0))
            found.append(max(0, int(most) - int((group / used).read_text()) + files))
    return found
