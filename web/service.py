"""Answers to visitors' questions: one queue, one thread in which all models work, bounds for every visitor.

    service = Service(Models(["checkpoints/ocelli-shapes"]))
    visitor = service.visitor("a session")
    request = AskRequest(("photo.png",), "How many boats?", "checkpoints/ocelli-shapes")
    async for view in service.ask(visitor, request):
        show(view)

Work is a generator. Up to `AT_ONCE` of them take turns in the thread of the models; the others wait in the
order in which they came. Every error ends in a view with one sentence, and the service goes on. A service
belongs to one event loop; only `close` and `close_model` may be called elsewhere.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from torch import OutOfMemoryError

from data.errors import ImageError, PromptError, one_line
from data.images import ImageLimits, TiledImage, load_image
from generation.decoding import GenerationOptions
from generation.prefix import FeatureCache
from generation.session import Session
from inference.checkpoint import Checkpoint, RequestError
from inference.conversation import Conversation
from inference.errors import user_errors
from web.guard import FOR_PROGRAMS
from web.models import Models

AT_ONCE = 8  # generators in work
BURST = 0.02  # seconds of work before it is the next one's turn
REDRAW = 0.1  # an answer is shown anew at most this often
ALIVE = 1.0  # while nothing happens, a view is given this often: it fails where the visitor has gone
DRAFT = -1  # in place of the number of an answer: a piece of the draft
STOPPED = "Stopped before the first word."


@dataclass(frozen=True)
class ServiceLimits:
    """What visitors may take.

    max_file_bytes, max_pixels: of one image. max_images: in one question. max_characters: of one question.
    max_answers, max_new_tokens: of one request. max_turns: kept of a conversation, the latest.
    max_uploaded_bytes: kept of all visitors together.
    max_visitors: remembered without an open page. max_open: open pages.
    max_kept_bytes: of caches and images that wait for their visitors' next questions.
    """

    max_file_bytes: int = 10 * 2**20
    max_pixels: int = 24_000_000
    max_images: int = 8
    max_characters: int = 4_000
    max_answers: int = 8
    max_new_tokens: int = 1_024
    max_turns: int = 50
    max_uploaded_bytes: int = 2**30
    max_visitors: int = 100
    max_open: int = 500
    max_kept_bytes: int = 512 * 2**20


@dataclass(frozen=True)
class AskRequest:
    """A question to a model. The numbers come from a browser, or from a program that pretends to be one.

    images: uploaded files on this machine.
    seed: None draws one.
    remember: whether earlier questions about the same images stand before this one.
    draft: whether a single answer may be drafted from the whole image while its tiles are encoded.
    """

    images: tuple[str, ...]
    question: str
    model: str
    answers: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_new_tokens: int = 256
    seed: int | None = None
    remember: bool = False
    draft: bool = False

    def options(self, limits: ServiceLimits) -> GenerationOptions:
        """The options of the answer. Raises RequestError."""
        for name, most in (("answers", limits.max_answers), ("max_new_tokens", limits.max_new_tokens)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise RequestError(f"{name}: expected a whole number from 1 to {most}, got {str(value)[:40]}")
        shared = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")
        seed = secrets.randbelow(2**31) if self.seed is None else self.seed
        try:
            return GenerationOptions(
                **{name: getattr(self, name) for name in shared},
                num_return_sequences=self.answers,
                confidence=True,
                seed=seed,
            )
        except ValueError as error:
            raise RequestError(str(error)) from error


@dataclass(eq=False)
class Exchange:
    """A question and its answers as a page shows them.

    images: those that the question before did not have.
    stop_reasons: of each answer, once all have ended: stop, length, context or stopped.
    stats: see `TurnReply.finish`; "first_words" is the time from the question to them, in seconds, and
        "drafted_words" that to the draft's.
    draft: what is shown until an answer begins.
    """

    request: AskRequest
    images: tuple[str, ...]
    answers: list[str]
    stop_reasons: list[str] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    draft: str = ""


@dataclass(frozen=True)
class View:
    """What a page shows at one moment.

    notice: a sentence on an error (`failed`) or on what the visitor waits for, or "".
    busy: an answer is being made.
    returned: a request that was not answered, or was taken back.
    """

    log: list[Exchange]
    notice: str = ""
    failed: bool = False
    busy: bool = False
    returned: AskRequest | None = None


class Visitor:
    """One open page: its conversation, and the lock that whoever works for it holds."""

    def __init__(self) -> None:
        self.log: list[Exchange] = []
        self.conversation: Conversation | None = None  # of the models' thread, while that works on it
        self.busy = asyncio.Lock()
        self.request: AskRequest | None = None  # the one in work
        self.turn: asyncio.Task | None = None  # done when a place among those in work is free
        self.cancelled = self.gone = False

    @property
    def images(self) -> tuple[str, ...]:
        """The images that the last question was about."""
        return self.log[-1].request.images if self.log else ()

    @property
    def kept_bytes(self) -> int:
        """Memory that is kept between questions: the cache, and images cut into tiles."""
        if (kept := self.conversation) is None:
            return 0
        tiles = [image.tiles for turn in kept.turns for image in turn.images]
        return kept.session.kv_cache_bytes + sum(tile.nbytes for tile in tiles)

    def cancel(self) -> None:
        """End the work in progress at its next step."""
        self.cancelled = True
        if self.turn is not None:
            self.turn.cancel()


class Service:
    """See the module's docstring."""

    def __init__(self, models: Models, limits: ServiceLimits | None = None):
        self.models, self.limits = models, limits or ServiceLimits()
        models.closed = self.close_model
        self._image_limits = ImageLimits(
            max_bytes=self.limits.max_file_bytes,
            max_pixels=self.limits.max_pixels,
            allow_urls=False,
            allow_paths=False,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="models")
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._waiting: list[asyncio.Task] = []
        self._closed = False
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()  # the latest to ask stands last
        self._open: Counter[str] = Counter()  # connections of open pages, by session
        self._features: dict[int, FeatureCache] = {}  # by id of the model

    def close(self) -> None:
        """End all work at its next step."""
        self._closed = True
        self._thread.shutdown(wait=False)

    # ---------------------------------------------------------------------------------------- the queue

    async def run(
        self, visitor: Visitor, steps: Generator[Any, None, None]
    ) -> AsyncGenerator[tuple[list, int], None]:
        """What `steps` yields except None, in lists to be shown at once, with the place in the queue: ([], 3)
        while it waits. It ends early when the visitor cancels.

        `steps` runs, and is closed, in the models' thread.
        """
        work = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        turn = visitor.turn = asyncio.create_task(self._slots.acquire())
        self._waiting.append(turn)
        try:
            pause = BURST
            while not visitor.cancelled and not (await asyncio.wait({turn}, timeout=pause))[0]:
                yield [], self._waiting.index(turn) + 1
                pause = ALIVE
            self._waiting.remove(turn)
            yield [], 0
            pieces: list[Any] = []
            drawn, more = 0.0, True
            while more and not visitor.cancelled and not self._closed:
                burst = work(self._burst, visitor, steps)
                while not (await asyncio.wait({burst}, timeout=ALIVE))[0]:  # so may the others' be
                    yield [], 0
                new, more = burst.result()
                pieces += new
                if pieces and time.monotonic() - drawn > REDRAW:
                    yield pieces, 0
                    pieces, drawn = [], time.monotonic()
            if pieces:
                yield pieces, 0
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)
            if not self._closed:  # one thread: whatever it still does for these steps comes before this
                await work(steps.close)
            if turn.done() and not turn.cancelled():
                self._slots.release()
            else:
                turn.cancel()

    def _burst(self, visitor: Visitor, steps: Generator[Any, None, None]) -> tuple[list, bool]:
        """Steps for a moment: what they gave, and whether there are more."""
        pieces: list[Any] = []
        end = time.monotonic() + BURST
        while not visitor.cancelled:
            try:
                piece = next(steps)
            except StopIteration:
                return pieces, False
            if piece is not None:
                pieces.append(piece)
            if time.monotonic() > end or self._closed:
                break
        return pieces, True

    # ---------------------------------------------------------------------------------------- questions

    def check(self, request: AskRequest) -> GenerationOptions:
        """Refuse what can be refused without a model. Raises one of `user_errors`."""
        most, images = self.limits.max_characters, self.limits.max_images
        self.models.check(request.model)
        if not request.question.strip():
            raise PromptError("Type a question first: the field is empty.")
        if (length := len(request.question)) > most:
            raise PromptError(f"question: expected at most {most:,} characters, got {length:,}")
        if (count := len(request.images)) > images:
            raise ImageError(f"images: expected at most {images} at once, got {count}; remove some of them")
        return request.options(self.limits)

    def load(self, path: str) -> Image.Image:
        """An uploaded image, within the limits of the service."""
        name = Path(path).name
        try:
            with open(path, "rb") as file:
                return load_image(file, self._image_limits, name=repr(name))
        except FileNotFoundError:
            raise ImageError(f"{name!r} is no longer kept here: add it again") from None

    async def ask(self, visitor: Visitor, request: AskRequest) -> AsyncGenerator[View, None]:
        """Answer a question. The visitor's next question ends the answer, as does closing the iteration."""
        began, checkpoint = time.perf_counter(), None
        visitor.cancel()
        try:
            async with visitor.busy:
                visitor.cancelled, visitor.request = False, request
                try:
                    options = self.check(request)
                    checkpoint = self.models.held(request.model)
                    if checkpoint is None:
                        yield View(visitor.log, f"Opening {request.model} …", busy=True)
                        checkpoint = await asyncio.to_thread(self.models.open, request.model)
                    new = () if visitor.log and request.images == visitor.images else request.images
                    exchange = Exchange(request, new, [""] * request.answers)
                    steps = self._steps(visitor, exchange, checkpoint, options, began)
                    async with aclosing(self._answer(visitor, exchange, steps)) as views:
                        async for view in views:
                            yield view
                except Exception as error:  # the service goes on in any case
                    yield View(visitor.log, user_message(error), failed=True, returned=request)
                finally:
                    visitor.request = None
        finally:
            self._release(visitor, checkpoint)

    async def _answer(
        self, visitor: Visitor, exchange: Exchange, steps: Generator
    ) -> AsyncGenerator[View, None]:
        """The question and its answers as they grow. An answer without a word does not stay."""
        visitor.log.append(exchange)
        del visitor.log[: -self.limits.max_turns]
        try:
            async with aclosing(self.run(visitor, steps)) as bursts:
                async for pieces, place in bursts:
                    for number, piece in pieces:
                        if number == DRAFT:
                            exchange.draft += piece
                        else:
                            exchange.answers[number] += piece
                    yield View(visitor.log, queue_notice(place), busy=True)
        finally:
            exchange.stop_reasons = exchange.stats.get("stop_reasons", [])
            if not exchange.stop_reasons and exchange in visitor.log:
                visitor.log.remove(exchange)
        kept = exchange in visitor.log
        yield View(visitor.log) if kept else View(visitor.log, STOPPED, returned=exchange.request)

    def _steps(
        self,
        visitor: Visitor,
        exchange: Exchange,
        checkpoint: Checkpoint,
        options: GenerationOptions,
        began: float,
    ) -> Generator[tuple[int, str] | None, None, None]:
        """In the models' thread: open the images, one a step, then answer."""
        request, before, stats = exchange.request, visitor.conversation, exchange.stats
        images: list[TiledImage] = []
        if before is not None and before.checkpoint is not checkpoint:
            before = None
        if before is not None and before.turns and request.remember and not exchange.images:
            conversation = before
        else:
            session = self._session(checkpoint) if before is None else before.session
            conversation = Conversation(checkpoint, session=session)
            if before is not None and before.turns and not exchange.images:  # the last question's
                images += before.turns[0].images
            else:
                for image in request.images:
                    images.append(conversation.image(self.load(image)))
                    yield None
        visitor.conversation = conversation
        draft = request.draft and request.answers == 1
        with conversation.send(request.question, images, options, draft) as reply:
            try:
                for piece in reply.draft():
                    if piece:
                        stats.setdefault("drafted_words", time.perf_counter() - began)
                    yield (DRAFT, piece) if piece else None
                for number, piece in reply.steps():
                    if piece:
                        stats.setdefault("first_words", time.perf_counter() - began)
                    yield (number, piece) if piece else None
            finally:
                reply.close()
                if reply.kept:
                    stats |= reply.finish() | {"sampled": not options.greedy, "seed": options.seed}

    def _session(self, checkpoint: Checkpoint) -> Session:
        key = id(checkpoint.model)
        if key not in self._features:
            self._features[key] = FeatureCache(checkpoint.model)
        return Session(checkpoint.model, self._features[key])

    async def undo(self, visitor: Visitor) -> View:
        """Take the last question back, which may be the one in work."""
        in_work = visitor.request
        visitor.cancel()
        async with visitor.busy:
            if in_work is not None and (not visitor.log or visitor.log[-1].request is not in_work):
                return View(visitor.log, returned=in_work)  # it had no answer yet: it is out of the log
            if not visitor.log:
                return View([], "There is nothing to undo.", failed=True)
            taken = visitor.log.pop()
            if visitor.conversation is not None and visitor.conversation.turns:
                visitor.conversation.undo()
            return View(visitor.log, returned=taken.request)

    async def clear(self, visitor: Visitor) -> View:
        """Forget the conversation."""
        visitor.cancel()
        async with visitor.busy:
            visitor.log.clear()
            visitor.conversation = None
            return View(visitor.log)

    # ----------------------------------------------------------------------------------------- visitors

    @property
    def kept_bytes(self) -> int:
        """Memory that is kept for all visitors' next questions."""
        return sum(visitor.kept_bytes for visitor in list(self._visitors.values()))

    def visitor(self, session: str) -> Visitor:
        """The visitor of a session, now the latest to ask. Of those without an open page, the first to have
        asked are forgotten: anybody can invent sessions."""
        visitor = self._visitors.setdefault(session, Visitor())
        self._visitors.move_to_end(session)
        closed = {key: other for key, other in self._visitors.items() if key not in self._open}
        idle = [key for key, other in closed.items() if key != session and not other.busy.locked()]
        for key in idle[: max(0, len(closed) - self.limits.max_visitors)]:
            del self._visitors[key]
        return visitor

    @contextmanager
    def connected(self, session: str) -> Iterator[None]:
        """A page of the session is open. At the end of the last one its answer ends, and its memory is free.

        Raises RequestError where too many pages are open."""
        if self._open.total() >= self.limits.max_open:
            raise RequestError("too many pages are open here just now: try again in a moment")
        self._open[session] += 1
        try:
            yield
        finally:
            self._open[session] -= 1
            if not self._open[session]:
                del self._open[session]
                if (visitor := self._visitors.pop(session, None)) is not None:
                    visitor.gone = True
                    visitor.cancel()
                    if not visitor.busy.locked():
                        visitor.conversation = None

    def _release(self, visitor: Visitor, checkpoint: Checkpoint | None) -> None:
        """After a question: forget who has left, a model that is kept no longer, and what is too much."""
        if visitor.gone:
            visitor.conversation = None
        if checkpoint is not None and not self.models.holds(checkpoint):
            self._features.pop(id(checkpoint.model), None)
        self._trim()

    def close_model(self, checkpoint: Checkpoint) -> None:
        """Let go of all that holds a model that was dropped, except answers in work."""
        self._features.pop(id(checkpoint.model), None)
        self._trim()

    def _trim(self) -> None:
        """Forget conversations with dropped models, and others beyond `max_kept_bytes`: those without an open
        page first, then the first to have asked."""
        total = self.kept_bytes
        for _, visitor in sorted(list(self._visitors.items()), key=lambda known: known[0] in self._open):
            kept = visitor.conversation
            if kept is None or visitor.busy.locked():
                continue
            if total > self.limits.max_kept_bytes or not self.models.holds(kept.checkpoint):
                total -= visitor.kept_bytes
                visitor.conversation = None


def queue_notice(place: int) -> str:
    return f"Many are asking just now: you are number {place} in the queue." if place else ""


def user_message(error: Exception) -> str:
    """An error in one sentence. Visitors do not read about our own faults, whose traceback goes to the
    terminal, nor about limits that only a program can change."""
    if isinstance(error, OutOfMemoryError | MemoryError):
        return "There is not enough memory: ask for fewer or shorter answers, or use smaller images."
    if isinstance(error, OSError) or not isinstance(error, user_errors()):
        traceback.print_exception(error)
        return "Something went wrong on the server. Other visitors are not affected; please ask again."
    return FOR_PROGRAMS.sub("", one_line(error))
