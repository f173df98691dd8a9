"""A batch of questions, several at a time. Each result is appended at once; at the end they are sorted.

    files = BatchFiles(QuestionLines(Path("questions.jsonl")), Path("answers.jsonl"), name, {})
    print(run_batch(files, open_checkpoint(name), GenerationOptions(), system=None, batch_size=8, log=print))

Questions about the same images follow one another, wherever they stand in the file, so that each image is
opened, encoded and prefilled once, and a tile that images have in common is encoded once. If a run is killed,
the next one answers what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from tqdm import tqdm

from data.processor import EncodedConversation, Processor
from data.tiles import Visual
from generation.options import GenerationOptions
from generation.requests import LazyRequest, Request, RequestOutput
from generation.scheduler import Scheduler
from inference.answer import answers_of, encode
from inference.asking import requests_for
from inference.batch_files import BatchFiles, Line, passed_on, read_question
from inference.boxes import located
from inference.checkpoint import PACKED, Checkpoint, RequestError, pick_device, pixel_budget
from inference.grammar import grammar_of
from inference.thinking import Think, held_to
from inference.votes import pick
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
    unused_keys: set[str] = field(default_factory=set)

    @property
    def failed(self) -> int:
        return len(self.failures)

    def __str__(self) -> str:
        return f"{self.answered} answered, {self.failed} failed, {self.skipped} skipped (answered before)"


def computed_with(
    source: str, revision: str | None, device: str, dtype: str, max_pixels: int | None
) -> dict[str, Any]:
    """The dtype of a checkpoint opened with these and, where images are taken whole, the budget of their
    pixels. Weights are not read."""
    on, opened = pick_device(device), open_files(source, revision)
    if dtype not in PACKED:
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


def run_batch(
    files: BatchFiles,
    checkpoint: Checkpoint,
    options: GenerationOptions,
    system: str | None,
    batch_size: int,
    log: Callable[[str], None],
    box_format: str | None = None,
    pick_by: str | None = None,
) -> Summary:
    """Answer the questions that have no answer yet, `batch_size` answers at a time. Boxes in answers are read
    in the form called `box_format`, by default in the model's own. Of several answers to each one is picked
    by `pick_by` (see `inference.votes`).

    `log` gets one line about memory before any work. Raises RequestError if the memory does not suffice.
    """
    scheduler = open_scheduler(checkpoint, batch_size)
    log(scheduler.budget)
    summary = Summary(skipped=files.total - len(files.missing))
    bar = tqdm(total=files.total, initial=summary.skipped, unit="question")
    with bar, files.results.appending() as write:

        @lru_cache(maxsize=1)
        def tiled(images: tuple[str, ...]) -> list[Visual]:
            """The images of a question, which the next questions may be about, too."""
            return [visual for image in images for visual in checkpoint.processor.visuals(image)]

        def requests() -> Iterator[LazyRequest]:
            """A request for each answer. Its question is read when the scheduler has room for it."""
            for key, place in files.missing:
                ask = partial(files.source.read, place)
                question = _Question(key, ask, files, checkpoint, options, system, tiled, box_format, pick_by)
                for answer in range(options.num_return_sequences):
                    yield LazyRequest((question, answer), question.next_request)

        for done in scheduler.run(requests()):
            question, answer = done.key
            question.error, question.done[answer] = question.error or done.error, done
            if len(question.done) < options.num_return_sequences:
                continue
            write(record := question.record())
            summary.answered += question.error is None
            if question.error is not None:
                summary.failures.append(f"{files.source.key} {question.key}: {record['error']}")
            summary.unused_keys.update(passed_on(question.value).get("other", ()))
            bar.update()
    files.results.compact(errors=True, ordered=True)
    summary.new_tokens, summary.seconds = scheduler.stats.new_tokens, scheduler.stats.seconds
    return summary


@dataclass(eq=False)
class _Question:
    """A question of a batch, on its way to its answers.

    key: names it in the results. read: gives it as an object.
    tiled: opens its images and cuts them into tiles.
    requests: for its answers. Each is given away once, so that its tiles are not kept.
    done: the answers so far, by their number. error: why there are none.
    """

    key: int | str
    read: Callable[[], dict[str, Any]]
    files: BatchFiles
    checkpoint: Checkpoint
    options: GenerationOptions
    system: str | None
    tiled: Callable[[tuple[str, ...]], list[Visual]]
    box_format: str | None
    pick_by: str | None
    value: dict[str, Any] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    done: dict[int, RequestOutput] = field(default_factory=dict)
    error: Exception | None = None
    asked: tuple[Line, EncodedConversation] | None = None

    def next_request(self) -> Request:
        if self.error is not None:
            raise self.error
        if self.asked is None:
            self.value = self.read()
            line = read_question(self.value)
            settings = {"system": self.system, "max_new_tokens": self.options.max_new_tokens} | line.options
            limit = replace(self.options, max_new_tokens=settings["max_new_tokens"]).max_new_tokens
            self.checkpoint.check_images(len(line.images))
            images = self.tiled(tuple(self.files.source.image_path(image) for image in line.images))
            think = isinstance(self.options.constraint, Think)
            row = encode(self.checkpoint, images, line.question, settings["system"], think)
            if (grammar := grammar_of(settings.get("schema"), settings.get("choices"))) is not None:
                self.options = held_to(self.options, self.checkpoint.forms.constraint(grammar))
            self.requests = requests_for(self.checkpoint, row, limit, self.options)
            self.asked = line, replace(row, parts=None)
        return self.requests.pop(0)

    def record(self) -> dict[str, Any]:
        """The result."""
        result = {self.files.source.key: self.key, **passed_on(self.value)}
        if self.error is not None:
            return result | {"error": one_line(self.error)}
        assert self.asked is not None, "without an error there is a question"
        line, row = self.asked
        result |= {"model": self.files.model, "images": line.images, "question": line.question}
        done = [self.done[number] for number in sorted(self.done)]
        ids, decisions = [one.token_ids for one in done], [one.decision for one in done]
        answers = answers_of(self.checkpoint, row, ids, self.options, decisions)
        if len(done) == 1:
            said = self.box_format or self.checkpoint.processor.coordinates
            thing = self.files.source.things.get(line.question, "")
            answers |= located(said, row.sizes, answers["answers"][0], thing)
        pixels = self.checkpoint.pixels(row, False, self.box_format)
        answers["answers"] = [pixels.whole(one) for one in answers["answers"]]
        # With so few digits a line is the same in whatever company it was answered.
        kept = (one.confidence for one in done)
        confidences = [one if one is None else round(one, 4) for one in kept]
        if choices := answers.get("probabilities"):
            answers["probabilities"] = [{text: round(one, 4) for text, one in of.items()} for of in choices]
        for name in {"probability_mass", "expected_value"} & answers.keys():
            answers[name] = [round(one, 4) for one in answers[name]]
        answers["confidences"] = confidences
        if self.pick_by:
            sure = [one or 0.0 for one in confidences]
            answers["picked"] = pick(answers["answers"], sure, self.pick_by)
        return result | answers | {"options": self.files.options_of(line)}
