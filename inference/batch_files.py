"""generate.py batch up to its answers: where questions come from, and the file of results. Without torch.

    questions.jsonl   {"image": "boats.jpg", "question": "How many boats?", "id": 7, "max_new_tokens": 16}
    answers.jsonl     {"line": 1, "id": 7, "images": ["boats.jpg"], ..., "answers": ["three"], ...}

A question may have "images", a list, in place of "image"; "system"; and a "schema" or "choices". Paths are
relative to the questions' file. A line that cannot be answered gets {"line": n, "error": ...}. Other keys are
kept under "other". Questions about each image of folders, globs and names are `ImageQuestions`: their results
begin with an "id" in place of a "line".
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from data.errors import expanded, nearest_file
from inference.errors import RequestError
from inference.results import ResultsFile
from messages import one_line

OPTIONS = ("system", "max_new_tokens", "schema", "choices")  # of a line, in place of those of the batch
KEYS = ("image", "images", "question", "id", *OPTIONS)
ENDINGS = frozenset(
    (".apng", ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg",
     ".jpg", ".mpo", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp")
)  # fmt: skip
_ANSWER = {"model", "images", "question", "answers"}  # fields of a result


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

    def __init__(self, path: Path):
        if not path.exists():
            raise RequestError(f"{path}: no such file{nearest_file(path)}")
        check_file(path)  # which is read twice
        self.path, self.name, self.things = path, str(path), dict[str, str]()

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

    def is_result(self, record: dict[str, Any]) -> bool:
        return type(record["line"]) is int and ("error" in record or record.keys() >= _ANSWER)

    def read(self, place: int) -> dict[str, Any]:
        """The object of the line at this place. Raises RequestError."""
        with self.path.open("rb") as file:
            file.seek(place)
            return read_object(file.readline())

    def part(self, entries: list[tuple], number: int, count: int) -> list[tuple]:
        """Of entries in the order in which they are answered, those of one of `count` shards, of one size: as
        far as can be, lines about the same images are in the same."""
        first, end = ((shard * len(entries)) // count for shard in (number - 1, number))
        return entries[first:end]

    def image_path(self, image: str) -> str:
        """The path or URL of an image of a line; a relative path begins at the file's folder."""
        if "://" in image[:16] or image[:5].lower() == "data:" or image.startswith("~"):
            return image
        return str(self.path.parent / image)


def are_images(names: Sequence[str], asked: bool) -> bool:
    """Whether the names of a batch are of images, not of a file of questions; `asked`: questions are given
    beside them."""
    if len(names) > 1 or os.path.isdir(expanded(names[0])) or _is_image(names[0]):
        return True
    is_pattern = glob.has_magic(names[0]) and not os.path.lexists(expanded(names[0]))
    return is_pattern or (
        asked and not os.path.lexists(expanded(names[0])) and not names[0].endswith(".jsonl")
    )


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in ENDINGS


