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
    of the time of one). `root`: where proc/ and the cgroups are mounted."""
    try:
        count = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # not on Linux
        count = float(os.cpu_count() or 1)
    return min(count, quota(root))


def quota(root: Path = Path("/")) -> float:
    """The smallest quota of the cgroups that this process is in, in processors; infinite without any."""
    return min((_quota_of(folder, v2) for folder, v2 in cgroups("cpu", root)), default=math.inf)


def cgroups(controller: str, root: Path) -> list[tuple[Path, bool]]:
    """(folder, whether it is of version 2) of each cgroup that this process is in and that shares out what
    `controller` stands for, in each hierarchy from its own group up to what is mounted. In a container its
    path may not be there; what is mounted is then the container's own cgroup."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in mounts:
        about, _, kind = line.partition(" - ")
        fields, more = about.split(), kind.split()
        if len(fields) < 5 or len(more) < 3 or more[0] not in ("cgroup", "cgroup2"):
            continue
        v2 = more[0] == "cgroup2"
        if not v2 and controller not in more[2].split(","):
            continue
        mount = root / fields[4].lstrip("/")
        for number, names, path in (entry.split(":", 2) for entry in lines if entry.count(":") >= 2):
            if number == "0" if v2 else controller in names.split(","):
                group = mount / path.lstrip("/")
                found += [(one, v2) for one in (group, *group.parents) if one.is_relative_to(mount)]
    return found


def _quota_of(folder: Path, v2: bool) -> float:
    """The quota of one cgroup; infinite where it says nothing."""
    names = ("cpu.max",) if v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    with suppress(OSError, ValueError):
        allowed, period = " ".join((folder / name).read_text() for name in names).split()
        if allowed not in ("max", "-1") and int(period) > 0:
            return int(allowed) / int(period)
    return math.inf
