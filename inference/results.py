"""A file of results: JSON lines that one run appends to and a later run resumes from.

    results = ResultsFile(Path("answers.jsonl"), "line", lambda record: "answers" in record)
    answered = {record["line"] for record in results if not record.get("error")}
    results.compact(errors=False)                # before a run: failed questions are tried again
    with results.appending() as write:
        write({"line": 7, "answers": ["three"], ...})
    results.compact(errors=True, ordered=True)   # after it

Each record begins with its key and is written by one call, so a run that was killed leaves at most one
half-written line, at the end. With several ranks, each further rank appends to a part file of its own.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import naming, replacing
from inference.errors import RequestError

KEPT = "answers so far are kept, and the same command resumes"


def to_json(record: dict[str, Any]) -> str:
    """One line of JSON, readable in any script. Half a surrogate pair, which no encoding has, is escaped."""
    text = json.dumps(record, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True)
class ResultsFile:
    """Iterate for the records, those of part files included; the path may not exist yet.

    key: the field that names a record, its first.
    is_result: tells a record of this kind from any other JSON object.
    """

    path: Path
    key: str
    is_result: Callable[[dict[str, Any]], bool]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for path in self._paths():
            yield from (record for _, record in self._records(path))

    def compact(self, errors: bool, ordered: bool = False) -> None:
        """Make one file of the parts, with every record once and without a half-written line.

        Args:
            errors: whether records that report an error stay.
            ordered: sort the records by their key.
        """
        kept: dict[Any, tuple[Path, int]] = {}  # places, not records: a file of results may be large
        paths = self._paths()
        for path in paths:
            for place, record in self._records(path):
                if errors or not record.get("error"):
                    kept.setdefault(record[self.key], (path, place))
        if not paths:
            return
        with ExitStack() as stack:
            files = {path: stack.enter_context(path.open("rb")) for path in paths}
            temporary = stack.enter_context(replacing(self.path))
            with temporary.open("wb") as new:
                for key in sorted(kept) if ordered else kept:
                    path, place = kept[key]
                    files[path].seek(place)
                    new.write(files[path].readline().rstrip(b"\n") + b"\n")
                new.flush()
                os.fsync(new.fileno())
        for path in paths:
            if path != self.path:
                path.unlink()

    @contextmanager
    def appending(self, rank: int = 0) -> Iterator[Callable[[dict[str, Any]], None]]:
        """A function that appends one record. Opening the file shows at once whether it can be written."""
        path = self.path if rank == 0 else self.path.with_suffix(f".{rank}.part")
        with path.open("ab", buffering=0) as file:

            def write(record: dict[str, Any]) -> None:
                line = (to_json(record) + "\n").encode()
                with naming(path, KEPT):
                    while line:  # a disk takes it in one call; a full one takes a part and then raises
                        line = line[file.write(line) :]

            yield write

    def _paths(self) -> list[Path]:
        parts = self.path.parent.glob(glob.escape(self.path.stem) + ".*.part")
        return [path for path in (self.path, *sorted(parts)) if path.exists()]

    def _records(self, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        """(place in the file, record) of every line but a half-written last one. Raises RequestError for a
        file of something else, which must not be overwritten."""
        beginning, place = f'{{"{self.key}": '.encode(), 0
        with path.open("rb") as file:
            for raw in file:
                try:
                    record, half = json.loads(raw), False
                except (ValueError, RecursionError):
                    begins = raw.startswith(beginning) or beginning.startswith(raw)
                    record, half = None, begins and not raw.endswith(b"\n")
                if isinstance(record, dict) and self.key in record and self.is_result(record):
                    yield place, record
                elif not half:
                    raise RequestError(f"{path}: expected the results of an earlier run, got {raw[:60]!r}")
                place += len(raw)
