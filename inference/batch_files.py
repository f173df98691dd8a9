"""The two files of a batch, checked before a model is loaded: nothing here needs torch.

    questions.jsonl   {"image": "boats.jpg", "question": "How many boats?", "id": 7, "max_new_tokens": 16}
    answers.jsonl     {"line": 1, "id": 7, "images": ["boats.jpg"], ..., "answers": ["three"], ...}

`images` takes a list, paths are relative to the questions' file, `system` is possible, too. A line that
cannot be answered gets {"line": n, "error": ...}. Keys that mean nothing here are kept under "other".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import nearest_file
from data.lines import MAX_LINE, is_too_long, lines_of, parse_line
from inference.mistakes import RequestError
from inference.results import ResultsFile

KEYS = ("image", "images", "question", "id", "system", "max_new_tokens")


@dataclass(frozen=True)
class Line:
    """A line of the questions' file, checked; `images` as written there."""

    number: int
    question: str
    images: list[str]
    system: str | None
    max_new_tokens: int | None


BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, place in the file, content) of every line that is not blank; see `data.lines`."""
    with path.open("rb") as file:
        for number, (begin, raw) in enumerate(lines_of(file), 1):
            if number == 1 and raw.startswith(BYTE_ORDER_MARK):
                raw, begin = raw.removeprefix(BYTE_ORDER_MARK), len(BYTE_ORDER_MARK)
            if raw.strip():
                yield number, begin, raw


def read_object(raw: bytes) -> dict[str, Any]:
    """Raises RequestError where a line is too long or not a JSON object."""
    if is_too_long(raw):
        raise RequestError(f"expected a line of at most {MAX_LINE >> 20} MiB, got a longer one")
    try:
        value = parse_line(raw)
    except ValueError as error:
        raise RequestError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise RequestError(f"expected a JSON object, got {type(value).__name__}")
    return value


def read_question(number: int, value: dict[str, Any]) -> Line:
    """Raises RequestError where an object is no question."""
    if "image" in value and "images" in value:
        raise RequestError("expected either image or images, got both")
    images = value.get("images", value.get("image"))
    images = [] if images is None else images if "images" in value else [images]
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise RequestError(f"expected image as a path or images as a list of paths, got {str(images)[:80]}")
    if not isinstance(value.get("question"), str):
        got = type(value["question"]).__name__ if "question" in value else "none"
        raise RequestError(f"expected a question as text, got {got}")
    return Line(number, value["question"], images, value.get("system"), value.get("max_new_tokens"))


def carried(value: dict[str, Any]) -> dict[str, Any]:
    """What goes from a question to its result: its id, and under "other" what has no meaning here."""
    other = {key: kept for key, kept in value.items() if key not in KEYS}
    return ({"id": value["id"]} if "id" in value else {}) | ({"other": other} if other else {})


def is_result(record: dict[str, Any]) -> bool:
    """Whether a line of the results' file is one: an answer with what was asked, or an error."""
    if type(record["line"]) is not int:
        return False
    images = record.get("images")
    texts = [record.get("model"), record.get("question"), *(images if isinstance(images, list) else [None])]
    return "error" in record or all(isinstance(text, str) for text in texts)


def fingerprint(model: str, images: list[str], question: str, options: Any) -> int:
    """Tells one question, and how it is to be answered, from another within this process."""
    return hash((model, *images, question, json.dumps(options, sort_keys=True)))


class BatchFiles:
    """The questions of one file that have no answer yet, and the file for their answers.

    Making one reads and repairs the results, before any model is loaded. `options` is what answers depend on
    besides the question: it is written beside them.

    Raises:
        RequestError: the results belong to other questions, options or another model, or are no results.
        OSError: a file that cannot be read or written.
    """

    def __init__(self, questions: Path, out: Path, model: str, options: Mapping[str, Any]):
        if questions.exists() and out.exists() and os.path.samefile(questions, out):
            raise RequestError(f"{out}: expected another file for the results than for the questions")
        self.questions, self.out, self.model, self.options = questions, out, model, options
        try:
            with questions.open("rb"):  # before a file for its results is made
                pass
        except FileNotFoundError:
            raise RequestError(f"{questions}: no such file{nearest_file(questions)}") from None
        if not questions.is_file():
            raise RequestError(
                f"{questions}: expected a file, which can be read twice, got a pipe or a device"
            )
        if out.exists() and not out.is_file():
            raise RequestError(f"{out}: expected a file to write results to, got something else")
        self.results = ResultsFile(out, "line", is_result)
        with self.results.appending():  # a place that cannot be written to shows before any work
            pass
        answered = {
            record["line"]: fingerprint(
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
        """Hold earlier answers against the questions; how many questions there are."""
        total, foreign = 0, set(answered)
        for number, _, raw in read_lines(self.questions):
            total += 1
            if number in answered and self._fingerprint(number, raw) == answered[number]:
                foreign.remove(number)
        if foreign:
            raise RequestError(
                f"{self.out}: expected answers by {self.model} to {self.questions}, but what it has for line "
                f"{min(foreign)} is by another model, to another question or with other options; choose "
                "another file for results"
            )
        return total

    def _fingerprint(self, number: int, raw: bytes) -> int | None:
        try:
            line = read_question(number, read_object(raw))
        except RequestError:
            return None
        return fingerprint(self.model, line.images, line.question, self.options_of(line))

    def options_of(self, line: Line) -> dict[str, Any]:
        """The options, with what a line says itself."""
        own = {"system": line.system, "max_new_tokens": line.max_new_tokens}
        return {**self.options, **{name: value for name, value in own.items() if value is not None}}

    def by_images(self) -> list[tuple[int, int]]:
        """(number, place in the file) of each line without an answer, those about the same images together,
        otherwise in their order."""
        first: dict[int, int] = {}  # hash of the images -> the first line about them
        lines = []
        for number, place, raw in read_lines(self.questions):
            if number not in self.answered:
                group = number
                try:
                    if images := read_question(number, read_object(raw)).images:
                        group = first.setdefault(hash(tuple(images)), number)
                except RequestError:
                    pass  # it will say so in its result
                lines.append((group, number, place))
        return [(number, place) for _, number, place in sorted(lines)]

    def place_of(self, image: str) -> str:
        """Where an image lies that a line names: beside the questions' file, or where a URL or ~ says."""
        if "://" in image[:16] or image[:5].lower() == "data:" or image.startswith("~"):
            return image
        return str(self.questions.parent / image)
