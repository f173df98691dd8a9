"""A batch of questions, several at a time. Each result is appended at once; at the end they are sorted.

    files = BatchFiles(questions_of_lines(Path("questions.jsonl")), Path("answers.jsonl"), name, {})
    print(Batch(files, open_checkpoint(name), GenerationOptions(), system=None).run(print))

Questions about the same images follow one another, wherever they stand in the file, so that each image is
opened, encoded and prefilled once, and a tile that images have in common is encoded once. If a run is killed,
the next one answers what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from tqdm import tqdm

from data.processor import EncodedConversation, Processor
from data.tiles import Visual
from generation.options import GenerationOptions
from generation.requests import LazyRequest, Request, RequestOutput
from generation.scheduler import Scheduler
from inference.answer import answers_of, encode
from inference.batch_files import BatchFiles, Line, Value, passed_on, read_question
from inference.boxes import located
from inference.checkpoint import PACKED, Checkpoint, RequestError, kept_formats, pick_device, pixel_budget
from inference.forms import requests_for
from inference.grammar import grammar_of
from inference.thinking import Think, held_to
from messages import one_line
from models.checkpoints.load import resolve_dtype
from models.checkpoints.sources import open_files


@dataclass
class Summary:
    """Counts of a run, and the seconds that each kind of work took."""

    answered: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    new_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        failed = len(self.failures)
        return f"{self.answered} answered, {failed} failed, {self.skipped} skipped (answered before)"


def computed_with(
    source: str, revision: str | None, device: str, dtype: str, max_pixels: int | None
) -> dict[str, Any]:
    """The dtype of a checkpoint opened with these and, where images are taken whole, the budget of their
    pixels. Weights are not read."""
    on, opened = pick_device(device), open_files(source, revision)
    if formats := kept_formats(opened, dtype, on):
        dtype = ", ".join(formats)
    elif dtype not in PACKED:
        dtype = str(resolve_dtype(dtype, opened.config, on)).removeprefix("torch.")
    budget = Processor.from_pretrained(opened, max_pixels=pixel_budget(on, max_pixels)).images.budget
    return {"dtype": dtype} if budget is None else {"dtype": dtype, "max_pixels": budget}


def open_scheduler(checkpoint: Checkpoint, batch_size: int) -> Scheduler:
    """A scheduler for so many answers at a time, which encodes tiles that images have in common once. Raises
    RequestError where memory does not suffice for them."""
    step, features = checkpoint.decode_step, checkpoint.features
    try:
        return Scheduler(checkpoint.model, batch_size, step, features, prefixes=checkpoint.prefixes)
    except ValueError as error:
        raise RequestError(f"{error} (--batch-size)") from None


@dataclass(frozen=True)
class Batch:
    """A batch of questions and how they are asked: each `batch_size` answers at a time.

    box_format: the form that boxes in answers are read in, None for the model's own.
    """

    files: BatchFiles
    checkpoint: Checkpoint
    options: GenerationOptions
    system: str | None
    batch_size: int = 8
    box_format: str | None = None

    def run(self, log: Callable[[str], None]) -> Summary:
        """Answer the questions that have no answer yet.

        `log` gets one line about memory before any work. Raises RequestError if the memory does not suffice.
        """
        files, count = self.files, self.options.num_return_sequences
        scheduler = open_scheduler(self.checkpoint, self.batch_size)
        log(str(scheduler.cache))
        summary = Summary(skipped=files.total - len(files.missing))
        bar = tqdm(total=files.total, initial=summary.skipped, unit=files.source.noun)
        with bar, files.results.appending() as write:
            for done in scheduler.run(self._requests()):
                question, answer = done.key
                question.error, question.done[answer] = question.error or done.error, done
                if len(question.done) < count:
                    continue
                write(record := question.record())
                self.written(record)
                summary.answered += question.error is None
                if question.error is not None:
                    summary.failures.append(f"{files.source.key} {question.key}: {record['error']}")
                bar.update()
        files.results.compact(errors=True, ordered=True)
        summary.new_tokens, summary.seconds = scheduler.stats.new_tokens, scheduler.stats.seconds
        return summary

    def written(self, record: dict[str, Any]) -> None:
        """What follows from a result that has been written."""

    def _requests(self) -> Iterator[LazyRequest]:
        """A request for each answer. Its question is read when the scheduler has room for it."""

        @lru_cache(maxsize=1)
        def tiled(images: tuple[str, ...]) -> list[Visual]:
            """The images of a question, which the next questions may be about, too."""
            return [visual for image in images for visual in self.checkpoint.processor.visuals(image)]

        for key, value in self.files.missing:
            question = Question(self, key, value, tiled)
            for answer in range(self.options.num_return_sequences):
                yield LazyRequest((question, answer), question.next_request)


@dataclass(eq=False)
class Question:
    """A question of a batch, on its way to its answers.

    key: names it in the results. value: as an object. tiled: opens its images and cuts them.
    requests: for its answers. Each is given away once, so that its tiles are not kept.
    done: the answers so far, by their number. error: why there are none.
    """

    batch: Batch
    key: int | str
    value: Value
    tiled: Callable[[tuple[str, ...]], list[Visual]]
    requests: list[Request] = field(default_factory=list)
    done: dict[int, RequestOutput] = field(default_factory=dict)
    error: Exception | None = None
    asked: tuple[Line, EncodedConversation, GenerationOptions] | None = None

    def next_request(self) -> Request:
        if self.error is not None:
            raise self.error
        if self.asked is None:
            batch, source = self.batch, self.batch.files.source
            checkpoint, options = batch.checkpoint, batch.options
            line = read_question(self.value)
            own = {"system": batch.system, "max_new_tokens": options.max_new_tokens} | line.options
            options = replace(options, max_new_tokens=own["max_new_tokens"])
            checkpoint.check_images(len(line.images))
            images = self.tiled(tuple(map(source.image_path, line.images)))
            think = isinstance(options.constraint, Think)
            row = encode(checkpoint, images, line.question, own["system"], think)
            if (grammar := grammar_of(own.get("schema"), own.get("choices"))) is not None:
                options = held_to(options, checkpoint.forms.constraint(grammar))
            self.requests = requests_for(checkpoint, row, options.max_new_tokens, options)
            self.asked = line, replace(row, parts=None), options
        return self.requests.pop(0)

    def record(self) -> dict[str, Any]:
        """The result."""
        batch, source = self.batch, self.batch.files.source
        result = {source.key: self.key, **passed_on(self.value)}
        if self.error is not None:
            return result | {"error": one_line(self.error)}
        assert self.asked is not None, "without an error there is a question"
        (line, row, options), checkpoint = self.asked, batch.checkpoint
        result |= {"model": batch.files.model, "images": line.images, "question": line.question}
        done = [self.done[number] for number in sorted(self.done)]
        ids, decisions = [one.token_ids for one in done], [one.decision for one in done]
        answers = answers_of(checkpoint, row, ids, options, decisions)
        if len(done) == 1:
            said = batch.box_format or checkpoint.processor.coordinates
            answers |= located(said, row.sizes, answers["answers"][0], source.things.get(line.question, ""))
        pixels = checkpoint.pixels(row, False, batch.box_format)
        answers["answers"] = [pixels.whole(one) for one in answers["answers"]]
        answers["confidences"] = [one.confidence for one in done]
        # With so few digits a line is the same in whatever company it was answered.
        for name in {"confidences", "probabilities", "probability_mass", "expected_value"} & answers.keys():
            answers[name] = rounded(answers[name])
        return result | answers | {"options": batch.files.options_of(line)}


def rounded(value: Any) -> Any:
    """The numbers in lists and dicts, to four digits."""
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return value if value is None else round(value, 4)
