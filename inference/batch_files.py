"""The questions of a batch and its file of results, checked before torch is imported.

    questions.jsonl   {"image": "boats.jpg", "question": "How many boats?", "id": 7, "max_new_tokens": 16}
    answers.jsonl     {"line": 1, "id": 7, "images": ["boats.jpg"], ..., "answers": ["three"], ...}

A question may have "images", a list, in place of "image"; "system"; and a "schema" or "choices". Paths are
relative to the questions' file. A line that cannot be answered gets {"line": n, "error": ...}. Other keys are
kept under "other". Questions about each image of a folder are `ImageQuestions`: their results begin with an
"id" in place of a "line".
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from data.errors import nearest_file
from inference.batch_images import ImageQuestions
from inference.errors import RequestError
from inference.results import ResultsFile

T = TypeVar("T")
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


class QuestionLines:
    """The questions of a file of JSON lines. Iterate for (number from 1, place in the file, line) of each; a
    line that is no question is None. Raises RequestError for what cannot be such a file."""

    key = "line"
    things: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, path: Path):
        if not path.exists():
            raise RequestError(f"{path}: no such file{nearest_file(path)}")
        check_file(path)  # which is read twice
        self.path, self.name = path, str(path)

    def __iter__(self) -> Iterator[tuple[int, int, dict[str, Any] | None]]:
        end = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                place, end = end, end + len(raw)
                if raw.strip() in (b"", codecs.BOM_UTF8):
                    continue
                try:
                    yield number, place, read_object(raw)
                except RequestError:  # its result will report it
                    yield number, place, None

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], dict[str, Any]]]:
        """A function from the place of a line to its object, which raises RequestError."""
        with self.path.open("rb") as file:

            def read(place: int) -> dict[str, Any]:
                file.seek(place)
                return read_object(file.readline())

            yield read

    def part(self, entries: list[T], number: int, count: int) -> list[T]:
        """Of entries in the order in which they are answered, those of one of `count` shards, of one size: as
        far as can be, lines about the same images are in the same."""
        first, end = ((shard * len(entries)) // count for shard in (number - 1, number))
        return entries[first:end]

    def image_path(self, image: str) -> str:
        """The path or URL of an image of a line; a relative path begins at the file's folder."""
        if "://" in image[:16] or image[:5].lower() == "data:" or image.startswith("~"):
            return image
        return str(self.path.parent / image)


def check_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise RequestError(f"{path}: expected a file, got a folder, a pipe or a device")


class BatchFiles:
    """Questions that have no answer yet, and the file of results, read and repaired.

    missing: (key, place) of each question of the shard that has no answer. Those about the same images stand
        together, where the first of them stands.
    total: how many questions the shard has, of `all_shards`.
    options: everything that answers depend on besides the question; the results record it.

    Raises RequestError where the results belong to other questions, options or another model or are no
    results, and OSError.
    """

    def __init__(
        self,
        source: QuestionLines | ImageQuestions,
        out: Path,
        model: str,
        options: Mapping[str, Any],
        shard: tuple[int, int] | None = None,
    ):
        check_file(out)  # `compact` would replace a device
        if isinstance(source, QuestionLines) and out.exists() and out.samefile(source.path):
            raise RequestError(f"{out}: expected another file for the results than for the questions")
        self.source, self.model, self.options = source, model, options
        self.results = ResultsFile(out, source.key, _IS_RESULT[source.key])
        names = ("model", "images", "question", "options")
        # Hashes, for a file of results may be large.
        answered = {
            record[source.key]: _hash(*map(record.get, names))
            for record in self.results
            if "error" not in record
        }
        everything = self._compare(answered)
        ours, self.all_shards = source.part(everything, *(shard or (1, 1))), len(everything)
        self.missing = [(key, place) for _, key, place in ours if key not in answered]
        self.total = len(ours)
        with self.results.appending():  # shows that it can be written to
            pass
        self.results.compact(errors=False, ordered=True)

    def _compare(self, answered: Mapping[Any, int]) -> list[tuple[int, Any, Any]]:
        """(group, key, place) of all questions in the order in which they are answered; those with an answer
        have to be the questions that were answered."""
        first: dict[int, int] = {}  # hash of the images -> the first question about them
        found, foreign = list[tuple[int, Any, Any]](), set(answered)
        for position, (key, place, value) in enumerate(self.source):
            images, own = [], None
            try:
                line = read_question(value or {})
                images = line.images
                own = _hash(self.model, images, line.question, self.options_of(line))
            except RequestError:
                pass  # its result will report the error
            found.append((first.setdefault(_hash(images), position) if images else position, key, place))
            if key in answered and own == answered[key]:
                foreign.remove(key)
        if foreign:
            raise RequestError(
                f"{self.results.path}: the result of {self.source.key} {min(foreign)} is by another model, "
                f"to another question or with other options than this run of {self.source.name}; choose "
                f"another file"
            )
        return sorted(found, key=itemgetter(0))

    def options_of(self, line: Line) -> dict[str, Any]:
        """The options of the batch, replaced by those that a line has itself."""
        return {**self.options, **line.options}


_ANSWER = {"model", "images", "question", "answers"}
_IS_RESULT: dict[str, Callable[[dict[str, Any]], bool]] = {
    "line": lambda record: type(record["line"]) is int and ("error" in record or record.keys() >= _ANSWER),
    "id": lambda record: (
        type(record["id"]) is str and "line" not in record and ("error" in record or record.keys() >= _ANSWER)
    ),
}


def _hash(*values: Any) -> int:
    return hash(json.dumps(values, sort_keys=True))
