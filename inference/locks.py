"""One writer at a time: a second process that would write to the same output is refused at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from inference.errors import RequestError


@contextmanager
def only_writer(output: Path, option: str = "--output", parents: bool = False) -> Iterator[None]:
    """Inside, no other process gets into such a block for the same `output`. Raises RequestError, which names
    the `option` that gave it. `parents`: make the folders that lead to it.

    The lock is on `.NAME.lock` beside the output, which may itself be replaced; it ends with its process, so
    a file that is left over locks nobody out. Where there can be none (a folder that may not be written to, a
    file system without locks) the block runs without.
    """
    target = Path(os.path.realpath(output))
    path = target.with_name(f".{target.name}.lock")
    lock = FileLock(path, timeout=0)
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent.exists():  # else the lock would make it
            lock.acquire()
            path.write_text(str(os.getpid()))
    except Timeout:
        pid = path.read_text() if path.exists() else "unknown"
        busy = f"{output} is being written by another process (pid {pid})"
        raise RequestError(f"{busy}: wait for it, or give another {option}") from None
    except (OSError, NotImplementedError):
        pass
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                path.unlink()  # before it is unlocked: a process that opened it meanwhile tries again
            lock.release()