class ImageQuestions:
    """Each question about each image of folders with their subfolders, globs and names, in an order that no
    file system decides. Iterate for (id, place, question as an object).

    What is hidden, what does not end as images do, and links to folders are left out and counted. Nothing is
    opened here: an image that cannot be read is an error of its own.

    images: paths, sorted and each once: of a single folder relative to it, otherwise as the names have them.
    left_out: how many files and folders of which kind were left out; unread: why a folder could not be read.
    things: what a question asks to locate, by the question.

    An id is the image's path, with #1, #2, ... where there are several questions. Raises RequestError where
    there is no image.
    """

    key = "id"

    def __init__(self, names: Sequence[str], questions: Sequence[str], things: dict[str, str] | None = None):
        self.questions, self.things = list(dict.fromkeys(questions)), things or {}
        self.left_out, self.unread = Counter[str](), list[str]()
        self._folder = expanded(names[0]) if len(names) == 1 and os.path.isdir(expanded(names[0])) else ""
        self.name = names[0] if len(names) == 1 else f"{len(names)} names"
        paths = {path for name in names for path in self._found(name)}
        if self._folder:
            paths = {os.path.relpath(path, self._folder) for path in paths}
        # The order of code points is the same in any language and on any disk.
        self.images = sorted(Path(path).as_posix() for path in paths)
        if not self.images:
            why = f" ({self.said_left_out()})" if self.left_out else ""
            raise RequestError("; ".join([f"{self.name}: no images there{why}", *self.unread]))

    def __iter__(self) -> Iterator[tuple[str, tuple[int, int], dict[str, Any]]]:
        digits = len(str(len(self.questions)))
        for place, image in enumerate(self.images):
            for number, question in enumerate(self.questions):
                suffix = f"#{number + 1:0{digits}}" if len(self.questions) > 1 else ""
                yield image + suffix, (place, number), {"image": image, "question": question}

    def is_result(self, record: dict[str, Any]) -> bool:
        named = type(record["id"]) is str and "line" not in record
        return named and ("error" in record or record.keys() >= _ANSWER)

    def read(self, place: tuple[int, int]) -> dict[str, Any]:
        """The question at this place."""
        return {"image": self.images[place[0]], "question": self.questions[place[1]]}

    def part(self, entries: list[tuple], number: int, count: int) -> list[tuple]:
        """The entries (…, place) of one of `count` shards. An image is in the same shard wherever and
        whenever this is asked, whatever other images there are."""

        def shard(entry: tuple) -> int:
            digest = hashlib.sha256(self.images[entry[-1][0]].encode("utf-8", "surrogatepass")).digest()
            return int.from_bytes(digest[:8], "big") % count + 1

        return [entry for entry in entries if shard(entry) == number]

    def image_path(self, image: str) -> str:
        """Where an image is, in a form that is nothing but a path: no home and no URL."""
        path = os.path.normpath(os.path.join(self._folder, image))
        return os.path.abspath(path) if path.startswith("~") or ":" in path else path

    def said_left_out(self) -> str:
        """What was left out, for a person."""
        kinds = self.left_out.most_common(6)
        rest = self.left_out.total() - sum(count for _, count in kinds)
        listed = [f"{count} {kind}" for kind, count in kinds] + ([f"{rest} others"] if rest else [])
        return f"left out: {', '.join(listed)}"

    def _found(self, name: str) -> Iterator[str]:
        """The images that one name means."""
        path = expanded(name)
        matches = [path]
        if not os.path.lexists(path):
            matches = self._matching(Path(path)) if glob.has_magic(path) else []
            if not matches:
                raise RequestError(f"{name}: no such file or folder{nearest_file(path, folders=True)}")
        for match in matches:
            if os.path.isdir(match):
                yield from self._within(match)
            elif self._takes(os.path.basename(match), os.path.isfile(match) or os.path.islink(match)):
                yield os.path.normpath(match)

    def _matching(self, pattern: Path) -> list[str]:
        """What a glob matches, as a shell does: hidden names only where the pattern says so. `**` goes into
        no links to folders, which may go round in a circle."""
        parts = pattern.relative_to(pattern.anchor).parts
        parts = tuple(part if part == "**" else part.replace("**", "*") for part in parts)
        matches = []
        for match in Path(pattern.anchor).glob(str(Path(*parts))):
            hidden = {part for part in match.parts if part.startswith(".") and part != ".."}
            if hidden <= set(pattern.parts) or any(part[:1] == "." and "*" in part for part in pattern.parts):
                matches.append(str(match))
            else:
                self.left_out["hidden"] += 1
        return matches

    def _within(self, top: str) -> Iterator[str]:
        folders = [top]
        while folders:
            try:
                entries = list(os.scandir(folder := folders.pop()))
            except OSError as error:
                self.unread.append(one_line(error))
                continue
            for entry in entries:
                if entry.name.startswith("."):
                    self.left_out["hidden"] += 1
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_dir():
                    self.left_out["links to folders"] += 1
                elif self._takes(entry.name, entry.is_file() or entry.is_symlink()):
                    yield os.path.join(folder, entry.name)

    def _takes(self, name: str, is_file: bool) -> bool:
        """Whether a file is taken for an image; a link that leads nowhere is, as a person would see one."""
        if is_file and _is_image(name):
            return True
        self.left_out[
            (os.path.splitext(name)[1].lower() or "without an ending") if is_file else "no files"
        ] += 1
        return False


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
        self.results = ResultsFile(out, source.key, source.is_result)
        names = ("model", "images", "question")
        # Hashes, for a file of results may be large.
        answered = {
            record[source.key]: _hash(*map(record.get, names), self._recorded(record.get("options")))
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
        entries, foreign = list[tuple[int, Any, Any]](), set(answered)
        for position, (key, place, value) in enumerate(self.source):
            images, digest = [], None
            try:
                line = read_question(value or {})
                images = line.images
                digest = _hash(self.model, images, line.question, self.options_of(line))
            except RequestError:
                pass  # its result will report the error
            entries.append((first.setdefault(_hash(images), position) if images else position, key, place))
            if key in answered and digest == answered[key]:
                foreign.remove(key)
        if foreign:
            raise RequestError(
                f"{self.results.path}: the result of {self.source.key} {min(foreign)} is by another model, "
                f"to another question or with other options than this run of {self.source.name}; choose "
                f"another file"
            )
        return sorted(entries, key=itemgetter(0))

    def _recorded(self, options: Any) -> Any:
        """The options of a result; those of earlier versions say no dtype."""
        known = {key: self.options[key] for key in ("dtype",) if key in self.options}
        return known | options if isinstance(options, dict) else options

    def options_of(self, line: Line) -> dict[str, Any]:
        """The options of the batch, replaced by those that a line has itself."""
        return {**self.options, **line.options}


def _hash(*values: Any) -> int:
    return hash(json.dumps(values, sort_keys=True))
