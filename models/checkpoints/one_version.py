"""Reading a folder that another process may be writing to: one version of it, or a sentence.

model, processor = one_version("runs/mine", lambda: (load("runs/mine"), open_processor("runs/mine")))

A checkpoint is many files, and nothing tells its readers when all of them belong together: whoever saves it
may exchange the folder (as `save` does), rename files over it, or write into them where they lie (as
transformers does). So the files' inodes, lengths and times of change are noted before reading and looked at
afterwards, and what was read meanwhile is thrown away if they differ.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from models.checkpoints.errors import CheckpointError
from models.checkpoints.names import resolve_source

T = TypeVar("T")
# What a model or a processor is read from. A run's log beside it grows without being part of it.
_NAMES = r"[\w-][\w.-]*\.(safetensors|json|jinja|model)|(merges|vocab)\.txt"
# And such a file on its way here under a draft's name, `.NAME.a1B2c3` of rsync: until it is renamed, all
# others lie still, of two versions.
_READ = re.compile(rf"({_NAMES})|\.?({_NAMES})\.\w+", re.ASCII)
# `hf download --local-dir` keeps its drafts here.
_DOWNLOADS, _DOWNLOADED = os.path.join(".cache", "huggingface", "download"), re.compile(r".*\.incomplete")
_READ_BELOW = re.compile(
    r"tokenizer[\w.-]*|[\w-]+\.jinja|(special_tokens_map|added_tokens|vocab)\.json|merges\.txt"
)
TRIES = 5
# Seconds without a change before reading: whoever writes file by file pauses between them, to make a
# processor for instance, and file systems' clocks tick every few milliseconds.
QUIET, _LONGEST_WAIT = 0.5, 3.0

State = frozenset[tuple]


class BeingWrittenError(CheckpointError):
    """A folder changed each time it was read."""


def one_version(source: str | Path, revision: str | None, read: Callable[[], T]) -> T:
    """What `read` makes of a source, all of it from files that did not change meanwhile.

    `read` may be called several times, and what it raises about a folder that changes is forgotten. A
    repository's files are those of one commit and do not change.

    Raises:
        BeingWrittenError: the folder changed during each of `TRIES` attempts, or never stood still.
    """
    folder = resolve_source(source, revision)
    if not os.path.isdir(folder):
        return read()
    for _ in range(TRIES):
        before = _at_rest(folder)
        if before is None:
            break
        try:
            made = read()
        except BeingWrittenError:
            break
        except Exception:
            if _state(folder) == before:
                raise
            continue
        if _state(folder) == before:
            return made
        del made  # so that two models are never held at once
    raise BeingWrittenError(
        f"{source} was written to each time it was read: expected one version of it, wait until whoever "
        f"saves it has finished and try again"
    )


def _at_rest(folder: str) -> State | None:
    """The state of a folder whose files have not changed for `QUIET` seconds, or that was moved to its place
    as a whole since; None if that does not come."""
    deadline = time.monotonic() + _LONGEST_WAIT
    while time.monotonic() < deadline:
        state, now = _state(folder), time.time_ns()
        newest = max((changed for *_, changed in state), default=0)
        if not 0 <= now - newest < QUIET * 1e9 or _moved_since(folder, newest):  # to come: another clock's
            return state
        time.sleep(QUIET - (now - newest) / 1e9)
    return None


def _moved_since(folder: str, changed: int) -> bool:
    """Whether a folder got its name after its files were written, as `save` does it: moving it is a change of
    the folder alone, not of its list of names."""
    try:
        stat = os.stat(folder)
    except OSError:
        return False
    return stat.st_ctime_ns > max(stat.st_mtime_ns, changed)


def _state(folder: str) -> State:
    """(path, device, inode, length, time of change in ns) of each file that a checkpoint is read from."""
    found = set()
    downloads = _files(os.path.join(folder, _DOWNLOADS), _DOWNLOADED, below=False)
    for path in (*_files(folder, _READ, below=True), *downloads):
        try:
            stat = os.stat(path)
        except OSError:
            continue  # between the list and this
        found.add((path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return frozenset(found)


def _files(folder: str, names: re.Pattern[str], below: bool) -> list[str]:
    """Paths of the files of those names; with `below` also the tokenizers and templates in its folders."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    found = [entry.path for entry in entries if names.fullmatch(entry.name)]
    for entry in entries if below else ():
        if os.path.isdir(entry.path):  # not `entry.is_dir()`, which raises for links that go in circles
            found += _files(entry.path, _READ_BELOW, below=False)
    return found
