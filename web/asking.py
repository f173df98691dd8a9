"""A visitor's question on its way to its answers: checked, put to the model, shown while they are made.

desk = Desk(models, thread, visitors, limits)
async for view in desk.ask(visitor, Asked(images=("photo.png",), question="How many boats?", model=name)):
    show(view)

Every mistake ends in a view with one sentence; the desk goes on.
"""

from __future__ import annotations

import asyncio
import re
import time
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import OutOfMemoryError

from data.errors import ImageError, ProcessorError, PromptError, one_line
from data.images import TiledImage, load_image
from generation.options import CacheMemoryError, GenerationOptions, NotFiniteError
from inference.checkpoint import Checkpoint, RequestError
from inference.conversation import Conversation
from models.checkpoints import CheckpointError
from web.limits import PageLimits
from web.model_thread import ModelThread, Task
from web.models import Models
from web.visitors import Asked, Exchange, Visitor, Visitors

POLL = 0.02  # seconds between looks at what has been made
REDRAW = 0.1  # at most so often is an answer drawn anew, after its first words
ALIVE = 1.0  # at least so often a view is given, so that it shows when nobody takes it any more
STOPPED = "Stopped before the first word."
_FOR_PROGRAMS = re.compile(r" or raise ImageLimits\.\w+")
MISTAKES = (
    CheckpointError, ImageError, ProcessorError, PromptError, RequestError, NotFiniteError, CacheMemoryError
)  # fmt: skip


@dataclass(frozen=True)
class View:
    """What a page shows at one moment.

    log: questions and answers, the last one perhaps unfinished.
    notice: one sentence: a mistake, or what is being waited for. "" is none.
    failed: whether the notice is a mistake, and the question was not answered.
    made: figures of the last answer, once there are some: see `TurnReply.finish`.
    busy: whether an answer is being made.
    question: one that came to nothing or was taken back, to be put where it was typed.
    """

    log: list[Exchange]
    notice: str = ""
    failed: bool = False
    made: dict[str, Any] | None = None
    busy: bool = False
    question: str | None = None


@dataclass
class _Making:
    """One question in work. The thread of the models fills in `made`."""

    asked: Asked
    checkpoint: Checkpoint
    options: GenerationOptions
    began: float
    first_words: float | None = None  # seconds after the question
    made: dict[str, Any] = field(default_factory=dict)

    def take(self, task: Task, exchange: Exchange) -> bool:
        """Put what is new into the answers: whether these are the first words."""
        had_words = self.first_words is not None
        for number, piece in task.take():
            exchange.answers[number] += piece
            if piece and self.first_words is None:
                self.first_words = time.perf_counter() - self.began
        return self.first_words is not None and not had_words

    def figures(self) -> dict[str, Any]:
        """What is known so far: "first_words" in seconds; at the end what `TurnReply.finish` tells."""
        return {"first_words": self.first_words, **self.made}


