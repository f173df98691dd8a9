"""Replacing a folder as a whole, so that a crash at any moment leaves the old one or the new one."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from models.checkpoints.files import CheckpointError

# A folder that may be replaced has one of these: it is a checkpoint, or the output of a training run.
_MARKS = ("config.json", "model.safetensors", "metrics.jsonl", "run.yaml", "training_state.pt")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


def check_replaceable(folder: Path, overwrite: bool = True) -> Path:
    """The absolute path of a folder that may be made, or (with `overwrite`) replaced as a whole."""
    try:
        target = folder.expanduser().resolve()
    except RuntimeError:
        raise CheckpointError(f"{folder} cannot be saved to: unknown user in the path") from None
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{folder} is a file: expected a folder to save to")
    for place, what in ((Path.cwd(), "the current directory"), (Path.home().resolve(), "a home directory")):
        if target in (place, *place.parents):
            raise CheckpointError(
                f"{folder} is or holds {what} and cannot be replaced: save to a folder in it"
            )
    if os.path.ismount(target):  # which cannot be exchanged for another folder
        raise CheckpointError(f"{folder} is a mount point: save to a folder in it")
    if target.is_dir() and any(target.iterdir()):
        if not any((target / mark).exists() for mark in _MARKS) and not any(target.glob("*.gguf")):
            raise CheckpointError(
                f"{folder} has files in it that are no checkpoint: expected an empty folder, or one with "
                f"{', '.join(_MARKS[:-1])} or {_MARKS[-1]}"
            )
        if not overwrite:
            raise CheckpointError(f"{folder} exists: name another folder, or give --overwrite")
    return target


@contextmanager
def replace_folder(folder: Path, is_ours: Callable[[str], bool]) -> Iterator[Path]:
    """A new folder beside `folder` to write into; on leaving the block it takes the place of `folder`.

    Files of the old folder for which `is_ours(name)` is false (logs, training state) are carried over as hard
    links, unless the block wrote their name itself. Where the kernel cannot exchange two folders in one step,
    the old one is renamed first: a crash between the two renames leaves it whole as `.<name>.replaced`.
    """
    target = check_replaceable(folder)
    new, old = (target.with_name(f".{target.name}.{word}") for word in ("saving", "replaced"))
    with ExitStack() as locks:
        try:
            new.mkdir(parents=True, exist_ok=True)
            _lock(new, locks)
            for path in new.iterdir():  # what a crash left
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            try:
                yield new
                if target.is_dir():
                    _carry_over(target, new, is_ours)
                for path in (*new.rglob("*"), new):
                    _sync(path)
                _put_in_place(new, target, old, locks)
            finally:
                shutil.rmtree(new, ignore_errors=True)
        except BlockingIOError:
            raise CheckpointError(
                f"{folder} is being saved to by another process, what it held is unchanged: wait for it, or "
                f"save to another folder"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{folder} could not be written, what it held is unchanged: {error.strerror or error}"
            ) from error


def _put_in_place(new: Path, target: Path, old: Path, locks: ExitStack) -> None:
    if target.exists():
        _lock(target, locks)  # so that nobody writes into the old folder under its new name
        if _exchange(new, target):
            _sync(target.parent)
            return
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
    _sync(target.parent)


def _lock(folder: Path, locks: ExitStack) -> None:
    """Lock a folder until `locks` or the process ends; the lock goes with it wherever it is renamed to."""
    handle = os.open(folder, os.O_RDONLY)
    locks.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return
    if not folder.exists() or not os.path.samestat(os.fstat(handle), folder.stat()):
        raise BlockingIOError("the process that held the lock has just moved the folder away")


def _carry_over(old: Path, new: Path, is_ours: Callable[[str], bool]) -> None:
    for path in old.iterdir():
        if is_ours(path.name) or (new / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True, copy_function=_link)
        else:
            _link(path, new / path.name)


def _link(source: str | Path, target: str | Path) -> None:
    """A hard link, which costs nothing; a copy where the file system has no links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _sync(path: Path) -> None:
    """Push a file, or a folder's list of names, to the disk."""
    if not path.is_symlink() and (path.is_file() or path.is_dir()):
        with ExitStack() as opened:
            opened.callback(os.close, handle := os.open(path, os.O_RDONLY))
            os.fsync(handle)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step; False where the system has no such call."""
    call = getattr(ctypes.CDLL(None), "renameat2", lambda *_: -1)
    return call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
