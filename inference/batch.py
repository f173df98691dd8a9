"""A JSONL file of questions to a JSONL file of answers, several at a time, resumable.

    questions.jsonl   {"image": "boats.jpg", "question": "How many boats?", "id": 7, "max_new_tokens": 16}
    answers.jsonl     {"line": 1, "id": 7, "images": ["boats.jpg"], ..., "answers": ["three"], ...}

`images` takes a list, paths are relative to the questions' file, `system` is possible, too. A line that
cannot be answered gets {"line": n, "error": ...}, and the others are answered. Keys that mean nothing here
are kept under "other".

Results stand in the order in which answers were ready. Lines about the same pictures are taken one after
another, wherever they stand, so that a picture is encoded and prefilled once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.errors import one_line
from data.files import naming
from data.inputs import EncodedConversation
from data.lines import MAX_LINE, is_too_long, line_at, lines_of, parse_line
from generation.batching import Scheduler
from generation.decoding import GenerationOptions
from generation.requests import Completed, Deferred, Request
from inference.answer import answers_of, check_context, encode, requests_for
from inference.checkpoint import Checkpoint, RequestError
from inference.results import KEPT, fingerprint, keep_answers, read_results, to_json

KEYS = ("image", "images", "question", "id", "system", "max_new_tokens")


@dataclass(frozen=True)
class Line:
    """A line of the questions' file, checked; `images` as written there."""

    number: int
    question: str
    images: list[str]
    system: str | None
    max_new_tokens: int | None


@dataclass
class Summary:
    """What a run did. `seconds` are those of the whole run, by what they went into."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0
    new_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    unused_keys: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.answered} answered, {self.failed} failed, {self.skipped} skipped (answered before)"


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


class BatchJob:
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
        with questions.open("rb"):  # before a file for its results is made
            pass
        if not questions.is_file():
            raise RequestError(
                f"{questions}: expected a file, which can be read twice, got a pipe or a device"
            )
        earlier = read_results(out)
        self.answered = earlier.answered.keys()
        self.total = self._compare(earlier.answered)
        if earlier.needs_cleaning:
            keep_answers(out)

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
        return fingerprint(self.model, line.images, line.question, self._options_of(line))

    def _options_of(self, line: Line) -> dict[str, Any]:
        """The options, with what a line says itself."""
        own = {"system": line.system, "max_new_tokens": line.max_new_tokens}
        return {**self.options, **{name: value for name, value in own.items() if value is not None}}

    def run(
        self,
        checkpoint: Checkpoint,
        options: GenerationOptions,
        system: str | None = None,
        batch_size: int = 8,
        progress: bool = True,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Summary:
        """Answer what has no answer yet, appending each result as it comes.

        Args:
            batch_size: answers in work at the same time.
            tell: gets one line about memory before any work.

        Raises:
            RequestError: the memory does not suffice for so many.
        """
        try:
            scheduler = Scheduler(checkpoint.model, batch_size, decode_step=checkpoint.decode_step)
        except ValueError as error:
            raise RequestError(f"{error} (--batch-size)") from None
        tell(str(scheduler.plan()))
        summary = Summary(skipped=len(self.answered))
        bar = tqdm(total=self.total, initial=summary.skipped, unit="question", disable=not progress)
        with bar, naming(self.out, KEPT), self.out.open("a", encoding="utf-8") as file:
            for done in scheduler.run(self._requests(checkpoint, options, system)):
                question: Question = done.key[0]
                if not question.take(done):
                    continue
                record = question.record(checkpoint, self.model)
                if question.line is not None and question.error is None:
                    record["options"] = self._options_of(question.line)
                file.write(to_json(record) + "\n")
                file.flush()
                if question.error is None:
                    summary.answered += 1
                    summary.unused_keys.update(carried(question.value).get("other", ()))
                else:
                    summary.failed += 1
                bar.update()
        summary.new_tokens, summary.seconds = scheduler.stats.new_tokens, scheduler.stats.seconds
        return summary

    def _requests(
        self, checkpoint: Checkpoint, options: GenerationOptions, system: str | None
    ) -> Iterator[Deferred]:
        """For each question without an answer as many requests as it is to have answers."""

        def prepare(line: Line) -> tuple[EncodedConversation, list[Request]]:
            row, limit = self._prepare(checkpoint, line, options, system)
            return row, requests_for(checkpoint, row, limit, options)

        with self.questions.open("rb") as file:
            for number, place in self._by_pictures():
                question = Question(number, line_at(file, place), options.num_return_sequences, prepare)
                for answer in range(options.num_return_sequences):
                    yield Deferred((question, answer), partial(question.request, answer))

    def _by_pictures(self) -> list[tuple[int, int]]:
        """(number, place in the file) of each line without an answer, those about the same pictures together,
        otherwise in their order."""
        first: dict[int, int] = {}  # hash of the pictures -> the first line about them
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

    def _prepare(
        self, checkpoint: Checkpoint, line: Line, options: GenerationOptions, system: str | None
    ) -> tuple[EncodedConversation, int]:
        limit = options.max_new_tokens
        if line.max_new_tokens is not None:
            try:
                limit = replace(options, max_new_tokens=line.max_new_tokens).max_new_tokens
            except ValueError as error:
                raise RequestError(str(error)) from None
        checkpoint.check_images(len(line.images))
        sources = [_beside(self.questions, image) for image in line.images]
        row = encode(checkpoint, sources, line.question, line.system if line.system is not None else system)
        check_context(checkpoint, row, limit)
        return row, limit


class Question:
    """A line on its way to its answers. It is read when the first of them is begun.

    Args:
        number: of the line.
        raw: its content.
        answers: how many it is to have.
        prepare: makes the encoded question and a request for each answer.
    """

    def __init__(self, number: int, raw: bytes, answers: int, prepare: Callable):
        self.number, self._raw, self._prepare = number, raw, prepare
        self.value: dict[str, Any] = {}
        self.line: Line | None = None
        self.error: Exception | None = None
        self._row: EncodedConversation | None = None
        self._requests: list[Request | None] = []
        self._ids: list[list[int]] = [[] for _ in range(answers)]
        self._missing = answers

    def request(self, answer: int) -> Request:
        """The request for one of the answers; once, so that its tiles are not kept. Raises what is wrong."""
        if self.error is not None:
            raise self.error
        if self._row is None:
            self.value = read_object(self._raw)
            self.line = read_question(self.number, self.value)
            row, self._requests = self._prepare(self.line)
            self._row = replace(row, tiles=None)
        request, self._requests[answer] = self._requests[answer], None
        assert request is not None, "each request is made once"
        return request

    def take(self, done: Completed) -> bool:
        """Note one of the answers: whether it was the last one missing."""
        self._ids[done.key[1]] = done.token_ids
        self.error = self.error or done.error
        self._missing -= 1
        return self._missing == 0

    def record(self, checkpoint: Checkpoint, model: str) -> dict[str, Any]:
        """The line of the results."""
        begin = {"line": self.number, **carried(self.value)}
        if self.error is not None:
            return begin | {"error": one_line(self.error)}
        assert self.line is not None and self._row is not None, "without an error there is a question"
        asked = {"model": model, "images": self.line.images, "question": self.line.question}
        return begin | asked | answers_of(checkpoint, self._row, self._ids)


def _beside(questions: Path, image: str) -> str:
    """A path relative to the questions' file; a URL, a data: URL, ~ and an absolute path as they are."""
    if "://" in image[:16] or image[:5].lower() == "data:" or image.startswith("~"):
        return image
    return str(questions.parent / image)
