"""Passes in C, and the number of threads that work on each: one for each processor that this process may
have, and fewer beside other work.

    run_pass(call, products)

A thread on a processor that has other work, or whose quota is used up, comes a time slice late, 3 to 100 ms,
which is longer than many a pass. Nobody says so beforehand: other work comes and goes, and a container may
hide its quota. So C counts what a pass waits, and when that is too much, half of the threads leave it
(`team.h`). Where a pass lost more than an eighth of its time, half of the threads work for a pause, which is
twice as long after each try of all that loses. PyTorch's operations between passes have the same number.
Small work takes few threads from the start. The results have the same bits with any number.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from generation.fast.native.build import structure
from generation.processors import limit_threads

STAKE = 2e-4  # seconds that threads may wait for one another in a pass, whatever that brings
LONGEST_PAUSE = 1.0  # seconds until all threads are tried again
EACH = 2**20  # products of weights and activations that are worth a thread


Pass = structure("Pass")


class Passes:
    """The threads of this process, which all passes share."""

    def __init__(self) -> None:
        self._fewer, self._until, self._pause = 1, 0.0, 0.0  # threads in a pause, its end, its seconds
        self._team = threading.Lock()  # one pass at a time has several threads

    def run(self, call: Callable[[Any], None], products: float) -> None:
        """Make a pass over so many products of weights and activations."""
        began, most = time.perf_counter(), limit_threads()
        allowed = min(most, self._fewer) if began < self._until else most
        if torch.get_num_threads() != allowed:
            torch.set_num_threads(allowed)
        threads = max(1, min(allowed, int(products / EACH)))
        together = threads > 1 and self._team.acquire(blocking=False)
        made = Pass(threads if together else 1, STAKE)
        try:
            call(made)
        finally:
            if together:
                self._team.release()
        if not together:
            return
        present = time.perf_counter()
        if made.lost > (present - began) / 8:  # after a small loss it was enough that some left the pass
            self._pause = min(2 * max(self._pause, made.lost), LONGEST_PAUSE)
            self._fewer, self._until = threads // 2, present + self._pause
        elif threads == most:
            self._pause /= 2


run_pass = Passes().run
