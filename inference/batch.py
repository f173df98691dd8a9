"""A JSONL file of questions to a JSONL file of answers, a batch at a time, resumable.

    questions.jsonl   {"image": "boats.jpg", "question": "How many boats?", "id": 7, "max_new_tokens": 16}
    answers.jsonl     {"line": 1, "id": 7, "images": ["boats.jpg"], ..., "answers": ["three"], ...}

`images` takes a list, paths are relative to the questions' file, `system` is possible, too. A line that
cannot be answered gets {"line": n, "error": ...}, and the others are answered. Keys that mean nothing here
are kept under "other".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.errors import ImageError, PromptError
from data.inputs import EncodedConversation
from generation.decoding import Generated, GenerationOptions
from inference.answer import answer_rows, check_context, encode, prompt_tokens
from inference.checkpoint import Checkpoint, RequestError
from inference.results import fingerprint, keep_answers, read_results, to_json

KEYS = ("image", "images", "question", "id", "system", "max_new_tokens")
LINE_ERRORS = (PromptError, ImageError, RequestError)


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
    """What a run did. `seconds` and `new_tokens` are sums over the batches."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0
    new_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    unused_keys: set[str] = field(default_factory=set)

    def add(self, made: Generated) -> None:
        self.new_tokens += sum(made.lengths)
        for name, value in made.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def __str__(self) -> str:
        return f"{self.answered} answered, {self.failed} failed, {self.skipped} skipped (answered before)"


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number from 1, content) of every line that is not blank."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            if raw.strip():
                yield number, raw


def read_object(raw: bytes) -> dict[str, Any]:
    """Raises RequestError where a line is not a JSON object."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
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

    Making one reads and repairs the results, before any model is loaded.

    Raises:
        RequestError: the results belong to other questions or another model, or are no results.
        OSError: a file that cannot be read or written.
    """

    def __init__(self, questions: Path, out: Path, model: str):
        if questions.exists() and out.exists() and os.path.samefile(questions, out):
            raise RequestError(f"{out}: expected another file for the results than for the questions")
        self.questions, self.out, self.model = questions, out, model
        with questions.open("rb"):  # before a file for its results is made
            pass
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
        for number, raw in read_lines(self.questions):
            total += 1
            if number in answered and self._fingerprint(number, raw) == answered[number]:
                foreign.remove(number)
        if foreign:
            raise RequestError(
                f"{self.out}: expected answers by {self.model} to {self.questions}, but what it has for line "
                f"{min(foreign)} is by another model or to another question; choose another file for results"
            )
        return total

    def _fingerprint(self, number: int, raw: bytes) -> int | None:
        try:
            line = read_question(number, read_object(raw))
        except RequestError:
            return None
        return fingerprint(self.model, line.images, line.question)

    def run(
        self,
        checkpoint: Checkpoint,
        options: GenerationOptions,
        system: str | None = None,
        batch_size: int = 8,
        progress: bool = True,
    ) -> Summary:
        """Answer what has no answer yet, appending each result as it comes."""
        summary = Summary(skipped=len(self.answered))
        bar = tqdm(total=self.total, initial=summary.skipped, unit="question", disable=not progress)
        with bar, self.out.open("a", encoding="utf-8") as file:
            for record in self._records(checkpoint, options, system, batch_size, summary):
                file.write(to_json(record) + "\n")
                file.flush()
                if "error" in record:
                    summary.failed += 1
                else:
                    summary.answered += 1
                bar.update()
        return summary

    def _records(
        self,
        checkpoint: Checkpoint,
        options: GenerationOptions,
        system: str | None,
        size: int,
        summary: Summary,
    ) -> Iterator[dict[str, Any]]:
        """Results in the order of the questions, but for errors, which do not wait for their batch."""
        batch = Batch(checkpoint, options)
        for number, raw in read_lines(self.questions):
            if number in self.answered:
                continue
            value: dict[str, Any] = {}
            try:
                value = read_object(raw)
                line = read_question(number, value)
                row, limit = self._prepare(checkpoint, line, options, system)
            except LINE_ERRORS as error:
                yield {"line": number, **carried(value), "error": " ".join(str(error).split())}
                continue
            summary.unused_keys.update(carried(value).get("other", ()))
            if len(batch.lines) == size or not batch.has_room_for(row, limit):
                yield from self._answer(batch, summary)
                batch = Batch(checkpoint, options)
            batch.add(line, carried(value), row, limit)
        if batch.lines:
            yield from self._answer(batch, summary)

    def _prepare(
        self, checkpoint: Checkpoint, line: Line, options: GenerationOptions, system: str | None
    ) -> tuple[EncodedConversation, int]:
        limit = options.max_new_tokens
        if line.max_new_tokens is not None:
            try:
                limit = replace(options, max_new_tokens=line.max_new_tokens).max_new_tokens
            except ValueError as error:
                raise RequestError(str(error)) from None
        sources = [_beside(self.questions, image) for image in line.images]
        row = encode(checkpoint, sources, line.question, line.system if line.system is not None else system)
        check_context(checkpoint, row, limit)
        return row, limit

    def _answer(self, batch: Batch, summary: Summary) -> Iterator[dict[str, Any]]:
        results, made = answer_rows(batch.checkpoint, batch.rows, batch.limits, batch.options)
        summary.add(made)
        for line, kept, result in zip(batch.lines, batch.carried, results, strict=True):
            asked = {"model": self.model, "images": line.images, "question": line.question}
            yield {"line": line.number, **kept, **asked, **result}


class Batch:
    """Questions waiting to be answered together."""

    def __init__(self, checkpoint: Checkpoint, options: GenerationOptions):
        self.checkpoint, self.options = checkpoint, options
        self.lines: list[Line] = []
        self.carried: list[dict[str, Any]] = []
        self.rows: list[EncodedConversation] = []
        self.limits: list[int] = []

    def has_room_for(self, row: EncodedConversation, limit: int) -> bool:
        """Whether the longest prompt and the largest limit, whoever's they are, still fit the context."""
        longest = max(prompt_tokens(self.checkpoint, each) for each in (*self.rows, row))
        return longest + max(*self.limits, limit, 0) <= self.checkpoint.context

    def add(self, line: Line, kept: dict[str, Any], row: EncodedConversation, limit: int) -> None:
        self.lines.append(line)
        self.carried.append(kept)
        self.rows.append(row)
        self.limits.append(limit)


def _beside(questions: Path, image: str) -> str:
    """A path relative to the questions' file; a URL, a data: URL and an absolute path as they are."""
    if "://" in image[:16] or image[:5].lower() == "data:":
        return image
    return str(questions.parent / Path(image).expanduser())
