"""A batch of questions, several at a time: each result is appended as it comes, and put in order at the end.

    files = BatchFiles(Path("questions.jsonl"), Path("answers.jsonl"), name, options)
    print(BatchJob(files).run(open_checkpoint(name), GenerationOptions()))

Lines about the same images are taken one after another, wherever they stand, so that an image is encoded
and prefilled once. A run that was killed leaves the results in the order in which they were ready; the next
one goes on from there, and ends with all of them in the order of the questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from data.errors import one_line
from data.inputs import EncodedConversation
from data.lines import line_at
from generation.decoding import GenerationOptions
from generation.requests import Completed, Deferred, Request
from generation.scheduler import Scheduler
from inference.answer import answers_of, check_context, encode, requests_for
from inference.batch_files import BatchFiles, Line, carried, read_object, read_question
from inference.checkpoint import Checkpoint, RequestError


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


class BatchJob:
    """The questions of `files` that have no answer yet, put to a model."""

    def __init__(self, files: BatchFiles):
        self.files = files

    def run(
        self,
        checkpoint: Checkpoint,
        options: GenerationOptions,
        system: str | None = None,
        batch_size: int = 8,
        progress: bool = True,
        tell: Callable[[str], None] = lambda text: None,
    ) -> Summary:
        """Answer what has no answer yet.

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
        files = self.files
        summary = Summary(skipped=len(files.answered))
        bar = tqdm(total=files.total, initial=summary.skipped, unit="question", disable=not progress)
        with bar, files.results.appending() as write:
            for done in scheduler.run(self._requests(checkpoint, options, system)):
                question: Question = done.key[0]
                if not question.take(done):
                    continue
                record = question.record(checkpoint, files.model)
                if question.line is not None and question.error is None:
                    record["options"] = files.options_of(question.line)
                write(record)
                if question.error is None:
                    summary.answered += 1
                    summary.unused_keys.update(carried(question.value).get("other", ()))
                else:
                    summary.failed += 1
                bar.update()
        files.results.compact(errors=True, ordered=True)
        summary.new_tokens, summary.seconds = scheduler.stats.new_tokens, scheduler.stats.seconds
        return summary

    def _requests(
        self, checkpoint: Checkpoint, options: GenerationOptions, system: str | None
    ) -> Iterator[Deferred]:
        """For each question without an answer as many requests as it is to have answers."""

        def prepare(line: Line) -> tuple[EncodedConversation, list[Request]]:
            row, limit = self._prepare(checkpoint, line, options, system)
            return row, requests_for(checkpoint, row, limit, options)

        with self.files.questions.open("rb") as file:
            for number, place in self.files.by_images():
                question = Question(number, line_at(file, place), options.num_return_sequences, prepare)
                for answer in range(options.num_return_sequences):
                    yield Deferred((question, answer), partial(question.request, answer))

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
        sources = [self.files.place_of(image) for image in line.images]
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
