"""Loader workers and the signals that reach them: whoever stops a run often stops every process of it."""

from __future__ import annotations

import signal

GRACE = 120  # seconds


def outlive_the_signal(worker: int = 0) -> None:
    """For `DataLoader(worker_init_fn=...)`: a worker lives on for `GRACE` seconds after SIGTERM or SIGINT.

    Slurm, systemd, Docker and Ctrl-C send these to all processes of a job. A worker that died of one would
    take the training process with it, before it has saved. As it is, workers leave with that process, or when
    the time is over.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends a process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(GRACE))
