"""A file of results: JSON lines that one run appends to and a later run resumes from.

    results = ResultsFile(Path("answers.jsonl"), "line", lambda record: "answers" in record)
    answered = {record["line"] for record in results if not record.get("error")}
    results.compact(errors=False)                # before a run: failed questions are tried again
    with results.appending() as write:
        write({"line": 7, "answers": ["three"], ...})
    results.compact(errors=True, ordered=True)   # after it

Each record begins with its key and is written by one call, so a run that was killed leaves at most one
half-written line, at the end. With several ranks, each further rank appends to a part file of its own. A
second process that would write to the same output is refused at once (`only_writer`).
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from data.errors import naming, replacing
from inference.errors import RequestError
from messages import CONTROL

if TYPE_CHECKING:
    from data.tokenizer import AnyTokenizer
    from generation.confidence import TokenLogprobs  # imports torch, which --help does without

_ESCAPED = {code: f"\\u{code:04x}" for code in CONTROL}
KEPT = "answers so far are kept, and the same command resumes"


def to_json(record: dict[str, Any]) -> str:
    """One line of JSON, readable in any script. What no encoding has, half a surrogate pair, is escaped, and
    what could control a terminal."""
    text = json.dumps(record, ensure_ascii=False).translate(_ESCAPED)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def logprobs_of(
    tokenizer: AnyTokenizer, ids: list[list[int]], logprobs: list[list[TokenLogprobs]]
) -> dict[str, Any]:
    """The field "logprobs" of a result: for each answer a list of its tokens, each with its
    text, its log-probability (None where a form left no choice) and the likeliest tokens beside it."""

    def token(token_id: int, logprob: float | None) -> dict[str, Any]:
        return {"id": token_id, "token": tokenizer.decode([token_id]), "logprob": logprob}

    return {
        "logprobs": [
            [token(one, at.logprob) | {"top": [token(*pair) for pair in at.top]} for one, at in zip(*answer)]
            for answer in zip(ids, logprobs)
        ]
    }


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
        return (record for path in self._paths() for record, _ in self._lines(path))

    def compact(
        self,
        errors: bool,
        ordered: bool = False,
        but: Callable[[dict[str, Any]], bool] = lambda record: False,
    ) -> None:
        """Make one file of the parts, with every record once and without a half-written line: with those that
        report an error or without, without those that are `but`, `ordered` by their key or as they are."""
        paths = self._paths()
        kept: dict[Any, bytes] = {}
        for record, line in (pair for path in paths for pair in self._lines(path)):
            if (errors or not record.get("error")) and not but(record):
                kept.setdefault(record[self.key], line)
        if not paths:
            return
        with replacing(self.path) as temporary, temporary.open("wb") as new:
            new.writelines(kept[key].rstrip(b"\n") + b"\n" for key in (sorted(kept) if ordered else kept))
            new.flush()
            os.fsync(new.fileno())
        for part in set(paths) - {self.path}:
            part.unlink()

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

    def _lines(self, path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
        """(record, line) of every line but a half-written last one. Raises RequestError for a file of
        something else, which must not be overwritten."""
        beginning = f'{{"{self.key}": '.encode()
        with path.open("rb") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    record = None
                    if (line.startswith(beginning) or beginning.startswith(line)) and line[-1:] != b"\n":
                        return  # half-written
                if not (isinstance(record, dict) and self.key in record and self.is_result(record)):
                    raise RequestError(f"{path}: expected the results of an earlier run, got {line[:60]!r}")
                yield record, line


# --------------------------------------------------------------------------------------- one writer at a time
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
