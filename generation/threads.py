"""How many threads of a CPU work on something: as many as this process may have processors, and fewer where
waiting for one another costs more than it brings.

    choose(args.threads)                  # once, in an entry point: for PyTorch's own operations and for C
    with_threads(paces, amount, call)     # a pass in C (`generation/fast/native/`)
    watch(model.language_model.layers)    # blocks of PyTorch's own operations

Where threads meet, all wait for the last one. On a processor that has other work, or when a quota is used up,
it comes a time slice late, 3 to 100 ms, which is longer than many a pass. Nobody says so beforehand: other
work comes and goes, and a container may hide its quota. So each kind of work has a `Pace`, which goes by what
passes took. The results are the same with any number of threads: in C to the bit, in PyTorch's operations as
far as its libraries hold to that.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

# --------------------------------------------------------------------------- what this process may use


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
    """What one cgroup allows; infinite where it says nothing."""
    names = ("cpu.max",) if v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    with suppress(OSError, ValueError):
        allowed, period = " ".join((folder / name).read_text() for name in names).split()
        if allowed not in ("max", "-1") and int(period) > 0:
            return int(allowed) / int(period)
    return math.inf


def choose(threads: int | None = None) -> int:
    """Set and return the most threads that anything works on. None: what was chosen before, here or by
    `torch.set_num_threads`; the first time OMP_NUM_THREADS, or one for each processor that this process may
    use, as far as it is a whole core."""
    return CROWD.most() if threads is None else CROWD.choose(threads)


# ------------------------------------------------------------------------------------- who else is there


def in_children(call: Callable[[], None]) -> None:
    """Have it called in each child of a fork, where there are forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


