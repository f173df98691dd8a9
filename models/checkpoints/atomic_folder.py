"""Replacing a folder as a whole, so that a crash at any moment leaves the old one or the new one."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from models.checkpoints.errors import CheckpointError

# One of these in a folder tells that it is a checkpoint, or the output of a training run.
_MARKS = ("config.json", "model.safetensors", "metrics.jsonl", "run.yaml", "training_state.pt")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


def check_replaceable(folder: Path) -> Path:
    """The absolute path of a folder that may be made, or replaced as a whole.

    Raises:
        CheckpointError: for a file, a place that others use or that cannot be renamed, or a folder that holds
            something other than a checkpoint. Nothing has been touched.
    """
    try:
        target = folder.expanduser().resolve()
    except RuntimeError:
        raise CheckpointError(f"{folder} cannot be saved to: nobody here has a home of that name") from None
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{folder} is a file: expected a folder to save to")
    if target == Path.cwd() or target in Path.cwd().parents:
        raise CheckpointError(
            f"{folder} holds the current directory and cannot be replaced: save to a folder in it"
        )
    home = Path("~").expanduser().resolve()
    if os.path.ismount(target) or target == home or target in home.parents:
        what = "a mount point" if os.path.ismount(target) else "a home directory or holds one"
        raise CheckpointError(f"{folder} is {what} and cannot be replaced: save to a folder in it")
    if target.is_dir() and any(target.iterdir()) and not any((target / mark).exists() for mark in _MARKS):
        raise CheckpointError(
            f"{folder} has files in it that are no checkpoint: expected a new or empty folder, or one with "
            f"{', '.join(_MARKS[:-1])} or {_MARKS[-1]}"
        )
    return target


def check_new(folder: Path, overwrite: bool) -> Path:
    """`check_replaceable` for a folder in which nothing is to be lost unless that is asked for."""
    target = check_replaceable(folder)
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise CheckpointError(f"{folder} exists: name another folder, or give --overwrite")
    return target


@contextmanager
def replace_folder(folder: Path, is_ours: Callable[[str], bool]) -> Iterator[Path]:
    """A new folder beside `folder` to write into; on leaving the block it takes the place of `folder`.

    Files of the old folder for which `is_ours(name)` is false (logs, training state) are carried over as hard
    links, unless the block wrote their name itself. Where the kernel cannot exchange two folders in one
    step the old one is renamed first: a crash between the two renames leaves it whole as `.<name>.replaced`.

    Raises:
        CheckpointError: if the folder cannot be written, or another process is at it; see
            `check_replaceable`.
    """
    target = check_replaceable(folder)
    new, old = (target.with_name(f".{target.name}.{word}") for word in ("saving", "replaced"))
    with ExitStack() as held:
        try:
            _begin(new, held)
        except BlockingIOError:
            raise CheckpointError(
                f"{folder} is being saved to by another process, what it held is unchanged: wait for it, or "
                "save to another folder"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{folder} could not be written: {error.strerror or error}") from error
        yield from _replace(folder, target, new, old, is_ours, held)


def _begin(new: Path, held: ExitStack) -> None:
    """An empty folder to write into, which is this process's until `held` ends, however that ends.

    Raises:
        BlockingIOError: it is another's.
    """
    if new.is_symlink() or new.is_file():
        new.unlink()
    new.mkdir(parents=True, exist_ok=True)
    _lock(new, held)
    for path in new.iterdir():  # what a crash left
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _lock(folder: Path, held: ExitStack) -> None:
    """Lock a folder; the lock goes with it wherever it is renamed to, and ends with the process."""
    handle = os.open(folder, os.O_RDONLY)
    held.callback(os.close, handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return
    try:
        same = os.path.samestat(os.fstat(handle), folder.stat())
    except FileNotFoundError:
        same = False
    if not same:  # whoever held the lock has just moved it away
        raise BlockingIOError("another process has just saved to it")


def _replace(
    folder: Path, target: Path, new: Path, old: Path, is_ours: Callable[[str], bool], held: ExitStack
) -> Iterator[Path]:
    """The block of `replace_folder`, and what comes behind it."""
    try:
        yield new
        if target.is_dir():
            _carry_over(target, new, is_ours)
        for path in (*new.rglob("*"), new):
            _sync(path)
        if not target.exists():
            new.rename(target)
        elif _exchange_held(new, target, held):
            shutil.rmtree(new)  # it is the old one now
        else:
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            try:
                new.rename(target)
            except OSError:
                old.rename(target)
                raise
            shutil.rmtree(old)
        _sync(target.parent)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written, what it held is unchanged: {error}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _exchange_held(new: Path, target: Path, held: ExitStack) -> bool:
    """`_exchange`, where the old folder comes to its new place locked: nobody begins there meanwhile."""
    _lock(target, held)
    return _exchange(new, target)


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
    if path.is_symlink() or not (path.is_file() or path.is_dir()):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step (renameat2 with RENAME_EXCHANGE); False where the system has no such
    call.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    return call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0
