"""The two files of a batch, checked before torch is imported.

    questions.jsonl   {"image": "boats.jpg", "question": "How many boats?", "id": 7, "max_new_tokens": 16}
    answers.jsonl     {"line": 1, "id": 7, "images": ["boats.jpg"], ..., "answers": ["three"], ...}

A question may have "images", a list, in place of "image", and "system". Paths are relative to the questions'
file. A line that cannot be answered gets {"line": n, "error": ...}. Other keys are kept under "other".
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import nearest_file
from inference.errors import RequestError
from inference.results import ResultsFile

KEYS = ("image", "images", "question", "id", "system", "max_new_tokens")


@dataclass(frozen=True)
class Line:
    """A question of the file, checked. Its images are as written there."""

    question: str
    images: list[str]
    system: str | None
    max_new_tokens: int | None


def read_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, place in the file, content) of every line that is not blank."""
    place = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip() not in (b"", codecs.BOM_UTF8):
                yield number, place, raw
            place += len(raw)


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises RequestError."""
    try:
        value = json.loads(raw.decode("utf-8-sig"))  # the first line may begin with a byte order mark
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise RequestError(f"expected a JSON object, got {type(value).__name__}")
    return value


def read_question(value: dict[str, Any]) -> Line:
    """The question of a JSON object. Raises RequestError."""
    if "image" in value and "images" in value:
        raise RequestError("expected either image or images, got both")
    images = value.get("images", value.get("image"))
    images = [] if images is None else images if "images" in value else [images]
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise RequestError(f"expected image as a path or images as a list of paths, got {str(images)[:80]}")
    if not isinstance(value.get("question"), str):
        got = type(value["question"]).__name__ if "question" in value else "none"
        raise RequestError(f"expected a question as text, got {got}")
    return Line(value["question"], images, value.get("system"), value.get("max_new_tokens"))


def passed_on(value: dict[str, Any]) -> dict[str, Any]:
    """The parts of a question that its result repeats: its id, and "other" for keys with no meaning here."""
    other = {key: kept for key, kept in value.items() if key not in KEYS}
    return ({"id": value["id"]} if "id" in value else {}) | ({"other": other} if other else {})


class BatchFiles:
    """The questions of one file that have no answer yet, and the file of results.

    Opening them reads and repairs the results. `options` is everything that answers depend on besides the
    question; the results record it.

    Raises:
        RequestError: the results belong to other questions, options or another model, or are no results.
        OSError: a file cannot be read or written.
    """

    def __init__(self, questions: Path, out: Path, model: str, options: Mapping[str, Any]):
        if questions.exists() and out.exists() and os.path.samefile(questions, out):
            raise RequestError(f"{out}: expected another file for the results than for the questions")
        if not questions.exists():
            raise RequestError(f"{questions}: no such file{nearest_file(questions)}")
        for path in (questions, out):
            if path.exists() and not path.is_file():  # both are read more than once
                raise RequestError(f"{path}: expected a file, got a folder, a pipe or a device")
        with questions.open("rb"):  # an error about it comes before the results' file is made
            pass
        self.questions, self.out, self.model, self.options = questions, out, model, options
        self.results = ResultsFile(out, "line", _is_result)
        with self.results.appending():  # shows that it can be written to
            pass
        answered = {
            record["line"]: _fingerprint(
                record["model"], record["images"], record["question"], record.get("options")
            )
            for record in self.results
            if "error" not in record
        }
        self.answered = answered.keys()
        self.total = self._compare(answered)
        self.results.compact(errors=False, ordered=True)

    @property
    def remaining(self) -> int:
        return self.total - len(self.answered)

    def _compare(self, answered: dict[int, int]) -> int:
        """Check that the answers belong to the questions; returns the number of questions."""
        total, foreign = 0, set(answered)
        for number, _, raw in read_lines(self.questions):
            total += 1
            if number in answered:
                try:
                    line = read_question(read_object(raw))
                except RequestError:
                    continue
                own = _fingerprint(self.model, line.images, line.question, self.options_of(line))
                if own == answered[number]:
                    foreign.remove(number)
        if foreign:
            raise RequestError(
                f"{self.out}: the result of line {min(foreign)} is by another model, to another question or "
                f"with other options than this run of {self.questions}; choose another file for results"
            )
        return total

    def options_of(self, line: Line) -> dict[str, Any]:
        """The options of the batch, replaced by those that a line has itself."""
        own = {"system": line.system, "max_new_tokens": line.max_new_tokens}
        return {**self.options, **{name: value for name, value in own.items() if value is not None}}

    def by_images(self) -> list[tuple[int, int]]:
        """(number, place in the file) of each line without an answer. Lines about the same images stand
        together, where the first of them stands."""
        first: dict[int, int] = {}  # hash of the images -> the first line about them
        lines = []
        for number, place, raw in read_lines(self.questions):
            if number not in self.answered:
                group = number
                try:
                    if images := read_question(read_object(raw)).images:
                        group = first.setdefault(hash(tuple(images)), number)
                except RequestError:
                    pass  # its result will report the error
                lines.append((group, number, place))
        return [(number, place) for _, number, place in sorted(lines)]

    def image_path(self, image: str) -> str:
        """The path or URL of an image of a line; a relative path begins at the questions' folder."""
        if "://" in image[:16] or image[:5].lower() == "data:" or image.startswith("~"):
            return image
        return str(self.questions.parent / image)


def _is_result(record: dict[str, Any]) -> bool:
    """Whether a record of the file of results is an error, or an answer with its question."""
    if type(record["line"]) is not int:
        return False
    images = record.get("images")
    texts = [record.get("model"), record.get("question"), *(images if isinstance(images, list) else [None])]
    return "error" in record or all(isinstance(text, str) for text in texts)


def _fingerprint(model: str, images: list[str], question: str, options: Any) -> int:
    """A hash, within this process, of a question and of how it is to be answered."""
    return hash((model, *images, question, json.dumps(options, sort_keys=True)))
