"""The processors of a CPU that this process may use, and as many threads.

    limit_threads(args.threads)         # once, in an entry point: for PyTorch's own operations and for C

Where threads meet, all wait for the last one, and more of them than processors wait for time slices. Passes
in C take fewer beside other work (`generation/fast/native/passes.py`).
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

import torch

_most = 0  # threads that anything works on; 0: nobody has asked yet
_forked = False


def limit_threads(threads: int | None = None) -> int:
    """Set and return the most threads that anything works on. None: what was chosen before; the first time
    OMP_NUM_THREADS, or one for each processor that this process may use, as far as it is a whole core."""
    global _most
    if not _most and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_begin_fork)
    if threads is None and not _most:
        threads = torch.get_num_threads()
        if not os.environ.get("OMP_NUM_THREADS"):
            threads = min(threads, math.ceil(processors()))
    if threads is not None:
        _most = 1 if _forked else threads
        torch.set_num_threads(_most)
    return _most


def _begin_fork() -> None:
    """In the child of a fork OpenMP would wait for threads that are not there."""
    global _forked
    if _most > 1:
        _forked = True
        limit_threads(1)


def processors(root: Path = Path("/")) -> float:
    """Processors that this process may use: those of its affinity, or a smaller quota of a cgroup (0.5: half
    of the time of one). `root`: where proc/ and sys/ are mounted."""
    try:
        count = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # not on Linux
        count = float(os.cpu_count() or 1)
    return min(count, quota(root))


def quota(root: Path = Path("/")) -> float:
    """The smallest quota of the cgroups that this process is in, in processors; infinite without any."""
    found = [math.inf]
    for folder, v2 in cgroups("cpu", root):
        names = ("cpu.max",) if v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with suppress(OSError, ValueError):  # "max" is no number
            allowed, period = map(int, " ".join((folder / name).read_text() for name in names).split())
            if allowed > 0 and period > 0:
                found.append(allowed / period)
    return min(found)


def cgroups(controller: str, root: Path) -> list[tuple[Path, bool]]:
    """(folder, whether it is of version 2) of each cgroup that this process is in and that shares out what
    `controller` stands for, from its own group up to the root, where they are mounted as usual. In a
    container its path may not be there; the root is then the container's own cgroup."""
    try:
        entries = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    found, mounted = [], root / "sys/fs/cgroup"
    for number, names, path in (entry for entry in entries if len(entry) == 3):
        v2 = number == "0"
        if v2 or controller in names.split(","):
            mount = mounted if v2 else mounted / controller
            group = mount / path.lstrip("/")
            found += [(one, v2) for one in (group, *group.parents) if one.is_relative_to(mount)]
    return found
