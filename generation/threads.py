"""The number of threads of a CPU that work at a time: one for each processor that this process may have, and
fewer beside other work.

    limit_threads(args.threads)         # once, in an entry point: for PyTorch's own operations and for C
    run_pass(call, products)            # a pass in C (`generation/fast/native/`)
    with eager_pass(): ...              # one of PyTorch's own operations

Where threads meet, all wait for the last one. On a processor that has other work, or when a quota is used up,
it comes a time slice late, 3 to 100 ms, which is longer than many a pass. Nobody says so beforehand: other
work comes and goes, and a container may hide its quota. So C counts what a pass waits, and when that is too
much, half of the threads leave it (`native/team.h`). Of PyTorch's operations it is too much when the calling
thread had no processor for half of a pass. After that half of the threads work for a pause, which is twice as
long after each try of all that loses. Small work takes few threads from the start. The results are the same
with any number of threads: in C to the bit, in PyTorch's operations as far as its libraries hold to that.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch

STAKE = 2e-4  # seconds that threads may wait for one another in a pass, whatever that brings
LONGEST_PAUSE = 1.0  # seconds until all threads are tried again
EACH = 2**20  # products of weights and activations that are worth a thread


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


# ----------------------------------------------------------------------------------- what works on a pass

_locks: WeakSet[Any] = WeakSet()


def fork_safe_lock() -> threading.Lock:
    """A lock that is free in the child of a fork, whoever held it."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


class Pass(ctypes.Structure):
    """A pass as team.h has it."""

    _fields_ = (("threads", ctypes.c_int64), ("stake", ctypes.c_double), ("lost", ctypes.c_double))


class Threads:
    """The threads of this process, which all passes share."""

    def __init__(self) -> None:
        self.most = 0  # threads that anything works on; 0: nobody has asked yet
        self._fewer, self._until, self._pause = 1, 0.0, 0.0  # threads in a pause, its end, its seconds
        self._team = fork_safe_lock()  # one pass at a time has several threads
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.begin_fork)
        self._forked = False

    def limit(self, threads: int | None = None) -> int:
        """Set and return the most threads that anything works on. None: what was chosen before; the first
        time OMP_NUM_THREADS, or one for each processor that this process may use, as far as it is a whole
        core."""
        if threads is None and not self.most:
            threads = torch.get_num_threads()
            if not os.environ.get("OMP_NUM_THREADS"):
                threads = min(threads, math.ceil(processors()))
        if threads is not None:
            self.most, self._until = 1 if self._forked else threads, 0.0
            torch.set_num_threads(self.most)
        return self.most

    def _begin(self) -> int:
        """The threads that a pass may have now, which PyTorch's operations in this thread have as well."""
        threads = self._fewer if time.perf_counter() < self._until else self.most or self.limit()
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        return threads

    def _end(self, threads: int, lost: float) -> None:
        """A pass of several threads has ended, which lost so many seconds."""
        if lost:
            self._pause = min(2 * max(self._pause, lost), LONGEST_PAUSE)
            self._fewer, self._until = threads // 2, time.perf_counter() + self._pause
        elif threads == self.most:
            self._pause /= 2

    def run(self, call: Callable[[Pass], None], products: float) -> None:
        """Make a pass in C over so many products of weights and activations."""
        threads = max(1, min(self._begin(), int(products / EACH)))
        together = threads > 1 and self._team.acquire(blocking=False)
        made, began = Pass(threads if together else 1, STAKE), time.perf_counter()
        try:
            call(made)
        finally:
            if together:
                self._team.release()
        if together:  # after a small loss it was enough that some left the pass
            self._end(threads, made.lost if made.lost > (time.perf_counter() - began) / 8 else 0.0)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """A pass of PyTorch's own operations. Training keeps the threads that it begins with."""
        if torch.is_grad_enabled():
            yield
            return
        threads, began, own = self._begin(), time.perf_counter(), time.thread_time()
        yield
        seconds = time.perf_counter() - began
        off = seconds - (time.thread_time() - own)  # this thread waited for others, or for a processor
        if threads > 1:
            self._end(threads, off if off > seconds / 2 else 0.0)

    def begin_fork(self) -> None:
        """In the child of a fork OpenMP would wait for threads that are not there."""
        for lock in _locks:
            lock._at_fork_reinit()
        if self.most > 1:
            self._forked = True
            self.limit(1)


_shared = Threads()
limit_threads, run_pass, eager_pass = _shared.limit, _shared.run, _shared.eager
