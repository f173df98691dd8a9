"""Loader workers and the signals that reach them: whoever stops a run often stops every process of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.sharedctypes import RawValue
from multiprocessing.util import Finalize
from typing import Any

GRACE = 120  # seconds


def outliving_signals() -> Callable[[int], None]:
    """The `worker_init_fn` of a DataLoader: a worker lives on for `GRACE` seconds after SIGTERM or SIGINT.

    Slurm, systemd, Docker and Ctrl-C send these to all processes of a job. A worker that died of one would
    take the training process with it, before it has saved. As it is, workers leave with that process, or when
    the time is over. At its end, be it of an error, Python itself sends its workers SIGTERM and waits for
    them: they know then, and leave at once.
    """
    ending = RawValue("b", 0)
    Finalize(None, setattr, (ending, "value", 1), exitpriority=0)
    return partial(_outlive, ending)


def _outlive(ending: Any, worker: int) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends a process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Without an error: PyTorch's handler would have the run end with one of its own.
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0) if ending.value else signal.alarm(GRACE))
