"""The two files of a batch, checked before torch is imported.

    questions.jsonl   {"image": "boats.jpg", "question": "How many boats?", "id": 7, "max_new_tokens": 16}
    answers.jsonl     {"line": 1, "id": 7, "images": ["boats.jpg"], ..., "answers": ["three"], ...}

A question may have "images", a list, in place of "image"; "system"; and a "schema" or "choices". Paths are
relative to the questions' file. A line that cannot be answered gets {"line": n, "error": ...}. Other keys are
kept under "other".
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import nearest_file
from inference.errors import RequestError
from inference.results import ResultsFile

OPTIONS = ("system", "max_new_tokens", "schema", "choices")  # of a line, in place of those of the batch
KEYS = ("image", "images", "question", "id", *OPTIONS)


@dataclass(frozen=True)
class Line:
    """A question of the file, checked. Its images are as written there, `options` are its own."""

    question: str
    images: list[str]
    options: dict[str, Any]


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line. Raises RequestError."""
    try:
        value = json.loads(raw.decode("utf-8-sig"))  # the first line may begin with a byte order mark
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise RequestError(f"expected a JSON object, got {type(value).__name__}")
    return value


def read_question(value: Mapping[str, Any]) -> Line:
    """The question of a JSON object. Raises RequestError."""
    image, question = value.get("image"), value.get("question")
    images = value.get("images", [] if image is None else [image])
    if "image" in value and "images" in value:
        raise RequestError("expected either image or images, got both")
    if not isinstance(images, list) or not all(isinstance(path, str) for path in images):
        raise RequestError(f"expected image as a path or images as a list of paths, got {str(images)[:80]}")
    if not isinstance(question, str):
        raise RequestError(f"expected a question as text, got {type(question).__name__}")
    return Line(question, images, {name: value[name] for name in OPTIONS if value.get(name) is not None})


def passed_on(value: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a question that its result repeats: its id, and "other" for keys with no meaning here."""
    other = {key: kept for key, kept in value.items() if key not in KEYS}
    return ({"id": value["id"]} if "id" in value else {}) | ({"other": other} if other else {})


class BatchFiles:
    """The questions of one file that have no answer yet, and the file of results, read and repaired.

    missing: (number from 1, place in the file) of each line without an answer. Lines about the same images
        stand together, where the first of them stands.
    total: how many questions there are.
    options: everything that answers depend on besides the question; the results record it.

    Raises RequestError where the results belong to other questions, options or another model or are no
    results, and OSError.
    """

    def __init__(self, questions: Path, out: Path, model: str, options: Mapping[str, Any]):
        if not questions.exists():
            raise RequestError(f"{questions}: no such file{nearest_file(questions)}")
        for path in (questions, out):  # questions are read twice; `compact` would replace a device
            if path.exists() and not path.is_file():
                raise RequestError(f"{path}: expected a file, got a folder, a pipe or a device")
        if out.exists() and out.samefile(questions):
            raise RequestError(f"{out}: expected another file for the results than for the questions")
        self.questions, self.model, self.options = questions, model, options
        self.results = ResultsFile(out, "line", _is_result)
        names = ("model", "images", "question", "options")
        # Hashes, for a file of results may be large.
        answered = {
            record["line"]: _hash(*map(record.get, names)) for record in self.results if "error" not in record
        }
        self.missing = self._compare(answered)
        self.total = len(answered) + len(self.missing)
        with self.results.appending():  # shows that it can be written to
            pass
        self.results.compact(errors=False, ordered=True)

    def _compare(self, answered: Mapping[int, int]) -> list[tuple[int, int]]:
        """`missing`; the other lines have to be the questions that were answered."""
        first: dict[int, int] = {}  # hash of the images -> the first line about them
        missing, foreign, end = [], set(answered), 0
        with self.questions.open("rb") as file:
            for number, raw in enumerate(file, 1):
                place, end = end, end + len(raw)
                if raw.strip() in (b"", codecs.BOM_UTF8):
                    continue
                images, own = [], None
                try:
                    line = read_question(read_object(raw))
                    images = line.images
                    own = _hash(self.model, images, line.question, self.options_of(line))
                except RequestError:
                    pass  # its result will report the error
                if number not in answered:
                    group = first.setdefault(_hash(images), number) if images else number
                    missing.append((group, number, place))
                elif own == answered[number]:
                    foreign.remove(number)
        if foreign:
            raise RequestError(
                f"{self.results.path}: the result of line {min(foreign)} is by another model, to another "
                f"question or with other options than this run of {self.questions}; choose another file"
            )
        return [(number, place) for _, number, place in sorted(missing)]

    def options_of(self, line: Line) -> dict[str, Any]:
        """The options of the batch, replaced by those that a line has itself."""
        return {**self.options, **line.options}

    def image_path(self, image: str) -> str:
        """The path or URL of an image of a line; a relative path begins at the questions' folder."""
        if "://" in image[:16] or image[:5].lower() == "data:" or image.startswith("~"):
            return image
        return str(self.questions.parent / image)


def _is_result(record: dict[str, Any]) -> bool:
    answer = {"model", "images", "question", "answers"}
    return type(record["line"]) is int and ("error" in record or answer <= record.keys())


def _hash(*values: Any) -> int:
    return hash(json.dumps(values, sort_keys=True))
