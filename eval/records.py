"""samples.jsonl: every question of a run with its answer and score, each exactly once, whatever happens.

    records = Records(folder / "samples.jsonl")
    answered = records.read()                    # id -> record, after a look at what an earlier run left
    with records.appending(rank) as write:
        write({"id": "7", ...})

A line is written whole, by one call, behind the others. A run that was killed leaves at most one half line,
which is taken out when the next one starts. Each further rank appends to a file of its own, folded into the
first one's at the end, or at the next start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.files import naming, replacing
from data.lines import is_too_long, lines_of, parse_line
from eval.tasks import TaskError
from inference.results import KEPT, to_json

RUN, SAMPLES, RESULTS = "run.json", "samples.jsonl", "results.json"  # what a run leaves in its folder
_BEGINNING = b'{"id": '  # of every line


class Records:
    """The lines of one file, and of the files that ranks write beside it."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> dict[str, dict[str, Any]]:
        """id -> its record; half lines do not count.

        Raises:
            TaskError: a file holds something else.
            OSError: it cannot be read.
        """
        found: dict[str, dict[str, Any]] = {}
        for path in [self.path, *self._parts()]:
            for raw, record in _lines(path):
                if record is None and (raw.endswith(b"\n") or not _may_be_half(raw)):
                    raise TaskError(f"{path}: expected the samples of an earlier run, got {raw[:60]!r}")
                if record is not None and _is_whole(raw, record):
                    found.setdefault(record["id"], record)
        return found

    def fold(self, again: bool) -> None:
        """Make one file of all, without half lines; nothing is written where there is nothing to change.

        Args:
            again: leave out what could not be answered, for it to be tried again.

        Raises:
            TaskError, OSError: see `read`.
        """
        records = self.read()
        kept = [record for record in records.values() if not (again and record.get("error"))]
        lines = list(_lines(self.path))
        if len(lines) == len(kept) and all(_is_whole(*line) for line in lines) and not self._parts():
            return
        with replacing(self.path) as temporary, temporary.open("wb") as file:
            file.writelines(_line(record) for record in kept)
            file.flush()
            os.fsync(file.fileno())
        for part in self._parts():
            part.unlink()

    @contextmanager
    def appending(self, rank: int = 0) -> Iterator[Callable[[dict[str, Any]], None]]:
        """A function that writes one record, behind what is there."""
        path = self.path if rank == 0 else self.path.with_suffix(f".{rank}.part")
        with path.open("ab", buffering=0) as file:

            def write(record: dict[str, Any]) -> None:
                with naming(path, KEPT):
                    _write(file, _line(record))

            yield write

    def _parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(self.path.stem + ".*.part"))


def _write(file, line: bytes) -> None:
    while line:  # one call on a disk; a full one says so
        line = line[file.write(line) :]


def _line(record: dict[str, Any]) -> bytes:
    return (to_json(record) + "\n").encode()


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """(line, its record, or None where it is none)."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for _, raw in lines_of(file):
            try:
                record = None if is_too_long(raw) else parse_line(raw)
            except ValueError:
                record = None
            named = isinstance(record, dict) and {"id", "answer", "score", "targets"} <= record.keys()
            yield raw, record if named else None


def _is_whole(raw: bytes, record: dict[str, Any] | None) -> bool:
    return record is not None and raw.endswith(b"\n")


def _may_be_half(raw: bytes) -> bool:
    return not is_too_long(raw) and (raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw))
