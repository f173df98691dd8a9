"""The results of a batch: a JSONL file that a run appends to and a later run goes on from.

Each line is {"line": n, ...}: n is the line of the questions' file, counted from 1, the rest an answer, or
{"error": ...}. A run that was killed leaves at most one half-written line, at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import replacing
from data.lines import is_too_long, line_at, lines_of, parse_line
from inference.errors import RequestError

KEPT = "what has been answered is kept, and the same command goes on from there"
_BEGINNING = b'{"line": '  # of every result


def to_json(record: dict[str, Any]) -> str:
    """One line of JSON, readable in any script; half a surrogate pair, which is no text, as its escape."""
    text = json.dumps(record, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True)
class Earlier:
    """What a results file holds: for each line answered, a `fingerprint` of what was asked; and whether
    anything else is in it, an error or a half-written line, or its lines are not in order."""

    answered: dict[int, int]
    needs_cleaning: bool


def fingerprint(model: str, images: Sequence[str], question: str, options: Any) -> int:
    """Tells one question, and how it is to be answered, from another within this process."""
    return hash((model, *images, question, json.dumps(options, sort_keys=True)))


def read_results(path: Path) -> Earlier:
    """Read the results of an earlier run. Makes an empty file where there is none, so that a place which
    cannot be written to shows before any work.

    Raises:
        RequestError: the file holds something other than results.
        OSError: it cannot be read or written.
    """
    if path.exists() and not path.is_file():
        raise RequestError(f"{path}: expected a file to write results to, got something else")
    with path.open("ab"):
        pass
    answered: dict[int, int] = {}
    needs_cleaning, last = False, 0
    with path.open("rb") as file:
        for number, (_, raw) in enumerate(lines_of(file), 1):
            record = _parse(raw)
            if record is None and (raw.endswith(b"\n") or not _may_be_half(raw)):
                raise RequestError(
                    f"{path}, line {number}: expected the results of an earlier run, got {raw[:60]!r}"
                )
            if record is None or "error" in record or not raw.endswith(b"\n"):
                needs_cleaning = True
            if record is not None:
                needs_cleaning, last = needs_cleaning or record["line"] < last, record["line"]
            if record is not None and "error" not in record:
                answered[record["line"]] = fingerprint(
                    record["model"], record["images"], record["question"], record.get("options")
                )
    return Earlier(answered, needs_cleaning)


def rewrite(path: Path, errors: bool) -> None:
    """Put results into the order of their questions, and drop a half-written last line: written beside the
    file, then renamed.

    Args:
        errors: keep them, too; without them they are tried again.
    """
    with path.open("rb") as old:
        kept = [
            (record["line"], place)
            for place, raw in lines_of(old)
            if (record := _parse(raw)) is not None and (errors or "error" not in record)
        ]
        if errors and kept == sorted(kept):
            return
        with replacing(path) as temporary, temporary.open("wb") as new:
            for _, place in sorted(kept):
                new.write(line_at(old, place).rstrip(b"\n") + b"\n")
            new.flush()
            os.fsync(new.fileno())


def _parse(raw: bytes) -> dict[str, Any] | None:
    """A result, or None for anything else."""
    try:
        record = None if is_too_long(raw) else parse_line(raw)
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("line")) is not int:
        return None
    if "error" in record:
        return record
    model, images, question = (record.get(name) for name in ("model", "images", "question"))
    named = isinstance(images, list) and all(isinstance(text, str) for text in (model, question, *images))
    return record if named else None


def _may_be_half(raw: bytes) -> bool:
    """Whether a line is the beginning of a result: what is not must not be thrown away."""
    if is_too_long(raw):  # of which the end is not known, nor whether it has one
        return False
    return raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw)