class Turns:
    """A lock that is free in the child of a fork, whoever held it."""

    _all: ClassVar[WeakSet[Turns]] = WeakSet()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        if not Turns._all:
            in_children(Turns._renew)
        Turns._all.add(self)

    @staticmethod
    def _renew() -> None:
        for turns in Turns._all:
            turns._lock = threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Crowd:
    """What all work of this process shares: how many threads there may be, and whether others want the
    processors, too. Then everything goes on with fewer threads. More are tried again after a pause, which is
    short the first time, and the longer the more a try has lost."""

    FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0  # seconds
    WELL = 0.5  # seconds without a loss, after which the next pause is a first one again
    LOSS = 0.01  # share of the time that tries may cost
    WINDOW = 0.03  # seconds that `starved` looks back on
    STARVED = 0.1  # share of them in which a single thread had no processor: then there is none for a second
    CALM = 0.1  # seconds after a pause in which PyTorch's own few operations beside C still take one thread

    def __init__(self) -> None:
        self.team = Turns()  # one pass at a time has several threads
        self._limit, self._until, self._pause = 1, 0.0, 0.0
        self._off = self._seconds = self._last = 0.0
        self._chosen = 0  # threads: by `choose`, or by who told PyTorch; 0: nobody has asked yet
        self._is_fork = False  # of a process that had threads
        self._here = threading.local()  # `known`: what it was in this thread

    # ------------------------------------------------------------------------------ who else is there
    def threads(self, wanted: int, now: float) -> int:
        """How many of the threads that are wanted there is room for."""
        if self.starved(now):
            return 1
        if now >= self._until and self._until and self._limit < wanted:
            self._limit *= 2
            self._until = now + self._pause
        return min(wanted, self._limit) if now < self._until else wanted

    def lost(self, threads: int, seconds: float, now: float) -> None:
        """Others made so many threads lose this time."""
        if now > self._until + self.WELL:
            self._pause = 0.0
        self._pause = pause_after(self._pause, seconds)
        self._limit, self._until = max(1, threads // 2), now + self._pause

    def alone(self, seconds: float, off: float, now: float) -> None:
        """One thread worked for so many seconds up to now, `off` of them without a processor."""
        kept = math.exp((self._last - now) / self.WINDOW)
        self._off, self._seconds = self._off * kept + off, self._seconds * kept + seconds
        self._last = now

    def starved(self, now: float) -> bool:
        return now - self._last < 3 * self.WINDOW and self._off > self.STARVED * self._seconds

    def calm(self, now: float) -> bool:
        return now >= self._until + self.CALM and not self.starved(now)

    # --------------------------------------------------------------------------- what PyTorch is told
    def choose(self, threads: int) -> int:
        """In the child of a fork it is 1: OpenMP would wait for threads that are not there."""
        if not self._chosen:
            in_children(self._forked)
        self._chosen = 1 if self._is_fork else threads
        self.set_torch(self._chosen)
        return self._chosen

    def most(self) -> int:
        """The most threads that anything works on. Whoever tells PyTorch another number, in a thread that has
        asked before, chooses that. What a new thread has may be of any time."""
        number, known = torch.get_num_threads(), getattr(self._here, "known", None)
        if not self._chosen:
            own = bool(os.environ.get("OMP_NUM_THREADS"))
            return self.choose(number if own else min(number, math.ceil(processors())))
        if known is None:
            self.set_torch(self._chosen)
        elif number != known:
            self._here.known = number
            self._chosen = 1 if self._is_fork else number
        return self._chosen

    def set_torch(self, threads: int) -> None:
        """PyTorch's own operations in this thread go on with so many."""
        if threads != getattr(self._here, "known", None):
            torch.set_num_threads(threads)
            self._here.known = threads

    def _forked(self) -> None:
        if self._chosen > 1:
            self._is_fork = True
            self.choose(1)


def pause_after(last: float, lost: float) -> float:
    """Seconds until more threads are tried again, after a try that lost so many."""
    longest = min(lost / Crowd.LOSS, Crowd.LONGEST_PAUSE)
    return min(max(2 * last, 5 * lost, Crowd.FIRST_PAUSE), longest)


class Pace:
    """How many threads one kind of work takes, by what its passes took.

    Several threads lose time when a pass takes longer than half of them take for it. What they gained before
    may be lost, up to MOST_LOST. After that either others want the processors (`Crowd`), or the work is too
    small for so many.
    """

    MOST_LOST = 0.015  # seconds
    TRIAL = 2e-4  # seconds that may be lost at first
    SLICE = 5e-4  # seconds: who loses less in a pass has not been kept from a processor
    GUESS = 1.8  # times as long half of the threads take, before that is known
    CLOSE = 1.1  # times as long: what is so near is looked at again, every LEARN passes
    LEARN = 32  # passes after which one finds it out
    DRIFT = 1.002  # what was seen may be outdated by so much with each pass: contexts become longer
    OLD = 1000  # passes after which it is not outdated any more

    def __init__(self, crowd: Crowd, learn: int = LEARN):
        self._crowd, self._learn = crowd, learn
        self._threads = self._last = 0  # as far as the work goes, 0: not begun; of the last pass
        self._until, self._pause, self._account = 0.0, 0.0, self.TRIAL
        self._passes = self._of_several = self._asked = 0  # asked: how long half of them take
        # threads -> the least seconds of a unit that were seen lately, and the pass in which
        self._seen: dict[int, tuple[float, int]] = {}

    def plan(self, most: int, now: float) -> tuple[int, float]:
        """(threads for the next pass, seconds that they may wait for each second that they work)."""
        if self._threads < most and now >= self._until:
            self._threads = min(most, 2 * self._threads) if self._threads else most
            self._account = self.TRIAL
        threads = self._crowd.threads(min(self._threads, most), now)
        if threads > 1 and self._is_unsure(threads):
            self._asked = self._of_several
            return threads // 2, 0.0
        if threads > self._last:
            self._account = self.TRIAL
        self._last = threads
        return threads, max(0.05, self._with_half(threads) / self._with(threads) - 1) if threads > 1 else 0.0

    def _is_unsure(self, threads: int) -> bool:
        """Whether a pass should find out how long half of them take."""
        since = self._of_several - self._asked
        if threads // 2 not in self._seen:
            return since == self._learn
        return since >= Pace.LEARN and self._seen[threads // 2][0] < self.CLOSE * self._with(threads)

    def _with(self, threads: int) -> float:
        """Seconds of a unit with so many threads, as far as is known."""
        seconds, when = self._seen.get(threads, (1.0, self._passes))
        return seconds * self.DRIFT ** min(self._passes - when, self.OLD)

    def _with_half(self, threads: int) -> float:
        known = threads // 2 in self._seen
        return min(self._with(threads // 2) if known else math.inf, self.GUESS * self._with(threads))

    def settle(
        self, threads: int, amount: float, seconds: float, now: float, waited: float = 0.0, off: float = 0.0
    ) -> None:
        """A pass over so many units took `seconds` up to now on these threads, `waited` of them for one
        another, and in `off` of them the leading thread had no processor."""
        idle = off
        if threads > 1 and threads not in self._seen:  # what is usual is not known yet
            idle = max(waited, off)  # who waits with open eyes may be without a processor meanwhile
        self._passes += 1
        known = self._with(threads) if threads in self._seen else math.inf
        self._seen[threads] = max(min(known, (seconds - idle) / amount), 1e-12), self._passes
        if threads == 1:
            self._crowd.alone(seconds, off, now)
        if threads < self._last or threads == 1:
            return
        self._of_several += 1
        expected = self._with_half(threads) * amount
        lost = seconds - expected
        self._account = min(self._account - lost, self.MOST_LOST)
        if self._account == self.MOST_LOST:
            self._pause = 0.0
        elif self._account < 0:
            self._account = self.TRIAL
            if lost > self.SLICE and (waited + off > lost / 2 or lost > expected / 2):
                self._crowd.lost(threads, lost, now)
            else:
                self._pause = pause_after(self._pause, max(lost, self.TRIAL))
                self._threads, self._until = threads // 2, now + self._pause


class Paces:
    """A pace for each size of one kind of work."""

    def __init__(self, crowd: Crowd, learn: int = Pace.LEARN):
        self.crowd, self._learn = crowd, learn
        self._paces: dict[tuple[int, int], Pace] = {}

    def of(self, amount: int) -> Pace:
        """Amounts below 8 have one each, others share it with those that differ by less than a quarter."""
        size = max(0, amount.bit_length() - 3)
        return self._paces.setdefault((size, amount >> size), Pace(self.crowd, self._learn))


# ------------------------------------------------------------------------------------------- who works

CROWD = Crowd()


def with_threads(
    paces: Paces, amount: int, run: Callable[[int, float], tuple[float, float, float]], each: float = 1.0
) -> None:
    """Make a pass in C over `amount` units. `run` takes the number of threads, and how many seconds they may
    wait for one another for each that they work. It gives the seconds that the pass took, that the leading
    thread waited, and that it had no processor. `each`: how much work a unit is, where that differs from pass
    to pass: else one that has more to do would count as one that others have kept from a processor."""
    crowd, pace, now = paces.crowd, paces.of(amount), time.perf_counter()
    most = crowd.most()
    threads, worth = pace.plan(most, now)
    # PyTorch's operations beside C are few and short. They would be the ones to wait.
    crowd.set_torch(most if crowd.calm(now) else 1)
    team = threads > 1 and crowd.team.acquire(blocking=False)
    threads = threads if team else 1
    try:
        seconds, waited, off = run(threads, worth)
    finally:
        if team:
            crowd.team.release()
    pace.settle(threads, amount * each, seconds, time.perf_counter(), waited, off)


_watched: WeakKeyDictionary[nn.Module, Paces] = WeakKeyDictionary()
_begun = threading.local()  # of the block that this thread is in


def watch(blocks: Iterable[nn.Module], crowd: Crowd = CROWD) -> None:
    """Choose PyTorch's threads at each call of one of these blocks, which are alike and take (B, L, D)."""
    paces = Paces(crowd, learn=2)
    for block in blocks:
        _watched[block] = paces
        block.register_forward_pre_hook(_before)
        block.register_forward_hook(_after)


def _before(block: nn.Module, inputs: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling() or block not in _watched:  # a copy
        return
    crowd, amount, now = _watched[block].crowd, inputs[0].shape[0] * inputs[0].shape[1], time.perf_counter()
    pace = _watched[block].of(amount)
    threads, _ = pace.plan(crowd.most(), now)
    crowd.set_torch(threads)
    _begun.work = pace, threads, amount, now, queued()


def _after(block: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    if torch.compiler.is_compiling() or block not in _watched:
        return
    pace, threads, amount, began, before = _begun.work
    now = time.perf_counter()
    off = queued() - before if threads == 1 else 0.0  # of several, others may have been kept from theirs
    pace.settle(threads, amount, now - began, now, off=max(off, 0.0))


def queued() -> float:
    """Seconds that this thread has waited for a processor, from any beginning. Linux tells them; elsewhere
    all time without one counts, also that for Python's lock while other threads of this process compute."""
    try:
        if getattr(_begun, "process", None) != os.getpid():  # after a fork the parent's is open
            _begun.queue = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115 (kept open)
            _begun.process = os.getpid()
        return int(os.pread(_begun.queue.fileno(), 64, 0).split()[1]) * 1e-9
    except OSError:
        return time.perf_counter() - time.thread_time()


HOOKS = frozenset((_before, _after))  # which change nothing that a block computes
