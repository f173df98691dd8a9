"""One writer at a time: the second process that would write to an output is refused."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inference.errors import RequestError

_HELD = {errno.EAGAIN, errno.EACCES}  # what POSIX lets a system say of another's lock


@contextmanager
def only_writer(output: Path, option: str = "--output", parents: bool = False) -> Iterator[None]:
    """Inside, no other process gets into such a block for the same `output`.

    The lock is on `.NAME.lock` beside the output, which may itself be replaced; the file goes with the block.
    The system ends the lock with the process, however that ends: a file that is left locks nobody out. It is
    a record lock, not flock(2), which workers that were forked would go on holding. Where there can be none
    (a folder that may not be written to, a file system without locks) the block runs without.

    Args:
        option: what the output was given with, for the sentence.
        parents: make the folders that lead to the output; those that stay empty go with the block.

    Raises:
        RequestError: another process writes to it.
    """
    made: list[Path] = []
    handle = path = None
    try:
        target = Path(os.path.realpath(output))
        path = target.with_name(f".{target.name}.lock")
        if parents:
            made = [folder for folder in path.parents if not folder.exists()]
        handle = _lock(path, output, option, parents)
    except RequestError:
        raise
    except (OSError, ValueError):  # or a name that nobody can have, as whoever opens the output tells
        pass
    try:
        yield
    finally:
        if handle is not None and path is not None:
            with suppress(OSError):
                path.unlink()  # before it is unlocked: whoever opened it looks again
            os.close(handle)
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _lock(path: Path, output: Path, option: str, parents: bool) -> int:
    """The descriptor of the locked file.

    Raises:
        RequestError: another process holds the lock.
        OSError: there can be none.
    """
    while True:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is(handle, path):
                with suppress(OSError):  # a full disk
                    os.ftruncate(handle, 0)
                    os.write(handle, str(os.getpid()).encode())
                return handle
        except OSError as error:
            pid = os.pread(handle, 20, 0).decode("ascii", "replace")
            os.close(handle)
            if error.errno not in _HELD:
                raise
            known = f" (pid {pid})" if pid.isdecimal() else ""
            raise RequestError(
                f"{output} is being written by another process{known}: wait for it, or give another {option}"
            ) from None
        os.close(handle)  # its last holder has just removed it


def _is(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
