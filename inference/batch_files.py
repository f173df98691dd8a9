"""generate.py batch up to its answers: where questions come from, and the file of results. Without torch.

    questions.jsonl   {"image": "boats.jpg", "question": "How many boats?", "id": 7, "max_new_tokens": 16}
    answers.jsonl     {"line": 1, "id": 7, "images": ["boats.jpg"], ..., "answers": ["three"], ...}

A question may have "images", a list, in place of "image"; "system"; and a "schema" or "choices". Paths are
relative to the questions' file. A line that cannot be answered gets {"line": n, "error": ...}. Other keys are
kept under "other". The results of questions about each image of folders and names begin with an "id" in place
of a "line".
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

from inference.errors import RequestError
from inference.flags import LOST
from inference.results import ResultsFile
from messages import one_line

OPTIONS = ("system", "max_new_tokens", "schema", "choices")  # of a line, in place of those of the batch
KEYS = ("image", "images", "question", "id", "page", *OPTIONS)
ENDINGS = frozenset(
    (".apng", ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg",
     ".jpg", ".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp")
)  # fmt: skip
_ANSWER = {"model", "images", "question", "answers"}  # fields of a result

Value = dict[str, Any] | RequestError  # a question as an object, or why a line is none


@dataclass(frozen=True)
class Line:
    """A question, checked. Its images are as written there, `options` are its own."""

    question: str
    images: list[str]
    options: dict[str, Any]


def read_question(value: Value) -> Line:
    """The question of a JSON object. Raises RequestError."""
    if isinstance(value, RequestError):
        raise value
    image, question = value.get("image"), value.get("question")
    images = value.get("images", [] if image is None else [image])
    if "image" in value and "images" in value:
        raise RequestError("expected either image or images, got both")
    if not isinstance(images, list) or not all(isinstance(path, str) for path in images):
        raise RequestError(f"expected image as a path or images as a list of paths, got {str(images)[:80]}")
    if not isinstance(question, str):
        raise RequestError(f"expected a question as text, got {type(question).__name__}")
    return Line(question, images, {name: value[name] for name in OPTIONS if value.get(name) is not None})


def passed_on(value: Value) -> dict[str, Any]:
    """The parts of a question that its result repeats: its id, and "other" for keys with no meaning here."""
    given = {} if isinstance(value, RequestError) else value
    other = {key: kept for key, kept in given.items() if key not in KEYS}
    return ({"id": given["id"]} if "id" in given else {}) | ({"other": other} if other else {})


@dataclass(frozen=True)
class Questions:
    """The questions of a batch, in order.

    key: what names one in the results, "line", "id" or, of documents, "page". name: what they come from.
    folder: where relative paths of images begin. entries: (key, question) of each. things: what a question
    asks to locate, by its text. unread: why a folder or a document could not be read. noun: for them.
    stamps: what changes with a document; results with another "stamp" are of an earlier version of it.
    """

    key: str
    name: str
    folder: str
    entries: list[tuple[Any, Value]]
    things: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    noun: str = "question"
    stamps: dict[str, str] = field(default_factory=dict)

    def is_result(self, record: dict[str, Any]) -> bool:
        named = type(record[self.key]) is (int if self.key == "line" else str)
        own = self.key == "line" or "line" not in record
        return named and own and ("error" in record or record.keys() >= _ANSWER)

    def is_stale(self, record: dict[str, Any]) -> bool:
        stamp = record.get("stamp")
        return self.stamps.get(record.get("document", ""), stamp) != stamp

    def image_path(self, image: str) -> str:
        """The path or URL of an image. Only those that stand in a file may be URLs or begin at home."""
        named = "://" in image[:16] or image[:5].lower() == "data:" or image.startswith("~")
        if self.key == "line" and named:
            return image
        path = os.path.normpath(os.path.join(self.folder, image))
        return os.path.abspath(path) if path.startswith("~") or ":" in path else path

    def part(self, entries: list[tuple], number: int, count: int) -> list[tuple]:
        """Of entries (…, question) in the order in which they are answered, those of one of `count` shards.
        The lines of a file are cut into parts of one size. Of folders an image is in the same shard wherever
        and whenever this is asked, whatever other images there are."""
        if self.key == "line":
            first, end = ((shard * len(entries)) // count for shard in (number - 1, number))
            return entries[first:end]

        def shard(entry: tuple) -> int:
            digest = hashlib.sha256(entry[-1]["image"].encode("utf-8", "surrogatepass")).digest()
            return int.from_bytes(digest[:8], "big") % count + 1

        return [entry for entry in entries if shard(entry) == number]


# ------------------------------------------------------------------------------------- lines of a file
def is_lines(names: Sequence[str]) -> bool:
    """Whether the names of a batch are one file of questions, and not images."""
    path = os.path.expanduser(names[0])
    is_file = os.path.lexists(path) and not os.path.isdir(path) and not _is_image(path)
    return len(names) == 1 and (is_file or path.endswith(".jsonl"))


def questions_of_lines(path: Path) -> Questions:
    """The questions of a file of JSON lines, by their numbers from 1. Raises RequestError for what cannot be
    such a file."""
    if not path.exists():
        raise RequestError(f"{path}: no such file")
    check_file(path)
    with path.open("rb") as file:
        entries: list[tuple[Any, Value]] = [(number, _read(raw)) for number, raw in enumerate(file, 1)]
    return Questions("line", str(path), str(path.parent), [one for one in entries if one[1] is not None])


def _read(raw: bytes) -> Any:
    """A `Value`; None for an empty line."""
    if raw.strip() in (b"", codecs.BOM_UTF8):
        return None
    try:
        value = json.loads(raw.decode("utf-8-sig"))  # the first line may begin with a byte order mark
    except (ValueError, RecursionError) as error:
        return RequestError(f"not valid JSON ({error})")
    if not isinstance(value, dict):
        return RequestError(f"expected a JSON object, got {type(value).__name__}")
    return value


# ------------------------------------------------------------------------------------ images of folders
def questions_of_images(
    names: Sequence[str], questions: Sequence[str], endings: frozenset[str] = ENDINGS
) -> Questions:
    """Each question about each image of folders with their subfolders and of names, in an order that no file
    system decides. `endings`: of files in folders; with others than of images, a named file may have any.

    What is hidden, what does not end as images do, and links to folders are left out. Nothing is opened here:
    an image that cannot be read is an error of its own. An id is the image's path, relative to a single
    folder, with #1, #2, ... where there are several questions. Raises RequestError where there is no image.
    """
    unread: list[OSError] = []
    first = os.path.expanduser(names[0])
    folder = first if len(names) == 1 and os.path.isdir(first) and endings == ENDINGS else ""
    name = names[0] if len(names) == 1 else f"{len(names)} names"
    paths = {path for one in names for path in _found(one, unread, endings)}
    if folder:
        paths = {os.path.relpath(path, folder) for path in paths}
    reasons = list(map(one_line, unread))
    if not paths:
        raise RequestError("; ".join([f"{name}: no images there", *reasons]))
    # The order of code points is the same in any language and on any disk.
    images, asked = sorted(Path(path).as_posix() for path in paths), list(dict.fromkeys(questions))
    suffixes = [f"#{n:0{len(str(len(asked)))}}" for n in range(1, len(asked) + 1)] if len(asked) > 1 else [""]
    entries: list[tuple[Any, Value]] = [
        (image + suffix, {"image": image, "question": question})
        for image, (question, suffix) in product(images, zip(asked, suffixes))
    ]
    return Questions("id", name, folder, entries, {}, reasons)


def _found(name: str, unread: list[OSError], endings: frozenset[str]) -> Iterator[str]:
    """The images that one name means."""
    path = os.path.normpath(os.path.expanduser(name))
    if not os.path.lexists(path):
        lost = LOST if endings == ENDINGS else ""  # documents are read without a question
        raise RequestError(f"{name!r}: no such file or folder{lost}")
    if not os.path.isdir(path):
        yield from _images([path]) if endings == ENDINGS else [path]
        return
    for folder, subfolders, files in os.walk(path, onerror=unread.append):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        shown = (os.path.join(folder, name) for name in files if not name.startswith("."))
        yield from _images(shown, endings)


def _images(paths: Iterable[str], endings: frozenset[str] = ENDINGS) -> Iterator[str]:
    """The paths of images; a link that leads nowhere is one, as a person would see it."""
    there = (path for path in paths if os.path.isfile(path) or os.path.islink(path))
    return (path for path in there if _is_image(path, endings))


def _is_image(name: str, endings: frozenset[str] = ENDINGS) -> bool:
    return os.path.splitext(name)[1].lower() in endings


# ------------------------------------------------------------------------------------- the file of results
class BatchFiles:
    """Questions that have no answer yet, and the file of results, read and repaired.

    missing: (key, question) of each question of the shard that has no answer. Those about the same images
        stand together, where the first of them stands.
    total: how many questions the shard has, of `all_shards`.
    options: everything that answers depend on besides the question; the results record it.

    Raises RequestError where the results belong to other questions, options or another model or are no
    results, and OSError.
    """

    def __init__(
        self,
        source: Questions,
        out: Path,
        model: str,
        options: Mapping[str, Any],
        shard: tuple[int, int] | None = None,
    ):
        check_file(out)  # `compact` would replace a device
        if source.key == "line" and out.exists() and out.samefile(source.name):
            raise RequestError(f"{out}: expected another file for the results than for the questions")
        self.source, self.model, self.options = source, model, options
        self.results = ResultsFile(out, source.key, source.is_result)
        names = ("model", "images", "question", "options")
        # Hashes, for a file of results may be large.
        answered = {
            record[source.key]: _hash(*map(record.get, names))
            for record in self.results
            if "error" not in record and not source.is_stale(record)
        }
        everything = self._compare(answered)
        ours, self.all_shards = source.part(everything, *(shard or (1, 1))), len(everything)
        self.missing = [(key, value) for _, key, value in ours if key not in answered]
        self.total = len(ours)
        with self.results.appending():  # shows that it can be written to
            pass
        self.results.compact(errors=False, ordered=True, but=source.is_stale)

    def _compare(self, answered: Mapping[Any, int]) -> list[tuple[int, Any, Value]]:
        """(group, key, question) of all questions in the order in which they are answered; those with an
        answer have to be the questions that were answered."""
        first: dict[int, int] = {}  # hash of the images -> the first question about them
        entries, foreign, asked = list[tuple[int, Any, Value]](), set(answered), set[int]()
        for position, (key, value) in enumerate(self.source.entries):
            group = position
            try:
                line = read_question(value)
            except RequestError:  # its result will report it
                line = None
            if line is not None:
                group = first.setdefault(_hash(line.images), position) if line.images else position
                own = _hash(self.model, line.images, line.question, self.options_of(line))
                asked.add(own)
                if answered.get(key) == own:
                    foreign.discard(key)
            entries.append((group, key, value))
        if self.source.key == "page":  # beside these may stand other pages, and those of other documents
            documents = {value["image"] for _, value in self.source.entries if isinstance(value, dict)}
            ours = {key for key in foreign if key.rpartition("#")[0] in documents}
            foreign = {key for key in ours if answered[key] not in asked}
        if foreign:
            raise RequestError(
                f"{self.results.path}: the result of {self.source.key} {min(foreign)} is by another model, "
                f"to another question or with other options than this run of {self.source.name}; choose "
                f"another file"
            )
        return sorted(entries, key=itemgetter(0))

    def options_of(self, line: Line) -> dict[str, Any]:
        """The options of the batch, replaced by those that a line has itself."""
        return {**self.options, **line.options}


def check_file(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise RequestError(f"{path}: expected a file, got a folder, a pipe or a device")


def _hash(*values: Any) -> int:
    return hash(json.dumps(values, sort_keys=True))
