"""Results in writing: what a question took; and a batch's JSONL file, which a run appends to and a later run
goes on from.

Each of its lines is {"line": n, ...}: n is the line of the questions' file, counted from 1, the rest an
answer, or {"error": ...}. A run that was killed leaves at most one half-written line, at the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.checkpoint import RequestError

_BEGINNING = b'{"line": '  # of every result


def to_json(record: dict[str, Any]) -> str:
    """One line of JSON, readable in any script; half a surrogate pair, which is no text, as its escape."""
    text = json.dumps(record, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def stats_lines(made: dict[str, Any]) -> list[str]:
    """What one question took, of what `Reply.finish` tells and the model's name, in lines for a terminal."""
    seconds, speed = made["seconds"], made["decode_tokens_per_second"]
    lengths = [len(ids) for ids in made["token_ids"]]
    ends = ", ".join(sorted(set(made["stop_reasons"])))
    rows = {
        "model": f"{made['model']}, {made['dtype']} on {made['device']}",
        "prompt": f"{made['prompt_tokens']} tokens, {made['image_tokens']} of them picture"
        + (f", {made['reused_tokens']} kept from the last question" if made["reused_tokens"] else ""),
        "answer": f"{' + '.join(map(str, lengths))} tokens, ended by {ends}",
        **{name: f"{value:.3f} s" for name, value in seconds.items()},
        "kv cache": f"{made['kv_cache_bytes'] / 2**20:.2f} MiB",
        "step": made["decode_step"],
    }
    if speed is not None:
        rows["decode"] += f", {speed:.1f} tokens/s"
    return [f"{name:>8}  {value}" for name, value in rows.items()]


@dataclass(frozen=True)
class Earlier:
    """What a results file holds: for each line answered, a `fingerprint` of what was asked; and whether
    anything else is in it, an error or a half-written line."""

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
    needs_cleaning = False
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            record = _parse(raw)
            if record is None and (raw.endswith(b"\n") or not _may_be_half(raw)):
                raise RequestError(
                    f"{path}, line {number}: expected the results of an earlier run, got {raw[:60]!r}"
                )
            if record is None or "error" in record or not raw.endswith(b"\n"):
                needs_cleaning = True
            if record is not None and "error" not in record:
                answered[record["line"]] = fingerprint(
                    record["model"], record["images"], record["question"], record.get("options")
                )
    return Earlier(answered, needs_cleaning)


def keep_answers(path: Path) -> None:
    """Drop errors, to be tried again, and a half-written last line: written beside the file, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    with path.open("rb") as old, temporary.open("wb") as new:
        for raw in old:
            record = _parse(raw)
            if record is not None and "error" not in record:
                new.write(raw.rstrip(b"\n") + b"\n")
        new.flush()
        os.fsync(new.fileno())
    temporary.replace(path)


def _parse(raw: bytes) -> dict[str, Any] | None:
    """A result, or None for anything else."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
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
    return raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw)
