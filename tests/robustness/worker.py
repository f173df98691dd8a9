"""The process in which fuzzed inputs run: watched from outside, bounded in memory, replaced when it dies."""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import signal
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

from tests.robustness.judging import MOST_BYTES, Outcome, judge, target

PORTION = 5_000  # inputs of one run of hypothesis, which remembers all of them


def work(connection: Connection, name: str, folder: Path, log: Path, seed: int, count: int) -> None:
    """Run `count` inputs; before each one its pickle goes through the connection, behind it (outcome, peak
    memory in bytes)."""
    _quiet(log)
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    module = target(name)
    run = module.opened(folder)
    _bound_memory()
    left = count

    def one(value) -> None:
        nonlocal left
        if left <= 0:
            return
        left -= 1
        connection.send_bytes(pickle.dumps(value))
        connection.send((judge(run, value, module.REFUSALS), peak_bytes()))

    number = 0
    while left > 0:
        before = left
        chosen = settings(
            max_examples=min(PORTION, left),
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        test = given(value=module.inputs())(lambda value: one(value))
        seeded(seed + number)(chosen(test))()
        number += 1
        if left == before:
            break


def replay(name: str, folder: Path, value) -> Outcome:
    """One input in this process."""
    module = target(name)
    return judge(module.opened(folder), value, module.REFUSALS)


def _quiet(log: Path) -> None:
    """Nothing on the screen: what libraries say is dropped; where a signal found the process goes into `log`,
    which stays open."""
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    warnings.simplefilter("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: idle threads that wait also count
    place = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    faulthandler.enable(place)
    faulthandler.register(signal.SIGUSR1, place)


def _bound_memory() -> None:
    """As much address space more as is missing from the memory that is allowed."""
    pages = Path("/proc/self/statm").read_text().split()
    size, resident = (int(number) * resource.getpagesize() for number in pages[:2])
    limit = size + MOST_BYTES - resident
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