class Desk:
    """See the module's docstring: what every tab of a page asks its questions through."""

    def __init__(self, models: Models, thread: ModelThread, visitors: Visitors, limits: PageLimits):
        self.models, self.thread, self.visitors, self.limits = models, thread, visitors, limits

    async def ask(self, visitor: Visitor, asked: Asked) -> AsyncGenerator[View, None]:
        """Answer a question. Another one, or closing the iteration, ends the answer at its next token."""
        began, checkpoint = time.perf_counter(), None
        try:
            async with _interrupted(visitor):
                visitor.cancelled, visitor.asking = False, asked
                try:
                    options = self.check(asked)
                    checkpoint = self.models.held(asked.model)
                    if checkpoint is None:
                        yield View(visitor.log, f"Opening {asked.model} …", busy=True)
                        checkpoint = await asyncio.to_thread(self.models.open, asked.model)
                    if visitor.cancelled:
                        visitor.unanswered = asked
                        yield View(visitor.log, STOPPED, question=asked.question)
                        return
                    making = _Making(asked, checkpoint, options, began)
                    async with aclosing(self._answer(visitor, making)) as views:
                        async for view in views:
                            yield view
                except Exception as error:  # in any case the page goes on
                    visitor.unanswered = asked
                    yield View(visitor.log, sentence(error), failed=True, question=asked.question)
                finally:
                    visitor.task = visitor.asking = None
        finally:
            self._let_go(visitor, checkpoint)

    def _let_go(self, visitor: Visitor, checkpoint: Checkpoint | None) -> None:
        """Of what is kept no longer: a visitor who left, a model that was dropped while it answered."""
        held = visitor.conversation
        if visitor.gone or (held is not None and not self.models.holds(held.checkpoint)):
            visitor.forget()
        if checkpoint is not None and not self.models.holds(checkpoint):
            self.visitors.close_model(checkpoint)
        self.visitors.make_room()

    async def undo(self, visitor: Visitor) -> View:
        """Take the last question back, which may be the one that is being answered."""
        asking = visitor.asking
        async with _interrupted(visitor):
            if asking is not None and asking is visitor.unanswered:  # it never came into the log
                visitor.unanswered = None
                return View(visitor.log, question=asking.question)
            if not visitor.log:
                return View([], "There is nothing to take back.", failed=True)
            taken = visitor.take_back()
            return View(visitor.log, question=taken.question)

    async def clear(self, visitor: Visitor) -> View:
        """Forget everything."""
        async with _interrupted(visitor):
            visitor.log.clear()
            visitor.images = ()
            visitor.forget()
            return View(visitor.log)

    def check(self, asked: Asked) -> GenerationOptions:
        """Refuse what shows without a model."""
        limits = self.limits
        self.models.check(asked.model)
        if not asked.question.strip():
            raise PromptError("Type a question first: the field is empty.")
        if len(asked.question) > limits.max_characters:
            raise PromptError(
                f"question: expected at most {limits.max_characters:,} characters, "
                f"got {len(asked.question):,}"
            )
        if len(asked.images) > limits.max_images:
            raise ImageError(
                f"images: expected at most {limits.max_images} at once, got {len(asked.images)}; "
                "take some away"
            )
        return asked.options(limits)

    def _begin(self, visitor: Visitor, asked: Asked) -> Exchange:
        """The question appears, with its images where they are new."""
        shown = asked.images if not visitor.log or asked.images != visitor.images else ()
        exchange = Exchange(asked.question, shown, asked.images, [""] * asked.answers)
        visitor.log.append(exchange)
        del visitor.log[: -self.limits.max_turns]
        return exchange

    async def _answer(self, visitor: Visitor, making: _Making) -> AsyncGenerator[View, None]:
        """The question and its answers as they grow; an answer without a word does not stay."""
        exchange = self._begin(visitor, making.asked)
        task = visitor.task = self.thread.begin(lambda: self._steps(visitor, making))
        drawn, shown = 0.0, ("", 0)
        try:
            while not task.ended:
                first = making.take(task, exchange)
                now, shows = time.perf_counter(), (waiting(task), sum(map(len, exchange.answers)))
                if first or now - drawn > (ALIVE if shows == shown else REDRAW):
                    drawn, shown = now, shows
                    yield View(visitor.log, shows[0], made=making.figures(), busy=True)
                await asyncio.sleep(POLL)
            making.take(task, exchange)
            task.result()
        finally:
            task.cancel()
            while not task.ended:
                await asyncio.sleep(POLL)
            if making.made.get("kept"):
                exchange.ended, visitor.images = making.made["stop_reasons"], making.asked.images
            else:
                visitor.unanswered = making.asked
                if exchange in visitor.log:
                    visitor.log.remove(exchange)
        if exchange.ended:
            yield View(visitor.log, made=making.figures())
        else:
            yield View(visitor.log, STOPPED, question=making.asked.question)

    def _steps(self, visitor: Visitor, making: _Making) -> Generator[tuple[int, str], None, None]:
        """In the thread of the models: images are opened, one at a time, and the answers made."""
        asked, before = making.asked, visitor.conversation
        images: list[TiledImage] = []
        if before is not None and asked.remember and self._goes_on(before, visitor, making):
            conversation = before
        else:
            conversation = self.visitors.conversation(making.checkpoint, before)
            for image in asked.images:
                images.append(conversation.image(self.load(image)))
                yield 0, ""
        visitor.conversation = conversation
        with conversation.send(asked.question, images, making.options) as reply:
            try:
                yield from reply.steps()
            finally:
                reply.close()
                options = making.options
                more = {"kept": reply.kept, "sampled": not options.greedy, "seed": options.seed}
                making.made = reply.finish() | more

    @staticmethod
    def _goes_on(before: Conversation, visitor: Visitor, making: _Making) -> bool:
        """Whether a question can follow the last one: same model, same images."""
        same = before.checkpoint is making.checkpoint and visitor.images == making.asked.images
        return same and bool(before.turns)

    def load(self, image: str):
        """An uploaded file, within the limits of this page."""
        path = Path(image)
        try:
            with path.open("rb") as file:
                return load_image(file, self.limits.images, name=repr(path.name))
        except FileNotFoundError:
            raise ImageError(f"{path.name!r} is not kept here any more: add it again") from None


@asynccontextmanager
async def _interrupted(visitor: Visitor) -> AsyncIterator[None]:
    """The visitor's answer ended and shown; nobody asks meanwhile."""
    visitor.cancel()
    async with visitor.busy:
        yield


def waiting(task: Task) -> str:
    """What there is to say while nothing happens."""
    before = task.before
    if not before:
        return ""
    return f"Many are asking just now: you are number {before} of those who wait."


def sentence(error: Exception) -> str:
    """A mistake in words. One of our own is not explained to visitors: its traceback goes to the terminal.
    Nor are they told of limits that only a program can change."""
    if isinstance(error, OutOfMemoryError | MemoryError):
        return (
            "There is not enough memory for this: ask for fewer or shorter answers, or show smaller images."
        )
    if not isinstance(error, MISTAKES):
        traceback.print_exception(error)
        return "Something broke here that should not have. Others are not affected; ask again."
    return _FOR_PROGRAMS.sub("", one_line(error))
