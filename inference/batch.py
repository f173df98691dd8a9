"""A batch of questions, several at a time. Each result is appended at once; at the end they are sorted.

    files = BatchFiles(Path("questions.jsonl"), Path("answers.jsonl"), name, options)
    print(run_batch(files, open_checkpoint(name), GenerationOptions()))

Questions about the same images follow one another, wherever they stand in the file, so that each image is
encoded and prefilled once. If a run is killed, the next one answers what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from data.errors import one_line
from data.processor import EncodedConversation
from generation.decoding import GenerationOptions
from generation.scheduler import LazyRequest, Request, RequestOutput, Scheduler
from inference.answer import answers_of, encode, requests_for
from inference.batch_files import BatchFiles, Line, passed_on, read_object, read_question
from inference.checkpoint import Checkpoint, RequestError


@dataclass
class Summary:
    """Counts of a run, and the seconds that each kind of work took."""

    answered: int = 0
    failed: int = 0
    skipped: int = 0
    new_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    unused_keys: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.answered} answered, {self.failed} failed, {self.skipped} skipped (answered before)"


def run_batch(
    files: BatchFiles,
    checkpoint: Checkpoint,
    options: GenerationOptions,
    system: str | None = None,
    batch_size: int = 8,
    progress: bool = True,
    log: Callable[[str], None] = lambda text: None,
) -> Summary:
    """Answer the questions that have no answer yet, `batch_size` answers at a time.

    `log` gets one line about memory before any work. Raises RequestError if the memory does not suffice.
    """
    try:
        scheduler = Scheduler(checkpoint.model, batch_size, decode_step=checkpoint.decode_step)
    except ValueError as error:
        raise RequestError(f"{error} (--batch-size)") from None
    log(str(scheduler.budget))
    summary = Summary(skipped=len(files.answered))
    bar = tqdm(total=files.total, initial=summary.skipped, unit="question", disable=not progress)
    with bar, files.results.appending() as write:
        for done in scheduler.run(_requests(files, checkpoint, options, system)):
            question: Question = done.key[0]
            if not question.take(done):
                continue
            write(question.record())
            if question.error is None:
                summary.answered += 1
                summary.unused_keys.update(passed_on(question.value).get("other", ()))
            else:
                summary.failed += 1
            bar.update()
    files.results.compact(errors=True, ordered=True)
    summary.new_tokens, summary.seconds = scheduler.stats.new_tokens, scheduler.stats.seconds
    return summary


def _requests(
    files: BatchFiles, checkpoint: Checkpoint, options: GenerationOptions, system: str | None
) -> Iterator[LazyRequest]:
    """A request for each answer. Its question is read when the scheduler has room for it."""
    with files.questions.open("rb") as file:
        for number, place in files.by_images():
            file.seek(place)
            question = Question(files, checkpoint, options, system, number, file.readline())
            for answer in range(options.num_return_sequences):
                yield LazyRequest((question, answer), partial(question.request, answer))


class Question:
    """Line `number` of a batch, on its way to its answers. `error` is why it has none."""

    def __init__(
        self,
        files: BatchFiles,
        checkpoint: Checkpoint,
        options: GenerationOptions,
        system: str | None,
        number: int,
        raw: bytes,
    ):
        self.files, self.checkpoint, self.options, self.system = files, checkpoint, options, system
        self.number, self._raw = number, raw
        self.value: dict[str, Any] = {}
        self.line: Line | None = None
        self.error: Exception | None = None
        self._row: EncodedConversation | None = None
        self._requests: list[Request | None] = []
        self._ids: list[list[int]] = [[] for _ in range(options.num_return_sequences)]
        self._missing = options.num_return_sequences

    def request(self, answer: int) -> Request:
        """The request for one of the answers. Each is given away once, so that its tiles are not kept."""
        if self.error is not None:
            raise self.error
        if self._row is None:
            self._prepare()
        request, self._requests[answer] = self._requests[answer], None
        assert request is not None, "each request is made once"
        return request

    def _prepare(self) -> None:
        self.value = read_object(self._raw)
        self.line = line = read_question(self.value)
        limit = self.options.max_new_tokens
        if line.max_new_tokens is not None:
            try:
                limit = replace(self.options, max_new_tokens=line.max_new_tokens).max_new_tokens
            except ValueError as error:
                raise RequestError(str(error)) from None
        self.checkpoint.check_images(len(line.images))
        images = [self.files.image_path(image) for image in line.images]
        system = self.system if line.system is None else line.system
        row = encode(self.checkpoint, images, line.question, system)
        self._requests = [*requests_for(self.checkpoint, row, limit, self.options)]
        self._row = replace(row, tiles=None)

    def take(self, done: RequestOutput) -> bool:
        """Record one of the answers; returns whether it was the last one missing."""
        self._ids[done.key[1]] = done.token_ids
        self.error = self.error or done.error
        self._missing -= 1
        return self._missing == 0

    def record(self) -> dict[str, Any]:
        """The result."""
        result = {"line": self.number, **passed_on(self.value)}
        if self.error is not None:
            return result | {"error": one_line(self.error)}
        assert self.line is not None and self._row is not None, "without an error there is a question"
        request = {"model": self.files.model, "images": self.line.images, "question": self.line.question}
        answers = answers_of(self.checkpoint, self._row, self._ids)
        return result | request | answers | {"options": self.files.options_of(self.line)}
